"""One call of the sampler: look, propose, choose, commit.

Everything here is a pure function of its arguments and its noise;
`sampling.sample` repeats it, `oracle.sampler_law` enumerates it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax import endings
from mdlm_jax.blocks import Window, at, put
from mdlm_jax.caches import CachePolicy, Computed, View
from mdlm_jax.canvas import Canvas
from mdlm_jax.constraints import Constraint
from mdlm_jax.draws import Context, Draw, DrawNoise
from mdlm_jax.guidance import Guidance
from mdlm_jax.noise import packed_positions
from mdlm_jax.predict import Denoiser, Prediction, predict
from mdlm_jax.reverse import commit
from mdlm_jax.rules import Proposal, Row, Rule
from mdlm_jax.schedules import Schedule
from mdlm_jax.vocab import Vocab


class Decoding(NamedTuple):
  """Everything static about a sampler; hashable. See `sampling.sample`."""

  denoiser: Denoiser
  vocab: Vocab
  rule: Rule
  draw: Draw
  schedule: Schedule
  planner: Callable | None = None
  eos_last: bool = False
  stop_at_eos: bool = False
  cache: CachePolicy | None = None
  audit_cache: bool = False


class Inputs(NamedTuple):
  """Everything traced that is the same at every call."""

  params: Any
  canvas: Canvas
  guidance: Guidance | None = None
  constraint: Constraint | None = None
  planner_params: Any = None


class StepNoise(NamedTuple):
  """All noise of one call, a row each.

  Attributes:
    draw: of the draw.
    rule: of the rule's update.
    init: of the rule's init, read at the first call of a window.
  """

  draw: DrawNoise
  rule: Any
  init: Any


class Kept(NamedTuple):
  """What a rule that `reuses` keeps in place of a call.

  Attributes:
    candidate_ids: `[B, K]`.
    confidence: `[B, K]`.
    changed: rows whose canvas changed since. Shape `[B]`.
  """

  candidate_ids: Int[Array, 'B K']
  confidence: Float[Array, 'B K']
  changed: Bool[Array, 'B']


class Stored(NamedTuple):
  """What a call leaves to the next under a cache policy.

  Attributes:
    cache: of the network.
    ids: the token with which each slot was last computed, -1 before. Shape
      `[B, L]`.
    computed: slots that the last call computed. Shape `[B]`.
    error: largest difference of a logit that mattered in the last call from its
      value without a cache, NaN where it is not asked for. Shape `[B]`.
  """

  cache: Any
  ids: Int[Array, 'B L']
  computed: Int[Array, 'B']
  error: Float[Array, 'B']


class SamplerState(NamedTuple):
  """What one call hands to the next.

  Attributes:
    ids: the canvas as it is. Shape `[B, L]`.
    t: noise level of the next call. Shape `[B]`.
    rule_state: the rule's own state, one per row.
    done: rows with nothing left to do in this window. Shape `[B]`.
    finite: whether all logits were usable so far. Shape `[B]`.
    kept: the proposal, for a rule that `reuses`.
    stored: under a cache policy.
  """

  ids: Int[Array, 'B L']
  t: Float[Array, 'B']
  rule_state: Any
  done: Bool[Array, 'B']
  finite: Bool[Array, 'B']
  kept: Kept | None = None
  stored: Stored | None = None


def is_masked(
  ids: Int[Array, 'B L'], canvas: Canvas, vocab: Vocab
) -> Bool[Array, 'B L']:
  """Generation slots whose token is MASK; no draw can write a MASK there."""
  return canvas.generation_slots & (ids == vocab.mask_id)


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


def start_cache(
  decoding: Decoding, inputs: Inputs, window: Window
) -> Stored | None:
  """What is stored before the first call: nothing, in arrays of their size.

  Raises:
    ValueError: the network keeps no cache.
  """
  if decoding.cache is None:
    return None
  ids = inputs.canvas.ids
  batch = ids.shape[0]
  state = SamplerState(ids, jnp.zeros(batch), (), None, None)
  shapes = jax.eval_shape(
    lambda: _ask(decoding, inputs, 0, state, window, None, None)[1]
  )
  if not jax.tree.leaves(shapes):
    raise ValueError('a cache policy needs a network that keeps a cache')
  return Stored(
    jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
    jnp.full_like(ids, -1),
    jnp.zeros(batch, jnp.int32),
    jnp.full(batch, jnp.nan, jnp.result_type(float)),
  )


def predict_window(
  decoding: Decoding,
  inputs: Inputs,
  step: Int[Array, ''] | int,
  state: SamplerState,
  window: Window,
) -> tuple[Prediction, Stored | None]:
  """What the network says about the window as it is, and what it stores."""
  stored = state.stored
  if stored is None:
    return _ask(decoding, inputs, step, state, window, None, None)[0], None
  slots = computed_slots(decoding, inputs, step, state, window)
  width = window.open.shape[1]
  sizes = decoding.cache.sizes(
    state.ids.shape[1], width, decoding.denoiser.attention_block
  )
  prediction, cache = _ask(
    decoding, inputs, step, state, window, stored.cache, Computed(slots, sizes)
  )
  error = stored.error
  if decoding.audit_cache:
    plain, _ = _ask(decoding, inputs, step, state, window, None, None)
    masked = window_rows(decoding, inputs, state.ids, window).masked
    drawable = jnp.isfinite(plain.logits) & masked[..., None]
    difference = jnp.abs(prediction.logits - plain.logits)
    error = jnp.where(drawable, difference, 0.0).max((1, 2))
  ids = jnp.where(slots, state.ids, stored.ids)
  return prediction, Stored(cache, ids, slots.sum(1), error)


def computed_slots(
  decoding: Decoding,
  inputs: Inputs,
  step: Int[Array, ''] | int,
  state: SamplerState,
  window: Window,
) -> Bool[Array, 'B L']:
  """The slots that a call computes under the cache policy."""
  canvas = inputs.canvas
  is_open = put(jnp.zeros(canvas.ids.shape, bool), window.open, window.slots)
  view = View(
    jnp.asarray(step),
    is_open,
    is_masked(state.ids, canvas, decoding.vocab),
    canvas.valid & (state.ids != state.stored.ids),
    canvas.positions,
  )
  attention_block = decoding.denoiser.attention_block
  slots = decoding.cache.computed(view, attention_block)
  if decoding.denoiser.shifted:  # The token of a slot is read one before it.
    slots |= jnp.roll(slots, -1, axis=1).at[:, -1].set(False)
  return slots & canvas.valid


def _ask(decoding, inputs, step, state, window, cache, computed):
  """One network call, or two under guidance, for the window."""
  canvas = inputs.canvas
  calls = decoding.rule.calls(window.open.shape[1])
  return predict(
    decoding.denoiser,
    inputs.params,
    cache,
    state.ids,
    vocab=decoding.vocab,
    t=state.t,
    valid=canvas.valid,
    positions=canvas.positions,
    segments=canvas.segments,
    at=window.slots,
    step=window.block * calls + step,
    guidance=inputs.guidance,
    constraint=inputs.constraint,
    computed=computed,
  )


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


def window_rows(
  decoding: Decoding, inputs: Inputs, ids: Int[Array, 'B L'], window: Window
) -> Row:
  """The rows of a window, as batched maps."""
  ids = at(ids, window.slots)
  masked = window.open & (ids == decoding.vocab.mask_id)
  return Row(
    ids, window.open, masked, at(inputs.canvas.positions, window.slots)
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
