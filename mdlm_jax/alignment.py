"""Networks whose output at a slot speaks of the token after it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def shifted_features(
  features: Callable,
  params: Any,
  cache: Any,
  ids: Int[Array, 'B L'],
  *,
  at: Int[Array, 'B W'] | None,
  valid: Bool[Array, 'B L'],
  segments: Int[Array, 'B L'] | None,
  **inputs: Any,
) -> tuple[Float[Array, 'B W d'], Any]:
  """Hidden states of the slots before the wanted ones.

  A network that began as an autoregressive one predicts at slot i the token of
  slot i + 1, and Dream (Ye et al. 2025, "Dream 7B", section 3.2) keeps it so.
  The token of slot i is therefore read at slot i - 1; that of a row's (or a
  packed document's) first valid slot at the slot itself. The network is asked
  for the min(W + 1, L) slots that hold both, once.

  Args:
    features: of the network, see `predict.Denoiser`.
    params: its parameters.
    cache: its cache.
    ids: the canvas. Shape `[B, L]`.
    at: contiguous slots whose tokens are wanted, None for all. Shape `[B, W]`.
    valid: False at padding. Shape `[B, L]`.
    segments: document of each slot when several are packed in a row.
    **inputs: the other inputs of `features`, passed on.

  Returns:
    Hidden states, one for each wanted slot, and the network's cache.
  """
  batch, length = ids.shape
  slots = at
  if at is None:
    slots = jnp.broadcast_to(jnp.arange(length), (batch, length))
  source = _read_at(slots, valid, segments)
  if at is None:
    asked, start = None, 0
  else:
    start = jnp.maximum(slots[:, :1] - 1, 0)
    asked = start + jnp.arange(min(at.shape[1] + 1, length))
  hidden, cache = features(
    params, cache, ids, at=asked, valid=valid, segments=segments, **inputs
  )
  picked = jnp.take_along_axis(hidden, (source - start)[..., None], 1)
  return picked, cache


def shifted_pair(
  noisy: Float[Array, 'B L d'],
  clean: Float[Array, 'B L d'],
  blocks: Int[Array, 'B L'],
  valid: Bool[Array, 'B L'],
  segments: Int[Array, 'B L'] | None,
) -> Float[Array, 'B L d']:
  """Hidden states that speak of each slot, of noisy text beside clean text.

  As in `shifted_features`; the slot before the first one of a block is in a
  block that is clean by then, and is read there.

  Args:
    noisy: hidden states of the noisy slots, see `Denoiser.paired`.
    clean: hidden states of the clean slots. Shape `[B, L, d]`.
    blocks: number of the block of each slot. Shape `[B, L]`.
    valid: False at padding. Shape `[B, L]`.
    segments: document of each slot when several are packed in a row.

  Returns:
    Hidden states, one for each slot.
  """
  slots = jnp.broadcast_to(jnp.arange(valid.shape[1]), valid.shape)
  source = _read_at(slots, valid, segments)
  same_block = jnp.take_along_axis(blocks, source, 1) == blocks
  source = source[..., None]
  return jnp.where(
    same_block[..., None],
    jnp.take_along_axis(noisy, source, 1),
    jnp.take_along_axis(clean, source, 1),
  )


def _read_at(slots, valid, segments):
  """The slots where those of the tokens at `slots` are read."""
  before = jnp.maximum(slots - 1, 0)
  follows = jnp.take_along_axis(valid, before, 1)
  if segments is not None:
    follows &= jnp.take_along_axis(segments, before, 1) == (
      jnp.take_along_axis(segments, slots, 1)
    )
  return jnp.where(follows, before, slots)
