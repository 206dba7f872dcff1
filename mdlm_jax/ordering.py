"""Integers in the order of floats."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def ordered_integers(values: Float[Array, '*S']) -> Int[Array, '*S']:
  """Integers of the same width that compare as the floats do.

  All are above `lowest_integer`, minus infinity too, which is how an element
  can be ranked below every float. -0 and +0 are equal.

  Args:
    values: any floating dtype; the order of NaN is not defined.

  Returns:
    Signed integers, shape of `values`.

  Example:
    >>> print(jnp.diff(ordered_integers(jnp.array([-jnp.inf, -1, 2.0]))) > 0)
    [ True  True]
  """
  dtype = integer_dtype(values.dtype)
  values = jnp.where(values == 0, jnp.zeros_like(values), values)
  bits = jax.lax.bitcast_convert_type(values, dtype)
  return jnp.where(bits < 0, bits ^ jnp.iinfo(dtype).max, bits)


def lowest_integer(dtype) -> Int[Array, '']:
  """Below `ordered_integers` of every float of this dtype."""
  integer = integer_dtype(dtype)
  return jnp.array(jnp.iinfo(integer).min, integer)


def integer_dtype(dtype) -> np.dtype:
  """The signed integer as wide as a floating dtype."""
  return np.dtype(f'int{jnp.finfo(dtype).bits}')
