"""Where the parameters of a network go on several devices."""

from collections.abc import Callable

import jax


def tensor_parallel(mesh: jax.sharding.Mesh, axis: str) -> Callable:
  """Every matrix over all devices of an axis, for the `sharding` of `load`.

  Matrices that open a branch by their outputs, those that close it by their
  inputs, so that a branch takes one sum over devices (Megatron-LM, Shoeybi et
  al. 2019, section 3); the tables of embeddings and head by ids. What an axis
  does not divide, and every vector, is on all devices.

  Args:
    mesh: the devices; axes of type Auto, for XLA to do the rest.
    axis: name of one of its axes.

  Returns:
    `sharding(key, shape)`.

  Example:
    >>> types = (jax.sharding.AxisType.Auto,)
    >>> mesh = jax.make_mesh((1,), ('x',), axis_types=types)
    >>> tensor_parallel(mesh, 'x')('blocks/up/kernel', (2, 8, 16)).spec
    P(None, None, 'x')
  """

  def sharding(key, shape):
    spec = [None] * len(shape)
    split = _split_axis(key)
    if split is not None and shape[split] % mesh.shape[axis] == 0:
      spec[split] = axis
    return jax.sharding.NamedSharding(mesh, jax.P(*spec))

  return sharding


def _split_axis(key):
  if key in ('embedding', 'head'):
    return 0
  if not key.endswith(('/kernel', '/gate', '/up', '/out')):
    return None
  return -2 if key.endswith(('out/kernel', '/out')) else -1
