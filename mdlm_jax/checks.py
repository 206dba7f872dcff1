"""Checks of values that work on concrete and on traced arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Bool


def check_values(holds: Bool[Array, '...'], message: str) -> None:
  """Raises unless `holds` is true everywhere.

  Args:
    holds: what must be true; an axis, if any, counts rows.
    message: names the argument and what it must be; the first row that is
      wrong is added.

  Raises:
    ValueError: `holds` is concrete and false somewhere. A traced `holds` is
      silent under plain `jit` and found by `checkify.checkify`.
  """
  traced = isinstance(holds, jax.core.Tracer)
  if holds.size == 0 or (not traced and np.all(holds)):
    return
  values = {}
  if holds.ndim:
    message += ' (row {row})'
    rows = holds.all(axis=tuple(range(1, holds.ndim)))
    values = {'row': jnp.argmin(rows)}
  if traced:
    checkify.debug_check(holds.all(), message, **values)
  else:
    raise ValueError(message.format(**values))
