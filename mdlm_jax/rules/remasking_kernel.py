"""The remasking kernel: a reverse process that takes tokens back."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax import noise as noise_lib
from mdlm_jax.interning import interned
from mdlm_jax.rules.cells import bernoulli_cells
from mdlm_jax.rules.contract import Rule, Update
from mdlm_jax.rules.log_probs import log_probs_of
from mdlm_jax.rules.sigmas import check_sigmas, mask_levels
from mdlm_jax.schedules import Schedule, linear


@interned
def remasking(
  grid: tuple[float, ...],
  sigmas: tuple[float, ...],
  schedule: Schedule = linear(),
  *,
  by_confidence: bool = False,
) -> Rule:
  """The remasking reverse process: one kernel for the whole ReMDM family.

  At each step from noise level t to s, independently for every slot, a
  committed token becomes MASK with probability sigma, and a MASK receives its
  candidate with probability

    (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t)

  (Wang et al. 2025, arXiv 2503.00307, section 3). Where the clean token is
  known this leaves a share 1 - alpha_s of MASK after every step, whatever
  sigma; sigma = 0 is `kernel`. `rules.sigmas` has the schedules of the papers:
  cap, rescale, switch, loop, forward-backward, discrete flow, Psi.

  Args:
    grid: noise levels from 1.0 to 0.0, weakly decreasing, one more than the
      number of calls. Where it is flat (the loop of ReMDM) as many tokens are
      revealed as are taken back, on average.
    sigmas: one number a step, between 0 and `sigmas.bounds(grid, schedule)`.
    schedule: the masking schedule, linear by default.
    by_confidence: ReMDM-conf (section 4.1): sigma is shared out among the
      committed slots by a softmax of minus the probability that the model gave
      each token when it was written, and a MASK is revealed as with sigma = 0.
      That reveals too few for the MASK share of the schedule, so the last call
      has more to write. A token that the sampler did not write counts as
      written with probability 0.

  Returns:
    The rule.

  Raises:
    ValueError: for a grid that rises anywhere or does not lead from 1 to 0, or
      a sigma that is not feasible.

  Example:
    >>> remasking((1.0, 0.5, 0.0), (0.0, 0.0)).calls(num_slots=10)
    2
  """
  falls = all(a >= b for a, b in itertools.pairwise(grid))
  if len(grid) < 2 or grid[0] != 1 or grid[-1] != 0 or not falls:
    raise ValueError(f'a grid must fall weakly from 1.0 to 0.0, not {grid}')
  check_sigmas(grid, sigmas, schedule)
  reveals = _reveal_probabilities(
    mask_levels(grid, schedule), 0.0 if by_confidence else np.asarray(sigmas)
  )

  def at(values, step):
    return jnp.asarray(values, jnp.result_type(float))[step]

  def event_probability(step, row, state):
    """Of a reveal at masked slots, of being taken back at committed ones."""
    sigma = at(sigmas, step)
    if by_confidence:
      committed = row.open & ~row.masked
      sigma *= jax.nn.softmax(-state, where=committed)
    return jnp.where(row.masked, at(reveals, step), sigma)

  def init(noise, row, num_ids):
    del noise, num_ids
    written = jnp.zeros(row.masked.shape, jnp.result_type(float))
    return written if by_confidence else (), at(grid, 0)

  def update(noise, step, row, proposal, state):
    event = noise < event_probability(step, row, state)
    write = event & row.masked
    remask = event & row.open & ~row.masked
    if by_confidence:
      probability = jnp.exp(log_probs_of(proposal.candidate_ids, proposal))
      state = jnp.where(write, probability, jnp.where(remask, 0.0, state))
    return Update(write, state, at(grid, step + 1), remask)

  def cells(step, row, proposal, state):
    del proposal
    probabilities = np.asarray(event_probability(step, row, state))
    return bernoulli_cells(probabilities, row.open)

  return Rule(
    lambda num_slots: len(grid) - 1,
    update,
    noise=noise_lib.position_uniforms,
    init=init,
    cells=cells,
  )


def _reveal_probabilities(masked, sigmas):
  """Written with the differences of 1 - alpha, which do not cancel."""
  before, after = masked[:-1], masked[1:]
  revealed = before - after + sigmas * (1.0 - before)
  some = before > 0
  share = np.where(some, revealed / np.where(some, before, 1.0), 1.0)
  return np.clip(share, 0.0, 1.0)
