"""One call of the sampler: look, propose, choose, commit.

Everything here is a pure function of its arguments and its noise;
`sampling.sample` repeats it, `oracle.sampler_law` enumerates it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax import endings
from mdlm_jax.blocks import Window, at, put
from mdlm_jax.canvas import Canvas
from mdlm_jax.draws import Context, DrawNoise
from mdlm_jax.network_call import predict_window
from mdlm_jax.noise import packed_positions
from mdlm_jax.reverse import commit
from mdlm_jax.rules import Proposal, Row
from mdlm_jax.sampling_state import (
  Decoding,
  Inputs,
  Kept,
  SamplerState,
  StepNoise,
  Stored,
  is_masked,
  window_rows,
)
from mdlm_jax.schedules import Schedule


def step_noise(
  decoding: Decoding,
  keys: Key[Array, 'B'],
  step: Int[Array, ''] | int,
  canvas: Canvas,
  window: Window,
) -> StepNoise:
  """The noise of a call, from the rows' keys and the logical positions.

  Args:
    decoding: how to decode, static.
    keys: one per row.
    step: number of the call over all blocks.
    canvas: gives the positions.
    window: the open block.

  Returns:
    Its noise.
  """

  def one_row(row_key, positions):
    draw_key, rule_key, init_key = jax.random.split(
      jax.random.fold_in(row_key, step), 3
    )
    return StepNoise(
      decoding.draw.noise(draw_key, positions, decoding.vocab.size),
      decoding.rule.noise(rule_key, positions),
      decoding.rule.noise(init_key, positions),
    )

  positions = packed_positions(canvas.positions, canvas.segments)
  return jax.vmap(one_row)(keys, at(positions, window.slots))


def start_window(
  decoding: Decoding,
  inputs: Inputs,
  init_noise: Any,
  ids: Int[Array, 'B L'],
  finite: Bool[Array, 'B'],
  window: Window,
  stored: Stored | None = None,
) -> SamplerState:
  """The state before the first call of a window."""
  rows = window_rows(decoding, inputs, ids, window)
  rule_state, t = jax.vmap(decoding.rule.init, (0, 0, None))(
    init_noise, rows, decoding.vocab.size
  )
  if t is None:
    t = _level(decoding.schedule, rows.masked, rows.open)
  kept = None
  if decoding.rule.reuses:
    kept = Kept(
      jnp.zeros_like(rows.ids),
      jnp.zeros(rows.ids.shape, jnp.result_type(float)),
      jnp.ones(ids.shape[0], bool),
    )
  done = ~rows.masked.any(1)
  return SamplerState(ids, t, rule_state, done, finite, kept, stored)


def needs_call(
  decoding: Decoding, inputs: Inputs, state: SamplerState, window: Window
) -> Bool[Array, 'B']:
  """Rows that need a network call in this step."""
  if not decoding.rule.reuses:
    return ~state.done
  rows = window_rows(decoding, inputs, state.ids, window)
  return ~state.done & state.kept.changed & rows.masked.any(1)


def propose(
  decoding: Decoding,
  inputs: Inputs,
  noise: DrawNoise,
  step: Int[Array, ''] | int,
  state: SamplerState,
  window: Window,
) -> tuple[Proposal, SamplerState]:
  """One network call and the draw from it, for every row.

  Args:
    decoding: how to decode, static.
    inputs: parameters, canvas and what steers them.
    noise: of the draw.
    step: number of the call within the window.
    state: what the call before left.
    window: the open block.

  Returns:
    The proposals, and the state with `finite` and `stored` brought up to date.
  """
  prediction, stored = predict_window(decoding, inputs, step, state, window)
  context = draw_context(decoding, inputs, state.ids, window)
  candidate_ids, confidence = decoding.draw.propose(noise, prediction, context)
  rows = window_rows(decoding, inputs, state.ids, window)
  planner = None
  if decoding.planner is not None:
    filled = commit(rows.ids, candidate_ids, rows.masked)
    planner = decoding.planner(
      inputs.planner_params,
      put(state.ids, filled, window.slots),
      inputs.canvas,
      context.slots,
    )
  usable = jnp.isfinite(prediction.log_z)
  if planner is not None:
    usable &= ~jnp.isnan(planner)
  # Committed slots too: rules that correct them read what is said there.
  only_masked = decoding.cache is not None and decoding.cache.only_masked
  usable |= ~(rows.masked if only_masked else rows.open)
  finite = state.finite & (usable.all(1) | state.done)
  proposal = Proposal(
    candidate_ids, confidence, prediction.logits, prediction.log_z, planner
  )
  return proposal, state._replace(finite=finite, stored=stored)


def propose_where_needed(
  decoding: Decoding,
  inputs: Inputs,
  noise: DrawNoise,
  step: Int[Array, ''] | int,
  state: SamplerState,
  window: Window,
) -> tuple[Proposal, SamplerState]:
  """As `propose`; a rule that `reuses` keeps the proposals of unchanged rows.

  The network is called when any row needs it. A row keeps its proposal also
  then, so that it does not depend on the rows beside it.
  """
  arguments = (decoding, inputs, noise, step, state, window)
  if not decoding.rule.reuses:
    return propose(*arguments)
  needs = needs_call(decoding, inputs, state, window)
  kept = state.kept

  def call():
    proposal, after = propose(*arguments)
    row = needs[:, None]
    return (
      jnp.where(row, proposal.candidate_ids, kept.candidate_ids),
      jnp.where(row, proposal.confidence, kept.confidence),
      jnp.where(needs, after.finite, state.finite),
      after.stored,
    )

  candidate_ids, confidence, finite, stored = jax.lax.cond(
    needs.any(),
    call,
    lambda: (kept.candidate_ids, kept.confidence, state.finite, state.stored),
  )
  proposal = Proposal(candidate_ids, confidence, None, None)
  return proposal, state._replace(finite=finite, stored=stored)


def apply_rule(
  decoding: Decoding,
  inputs: Inputs,
  noise: Any,
  step: Int[Array, ''] | int,
  proposal: Proposal,
  state: SamplerState,
  window: Window,
) -> SamplerState:
  """What the rule makes of the proposals; rows that are done stay.

  Args:
    decoding: how to decode, static.
    inputs: gives the canvas.
    noise: of the rule's update.
    step: number of the call within the window.
    proposal: one per row.
    state: what `propose` left.
    window: the open block.

  Returns:
    The state after the call.

  Raises:
    ValueError: the rule changes committed tokens, under a cache policy that
      does not predict them.
  """
  vocab, rule = decoding.vocab, decoding.rule
  rows = window_rows(decoding, inputs, state.ids, window)
  # The last call leaves no MASK, whatever the rule decides.
  is_last = step == rule.calls(window.open.shape[1]) - 1
  seen, must_write = offered_rows(decoding, rows, proposal)
  must_write |= rows.masked & is_last
  update = jax.vmap(rule.update, (0, None, 0, 0, 0))(
    noise, step, seen, proposal, state.rule_state
  )
  corrects = rule.edits or update.remask is not None
  if corrects and decoding.cache is not None and decoding.cache.only_masked:
    raise ValueError(
      'a rule that takes tokens back needs their predictions, which this cache '
      'policy does not compute'
    )
  active = ~state.done[:, None]
  may_write = seen.open if rule.edits else seen.masked
  write = active & ((update.write & may_write) | must_write)
  ids = commit(rows.ids, proposal.candidate_ids, write)
  changed = write
  if update.remask is not None:
    committed = rows.open & ~rows.masked & ~write
    remask = active & update.remask & committed & ~is_last
    ids = jnp.where(remask, vocab.mask_id, ids)
    changed |= remask

  masked = rows.open & (ids == vocab.mask_id)
  done = state.done
  if rule.adaptive:
    # A rule may not have been shown every slot.
    full = ~masked.any(1)
    done |= full if update.done is None else full & update.done
  canvas_ids = put(state.ids, ids, window.slots)
  if decoding.stop_at_eos:
    canvas_ids, ended = endings.finish(canvas_ids, inputs.canvas, vocab)
    done |= ended
  t = update.t
  if t is None:
    t = _level(decoding.schedule, masked, rows.open)
  kept = state.kept
  if rule.reuses:
    kept = Kept(proposal.candidate_ids, proposal.confidence, changed.any(1))
  return SamplerState(
    canvas_ids, t, update.state, done, state.finite, kept, state.stored
  )


def offered_rows(
  decoding: Decoding, rows: Row, proposal: Proposal
) -> tuple[Row, Bool[Array, 'B K']]:
  """What the rule is shown of the rows, and slots that are written anyway."""
  if not decoding.eos_last:
    return rows, jnp.zeros_like(rows.masked)
  ends, waiting = endings.waits(
    proposal.candidate_ids, rows.masked, decoding.vocab.eos_ids
  )
  # An edit may not write an EOS earlier than a MASK slot does.
  hidden = ends & waiting & (rows.masked | decoding.rule.edits)
  offered = rows._replace(
    open=rows.open & ~hidden, masked=rows.masked & ~hidden
  )
  return offered, rows.masked & ~waiting


def draw_context(
  decoding: Decoding, inputs: Inputs, ids: Int[Array, 'B L'], window: Window
) -> Context:
  """What a draw may know of the canvas around its slots."""
  canvas = inputs.canvas
  slots = window.slots
  if slots is None:
    slots = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  visible = canvas.valid & ~is_masked(ids, canvas, decoding.vocab)
  return Context(ids, visible, slots, canvas.segments)


def _level(schedule: Schedule, masked, is_open) -> Float[Array, 'B']:
  """The time at which a schedule masks the share of slots that is MASK."""
  share = masked.sum(1) / jnp.maximum(is_open.sum(1), 1)
  share = share.astype(jnp.result_type(float))
  # A schedule may not reach every share: the nearest level it has.
  least, most = (schedule.alpha(jnp.asarray(t, share.dtype)) for t in (1, 0))
  return jnp.clip(schedule.inverse(jnp.clip(1 - share, least, most)), 0, 1)
