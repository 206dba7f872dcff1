"""Attention over a row: who sees whom, stored keys, rotary positions."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

# Finite, so that a query without any visible key averages all of them instead
# of becoming NaN; so low that exp gives exactly 0 beside any real score.
HIDDEN_SCORE = -1e30


def attention_mask(
  valid: Bool[Array, 'B L'],
  segments: Int[Array, 'B L'] | None = None,
  blocks: Int[Array, 'B L'] | None = None,
  *,
  reach: int | None = None,
) -> Bool[Array, 'B #Q L']:
  """Which keys each query sees: valid ones, of its own segment.

  The one mask builder of training and sampling.

  Args:
    valid: False at padding. Shape `[B, L]`.
    segments: number of the document at each position; None: one per row.
      Shape `[B, L]`.
    blocks: number of the block at each position, see `attention_blocks`; later
      blocks are not seen. Shape `[B, L]`.
    reach: how many blocks are seen, the own one and those before it; None: all.

  Returns:
    Shape `[B, 1, L]`, or `[B, L queries, L keys]` with segments or blocks.

  Example:
    >>> attention_mask(jnp.array([[True, False]])).tolist()
    [[[True, False]]]
  """
  mask = valid[:, None, :]
  if segments is not None:
    mask &= segments[:, :, None] == segments[:, None, :]
  if blocks is not None:
    ahead = blocks[:, :, None] - blocks[:, None, :]
    mask &= ahead >= 0
    if reach is not None:
      mask &= ahead < reach
  return mask


def attention_blocks(
  positions: Int[Array, 'B L'], length: int | None
) -> Int[Array, 'B L'] | None:
  """The block of each logical position; None where all see all."""
  return None if length is None else positions // length


def slots_of(
  values: Shaped[Array, 'B #L *d'], slots: Int[Array, 'B W']
) -> Shaped[Array, 'B #W *d']:
  """What stands at the slots; a slot L, which is none, has what is last."""
  if values.shape[1] == 1:  # The same for every slot.
    return values
  index = slots.reshape(*slots.shape, *[1] * (values.ndim - 2))
  return jnp.take_along_axis(values, index, 1, mode='clip')


def attend_all(mask, q, k, v, stored):
  """Every slot's queries on every slot's keys; keys and values are kept."""
  del stored
  return attention(q, k, v, mask), (k, v)


def attend_stored(
  mask: Bool[Array, 'B #W L'],
  slots: Int[Array, 'B W'],
  q: Float[Array, 'B W H D'],
  k: Float[Array, 'B W K D'],
  v: Float[Array, 'B W K D'],
  stored: tuple[Float[Array, 'B L K D'], Float[Array, 'B L K D']],
) -> tuple[Float[Array, 'B W H D'], tuple]:
  """Queries of some slots on theirs and on the stored keys of all others.

  Args:
    mask: which keys each of the slots sees.
    slots: where the slots are, distinct. A slot L is none: nothing is stored
      of it, and what is returned for it means nothing.
    q: queries of the slots.
    k: their keys.
    v: their values.
    stored: keys and values of all slots.

  Returns:
    What the slots see, and the stored keys and values with theirs in place.
  """
  rows = jnp.arange(slots.shape[0])[:, None]
  stored = tuple(
    old.at[rows, slots].set(new, mode='drop', unique_indices=True)
    for old, new in zip(stored, (k, v), strict=True)
  )
  return attention(q, *stored, mask), stored


def attention(
  q: Float[Array, 'B Q H D'],
  k: Float[Array, 'B S K D'],
  v: Float[Array, 'B S K D'],
  mask: Bool[Array, 'B #Q S'],
) -> Float[Array, 'B Q H D']:
  """Softmax attention, scores / sqrt(D), with H / K query heads per key head.

  A query that sees no key gets the mean of all values.

  Args:
    q: queries. Shape `[B, Q, H, D]`.
    k: keys. Shape `[B, S, K, D]`.
    v: values. Shape `[B, S, K, D]`.
    mask: which keys are seen, see `attention_mask`. Shape `[B, Q or 1, S]`.

  Returns:
    Shape `[B, Q, H, D]`, dtype of `v`.
  """
  batch, num_queries, num_heads, head_dim = q.shape
  kv_heads = k.shape[2]
  q = q.reshape(batch, num_queries, kv_heads, num_heads // kv_heads, head_dim)
  scores = jnp.einsum(
    'bqkgd,bskd->bkgqs', q, k, preferred_element_type=jnp.float32
  )
  scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, HIDDEN_SCORE)
  weights = jax.nn.softmax(scores).astype(v.dtype)
  mixed = jnp.einsum('bkgqs,bskd->bqkgd', weights, v)
  return mixed.reshape(batch, num_queries, num_heads, head_dim)


def rotate(
  x: Float[Array, 'B L H D'],
  cos: Float[Array, 'B L Half'],
  sin: Float[Array, 'B L Half'],
) -> Float[Array, 'B L H D']:
  """Rotates each pair (x[i], x[i + R/2]) by its angle (Su et al., 2021).

  Args:
    x: queries or keys. Shape `[B, L, H, D]`; from channel R on they stay.
    cos: cosines of `rotary_angles`. Shape `[B, L, R / 2]`.
    sin: sines of `rotary_angles`. Shape `[B, L, R / 2]`.

  Returns:
    Shape and dtype of `x`.
  """
  half = cos.shape[-1]
  first, second, rest = jnp.split(
    x.astype(jnp.float32), [half, 2 * half], axis=-1
  )
  cos, sin = cos[:, :, None], sin[:, :, None]
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
  )
  return rotated.astype(x.dtype)


def rotary_angles(
  positions: Int[Array, 'B L'], width: int, base: float
) -> Float[Array, 'B L Half']:
  """Angles position * base^(-2i/R) for i < R/2 (Su et al., 2021).

  Args:
    positions: logical positions. Shape `[B, L]`.
    width: number R of channels that are rotated, even.
    base: base of the wavelengths.

  Returns:
    float32 radians. Shape `[B, L, R / 2]`.
  """
  exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
  return (
    positions[..., None].astype(jnp.float32) * base ** -exponents[None, None]
  )
