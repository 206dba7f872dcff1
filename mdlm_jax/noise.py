"""Random numbers that belong to rows and positions.

Everything random in the library is a function of (key, global row id, logical
position), so a draw is bit-equal for any batch, padding side, device count or
restart. The pattern everywhere is `noise(key)` followed by a deterministic
function of that noise; tests, exact enumeration and replay call the second
part with noise of their own.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def row_keys(key: Key[Array, ''], row_ids: Int[Array, 'B']) -> Key[Array, 'B']:
  """One key per row, a function of `key` and the global row id only.

  Args:
    key: consumed.
    row_ids: ids within the global batch (or of the prompt). Shape `[B]`.

  Returns:
    Typed keys. Shape `[B]`.
  """
  return jax.vmap(jax.random.fold_in, (None, 0))(key, row_ids)


def position_keys(
  row_key: Key[Array, ''], positions: Int[Array, 'L']
) -> Key[Array, 'L']:
  """One key per logical position of a row.

  Args:
    row_key: the row's key, consumed.
    positions: logical positions, equal for equal tokens whatever the padding.
      Shape `[L]`.

  Returns:
    Typed keys. Shape `[L]`.
  """
  return jax.vmap(jax.random.fold_in, (None, 0))(row_key, positions)


def packed_positions(
  positions: Int[Array, 'B L'], segments: Int[Array, 'B L'] | None
) -> Int[Array, 'B L']:
  """Positions that differ also between the documents packed in a row.

  These count their positions from 0 each, and would share their noise.

  Args:
    positions: logical positions, below 2^20. Shape `[B, L]`.
    segments: document of each slot, or None.

  Returns:
    The positions themselves in the first document. Shape `[B, L]`.
  """
  return positions if segments is None else positions + (segments << 20)


def position_uniforms(
  row_key: Key[Array, ''], positions: Int[Array, 'L']
) -> Float[Array, 'L']:
  """One uniform number in [0, 1) per logical position of a row.

  Args:
    row_key: the row's key, consumed.
    positions: logical positions. Shape `[L]`.

  Returns:
    float32 in [0, 1). Shape `[L]`.
  """
  keys = position_keys(row_key, positions)
  return jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32))(keys)
