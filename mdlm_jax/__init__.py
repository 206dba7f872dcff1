"""Masked diffusion language models in JAX and Flax.

The pure functions are re-exported here, the ways to choose positions as the
module `rules`, what a call computes and what it reads again as `caches`,
discrete flow matching as `flow`. Networks are in
`mdlm_jax.models`; text, training and evaluation in `mdlm_jax.data`,
`mdlm_jax.training`, `mdlm_jax.evaluation` and `mdlm_jax.sample_quality`; exact
laws on small spaces in `mdlm_jax.oracle`; names for command lines in
`mdlm_jax.named_rules`.
"""

from mdlm_jax import bound_estimators, caches, draws, flow, likelihood, rules
from mdlm_jax.blocks import Blocks, blocks_of, steps_per_block
from mdlm_jax.canvas import Canvas, from_prompts, from_rows, row_from_template
from mdlm_jax.constraints import Constraint, constrain
from mdlm_jax.corruption import Corruption, corrupt
from mdlm_jax.draws import Draw, categorical
from mdlm_jax.guidance import Guidance, guide
from mdlm_jax.likelihood import log_prob
from mdlm_jax.losses import (
  Total,
  answer_loss,
  carry_over,
  continuous_bound,
  cross_entropy,
  discrete_bound,
)
from mdlm_jax.predict import Denoiser, target_log_probs
from mdlm_jax.reverse import commit, reverse_update, top_eligible
from mdlm_jax.rules import Rule, by_confidence, kernel
from mdlm_jax.sampling import SampleResult, check_finite, sample
from mdlm_jax.schedules import (
  Schedule,
  cosine,
  cosine_grid,
  floor_counts,
  geometric,
  grid_counts,
  linear,
  log_linear,
  plan_counts,
  polynomial,
  reveal_probability,
  uniform_grid,
)
from mdlm_jax.time_draws import (
  discrete_times,
  iid_times,
  stratified_times,
  systematic_times,
)
from mdlm_jax.vocab import Vocab

__all__ = [
  'Blocks',
  'Canvas',
  'Constraint',
  'Corruption',
  'Denoiser',
  'Draw',
  'Guidance',
  'Rule',
  'SampleResult',
  'Schedule',
  'Total',
  'Vocab',
  'answer_loss',
  'blocks_of',
  'bound_estimators',
  'by_confidence',
  'caches',
  'carry_over',
  'categorical',
  'check_finite',
  'commit',
  'constrain',
  'continuous_bound',
  'corrupt',
  'cosine',
  'cosine_grid',
  'cross_entropy',
  'discrete_bound',
  'discrete_times',
  'draws',
  'floor_counts',
  'flow',
  'from_prompts',
  'from_rows',
  'geometric',
  'grid_counts',
  'guide',
  'iid_times',
  'kernel',
  'likelihood',
  'linear',
  'log_linear',
  'log_prob',
  'plan_counts',
  'polynomial',
  'reveal_probability',
  'reverse_update',
  'row_from_template',
  'rules',
  'sample',
  'steps_per_block',
  'stratified_times',
  'systematic_times',
  'target_log_probs',
  'top_eligible',
  'uniform_grid',
]
