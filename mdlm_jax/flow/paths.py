"""Mixture paths from noise to data, and their corruption.

A path keeps each token with probability kappa(tau) and draws it from the source
otherwise,

  p_tau(z | x) = kappa(tau) 1[z = x] + (1 - kappa(tau)) pi(z)

(Gat et al. 2024, arXiv 2407.15595; Campbell et al. 2024, arXiv 2402.04997).
With MASK as source this is masked diffusion, alpha(t) = kappa(1 - t). With
uniform tokens it is the process of UDLM (Schiff et al. 2024, arXiv 2412.10193),
and pi may move from one to the other (GIDD, von Ruette et al. 2025, arXiv
2503.04482).
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from mdlm_jax import noise as noise_lib
from mdlm_jax.checks import check_values
from mdlm_jax.flow.kappas import Kappa, linear
from mdlm_jax.interning import interned
from mdlm_jax.vocab import Vocab

_LINEAR = linear()


class PathNoise(NamedTuple):
  """The noise of one position, or of an array of them.

  Attributes:
    keep: uniform; decides whether the token changes. In [0, 1).
    share: uniform; decides between MASK and a uniform token. In [0, 1).
    pick: random bits; decide which uniform token.
  """

  keep: Float[Array, '*S']
  share: Float[Array, '*S']
  pick: UInt[Array, '*S']


class Source(NamedTuple):
  """Where a path begins; functions are elementwise, hashable.

  Attributes:
    probability: `probability(ids, tau)`: pi of each id, broadcast.
    draw: `draw(noise, tau) -> ids`.
    absorbing: whether every token but MASK is surely clean.
    stationary: whether pi does not depend on tau.
  """

  probability: Callable
  draw: Callable
  absorbing: bool
  stationary: bool


class Path(NamedTuple):
  """A path from noise to data; hashable.

  Attributes:
    kappa: probability of the clean token.
    source: law of the token otherwise.
  """

  kappa: Kappa
  source: Source


@interned
def masked(vocab: Vocab, kappa: Kappa = _LINEAR) -> Path:
  """The path that begins with MASK everywhere: masked diffusion.

  Raises:
    ValueError: for a `kappa` that does not rise from 0 to 1.
  """
  _check_kappa(kappa)

  def probability(ids, tau):
    return jnp.where(ids == vocab.mask_id, jnp.ones_like(tau), 0.0)

  def draw(noise, tau):
    del tau
    return jnp.full(noise.pick.shape, vocab.mask_id, jnp.int32)

  return Path(kappa, Source(probability, draw, True, True))


@interned
def uniform(vocab: Vocab, kappa: Kappa = _LINEAR) -> Path:
  """The path that begins with uniform tokens, among those that may be drawn.

  Raises:
    ValueError: for a `kappa` that does not rise from 0 to 1.

  Example:
    >>> path = uniform(Vocab(size=4, mask_id=1, pad_id=0))
    >>> print(path.source.probability(jnp.arange(4), jnp.array(0.5)))
    [0.  0.  0.5 0.5]
  """
  _check_kappa(kappa)
  return Path(kappa, _mixed_source(vocab, jnp.ones_like, stationary=True))


@interned
def hybrid(vocab: Vocab, uniform_share: float) -> Path:
  """The path of GIDD: from MASK to data, by way of some uniform tokens.

    p_tau(z | x) = (tau 1[z = x] + t 1[z = MASK] + c u(z)) / (1 + c),
    c = 2 p sqrt(tau t) / (1 - p), t = 1 - tau,

  u uniform over the tokens that may be drawn (von Ruette et al. 2025, arXiv
  2503.04482, section 4, gamma = 1). At tau = 1/2 a share p of the tokens is
  uniform noise, at both ends none. Both derivatives are infinite at both ends.

  Args:
    vocab: roles of the ids.
    uniform_share: p, in [0, 1); 0 is the masked path.

  Returns:
    The path. Its source moves: it is for `flow.diffusion_bound` and
    `flow.ancestral`, not for the mixture rates.

  Raises:
    ValueError: `uniform_share` is out of range.
  """
  if not 0 <= uniform_share < 1:
    raise ValueError(f'{uniform_share=} must lie in [0, 1)')
  if uniform_share == 0:
    return masked(vocab)
  scale = 2.0 * uniform_share / (1.0 - uniform_share)

  def c(tau):
    return scale * jnp.sqrt(tau * (1.0 - tau))

  def derivative(tau):
    ratio = jnp.sqrt(tau / (1.0 - tau))
    return (1.0 + scale / 2 * ratio) / (1.0 + c(tau)) ** 2

  def share(tau):
    """c / (t + c)."""
    uniform_part = scale * jnp.sqrt(tau)
    return uniform_part / (jnp.sqrt(1.0 - tau) + uniform_part)

  kappa = Kappa(
    lambda tau: tau / (1.0 + c(tau)),
    lambda tau: (1.0 - tau + c(tau)) / (1.0 + c(tau)),
    derivative,
  )
  return Path(kappa, _mixed_source(vocab, share, stationary=False))


def _mixed_source(vocab, share, *, stationary):
  """Uniform over the ids that may be drawn with probability share(tau)."""
  choices = np.flatnonzero(vocab.drawable).astype(np.int32)

  def probability(ids, tau):
    uniform_share = share(tau)
    noise = jnp.where(
      jnp.asarray(vocab.drawable)[ids], uniform_share / choices.size, 0.0
    )
    return jnp.where(ids == vocab.mask_id, 1.0 - uniform_share, noise)

  def draw(noise, tau):
    # 2^32 is so large that the remainder is uniform to V / 2^32.
    token = jnp.asarray(choices)[noise.pick % choices.size]
    return jnp.where(noise.share < share(tau), token, vocab.mask_id)

  return Source(probability, draw, absorbing=False, stationary=stationary)


def _check_kappa(kappa):
  with jax.ensure_compile_time_eval():
    tau = jnp.linspace(0.0, 1.0, 101)
    values, left = (np.asarray(f(tau), np.float64) for f in kappa[:2])
  # The ends exactly, or a token of the source could be left at tau = 1.
  ends = [values[0], values[-1], left[0], left[-1]] == [0, 1, 1, 0]
  rises = np.diff(values).min() >= -1e-6
  if not (ends and rises and np.abs(values + left - 1).max() < 1e-5):
    raise ValueError('kappa must rise from kappa(0) = 0 to kappa(1) = 1')


def position_noise(
  row_key: Key[Array, ''], positions: Int[Array, 'L']
) -> PathNoise:
  """The noise of one row, a function of its key and the logical positions."""

  def unit(bits):
    return (bits >> 8).astype(jnp.float32) * 2.0**-24

  def at_position(key):
    # One call of the generator: it is most of what there is to compile.
    keep, share, pick = jax.random.bits(key, (3,), jnp.uint32)
    return PathNoise(unit(keep), unit(share), pick)

  return jax.vmap(at_position)(noise_lib.position_keys(row_key, positions))


class Noised(NamedTuple):
  """Tokens of a path at time tau.

  Attributes:
    ids: int32. Shape `[B, L]`.
    replaced: which were drawn from the source, perhaps as they were. Boolean,
      shape `[B, L]`.
  """

  ids: Int[Array, 'B L']
  replaced: Bool[Array, 'B L']


def corrupt(
  key: Key[Array, ''],
  clean_ids: Int[Array, 'B L'],
  tau: Float[Array, 'B'],
  valid: Bool[Array, 'B L'],
  *,
  path: Path,
  row_ids: Int[Array, 'B'] | None = None,
  positions: Int[Array, 'B L'] | None = None,
  protected: Bool[Array, 'B L'] | None = None,
) -> Noised:
  """A draw from the path p_tau(. | clean), every position independently.

  The noise of a position is a function of the key, the row's global id and its
  logical position only, as in `corruption.corrupt`.

  Args:
    key: consumed.
    clean_ids: shape `[B, L]`.
    tau: flow time per row, in [0, 1]: 1 minus the noise level. Shape `[B]`.
    valid: False at padding, which never changes. Shape `[B, L]`.
    path: the path.
    row_ids: ids of the rows within the global batch; None: 0, 1, ... Shape
      `[B]`.
    positions: logical positions; None: 0, 1, ... from the left. Shape `[B, L]`.
    protected: True where a token must stay, such as a prompt. Shape `[B, L]`.

  Returns:
    The tokens and the map of those drawn from the source.

  Raises:
    ValueError: on concrete arrays, a tau outside [0, 1].
  """
  check_values((tau >= 0) & (tau <= 1), 'tau must lie in [0, 1]')
  num_rows, length = clean_ids.shape
  if row_ids is None:
    row_ids = jnp.arange(num_rows)
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(length), clean_ids.shape)
  chex.assert_shape([tau, row_ids], (num_rows,))
  noise = jax.vmap(position_noise)(noise_lib.row_keys(key, row_ids), positions)
  eligible = valid if protected is None else valid & ~protected
  return corrupt_with_noise(noise, clean_ids, tau, eligible, path=path)


def corrupt_with_noise(
  noise: PathNoise,
  clean_ids: Int[Array, 'B L'],
  tau: Float[Array, 'B'],
  eligible: Bool[Array, 'B L'],
  *,
  path: Path,
) -> Noised:
  """The deterministic part of `corrupt`.

  Args:
    noise: of every position. Shape `[B, L]`.
    clean_ids: shape `[B, L]`.
    tau: flow time per row. Shape `[B]`.
    eligible: positions that may change. Shape `[B, L]`.
    path: the path.

  Returns:
    The tokens, from the source where `keep` < 1 - kappa(tau).
  """
  chex.assert_type(eligible, bool)
  tau = tau[:, None]
  replaced = eligible & (noise.keep < path.kappa.complement(tau))
  drawn = path.source.draw(noise, tau)
  return Noised(jnp.where(replaced, drawn, clean_ids), replaced)


def token_law(
  path: Path, clean_probs: Float[Array, '*S V'], tau: Float[Array, '*S']
) -> Float[Array, '*S V']:
  """kappa x + (1 - kappa) pi: the law of a token at time tau.

  Args:
    path: the path.
    clean_probs: law of the clean token, one-hot for a known one. Shape
      `[..., V]`.
    tau: flow time. Shape `[...]`.

  Returns:
    Probabilities. Shape `[..., V]`.

  Example:
    >>> path = masked(Vocab(size=3, mask_id=1))
    >>> print(token_law(path, jnp.array([0.0, 0, 1]), jnp.array(0.25)))
    [0.   0.75 0.25]
  """
  ids = jnp.arange(clean_probs.shape[-1])
  tau = tau[..., None]
  noise = path.kappa.complement(tau) * path.source.probability(ids, tau)
  return path.kappa.kappa(tau) * clean_probs + noise
