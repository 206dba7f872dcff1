"""Masked diffusion language models in JAX and Flax.

The pure functions are re-exported here. Networks are in `mdlm_jax.models`;
text, training and evaluation in `mdlm_jax.data`, `mdlm_jax.training` and
`mdlm_jax.evaluation`; exact laws on small spaces in `mdlm_jax.oracle`.
"""

from mdlm_jax.canvas import Canvas, from_prompts, from_rows, row_from_template
from mdlm_jax.corruption import Corruption, corrupt
from mdlm_jax.draws import Draw, categorical
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
  geometric,
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
  'Canvas',
  'Corruption',
  'Denoiser',
  'Draw',
  'Rule',
  'SampleResult',
  'Schedule',
  'Total',
  'Vocab',
  'answer_loss',
  'by_confidence',
  'carry_over',
  'categorical',
  'check_finite',
  'commit',
  'continuous_bound',
  'corrupt',
  'cosine',
  'cosine_grid',
  'cross_entropy',
  'discrete_bound',
  'discrete_times',
  'from_prompts',
  'from_rows',
  'geometric',
  'iid_times',
  'kernel',
  'linear',
  'log_linear',
  'plan_counts',
  'polynomial',
  'reveal_probability',
  'reverse_update',
  'row_from_template',
  'sample',
  'stratified_times',
  'systematic_times',
  'target_log_probs',
  'top_eligible',
  'uniform_grid',
]
