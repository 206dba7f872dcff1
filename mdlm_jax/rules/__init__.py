"""Positions: which slots are written in a step, and which are taken back.

A rule is a handful of small pure functions, written for one row; the sampler
puts `vmap` on them (`contract`). A new way to decode is a new function here,
not a branch in the loop. Constructors are cached: equal settings give the
identical rule, so nothing is compiled twice.

  reverse_kernel    the exact reverse process: on a grid, or event by event
  planned           counts known in advance, positions by a score
  adaptive          as many positions as the prediction allows
  remasking_kernel  a reverse process that takes tokens back, by `sigmas`
  correction        committed tokens ranked anew, replaced, or refined

`cells` lists noise as finitely many cases, for exact enumeration; names for
command lines are in `mdlm_jax.named_rules`.
"""

from mdlm_jax.rules import sigmas
from mdlm_jax.rules.adaptive import (
  entropy_bound,
  factor,
  klass,
  quota_threshold,
  threshold,
)
from mdlm_jax.rules.contract import Proposal, Row, Rule, Update
from mdlm_jax.rules.correction import (
  bert_planner,
  editing,
  external_planner,
  path_planning,
  refined,
  self_planner,
)
from mdlm_jax.rules.planned import (
  by_binomial_confidence,
  by_confidence,
  by_sampled_confidence,
  dilated,
  left_to_right,
  maskgit,
)
from mdlm_jax.rules.remasking_kernel import remasking
from mdlm_jax.rules.reverse_kernel import first_hitting, kernel

__all__ = [
  'Proposal',
  'Row',
  'Rule',
  'Update',
  'bert_planner',
  'by_binomial_confidence',
  'by_confidence',
  'by_sampled_confidence',
  'dilated',
  'editing',
  'entropy_bound',
  'external_planner',
  'factor',
  'first_hitting',
  'kernel',
  'klass',
  'left_to_right',
  'maskgit',
  'path_planning',
  'quota_threshold',
  'refined',
  'remasking',
  'self_planner',
  'sigmas',
  'threshold',
]
