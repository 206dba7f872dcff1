import json
import os
import struct
import sys

import checkpoints_test
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from mdlm_jax import run_config, run_log
from mdlm_jax.losses import Total
from mdlm_jax.run_log import RunLog
from mdlm_jax.training import Metrics


def metrics(loss, *, skipped=False, count=10.0):
  """Of a step whose every measure has the mean `loss`."""
  one = np.float32(1)
  if skipped:
    nothing = Total(np.float32(0), np.float32(0))
    return Metrics(*[nothing] * 6, Total(one, one))
  total = Total(np.float32(loss * count), np.float32(count))
  return Metrics(*[total] * 6, Total(np.float32(0), one))


def config(**changes):
  config = run_config.defaults()
  config.update_from_flattened_dict({'log_every': 2, 'steps': 100} | changes)
  return config


def opened(workdir, start=0, saved=None, **changes):
  return RunLog(
    workdir, config(**changes), start, saved, lambda step: [step, 7]
  )


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_the_mean_over_all_that_was_counted(tmp_path):
  with opened(tmp_path) as log:
    log.record(1, metrics(1.0, count=10))
    log.record(2, metrics(4.0, count=30))
    log.record(3, metrics(9.0))
  (line,) = lines(tmp_path / 'metrics.jsonl')
  assert (line['step'], line['sum'], line['count']) == (2, 130, 40)
  assert line['loss'] == line['bound'] == line['gradient_norm'] == 130 / 40
  assert line['skipped'] == 0
  assert line['tokens_per_second'] > 0


def test_the_last_step_has_a_line(tmp_path):
  with opened(tmp_path, steps=3) as log:
    for step in (1, 2, 3):
      log.record(step, metrics(step))
  assert [x['step'] for x in lines(tmp_path / 'metrics.jsonl')] == [2, 3]


def test_a_log_that_goes_on_has_no_gap_and_nothing_twice(tmp_path):
  with opened(tmp_path / 'unbroken') as log:
    for step in range(1, 9):
      log.record(step, metrics(step))
  with opened(tmp_path / 'broken') as log:
    for step in range(1, 7):
      if step == 4:
        saved = json.loads(json.dumps(log.state()))
      log.record(step, metrics(step))
  with (tmp_path / 'broken' / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 8, "lo')  # Killed while it wrote.
  with opened(tmp_path / 'broken', 3, saved) as log:
    for step in range(4, 9):
      log.record(step, metrics(step))
  unbroken, broken = (
    [
      {k: v for k, v in line.items() if k != 'tokens_per_second'}
      for line in lines(tmp_path / name / 'metrics.jsonl')
    ]
    for name in ('unbroken', 'broken')
  )
  assert [line['step'] for line in broken] == [2, 4, 6, 8]
  assert broken == unbroken


def test_a_spike_is_named_with_its_rows_once_there_are_steps_to_compare(
  tmp_path, capsys
):
  rng = np.random.default_rng(0)
  with opened(tmp_path) as log:
    log.record(1, metrics(50.0))  # Nothing to compare it with.
    for step in range(2, 150):
      log.record(step, metrics(3 + rng.normal() / 10))
    assert lines(tmp_path / 'incidents.jsonl') == []
    log.record(150, metrics(5.0))
  (line,) = lines(tmp_path / 'incidents.jsonl')
  assert (line['step'], line['incident']) == (150, 'spike')
  assert line['rows'] == [150, 7]
  # The mean of 100 normal numbers: five standard errors are 0.05.
  assert abs(line['usual_loss'] - 3) < 0.05
  assert abs(line['usual_deviation'] - 0.1) < 0.04
  assert 'step 150: its loss is 5' in capsys.readouterr().err


def test_skipped_steps_in_a_row_are_counted_across_a_restart(tmp_path, capsys):
  with opened(tmp_path) as log:
    for step, skipped in enumerate([True, False, True, True], 1):
      log.record(step, metrics(1.0, skipped=skipped))
    assert log.skipped_in_a_row == 2
    saved = json.loads(json.dumps(log.state()))
  with opened(tmp_path, 4, saved) as log:
    log.record(5, metrics(1.0, skipped=True))
    assert log.skipped_in_a_row == 3
    log.record(6, metrics(1.0))
    assert log.skipped_in_a_row == 0
  assert [
    (x['step'], x['incident']) for x in lines(tmp_path / 'incidents.jsonl')
  ] == [(step, 'skipped') for step in (1, 3, 4, 5)]
  rows = lines(tmp_path / 'metrics.jsonl')
  assert [row['skipped'] for row in rows] == [0.5, 1.0, 0.5]
  # A step that was skipped is in no mean; none at all is 0 of 0.
  assert [row['loss'] for row in rows] == [1.0, 0.0, 1.0]
  assert 'step 5: its gradient is not finite' in capsys.readouterr().err


def test_an_incident_that_nobody_reads_of_is_written(tmp_path, monkeypatch):
  reader, writer = os.pipe()
  os.close(reader)
  with (
    opened(tmp_path) as log,
    os.fdopen(writer, 'w', buffering=1) as stream,
    monkeypatch.context() as patch,
  ):
    patch.setattr(sys, 'stderr', stream)
    log.record(1, metrics(1.0, skipped=True))
    os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
  assert len(lines(tmp_path / 'incidents.jsonl')) == 1


def test_only_the_writer_writes(tmp_path):
  log = RunLog(
    tmp_path / 'run', config(), 0, None, lambda step: [], is_writer=False
  )
  with log:
    log.record(1, metrics(1.0, skipped=True))
    log.record(2, metrics(1.0, skipped=True))
  assert log.skipped_in_a_row == 2
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('name', ['metrics', 'incidents'])
def test_lines_after_the_checkpoint_are_dropped(tmp_path, name):
  path = tmp_path / f'{name}.jsonl'
  damaged = f'[]\n{{"step": "1"}}\n{{"step": null}}\n{"[" * 100_000}\n'
  path.write_text('{"step": 1}\n{"step": 4}\n' + damaged + '{"step": 2}\n')
  with opened(tmp_path, 2):
    pass
  assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_full_disk_is_told_at_once_and_keeps_nobody_waiting(tmp_path):
  with (
    pytest.raises(OSError) as error,
    checkpoints_test.largest_file(2000),
    opened(tmp_path, log_every=1) as log,
  ):
    for step in range(1, 100):
      log.record(step, metrics(1.0))
  assert str(error.value) == (
    f'{tmp_path / "metrics.jsonl"} could not be written: File too large'
  )
  # What was whole stays, and the log goes on after it.
  with opened(tmp_path, log_every=1, start=2) as log:
    log.record(3, metrics(1.0))
  steps = [x['step'] for x in lines(tmp_path / 'metrics.jsonl')]
  assert steps == [1, 2, 3]


def test_tensorboard_reads_the_lines(tmp_path):
  with opened(tmp_path, start=4, log_every=1) as log:
    log.record(5, metrics(2.0))
  (path,) = tmp_path.glob('events.out.tfevents.*')
  data, events = path.read_bytes(), []
  while data:
    (size,) = struct.unpack('Q', data[:8])
    events.append(Event.FromString(data[12 : 12 + size]))
    data = data[16 + size :]
  # What an earlier session wrote from step 5 on is forgotten.
  assert events[1].step == 5
  assert events[1].session_log.status == SessionLog.START
  (line,) = lines(tmp_path / 'metrics.jsonl')
  values = {x.tag: x.simple_value for x in events[2].summary.value}
  assert events[2].step == line.pop('step') == 5
  np.testing.assert_allclose(
    [values[name] for name in line], list(line.values()), rtol=1e-6
  )
  assert values.keys() == line.keys()


def test_speed_is_of_the_steps_of_this_session(tmp_path, monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(run_log.time, 'monotonic', lambda: clock[0])
  with opened(tmp_path, log_every=4) as log:
    for step in (1, 2, 3):
      log.record(step, metrics(1.0))
    saved = json.loads(json.dumps(log.state()))
  with opened(tmp_path, 3, saved, log_every=4) as log:
    for step in range(4, 9):
      clock[0] += 2
      log.record(step, metrics(1.0))
  # 10 tokens in each 2 seconds, though the first line tells of 4 steps.
  speeds = [x['tokens_per_second'] for x in lines(tmp_path / 'metrics.jsonl')]
  assert speeds == [5.0, 5.0]
