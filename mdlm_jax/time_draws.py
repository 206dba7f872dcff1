"""Draws of the noise level t of each row of a batch, or of each block.

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
  t_max: float = 1.0,
) -> Float[Array, 'B']:
  """Independent uniform times.

  Args:
    key: consumed.
    row_ids: ids of these rows within the global batch, in [0, num_rows). A row
      gets the same time however the batch is split. Shape `[B]`.
    num_rows: rows of the global batch; no effect here, an argument because the
      three draws are interchangeable.
    t_min: lower end of the range, at least 0.
    t_max: upper end, at least `t_min`, above 0 and at most 1.

  Returns:
    float32 in (t_min, t_max]. Shape `[B]`.
  """
  del num_rows
  return _stretch(_row_uniforms(key, row_ids), t_min, t_max)


def stratified_times(
  key: Key[Array, ''],
  row_ids: Int[Array, 'B'],
  num_rows: int,
  *,
  t_min: float = 0.0,
  t_max: float = 1.0,
) -> Float[Array, 'B']:
  """One uniform time per row, each within its own stratum (MDLM).

  Row i of N has its time in the i-th of N equal parts of (t_min, t_max].

  Args:
    key: consumed.
    row_ids: as in `iid_times`. Shape `[B]`.
    num_rows: rows N of the global batch.
    t_min: lower end of the range, at least 0.
    t_max: upper end, at least `t_min`, above 0 and at most 1.

  Returns:
    float32 in (t_min, t_max]. Shape `[B]`.
  """
  uniforms = _row_uniforms(key, row_ids)
  return _stretch(stratify(uniforms, row_ids, num_rows), t_min, t_max)


def systematic_times(
  key: Key[Array, ''],
  row_ids: Int[Array, 'B'],
  num_rows: int,
  *,
  t_min: float = 0.0,
  t_max: float = 1.0,
) -> Float[Array, 'B']:
  """One random offset for equally spaced times (MD4's antithetic times).

  Args:
    key: consumed.
    row_ids: as in `iid_times`. Shape `[B]`.
    num_rows: rows N of the global batch.
    t_min: lower end of the range, at least 0.
    t_max: upper end, at least `t_min`, above 0 and at most 1.

  Returns:
    float32 in (t_min, t_max]. Shape `[B]`.
  """
  offset = 1.0 - jax.random.uniform(key)
  return _stretch(spread(offset, row_ids, num_rows), t_min, t_max)


def block_times(
  times: Callable,
  key: Key[Array, ''],
  row_ids: Int[Array, 'B'],
  num_rows: int,
  *,
  length: int,
  block: int,
  **limits: float,
) -> Float[Array, 'B L']:
  """A time for every block of every row, drawn over rows and blocks together.

  Block diffusion masks each block at a level of its own (Arriola et al. 2025,
  arXiv 2503.09573, section 3.2). Blocks are numbered over the global batch and
  turned round by a random number, or the first blocks of rows would have lower
  levels than the last where levels are stratified by number.

  Args:
    times: the draw for numbered rows, such as `stratified_times`.
    key: consumed.
    row_ids: as in `iid_times`. Shape `[B]`.
    num_rows: rows of the global batch.
    length: slots L of a row.
    block: slots of a block, the last of a row may have fewer.
    **limits: `t_min` and `t_max` of the draw.

  Returns:
    float32 in (t_min, t_max], equal within a block. Shape `[B, L]`.
  """
  turn_key, times_key = jax.random.split(key)
  blocks_per_row = -(-length // block)
  num_blocks = num_rows * blocks_per_row
  numbers = row_ids[:, None] * blocks_per_row + jnp.arange(blocks_per_row)[None]
  turned = numbers.reshape(-1) + jax.random.randint(turn_key, (), 0, num_blocks)
  t = times(times_key, turned % num_blocks, num_blocks, **limits)
  return jnp.repeat(t.reshape(numbers.shape), block, axis=1)[:, :length]


def packed_block_times(
  times: Callable,
  key: Key[Array, ''],
  row_ids: Int[Array, 'B'],
  num_rows: int,
  *,
  positions: Int[Array, 'B L'],
  segments: Int[Array, 'B L'],
  block: int,
  **limits: float,
) -> Float[Array, 'B L']:
  """As `block_times` for rows of packed documents, whose blocks may be short.

  A time is drawn for every slot, as if blocks had one each, and a block has
  that of its first.

  Args:
    times: the draw for numbered rows, such as `stratified_times`.
    key: consumed.
    row_ids: as in `iid_times`. Shape `[B]`.
    num_rows: rows of the global batch.
    positions: logical positions, which count from 0 in each document. Shape
      `[B, L]`.
    segments: document of each slot. Shape `[B, L]`.
    block: logical positions of a block.
    **limits: `t_min` and `t_max` of the draw.

  Returns:
    float32 in (t_min, t_max], equal within a block of a document. Shape
    `[B, L]`.
  """
  length = positions.shape[1]
  t = block_times(
    times, key, row_ids, num_rows, length=length, block=1, **limits
  )
  blocks = positions // block
  begins = (jnp.diff(blocks) != 0) | (jnp.diff(segments) != 0)
  firsts = jnp.where(begins, jnp.arange(1, length), 0)
  firsts = jax.lax.cummax(jnp.pad(firsts, [(0, 0), (1, 0)]), 1)
  return jnp.take_along_axis(t, firsts, 1)


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


def _stretch(uniforms, t_min, t_max):
  """(0, 1] -> (t_min, t_max]."""
  if not 0 <= t_min <= t_max <= 1 or not t_max:
    raise ValueError(f'0 <= {t_min=} <= {t_max=} <= 1 and t_max > 0 must hold')
  return t_min + (t_max - t_min) * uniforms
