"""Bounds and losses of masked diffusion, each as a sum and a count.

All of them read the log-probability that the network gives to the clean token
and the map of masked positions; a visible token costs nothing, whatever the
network says about it. Noise levels are those of rows or, where blocks of a row
have their own (Arriola et al. 2025, arXiv 2503.09573), of slots. Sums and
counts of batches and devices are added, and divided once.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mdlm_jax import schedules
from mdlm_jax.checks import check_values


class Total(NamedTuple):
  """A sum and the number of things it runs over; added with `jax.tree.map`.

  Attributes:
    sum: float32 scalar, in nats.
    count: float32 scalar.
  """

  sum: Float[Array, '']
  count: Float[Array, '']

  @property
  def mean(self) -> Float[Array, '']:
    """sum / count, and 0 with gradient 0 where the count is 0."""
    some = self.count > 0
    return jnp.where(some, self.sum / jnp.where(some, self.count, 1.0), 0.0)


def continuous_bound(
  target_log_probs: Float[Array, 'B L'],
  masked: Bool[Array, 'B L'],
  valid: Bool[Array, 'B L'],
  t: Float[Array, 'B'] | Float[Array, 'B L'],
  *,
  schedule: schedules.Schedule = schedules.linear(),
) -> Total:
  """The continuous-time bound on -log p(x), one draw of t and mask per row.

  sum over masked positions of -alpha'(t) / (1 - alpha(t)) * -log p(x_l | z_t)
  (MD4, arXiv 2406.04329, section 3; MDLM, arXiv 2406.07524, section 3.4). Its
  mean over t ~ U(0, 1) is the bound, in nats. LLaDA's pre-training loss is the
  linear case.

  Args:
    target_log_probs: log-probability of the clean token; anything at positions
      that are not masked. Shape `[B, L]`.
    masked: the masked positions, from the corruption. Shape `[B, L]`.
    valid: the positions the bound is about; for the bound of an answer given a
      prompt, the answer. Shape `[B, L]`.
    t: the noise level used for the corruption, in (0, 1]. Shape `[B]` or
      `[B, L]`.
    schedule: the masking schedule used for the corruption.

  Returns:
    The weighted sum over rows; count: valid positions.

  Example:
    At t = 1/2 each of the two masked tokens weighs 2.

    >>> masked = jnp.array([[True, True, False, False]])
    >>> valid, t = jnp.ones((1, 4), bool), jnp.array([0.5])
    >>> total = continuous_bound(jnp.full((1, 4), -2.0), masked, valid, t)
    >>> print(total.sum, total.count, total.mean)
    8.0 4.0 2.0
  """
  weight = schedule.weight(t)
  return Total(
    _weighted_sum(target_log_probs, masked, valid, weight), _count(valid)
  )


def discrete_bound(
  target_log_probs: Float[Array, 'B L'],
  masked: Bool[Array, 'B L'],
  valid: Bool[Array, 'B L'],
  t: Float[Array, 'B'] | Float[Array, 'B L'],
  *,
  num_steps: int,
  schedule: schedules.Schedule = schedules.linear(),
) -> Total:
  """The bound of a chain of T steps, one draw of the step and mask per row.

  As `continuous_bound` with the weight T (alpha_s - alpha_t) / (1 - alpha_t),
  s = t - 1/T (MD4, arXiv 2406.04329, section 3). It bounds -log p(x) of a
  sampler that makes T uniform steps of the exact reverse kernel, and falls to
  the continuous bound as T grows.

  Args:
    target_log_probs: as in `continuous_bound`. Shape `[B, L]`.
    masked: the masked positions. Shape `[B, L]`.
    valid: the positions the bound is about. Shape `[B, L]`.
    t: the noise level used for the corruption, on the grid 1/T, ..., 1 (see
      `time_draws.discrete_times`). Shape `[B]` or `[B, L]`.
    num_steps: number T of steps, at least 1.
    schedule: the masking schedule used for the corruption.

  Returns:
    The weighted sum over rows; count: valid positions.

  Raises:
    ValueError: `num_steps` is below 1.
  """
  if num_steps < 1:
    raise ValueError(f'{num_steps=} must be at least 1')
  step = jnp.round(t * num_steps)
  check_values(
    jnp.abs(t * num_steps - step) < 0.01, 't must lie on the grid 1/T, ..., 1'
  )
  s = (step - 1.0) / num_steps
  weight = num_steps * schedules.reveal_probability(schedule, t, s)
  return Total(
    _weighted_sum(target_log_probs, masked, valid, weight), _count(valid)
  )


def cross_entropy(
  target_log_probs: Float[Array, 'B L'], masked: Bool[Array, 'B L']
) -> Total:
  """Unweighted cross-entropy of the masked tokens (MaskGIT, BERT).

  Args:
    target_log_probs: as in `continuous_bound`. Shape `[B, L]`.
    masked: the masked positions. Shape `[B, L]`.

  Returns:
    Sum over masked positions; count: masked positions.

  Example:
    >>> masked = jnp.array([[True, True, False, False]])
    >>> total = cross_entropy(jnp.full((1, 4), -2.0), masked)
    >>> print(total.sum, total.count, total.mean)
    4.0 2.0 2.0
  """
  weight = jnp.ones(masked.shape[0])
  return Total(
    _weighted_sum(target_log_probs, masked, masked, weight), _count(masked)
  )


def answer_loss(
  target_log_probs: Float[Array, 'B L'],
  masked: Bool[Array, 'B L'],
  answer: Bool[Array, 'B L'],
  t: Float[Array, 'B'] | Float[Array, 'B L'],
  *,
  schedule: schedules.Schedule = schedules.linear(),
) -> Total:
  """LLaDA's fine-tuning loss: each row's bound per token of its own answer.

  Long and short answers weigh the same (LLaDA, arXiv 2502.09992, section 2.3).

  Args:
    target_log_probs: as in `continuous_bound`. Shape `[B, L]`.
    masked: the masked positions. Shape `[B, L]`.
    answer: the positions of the answer. Shape `[B, L]`.
    t: the noise level used for the corruption, in (0, 1]. Shape `[B]` or
      `[B, L]`.
    schedule: the masking schedule used for the corruption.

  Returns:
    Sum over rows of (weighted sum / answer length); count: rows that have an
    answer.
  """
  lengths = jnp.sum(answer, axis=1)
  weight = _by_slot(schedule.weight(t)) / jnp.maximum(lengths, 1)[:, None]
  return Total(
    _weighted_sum(target_log_probs, masked, answer, weight),
    _count(lengths > 0),
  )


def carry_over(
  log_probs: Float[Array, 'B L V'],
  ids: Int[Array, 'B L'],
  masked: Bool[Array, 'B L'],
) -> Float[Array, 'B L V']:
  """Puts all probability on the visible token where nothing is masked.

  MDLM's carry-over unmasking, for parity with implementations that do it in
  the network. The losses do not need it: they read masked positions only.

  Args:
    log_probs: shape `[B, L, V]`.
    ids: the corrupted tokens. Shape `[B, L]`.
    masked: the masked positions. Shape `[B, L]`.

  Returns:
    Log-probabilities, 0 and -inf at visible positions. Shape `[B, L, V]`.
  """
  visible = jax.nn.one_hot(ids, log_probs.shape[-1], dtype=bool)
  return jnp.where(
    masked[..., None], log_probs, jnp.where(visible, 0.0, -jnp.inf)
  )


def _weighted_sum(target_log_probs, masked, valid, weight):
  """Sum of weight * -log p where masked and valid, in float32."""
  chex.assert_equal_shape([target_log_probs, masked, valid])
  chex.assert_type([masked, valid], bool)
  weight = _by_slot(weight)
  chex.assert_shape(weight, (masked.shape[0], {1, masked.shape[1]}))
  masked &= valid
  # Both factors are replaced before the product: 0 * inf would give NaN in the
  # value or in the gradient.
  weight = jnp.where(masked, weight, 0.0)
  nats = jnp.where(masked, -target_log_probs, 0.0)
  return jnp.sum(weight * nats, dtype=jnp.float32)


def _by_slot(weight):
  """[B] as [B, 1]."""
  return weight[:, None] if weight.ndim == 1 else weight


def _count(positions):
  return jnp.sum(positions, dtype=jnp.float32)
