"""Masking schedules, time grids and planned counts.

Diffusion time runs from t = 0 (clean) to t = 1 (all MASK). `alpha(t)` is the
probability that a token is kept, 1 - alpha(t) that it is masked.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from mdlm_jax.checks import check_integer, check_values
from mdlm_jax.interning import interned


class Schedule(NamedTuple):
  """A masking schedule as five elementwise functions; hashable.

  The bound of the losses runs over t in [0, 1]. It is complete only where
  alpha(0) = 1 and alpha(1) = 0; each constructor says how far it is from that.
  alpha(0) < 1 leaves out a reconstruction term (tokens still masked at t = 0),
  alpha(1) > 0 a prior term (tokens still visible at t = 1): the bound is then
  too low by both.

  Attributes:
    alpha: t in [0, 1] -> probability that a token is kept, decreasing.
    masked: t -> 1 - alpha(t), probability that a token is masked, in a closed
      form without cancellation.
    derivative: t -> alpha'(t), never positive.
    weight: t in (0, 1] -> -alpha'(t) / (1 - alpha(t)), the weight of the
      continuous-time bound (MD4, arXiv 2406.04329, section 3), in a closed
      form without cancellation. Infinite or very large at t = 0.
    inverse: alpha -> t, for alpha between alpha(1) and alpha(0).
  """

  alpha: Callable
  masked: Callable
  derivative: Callable
  weight: Callable
  inverse: Callable


@interned
def linear() -> Schedule:
  """alpha(t) = 1 - t: t itself is the masking probability.

  Complete: alpha(0) = 1, alpha(1) = 0. LLaDA's masking probability
  (1 - eps) t + eps is this schedule with times drawn from (eps, 1].
  """
  return Schedule(
    alpha=lambda t: 1.0 - t,
    masked=lambda t: t,
    derivative=lambda t: -jnp.ones_like(t),
    weight=lambda t: 1.0 / t,
    inverse=lambda alpha: 1.0 - alpha,
  )


@interned
def cosine() -> Schedule:
  """alpha(t) = 1 - cos(pi/2 (1 - t)), MD4's cosine schedule.

  Complete: alpha(0) = 1, alpha(1) = 0. It is not MDLM's `cosine`, where
  alpha(t) is about cos(pi/2 t): that is `mirrored_cosine`.
  """
  half_pi = jnp.pi / 2
  # cos(pi/2 (1 - t)) = sin(pi/2 t): exact at t = 0 and precise near it.
  return Schedule(
    alpha=lambda t: 1.0 - jnp.sin(half_pi * t),
    masked=lambda t: jnp.sin(half_pi * t),
    derivative=lambda t: -half_pi * jnp.sin(half_pi * (1.0 - t)),
    weight=lambda t: (
      half_pi * jnp.sin(half_pi * (1.0 - t)) / jnp.sin(half_pi * t)
    ),
    inverse=lambda alpha: jnp.arcsin(1.0 - alpha) / half_pi,
  )


@interned
def mirrored_cosine() -> Schedule:
  """alpha(t) = cos(pi/2 t), the `cosine` of MDLM and BD3-LM without a floor.

  Complete: alpha(0) = 1, alpha(1) = 0.
  """
  quarter_pi = jnp.pi / 4
  return Schedule(
    alpha=lambda t: jnp.sin(2 * quarter_pi * (1.0 - t)),
    # 1 - cos(x) without cancellation.
    masked=lambda t: 2.0 * jnp.sin(quarter_pi * t) ** 2,
    derivative=lambda t: -2 * quarter_pi * jnp.sin(2 * quarter_pi * t),
    weight=lambda t: 2 * quarter_pi / jnp.tan(quarter_pi * t),
    inverse=lambda alpha: 1.0 - jnp.arcsin(alpha) / (2 * quarter_pi),
  )


@interned
def logarithmic() -> Schedule:
  """alpha(t) = 1 - log2(1 + t) (BD3-LM, arXiv 2503.09573).

  Complete: alpha(0) = 1, alpha(1) = 0.
  """
  log_two = float(np.log(2.0))
  return Schedule(
    alpha=lambda t: 1.0 - jnp.log1p(t) / log_two,
    masked=lambda t: jnp.log1p(t) / log_two,
    derivative=lambda t: -1.0 / ((1.0 + t) * log_two),
    weight=lambda t: 1.0 / ((1.0 + t) * jnp.log1p(t)),
    inverse=lambda alpha: jnp.expm1((1.0 - alpha) * log_two),
  )


@interned
def polynomial(exponent: float) -> Schedule:
  """alpha(t) = 1 - t^exponent (MD4).

  Complete: alpha(0) = 1, alpha(1) = 0. For exponents below 1 alpha'(0) is
  infinite.

  Raises:
    ValueError: `exponent` is not above 0.
  """
  if not exponent > 0:
    raise ValueError(f'{exponent=} must be above 0')
  return Schedule(
    alpha=lambda t: 1.0 - t**exponent,
    masked=lambda t: t**exponent,
    derivative=lambda t: -exponent * t ** (exponent - 1.0),
    weight=lambda t: exponent / t,
    inverse=lambda alpha: (1.0 - alpha) ** (1.0 / exponent),
  )


@interned
def geometric(sigma_min: float = 1e-5, sigma_max: float = 20.0) -> Schedule:
  """alpha(t) = exp(-sigma), sigma = sigma_min^(1-t) sigma_max^t (SEDD, MDLM).

  Incomplete at both ends: alpha(0) = exp(-sigma_min), alpha(1) =
  exp(-sigma_max). With the defaults both gaps are below 1.1e-5 per token and
  the bound lacks about that share of its terms.

  Raises:
    ValueError: not 0 < sigma_min < sigma_max.
  """
  if not 0 < sigma_min < sigma_max:
    raise ValueError(f'0 < {sigma_min=} < {sigma_max=} must hold')
  log_ratio = float(np.log(sigma_max / sigma_min))

  def sigma(t):
    return sigma_min * jnp.exp(log_ratio * t)

  return Schedule(
    alpha=lambda t: jnp.exp(-sigma(t)),
    masked=lambda t: -jnp.expm1(-sigma(t)),
    derivative=lambda t: -log_ratio * sigma(t) * jnp.exp(-sigma(t)),
    weight=lambda t: log_ratio * sigma(t) / jnp.expm1(sigma(t)),
    inverse=lambda alpha: jnp.log(-jnp.log(alpha) / sigma_min) / log_ratio,
  )


@interned
def log_linear(floor: float = 1e-3) -> Schedule:
  """alpha(t) = 1 - (1 - floor) t, MDLM's log-linear noise.

  Complete at t = 0; alpha(1) = floor, so the bound lacks the prior term: a
  share `floor` of the tokens is visible even at t = 1. The name comes from
  sigma(t) = -log alpha(t).

  Raises:
    ValueError: `floor` is not in [0, 1).
  """
  if not 0 <= floor < 1:
    raise ValueError(f'{floor=} must lie in [0, 1)')
  slope = 1.0 - floor
  return Schedule(
    alpha=lambda t: 1.0 - slope * t,
    masked=lambda t: slope * t,
    derivative=lambda t: -slope * jnp.ones_like(t),
    weight=lambda t: 1.0 / t,
    inverse=lambda alpha: (1.0 - alpha) / slope,
  )


SCHEDULES = {
  'linear': linear,
  'cosine': cosine,
  'geometric': geometric,
  'log_linear': log_linear,
  'mirrored_cosine': mirrored_cosine,
  'logarithmic': logarithmic,
  'square': functools.partial(polynomial, 2.0),
  'square_root': functools.partial(polynomial, 0.5),
}


def named_schedule(name: str) -> Schedule:
  """The schedule of `SCHEDULES` with its default constants.

  Raises:
    ValueError: `SCHEDULES` does not have the name.
  """
  if name not in SCHEDULES:
    raise ValueError(f'schedule={name!r} must be one of {", ".join(SCHEDULES)}')
  return SCHEDULES[name]()


def reveal_probability(schedule: Schedule, t, s):
  """The exact reverse kernel: P(a position masked at t is visible at s).

  (alpha_s - alpha_t) / (1 - alpha_t) for s <= t, elementwise (MD4, section 2;
  MDLM, arXiv 2406.07524, section 3.2); (t - s) / t for the linear schedule.

  Args:
    schedule: the masking schedule.
    t: the time before the step, in (0, 1].
    s: the time after the step, in [0, t].

  Returns:
    Probabilities in [0, 1]. It is 1 where 1 - alpha_t vanishes in the dtype of
    t. Where alpha(0) < 1 it is below 1 at s = 0.

  Example:
    >>> print(reveal_probability(linear(), jnp.array(0.5), jnp.array(0.25)))
    0.5
  """
  before, after = schedule.masked(t), schedule.masked(s)
  some = before > 0
  return jnp.where(some, (before - after) / jnp.where(some, before, 1.0), 1.0)


def uniform_grid(num_steps: int) -> tuple[float, ...]:
  """Equal steps from 1 to 0.

  Args:
    num_steps: number K of steps, at least 1.

  Returns:
    K + 1 strictly decreasing times, the first exactly 1, the last exactly 0.

  Raises:
    ValueError: `num_steps` is below 1.

  Example:
    >>> uniform_grid(4)
    (1.0, 0.75, 0.5, 0.25, 0.0)
  """
  _check_num_steps(num_steps)
  return tuple((num_steps - k) / num_steps for k in range(num_steps + 1))


def cosine_grid(num_steps: int) -> tuple[float, ...]:
  """t_k = cos(pi/2 k/K): small steps first (MaskGIT; MD4's cosine grid).

  Args:
    num_steps: number K of steps, at least 1.

  Returns:
    K + 1 strictly decreasing times, the first exactly 1, the last exactly 0.

  Raises:
    ValueError: `num_steps` is below 1.

  Example:
    >>> [round(t, 3) for t in cosine_grid(3)]
    [1.0, 0.866, 0.5, 0.0]
  """
  _check_num_steps(num_steps)
  inner = np.cos(np.pi / 2 * np.arange(num_steps) / num_steps)
  return (*inner.tolist(), 0.0)


def check_grid(grid: tuple[float, ...]) -> None:
  """Raises ValueError unless a grid falls strictly from 1.0 to 0.0."""
  falls = all(a > b for a, b in itertools.pairwise(grid))
  if len(grid) < 2 or grid[0] != 1 or grid[-1] != 0 or not falls:
    raise ValueError(f'a grid must fall strictly from 1.0 to 0.0, not {grid}')


def plan_counts(
  num_open: int | Int[Array, '*batch'],
  num_steps: int,
  grid: tuple[float, ...] | None = None,
) -> Int[Array, '*batch {num_steps}']:
  """How many positions each step reveals; every row sums to `num_open`.

  Without a grid the split is even and the first steps take the remainder
  (LLaDA). With one, round(num_open * grid[k]) positions are still masked after
  k steps (MaskGIT). More steps than positions is legal: some counts are 0.

  Args:
    num_open: number of positions to reveal, per row; may be traced.
    num_steps: number K of steps, at least 1.
    grid: share of positions still masked, K + 1 levels from 1.0 to 0.0 such as
      `cosine_grid(num_steps)`, or None.

  Returns:
    Counts of at least 0. int32, shape `[..., num_steps]`.

  Raises:
    ValueError: `num_steps` below 1, or a grid of another length or that does
      not fall strictly; on concrete arrays also a negative `num_open`.

  Example:
    >>> print(plan_counts(7, 3))
    [3 2 2]
    >>> print(plan_counts(7, 3, cosine_grid(3)))
    [1 2 4]
  """
  _check_num_steps(num_steps)
  num_open = jnp.asarray(num_open, jnp.int32)[..., None]
  check_values(num_open >= 0, 'num_open must be at least 0')
  if grid is None:
    quotient, remainder = jnp.divmod(num_open, num_steps)
    return quotient + (jnp.arange(num_steps) < remainder).astype(jnp.int32)
  check_grid(grid)
  if len(grid) != num_steps + 1:
    raise ValueError(f'a grid of {len(grid)} levels is not for {num_steps=}')
  # float32 in 64-bit mode too, where half-way cases such as cos(pi/3) round to
  # the other side: an exact law would be one of other counts.
  left = jnp.round(num_open * jnp.asarray(grid, jnp.float32)).astype(jnp.int32)
  return left[..., :-1] - left[..., 1:]


@interned
def grid_counts(grid: tuple[float, ...]) -> Callable:
  """`plan_counts` on a grid, as the `counts` of a rule.

  Args:
    grid: share of positions still masked before and after each call, such as
      `cosine_grid(num_steps)` (MaskGIT).

  Returns:
    `counts(num_open, num_steps) -> [..., num_steps]`.

  Raises:
    ValueError: for a grid that does not fall strictly from 1 to 0.

  Example:
    >>> print(grid_counts(cosine_grid(3))(7, 3))
    [1 2 4]
  """
  check_grid(grid)
  return lambda num_open, num_steps: plan_counts(num_open, num_steps, grid)


@interned
def floor_counts(eps: float = 1e-3) -> Callable:
  """Dream's counts: the floor of what the linear kernel reveals on average.

  On the times t_k = 1 - (1 - eps) k / num_steps, call k writes
  floor(n (1 - t_(k+1) / t_k)) of the n positions still masked, and the last
  call all that are left (Ye et al. 2025, `diffusion_generate`). What the floor
  drops is left to later calls: the first often write nothing, the last writes
  more than its share. In float32, as published: the floor makes rounding
  visible.

  Args:
    eps: the last time, in (0, 1).

  Returns:
    `counts(num_open, num_steps) -> [..., num_steps]`, for the `counts` of a
    rule.

  Raises:
    ValueError: for `eps` out of range; the counts, as `plan_counts` does.

  Example:
    >>> print(floor_counts()(8, 5))
    [1 1 1 2 3]
  """
  if not 0 < eps < 1:
    raise ValueError(f'{eps=} must be above 0 and below 1')

  def counts(num_open, num_steps):
    _check_num_steps(num_steps)
    num_open = jnp.asarray(num_open, jnp.int32)
    check_values(num_open >= 0, 'num_open must be at least 0')
    times = _falling_times(eps, num_steps)
    shares = 1 - times[1:] / times[:-1]

    def call(left, share):
      count = jnp.floor(left.astype(jnp.float32) * share).astype(jnp.int32)
      return left - count, count

    left, early = jax.lax.scan(call, num_open, jnp.asarray(shares[:-1]))
    return jnp.moveaxis(jnp.concatenate([early, left[None]]), 0, -1)

  return counts


def _falling_times(eps, num_steps):
  """float32 times from 1 to eps, rounded as torch.linspace rounds them."""
  k = np.arange(num_steps + 1)
  step = np.float64((np.float32(eps) - np.float32(1)) / np.float32(num_steps))
  from_end = np.float64(np.float32(eps)) - step * (num_steps - k)
  times = np.where(k < (num_steps + 1) // 2, 1 + step * k, from_end)
  return times.astype(np.float32)


def _check_num_steps(num_steps):
  check_integer('num_steps', num_steps, 1)
