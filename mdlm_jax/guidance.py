"""Classifier-free guidance: away from what a null condition predicts."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mdlm_jax.canvas import Canvas
from mdlm_jax.vocab import Vocab


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['null_ids', 'replaced'],
  meta_fields=['scale'],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Guidance:
  """How a null condition is subtracted; see `guide`.

  Attributes:
    scale: w of (1 + w) cond - w null; static.
    null_ids: the null condition. Shape `[B, L]`.
    replaced: slots at which the null pass sees `null_ids` in place of the
      canvas. Shape `[B, L]`.
  """

  scale: float
  # Not the array types: JAX also builds trees of placeholders.
  null_ids: Any
  replaced: Any

  @property
  def calls_per_step(self) -> int:
    """Network calls of a step: 2, but 1 where a pass has no weight."""
    return 1 if self.scale in (0, -1) else 2

  def null_canvas(self, ids: Int[Array, 'B L']) -> Int[Array, 'B L']:
    """The canvas as the null pass sees it. Shape `[B, L]`."""
    return jnp.where(self.replaced, self.null_ids, ids)


def guide(
  canvas: Canvas,
  vocab: Vocab,
  scale: float | int,
  *,
  null_ids: Int[Array, 'B L'] | None = None,
) -> Guidance:
  """Guidance of a canvas by what the network says without its condition.

    logits = null + (scale + 1) (cond - null) = (1 + scale) cond - scale null

  so scale 0 is the network itself and -1 the null condition, at one call a
  step; every other scale takes two. (The other convention in use, null + s
  (cond - null), has s = scale + 1.) The law is p(x | condition) times
  (p(x | condition) / p(x | null))^scale, normalised at every slot (Ho and
  Salimans 2022, on logits as Nie et al. 2025).

  The condition is what is given: the valid slots that generation does not own.
  By default the null pass sees MASK there, which needs no training with dropped
  conditions (unsupervised guidance, Nie et al. 2025, "Scaling up masked
  diffusion models on text", section 4). Padding and the answer are the same in
  both passes, and so is the noise level.

  Args:
    canvas: what is given and what is generated.
    vocab: gives MASK.
    scale: finite and at least -1; static, as other programs have other calls.
    null_ids: a null condition of the caller's own, such as the one that stands
      for a dropped condition in training, or a negative prompt. It is read at
      the slots of the condition only. Shape `[B, L]`.

  Returns:
    The guidance.

  Raises:
    ValueError: for a scale out of range and for `null_ids` of another shape;
      on concrete arrays also for ids outside the table and for a canvas on
      which nothing is given, where guidance could not act.

  Example:
    >>> from mdlm_jax.canvas import from_rows
    >>> vocab = Vocab(size=4, mask_id=1)
    >>> canvas = from_rows([[3, None]], vocab)
    >>> guide(canvas, vocab, 0.5).null_canvas(jnp.array([[3, 2]]))
    Array([[1, 2]], dtype=int32)
  """
  if not (math.isfinite(scale) and scale >= -1):
    raise ValueError(f'{scale=} must be finite and at least -1')
  given = canvas.valid & ~canvas.generation_slots
  if null_ids is None:
    null_ids = jnp.full_like(canvas.ids, vocab.mask_id)
  if null_ids.shape != canvas.ids.shape:
    raise ValueError(
      f'null_ids has shape {null_ids.shape}, the canvas {canvas.ids.shape}'
    )
  if not isinstance(given, jax.core.Tracer) and not given.any():
    raise ValueError(
      'guidance needs a condition: no slot of the canvas is given'
    )
  if not isinstance(null_ids, jax.core.Tracer):
    wrong = (null_ids < 0) | (null_ids >= vocab.size)
    if wrong.any():
      raise ValueError(
        f'null_ids holds {int(null_ids[wrong][0])}; ids must lie in '
        f'[0, {vocab.size})'
      )
  return Guidance(float(scale), jnp.asarray(null_ids), given)


def combine(
  cond: Float[Array, '*S V'], null: Float[Array, '*S V'], scale: float | int
) -> Float[Array, '*S V']:
  """(1 + scale) cond - scale null.

  Args:
    cond: raw logits under the condition, any floating dtype. Shape `[..., V]`.
    null: those under the null condition. Shape `[..., V]`.
    scale: at least -1.

  Returns:
    float32 or wider; -inf wherever `cond` is, whatever `null` is. +inf, a
    prediction that the sampler refuses, where `null` alone is -inf and the
    scale is positive: no law has that ratio.

  Example:
    >>> print(combine(jnp.array([2.0, 0, -jnp.inf]), jnp.zeros(3), 1.0))
    [  4.   0. -inf]
  """
  dtype = jnp.promote_types(cond.dtype, jnp.float32)
  cond, null = cond.astype(dtype), null.astype(dtype)
  # Differences first: a constant that both share is not magnified.
  return jnp.where(cond == -jnp.inf, cond, cond + scale * (cond - null))
