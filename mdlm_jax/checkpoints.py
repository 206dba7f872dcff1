"""Training checkpoints: everything that is needed to go on bit for bit.

A checkpoint holds the train state (step, parameters, average, optimizer), the
position of the data iterator, and the run's settings (config, vocabulary,
corpus) as JSON. It is complete or absent: Orbax writes to a temporary directory
and renames it. This is the only file that imports Orbax.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp


def open_directory(
  directory: str | os.PathLike, *, keep: int = 2
) -> ocp.training.Checkpointer:
  """The checkpoints under `directory`, to be used in a `with` statement.

  Args:
    directory: created on the first save or now.
    keep: how many of the latest checkpoints stay, at least 1.
  """
  if keep < 1:
    raise ValueError(f'{keep=} checkpoints must be at least 1')
  return ocp.training.Checkpointer(
    pathlib.Path(directory).absolute(),
    preservation_policy=ocp.training.preservation_policies.LatestN(keep),
  )


def save(
  checkpointer: ocp.training.Checkpointer,
  state: Any,
  iterator: Iterator,
  settings: dict,
) -> None:
  """Saves at `state.step`; a step that is there already is left alone.

  Args:
    checkpointer: from `open_directory`.
    state: pytree of arrays with a scalar `step`.
    iterator: with `get_state` and `set_state`.
    settings: what JSON can hold.
  """
  step = int(state.step)
  if latest_step(checkpointer) == step:
    return
  checkpointer.save_checkpointables(
    step, {'state': state, 'data': iterator}, custom_metadata=settings
  )


def latest_step(checkpointer: ocp.training.Checkpointer) -> int | None:
  """Step of the latest complete checkpoint, None when there is none."""
  return None if checkpointer.latest is None else checkpointer.latest.step


def latest_settings(checkpointer: ocp.training.Checkpointer) -> dict:
  """The settings that were saved with the latest checkpoint.

  Raises:
    ValueError: they cannot be read.
  """
  with _readable(checkpointer):
    settings = checkpointer.metadata(checkpointer.latest).custom_metadata
    if not settings:
      raise ValueError('no settings')
  return settings


def restore(
  checkpointer: ocp.training.Checkpointer, state: Any, iterator: Iterator
) -> Any:
  """The latest checkpoint's state; sets `iterator` to its position.

  Args:
    checkpointer: from `open_directory`, with a checkpoint.
    state: a state of the same structure, shapes and dtypes, such as a fresh
      one. Its shardings are those of the result.
    iterator: over the same data.

  Returns:
    The restored state.

  Raises:
    ValueError: the checkpoint is damaged or has another structure or shape.
  """
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )
  with _readable(checkpointer):
    loaded = checkpointer.load_checkpointables(
      checkpointer.latest, {'state': target, 'data': iterator}
    )
  return loaded['state']


def latest_state(checkpointer: ocp.training.Checkpointer) -> dict[str, Any]:
  """The latest checkpoint's state by field, on the default device.

  Its structure and the devices that it was saved from need not be known.

  Raises:
    ValueError: the checkpoint is damaged.
  """
  place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  with _readable(checkpointer):
    target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
      checkpointer.metadata(checkpointer.latest).metadata,
    )
    return checkpointer.load_checkpointables(
      checkpointer.latest, {'state': target}
    )['state']


@contextlib.contextmanager
def _readable(checkpointer):
  """One message for whatever a checkpoint that cannot be read raises."""
  try:
    yield
  except Exception as error:  # Orbax and its formats raise all sorts.
    raise ValueError(
      f'checkpoint {checkpointer.latest.step} in {checkpointer.directory} is '
      'damaged, or holds a state of another structure or shape; without its '
      'directory the one before it is used'
    ) from error
