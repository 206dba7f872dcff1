"""The compiled loop: from a canvas of MASK to text."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax.canvas import Canvas
from mdlm_jax.draws import Draw, DrawNoise, categorical
from mdlm_jax.noise import row_keys
from mdlm_jax.predict import Denoiser, Prediction, predict
from mdlm_jax.reverse import commit
from mdlm_jax.rules import Proposal, Row, Rule
from mdlm_jax.vocab import Vocab


class Decoding(NamedTuple):
  """Everything static about a sampler; hashable.

  Attributes:
    denoiser: the network.
    vocab: roles of the ids.
    rule: which positions are written in a step.
    draw: which values are proposed.
  """

  denoiser: Denoiser
  vocab: Vocab
  rule: Rule
  draw: Draw


class SampleResult(NamedTuple):
  """What a sampler returns.

  Attributes:
    ids: the finished canvas, no generation slot is MASK. Shape `[B, L]`.
    calls: network calls made, each for the whole batch. Shape `[]`.
    requested_t: noise level fed at each call. Shape `[calls, B]`.
    masked_fraction: share of the generation slots that were MASK when the call
      was made. Shape `[calls, B]`.
    finite: whether all logits of a row were usable. Shape `[B]`.
    trajectory: the canvas after each call, `[calls, B, L]`, or None.
  """

  ids: Int[Array, 'B L']
  calls: Int[Array, '']
  requested_t: Float[Array, 'calls B']
  masked_fraction: Float[Array, 'calls B']
  finite: Bool[Array, 'B']
  trajectory: Int[Array, 'calls B L'] | None


class SamplerState(NamedTuple):
  """What one call hands to the next.

  Attributes:
    ids: the canvas as it is. Shape `[B, L]`.
    t: noise level of the next call. Shape `[B]`.
    rule_state: the rule's own state, one per row.
    finite: whether all logits were usable so far. Shape `[B]`.
  """

  ids: Int[Array, 'B L']
  t: Float[Array, 'B']
  rule_state: Any
  finite: Bool[Array, 'B']


def sample(
  denoiser: Denoiser,
  params: Any,
  key: Key[Array, ''],
  canvas: Canvas,
  *,
  vocab: Vocab,
  rule: Rule,
  draw: Draw | None = None,
  trajectory: bool = False,
  row_ids: Int[Array, 'B'] | None = None,
) -> SampleResult:
  """Fills in the canvas by repeated reverse updates, in one `lax.scan`.

  The axes of decoding are its arguments: `draw` says which values, `rule` which
  positions and when, the canvas what is open.

  Everything random depends on the key, the row id, the step and the logical
  position only, so a row alone equals the row in any batch.

  Args:
    denoiser: the network, static.
    params: its parameters.
    key: consumed.
    canvas: rows with open slots; everything else in them never changes.
    vocab: roles of the ids, static.
    rule: which positions are written in a step, static.
    draw: which values are proposed, static; by default from the predicted
      categorical at temperature 1.
    trajectory: whether to return the canvas after each call.
    row_ids: ids of the rows for the noise, by default 0 to B - 1.

  Returns:
    The finished canvas, and what happened at each call.

  Raises:
    ValueError: on concrete arrays, for logits that are NaN, infinite or all
      forbidden. Under an outer `jit` call `check_finite` on the result.
  """
  chex.assert_rank(canvas.ids, 2)
  chex.assert_equal_shape([x for x in canvas if x is not None])
  if row_ids is None:
    row_ids = jnp.arange(canvas.ids.shape[0])
  decoding = Decoding(
    denoiser, vocab, rule, categorical() if draw is None else draw
  )
  result = _sample(
    decoding, params, key, canvas, row_ids, trajectory=trajectory
  )
  if not isinstance(result.finite, jax.core.Tracer):
    check_finite(result)
  return result


def check_finite(result: SampleResult) -> None:
  """Raises ValueError if logits of some row were NaN, infinite or all -inf."""
  if not result.finite.all():
    rows = np.flatnonzero(~np.asarray(result.finite)).tolist()
    raise ValueError(
      'the network gave non-finite logits, or none that may be drawn, in '
      f'row(s) {rows}'
    )


@functools.partial(jax.jit, static_argnames=('decoding', 'trajectory'))
def _sample(decoding, params, key, canvas, row_ids, *, trajectory):
  num_calls = decoding.rule.calls(canvas.ids.shape[1])
  keys = row_keys(key, row_ids)

  def call(state: SamplerState, step):
    masked = is_masked(state.ids, canvas, decoding.vocab)
    share = masked.sum(1) / jnp.maximum(canvas.generation_slots.sum(1), 1)
    noise = step_noise(decoding, keys, step, canvas)
    after = reverse_step(decoding, params, noise, step, state, canvas)
    return after, (state.t, share, after.ids if trajectory else None)

  state = initial_state(decoding, canvas)
  state, (t, share, kept) = jax.lax.scan(call, state, jnp.arange(num_calls))
  return SampleResult(
    state.ids, jnp.int32(num_calls), t, share, state.finite, kept
  )


def is_masked(
  ids: Int[Array, 'B L'], canvas: Canvas, vocab: Vocab
) -> Bool[Array, 'B L']:
  """Generation slots whose token is MASK; no draw can write a MASK there."""
  return canvas.generation_slots & (ids == vocab.mask_id)


def initial_state(decoding: Decoding, canvas: Canvas) -> SamplerState:
  """The state before the first call."""
  rows = _rows(canvas.ids, canvas, decoding.vocab)
  rule_state, t = jax.vmap(decoding.rule.init)(rows)
  finite = jnp.ones(canvas.ids.shape[0], bool)
  return SamplerState(canvas.ids, t, rule_state, finite)


def step_noise(
  decoding: Decoding,
  keys: Key[Array, 'B'],
  step: Int[Array, ''],
  canvas: Canvas,
) -> tuple[DrawNoise, Any]:
  """All noise of one call: the draw's and the rule's, from the rows' keys."""

  def one_row(row_key, positions):
    draw_key, rule_key = jax.random.split(jax.random.fold_in(row_key, step))
    return (
      decoding.draw.noise(draw_key, positions, decoding.vocab.size),
      decoding.rule.noise(rule_key, positions),
    )

  return jax.vmap(one_row)(keys, canvas.positions)


def predict_canvas(
  decoding: Decoding,
  params: Any,
  step: Int[Array, ''] | int,
  state: SamplerState,
  canvas: Canvas,
) -> Prediction:
  """What the network says about the canvas as it is, at every slot."""
  prediction, _ = predict(
    decoding.denoiser,
    params,
    None,
    state.ids,
    vocab=decoding.vocab,
    t=state.t,
    valid=canvas.valid,
    positions=canvas.positions,
    segments=canvas.segments,
    step=step,
  )
  return prediction


def reverse_step(
  decoding: Decoding,
  params: Any,
  noise: tuple[DrawNoise, Any],
  step: Int[Array, ''] | int,
  state: SamplerState,
  canvas: Canvas,
) -> SamplerState:
  """One reverse update of the batch, a deterministic function of its noise.

  Args:
    decoding: how to decode, static.
    params: the network's parameters.
    noise: as `step_noise` makes it, or chosen by hand.
    step: number of the call.
    state: what the call before left.
    canvas: what is open, valid and where; its ids are those of the start.

  Returns:
    The state after the call.
  """
  _, vocab, rule, draw = decoding
  prediction = predict_canvas(decoding, params, step, state, canvas)
  draw_noise, rule_noise = noise
  candidate_ids, confidence = draw.propose(draw_noise, prediction)
  rows = _rows(state.ids, canvas, vocab)
  proposal = Proposal(
    candidate_ids, confidence, prediction.logits, prediction.log_z
  )
  update = jax.vmap(rule.update, (0, None, 0, 0, 0))(
    rule_noise, step, rows, proposal, state.rule_state
  )
  # The last call leaves no MASK, whatever the rule decided.
  is_last = step == rule.calls(canvas.ids.shape[1]) - 1
  write = rows.masked & (update.write | is_last)
  usable = jnp.isfinite(prediction.log_z) | ~rows.masked
  return SamplerState(
    commit(state.ids, candidate_ids, write),
    update.t,
    update.state,
    state.finite & usable.all(1),
  )


def _rows(ids, canvas: Canvas, vocab: Vocab) -> Row:
  masked = is_masked(ids, canvas, vocab)
  return Row(ids, canvas.generation_slots, masked, canvas.positions)
