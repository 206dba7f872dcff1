"""The compiled loop: from a canvas of MASK to text."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax.canvas import Canvas
from mdlm_jax.draws import Draw, categorical
from mdlm_jax.noise import row_keys
from mdlm_jax.predict import Denoiser, predict
from mdlm_jax.reverse import commit
from mdlm_jax.rules import Proposal, Row, Rule
from mdlm_jax.vocab import Vocab


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

  The four axes of decoding are its arguments: `draw` says which values, `rule`
  which positions, and in what order; the canvas says what is open.

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
  if row_ids is None:
    row_ids = jnp.arange(canvas.ids.shape[0])
  result = _sample(
    denoiser,
    params,
    key,
    canvas,
    row_ids,
    vocab=vocab,
    rule=rule,
    draw=categorical() if draw is None else draw,
    trajectory=trajectory,
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


@functools.partial(
  jax.jit, static_argnames=('denoiser', 'vocab', 'rule', 'draw', 'trajectory')
)
def _sample(
  denoiser, params, key, canvas, row_ids, *, vocab, rule, draw, trajectory
):
  num_calls = rule.calls(canvas.ids.shape[1])
  keys = row_keys(key, row_ids)

  def call(state: SamplerState, step):
    masked = is_masked(state.ids, canvas, vocab)
    noise = step_noise(rule, draw, keys, step, canvas, num_ids=vocab.size)
    next_state = reverse_step(
      denoiser, params, noise, step, state, canvas, vocab, rule, draw, num_calls
    )
    share = masked.sum(1) / jnp.maximum(canvas.generation_slots.sum(1), 1)
    kept = next_state.ids if trajectory else None
    return next_state, (state.t, share, kept)

  state = initial_state(canvas, vocab, rule)
  state, (t, share, kept) = jax.lax.scan(call, state, jnp.arange(num_calls))
  return SampleResult(
    state.ids, jnp.int32(num_calls), t, share, state.finite, kept
  )


def is_masked(ids, canvas: Canvas, vocab: Vocab) -> Bool[Array, 'B L']:
  """Generation slots whose token is MASK; no draw can write a MASK there."""
  return canvas.generation_slots & (ids == vocab.mask_id)


def initial_state(canvas: Canvas, vocab: Vocab, rule: Rule) -> SamplerState:
  """The state before the first call."""
  rule_state, t = jax.vmap(rule.init)(_rows(canvas.ids, canvas, vocab))
  finite = jnp.ones(canvas.ids.shape[0], bool)
  return SamplerState(canvas.ids, t, rule_state, finite)


def step_noise(rule, draw, keys, step, canvas, *, num_ids):
  """All noise of one call, `(draw noise, rule noise)`, a row key each."""

  def one_row(row_key, positions):
    step_key = jax.random.fold_in(row_key, step)
    draw_key, rule_key = jax.random.split(step_key)
    return (
      draw.noise(draw_key, positions, num_ids),
      rule.noise(rule_key, positions),
    )

  return jax.vmap(one_row)(keys, canvas.positions)


def reverse_step(
  denoiser: Denoiser,
  params: Any,
  noise: Any,
  step: Int[Array, ''],
  state: SamplerState,
  canvas: Canvas,
  vocab: Vocab,
  rule: Rule,
  draw: Draw,
  num_calls: int,
) -> SamplerState:
  """One reverse update of the batch, a deterministic function of its noise."""
  prediction, _ = predict(
    denoiser,
    params,
    None,
    state.ids,
    vocab=vocab,
    t=state.t,
    valid=canvas.valid,
    positions=canvas.positions,
    segments=canvas.segments,
    step=step,
  )
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
  write = rows.masked & (update.write | (step == num_calls - 1))
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
