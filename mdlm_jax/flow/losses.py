"""Losses and bounds of discrete flows, each as a sum and a count.

For a conditional process of rates u(z -> y | x) and a model of rates v, both
from the same source, the relative entropy of their trajectories bounds
-log p(x):

  integral over tau in (0, 1) of E_z sum_l sum_{y != z_l} v - u + u log(u / v),

the generalised KL divergence of the rates. Two conditional processes have the
marginals of the path: `generalised_kl` is of the mixture rates, in which a
token jumps once, to its clean value (Gat et al. 2024; Shaul et al. 2024);
`diffusion_bound` is of the time reversal of the noising process (UDLM, GIDD).
With MASK as source they are one, the bound of `losses.continuous_bound`.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mdlm_jax.flow.paths import Noised, Path
from mdlm_jax.flow.rates import check_stationary
from mdlm_jax.losses import Total
from mdlm_jax.predict import Denoiser, allowed, network_logits
from mdlm_jax.vocab import Vocab


def clean_logits(
  denoiser: Denoiser,
  params: Any,
  vocab: Vocab,
  noised: Noised,
  tau: Float[Array, 'B'],
  valid: Bool[Array, 'B L'],
  *,
  positions: Int[Array, 'B L'] | None = None,
) -> Float[Array, 'B L V']:
  """What the network says about the clean tokens, for the losses below.

  Args:
    denoiser: the network.
    params: its parameters.
    vocab: which ids may be drawn.
    noised: what the network sees.
    tau: flow time; the network is fed the noise level 1 - tau. Shape `[B]`.
    valid: False at padding. Shape `[B, L]`.
    positions: logical positions; None: 0, 1, ... from the left. Shape `[B, L]`.

  Returns:
    float32 or wider, -inf at ids that may not be drawn. Shape `[B, L, V]`.
  """
  if positions is None:
    length = noised.ids.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), noised.ids.shape)
  logits, _ = network_logits(
    denoiser,
    params,
    None,
    noised.ids,
    at=None,
    step=0,
    t=1.0 - tau,
    valid=valid,
    positions=positions,
    segments=None,
  )
  return allowed(logits, vocab)


def cross_entropy(
  logits: Float[Array, 'B L V'],
  clean_ids: Int[Array, 'B L'],
  noised: Noised,
  valid: Bool[Array, 'B L'],
  *,
  path: Path,
) -> Total:
  """-log p(x_l | z) where the noised token leaves it open (Gat et al. 2024).

  Its minimum is the posterior, whatever the law of tau. With MASK as source it
  counts the masked tokens and is `losses.cross_entropy`; otherwise any token
  may be noise and all valid ones count.

  Args:
    logits: of the clean tokens, -inf at ids that may not be drawn. Shape
      `[B, L, V]`.
    clean_ids: shape `[B, L]`.
    noised: the path's draw.
    valid: the positions the loss is about. Shape `[B, L]`.
    path: the path.

  Returns:
    Sum in nats and number of the positions that count.
  """
  counts = _uncertain(noised, valid, path)
  nats = -_log_prob_of(clean_ids, _at_least_float32(logits))
  return Total(_sum_where(counts, nats, 1.0), _count(counts))


def generalised_kl(
  logits: Float[Array, 'B L V'],
  clean_ids: Int[Array, 'B L'],
  noised: Noised,
  valid: Bool[Array, 'B L'],
  tau: Float[Array, 'B'],
  *,
  path: Path,
) -> Total:
  """The generalised KL of the mixture rates, one draw of tau and noise per row.

    kappa' / (1 - kappa) (1[z != x] (-log p(x | z)) + 1[z = x] - p(z | z))

  (Shaul et al. 2024, arXiv 2412.03487). The network gives the posterior
  p(x_l | z), which sees z_l. Its mean over tau ~ U(0, 1) bounds -log p(x) of
  the process with rates `flow.rates`. With a uniform source even the exact
  posterior leaves a gap: of a token that is clean already only the
  conditional process knows that it will not jump again.

  Args:
    logits: of the clean tokens, -inf at ids that may not be drawn. Shape
      `[B, L, V]`.
    clean_ids: shape `[B, L]`.
    noised: the path's draw at tau.
    valid: the positions the bound is about. Shape `[B, L]`.
    tau: in [0, 1). Shape `[B]`.
    path: the path; its source is stationary.

  Returns:
    The weighted sum over rows; count: valid positions.

  Raises:
    ValueError: for a source that moves.

  Example:
    At tau = 1/2 a masked token weighs 2.

    >>> from mdlm_jax.flow.paths import masked
    >>> path = masked(Vocab(size=3, mask_id=1))
    >>> noised = Noised(jnp.array([[1, 2]]), jnp.array([[True, False]]))
    >>> logits = jnp.log(jnp.array([[[0.5, 0, 0.5], [1, 0, 0]]]))
    >>> clean_ids, valid = jnp.array([[0, 2]]), jnp.ones((1, 2), bool)
    >>> print(generalised_kl(
    ...   logits, clean_ids, noised, valid, jnp.array([0.5]), path=path
    ... ).sum)
    1.3862944
  """
  check_stationary(path)
  logits = _at_least_float32(logits)
  counts = _uncertain(noised, valid, path)
  moved = counts if path.source.absorbing else noised.ids != clean_ids
  nats = jnp.where(moved, -_log_prob_of(clean_ids, logits), 0.0)
  nats += ~moved - jnp.exp(_log_prob_of(noised.ids, logits))
  weight = path.kappa.derivative(tau) / path.kappa.complement(tau)
  return Total(_sum_where(counts, nats, weight[:, None]), _count(valid))


def diffusion_bound(
  logits: Float[Array, 'B L V'],
  clean_ids: Int[Array, 'B L'],
  noised: Noised,
  valid: Bool[Array, 'B L'],
  tau: Float[Array, 'B'],
  *,
  path: Path,
) -> Total:
  """The continuous-time bound of the reversed noising process.

    g(z) / q(z) (KL(q || q_theta) + q(z) / q_theta(z) - log(...) - 1),
    q = kappa x + (1 - kappa) pi,  q_theta = kappa x_theta + (1 - kappa) pi,
    g = kappa' / kappa pi - (1 - kappa) d pi / d tau

  where g(z) is the rate at which noising makes z (GIDD, von Ruette et al. 2025,
  arXiv 2503.04482, section 3; with a uniform source the bound of UDLM, Schiff
  et al. 2024, arXiv 2412.10193; with MASK that of `losses.continuous_bound`).
  The network gives x_theta(x_l | z without z_l): it enters a ratio, and the
  minimum is there and not at the posterior (`flow.posterior_logits`). Its mean
  over tau ~ U(0, 1) bounds -log p(x); with the exact x_theta the mean over the
  data is the entropy.

  Args:
    logits: of x_theta, -inf at ids that may not be drawn. Shape `[B, L, V]`.
    clean_ids: shape `[B, L]`.
    noised: the path's draw at tau.
    valid: the positions the bound is about. Shape `[B, L]`.
    tau: in (0, 1). Shape `[B]`.
    path: the path.

  Returns:
    The weighted sum over rows; count: valid positions.
  """
  if path.source.absorbing:
    return generalised_kl(logits, clean_ids, noised, valid, tau, path=path)
  chex.assert_equal_shape([noised.ids, clean_ids, valid])
  # Padding may hold an id of probability 0, whose gradient would be NaN.
  logits = jnp.where(valid[..., None], _at_least_float32(logits), 0.0)
  tau = tau.astype(logits.dtype)[:, None]
  kappa, complement = path.kappa.kappa(tau), path.kappa.complement(tau)
  x_theta = jax.nn.softmax(logits, -1)
  tokens = jnp.arange(logits.shape[-1])
  clean = (tokens == clean_ids[..., None]).astype(logits.dtype)
  noise = complement[..., None] * path.source.probability(
    tokens, tau[..., None]
  )
  q, change, log = _compare(kappa[..., None], noise, clean, x_theta)
  # Over all ids q (change) adds up to 0; with it no term is negative.
  nats = jnp.sum(jnp.where(q > 0, q * (change - log), 0.0), -1)

  own = jnp.take_along_axis(x_theta, noised.ids[..., None], -1)[..., 0]
  same = (noised.ids == clean_ids).astype(logits.dtype)
  source, source_slope = jax.jvp(
    lambda tau: path.source.probability(noised.ids, tau),
    (tau,),
    (jnp.ones_like(tau),),
  )
  q, change, log = _compare(kappa, complement * source, same, own)
  nats += log - change / (1.0 + change)
  inflow = path.kappa.derivative(tau) / kappa * source
  inflow -= complement * source_slope
  return Total(_sum_where(valid, nats, inflow / q), _count(valid))


def _compare(kappa, noise, clean, x_theta):
  """q, (q_theta - q) / q and log(q_theta / q), for one or for all ids."""
  q = kappa * clean + noise
  q_theta = kappa * x_theta + noise
  safe = jnp.where(q > 0, q, 1.0)
  change = kappa * (x_theta - clean) / safe
  # log1p where they are close, which is where rounding would show.
  close = change > -0.5
  log_close = jnp.log1p(jnp.where(close, change, 0.0))
  log_far = jnp.log(jnp.where(close, 1.0, q_theta / safe))
  return q, change, jnp.where(close, log_close, log_far)


def _at_least_float32(logits):
  return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _log_prob_of(ids, logits):
  chosen = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
  return chosen - jax.nn.logsumexp(logits, -1)


def _uncertain(noised, valid, path):
  """Positions whose clean token is not known from the noised one."""
  chex.assert_type([noised.replaced, valid], bool)
  return valid & noised.replaced if path.source.absorbing else valid


def _sum_where(counts, nats, weight):
  """Both factors are replaced before the product, as in `losses`."""
  weight = jnp.where(counts, weight, 0.0)
  return jnp.sum(weight * jnp.where(counts, nats, 0.0), dtype=jnp.float32)


def _count(positions):
  return jnp.sum(positions, dtype=jnp.float32)
