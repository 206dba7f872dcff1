"""The exact reverse process of masked diffusion."""

import jax.numpy as jnp
import numpy as np

from mdlm_jax import noise as noise_lib
from mdlm_jax.interning import interned
from mdlm_jax.rules.contract import Rule, Update
from mdlm_jax.rules.laws import bernoulli_cells
from mdlm_jax.schedules import (
  Schedule,
  check_grid,
  linear,
  reveal_probability,
)

_LINEAR = linear()


@interned
def kernel(
  grid: tuple[float, ...],
  schedule: Schedule = _LINEAR,
  *,
  cached: bool = False,
) -> Rule:
  """The exact reverse kernel of masked diffusion on a decreasing grid.

  At each step from noise level t to s every masked slot is revealed with
  probability (alpha_s - alpha_t) / (1 - alpha_t), independently, and receives
  its candidate; all are committed at once (the reverse posterior of Sahoo et
  al. 2024, section 3.2, and of Shi et al. 2024, section 2). The last interval
  reveals everything where alpha(0) = 1; elsewhere the sampler writes what is
  left. With a candidate drawn from the predicted categorical this is ancestral
  sampling; the law of the tokens approaches that of the denoiser as the grid
  gets finer.

  Args:
    grid: noise levels from 1.0 to 0.0, strictly decreasing, one more than the
      number of calls (`schedules.uniform_grid`, `schedules.cosine_grid`).
    schedule: the masking schedule, linear by default.
    cached: skips the call of a row in which the step before revealed nothing,
      and keeps its candidates: none of them was used, so the law is the same. A
      row needs at most min(steps, open slots) calls. For a network that ignores
      t (the cache of Sahoo et al. 2024, section 4.2).

  Returns:
    The rule.

  Raises:
    ValueError: for a grid that does not fall strictly from 1 to 0.

  Example:
    >>> kernel((1.0, 0.5, 0.0)).calls(num_slots=10)
    2
  """
  check_grid(grid)

  def levels(index):
    return jnp.asarray(np.asarray(grid), jnp.result_type(float))[index]

  def reveal(step):
    return reveal_probability(schedule, levels(step), levels(step + 1))

  def init(noise, row, num_ids):
    del noise, row, num_ids
    return (), levels(0)

  def update(noise, step, row, proposal, state):
    del proposal
    return Update(row.masked & (noise < reveal(step)), state, levels(step + 1))

  def cells(step, row, proposal, state):
    del proposal, state
    return bernoulli_cells(np.full(row.masked.shape, reveal(step)), row.masked)

  return Rule(
    lambda num_slots: len(grid) - 1,
    update,
    noise=noise_lib.position_uniforms,
    init=init,
    cells=cells,
    reuses=cached,
  )
