"""The one adapter between a network and everything that uses it."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax import mesh_context
from mdlm_jax.alignment import shifted_features
from mdlm_jax.caches import Computed, computed_features
from mdlm_jax.constraints import Constraint, allowed_at
from mdlm_jax.corruption import corrupt
from mdlm_jax.guidance import Guidance, combine
from mdlm_jax.schedules import Schedule
from mdlm_jax.vocab import Vocab

# Of one device, in target log-probabilities; float32, three such arrays.
_MOST_LOGITS = 2**26


class Denoiser(NamedTuple):
  """A network as two pure functions; `params` pass through untouched.

  Attributes:
    features: `features(params, cache, ids, *, at, step, t, valid, positions,
      segments) -> (hidden, cache)`. `ids`, `valid`, `positions`, `segments`
      (or None) have shape `[B, L]`, `t` `[B]` is the noise level, `step` the
      number of the call. `at` `[B, W]` holds the slots whose hidden states are
      wanted, distinct in a row, None all of them. `hidden` is `[B, W, d]`.
      `cache=None` asks for a full forward pass. Given the cache that a call
      returned, only the slots `at` are computed and stored anew, and what they
      see of the others is what is stored; a slot L is none, for rows that want
      fewer than W. A network without a cache returns `()`.
    head: `head(params, hidden) -> logits`, `[B, W, d]` to `[B, W, V]`.
    time_free: declares that `features` ignores `t` and `step`, so that a canvas
      that did not change has the prediction it had.
    shifted: declares that the logits at a slot are those of the token after it,
      see `alignment.shifted_features`. Everything that asks the network through
      this module reads the flag: sampler, losses and bounds.
    attention_block: declares that a slot sees its own and earlier blocks of so
      many logical positions only; None: that every slot may see all.
    paired: present where `attention_block` is: `paired(params, noisy_ids,
      clean_ids, *, t, valid, positions, segments) -> hidden [B, L, d]`, hidden
      states that speak of each slot of `noisy_ids` when the blocks before its
      own are those of `clean_ids`: all blocks of the bound in one pass.
      `t` is `[B]`, or `[B, L]` for levels of slots; `positions` None are
      0, 1, ... from the left, which may cost less.
  """

  features: Callable
  head: Callable
  time_free: bool = False
  shifted: bool = False
  attention_block: int | None = None
  paired: Callable | None = None


class Prediction(NamedTuple):
  """Logits and their two-level reduction; log p(v) = logits[v] - log_z.

  Attributes:
    logits: float32, -inf at ids that may not be drawn. Shape `[..., V]`.
    block_maxima: the largest logit of each block of the vocabulary. Shape
      `[..., V / b]`.
    block_log_sums: log of the summed exponentials of each block. Shape
      `[..., V / b]`.
    log_z: log of the sum over the vocabulary. Shape `[...]`.
  """

  logits: Float[Array, '*S V']
  block_maxima: Float[Array, '*S N']
  block_log_sums: Float[Array, '*S N']
  log_z: Float[Array, '*S']


def predict(
  denoiser: Denoiser,
  params: Any,
  cache: Any,
  ids: Int[Array, 'B L'],
  *,
  vocab: Vocab,
  t: Float[Array, 'B'],
  valid: Bool[Array, 'B L'],
  positions: Int[Array, 'B L'],
  segments: Int[Array, 'B L'] | None = None,
  at: Int[Array, 'B W'] | None = None,
  step: Int[Array, ''] | int = 0,
  guidance: Guidance | None = None,
  constraint: Constraint | None = None,
  computed: Computed | None = None,
) -> tuple[Prediction, Any]:
  """One step's prediction at the target slots: one network call, or two.

  Raw logits, combined under `guidance`; then -inf at what may not be drawn at
  all, or not at this slot under `constraint`; then one reduction.

  Args:
    denoiser: the network.
    params: its parameters.
    cache: its cache, None for a full forward pass; of two calls a pair.
    ids: the canvas. Shape `[B, L]`.
    vocab: which ids may be drawn; the others get logit -inf.
    t: noise level, 0 clean and 1 all MASK. Shape `[B]`.
    valid: False at padding. Shape `[B, L]`.
    positions: logical positions. Shape `[B, L]`.
    segments: document of each slot when several are packed in a row.
    at: target slots, None for all. Shape `[B, W]`.
    step: number of the call.
    guidance: how a null condition is subtracted (`guidance.guide`).
    constraint: which ids may be drawn at each slot (`constraints.constrain`).
    computed: slots that are computed where there is a cache; None: `at`.

  Returns:
    The prediction of leading shape `[B, W]`, and the network's cache: a pair,
    of the condition and of the null condition, where both are asked.
  """
  call = functools.partial(
    network_logits,
    denoiser,
    params,
    at=at,
    step=step,
    t=t,
    valid=valid,
    positions=positions,
    segments=segments,
    computed=computed,
  )
  if guidance is None or guidance.scale == 0:
    logits, cache = call(cache, ids)
  elif guidance.scale == -1:
    logits, cache = call(cache, guidance.null_canvas(ids))
  else:
    cond_cache, null_cache = (None, None) if cache is None else cache
    cond, cond_cache = call(cond_cache, ids)
    null, null_cache = call(null_cache, guidance.null_canvas(ids))
    logits, cache = (
      combine(cond, null, guidance.scale),
      (cond_cache, null_cache),
    )
  at_slots = None if constraint is None else allowed_at(constraint, at)
  return reduce_logits(allowed(logits, vocab, at_slots)), cache


def network_logits(
  denoiser: Denoiser,
  params: Any,
  cache: Any,
  ids: Int[Array, 'B L'],
  *,
  computed: Computed | None = None,
  **inputs: Any,
) -> tuple[Float[Array, 'B W V'], Any]:
  """The network's own logits of the tokens at the wanted slots, and its cache.

  Args:
    denoiser: the network.
    params: its parameters.
    cache: its cache, None for a full forward pass.
    ids: the canvas. Shape `[B, L]`.
    computed: slots that are computed where there is a cache; None: `at`.
    **inputs: the other inputs of `Denoiser.features`.
  """
  features = denoiser.features
  if computed is not None and cache is not None:
    features = functools.partial(computed_features, features, computed)
  hidden, cache = _aligned(denoiser, features)(params, cache, ids, **inputs)
  return denoiser.head(params, hidden), cache


def _aligned(denoiser, features):
  """Hidden states at each slot that speak of it."""
  if denoiser.shifted:
    return functools.partial(shifted_features, features)
  return features


def target_log_probs(
  denoiser: Denoiser,
  params: Any,
  vocab: Vocab,
  corrupted_ids: Int[Array, 'B L'],
  clean_ids: Int[Array, 'B L'],
  *,
  t: Float[Array, 'B'] | Float[Array, 'B L'],
  valid: Bool[Array, 'B L'],
  positions: Int[Array, 'B L'] | None = None,
  segments: Int[Array, 'B L'] | None = None,
) -> Float[Array, 'B L']:
  """Log-probability of every clean token given the corrupted canvas.

  A network that attends by blocks is given the clean tokens of the blocks
  before each (Arriola et al. 2025, arXiv 2503.09573, section 3.2).

  The probability of MASK and of the other ids that may not be drawn is zero
  (Sahoo et al. 2024, section 3.2.3). Visible tokens are not carried over: the
  losses count masked positions only.

  Args:
    denoiser: the network.
    params: its parameters.
    vocab: which ids may be drawn.
    corrupted_ids: what the network sees. Shape `[B, L]`.
    clean_ids: the targets. Shape `[B, L]`.
    t: noise level. Shape `[B]`, or `[B, L]` for a network that attends by
      blocks.
    valid: False at padding. Shape `[B, L]`.
    positions: logical positions; None: 0, 1, ... from the left, with which a
      network that attends by blocks may take less time. Shape `[B, L]`.
    segments: document of each slot when several are packed in a row.

  Returns:
    float32, -inf where the target may not be drawn. Shape `[B, L]`.
  """
  inputs = {'t': t, 'valid': valid, 'segments': segments}
  if denoiser.paired is None:
    if positions is None:
      length = clean_ids.shape[1]
      positions = jnp.broadcast_to(jnp.arange(length), clean_ids.shape)
    hidden, _ = _aligned(denoiser, denoiser.features)(
      params,
      None,
      corrupted_ids,
      at=None,
      step=0,
      positions=positions,
      **inputs,
    )
  else:
    hidden = denoiser.paired(
      params, corrupted_ids, clean_ids, positions=positions, **inputs
    )

  def of_slots(params, hidden, ids):
    logits = allowed(denoiser.head(params, hidden), vocab)
    # Not by an index, to which all logits would go where ids are split.
    is_id = ids[..., None] == jnp.arange(vocab.size)
    log_probs = jnp.sum(logits, -1, where=is_id) - jax.nn.logsumexp(logits, -1)
    return jnp.where((ids >= 0) & (ids < vocab.size), log_probs, jnp.nan)

  return _in_chunks(of_slots, vocab.size)(params, hidden, clean_ids)


def _in_chunks(of_slots, num_ids):
  """The same function of slots, for some after others where logits are many.

  The gradient computes the logits again, so that those of all slots never are
  in memory together; on two CPU cores that takes no more time.
  """

  def in_chunks(params, hidden, ids):
    num_devices = math.prod(mesh_context.context_axes().values())
    num_chunks = _divisor(
      ids.shape[1], ids.size * num_ids / num_devices / _MOST_LOGITS
    )
    if num_chunks == 1:
      return of_slots(params, hidden, ids)

    def scan(params, hidden, ids):
      # Neighbours in different chunks: all devices have slots of each.
      hidden, chunks = (
        jnp.moveaxis(x.reshape(len(x), -1, num_chunks, *x.shape[2:]), 2, 0)
        for x in (hidden, ids)
      )
      of_chunk = jax.checkpoint(
        functools.partial(of_slots, params), prevent_cse=False
      )
      log_probs = jax.lax.map(lambda x: of_chunk(*x), (hidden, chunks))
      return jnp.moveaxis(log_probs, 0, 2).reshape(ids.shape)

    return mesh_context.by_rows(scan, params, hidden, ids)

  return in_chunks


def _divisor(number, least):
  """The smallest divisor that is at least so large; the number if none is."""
  divisors = (n for n in range(1, number) if number % n == 0 and n >= least)
  return next(divisors, number)


def corrupted_log_probs(
  denoiser: Denoiser,
  params: Any,
  key: Key[Array, ''],
  clean_ids: Int[Array, 'B L'],
  t: Float[Array, 'B'] | Float[Array, 'B L'],
  valid: Bool[Array, 'B L'],
  *,
  vocab: Vocab,
  schedule: Schedule,
  row_ids: Int[Array, 'B'],
  given: Bool[Array, 'B L'] | None = None,
  positions: Int[Array, 'B L'] | None = None,
  segments: Int[Array, 'B L'] | None = None,
) -> tuple[Float[Array, 'B L'], Bool[Array, 'B L']]:
  """Corrupts rows and asks the network for them.

  The losses take what it returns.

  Args:
    denoiser: the network.
    params: its parameters.
    key: of the corruption, consumed.
    clean_ids: the text. Shape `[B, L]`.
    t: noise level, of each row or of each slot. Shape `[B]` or `[B, L]`.
    valid: False at padding. Shape `[B, L]`.
    vocab: roles of the ids.
    schedule: the masking schedule.
    row_ids: ids of the rows for the noise. Shape `[B]`.
    given: tokens that are never masked, such as BOS. Shape `[B, L]`.
    positions: logical positions; None: 0, 1, ... from the left. Shape `[B, L]`.
    segments: document of each slot when several are packed in a row.

  Returns:
    `target_log_probs` and the masked positions, `[B, L]` each.
  """
  corrupted_ids, masked = corrupt(
    key,
    clean_ids,
    t,
    valid,
    mask_id=vocab.mask_id,
    schedule=schedule,
    row_ids=row_ids,
    positions=positions,
    segments=segments,
    protected=given,
  )
  log_probs = target_log_probs(
    denoiser,
    params,
    vocab,
    corrupted_ids,
    clean_ids,
    t=t,
    valid=valid,
    positions=positions,
    segments=segments,
  )
  return log_probs, masked


def allowed(
  logits: Float[Array, '*S V'],
  vocab: Vocab,
  at_slots: Bool[Array, '*S V'] | None = None,
) -> Float[Array, '*S V']:
  """Logits in float32 or wider, -inf at ids that may not be drawn.

  Args:
    logits: any floating dtype. Shape `[..., V]`.
    vocab: which ids may be drawn.
    at_slots: which of them may be drawn at each slot, None for all. Shape
      `[..., V]`.

  Returns:
    float32 (float64 for float64 logits). Shape `[..., V]`.

  Raises:
    ValueError: V is not the size of the vocabulary.

  Example:
    >>> print(allowed(jnp.zeros(3, jnp.bfloat16), Vocab(size=3, mask_id=1)))
    [  0. -inf   0.]
  """
  num_ids = logits.shape[-1]
  if num_ids != vocab.size:
    raise ValueError(
      f'the head has {num_ids} columns for a vocabulary of {vocab.size} ids'
    )
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  drawable = vocab.drawable if at_slots is None else vocab.drawable & at_slots
  logits = jnp.where(drawable, logits, -jnp.inf)
  # The largest becomes 0: log_z is then small, and so is its rounding.
  largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
  return logits - jnp.where(jnp.isfinite(largest), largest, 0.0)


def reduce_logits(logits: Float[Array, '*S V']) -> Prediction:
  """The two-level log-sum-exp of logits.

  Unlike a log-softmax it leaves no second array of the size of the logits.

  Args:
    logits: float32 or wider, -inf at ids that may not be drawn. Shape
      `[..., V]`.

  Returns:
    The logits and their sums. `log_z` is not finite where a logit is NaN or
    +inf, or where all are -inf.

  Example:
    >>> print(jnp.exp(reduce_logits(jnp.log(jnp.array([1.0, 3.0]))).log_z))
    4.0
  """
  num_blocks, block_size = block_shape(logits.shape[-1])
  blocks = logits.reshape(logits.shape[:-1] + (num_blocks, block_size))
  # Kept, or XLA's CPU back end computes the maxima anew in every fusion.
  maxima = jax.lax.optimization_barrier(blocks.max(-1))
  shift = jnp.where(maxima == -jnp.inf, 0.0, maxima)
  sums = jnp.exp(blocks - shift[..., None]).sum(-1)
  block_log_sums = shift + jnp.log(sums)
  log_z = jax.nn.logsumexp(block_log_sums, -1)
  return Prediction(logits, maxima, block_log_sums, log_z)


@functools.cache
def block_shape(num_ids: int) -> tuple[int, int]:
  """Number and size of the vocabulary blocks: the divisor next to sqrt(V).

  Example:
    >>> block_shape(32_000), block_shape(7)
    ((200, 160), (7, 1))
  """
  size = next(b for b in range(math.isqrt(num_ids), 0, -1) if num_ids % b == 0)
  return num_ids // size, size
