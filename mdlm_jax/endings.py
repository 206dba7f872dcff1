"""Tokens that end a text: kept for last, and where to stop."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mdlm_jax.canvas import Canvas
from mdlm_jax.vocab import Vocab


def is_eos(ids: Int[Array, '*S'], eos_ids: Sequence[int]) -> Bool[Array, '*S']:
  """Where an id ends a text."""
  return jnp.isin(ids, jnp.asarray(eos_ids, ids.dtype))


def defer(
  candidate_ids: Int[Array, 'B K'],
  masked: Bool[Array, 'B K'],
  eos_ids: Sequence[int],
) -> tuple[Bool[Array, 'B K'], Bool[Array, 'B K']]:
  """Keeps EOS for last: it is written only where nothing else is proposed.

  Args:
    candidate_ids: the proposals.
    masked: slots that may be written.
    eos_ids: ids that end a text.

  Returns:
    Masked slots that have to wait, since their candidate is EOS and another
    masked slot of the row has another one; and the masked slots of rows in
    which every candidate is EOS, all of which are written now: written in
    turn, the next look might propose something else beside an EOS.
  """
  ends = is_eos(candidate_ids, eos_ids)
  all_end = masked & (ends | ~masked).all(1, keepdims=True)
  return masked & ends & ~all_end, all_end


def finish(
  ids: Int[Array, 'B L'], canvas: Canvas, vocab: Vocab
) -> tuple[Int[Array, 'B L'], Bool[Array, 'B']]:
  """Ends the rows whose first generated EOS has no MASK before it.

  Args:
    ids: the canvas as it is.
    canvas: gives the generation slots.
    vocab: gives EOS, and PAD to fill the rest (EOS where there is no PAD).

  Returns:
    The canvas with PAD at the generation slots after such an EOS, and the rows
    that ended.
  """
  slots = canvas.generation_slots
  ends = slots & is_eos(ids, vocab.eos_ids)
  open_before = jnp.cumsum(slots & (ids == vocab.mask_id), 1)
  complete = ends & (open_before == 0)
  after = (jnp.cumsum(complete, 1) - complete) > 0
  fill = vocab.eos_ids[0] if vocab.pad_id is None else vocab.pad_id
  return jnp.where(slots & after, fill, ids), complete.any(1)


def count_tokens(
  ids: Int[Array, 'B L'], canvas: Canvas, vocab: Vocab
) -> Int[Array, 'B']:
  """Generated tokens of each row, up to and with its first EOS."""
  slots = canvas.generation_slots
  ends = slots & is_eos(ids, vocab.eos_ids)
  return (slots & ((jnp.cumsum(ends, 1) - ends) == 0)).sum(1)
