"""Bounds on -log p of rows and of answers, with their standard errors.

An estimator (`bound_estimators`) makes one unbiased estimate per replicate. The
replicates are independent, so that their spread is the standard error, however
the calls of one estimate are stratified, paired or weighted.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax import canvas, noise, predict, schedules
from mdlm_jax.bound_estimators import Estimator, call_noise, chain_rule
from mdlm_jax.checks import check_integer, check_values
from mdlm_jax.vocab import Vocab


class Estimate(NamedTuple):
  """Independent estimates, their mean and its standard error, in nats.

  Attributes:
    mean: over the replicates. Shape `[B]`.
    standard_error: of the mean, from the spread of the replicates; NaN where
      the mean is infinite. Shape `[B]`.
    replicates: shape `[R, B]`.
  """

  mean: Float[Array, '*B']
  standard_error: Float[Array, '*B']
  replicates: Float[Array, 'R *B']


class AnswerScores(NamedTuple):
  """Scores of N answers to one prompt.

  Attributes:
    log_prob: estimates of the lower bound on log p(answer | prompt), in nats.
      Shape `[N]`.
    difference: [i, j] estimates log_prob[i] - log_prob[j], with the standard
      error that common random numbers leave. Shape `[N, N]`.
  """

  log_prob: Estimate
  difference: Estimate


def bound(
  denoiser: predict.Denoiser,
  params: Any,
  key: Key[Array, ''],
  ids: Int[Array, 'B L'],
  answer: Bool[Array, 'B L'],
  *,
  vocab: Vocab,
  estimator: Estimator,
  num_replicates: int,
  valid: Bool[Array, 'B L'] | None = None,
  positions: Int[Array, 'B L'] | None = None,
  segments: Int[Array, 'B L'] | None = None,
  row_ids: Int[Array, 'B'] | None = None,
  schedule: schedules.Schedule = schedules.linear(),
  calls_at_once: int = 1,
) -> Estimate:
  """The bound on -log p(answer | the other valid tokens) of every row.

  Costs `num_replicates * estimator.num_calls` network calls of the batch. A
  row's estimates depend on the key, its id and its logical positions only: rows
  of one id share their random numbers, those of other ids are independent.

  The estimators have one expectation for a network that is `time_free`. One
  that reads the noise level is told the masked share (or the masking
  probability) that the estimator has drawn; counts and probabilities are then
  bounds of two samplers.

  Args:
    denoiser: the network.
    params: its parameters.
    key: consumed.
    ids: the text. Shape `[B, L]`.
    answer: positions that are scored: all valid ones for the bound of a text.
      The others are seen as they are. Shape `[B, L]`.
    vocab: roles of the ids; those that may not be drawn have probability 0.
    estimator: what the calls of one estimate hide.
    num_replicates: independent estimates R, at least 2.
    valid: False at padding; None: no padding. Shape `[B, L]`.
    positions: logical positions; None: 0, 1, ... Shape `[B, L]`.
    segments: document of each slot when several are packed in a row; each has
      noise of its own. Shape `[B, L]`.
    row_ids: ids of the rows for the noise; None: 0, 1, ... Shape `[B]`.
    schedule: masking schedule that the network was trained with, which says
      the t of a masking probability.
    calls_at_once: calls of one estimate that run as one, where memory allows.

  Returns:
    The estimates, one a row; 0 for a row without an answer.

  Raises:
    ValueError: a number out of range; on concrete arrays an answer outside
      `valid`, or longer than a `chain_rule` has calls.
  """
  check_integer('num_replicates', num_replicates, 2)  # Or there is no spread.
  check_integer('calls_at_once', calls_at_once, 1)
  if valid is None:
    valid = jnp.ones(ids.shape, bool)
  if row_ids is None:
    row_ids = jnp.arange(len(ids))
  check_values(~answer | valid, 'answer must lie within valid')
  if estimator.max_tokens is not None:
    check_values(
      answer.sum(1) <= estimator.max_tokens,
      f'answers must have at most max_tokens={estimator.max_tokens}',
    )
  replicates = _replicates(
    denoiser,
    params,
    key,
    ids,
    answer,
    valid,
    positions,
    segments,
    row_ids,
    vocab=vocab,
    estimator=estimator,
    num_replicates=num_replicates,
    schedule=schedule,
    calls_at_once=calls_at_once,
  )
  return mean_over_replicates(replicates)


def weighted_nats(
  target_log_probs: Float[Array, '*S L'],
  masked: Bool[Array, '*S L'],
  weights: Float[Array, '*S L'],
) -> Float[Array, '*S']:
  """Sum of weight * -log p over the masked positions of every row.

  Args:
    target_log_probs: log-probability of the clean token; anything at positions
      that are not masked. Shape `[..., L]`.
    masked: shape `[..., L]`.
    weights: of every position; 0 asks for nothing. Shape `[..., L]`.

  Returns:
    In nats. Shape `[...]`.

  Example:
    >>> masked = jnp.array([True, True, False])
    >>> log_probs = jnp.array([-1.0, -jnp.inf, jnp.nan])
    >>> print(weighted_nats(log_probs, masked, jnp.array([3.0, 0.0, 5.0])))
    3.0
  """
  # Both factors are replaced before the product: 0 * inf would be NaN.
  scored = masked & (weights > 0)
  nats = jnp.where(scored, -target_log_probs, 0.0)
  return jnp.sum(jnp.where(scored, weights, 0.0) * nats, -1)


def mean_over_replicates(replicates: Float[Array, 'R *B']) -> Estimate:
  """Mean and its standard error.

  Args:
    replicates: independent, at least 2. Shape `[R, ...]`.

  Example:
    >>> mean, standard_error, _ = mean_over_replicates(jnp.array([1.0, 3.0]))
    >>> print(mean, standard_error)
    2.0 1.0
  """
  spread = jnp.std(replicates, axis=0, ddof=1)
  error = spread / len(replicates) ** 0.5
  return Estimate(replicates.mean(0), error, replicates)


def log_prob(
  denoiser: predict.Denoiser,
  params: Any,
  key: Key[Array, ''],
  prompt: Sequence[int],
  answers: Sequence[Sequence[int]],
  *,
  vocab: Vocab,
  estimator: Estimator | None = None,
  num_replicates: int = 8,
  prompt_id: int = 0,
  length: int | None = None,
  schedule: schedules.Schedule = schedules.linear(),
  calls_at_once: int = 1,
) -> AnswerScores:
  """Scores answers to a prompt under the same random numbers.

  All answers meet the same masks, as far as their lengths agree, so that what
  they share cancels in their differences. A score does not depend on the other
  answers.

  Args:
    denoiser: the network.
    params: its parameters.
    key: consumed.
    prompt: token ids, seen at every call; may be empty.
    answers: token ids of each, at least one.
    vocab: roles of the ids.
    estimator: what the calls of one estimate hide; None: the `chain_rule` of
      the longest answer, which has the smallest standard error per call
      (docs/likelihood.md).
    num_replicates: independent estimates, at least 2.
    prompt_id: for the noise; prompts of other ids have independent noise.
    length: slots to which all are padded, by default those of the longest;
      equal lengths are compiled once.
    schedule: as in `bound`.
    calls_at_once: as in `bound`.

  Returns:
    The scores. They are of whole answers; divide by a length, or subtract the
    score of the answer to a null prompt, for what tasks call normalised.

  Raises:
    ValueError: as `bound` and `canvas.from_rows`; no answer or an empty one.
  """
  if not answers or not all(len(answer) for answer in answers):
    raise ValueError('there must be answers, each of at least one token')
  if estimator is None:
    estimator = chain_rule(max(map(len, answers)))
  rows = canvas.from_rows(
    [[*prompt, *answer] for answer in answers], vocab, length=length
  )
  nats = bound(
    denoiser,
    params,
    key,
    rows.ids,
    rows.valid & (rows.positions >= len(prompt)),
    vocab=vocab,
    estimator=estimator,
    num_replicates=num_replicates,
    valid=rows.valid,
    positions=rows.positions,
    row_ids=jnp.full(len(answers), prompt_id),
    schedule=schedule,
    calls_at_once=calls_at_once,
  ).replicates
  log_probs = -nats
  return AnswerScores(
    mean_over_replicates(log_probs),
    mean_over_replicates(log_probs[:, :, None] - log_probs[:, None]),
  )


@functools.partial(
  jax.jit,
  static_argnames=(
    'denoiser',
    'vocab',
    'estimator',
    'num_replicates',
    'schedule',
    'calls_at_once',
  ),
)
def _replicates(
  denoiser,
  params,
  key,
  ids,
  answer,
  valid,
  positions,
  segments,
  row_ids,
  *,
  vocab,
  estimator,
  num_replicates,
  schedule,
  calls_at_once,
):
  def call(masks):
    # The ends of an incomplete schedule are the nearest it knows.
    ends = schedule.alpha(jnp.array([1.0, 0.0]))
    alpha = jnp.clip(1.0 - masks.mask_probability, *ends)
    log_probs = predict.target_log_probs(
      denoiser,
      params,
      vocab,
      jnp.where(masks.masked, vocab.mask_id, ids),
      ids,
      t=schedule.inverse(alpha),
      valid=valid,
      positions=positions,
      segments=segments,
    )
    return weighted_nats(log_probs, masks.masked, masks.weights)

  def replicate(key):
    def row_masks(row_key, positions, answer):
      row_noise = call_noise(row_key, positions, estimator.num_calls)
      return estimator.masks(row_noise, answer)

    # The network is told where there are none, which may save it time.
    slots = positions
    if slots is None:
      slots = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    keys = noise.row_keys(key, row_ids)
    masks = jax.vmap(row_masks, out_axes=1)(
      keys, noise.packed_positions(slots, segments), answer
    )
    return jax.lax.map(call, masks, batch_size=calls_at_once).sum(0)

  keys = noise.row_keys(key, jnp.arange(num_replicates))
  return jax.lax.map(replicate, keys)
