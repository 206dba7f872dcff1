"""Remasking schedules: the probability that a committed token is taken back.

Each function returns one number a step, for `remasking`: the formula of its
paper, or the largest feasible number where the formula is above it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mdlm_jax.schedules import Schedule, check_grid, linear

Grid = tuple[float, ...]


def mask_levels(grid: Grid, schedule: Schedule) -> Float[np.ndarray, 'levels']:
  """1 - alpha at every level of the grid, in float64."""
  with jax.enable_x64(True), jax.ensure_compile_time_eval():
    masked = schedule.masked(jnp.asarray(grid, jnp.float64))
    return np.asarray(masked, np.float64)


def bounds(grid: Grid, schedule: Schedule = linear()) -> tuple[float, ...]:
  """The largest feasible sigma of each step.

  min(1, (1 - alpha_s) / alpha_t), and 1 where alpha_t = 0 and nothing is
  visible: with more, fewer tokens would be visible at s than the schedule says,
  even if every MASK were revealed (ReMDM, Wang et al. 2025, arXiv 2503.00307,
  equation 8).

  Args:
    grid: noise levels from 1.0 to 0.0, one more than there are steps.
    schedule: the masking schedule.

  Returns:
    One number a step.

  Example:
    >>> bounds((1.0, 0.5, 0.25, 0.0))
    (1.0, 0.5, 0.0)
  """
  masked = mask_levels(grid, schedule)
  return _floats(np.minimum(1.0, _over_alpha(masked[1:], masked[:-1])))


def cap(
  grid: Grid, eta: float, schedule: Schedule = linear()
) -> tuple[float, ...]:
  """ReMDM-cap: sigma = min(bound, eta) (arXiv 2503.00307, section 4.1).

  Args:
    grid: noise levels from 1.0 to 0.0.
    eta: the largest sigma, in [0, 1].
    schedule: the masking schedule.

  Returns:
    One number a step.

  Raises:
    ValueError: `eta` is not in [0, 1].

  Example:
    >>> cap((1.0, 0.5, 0.25, 0.0), 0.6)
    (0.6, 0.5, 0.0)
  """
  _check_share('eta', eta)
  return _floats(np.minimum(bounds(grid, schedule), eta))


def rescale(
  grid: Grid, eta: float, schedule: Schedule = linear()
) -> tuple[float, ...]:
  """ReMDM-rescale: sigma = eta bound (arXiv 2503.00307, section 4.1).

  Arguments, result and error are those of `cap`.

  Example:
    >>> rescale((1.0, 0.5, 0.25, 0.0), 0.6)
    (0.6, 0.3, 0.0)
  """
  _check_share('eta', eta)
  return _floats(eta * np.asarray(bounds(grid, schedule)))


def flow_corrector(
  grid: Grid, beta: float, schedule: Schedule = linear()
) -> tuple[float, ...]:
  """The corrector of discrete flow matching with backward weight beta.

  Gat et al. (2024, arXiv 2407.15595) add beta times the backward
  rate to 1 + beta times the forward rate. With the masked source a MASK is
  revealed at rate (1 + beta) alpha' / (1 - alpha) and a token masked at rate
  beta alpha' / alpha, so over a step

    sigma = beta (alpha_s - alpha_t) / alpha_t

  and the reveal probability of `remasking` is then exactly
  (1 + beta) (alpha_s - alpha_t) / (1 - alpha_t).

  Args:
    grid: noise levels from 1.0 to 0.0.
    beta: at least 0.
    schedule: the masking schedule.

  Returns:
    min(bound, formula) of each step; 1 where alpha_t = 0.

  Raises:
    ValueError: `beta` is negative or not finite.

  Example:
    >>> flow_corrector((1.0, 0.5, 0.25, 0.0), 0.5)
    (1.0, 0.25, 0.0)
  """
  if not (np.isfinite(beta) and beta >= 0):
    raise ValueError(f'{beta=} must be finite and at least 0')
  masked = mask_levels(grid, schedule)
  rates = beta * (masked[:-1] - masked[1:])
  formula = _over_alpha(rates, masked[:-1])
  return _floats(np.minimum(bounds(grid, schedule), formula))


def forward_backward(
  grid: Grid, schedule: Schedule = linear()
) -> tuple[float, ...]:
  """The forward-backward corrector (Campbell et al. 2022, arXiv 2205.14987).

  A step forward in noise is made after each step back:
  sigma = (alpha_s - alpha_t) / alpha_t (as arXiv 2503.00307 shows), which is
  `flow_corrector` with beta = 1. Arguments and result are those of `bounds`.

  Example:
    >>> forward_backward((1.0, 0.75, 0.5, 0.375, 0.0))
    (1.0, 1.0, 0.25, 0.0)
  """
  return flow_corrector(grid, 1.0, schedule)


def psi(
  grid: Grid, kappa: float, schedule: Schedule = linear()
) -> tuple[float, ...]:
  """Psi-samplers: the reverse posterior mixed with a fresh forward marginal.

  With probability kappa a position follows the reverse posterior, else it is
  masked anew from the predicted clean token (Deschenaux et al. 2026, arXiv
  2602.21185). The prediction of a visible token is that token, which therefore
  becomes MASK with probability

    sigma = (1 - kappa) (1 - alpha_s),

  always feasible. A MASK is revealed with probability kappa r + (1 - kappa)
  alpha_s, where r = (alpha_s - alpha_t) / (1 - alpha_t). Since alpha_s - r =
  (1 - alpha_s) alpha_t / (1 - alpha_t), that is r + sigma alpha_t /
  (1 - alpha_t), the reveal probability of `remasking`.

  Args:
    grid: noise levels from 1.0 to 0.0.
    kappa: share of the reverse posterior, in [0, 1].
    schedule: the masking schedule.

  Returns:
    One number a step.

  Raises:
    ValueError: `kappa` is not in [0, 1].

  Example:
    >>> psi((1.0, 0.5, 0.25, 0.0), 0.75)
    (0.125, 0.0625, 0.0)
  """
  _check_share('kappa', kappa)
  return _floats((1.0 - kappa) * mask_levels(grid, schedule)[1:])


def switch(
  grid: Grid, sigmas: tuple[float, ...], t_switch: float
) -> tuple[float, ...]:
  """ReMDM-switch: remasking begins at a noise level (arXiv 2503.00307, 4.2).

  Args:
    grid: noise levels from 1.0 to 0.0.
    sigmas: one number a step.
    t_switch: steps that start above this level get sigma 0.

  Returns:
    One number a step.

  Raises:
    ValueError: for another number of sigmas than steps, or a level outside
      [0, 1].

  Example:
    >>> switch((1.0, 0.5, 0.25, 0.0), (0.1, 0.1, 0.0), 0.5)
    (0.0, 0.1, 0.0)
  """
  _check_length(grid, sigmas)
  _check_share('t_switch', t_switch)
  active = np.asarray(grid)[:-1] <= t_switch
  return _floats(np.where(active, sigmas, 0.0))


def loop(
  times: Grid,
  eta: float,
  schedule: Schedule = linear(),
  *,
  t_on: float = 0.55,
  t_off: float = 0.05,
  alpha_on: float = 0.9,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """ReMDM-loop: unmask, remask at a constant level, finish (2503.00307, 4.2).

  alpha rises from 0 to alpha_on while time falls from 1 to t_on, stays there
  until t_off, and rises to 1. Steps that start in the flat part have
  sigma = min(bound, eta): a part of the tokens is drawn anew at each of them.
  The reference implementation lets alpha jump where a step crosses t_on or
  t_off; here every step starts where the one before ended.

  Args:
    times: from 1.0 to 0.0, strictly decreasing, one more than there are steps.
    eta: sigma in the flat part, in [0, 1].
    schedule: the masking schedule, which gives the noise level of an alpha.
    t_on: time at which the flat part begins.
    t_off: time at which it ends.
    alpha_on: share of visible tokens in the flat part.

  Returns:
    The grid and the sigmas for `remasking`.

  Raises:
    ValueError: for times that do not fall strictly from 1 to 0, or constants
      other than 0 < t_off < t_on < 1 and 0 < alpha_on < 1.

  Example:
    >>> loop((1.0, 0.5, 0.25, 0.0), 0.1, t_on=0.5, t_off=0.25, alpha_on=0.75)
    ((1.0, 0.25, 0.25, 0.0), (0.0, 0.1, 0.0))
  """
  check_grid(times)
  _check_share('eta', eta)
  if not 0 < t_off < t_on < 1:
    raise ValueError(f'0 < {t_off=} < {t_on=} < 1 must hold')
  if not 0 < alpha_on < 1:
    raise ValueError(f'{alpha_on=} must be between 0 and 1')
  alpha = np.interp(
    -np.asarray(times), [-1.0, -t_on, -t_off, 0.0], [0, alpha_on, alpha_on, 1]
  )
  with jax.enable_x64(True), jax.ensure_compile_time_eval():
    levels = np.asarray(schedule.inverse(jnp.asarray(alpha[1:-1])))
  grid = (1.0, *levels.tolist(), 0.0)
  starts = np.asarray(times)[:-1]
  in_loop = (t_off < starts) & (starts <= t_on)
  return grid, _floats(np.where(in_loop, cap(grid, eta, schedule), 0.0))


def check_sigmas(
  grid: Grid, sigmas: tuple[float, ...], schedule: Schedule
) -> None:
  """Raises ValueError unless 0 <= sigma <= bound at every step."""
  _check_length(grid, sigmas)
  for step, (sigma, bound) in enumerate(
    zip(sigmas, bounds(grid, schedule), strict=True)
  ):
    # A bound that the caller computed may differ in the last digits.
    if not 0 <= sigma <= bound + 1e-9:
      raise ValueError(
        f'{sigma=} of step {step}, from level {grid[step]} to '
        f'{grid[step + 1]}, must lie between 0 and {bound}: '
        'min(1, (1 - alpha_s) / alpha_t)'
      )


def _over_alpha(numerator, masked):
  """numerator / (1 - masked), infinite where nothing is visible."""
  some = masked < 1
  return np.where(some, numerator / np.where(some, 1.0 - masked, 1.0), np.inf)


def _check_length(grid, sigmas):
  if len(sigmas) != len(grid) - 1:
    raise ValueError(
      f'{len(sigmas)} sigmas for a grid of {len(grid) - 1} steps'
    )


def _check_share(name, value):
  if not 0 <= value <= 1:
    raise ValueError(f'{name}={value} must be in [0, 1]')


def _floats(array):
  return tuple(np.asarray(array, np.float64).tolist())
