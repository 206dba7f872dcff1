"""Checks of values that work on concrete and on traced arrays."""

import jax
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Bool


def check_values(holds: Bool[Array, '...'], message: str) -> None:
  """Raises unless `holds` is true everywhere.

  Args:
    holds: what must be true.
    message: names the argument and what it must be.

  Raises:
    ValueError: `holds` is concrete and false somewhere. A traced `holds` is
      silent under plain `jit` and found by `checkify.checkify`.
  """
  if isinstance(holds, jax.core.Tracer):
    checkify.debug_check(holds.all(), message)
  elif not np.all(holds):
    raise ValueError(message)
