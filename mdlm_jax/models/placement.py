"""Where arrays go on several devices.

A mesh has three axes. Rows are split over 'data' and 'fsdp' together; each
parameter, with its moments and its average, over 'fsdp' and 'tensor':

  axis     a device has                      it exchanges
  data     some rows                         gradients
  fsdp     some rows, a part of the state    parameters, gradients (ZeRO,
                                             Rajbhandari et al. 2020)
  tensor   some heads, hidden units, ids     activations (Megatron-LM, Shoeybi
           and slots                         et al. 2019, section 3)

One program runs on all of them, and XLA adds the exchanges; how activations lie
is said in `mesh_context`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, Shaped

from mdlm_jax.mesh_context import AXES, ROWS
from mdlm_jax.models.config import TransformerConfig

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

# Ends of the keys of parameters, and which of their axes lie over 'fsdp' and
# 'tensor'. Experts are split as MLPs are, each over all devices.
_RULES = (
  (r'(^|[/_])(out|out/kernel)$', (-1, -2)),
  (r'(^|[/_])(gate|up|kernel)$', (-2, -1)),
  (r'(^|/)(embedding|head)$', (-1, -2)),
)


def mesh(
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  *,
  devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
  """The devices as axes 'data', 'fsdp' and 'tensor'.

  Args:
    data: devices along the first axis; -1: as many as the others leave.
    fsdp: devices along the second.
    tensor: devices along the third, neighbours where the machine has any.
    devices: those that take part; None: all, of all processes.

  Raises:
    ValueError: an axis below 1; axes whose product is not the number of
      devices.

  Example:
    >>> dict(mesh(1, 1, 1, devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'tensor': 1}
  """
  count = jax.device_count() if devices is None else len(devices)
  for name, size, least in (
    ('data', data, -1), ('fsdp', fsdp, 1), ('tensor', tensor, 1)
  ):  # fmt: skip
    if size < least or size == 0:
      raise ValueError(f'mesh.{name}={size} must be at least 1')
  left, rest = divmod(count, fsdp * tensor)
  sizes = left if data == -1 else data, fsdp, tensor
  if math.prod(sizes) != count or rest:
    raise ValueError(
      f'mesh of {data=}, {fsdp=}, {tensor=} does not fit {count} device(s)'
    )
  types = (jax.sharding.AxisType.Auto,) * len(AXES)
  return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)


def check(mesh: Mesh, config: TransformerConfig, batch_size: int) -> None:
  """Raises unless the network and a batch can be split evenly.

  The number of ids is free, as it is that of a tokenizer: a table that 'tensor'
  does not divide is whole on all its devices.

  Args:
    mesh: the devices.
    config: shape of the network.
    batch_size: rows that are computed at once, of all devices together.

  Raises:
    ValueError: a size that an axis does not divide. Key/value heads are not
      repeated, so 'tensor' must divide their number, too.
  """
  num_shards = mesh.shape['data'] * mesh.shape['fsdp']
  if batch_size % num_shards:
    raise ValueError(
      f'{batch_size} rows at once must be a multiple of mesh.data * mesh.fsdp='
      f'{num_shards}'
    )
  sizes = [
    ('model_dim', config.model_dim, 'fsdp'),
    ('num_heads', config.num_heads, 'tensor'),
    ('num_kv_heads', config.kv_heads, 'tensor'),
  ]
  if config.experts is None or config.num_dense_layers:
    sizes.append(('mlp_dim', config.mlp_dim, 'tensor'))
  if config.experts is not None:
    sizes.append(('experts.width', config.experts.width, 'tensor'))
    if config.experts.shared_width is not None:
      shared = config.experts.shared_width
      sizes.append(('experts.shared_width', shared, 'tensor'))
  for name, size, axis in sizes:
    if size % mesh.shape[axis]:
      raise ValueError(
        f'model.{name}={size} must be a multiple of mesh.{axis}='
        f'{mesh.shape[axis]}'
      )


def sharding(mesh: Mesh) -> Callable:
  """Where each parameter goes, for the `sharding` of `directory.load`.

  Matrices that open a branch lie by their outputs over 'tensor', those that
  close it by their inputs, so that a branch takes one sum over devices; the
  tables of embeddings and head by ids. The other axis of each is over 'fsdp'.
  What an axis does not divide, and every vector, is on all devices.

  Args:
    mesh: the devices, see `mesh`; or their number along each axis.

  Returns:
    `sharding(key, shape)`; a key may stand under others, as in a train state.

  Example:
    >>> one = mesh(1, 1, 1, devices=jax.devices()[:1])
    >>> sharding(one)('ema/blocks/up/kernel', (2, 8, 16)).spec
    P(None, 'fsdp', 'tensor')
  """

  def place(key, shape):
    spec = [None] * len(shape)
    for name, axis in zip(('fsdp', 'tensor'), _split_axes(key), strict=True):
      if len(shape) > 1 and axis and shape[axis] % mesh.shape[name] == 0:
        spec[axis] = name
    return jax.sharding.NamedSharding(mesh, jax.P(*spec))

  return place


def state_sharding(mesh: Mesh, state: Any) -> Any:
  """Where the leaves of a tree that contains parameters go.

  The average and the moments of an optimizer lie as the parameters whose keys
  they end with; all else is on all devices.

  Args:
    mesh: the devices.
    state: arrays, or their shapes as `jax.eval_shape` gives them.

  Returns:
    The same tree of shardings.
  """
  place = sharding(mesh)
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: place(
      jax.tree_util.keystr(path, simple=True, separator='/'), leaf.shape
    ),
    state,
  )


def batch_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Where the leaves of a batch go, their first axis being rows."""
  return jax.sharding.NamedSharding(mesh, jax.P(ROWS))


def local_rows(
  mesh: jax.sharding.Mesh, batch_size: int
) -> Int[np.ndarray, 'b']:
  """The rows of a global batch that devices of this process hold, ascending.

  Processes that share a 'tensor' axis hold the same ones.

  Args:
    mesh: the devices, of all processes.
    batch_size: rows of the global batch, a multiple of 'data' times 'fsdp'.
  """
  places = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
  rows = np.arange(batch_size)
  return np.unique(np.concatenate([rows[index] for index in places.values()]))


def global_batch(
  mesh: jax.sharding.Mesh,
  local: Mapping[str, Shaped[np.ndarray, 'b ...']],
  batch_size: int,
) -> dict[str, Shaped[Array, 'B ...']]:
  """A batch on all devices from the rows that each process has loaded.

  Args:
    mesh: the devices, of all processes.
    local: leaves of the `local_rows` of this process, in their order.
    batch_size: rows of the global batch.

  Returns:
    Global arrays, as a compiled step takes them.

  Raises:
    ValueError: leaves of another number of rows.
  """
  rows, place = local_rows(mesh, batch_size), batch_sharding(mesh)

  def spread(name, leaf):
    if len(leaf) != len(rows):
      raise ValueError(
        f'{name} has {len(leaf)} row(s), this process holds {len(rows)} of the '
        f'{batch_size}'
      )

    def part(index):
      start, stop, _ = index[0].indices(batch_size)
      first = np.searchsorted(rows, start)
      return leaf[first : first + stop - start]

    shape = (batch_size, *leaf.shape[1:])
    return jax.make_array_from_callback(shape, place, part)

  return {name: spread(name, leaf) for name, leaf in local.items()}


def _split_axes(key):
  """Which axes of a parameter lie over 'fsdp' and over 'tensor', or Nones."""
  matching = (axes for end, axes in _RULES if re.search(end, key))
  return next(matching, (None, None))
