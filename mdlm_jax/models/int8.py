"""Matrices of the layers in eight bits, by the library qwix.

Each output of a matrix has a scale of its own, its largest weight / 127.5, of
which every weight becomes the nearest multiple from -128 to 127. A layer is
made dense when it is its turn; what is not a matrix of a layer stays as it is:
norms, biases, experts, the tables of embeddings and head.
Needs the package's extra `int8`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def quantize(key: str, values: Float[Array, '...']) -> Any:
  """What is kept of a parameter, for `directory.load`.

  Args:
    key: of the parameter, such as 'blocks/query/kernel'.
    values: the parameter, or its part of a layer; a matrix is `[..., in, out]`.

  Returns:
    A `qwix.QArray` for a matrix of a layer, else `values`.

  Raises:
    ModuleNotFoundError: qwix is not installed.
  """
  if not ('blocks/' in key and key.endswith('/kernel')):
    return values
  import qwix

  outer = range(values.ndim - 2)
  return qwix.quantize(
    values.astype(jnp.float32),
    jnp.int8,
    channelwise_axes=[*outer, values.ndim - 1],
  )


def dense(params: Any) -> Any:
  """The parameters as arrays, float32 where they were quantized."""
  return jax.tree.map(_dense, params, is_leaf=_is_quantized)


def _is_quantized(leaf):
  return hasattr(leaf, 'qvalue')


def _dense(leaf):
  if not _is_quantized(leaf):
    return leaf
  import qwix

  return qwix.dequantize(leaf)
