"""Positions: which slots are written in a step, and which are taken back.

A rule is a handful of small pure functions, written for one row; the sampler
puts `vmap` on them (`contract`). A new way to decode is a new function here,
not a branch in the loop. Constructors are cached: equal settings give the
identical rule, so nothing is compiled twice.

  reverse_kernel  the exact reverse process: on a grid, or event by event
  planned         counts known in advance, positions by a score
  adaptive        as many positions as the prediction allows
  correction      rules that take committed tokens back
"""

from mdlm_jax.rules.adaptive import entropy_bound, factor, klass, threshold
from mdlm_jax.rules.contract import Proposal, Row, Rule, Update
from mdlm_jax.rules.planned import (
  by_binomial_confidence,
  by_confidence,
  by_sampled_confidence,
  dilated,
  left_to_right,
  maskgit,
)
from mdlm_jax.rules.reverse_kernel import first_hitting, kernel

__all__ = [
  'Proposal',
  'Row',
  'Rule',
  'Update',
  'by_binomial_confidence',
  'by_confidence',
  'by_sampled_confidence',
  'dilated',
  'entropy_bound',
  'factor',
  'first_hitting',
  'kernel',
  'klass',
  'left_to_right',
  'maskgit',
  'threshold',
]
