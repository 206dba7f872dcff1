"""The network call of one step of the sampler, and what it stores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mdlm_jax.blocks import Window, put
from mdlm_jax.caches import Computed, View
from mdlm_jax.predict import Prediction, predict
from mdlm_jax.sampling_state import (
  Decoding,
  Inputs,
  SamplerState,
  Stored,
  is_masked,
  window_rows,
)


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
  sizes = call_sizes(decoding, state.ids.shape[1], window.open.shape[1])
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


def call_sizes(decoding: Decoding, length: int, width: int) -> tuple[int, ...]:
  """Numbers of slots that a call is compiled for, ascending.

  Args:
    decoding: gives the cache policy and the network.
    length: slots of the canvas, the last size.
    width: slots of the window.
  """
  denoiser = decoding.denoiser
  sizes = decoding.cache.sizes(length, width, denoiser.attention_block)
  if denoiser.shifted:  # `computed_slots` has one more, or all would be made.
    sizes = tuple(dict.fromkeys(min(size + 1, length) for size in sizes))
  return sizes


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
    decoding.denoiser.attention_block,
  )
  slots = decoding.cache.computed(view)
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
