"""Training runs that are killed, stopped, damaged and fed bad gradients."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import checkpoints_test
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import checkpoints
from mdlm_jax.models import directory

ROOT = pathlib.Path(__file__).parents[1]


def environment(base):
  """Of sessions that share what was compiled."""
  return os.environ | {
    'PYTHONPATH': str(ROOT),
    'JAX_COMPILATION_CACHE_DIR': str(base / 'compiled'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
  }


class Session:
  """One start of the run, in a process of its own or as one of several."""

  def __init__(self, base, workdir, *options, index=0):
    self.workdir, self.marker = workdir, base / f'marker_{index}'
    self.marker.unlink(missing_ok=True)
    self.record_ids = f'record_ids_{index}.jsonl'
    self._before = len(lines(workdir / self.record_ids))
    self._output = base / f'output_{index}'
    with self._output.open('w') as output:
      self.process = subprocess.Popen(
        [sys.executable, ROOT / 'tests' / 'survival_run.py']
        + [f'--workdir={workdir}', f'--text={base / "text.txt"}']
        + [f'--marker={self.marker}', *options],
        env=environment(base),
        stdout=output,
        stderr=subprocess.STDOUT,
      )

  def steps(self):
    """Row numbers of the batches taken since the start, step by step."""
    return lines(self.workdir / self.record_ids)[self._before :]

  def output(self):
    return self._output.read_text()

  def first_step(self):
    """The last step that was done before the session."""
    _, found, rest = self.output().partition(
      f'resuming {self.workdir} at step '
    )
    return int(rest.split()[0]) if found else 0

  def wait_until(self, is_reached, seconds=120):
    """Whether it came to be before the process ended."""
    end = time.monotonic() + seconds
    while not is_reached():
      assert time.monotonic() < end, self.output()
      if self.process.poll() is not None:
        return False
      time.sleep(0.005)
    return True

  def kill(self, kind=signal.SIGKILL):
    self.process.send_signal(kind)
    return self.process.wait(60)

  def result(self, seconds=120):
    """The exit code, and what it wrote."""
    code = self.process.wait(seconds)
    return code, self.output()


def lines(path):
  if not path.exists():
    return []
  # The last one may be half written.
  return [json.loads(x) for x in path.read_text().split('\n')[:-1]]


def write_text(base):
  words = random.Random(0).choices(['red ', 'blue ', 'green\n', 'the '], k=900)
  (base / 'text.txt').write_text(''.join(words))


def assert_steps_are_those_of(session, unbroken):
  """Its batches were the ones that follow the step it went on from."""
  seen, first = session.steps(), session.first_step()
  expected = lines(unbroken / 'record_ids_0.jsonl')
  assert seen == expected[first : first + len(seen)]


def assert_equal_runs(workdir, unbroken):
  """All that two finished runs leave, but for speed."""
  for name in ('metrics.jsonl', 'incidents.jsonl'):
    rows, expected = (lines(path / name) for path in (workdir, unbroken))
    for row in (*rows, *expected):
      row.pop('tokens_per_second', None)
    assert rows == expected, name
  states, runs = [], []
  for path in (workdir, unbroken):
    saves = path / 'checkpoints'
    states.append(flat(checkpoints.latest_state(saves)))
    content = saves / str(checkpoints.latest_step(saves)) / 'run' / 'data.json'
    runs.append(json.loads(content.read_text()))
  assert states[0].keys() == states[1].keys()
  parts = {key.split('/')[0] for key in states[0]}
  assert {'step', 'params', 'ema', 'opt_state'} <= parts
  for key, array in states[0].items():
    np.testing.assert_array_equal(array, states[1][key], err_msg=key)
  for run in runs:
    del run['settings']['train_seconds'], run['sha256']
  assert runs[0] == runs[1]
  assert (workdir / 'model' / 'model.safetensors').read_bytes() == (
    unbroken / 'model' / 'model.safetensors'
  ).read_bytes()


def flat(tree, prefix=''):
  if isinstance(tree, list | tuple):
    tree = dict(enumerate(tree))
  if not isinstance(tree, dict):
    return {} if tree is None else {prefix: np.asarray(tree)}
  leaves = {}
  for key, value in tree.items():
    leaves |= flat(value, f'{prefix}/{key}' if prefix else str(key))
  return leaves


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  """Where a text, the compiled programs and an unbroken run are."""
  path = tmp_path_factory.mktemp('survival')
  write_text(path)
  code, output = Session(path, path / 'unbroken').result()
  assert code == 0, output
  rows = lines(path / 'unbroken' / 'metrics.jsonl')
  assert [row['step'] for row in rows] == [*range(4, 42, 4), 42]
  return path


def test_a_run_killed_stopped_and_damaged_equals_an_unbroken_one(base):
  workdir, unbroken = base / 'killed', base / 'unbroken'
  saved = workdir / 'checkpoints'
  # Where it is killed, how many saves it makes before, where it goes on.
  for point, passes, goes_on in (
    ('between files', 1, 0),
    ('before the commit', 1, 6),
    ('during the removal', 1, 12),
    ('during the export', 0, 24),
  ):
    session = Session(base, workdir, f'--hold={point}', f'--passes={passes}')
    assert session.wait_until(session.marker.exists), session.output()
    assert session.kill() == -signal.SIGKILL
    assert session.first_step() == goes_on
    assert_steps_are_those_of(session, unbroken)

  # At a moment that nothing marks, amid the steps from 30 on.
  session = Session(base, workdir, '--step_seconds=0.2')
  assert session.wait_until(lambda: len(session.steps()) >= 3)
  assert session.kill() == -signal.SIGKILL
  assert session.first_step() == 30
  assert_steps_are_those_of(session, unbroken)

  # Stopped, as where a machine is taken away: saved within seconds.
  session = Session(base, workdir, '--step_seconds=0.2')
  assert session.wait_until(lambda: len(session.steps()) >= 2)
  begin = time.monotonic()
  assert session.kill(signal.SIGTERM) == 0
  assert time.monotonic() - begin < 10
  assert_steps_are_those_of(session, unbroken)
  step = session.first_step() + len(session.steps())
  assert f'stopped at step {step}; the same command' in session.output()
  assert 30 < step < 42
  assert checkpoints.latest_step(saved) == step
  directory.load(workdir / 'model')
  assert not (workdir / 'evaluation.json').exists()

  # And that checkpoint damaged on the disk.
  for file in (saved / str(step) / 'state').rglob('d/*'):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
  session = Session(base, workdir)
  code, output = session.result()
  assert code == 0
  assert f'checkpoint {step} is damaged' in output
  assert 30 <= session.first_step() < step
  assert_steps_are_those_of(session, unbroken)
  assert_equal_runs(workdir, unbroken)


def test_bad_gradients_are_skipped_counted_and_end_the_run(base):
  workdir = base / 'poisoned'
  options = ('--steps=12', '--poisoned=5,7')
  code, output = Session(base, workdir, *options).result()
  assert code == 2
  assert output.endswith(
    'error: training diverged: no gradient of the 3 steps up to 7 was finite; '
    'the parameters before them are saved; try a lower learning rate\n'
  )
  state = flat(checkpoints.latest_state(workdir / 'checkpoints'))
  assert (state['step'], state['skipped']) == (8, 3)
  assert all(np.isfinite(array).all() for array in state.values())
  model = directory.load(workdir / 'model')
  assert all(np.isfinite(x).all() for x in flat(model.params).values())
  before = lines(workdir / 'record_ids_0.jsonl')

  # The same command goes on, after the step that was made before step 7 was
  # looked at; now only two steps in a row are bad.
  session = Session(base, workdir, '--steps=12', '--poisoned=2,3')
  code, output = session.result()
  assert code == 0, output
  assert session.first_step() == 8
  rows = {row['step']: row for row in lines(workdir / 'metrics.jsonl')}
  assert {step: row['skipped'] for step, row in rows.items()} == {
    4: 0.0,
    8: 0.75,
    12: 0.5,
  }
  assert (rows[8]['count'], rows[12]['count']) == (8 * 16, 2 * 8 * 16)
  incidents = lines(workdir / 'incidents.jsonl')
  record_ids = before[:8] + session.steps()
  assert [(x['step'], x['incident'], x['rows']) for x in incidents] == [
    (step, 'skipped', record_ids[step - 1]) for step in (5, 6, 7, 10, 11)
  ]


def test_without_room_the_model_before_stays(tmp_path):
  model = directory.load(directory.find())

  def save(params):
    directory.save(tmp_path, model.config, params, model.vocab, model.tokenizer)

  save(model.params)
  ones = jax.tree.map(jnp.ones_like, model.params)
  with (
    pytest.raises(OSError) as error,
    checkpoints_test.largest_file(100_000),
  ):
    save(ones)
  assert str(error.value) == (
    f'{tmp_path / "model.safetensors"} could not be written: File too large'
  )
  assert not list(tmp_path.glob('*.tmp'))
  jax.tree.map(
    np.testing.assert_array_equal,
    directory.load(tmp_path).params,
    model.params,
  )
