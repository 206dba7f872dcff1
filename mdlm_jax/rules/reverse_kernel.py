"""The exact reverse process of masked diffusion."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mdlm_jax import noise as noise_lib
from mdlm_jax.checks import check_integer
from mdlm_jax.interning import interned
from mdlm_jax.reverse import top_eligible
from mdlm_jax.rules.cells import bernoulli_cells
from mdlm_jax.rules.contract import Rule, Update
from mdlm_jax.schedules import (
  Schedule,
  check_grid,
  linear,
  reveal_probability,
)


@interned
def kernel(
  grid: tuple[float, ...],
  schedule: Schedule = linear(),
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


class HitNoise(NamedTuple):
  """The noise of one call of `first_hitting`.

  Attributes:
    order: uniforms; the smallest among the MASK slots are hit. Shape `[K]`.
    times: uniforms in (0, 1]: the times of the hits. Shape `[per_call]`.
  """

  order: Float[Array, 'K']
  times: Float[Array, 'per_call']


@interned
def first_hitting(schedule: Schedule = linear(), *, per_call: int = 1) -> Rule:
  """The reverse process in continuous time, from event to event.

  With n slots MASK at a time t of masked probability m = 1 - alpha(t), the next
  one is revealed where the masked probability is m U^(1/n), U uniform, and it
  is each of them with probability 1 / n (Zheng et al. 2024, arXiv 2409.02908,
  the largest of n independent times). The network is called at the
  time of each event. The process starts from masked probability 1 - alpha(1)
  with all MASK slots of the window.

  At one slot per call this is the limit of `kernel` on finer and finer grids,
  in as many calls as there are slots; with an exact denoiser it samples
  exactly. With more per call, the network is called at the time of the first of
  these events, where its input is right, the others draw from the same
  prediction, and the next call comes at the first event after them.

  Args:
    schedule: the masking schedule, linear by default. A network that ignores t
      gives the same law of the tokens under any.
    per_call: events per network call, at least 1.

  Returns:
    The rule.

  Raises:
    ValueError: for a `per_call` below 1.

  Example:
    >>> first_hitting(per_call=4).calls(num_slots=10)
    3
  """
  check_integer('per_call', per_call, 1)

  def noise(row_key, positions):
    order_key, time_key = jax.random.split(row_key)
    times = 1 - jax.random.uniform(time_key, (per_call,), jnp.float32)
    return HitNoise(noise_lib.position_uniforms(order_key, positions), times)

  def time(level):
    return jnp.clip(schedule.inverse(1 - level), 0, 1)

  def init(noise, row, num_ids):
    del num_ids
    start = schedule.masked(jnp.ones((), jnp.result_type(float)))
    level = _next_level(start, row.masked.sum(), noise.times[:1])
    return level, time(level)

  def update(noise, step, row, proposal, state):
    del step, proposal
    write = top_eligible(-noise.order, row.masked, per_call, max_count=per_call)
    # The events after the first of this call, and the first of the next.
    level = _next_level(state, row.masked.sum() - 1, noise.times)
    return Update(write, level, time(level))

  def cells(step, row, proposal, state):
    """The tokens of a network that ignores t do not depend on the times."""
    del step, proposal, state
    slots = np.flatnonzero(row.masked)
    hits = list(itertools.combinations(slots, min(per_call, len(slots))))
    for hit in hits:
      order = np.ones(row.masked.shape)
      order[list(hit)] = 0.0
      yield 1 / len(hits), HitNoise(order, np.full(per_call, 0.5))

  return Rule(
    lambda num_slots: -(-num_slots // per_call),
    update,
    noise=noise,
    init=init,
    cells=cells,
    adaptive=True,
  )


def _next_level(level, num_masked, uniforms):
  """Masked probability after as many events as there are uniforms."""
  left = jnp.maximum(num_masked - jnp.arange(uniforms.shape[0]), 1)
  return level * jnp.exp((jnp.log(uniforms) / left).sum())
