"""Draws of the noise level t of each row of a batch.

Every draw is noise keyed by the row's id within the global batch, then a
deterministic part: a row gets the same time however the batch is split.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from mdlm_jax import noise


def iid_times(
  key: Key[Array, ''],
  row_ids: Int[Array, 'B'],
  num_rows: int,
  *,
  t_min: float = 0.0,
) -> Float[Array, 'B']:
  """Independent uniform times.

  Args:
    key: consumed.
    row_ids: ids of these rows within the global batch, in [0, num_rows). A row
      gets the same time however the batch is split. Shape `[B]`.
    num_rows: rows of the global batch; no effect here, an argument because the
      three draws are interchangeable.
    t_min: lower end of the range, in [0, 1).

  Returns:
    float32 in (t_min, 1]. Shape `[B]`.
  """
  del num_rows
  return _stretch(_row_uniforms(key, row_ids), t_min)


def stratified_times(
  key: Key[Array, ''],
  row_ids: Int[Array, 'B'],
  num_rows: int,
  *,
  t_min: float = 0.0,
) -> Float[Array, 'B']:
  """One uniform time per row, each within its own stratum (MDLM).

  Row i of N has its time in the i-th of N equal parts of (t_min, 1].

  Args:
    key: consumed.
    row_ids: as in `iid_times`. Shape `[B]`.
    num_rows: rows N of the global batch.
    t_min: lower end of the range, in [0, 1).

  Returns:
    float32 in (t_min, 1]. Shape `[B]`.
  """
  uniforms = _row_uniforms(key, row_ids)
  return _stretch(stratify(uniforms, row_ids, num_rows), t_min)


def systematic_times(
  key: Key[Array, ''],
  row_ids: Int[Array, 'B'],
  num_rows: int,
  *,
  t_min: float = 0.0,
) -> Float[Array, 'B']:
  """One random offset for equally spaced times (MD4's antithetic times).

  Args:
    key: consumed.
    row_ids: as in `iid_times`. Shape `[B]`.
    num_rows: rows N of the global batch.
    t_min: lower end of the range, in [0, 1).

  Returns:
    float32 in (t_min, 1]. Shape `[B]`.
  """
  offset = 1.0 - jax.random.uniform(key)
  return _stretch(spread(offset, row_ids, num_rows), t_min)


def stratify(
  uniforms: Float[Array, 'B'], row_ids: Int[Array, 'B'], num_rows: int
) -> Float[Array, 'B']:
  """(row_id + u) / N: one number of (0, 1] per row, in the row's stratum.

  Args:
    uniforms: in (0, 1]. Shape `[B]`.
    row_ids: in [0, num_rows). Shape `[B]`.
    num_rows: rows N of the global batch.

  Returns:
    Numbers in (0, 1]. Shape `[B]`.

  Example:
    >>> print(stratify(jnp.array([0.5, 1.0]), jnp.array([0, 3]), 4))
    [0.125 1.   ]
  """
  return (row_ids + uniforms) / num_rows


def spread(
  offset: Float[Array, ''], row_ids: Int[Array, 'B'], num_rows: int
) -> Float[Array, 'B']:
  """(offset + row_id / N) modulo 1, in (0, 1].

  Args:
    offset: one number in (0, 1] for the whole batch.
    row_ids: in [0, num_rows). Shape `[B]`.
    num_rows: rows N of the global batch.

  Returns:
    Numbers in (0, 1]. Shape `[B]`.

  Example:
    >>> print(spread(jnp.array(0.5), jnp.array([0, 1, 2, 3]), 4))
    [0.5  0.75 1.   0.25]
  """
  times = offset + row_ids / num_rows
  return jnp.where(times > 1.0, times - 1.0, times)


def discrete_times(t: Float[Array, 'B'], num_steps: int) -> Float[Array, 'B']:
  """The next time on the grid 1/T, 2/T, ..., 1, for the discrete-T bound.

  Args:
    t: in (0, 1]. Shape `[B]`.
    num_steps: number T of steps, at least 1.

  Returns:
    ceil(t T) / T. Shape `[B]`.

  Raises:
    ValueError: `num_steps` is below 1.

  Example:
    >>> print(discrete_times(jnp.array([0.1, 0.25, 0.3]), 4))
    [0.25 0.25 0.5 ]
  """
  if num_steps < 1:
    raise ValueError(f'{num_steps=} must be at least 1')
  # A grid point that rounding put just above itself must stay where it is.
  step = jnp.ceil(t * num_steps * (1 - 1e-6))
  return jnp.maximum(step, 1) / num_steps


TIMES = {
  'iid': iid_times,
  'stratified': stratified_times,
  'systematic': systematic_times,
}


def named_times(name: str) -> Callable:
  """The draw of `TIMES`.

  Raises:
    ValueError: `TIMES` does not have the name.
  """
  if name not in TIMES:
    raise ValueError(f'times={name!r} must be one of {", ".join(TIMES)}')
  return TIMES[name]


def _row_uniforms(key, row_ids):
  """One uniform number in (0, 1] per row."""
  return 1.0 - jax.vmap(jax.random.uniform)(noise.row_keys(key, row_ids))


def _stretch(uniforms, t_min):
  """(0, 1] -> (t_min, 1]."""
  if not 0 <= t_min < 1:
    raise ValueError(f'{t_min=} must lie in [0, 1)')
  return t_min + (1.0 - t_min) * uniforms
