"""How a path keeps tokens: the schedulers kappa(tau) of flow matching.

Flow time tau = 1 - t runs from 0 (source) to 1 (data). The line is that of
Campbell et al. (2024, arXiv 2402.04997), the cubics those of Gat et al. (2024,
arXiv 2407.15595).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mdlm_jax.interning import interned
from mdlm_jax.schedules import Schedule


class Kappa(NamedTuple):
  """How a path keeps tokens, as three elementwise functions; hashable.

  Attributes:
    kappa: tau in [0, 1] -> probability that a token is the clean one, from
      kappa(0) = 0 to kappa(1) = 1 exactly, never falling.
    complement: tau -> 1 - kappa(tau), in a closed form without cancellation.
    derivative: tau -> kappa'(tau), never negative.
  """

  kappa: Callable
  complement: Callable
  derivative: Callable


@interned
def linear() -> Kappa:
  """kappa = tau; `schedules.linear`."""
  return Kappa(lambda tau: tau, lambda tau: 1.0 - tau, jnp.ones_like)


@interned
def polynomial(exponent: float) -> Kappa:
  """kappa = tau^exponent.

  Not `schedules.polynomial`, where the exponent is of the MASK share.

  Raises:
    ValueError: `exponent` is not above 0.
  """
  if not 0 < exponent < math.inf:
    raise ValueError(f'{exponent=} must be above 0 and finite')
  return Kappa(
    lambda tau: tau**exponent,
    lambda tau: -jnp.expm1(exponent * jnp.log(tau)),
    lambda tau: exponent * tau ** (exponent - 1.0),
  )


@interned
def cosine() -> Kappa:
  """kappa = 1 - cos(pi/2 tau); `schedules.cosine`."""
  half_pi = jnp.pi / 2

  def complement(tau):
    # cos(pi/2 tau), exact at tau = 1 and precise near it.
    return jnp.sin(half_pi * (1.0 - tau))

  def kappa(tau):
    # Each precise at its end, and exact there.
    near_start = 2.0 * jnp.sin(half_pi / 2 * tau) ** 2
    return jnp.where(tau < 0.5, near_start, 1.0 - complement(tau))

  return Kappa(
    kappa,
    complement,
    lambda tau: half_pi * jnp.sin(half_pi * tau),
  )


@interned
def cubic(start_slope: float = 0.0, end_slope: float = 0.0) -> Kappa:
  """The cubic with kappa'(0) = a and kappa'(1) = b.

  kappa = 3 tau^2 - 2 tau^3 + a (tau^3 - 2 tau^2 + tau) + b (tau^3 - tau^2).
  Slopes 1, 1 are the linear path; 0, 2 are kappa = tau^2.

  Args:
    start_slope: a, in [0, 3].
    end_slope: b, in [0, 3]; the cubic never falls within these bounds.

  Raises:
    ValueError: for a slope out of range.
  """
  for name, slope in (('start_slope', start_slope), ('end_slope', end_slope)):
    if not 0 <= slope <= 3:
      raise ValueError(f'{name}={slope} must lie in [0, 3]')

  def rise(s, first, last):
    """Of slope `first` at s = 0, written so that it does not cancel there."""
    slope = 3.0 - 2.0 * first - last
    return s * (first + s * (slope + s * (first + last - 2.0)))

  def derivative(tau):
    a, b = start_slope, end_slope
    return a + 2.0 * (3.0 - 2.0 * a - b) * tau + 3.0 * (a + b - 2.0) * tau * tau

  return Kappa(
    lambda tau: rise(tau, start_slope, end_slope),
    lambda tau: rise(1.0 - tau, end_slope, start_slope),
    lambda tau: jnp.maximum(derivative(tau), 0.0),
  )


@interned
def as_schedule(kappa: Kappa) -> Schedule:
  """The masking schedule alpha(t) = kappa(1 - t), for the rest of the library.

  Args:
    kappa: as of a path.

  Returns:
    The schedule; its inverse is found by bisection.

  Example:
    >>> schedule = as_schedule(polynomial(2.0))
    >>> print(schedule.alpha(jnp.array(0.25)), schedule.weight(jnp.array(0.5)))
    0.5625 1.3333334
  """

  def weight(t):
    return kappa.derivative(1.0 - t) / kappa.complement(1.0 - t)

  def inverse(alpha):
    def halve(_, bounds):
      low, high = bounds
      middle = (low + high) / 2
      below = kappa.kappa(middle) < alpha
      return jnp.where(below, middle, low), jnp.where(below, high, middle)

    alpha = jnp.asarray(alpha, jnp.result_type(float))
    bounds = (jnp.zeros_like(alpha), jnp.ones_like(alpha))
    low, high = jax.lax.fori_loop(0, 60, halve, bounds)
    # At the ends the bounds meet where kappa need not be exact.
    inner = (low + high) / 2
    return jnp.where(alpha <= 0, 1.0, jnp.where(alpha >= 1, 0.0, 1.0 - inner))

  return Schedule(
    alpha=lambda t: kappa.kappa(1.0 - t),
    masked=lambda t: kappa.complement(1.0 - t),
    derivative=lambda t: -kappa.derivative(1.0 - t),
    weight=weight,
    inverse=inverse,
  )
