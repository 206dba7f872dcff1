"""What is particular to networks that attend by blocks.

They are trained, scored and sampled as all others: `Denoiser.paired` gives all
blocks of the bound in one pass, and `time_draws.block_times` a noise level to
each (Arriola et al. 2025, arXiv 2503.09573). Here is an estimator of their
bound that needs as many calls as a block has tokens, and the search for the
range of noise levels in which their loss varies least.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax import likelihood, predict, schedules, time_draws
from mdlm_jax.bound_estimators import Estimator, Masks
from mdlm_jax.checks import check_integer
from mdlm_jax.interning import interned
from mdlm_jax.vocab import Vocab


@interned
def chain_rule_in_blocks(block: int) -> Estimator:
  """One random order in every block at once: as many calls as it has tokens.

  A call hides in each block the tokens from some place of its order on, and
  scores those at that place: as `bound_estimators.chain_rule`, for all blocks
  together, since each is given the clean ones before it. With blocks of 1 all
  is hidden and scored in one call, which gives the exact -log p of an
  autoregressive network, without noise.

  Args:
    block: the `attention_block` of the network. Rows must begin at position 0
      in slot 0.

  Returns:
    The estimator, for answers of any length.

  Raises:
    ValueError: `block` is no integer of at least 1.
  """
  check_integer('block', block, 1)

  def masks(noise, answer):
    places = jnp.arange(block)[:, None]
    filling = -answer.size % block
    uniforms, hidden = (
      jnp.pad(x, (0, filling)).reshape(-1, block)
      for x in (noise.uniforms[0], answer)
    )
    earlier = uniforms[:, None, :] < uniforms[:, :, None]
    rank = jnp.sum(earlier & hidden[:, None, :], 2).reshape(-1)[: answer.size]
    masked = answer & (rank >= places)
    weights = jnp.where(answer & (rank == places), 1.0, 0.0)
    return Masks(masked, weights, (block - places[:, 0]) / block)

  return Estimator(block, masks)


def ranges(
  widths: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9), step: float = 0.05
) -> tuple[tuple[float, float], ...]:
  """Ranges (t_min, t_max] of noise levels among which one is chosen.

  Args:
    widths: of the ranges, in (0, 1].
    step: distance of the lower ends of ranges of one width.

  Example:
    >>> ranges((0.9,), 0.05)
    ((0.0, 0.9), (0.05, 0.95), (0.1, 1.0))
  """
  return tuple(
    (round(float(low), 6), round(float(low) + width, 6))
    for width in widths
    for low in np.arange(0, 1 - width + step / 2, step)
  )


@functools.partial(
  jax.jit, static_argnames=('denoiser', 'vocab', 'block', 'schedule')
)
def variance_by_range(
  denoiser: predict.Denoiser,
  params: Any,
  key: Key[Array, ''],
  ids: Int[Array, 'B L'],
  valid: Bool[Array, 'B L'],
  among: Float[Array, 'R 2'],
  *,
  vocab: Vocab,
  block: int,
  schedule: schedules.Schedule = schedules.linear(),
) -> Float[Array, 'R']:
  """Variance over blocks of the loss at noise levels of each range.

  The range of the least variance is the one to train on for a while (Arriola et
  al. 2025, arXiv 2503.09573): few masks leave a block without a
  loss, many ask for what cannot be known. All ranges meet the same random
  numbers and the same text, whose own variance they share.

  Args:
    denoiser: the network.
    params: its parameters.
    key: consumed.
    ids: held-out text, in rows that begin at position 0. Shape `[B, L]`.
    valid: False at padding; a block with padding is left out. Shape `[B, L]`.
    among: lower and upper ends, such as `ranges()`. Shape `[R, 2]`.
    vocab: roles of the ids.
    block: tokens of a block; also for a network that sees all.
    schedule: masking schedule of the training.

  Returns:
    Of the loss per token of a block. Shape `[R]`.
  """
  num_rows, length = ids.shape
  times_key, corruption_key = jax.random.split(key)
  row_ids = jnp.arange(num_rows)
  levels = time_draws.block_times(
    time_draws.stratified_times, times_key, row_ids, num_rows,
    length=length, block=block,
  )  # fmt: skip

  def by_block(x):
    filling = -length % block
    return jnp.pad(x, ((0, 0), (0, filling))).reshape(-1, block)

  whole = by_block(valid).all(1)

  def variance(ends):
    low, high = ends
    t = low + (high - low) * levels
    log_probs, masked = predict.corrupted_log_probs(
      denoiser, params, corruption_key, ids, t, valid,
      vocab=vocab, schedule=schedule, row_ids=row_ids,
    )  # fmt: skip
    losses = likelihood.weighted_nats(
      *map(by_block, (log_probs, masked, schedule.weight(t)))
    )
    return jnp.var(losses / block, where=whole)

  return jax.lax.map(variance, among)
