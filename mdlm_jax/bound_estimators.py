"""Estimators of the bound: what each network call hides, and with what weight.

For a network that predicts the tokens of an answer from any part of it, the
bound on -log p(answer | the rest) is an average over orders of writing,

    E over orders of sum_i -log p(x_i | tokens written before it)
      = integral over m in (0, 1] of E[nats at masked positions] / m
      = mean over k = 1 ... L of (L / k) E[nats at k masked positions]

(the second with every position masked independently with probability m: MD4,
arXiv 2406.04329, section 3; the third with k positions masked uniformly: LLaDA,
arXiv 2502.09992, appendix B; equal by Ou et al., arXiv 2406.03736, section
3.3). An estimator draws the orders, m or k of some network calls. Each is
unbiased for every answer length, but for `gauss_legendre`, which says when.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax import noise
from mdlm_jax.checks import check_integer
from mdlm_jax.interning import interned


class CallNoise(NamedTuple):
  """The noise of one row.

  Attributes:
    levels: in (0, 1], one per call. Shape `[M]`.
    uniforms: in [0, 1). Shape `[M, L]`.
  """

  levels: Float[Array, 'M']
  uniforms: Float[Array, 'M L']


class Masks(NamedTuple):
  """What the network is asked about one row, and how its answers add up.

  Attributes:
    masked: positions that a call hides. Shape `[M, L]`.
    weights: of -log p of each position; the bound is estimated by their
      weighted sum over calls and masked positions. Shape `[M, L]`.
    mask_probability: the noise level of each call as a share of MASK, in
      [0, 1]. Shape `[M]`.
  """

  masked: Bool[Array, 'M L']
  weights: Float[Array, 'M L']
  mask_probability: Float[Array, 'M']


class Estimator(NamedTuple):
  """One unbiased estimate from a number of network calls; hashable.

  Attributes:
    num_calls: network calls M of one estimate.
    masks: `masks(noise, answer [L]) -> Masks`, for one row.
    max_tokens: the longest answer, None for any.
  """

  num_calls: int
  masks: Callable
  max_tokens: int | None = None


def call_noise(
  row_key: Key[Array, ''], positions: Int[Array, 'L'], num_calls: int
) -> CallNoise:
  """The noise of one row, a function of its key and logical positions only.

  Args:
    row_key: consumed.
    positions: logical positions. Shape `[L]`.
    num_calls: network calls M.
  """
  level_key, mask_key = jax.random.split(row_key)
  uniforms = jax.vmap(lambda key: jax.random.uniform(key, num_calls))(
    noise.position_keys(mask_key, positions)
  )
  return CallNoise(1.0 - jax.random.uniform(level_key, num_calls), uniforms.T)


@interned
def stratified_time(num_calls: int, *, nonempty: bool = False) -> Estimator:
  """Independent masks at one masking probability of each of M equal strata.

  The integral over m; with the linear schedule m is t, and the weight that of
  `losses.continuous_bound`, divided by M.

  Args:
    num_calls: network calls M, at least 1.
    nonempty: masks are drawn given that they hide something, and weigh
      1 - (1 - m)^L as much: no call is wasted, and no weight exceeds L / M,
      where 1/m has no limit.

  Returns:
    The estimator.

  Raises:
    ValueError: `num_calls` is no integer of at least 1.
  """
  check_integer('num_calls', num_calls, 1)
  share = np.full(num_calls, 1 / num_calls)

  def masks(noise, answer):
    return _independent_masks(
      _strata(noise.levels), share, noise.uniforms, answer, nonempty
    )

  return Estimator(num_calls, masks)


@interned
def gauss_legendre(num_calls: int, *, nonempty: bool = False) -> Estimator:
  """Independent masks at the M Gauss-Legendre nodes of (0, 1).

  The integrand over m is a polynomial of degree L - 1, so that M nodes are
  exact in expectation for answers of L <= 2 M tokens. For longer ones the
  error is that of the quadrature, and no number of replicates shows it.

  Args:
    num_calls: network calls M, at least 1.
    nonempty: see `stratified_time`.

  Returns:
    The estimator.

  Raises:
    ValueError: `num_calls` is no integer of at least 1.
  """
  check_integer('num_calls', num_calls, 1)
  nodes, weights = np.polynomial.legendre.leggauss(num_calls)

  def masks(noise, answer):
    return _independent_masks(
      jnp.asarray((nodes + 1) / 2, noise.uniforms.dtype),
      weights / 2,
      noise.uniforms,
      answer,
      nonempty,
    )

  return Estimator(num_calls, masks)


@interned
def complement_time(num_calls: int) -> Estimator:
  """Pairs of calls: a mask at m, and at 1 - m all that it left visible.

  The complement of independent masks at m is a draw at 1 - m and has that
  weight, 1 / (1 - m). m is stratified over (0, 1/2]. Every pair scores every
  token once.

  Args:
    num_calls: network calls M, even and at least 2.

  Returns:
    The estimator.

  Raises:
    ValueError: `num_calls` is odd or below 2.
  """
  check_integer('num_calls', num_calls, 2)
  if num_calls % 2:
    raise ValueError(f'{num_calls=} must be even: the calls go in pairs')
  share = np.full(num_calls // 2, 1 / num_calls)

  def masks(noise, answer):
    level = _strata(noise.levels[::2]) / 2
    few = _independent_masks(level, share, noise.uniforms[::2], answer, False)
    rest = Masks(
      answer & ~few.masked,
      jnp.broadcast_to((share / (1 - level))[:, None], few.weights.shape),
      1 - level,
    )
    return _concatenated(few, rest)

  return Estimator(num_calls, masks)


@interned
def exact_count(num_calls: int) -> Estimator:
  """k positions masked uniformly, k stratified over 1 ... L (LLaDA).

  The mean over k, with weight L / k: at most L, and never an empty mask. LLaDA
  (arXiv 2502.09992, appendix B.5) draws k for one call and spaces the others
  evenly, rounded; rounding halves to even makes its estimate biased where L / M
  is not whole, which strata are not.

  Args:
    num_calls: network calls M, at least 1.

  Returns:
    The estimator.

  Raises:
    ValueError: `num_calls` is no integer of at least 1.
  """
  check_integer('num_calls', num_calls, 1)

  def masks(noise, answer):
    size = jnp.sum(answer)
    counts = _count_at(_strata(noise.levels), size)
    return count_masks(counts, noise.uniforms, answer)

  return Estimator(num_calls, masks)


@interned
def complement_count(num_calls: int) -> Estimator:
  """Pairs of calls: k positions masked, then the other L - k; and all at once.

  k = L has no complement and is the first call, with its own share 1/L of the
  mean over k; the pairs have k stratified over 1 ... L - 1, in its lower half,
  and share the rest.

  Args:
    num_calls: network calls M, odd and at least 3.

  Returns:
    The estimator.

  Raises:
    ValueError: `num_calls` is even or below 3.
  """
  check_integer('num_calls', num_calls, 3)
  if num_calls % 2 == 0:
    raise ValueError(
      f'{num_calls=} must be odd: pairs, and one call that masks everything'
    )

  def masks(noise, answer):
    size = jnp.sum(answer)
    whole = count_masks(size[None], noise.uniforms[:1], answer)
    whole = whole._replace(weights=whole.weights / jnp.maximum(size, 1))
    counts = _count_at(_strata(noise.levels[1::2]) / 2, size - 1)
    few = count_masks(counts, noise.uniforms[1::2], answer)
    masked = answer & ~few.masked
    left = jnp.sum(masked, 1)
    weight = (size - 1) / ((num_calls - 1) * jnp.stack([counts, left]))
    few_weights, rest_weights = jnp.where(
      jnp.stack([few.masked, masked]), weight[..., None], 0.0
    )
    rest = Masks(masked, rest_weights, left / jnp.maximum(size, 1))
    return _concatenated(whole, few._replace(weights=few_weights), rest)

  return Estimator(num_calls, masks)


@interned
def chain_rule(max_tokens: int) -> Estimator:
  """One random order, one call per token, which scores the next token only.

  Exact for a network whose conditionals are those of one joint: every order
  then gives log p(answer). Otherwise one draw of the mean over orders, and the
  spread is only what the network contradicts itself. On the shipped model it
  leaves 0.033 nats per token at 128 calls of a 16-token answer, `exact_count`
  0.076 (docs/likelihood.md).

  Args:
    max_tokens: network calls M; answers may not be longer. Those of a shorter
      one that are left over hide and score nothing.

  Returns:
    The estimator.

  Raises:
    ValueError: `max_tokens` is no integer of at least 1.
  """
  check_integer('max_tokens', max_tokens, 1)

  def masks(noise, answer):
    rank = _ranks(noise.uniforms[:1], answer)
    written = jnp.arange(max_tokens)[:, None]
    size = jnp.sum(answer)
    share = jnp.maximum(size - written[:, 0], 0) / jnp.maximum(size, 1)
    return Masks(
      answer & (rank >= written),
      jnp.where(answer & (rank == written), 1.0, 0.0),
      share,
    )

  return Estimator(max_tokens, masks, max_tokens)


def count_masks(
  counts: Int[Array, 'M'],
  uniforms: Float[Array, 'M L'],
  answer: Bool[Array, 'L'],
) -> Masks:
  """The deterministic part of `exact_count`: the lowest `counts` are masked.

  Args:
    counts: positions to mask, in [1, L] for an answer of L tokens. Shape `[M]`.
    uniforms: distinct within a call. Shape `[M, L]`.
    answer: the positions of the answer. Shape `[L]`.

  Returns:
    Masks with weight L / (k M).

  Example:
    >>> masks = count_masks(
    ...   jnp.array([1]), jnp.array([[0.9, 0.5, 0.2]]), jnp.array([1, 1, 0]) > 0
    ... )
    >>> print(masks.masked, masks.weights[0, 1])
    [[False  True False]] 2.0
  """
  size = jnp.sum(answer)
  masked = answer & (_ranks(uniforms, answer) < counts[:, None])
  weight = size / (jnp.maximum(counts, 1) * len(counts))
  return Masks(
    masked,
    jnp.broadcast_to(weight[:, None], masked.shape),
    counts / jnp.maximum(size, 1),
  )


def _independent_masks(level, share, uniforms, answer, nonempty):
  """Masked where u < m; weight share / m, of all or of the non-empty masks."""
  share = jnp.asarray(share, uniforms.dtype)
  if nonempty:
    uniforms, some = _given_one_below(level, uniforms, answer)
    share *= some
  masked = answer & (uniforms < level[:, None])
  weights = jnp.broadcast_to((share / level)[:, None], masked.shape)
  return Masks(masked, weights, level)


def _given_one_below(level, uniforms, answer):
  """Uniforms given that the answer's least is below the level; P(it is).

  The least of L uniforms is below x with F(x) = 1 - (1 - x)^L, and the others
  are uniform above it. So F(least) is scaled by F(level), the others follow.
  """
  size = jnp.maximum(jnp.sum(answer), 1)
  some = -jnp.expm1(size * jnp.log1p(-level))
  first = jnp.argmin(jnp.where(answer, uniforms, 1.0), axis=1, keepdims=True)
  least = jnp.take_along_axis(uniforms, first, 1)[:, 0]
  below = -jnp.expm1(size * jnp.log1p(-least)) * some
  moved = -jnp.expm1(jnp.log1p(-below) / size)
  stretch = (1 - moved) / (1 - least)
  rest = moved[:, None] + (uniforms - least[:, None]) * stretch[:, None]
  # Rounding may not lift the least to the level.
  return jnp.where(jnp.arange(answer.size) == first, 0.0, rest), some


def _strata(levels):
  """(i + u_i) / M: one number in (0, 1] per call, in the call's stratum."""
  return (jnp.arange(len(levels)) + levels) / len(levels)


def _count_at(level, size):
  """1 ... size in equal shares of the levels; 1 for an empty range."""
  return jnp.maximum(jnp.ceil(level * size), 1).astype(jnp.int32)


def _ranks(uniforms, answer):
  """How many positions of the answer have a smaller number; L elsewhere."""
  keys = jnp.where(answer, uniforms, jnp.inf)
  order = jnp.argsort(keys, axis=1)
  return jnp.where(answer, jnp.argsort(order, axis=1), answer.size)


def _concatenated(*parts):
  return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
