import contextlib
import errno
import json
import os
import pathlib
import resource
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mdlm_jax import checkpoints, training
from mdlm_jax.data.batches import batches
from mdlm_jax.data.windows import every_window

# Threads of Orbax that read a damaged file end after the call has.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)

SETTINGS = {'config': {'steps': 3, 'nested': {'a': 1.5}}, 'tokenizer': 'é' * 9}


ROOT = pathlib.Path(__file__).parents[1]


def make_state(num_layers=3, width=4, fill=1.0):
  params = {
    'embedding': jnp.full((5, width), fill),
    'blocks': {'kernel': jnp.full((num_layers, width, width), fill)},
  }
  return training.init_state(params, optax.adam(1e-3))


def make_iterator(local=None):
  windows = every_window([np.arange(66)], length=3, pad_id=99)
  return batches(windows, batch_size=8, seed=0, local=local)


def save(directory, state, iterator=None, **options):
  iterator = iterator or make_iterator()
  checkpoints.save(directory, state, iterator, SETTINGS, **options)


def assert_trees_equal(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_everything_comes_back(tmp_path):
  state = make_state(fill=0.1)._replace(step=jnp.int32(7))
  unbroken, iterator = make_iterator(), make_iterator()
  batches = [next(unbroken)['ids'] for _ in range(8)]
  for _ in range(3):
    next(iterator)
  save(tmp_path / 'a', state, iterator)

  assert checkpoints.latest_step(tmp_path / 'a') == 7
  assert checkpoints.latest_settings(tmp_path / 'a') == SETTINGS
  restarted = make_iterator()
  restored = checkpoints.restore(
    tmp_path / 'a', make_state(fill=0.0), restarted
  )
  assert_trees_equal(restored, state)
  rest = [next(restarted)['ids'] for _ in range(5)]
  np.testing.assert_array_equal(rest, batches[3:])


def test_arrays_of_every_type_come_back(tmp_path):
  values = np.random.default_rng(0).normal(size=(2, 3, 5))
  kinds = ['bool', 'int8', 'uint16', 'bfloat16', 'float16', 'uint32', 'int32']
  extra = {kind: jnp.asarray(values * 9, kind) for kind in kinds}
  extra['nan'] = jnp.asarray([jnp.nan, -jnp.nan, jnp.inf, -0.0])
  state = make_state()._replace(opt_state=extra)
  save(tmp_path, state)
  zeros = jax.tree.map(jnp.zeros_like, state)
  assert_trees_equal(
    checkpoints.restore(tmp_path, zeros, make_iterator()), state
  )
  fields = checkpoints.latest_state(tmp_path)
  assert_trees_equal(fields['opt_state'], extra)


def test_no_checkpoint_yet(tmp_path):
  assert checkpoints.latest_step(tmp_path / 'none') is None
  with pytest.raises(ValueError, match='no whole checkpoint'):
    checkpoints.restore(tmp_path / 'none', make_state(), make_iterator())


def test_latest_ones_are_kept(tmp_path):
  for step in (1, 2, 2, 5):
    state = make_state(fill=float(step))._replace(step=jnp.int32(step))
    checkpoints.save(tmp_path, state, make_iterator(), SETTINGS)
  restored = checkpoints.restore(tmp_path, make_state(), make_iterator())
  assert restored.params['embedding'][0, 0] == 5
  assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == [
    '2',
    '5',
  ]


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda: make_state(num_layers=2), 'kernel as float32 .3, 4, 4., not'),
    (lambda: make_state(num_layers=4), r'not float32 \[4, 4, 4\]'),
    (lambda: make_state(width=6), 'ema/embedding as float32'),
    (lambda: make_state()._replace(ema={}), 'has ema/embedding'),
    (lambda: make_state()._replace(opt_state=()), 'has opt_state/0/count'),
  ],
  ids=['fewer layers', 'more layers', 'other shape', 'no EMA', 'no optimizer'],
)
def test_another_structure_is_refused_and_not_passed_over(
  tmp_path, change, message
):
  save(tmp_path, make_state())
  save(tmp_path, make_state()._replace(step=jnp.int32(3)))
  with pytest.raises(
    ValueError, match=f'3 holds a state of another.*{message}'
  ):
    checkpoints.restore(tmp_path, change(), make_iterator())
  assert names(tmp_path) == ['0', '3']


def test_what_is_missing_in_the_file_is_refused(tmp_path):
  save(tmp_path, make_state()._replace(ema={}))
  with pytest.raises(ValueError, match='lacks ema/'):
    checkpoints.restore(tmp_path, make_state(), make_iterator())


def names(directory):
  return sorted(path.name for path in directory.iterdir())


def test_keep_below_one_is_refused(tmp_path):
  with pytest.raises(ValueError, match='keep=0'):
    save(tmp_path, make_state(), keep=0)
  assert names(tmp_path) == []


def random_state(seed, step, width=64):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype) if x.ndim else x,
    make_state(width=width)._replace(step=jnp.int32(step)),
  )


@pytest.fixture(scope='module')
def two_saved(tmp_path_factory):
  """Checkpoints 3, after one batch, and 6, after two."""
  directory, iterator = tmp_path_factory.mktemp('saved'), make_iterator()
  for seed, step in ((1, 3), (2, 6)):
    next(iterator)
    save(directory, random_state(seed, step), iterator)
  return directory


def restored(directory):
  """State, position in the data."""
  iterator = make_iterator()
  state = checkpoints.restore(directory, random_state(0, 0), iterator)
  assert checkpoints.latest_step(directory) == state.step
  assert checkpoints.latest_settings(directory) == SETTINGS
  return state, next(iterator)['record_ids']


def expected(step):
  iterator = make_iterator()
  for _ in range(step // 3 + 1):
    batch = next(iterator)
  return random_state(step // 3, step), batch['record_ids']


def flipped(content):
  content = bytearray(content)
  content[2 * len(content) // 3] ^= 1
  return bytes(content)


DAMAGES = {
  'empty': lambda content: b'',
  'truncated': lambda content: content[: len(content) // 2],
  'garbage': lambda content: bytes(len(content))[::-1] + b'\xff',
  'flipped': flipped,
  'missing': None,
}
# Without these nothing can be restored, and every byte counts; the others
# hold copies, marks and times.
NEEDED = ('run/data.json', 'state/_METADATA', 'state/manifest.ocdbt', '/d/')


@pytest.mark.parametrize('kind', DAMAGES)
def test_whatever_file_is_damaged_the_state_is_that_of_a_checkpoint(
  two_saved, tmp_path, capfd, kind
):
  files = [path for path in (two_saved / '6').rglob('*') if path.is_file()]
  assert len(files) > 10
  for file in files:
    name = str(file.relative_to(two_saved))
    directory = tmp_path / name.replace('/', '_')
    shutil.copytree(two_saved, directory)
    if kind == 'missing':
      (directory / name).unlink()
    else:
      damaged = DAMAGES[kind](file.read_bytes() or b'x')
      (directory / name).write_bytes(damaged)
    fields = checkpoints.latest_state(directory)
    capfd.readouterr()
    state, record_ids = restored(directory)
    assert_trees_equal((state, record_ids), expected(int(state.step)))
    # Without a target, Orbax's own description is needed too.
    assert fields['step'] in (3, state.step)
    out, error = capfd.readouterr()
    if state.step == 6:
      assert not any(part in name for part in NEEDED), name
      assert error == '' and names(directory) == ['3', '6']
    else:
      assert error.startswith(f'passing over {directory}/6: checkpoint 6 is ')
      assert error.count('\n') == 1 and len(error) < 600, error
      assert names(directory) == ['3', 'damaged-6']
    assert out == ''


def test_flipped_bits_of_an_array_are_found(two_saved, tmp_path, capfd):
  # Those of the highest bits of one number, in the middle of the largest file.
  shutil.copytree(two_saved, tmp_path / 'a')
  files = (tmp_path / 'a' / '6' / 'state').rglob('d/*')
  path = max(files, key=lambda path: path.stat().st_size)
  path.write_bytes(flipped(path.read_bytes()))
  state, _ = restored(tmp_path / 'a')
  assert state.step == 3
  assert 'other values in ' in capfd.readouterr().err


def test_a_damaged_step_can_be_saved_again(two_saved, tmp_path, capfd):
  directory = tmp_path / 'a'
  shutil.copytree(two_saved, directory)
  for _ in range(2):
    (directory / '6' / 'run' / 'data.json').unlink()
    iterator = make_iterator()
    state = checkpoints.restore(directory, random_state(0, 0), iterator)
    assert state.step == 3
    next(iterator)
    checkpoints.save(directory, random_state(2, 6), iterator, SETTINGS)
    assert names(directory) == ['3', '6', 'damaged-6']
  assert_trees_equal(restored(directory), expected(6))


def test_what_only_looks_like_a_step_is_none(tmp_path):
  (tmp_path / '12').touch()
  for name in ('007', '٣', '5.orbax-checkpoint-tmp', 'damaged-9'):
    (tmp_path / name).mkdir()
  assert checkpoints.latest_step(tmp_path) is None


def test_all_damaged_is_an_error_and_nothing_is_moved(two_saved, tmp_path):
  directory = tmp_path / 'a'
  shutil.copytree(two_saved, directory)
  for step in '36':
    (directory / step / 'run' / 'data.json').write_text('{}')
  for read in (
    lambda: checkpoints.restore(directory, random_state(0, 0), make_iterator()),
    lambda: checkpoints.latest_state(directory),
  ):
    with pytest.raises(
      ValueError,
      match=r'no whole checkpoint in .* 6 is damaged: .* 3 is damaged: ',
    ):
      read()
  # As one of another version.
  shutil.rmtree(directory / '3' / 'run')
  with pytest.raises(
    ValueError,
    match=r'no checkpoint in .* can be read; 6: .*; 3: it has no run/, as one',
  ):
    checkpoints.latest_settings(directory)
  assert names(directory) == ['3', '6']


def test_behind_a_damaged_one_another_structure_is_refused(two_saved, tmp_path):
  directory = tmp_path / 'a'
  shutil.copytree(two_saved, directory)
  (directory / '6' / 'run' / 'data.json').unlink()
  with pytest.raises(ValueError, match='3 holds a state of another structure'):
    checkpoints.restore(directory, make_state(), make_iterator())
  assert names(directory) == ['3', '6']


def test_reading_alone_passes_over_damage_and_renames_nothing(
  two_saved, tmp_path, capfd
):
  directory = tmp_path / 'a'
  shutil.copytree(two_saved, directory)
  (directory / '6' / 'state' / 'manifest.ocdbt').write_bytes(b'')
  fields = checkpoints.latest_state(directory)
  assert_trees_equal(fields['params'], random_state(1, 3).params)
  assert 'checkpoint 6 is damaged' in capfd.readouterr().err
  assert names(directory) == ['3', '6']


def test_what_is_written_tells_the_arrays_and_a_sum_of_their_bits(two_saved):
  arrays = json.loads((two_saved / '6' / 'run' / 'data.json').read_text())
  state = random_state(2, 6)
  for name, leaf in (
    ('step', state.step),
    ('params/blocks/kernel', state.params['blocks']['kernel']),
    ('opt_state/0/mu/embedding', state.opt_state[0].mu['embedding']),
  ):
    bits = np.asarray(leaf).view(np.uint32).ravel().astype(object)
    total = sum((2 * i + 1) * x for i, x in enumerate(bits)) % 2**32
    expected_array = [str(leaf.dtype), list(leaf.shape), total]
    assert arrays['arrays'][name] == expected_array


def test_leftovers_of_a_killed_save_do_no_harm(two_saved, tmp_path):
  directory = tmp_path / 'a'
  shutil.copytree(two_saved, directory)
  for name in (
    '9.orbax-checkpoint-tmp',
    '12.orbax-checkpoint-tmp',
    '1.removed',
  ):
    shutil.copytree(two_saved / '6' / 'state', directory / name / 'state')
  assert_trees_equal(restored(directory), expected(6))
  save(directory, random_state(3, 9))
  assert names(directory) == ['6', '9']


@contextlib.contextmanager
def largest_file(size):
  """Files cannot grow beyond this: what a full disk is, but for the number."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize('size', [500, 20_000])
def test_without_room_the_one_before_stays(two_saved, tmp_path, capfd, size):
  directory = tmp_path / 'a'
  shutil.copytree(two_saved, directory)
  with pytest.raises(OSError) as error, largest_file(size):
    checkpoints.save(directory, random_state(3, 9), make_iterator(), SETTINGS)
  assert str(error.value) == (
    f'checkpoint 9 could not be written to {directory}: File too large'
  )
  assert_trees_equal(restored(directory), expected(6))
  checkpoints.save(directory, random_state(3, 9), make_iterator(), SETTINGS)
  assert names(directory) == ['6', '9']
  assert 'Traceback' not in capfd.readouterr().err


def test_none_is_removed_before_the_new_one_is_on_the_disk(
  two_saved, tmp_path, monkeypatch
):
  # Some file systems find out only then that they are full.
  directory = tmp_path / 'a'
  shutil.copytree(two_saved, directory)
  full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  def fsync(handle):
    if os.readlink(f'/proc/self/fd/{handle}').endswith('/run/data.json'):
      raise full

  with monkeypatch.context() as patched:
    patched.setattr(os, 'fsync', fsync)
    with pytest.raises(OSError, match=r'written to .*: No space left on'):
      save(directory, random_state(3, 9))
  assert names(directory) == ['3', '6', '9']
  save(directory, random_state(3, 12))
  assert names(directory) == ['12', '9']


def free_port():
  with socket.socket() as sock:
    sock.bind(('127.0.0.1', 0))
    return sock.getsockname()[1]


def run_processes(count, source, target, results):
  """What `checkpoints_run.py` saw in each of some processes."""
  port = free_port()
  environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
  processes = [
    subprocess.Popen(
      [sys.executable, ROOT / 'tests' / 'checkpoints_run.py']
      + [str(x) for x in (port, count, index, source, target)]
      + [str(results / f'{count}_{index}.npz')],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for index in range(count)
  ]
  outputs = [process.communicate(timeout=60)[0] for process in processes]
  assert all(process.returncode == 0 for process in processes), outputs
  paths = [results / f'{count}_{index}.npz' for index in range(count)]
  return [np.load(path) for path in paths], outputs


def test_processes_and_devices_may_change(tmp_path):
  # One process with one device; two with two each; one with two; as at first.
  state, iterator = random_state(1, 4), make_iterator()
  unbroken = make_iterator()
  record_ids = [next(unbroken)['record_ids'] for _ in range(12)]
  for _ in range(2):
    next(iterator)
  save(tmp_path / 'one', state, iterator)
  position = 2
  for source, target, count in (('one', 'two', 2), ('two', 'last', 1)):
    seen, outputs = run_processes(
      count, tmp_path / source, tmp_path / target, tmp_path
    )
    for index, of_process in enumerate(seen):
      # The same global batches, dealt to the processes of now.
      local = np.arange(index, 8, count)
      for name, at in (('first', 0), ('next', 4), ('again', 4)):
        np.testing.assert_array_equal(
          of_process[name], record_ids[position + at][local]
        )
      assert of_process['step'] == (4 if source == 'one' else 8)
      assert of_process['equal']
      kernel = state.params['blocks']['kernel']
      width = 64 // (2 * count)
      for i, shard in enumerate(of_process['kernel']):
        begin = (2 * index + i) * width
        np.testing.assert_array_equal(shard, kernel[..., begin : begin + width])
    assert 'checkpoint 9 is damaged' in outputs[0]
    assert names(tmp_path / target) == ['8', 'damaged-9']
    position += 4
  iterator = make_iterator()
  last = checkpoints.restore(tmp_path / 'last', random_state(0, 0), iterator)
  fields = checkpoints.latest_state(tmp_path / 'last')
  np.testing.assert_array_equal(next(iterator)['record_ids'], record_ids[10])
  assert_trees_equal(last, state._replace(step=jnp.int32(8)))
  assert_trees_equal(jax.tree.map(np.asarray, fields['params']), last.params)
