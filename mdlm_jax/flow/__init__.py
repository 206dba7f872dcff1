"""Discrete flow matching: other sources than MASK, other clocks than t.

Time tau = 1 - t runs from 0 (source) to 1 (data). `kappas` and `paths` say how
a clean token becomes noise, `rates` how noise jumps back, `losses` what a
network learns, `sampling` how it generates. docs/flow.md is the tour.
"""

from mdlm_jax.flow.kappas import (
  Kappa,
  as_schedule,
  cosine,
  cubic,
  linear,
  polynomial,
)
from mdlm_jax.flow.losses import (
  clean_logits,
  cross_entropy,
  diffusion_bound,
  generalised_kl,
)
from mdlm_jax.flow.paths import (
  Noised,
  Path,
  PathNoise,
  Source,
  corrupt,
  corrupt_with_noise,
  hybrid,
  masked,
  position_noise,
  token_law,
  uniform,
)
from mdlm_jax.flow.rates import guided_rates, posterior_logits, rates
from mdlm_jax.flow.sampling import (
  FlowSample,
  Jump,
  ancestral,
  apply_jump,
  as_rule,
  euler,
  exact,
  sample,
)

__all__ = [
  'FlowSample',
  'Jump',
  'Kappa',
  'Noised',
  'Path',
  'PathNoise',
  'Source',
  'ancestral',
  'apply_jump',
  'as_rule',
  'as_schedule',
  'clean_logits',
  'corrupt',
  'corrupt_with_noise',
  'cosine',
  'cross_entropy',
  'cubic',
  'diffusion_bound',
  'euler',
  'exact',
  'generalised_kl',
  'guided_rates',
  'hybrid',
  'linear',
  'masked',
  'polynomial',
  'position_noise',
  'posterior_logits',
  'rates',
  'sample',
  'token_law',
  'uniform',
]
