"""How activations lie on devices, said inside the program that has them.

For the mesh that `jax.set_mesh` names, of the axes of `models.placement`;
without one nothing is said.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Shaped

AXES = ('data', 'fsdp', 'tensor')
# What the rows of a batch are split over.
ROWS = ('data', 'fsdp')
# What heads, hidden units, ids and, between branches, slots are split over.
TENSOR = ('tensor',)


def sharded(
  x: Shaped[Array, '...'], *axes: tuple[str, ...] | None
) -> Shaped[Array, '...']:
  """An activation, split over devices of the mesh of the context.

  Args:
    x: the activation.
    axes: for each of its axes those of the mesh that it is split over, as
      `ROWS` and `TENSOR`; None: it is whole. Where they do not divide it, XLA
      chooses.

  Returns:
    The same values; `x` itself where no mesh of several devices is set.

  Example:
    >>> x = jax.numpy.ones(2)
    >>> sharded(x, ROWS) is x
    True
  """
  context = context_axes()
  if not context:
    return x

  def names(names, size):
    if names is None:
      return None
    if not fits(size, names):
      return jax.P.UNCONSTRAINED
    return tuple(name for name in names if name in context)

  return jax.lax.with_sharding_constraint(x, jax.P(*map(names, axes, x.shape)))


def by_rows(
  function: Callable, params: Any, *arrays: Shaped[Array, 'B ...']
) -> Any:
  """`function(params, *arrays)`, computed on each device for its own rows.

  For a function that takes its rows in parts, after each of which XLA would sum
  the gradient of `params` over the devices; and for what XLA cannot split, such
  as `top_k`.

  Args:
    function: takes any number of rows, each by itself.
    params: whole on every device while it is computed.
    *arrays: their first axis is rows.

  Returns:
    What the function returns for all rows; its leaves' first axis is rows, too.
  """
  context = context_axes()
  names = tuple(name for name in ROWS if name in context)
  if not names or not fits(len(arrays[0]), names):
    return function(params, *arrays)
  return jax.shard_map(
    function,
    in_specs=(jax.P(), *[jax.P(names)] * len(arrays)),
    out_specs=jax.P(names),
    axis_names=set(names),
    # With it the sums are where the parameters are used.
    check_vma=False,
  )(params, *arrays)


def fits(size: int, axes: tuple[str, ...]) -> bool:
  """Whether the axes of the context's mesh divide a size; without one True."""
  context = context_axes()
  return size % math.prod(context.get(name, 1) for name in axes) == 0


def context_axes() -> dict[str, int]:
  """Axes of more than one device over which XLA may split here.

  Empty where no mesh is set, and without what is split already inside of
  `jax.shard_map`.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return {
    name: mesh.shape[name]
    for name in mesh.auto_axes
    if name in AXES and mesh.shape[name] > 1
  }
