"""What the calls of the sampler share, and what one hands to the next."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from mdlm_jax.blocks import Window, at
from mdlm_jax.caches import CachePolicy
from mdlm_jax.canvas import Canvas
from mdlm_jax.constraints import Constraint
from mdlm_jax.draws import Draw, DrawNoise
from mdlm_jax.guidance import Guidance
from mdlm_jax.predict import Denoiser
from mdlm_jax.rules import Row, Rule
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


def window_rows(
  decoding: Decoding, inputs: Inputs, ids: Int[Array, 'B L'], window: Window
) -> Row:
  """The rows of a window, as batched maps."""
  ids = at(ids, window.slots)
  masked = window.open & (ids == decoding.vocab.mask_id)
  return Row(
    ids, window.open, masked, at(inputs.canvas.positions, window.slots)
  )
