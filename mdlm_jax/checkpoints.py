"""Training checkpoints: everything that is needed to go on bit for bit.

A checkpoint holds the train state (step, parameters, average, optimizer), the
position of the data iterator, and the run's settings (config, vocabulary,
corpus) as JSON. It is complete or absent: Orbax writes to a temporary directory
and renames it. Several processes save together, into a file system that they
share, and all call these functions; neither the number of processes nor of
devices need be the same when the run goes on.

A disk or a network may still damage what was written whole. Each checkpoint
therefore lists shape, type and a checksum of every array, with a checksum of
the list; `restore` passes over what is damaged, but never over what is whole
and of another run.

Saving waits until the checkpoint is on the disk, so that what goes wrong is
told where it does, before an older one is removed or the run goes on.

This is the only file that imports Orbax.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import pathlib
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from mdlm_jax.checks import check_integer

Path = str | os.PathLike

# The two parts of a checkpoint: arrays, and all else as JSON.
_STATE, _RUN = 'state', 'run'
# Ends of names of directories: Orbax's, and of what is being removed.
_UNFINISHED = ('.orbax-checkpoint-tmp', '.removed')
# What the system says where there is no room.
_NO_ROOM = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))


def save(
  directory: Path,
  state: Any,
  iterator: Iterator,
  settings: dict,
  *,
  keep: int = 2,
) -> None:
  """Saves at `state.step`; a step that is there already is left alone.

  Args:
    directory: of all checkpoints of the run; made if missing.
    state: pytree of arrays with a scalar `step`.
    iterator: with `get_state` and `set_state`, at the same position in every
      process.
    settings: what JSON can hold.
    keep: how many of the latest checkpoints stay, at least 1.

  Raises:
    OSError: it could not be written. The checkpoints before it stay.
    ValueError: `keep` is below 1.
  """
  check_integer('keep', keep, 1)
  directory = _absolute(directory)
  step, steps = int(state.step), _steps(directory)
  if step in steps:
    return
  _remove_unfinished(directory)
  content = {
    'settings': settings,
    'data': iterator.get_state(),
    'arrays': _array_list(state, checksums(state)),
  }
  content['sha256'] = _digest(content)
  try:
    with _orbax():
      ocp.save_checkpointables(
        directory / str(step), {_STATE: state, _RUN: content}
      )
    _bring_to_disk(directory / str(step))
  except Exception as error:  # Orbax and its formats raise all sorts.
    _remove_unfinished(directory)
    raise OSError(
      f'checkpoint {step} could not be written to {directory}: '
      f'{_root_cause(error)}'
    ) from error
  for old in sorted([step, *steps], reverse=True)[keep:]:
    _remove(directory, old)


def latest_step(directory: Path) -> int | None:
  """Step of the latest checkpoint, None when there is none."""
  return max(_steps(_absolute(directory)), default=None)


def latest_settings(directory: Path) -> dict:
  """The settings that were saved with the latest checkpoint.

  Of several, the latest whose settings can be read; after `restore`, those of
  the restored one.

  Raises:
    ValueError: none can be read.
  """
  directory, damage = _absolute(directory), []
  for step in _steps(directory):
    try:
      return _content(directory, step)['settings']
    except _DamagedError as error:
      damage.append(f'{step}: {error}')
  raise ValueError(
    f'no checkpoint in {directory} can be read; {"; ".join(damage)}'
  )


def restore(directory: Path, state: Any, iterator: Iterator) -> Any:
  """The latest whole checkpoint's state; sets `iterator` to its position.

  Later ones, which are damaged, are named on stderr and renamed, so that this
  one is the latest.

  Args:
    directory: that holds a checkpoint.
    state: a state of the same structure, shapes and dtypes, such as a fresh
      one. Its shardings are those of the result.
    iterator: over the same data.

  Returns:
    The restored state.

  Raises:
    ValueError: all checkpoints are damaged; or the latest that is whole has
      another structure or shape.
  """
  directory = _absolute(directory)
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )
  step, restored = _latest_whole(directory, lambda _: target)
  for later in _steps(directory):
    if later > step:
      _set_aside(directory, later)
  iterator.set_state(_content(directory, step)['data'])
  return restored


def latest_state(directory: Path) -> dict[str, Any]:
  """The latest whole checkpoint's state by field, on the default device.

  Its structure and the devices that it was saved from need not be known.
  Nothing is renamed.

  Raises:
    ValueError: all are damaged.
  """
  place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

  def target(path):
    arrays = ocp.checkpointables_metadata(path).metadata[_STATE]
    if arrays is None:
      raise ValueError('its arrays are not described')
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays
    )

  return _latest_whole(_absolute(directory), target)[1]


def checksums(tree: Any) -> list[int]:
  """A number below 2^32 for each array, wherever its parts lie.

  It is the same on any number of devices; all processes take part.
  """
  # One is waited for before the next begins: programs that run at once on CPU
  # devices of several processes could wait for one another for ever.
  return [int(_checksum(leaf)) for leaf in jax.tree.leaves(tree)]


class _DamagedError(Exception):
  """Says what of a checkpoint is damaged."""


def _absolute(directory):
  return pathlib.Path(directory).absolute()


def _steps(directory):
  """Steps of all checkpoints, latest first, as process 0 sees them."""
  steps = []
  if directory.is_dir():
    names = (path.name for path in directory.iterdir() if path.is_dir())
    steps = [int(x) for x in names if x.isdecimal() and str(int(x)) == x]
    steps.sort(reverse=True)
  if jax.process_count() > 1:
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    steps = np.resize(np.array(steps, np.int32), count)
    steps = multihost_utils.broadcast_one_to_all(steps).tolist()
  return steps


def _latest_whole(directory, target_of):
  """Step and state of the latest checkpoint that is not damaged."""
  damage = []
  for step in _steps(directory):
    try:
      return step, _load(directory, step, target_of)
    except _DamagedError as error:
      damage.append(f'checkpoint {step} is damaged: {error}')
      if jax.process_index() == 0:
        print(
          f'passing over {directory / str(step)}: {damage[-1]}',
          file=sys.stderr,
          flush=True,
        )
  raise ValueError(f'no whole checkpoint in {directory}; ' + '; '.join(damage))


def _load(directory, step, target_of):
  """The state of one checkpoint, compared with its checksums."""
  path = directory / str(step)
  arrays = _content(directory, step)['arrays']
  with _reading():
    target = target_of(path)
  _check_same_arrays(arrays, _array_list(target), path)
  with _reading():
    state = ocp.load_checkpointables(path, {_STATE: target})[_STATE]
  # Only now, as all devices take part in it.
  with _reading():
    found = _array_list(state, checksums(state))
    wrong = [name for name in arrays if arrays[name] != found[name]]
    if wrong:
      raise ValueError(f'other values in {", ".join(wrong)} than were saved')
  return state


def _content(directory, step):
  """What `save` wrote beside the arrays."""
  path = directory / str(step)
  with _reading():
    if not (path / _RUN).is_dir():
      raise ValueError(f'it has no {_RUN}/, as one of another version')
    content = ocp.load_checkpointables(path, {_RUN: None})[_RUN]
    if content.pop('sha256') != _digest(content):
      raise ValueError(f'{_RUN} is not what was saved')
  return content


@contextlib.contextmanager
def _reading():
  """Whatever a checkpoint that cannot be read raises, in any process."""
  error = None
  try:
    # Each process for itself: none waits for one that has failed.
    with _orbax(alone=True):
      yield
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise  # The fault of this machine.
  except Exception as caught:  # Orbax and its formats raise all sorts.
    error = caught
  if jax.process_count() > 1:
    # All must pass over the same checkpoints.
    failed = multihost_utils.process_allgather(np.array(error is not None))
    if error is None and failed.any():
      others = ', '.join(map(str, np.flatnonzero(failed)))
      error = ValueError(f'process {others} could not read it')
  if error is not None:
    raise _DamagedError(_root_cause(error)) from error


@contextlib.contextmanager
def _orbax(*, alone=False):
  """Orbax with JSON for all that is no array, and without its many words.

  What goes wrong is raised; each of its threads also logs it.
  """
  registry = ocp.handlers.local_registry()
  registry.add(ocp.handlers.JsonHandler, checkpointable_name=_RUN)
  context = ocp.Context()
  context.checkpointables.registry = registry
  if alone:
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
  loggers = [logging.getLogger(name) for name in ('absl', 'asyncio')]
  levels, hook = [x.level for x in loggers], sys.unraisablehook
  for logger in loggers:
    logger.setLevel(logging.CRITICAL)
  sys.unraisablehook = lambda _: None
  threads = set(threading.enumerate())
  try:
    with (
      context,
      warnings.catch_warnings(action='ignore', category=RuntimeWarning),
    ):
      yield
  except Exception:
    # The other threads are still at work, and fail like the first.
    for thread in set(threading.enumerate()) - threads:
      thread.join(timeout=10)
    raise
  finally:
    sys.unraisablehook = hook
    for logger, level in zip(loggers, levels):
      logger.setLevel(level)


def _check_same_arrays(saved, expected, path):
  """Raises ValueError where a whole checkpoint is that of another state."""
  problems = [f'lacks {key}' for key in expected.keys() - saved.keys()]
  problems += [f'has {key}' for key in saved.keys() - expected.keys()]
  problems += [
    f'has {key} as {saved[key][0]} {saved[key][1]}, not '
    f'{expected[key][0]} {expected[key][1]}'
    for key in expected.keys() & saved.keys()
    if saved[key][:2] != expected[key][:2]
  ]
  if problems:
    shown = '; '.join(sorted(problems)[:4])
    more = f' and {len(problems) - 4} more' if len(problems) > 4 else ''
    raise ValueError(
      f'{path} holds a state of another structure or shape: it {shown}{more}'
    )


def _array_list(tree, checksums=None):
  """{'params/embedding': ['float32', [5, 4], checksum]} of a state."""
  leaves = jax.tree.leaves_with_path(tree)
  if checksums is None:
    checksums = [None] * len(leaves)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): [
      str(leaf.dtype),
      list(leaf.shape),
      checksum,
    ]
    for (path, leaf), checksum in zip(leaves, checksums, strict=True)
  }


@jax.jit
def _checksum(x):
  """The sum over elements i of (2 i + 1) times the bits of i, modulo 2^32.

  Any change of one element changes it, as odd numbers have an inverse; the
  order of addition, which depends on the devices, does not.
  """
  if x.dtype == bool:
    bits = x.astype(jnp.uint32)
  else:
    # Elements of 8 bytes become two of 4.
    width = 8 * min(x.dtype.itemsize, 4)
    bits = jax.lax.bitcast_convert_type(x, f'uint{width}').astype(jnp.uint32)
  place = jnp.zeros(bits.shape, jnp.uint32)
  for axis, size in enumerate(bits.shape):
    along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    place = place * np.uint32(size) + along
  return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def _digest(content):
  text = json.dumps(content, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _root_cause(error):
  """In one line, what lies at the root of an error; of no room, only that."""
  texts = [str(error)]
  while inner := error.__cause__ or error.__context__:
    texts.append(str(error := inner))
  for reason in _NO_ROOM:
    if any(reason in text for text in texts):
      return reason
  # Array formats append all their settings, in brackets.
  text = ' '.join(texts[-1].split(' [')[0].split())
  if ' ' not in text:  # Such as the key of a KeyError.
    text = f'{type(error).__name__} {text}'
  return text if len(text) <= 300 else text[:300] + ' ...'


def _remove_unfinished(directory):
  """Frees what a save left that was killed or had no room."""
  if jax.process_index() == 0:
    for end in _UNFINISHED:
      for path in directory.glob(f'*{end}'):
        shutil.rmtree(path, ignore_errors=True)


def _bring_to_disk(path):
  """Waits until a checkpoint would outlast a loss of power."""
  if jax.process_index() == 0:
    for part in (*path.rglob('*'), path, path.parent):
      handle = os.open(part, os.O_RDONLY)
      try:
        os.fsync(handle)
      finally:
        os.close(handle)


def _remove(directory, step):
  """Removes a checkpoint, which is there or not at any moment."""
  if jax.process_index() == 0:
    path = directory / str(step)
    removed = path.with_name(f'{step}{_UNFINISHED[1]}')
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _set_aside(directory, step):
  """Renames a damaged checkpoint, so that its step can be saved again."""
  if jax.process_index() == 0:
    damaged = directory / f'damaged-{step}'
    shutil.rmtree(damaged, ignore_errors=True)
    (directory / str(step)).rename(damaged)
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(f'damaged-{step}')
