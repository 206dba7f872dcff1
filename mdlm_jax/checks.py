"""Checks of values that work on concrete and on traced arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Bool


def check_integer(name: str, value: object, least: int) -> None:
  """Raises unless a setting is an integer of at least `least`.

  Raises:
    ValueError: names the setting, what it was and what it must be.

  Example:
    >>> check_integer('num_steps', 3, 1)
  """
  is_integer = isinstance(value, int | np.integer)
  if not is_integer or isinstance(value, bool) or value < least:
    raise ValueError(f'{name}={value} must be an integer of at least {least}')


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
