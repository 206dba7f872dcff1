"""Jump rates that follow a mixture path."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mdlm_jax.checks import check_values
from mdlm_jax.flow.paths import Path


def rates(
  path: Path,
  clean_probs: Float[Array, '*S V'],
  ids: Int[Array, '*S'],
  tau: Float[Array, '*S'],
  *,
  corrector: float = 0.0,
) -> Float[Array, '*S V']:
  """The rates at which each token jumps to every id.

    (1 + b) kappa' / (1 - kappa) (x - 1[z]) + b kappa' / kappa (pi - 1[z])

  for a corrector of weight b (Gat et al. 2024, arXiv 2407.15595, who write
  alpha = 1 + b, beta = b). The first part moves the law along the path, the
  second one, the noising process, moves it back at the same speed; so every b
  follows the path. Their sum is in detailed balance with p_tau(. | x). With
  `clean_probs` one-hot these are the conditional rates, with the posterior
  p(x | z) their mean, which generates the data.

  A token that the source cannot have drawn is clean and never jumps forward,
  whatever `clean_probs` says.

  Args:
    path: the path; its source is stationary.
    clean_probs: law of the clean token. Shape `[..., V]`.
    ids: the tokens z as they are. Shape `[...]`.
    tau: flow time in [0, 1), above 0 with a corrector. Shape `[...]`.
    corrector: b, at least 0.

  Returns:
    Non-negative off `ids`, of sum 0. Shape `[..., V]`.

  Raises:
    ValueError: for a negative `corrector` or a source that moves.

  Example:
    >>> from mdlm_jax.flow.paths import masked
    >>> from mdlm_jax.vocab import Vocab
    >>> path = masked(Vocab(size=3, mask_id=1))
    >>> clean = jnp.array([0.5, 0.0, 0.5])
    >>> print(rates(path, clean, jnp.array(1), jnp.array(0.5)))
    [ 1. -2.  1.]
  """
  check_stationary(path)
  check_corrector(corrector)
  kappa, source = path.kappa, path.source
  here = jax.nn.one_hot(ids, clean_probs.shape[-1], dtype=clean_probs.dtype)
  slope = kappa.derivative(tau)
  forward = slope / kappa.complement(tau)
  forward = jnp.where(source.probability(ids, tau) > 0, forward, 0.0)
  total = (1.0 + corrector) * forward[..., None] * (clean_probs - here)
  if corrector:
    tokens = jnp.arange(clean_probs.shape[-1])
    noise = source.probability(tokens, tau[..., None]) - here
    total += corrector * (slope / kappa.kappa(tau))[..., None] * noise
  return total


def guided_rates(
  cond: Float[Array, '*S V'],
  null: Float[Array, '*S V'],
  ids: Int[Array, '*S'],
  scale: float,
) -> Float[Array, '*S V']:
  """Predictor-free guidance: cond^(1 + w) null^(-w) off the diagonal.

  The powers of rates are rates; differences of them, (1 + w) cond - w null, may
  be negative (Nisonoff et al. 2024, arXiv 2406.01572). Where a token jumps to
  is then what `guidance.combine` makes of the logits; how soon is another
  matter: these rates do not have the sum of `cond`, as with guided logits.

  Args:
    cond: rates under the condition. Shape `[..., V]`.
    null: rates under the null condition, positive where `cond` is. Shape
      `[..., V]`.
    ids: the tokens as they are, whose own entries are not read. Shape `[...]`.
    scale: w, at least -1; 0 is `cond` itself.

  Returns:
    Non-negative off `ids`, of sum 0. Shape `[..., V]`.

  Raises:
    ValueError: `scale` is out of range; on concrete arrays, a rate that the
      null condition alone excludes, which no guided process has.

  Example:
    >>> cond, null = jnp.array([2.0, -3, 1]), jnp.array([1.0, -2, 1])
    >>> print(guided_rates(cond, null, jnp.array(1), 1.0))
    [ 4. -5.  1.]
  """
  if not (math.isfinite(scale) and scale >= -1):
    raise ValueError(f'{scale=} must be finite and at least -1')
  here = jax.nn.one_hot(ids, cond.shape[-1], dtype=bool)
  jumps = ~here & (cond > 0)
  possible = ~jumps | (null > 0) | (scale <= 0)
  check_values(possible.all(), 'null must be positive where cond is')
  ratio = jnp.where(jumps, cond, 1.0) / jnp.where(jumps, null, 1.0)
  guided = jnp.where(jumps, cond * ratio**scale, 0.0)
  return jnp.where(here, -guided.sum(-1, keepdims=True), guided)


def posterior_logits(
  logits: Float[Array, '*S V'],
  ids: Int[Array, '*S'],
  tau: Float[Array, '*S'],
  *,
  path: Path,
) -> Float[Array, '*S V']:
  """What is known of a clean token once its own noised token is seen as well.

  A network trained with `flow.diffusion_bound` learns p(x_l | all tokens
  but z_l), the rates above need p(x_l | all tokens), the product of it with
  p_tau(z_l | x_l), which is larger at x_l = z_l by the factor
  1 + kappa / ((1 - kappa) pi(z_l)). With MASK as source they are the same.

  Args:
    logits: of the clean token without its own noised one. Shape `[..., V]`.
    ids: the noised tokens. Shape `[...]`.
    tau: flow time in [0, 1). Shape `[...]`.
    path: the path.

  Returns:
    Logits, not normalised. Shape `[..., V]`.
  """
  noise = path.kappa.complement(tau) * path.source.probability(ids, tau)
  # MASK is not a clean token: its logit stays -inf.
  some = noise > 0
  gain = jnp.log1p(path.kappa.kappa(tau) / jnp.where(some, noise, 1.0))
  gain = jnp.where(some, gain, 0.0)
  here = jax.nn.one_hot(ids, logits.shape[-1], dtype=bool)
  return logits + jnp.where(here, gain[..., None], 0.0)


def check_corrector(corrector: float) -> None:
  """Raises ValueError unless a corrector weight is finite and at least 0."""
  if not (math.isfinite(corrector) and corrector >= 0):
    raise ValueError(f'{corrector=} must be finite and at least 0')


def check_stationary(path: Path) -> None:
  """Raises ValueError for a path whose source moves."""
  if not path.source.stationary:
    raise ValueError(
      'the mixture rates need a source that does not depend on tau; for the '
      'hybrid path there are diffusion_bound and ancestral'
    )
