"""Positions: which slots are written in a step.

A rule is a handful of small pure functions, written for one row; the sampler
puts `vmap` on them. A new way to decode is a new function here, not a branch in
the loop. Constructors are cached: equal settings give the identical rule, so
nothing is compiled twice.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mdlm_jax import noise as noise_lib
from mdlm_jax.interning import interned
from mdlm_jax.reverse import top_eligible
from mdlm_jax.schedules import (
  Schedule,
  check_grid,
  linear,
  plan_counts,
  reveal_probability,
)

_LINEAR = linear()


class Row(NamedTuple):
  """What a rule sees of one row. Every map has shape `[K]`.

  Attributes:
    ids: the canvas.
    open: slots that generation owns.
    masked: open slots whose token is still MASK.
    positions: logical positions.
  """

  ids: Int[Array, 'K']
  open: Bool[Array, 'K']
  masked: Bool[Array, 'K']
  positions: Int[Array, 'K']


class Proposal(NamedTuple):
  """What a draw proposes for one row; unused fields cost nothing under jit.

  Attributes:
    candidate_ids: the token that would be written. Shape `[K]`.
    confidence: its score. Shape `[K]`.
    logits: float32, -inf at ids that may not be drawn. Shape `[K, V]`.
    log_z: log p(v) = logits[v] - log_z. Shape `[K]`.
  """

  candidate_ids: Int[Array, 'K']
  confidence: Float[Array, 'K']
  logits: Float[Array, 'K V']
  log_z: Float[Array, 'K']


class Update(NamedTuple):
  """What a rule decides for one row.

  Attributes:
    write: slots that receive their candidate, masked ones only. Shape `[K]`.
    t: noise level that the next call feeds the network. Shape `[]`.
    state: the rule's own state, passed to the next call.
  """

  write: Bool[Array, 'K']
  t: Float[Array, '']
  state: Any


class Rule(NamedTuple):
  """A way to choose positions.

  Attributes:
    calls: `calls(num_slots) -> int`: network calls for a window of so many
      slots, static.
    init: `init(row) -> state, t`: the state and the noise level of the first
      call.
    noise: `noise(row_key, positions) -> noise`: the noise of one step.
    update: `update(noise, step, row, proposal, state) -> Update`, a
      deterministic function of the noise. On the last call the sampler writes
      every slot that is still MASK.
    cells: `cells(step, masked) -> iterable of (probability, noise)`: the law of
      the noise on a small row, as finitely many cases, for exact enumeration.
  """

  calls: Callable
  init: Callable
  noise: Callable
  update: Callable
  cells: Callable


@interned
def kernel(grid: tuple[float, ...], schedule: Schedule = _LINEAR) -> Rule:
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

  Returns:
    The rule.

  Raises:
    ValueError: for a grid that does not fall strictly from 1 to 0.

  Example:
    >>> kernel((1.0, 0.5, 0.0)).calls(num_slots=10)
    2
  """
  check_grid(grid)
  levels = np.asarray(grid)

  def reveal(step):
    table = jnp.asarray(levels, _float_dtype())
    return reveal_probability(schedule, table[step], table[step + 1])

  def init(row):
    del row
    return (), jnp.asarray(levels[0], _float_dtype())

  def update(noise, step, row, proposal, state):
    del proposal
    next_t = jnp.asarray(levels, _float_dtype())[step + 1]
    return Update(row.masked & (noise < reveal(step)), next_t, state)

  def cells(step, masked):
    p = float(reveal(step))
    for revealed in itertools.product((True, False), repeat=int(masked.sum())):
      k = sum(revealed)
      weight = p**k * (1 - p) ** (len(revealed) - k)
      if weight > 0:
        noise = np.ones(masked.shape)
        noise[masked] = np.where(revealed, 0.0, 1.0)
        yield weight, noise

  return Rule(
    lambda num_slots: len(grid) - 1,
    init,
    noise_lib.position_uniforms,
    update,
    cells,
  )


@interned
def by_confidence(
  num_steps: int,
  *,
  grid: tuple[float, ...] | None = None,
  schedule: Schedule = _LINEAR,
) -> Rule:
  """The most confident candidates first, in counts planned once per row.

  The positions depend on the values, so this is not the reverse kernel: with an
  exact denoiser it samples exactly only one position at a time, and only with a
  score that does not depend on the drawn token (Chang et al. 2022; Nie et al.
  2025).

  Args:
    num_steps: network calls, at least 1. More than the open slots is legal: an
      empty step still costs its call.
    grid: masked fractions before and after each call, from 1.0 to 0.0; by
      default the slots are split evenly, the remainder first.
    schedule: gives the noise level fed to a network that is conditioned on
      time, from the masked share of the open slots; linear by default.

  Returns:
    The rule.

  Raises:
    ValueError: for `num_steps` below 1 or a grid of another length.
  """
  plan_counts(0, num_steps, grid)  # Raises now and not inside a trace.

  def max_count(num_slots):
    # The largest count of any row; rounding may add one slot to a share.
    if grid is None:
      return -(-num_slots // num_steps)
    largest = max(a - b for a, b in itertools.pairwise(grid))
    return math.ceil(num_slots * largest) + 1

  def level(num_masked, num_open):
    share = (num_masked / jnp.maximum(num_open, 1)).astype(_float_dtype())
    # A schedule may not reach every share: the nearest level it has.
    least, most = (schedule.alpha(jnp.asarray(t, share.dtype)) for t in (1, 0))
    return jnp.clip(schedule.inverse(jnp.clip(1 - share, least, most)), 0, 1)

  def init(row):
    num_masked = row.masked.sum()
    counts = plan_counts(num_masked, num_steps, grid)
    return counts, level(num_masked, row.open.sum())

  def update(noise, step, row, proposal, state):
    del noise
    write = top_eligible(
      proposal.confidence,
      row.masked,
      state[step],
      max_count=max_count(row.ids.shape[0]),
    )
    left = row.masked.sum() - write.sum()
    return Update(write, level(left, row.open.sum()), state)

  return Rule(
    lambda num_slots: num_steps,
    init,
    lambda row_key, positions: (),
    update,
    lambda step, masked: [(1.0, ())],
  )


def _float_dtype():
  """float32, or float64 where exact laws are computed in 64-bit mode."""
  return jnp.result_type(float)
