"""A run in two real processes, which meet over loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import script_runner

from mdlm_jax import checkpoints, processes
from mdlm_jax.models import placement

TRAIN = script_runner.ROOT / 'scripts' / 'train.py'
CONFIG = script_runner.ROOT / 'configs' / 'tiny.py'
STEPS = 400
CHANGES = {
  'steps': STEPS,
  'log_every': 1,
  'checkpoint_every': 100,
  'data.length': 16,
  'data.batch_size': 8,
  'model.num_layers': 1,
}


def start(workdir, *arguments):
  return subprocess.Popen(
    [
      *(sys.executable, TRAIN, f'--config={CONFIG}', f'--workdir={workdir}'),
      *(f'--config.{name}={value}' for name, value in CHANGES.items()),
      *arguments,
    ],
    env={**os.environ, 'PYTHONPATH': str(script_runner.ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def lines(workdir):
  content = (workdir / 'metrics.jsonl').read_text()
  return [json.loads(line) for line in content.splitlines()]


def free_port():
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


def test_two_processes_train_stop_together_and_one_goes_on(tmp_path):
  one, two = tmp_path / 'one', tmp_path / 'two'
  # The state is split over the two, and the one restores all of it.
  mesh = '--config.mesh.data=1', '--config.mesh.fsdp=2'
  address = f'--coordinator_address=127.0.0.1:{free_port()}'
  pair = [
    start(
      *(two, *mesh, '--distributed', address, '--num_processes=2'),
      f'--process_id={i}',
    )
    for i in range(2)
  ]
  try:
    while not (two / 'metrics.jsonl').exists() or len(lines(two)) < 6:
      assert all(process.poll() is None for process in pair)
      time.sleep(0.05)
    # Only one of them is told to stop, and it is not the one that writes.
    pair[1].send_signal(signal.SIGTERM)
    out, err = zip(*(process.communicate(timeout=60) for process in pair))
  finally:
    for process in pair:
      process.kill()
  assert [process.returncode for process in pair] == [0, 0], err
  step = len(lines(two))
  assert 6 <= step < STEPS
  assert f'stopped at step {step}; the same command resumes\n' in out[0]
  assert 'on 2 device(s)' in out[0] and 'step' not in out[1]
  assert checkpoints.latest_step(two / 'checkpoints') == step

  # One process goes on where two stopped, beside a run of one alone.
  alone = [start(workdir) for workdir in (one, two)]
  out, err = zip(*(process.communicate(timeout=120) for process in alone))
  assert [process.returncode for process in alone] == [0, 0], err
  assert f'resuming {two} at step {step}\n' in out[1]
  first, second = lines(one), lines(two)
  assert [line['step'] for line in second] == list(range(1, STEPS + 1))
  np.testing.assert_allclose(
    *([line['loss'] for line in rows[:5]] for rows in (first, second)),
    rtol=1e-5,
  )
  # Which rows have no mask depends on their times and masks alone: the same
  # ones, whatever the number of processes and across the restart.
  for name in ('empty_rows', 'count'):
    assert [line[name] for line in first] == [line[name] for line in second]
  assert len({line['empty_rows'] for line in first}) > 2


def test_processes_that_do_not_meet_are_an_error():
  with pytest.raises(ValueError, match='the processes did not meet'):
    processes.start('127.0.0.1:1')


def test_flags_of_several_processes_need_each_other(tmp_path):
  process = start(tmp_path / 'run', '--num_processes=2')
  _, err = process.communicate(timeout=60)
  assert process.returncode == 2
  assert err.startswith('error: --coordinator_address, --num_processes and')
  assert not (tmp_path / 'run').exists()


def test_the_flag_of_one_process():
  assert processes.is_first()
  assert processes.flags(placement.mesh(1, 1, 1), True).tolist() == [True]


def test_what_nobody_reads_any_longer_is_no_error(monkeypatch):
  reader, writer = os.pipe()
  os.close(reader)
  with os.fdopen(writer, 'w') as stream:
    monkeypatch.setattr(sys, 'stdout', stream)
    processes.say('one')
    processes.say('two')
