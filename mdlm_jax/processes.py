"""One run in several processes, each with devices of its own.

Every process runs the same program; JAX makes one machine of all their
devices. What is written is written by the first of them.
"""

import os
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding


def start(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Joins the processes of the run; before anything else is asked of JAX.

  Args:
    coordinator_address: 'host:port' of the first process. None: this and the
      rest is found out, where Slurm, Open MPI, Kubernetes or a TPU pod started
      the processes.
    num_processes: how many there are.
    process_id: which of them this is, from 0.

  Raises:
    ValueError: nothing can be found out, or the others were not met.
  """
  # On CPU they exchange by Gloo; on other devices it has no effect.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  try:
    jax.distributed.initialize(coordinator_address, num_processes, process_id)
  except (ValueError, RuntimeError) as error:
    raise ValueError(f'the processes did not meet: {error}') from error


def is_first() -> bool:
  """Whether this process is the one that writes and prints."""
  return jax.process_index() == 0


def say(text: str) -> None:
  """Prints a line at once, once for all processes.

  Work that has much to do goes on where nobody reads it any longer.
  """
  if is_first():
    try:
      print(text, flush=True)
    except BrokenPipeError:
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def wait_for_all() -> None:
  """Waits until every process is here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices('all')


def flags(mesh: jax.sharding.Mesh, is_raised: bool) -> jax.Array:
  """The flags of all processes, to be asked inside the program of a step.

  A program of its own for the answer could pass others on their way to another
  process, where they would wait for each other for ever.

  Args:
    mesh: of all devices.
    is_raised: that of this process.

  Returns:
    bool, one for each device. Shape `[devices]`.
  """
  place = NamedSharding(mesh, jax.P(mesh.axis_names))
  return jax.make_array_from_callback(
    (mesh.size,), place, lambda _: np.array([is_raised])
  )


def gathered(tree: Any) -> Any:
  """The arrays as NumPy's in the first process, whatever their sharding.

  All processes take part, one array after another; the others keep nothing.

  Returns:
    The same tree, None in place of each array but in the first process.
  """
  if jax.process_count() == 1:
    return jax.device_get(tree)

  def whole(x):
    array = multihost_utils.process_allgather(x, tiled=True)
    return array if is_first() else None

  return jax.tree.map(whole, tree)
