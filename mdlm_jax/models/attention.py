"""Attention over a row in both directions, with rotary positions."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Finite, so that a query without any visible key averages all of them instead
# of becoming NaN; so low that exp gives exactly 0 beside any real score.
_HIDDEN_SCORE = -1e30


def attention_mask(
  valid: Bool[Array, 'B L'], segments: Int[Array, 'B L'] | None = None
) -> Bool[Array, 'B #Q L']:
  """Which keys each query sees: valid ones, of its own segment.

  The one mask builder of training and sampling.

  Args:
    valid: False at padding. Shape `[B, L]`.
    segments: number of the document at each position; None: one per row.
      Shape `[B, L]`.

  Returns:
    Shape `[B, 1, L]`, or `[B, L queries, L keys]` with segments.

  Example:
    >>> attention_mask(jnp.array([[True, False]])).tolist()
    [[[True, False]]]
  """
  mask = valid[:, None, :]
  if segments is not None:
    mask &= segments[:, :, None] == segments[:, None, :]
  return mask


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
  scores = jnp.where(
    mask[:, None, None], scores * head_dim**-0.5, _HIDDEN_SCORE
  )
  weights = jax.nn.softmax(scores).astype(v.dtype)
  mixed = jnp.einsum('bkgqs,bskd->bqkgd', weights, v)
  return mixed.reshape(batch, num_queries, num_heads, head_dim)


def rotate(
  x: Float[Array, 'B L H D'],
  cos: Float[Array, 'B L Half'],
  sin: Float[Array, 'B L Half'],
) -> Float[Array, 'B L H D']:
  """Rotates each pair (x[i], x[i + D/2]) by its angle (Su et al., 2021).

  Args:
    x: queries or keys. Shape `[B, L, H, D]`, D even.
    cos: cosines of `rotary_angles`. Shape `[B, L, D / 2]`.
    sin: sines of `rotary_angles`. Shape `[B, L, D / 2]`.

  Returns:
    Shape and dtype of `x`.
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None], sin[:, :, None]
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x.dtype)


def rotary_angles(
  positions: Int[Array, 'B L'], head_dim: int, base: float
) -> Float[Array, 'B L Half']:
  """Angles position * base^(-2i/D) for i < D/2 (Su et al., 2021).

  Args:
    positions: logical positions. Shape `[B, L]`.
    head_dim: width D of a head, even.
    base: base of the wavelengths.

  Returns:
    float32 radians. Shape `[B, L, D / 2]`.
  """
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  return (
    positions[..., None].astype(jnp.float32) * base ** -exponents[None, None]
  )
