"""Counts known in advance: how many slots each call writes."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax import noise as noise_lib
from mdlm_jax.checks import check_integer
from mdlm_jax.interning import interned
from mdlm_jax.reverse import top_eligible
from mdlm_jax.rules.cells import order_cells
from mdlm_jax.rules.contract import Rule, Update
from mdlm_jax.rules.reverse_kernel import kernel
from mdlm_jax.schedules import Schedule, linear, plan_counts


@interned
def by_confidence(num_steps: int, *, counts: Callable = plan_counts) -> Rule:
  """The most confident candidates first, in counts planned once per row.

  The positions depend on the values, so this is not the reverse kernel: with an
  exact denoiser it samples exactly only one position at a time, and only with a
  score that does not depend on the drawn token (Chang et al. 2022; Nie et al.
  2025). In random order, `draws.random_order`, one at a time is exact as well.

  Args:
    num_steps: network calls, at least 1. More than the open slots is legal: an
      empty step still costs its call.
    counts: `counts(num_open, num_steps) -> [num_steps]`: how many slots each
      call writes, such as `schedules.grid_counts(grid)` or
      `schedules.floor_counts()`; by default the slots are split evenly, the
      remainder first.

  Returns:
    The rule.

  Raises:
    ValueError: for `num_steps` below 1, or as `counts` raises.

  Example:
    >>> by_confidence(4).calls(num_slots=10)
    4
  """

  def score(noise, step, row, proposal):
    del noise, step, row
    return proposal.confidence

  return _best_first(num_steps, counts, score)


@interned
def maskgit(
  num_steps: int,
  choice_temperature: float,
  *,
  counts: Callable = plan_counts,
) -> Rule:
  """Confidence perturbed by Gumbel noise that fades over the calls.

  The score of a slot at call k = 0, 1, ... is

    log(confidence) + choice_temperature * (1 - (k + 1) / num_steps) * Gumbel,

  so the slots of a call are sampled without replacement, and those of the last
  are the best (MaskGIT's decoder; Chang et al. 2022, section 3.2). The score of
  the draw is the probability whose logarithm is meant: `draws.probability` in
  the paper. `row_maximum` and `margin` serve as well; what is not above 0 comes
  last, so `negative_entropy` and `random_order` do not. The paper's counts are
  `schedules.grid_counts(schedules.cosine_grid(num_steps))`.

  Exact one at a time with the exact denoiser only with a score that does not
  depend on the drawn token: `row_maximum` or `margin`, not `probability`.

  Args:
    num_steps: network calls, at least 1.
    choice_temperature: at least 0; at 0 this is `by_confidence`.
    counts: as in `by_confidence`.

  Returns:
    The rule.

  Raises:
    ValueError: for settings out of range, or as `counts` raises.

  Example:
    >>> maskgit(12, 4.5).calls(num_slots=256)
    12
  """
  if not 0 <= choice_temperature <= 1e6:
    raise ValueError(f'{choice_temperature=} must be between 0 and 1e6')

  def scale(step):
    return choice_temperature * (1 - (step + 1) / num_steps)

  def score(noise, step, row, proposal):
    del row
    log_confidence = jnp.log(jnp.maximum(proposal.confidence, 0))
    return log_confidence + scale(step) * noise

  def cells(step, row, proposal, state):
    del state
    if scale(step) == 0:
      return [(1.0, np.zeros(row.masked.shape))]
    confidence = np.asarray(proposal.confidence, np.float64)
    log_weights = np.log(np.maximum(confidence, 1e-300)) / scale(step)
    return order_cells(_weights(log_weights, row.masked), row.masked)

  return _best_first(num_steps, counts, score, _position_gumbels, cells)


@interned
def by_sampled_confidence(
  num_steps: int, temperature: float, *, counts: Callable = plan_counts
) -> Rule:
  """Slots sampled without replacement with weights exp(confidence / T).

  The first slot of a call is drawn with probability softmax(confidence / T)
  over the MASK slots, the next among the rest, and so on (Dream's `alg_temp`;
  Ye et al. 2025). Drawn as the largest of confidence / T + Gumbel, which has
  the same law.

  Exact one at a time with the exact denoiser only with a score that does not
  depend on the drawn token.

  Args:
    num_steps: network calls, at least 1.
    temperature: T above 0, in units of the draw's score; `by_confidence` is the
      limit of 0, random order that of infinity.
    counts: as in `by_confidence`; Dream's are `schedules.floor_counts()`.

  Returns:
    The rule.

  Raises:
    ValueError: for settings out of range, or as `counts` raises.

  Example:
    >>> by_sampled_confidence(8, 0.2).calls(num_slots=32)
    8
  """
  if not 1e-6 <= temperature <= 1e6:
    raise ValueError(f'{temperature=} must be between 1e-6 and 1e6')

  def score(noise, step, row, proposal):
    del step, row
    return proposal.confidence / temperature + noise

  def cells(step, row, proposal, state):
    del step, state
    log_weights = np.asarray(proposal.confidence) / temperature
    return order_cells(_weights(log_weights, row.masked), row.masked)

  return _best_first(num_steps, counts, score, _position_gumbels, cells)


@interned
def by_binomial_confidence(
  grid: tuple[float, ...], schedule: Schedule = linear()
) -> Rule:
  """As many slots as the reverse kernel would reveal, the most confident ones.

  At each step from noise level t to s the number of slots is drawn from
  Binomial(number masked, (alpha_s - alpha_t) / (1 - alpha_t)), as in `kernel`;
  which ones is decided by the score. The network sees the numbers of MASK that
  it was trained on, at their levels.

  Not exact with the exact denoiser on any grid: several slots of one step are
  drawn independently. As the grid gets finer it is one at a time, and exact
  with a score that does not depend on the drawn token.

  Args:
    grid: noise levels from 1.0 to 0.0, strictly decreasing, one more than the
      number of calls.
    schedule: the masking schedule, linear by default.

  Returns:
    The rule.

  Raises:
    ValueError: for a grid that does not fall strictly from 1 to 0.

  Example:
    >>> by_binomial_confidence((1.0, 0.5, 0.0)).calls(num_slots=10)
    2
  """
  exact = kernel(grid, schedule)

  def update(noise, step, row, proposal, state):
    revealed = exact.update(noise, step, row, proposal, state)
    write = top_eligible(proposal.confidence, row.masked, revealed.write.sum())
    return revealed._replace(write=write)

  return exact._replace(update=update)


@interned
def left_to_right(num_steps: int, *, counts: Callable = plan_counts) -> Rule:
  """The first MASK slots in reading order, in counts planned once per row.

  One slot at a time this is autoregressive decoding; with an exact denoiser it
  samples exactly, by the chain rule.

  Args:
    num_steps: network calls, at least 1.
    counts: as in `by_confidence`.

  Returns:
    The rule.

  Raises:
    ValueError: for `num_steps` below 1, or as `counts` raises.

  Example:
    >>> left_to_right(10).calls(num_slots=10)
    10
  """

  def score(noise, step, row, proposal):
    del noise, step, proposal
    return -jnp.arange(row.masked.shape[0], dtype=jnp.float32)

  return _best_first(num_steps, counts, score)


@interned
def dilated(base: int = 2) -> Rule:
  """Groups of distant slots, coarse to fine.

  The n MASK slots of a row are counted 0, 1, ... from the left. With R the
  least integer of at least 1 for which base^R >= n, call k = 1..R writes those
  at multiples of base^(R - k) (Luxembourg et al. 2025, arXiv 2506.19037, the
  dilated unmasking scheduler; there the stride is floor(n / base^k), which is
  the same where n is a power of the base). In base 2 no call writes two
  neighbours, save in a row of two.

  The groups do not depend on values: with an exact denoiser the only error is
  that of drawing the slots of one group independently.

  Args:
    base: ratio of successive strides, at least 2.

  Returns:
    The rule; adaptive, since rows differ in R.

  Raises:
    ValueError: for a `base` that is no integer of at least 2.

  Example:
    >>> dilated().calls(num_slots=32), dilated(4).calls(num_slots=33)
    (5, 3)
  """
  check_integer('base', base, 2)

  def calls(num_slots):
    return next(r for r in itertools.count(1) if base**r >= num_slots)

  def init(noise, row, num_ids):
    del noise, num_ids
    index = jnp.cumsum(row.masked) - 1
    powers = base ** np.arange(1, calls(row.masked.shape[0]))
    num_calls = 1 + (jnp.asarray(powers, jnp.int32) < row.masked.sum()).sum()
    return (index, num_calls), None

  def update(noise, step, row, proposal, state):
    del noise, proposal
    index, num_calls = state
    stride = base ** jnp.maximum(num_calls - 1 - step, 0)
    return Update(row.masked & (index % stride == 0), state)

  return Rule(calls, update, init=init, adaptive=True)


def largest_count(counts: Callable, num_slots: int, num_steps: int) -> int:
  """The most slots that any call may write in a window of `num_slots`.

  A static bound: it makes `top_eligible` several times faster.
  """
  with jax.ensure_compile_time_eval():
    table = counts(jnp.arange(num_slots + 1), num_steps)
  return int(np.asarray(table).max())


def _best_first(num_steps, counts, score, noise=None, cells=None) -> Rule:
  """Writes, per call, the planned number of MASK slots of highest score.

  `score(noise, step, row, proposal) -> [K]`.
  """
  counts(0, num_steps)  # Raises now and not inside a trace.

  def init(noise, row, num_ids):
    del noise, num_ids
    return counts(row.masked.sum(), num_steps), None

  def update(noise, step, row, proposal, state):
    write = top_eligible(
      score(noise, step, row, proposal),
      row.masked,
      state[step],
      max_count=largest_count(counts, row.masked.shape[0], num_steps),
    )
    return Update(write, state)

  rule = Rule(lambda num_slots: num_steps, update, init=init)
  return rule if noise is None else rule._replace(noise=noise, cells=cells)


def _position_gumbels(row_key, positions):
  # The default mode cannot exceed 15.94, a cliff in the law of the order.
  def at_position(key):
    return jax.random.gumbel(key, dtype=jnp.float32, mode='high')

  return jax.vmap(at_position)(noise_lib.position_keys(row_key, positions))


def _weights(log_weights, masked):
  """Weights up to a factor, positive at the slots of interest."""
  largest = np.max(log_weights, where=masked, initial=-np.inf)
  return np.exp(np.clip(log_weights - largest, -600, 0))
