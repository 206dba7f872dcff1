"""The compiled loop: from a canvas of MASK to text."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax import endings, network_call, sampling_step
from mdlm_jax.blocks import Blocks, window_of
from mdlm_jax.caches import CachePolicy
from mdlm_jax.canvas import Canvas
from mdlm_jax.constraints import Constraint
from mdlm_jax.draws import Draw, categorical
from mdlm_jax.guidance import Guidance
from mdlm_jax.noise import row_keys
from mdlm_jax.predict import Denoiser
from mdlm_jax.rules import Rule
from mdlm_jax.sampling_state import Decoding, Inputs, is_masked
from mdlm_jax.schedules import Schedule, linear
from mdlm_jax.vocab import Vocab


class SampleResult(NamedTuple):
  """What a sampler returns; S is the blocks times the calls of each.

  Attributes:
    ids: the finished canvas, no generation slot is MASK. Shape `[B, L]`.
    calls: network calls made, each for the whole batch; a guided call counts
      twice. Shape `[]`.
    calls_per_block: the same, of each block. Shape `[blocks]`.
    calls_per_row: calls that each row needed; the batch makes a call when any
      row needs one. Shape `[B]`.
    requested_t: noise level fed at each call, NaN where none was made. Shape
      `[S, B]`.
    masked_fraction: share of the generation slots that were MASK when the call
      was made, NaN where none was made. Shape `[S, B]`.
    num_tokens: generated tokens of each row, up to and with its first EOS.
      Shape `[B]`.
    changes: how often the committed token of a slot became another one, 0 under
      rules that take nothing back. Shape `[B, L]`.
    finite: whether all logits of a row were usable. Shape `[B]`.
    trajectory: the canvas after each call, `[S, B, L]`, or None; a call that
      was not made repeats the canvas before it.
    computed: slots that each call computed, the others being stored, or None
      without a cache. Shape `[S, B]`.
    cache_error: with `audit_cache`, the largest difference of a logit at an
      open MASK slot from its value without a cache, NaN where no call was made.
      Shape `[S, B]`.
  """

  ids: Int[Array, 'B L']
  calls: Int[Array, '']
  calls_per_block: Int[Array, 'blocks']
  calls_per_row: Int[Array, 'B']
  requested_t: Float[Array, 'S B']
  masked_fraction: Float[Array, 'S B']
  num_tokens: Int[Array, 'B']
  changes: Int[Array, 'B L']
  finite: Bool[Array, 'B']
  trajectory: Int[Array, 'S B L'] | None
  computed: Int[Array, 'S B'] | None
  cache_error: Float[Array, 'S B'] | None

  @property
  def tokens_per_call(self) -> Float[Array, 'B'] | Float[np.ndarray, 'B']:
    """Generated tokens of each row for every call that it needed."""
    return self.num_tokens / self.calls_per_row.clip(1)


def sample(
  denoiser: Denoiser,
  params: Any,
  key: Key[Array, ''],
  canvas: Canvas,
  *,
  vocab: Vocab,
  rule: Rule,
  draw: Draw | None = None,
  schedule: Schedule = linear(),
  blocks: Blocks | None = None,
  guidance: Guidance | None = None,
  constraint: Constraint | None = None,
  planner: Callable | None = None,
  planner_params: Any = None,
  eos_last: bool = False,
  stop_at_eos: bool = False,
  cache: CachePolicy | None = None,
  audit_cache: bool = False,
  trajectory: bool = False,
  on_call: Callable | None = None,
  row_ids: Int[Array, 'B'] | None = None,
) -> SampleResult:
  """Fills in the canvas by repeated reverse updates, in one compiled program.

  The axes of decoding are its arguments: `draw` says which values, `rule` which
  positions and which of them are taken back, `blocks` which part of the canvas
  is open, `guidance` and `constraint` what the network is made to say. A rule
  with planned calls runs in a `lax.scan`, an adaptive one, or any that may stop
  at an EOS, in a `lax.while_loop`; rows that are done wait.

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
    schedule: gives a network that is conditioned on time the level at which
      the masked share is what it is, where the rule does not say, static.
    blocks: decodes block after block (`blocks.blocks_of`); by default the whole
      canvas is open.
    guidance: classifier-free guidance (`guidance.guide`).
    constraint: ids that a slot may hold (`constraints.constrain`).
    planner: an external planner, static: `planner(planner_params, ids [B, L],
      canvas, slots [B, W]) -> scores [B, W]` of a canvas in which the
      candidates are filled in; read by rules that rank committed tokens. It
      runs once a call and is not counted.
    planner_params: its parameters.
    eos_last: writes EOS only where nothing else is proposed in the window, or
      on the last call, which writes whatever is left.
    stop_at_eos: a row ends when an EOS is committed and everything before it:
      its later slots become PAD and it takes no further call.
    cache: which slots a call computes (`caches`), static; None: all of them.
      Only `caches.exact`, for a network that attends by blocks, gives the
      tokens that no cache gives.
    audit_cache: whether to make every call without the cache too, and to return
      the largest difference; `calls` does not count it.
    trajectory: whether to return the canvas after each call.
    on_call: `on_call(calls, most, ids)`, called on the host after each call
      with the canvas; static.
    row_ids: ids of the rows for the noise, by default 0 to B - 1.

  Returns:
    The finished canvas, and what happened at each call.

  Raises:
    ValueError: an option that cannot act: EOS options without an EOS,
      `planner_params` without a planner, a cache policy that does not fit the
      network or the rule. A rule that reads a planner without one, or that
      reuses proposals with a network that is not declared `time_free`. On
      concrete arrays, for logits that are NaN, infinite or all forbidden; under
      an outer `jit` call `check_finite` on the result.
  """
  chex.assert_rank(canvas.ids, 2)
  chex.assert_equal_shape([x for x in canvas if x is not None])
  if (eos_last or stop_at_eos) and not vocab.drawable[[*vocab.eos_ids]].any():
    raise ValueError(
      f'{eos_last=}, {stop_at_eos=} need a vocabulary with an EOS that may be '
      'drawn'
    )
  if rule.reuses and not denoiser.time_free:
    raise ValueError(
      'a rule that reuses proposals needs a denoiser that is time_free: this '
      'one may answer otherwise at another t or step'
    )
  if planner is None and planner_params is not None:
    raise ValueError('planner_params without a planner')
  _check_cache(denoiser, cache, audit_cache)
  _check_same_rows(canvas, blocks, guidance, constraint)
  if row_ids is None:
    row_ids = jnp.arange(canvas.ids.shape[0])
  decoding = Decoding(
    denoiser,
    vocab,
    rule,
    categorical() if draw is None else draw,
    schedule,
    planner,
    eos_last,
    stop_at_eos,
    cache,
    audit_cache,
  )
  inputs = Inputs(params, canvas, guidance, constraint, planner_params)
  result = _sample(
    decoding,
    inputs,
    row_keys(key, row_ids),
    blocks,
    trajectory=trajectory,
    on_call=on_call,
  )
  if not isinstance(result.finite, jax.core.Tracer):
    check_finite(result)
  return result


def _check_cache(denoiser, cache, audit_cache) -> None:
  """Raises ValueError for a policy that does not fit the network."""
  if audit_cache and cache is None:
    raise ValueError('audit_cache=True needs a cache policy')
  if cache is None or not cache.is_exact:
    return
  if denoiser.attention_block is None:
    raise ValueError(
      'the exact cache needs a network that attends by blocks; in this one '
      'every slot sees all others'
    )
  if not denoiser.time_free:
    raise ValueError(
      'the exact cache needs a network that is time_free: what is stored was '
      'computed at another noise level'
    )


def _check_same_rows(canvas, blocks, guidance, constraint) -> None:
  """Raises ValueError for what was made for another canvas."""
  shape = canvas.ids.shape
  if guidance is not None and guidance.replaced.shape != shape:
    raise ValueError(
      f'the guidance is of a canvas of shape {guidance.replaced.shape}, not '
      f'{shape}'
    )
  if constraint is not None and constraint.index.shape != shape:
    raise ValueError(
      f'the constraint is of a canvas of shape {constraint.index.shape}, not '
      f'{shape}'
    )
  if blocks is None or isinstance(blocks.starts, jax.core.Tracer):
    return
  if blocks.starts.shape != shape[:1] or blocks.length > shape[1]:
    raise ValueError(f'the blocks are not of a canvas of shape {shape}')
  if isinstance(canvas.generation_slots, jax.core.Tracer):
    return
  slots = np.arange(shape[1]) - np.asarray(blocks.starts)[:, None]
  inside = (slots >= 0) & (slots < blocks.length * blocks.count)
  if (np.asarray(canvas.generation_slots) & ~inside).any():
    raise ValueError('the blocks leave out generation slots of the canvas')


def check_finite(result: SampleResult) -> None:
  """Raises ValueError if logits of some row were NaN, infinite or all -inf."""
  if not result.finite.all():
    rows = np.flatnonzero(~np.asarray(result.finite)).tolist()
    raise ValueError(
      'the network gave non-finite logits, or none that may be drawn, in '
      f'row(s) {rows}'
    )


class _Log(NamedTuple):
  """What happened so far; S is the most calls over all blocks."""

  ran: Bool[Array, 'S']  # Steps that were taken,
  made: Bool[Array, 'S']  # those among them that called the network,
  needed: Bool[Array, 'S B']  # and the rows that needed the call.
  t: Float[Array, 'S B']
  masked_fraction: Float[Array, 'S B']
  changes: Int[Array, 'B L']
  last_ids: Int[Array, 'B L']  # The last token each slot had.
  trajectory: Int[Array, 'S B L'] | None
  computed: Int[Array, 'S B'] | None
  cache_error: Float[Array, 'S B'] | None


@functools.partial(
  jax.jit, static_argnames=('decoding', 'trajectory', 'on_call')
)
def _sample(decoding, inputs, keys, blocks, *, trajectory, on_call):
  canvas, vocab = inputs.canvas, decoding.vocab
  batch, length = canvas.ids.shape
  num_blocks = 1 if blocks is None else blocks.count
  calls = decoding.rule.calls(length if blocks is None else blocks.length)
  most = num_blocks * calls
  may_stop = decoding.rule.adaptive or decoding.stop_at_eos

  def one_call(window, carry, step):
    state, log = carry
    index = window.block * calls + step
    noise = sampling_step.step_noise(decoding, keys, index, canvas, window)
    needed = sampling_step.needs_call(decoding, inputs, state, window)
    made = needed.any() if decoding.rule.reuses else jnp.array(True)
    proposal, proposed = sampling_step.propose_where_needed(
      decoding, inputs, noise.draw, step, state, window
    )
    after = sampling_step.apply_rule(
      decoding, inputs, noise.rule, step, proposal, proposed, window
    )
    if on_call is not None:
      jax.debug.callback(
        lambda calls, ids: on_call(calls, most, ids), index + 1, after.ids
      )
    log = _record(decoding, log, index, needed, made, state, after, canvas)
    return after, log

  def one_block(carry, block):
    ids, finite, stored, log = carry
    window = window_of(blocks, block, canvas)
    noise = sampling_step.step_noise(
      decoding, keys, block * calls, canvas, window
    )
    state = sampling_step.start_window(
      decoding, inputs, noise.init, ids, finite, window, stored
    )
    state, log = _repeat(
      functools.partial(one_call, window), (state, log), calls, may_stop
    )
    return (state.ids, state.finite, state.stored, log), None

  stored = network_call.start_cache(
    decoding, inputs, window_of(blocks, 0, canvas)
  )
  log = _empty_log(decoding, most, canvas, trajectory)
  (ids, finite, _, log), _ = jax.lax.scan(
    one_block,
    (canvas.ids, jnp.ones(batch, bool), stored, log),
    jnp.arange(num_blocks),
  )
  per_call = 1
  if inputs.guidance is not None:
    per_call = inputs.guidance.calls_per_step
  return SampleResult(
    ids,
    per_call * log.made.sum(),
    per_call * log.made.reshape(num_blocks, calls).sum(1),
    per_call * log.needed.sum(0),
    log.t,
    log.masked_fraction,
    endings.count_tokens(ids, canvas, vocab),
    log.changes,
    finite,
    _filled_trajectory(log, canvas) if trajectory else None,
    log.computed,
    log.cache_error,
  )


def _repeat(call, carry, num_calls: int, may_stop: bool):
  """The calls of one window, as a scan or until every row is done."""
  if not may_stop:
    return jax.lax.scan(
      lambda carry, step: (call(carry, step), None),
      carry,
      jnp.arange(num_calls),
    )[0]

  def goes_on(carry):
    step, (state, _) = carry
    return (step < num_calls) & ~state.done.all()

  def body(carry):
    step, carry = carry
    return step + 1, call(carry, step)

  return jax.lax.while_loop(goes_on, body, (jnp.int32(0), carry))[1]


def _empty_log(decoding, most: int, canvas: Canvas, trajectory: bool) -> _Log:
  batch, length = canvas.ids.shape
  nan = jnp.full((most, batch), jnp.nan, jnp.result_type(float))
  return _Log(
    jnp.zeros(most, bool),
    jnp.zeros(most, bool),
    jnp.zeros((most, batch), bool),
    nan,
    nan,
    jnp.zeros((batch, length), jnp.int32),
    canvas.ids,
    jnp.zeros((most, batch, length), canvas.ids.dtype) if trajectory else None,
    jnp.zeros((most, batch), jnp.int32) if decoding.cache else None,
    nan if decoding.audit_cache else None,
  )


def _record(decoding, log, index, needed, made, before, after, canvas) -> _Log:
  """The log with one more call."""
  vocab = decoding.vocab
  masked = is_masked(before.ids, canvas, vocab)
  share = masked.sum(1) / jnp.maximum(canvas.generation_slots.sum(1), 1)
  is_mask = after.ids == vocab.mask_id
  replaced = (log.last_ids != vocab.mask_id) & ~is_mask
  replaced &= canvas.generation_slots & (after.ids != log.last_ids)
  if decoding.stop_at_eos:
    replaced &= ~endings.after_end(after.ids, canvas, vocab)[0]
  kept = log.trajectory
  return _Log(
    log.ran.at[index].set(True),
    log.made.at[index].set(made),
    log.needed.at[index].set(needed),
    log.t.at[index].set(jnp.where(made, before.t, jnp.nan)),
    log.masked_fraction.at[index].set(jnp.where(made, share, jnp.nan)),
    log.changes + replaced,
    jnp.where(is_mask, log.last_ids, after.ids),
    kept if kept is None else kept.at[index].set(after.ids),
    *_record_cache(log, index, made, after.stored),
  )


def _record_cache(log, index, made, stored):
  """What the log holds of a cache with one more call."""
  computed, error = log.computed, log.cache_error
  if computed is not None:
    computed = computed.at[index].set(jnp.where(made, stored.computed, 0))
  if error is not None:
    error = error.at[index].set(jnp.where(made, stored.error, jnp.nan))
  return computed, error


def _filled_trajectory(log: _Log, canvas: Canvas):
  """The trajectory; a step that was not taken repeats the one before it."""
  steps_taken = jnp.where(log.ran, jnp.arange(log.ran.shape[0]), -1)
  canvases = jnp.concatenate([canvas.ids[None], log.trajectory])
  return canvases[jax.lax.cummax(steps_taken) + 1]
