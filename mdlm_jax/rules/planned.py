"""Counts known in advance: how many slots each call writes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax.interning import interned
from mdlm_jax.reverse import top_eligible
from mdlm_jax.rules.contract import Rule, Update
from mdlm_jax.schedules import plan_counts


@interned
def by_confidence(num_steps: int, *, counts: Callable = plan_counts) -> Rule:
  """The most confident candidates first, in counts planned once per row.

  The positions depend on the values, so this is not the reverse kernel: with an
  exact denoiser it samples exactly only one position at a time, and only with a
  score that does not depend on the drawn token (Chang et al. 2022; Nie et al.
  2025).

  Args:
    num_steps: network calls, at least 1. More than the open slots is legal: an
      empty step still costs its call.
    counts: `counts(num_open, num_steps) -> [num_steps]`: how many slots each
      call writes, such as `schedules.grid_counts(grid)`; by default the slots
      are split evenly, the remainder first.

  Returns:
    The rule.

  Raises:
    ValueError: for `num_steps` below 1, or as `counts` raises.
  """
  counts(0, num_steps)  # Raises now and not inside a trace.

  def init(noise, row, num_ids):
    del noise, num_ids
    return counts(row.masked.sum(), num_steps), None

  def update(noise, step, row, proposal, state):
    del noise
    write = top_eligible(
      proposal.confidence,
      row.masked,
      state[step],
      max_count=largest_count(counts, row.masked.shape[0], num_steps),
    )
    return Update(write, state)

  return Rule(lambda num_slots: num_steps, update, init=init)


def largest_count(counts: Callable, num_slots: int, num_steps: int) -> int:
  """The most slots that any call may write in a window of `num_slots`.

  A static bound: it makes `top_eligible` several times faster.
  """
  with jax.ensure_compile_time_eval():
    table = counts(jnp.arange(num_slots + 1), num_steps)
  return int(np.max(table))
