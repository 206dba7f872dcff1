"""Tokens that end a text: kept for last, and where to stop."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mdlm_jax.canvas import Canvas
from mdlm_jax.vocab import Vocab


def is_eos(ids: Int[Array, '*S'], eos_ids: Sequence[int]) -> Bool[Array, '*S']:
  """Where an id ends a text."""
  return jnp.isin(ids, jnp.asarray(eos_ids, ids.dtype))


def waits(
  candidate_ids: Int[Array, 'B K'],
  masked: Bool[Array, 'B K'],
  eos_ids: Sequence[int],
) -> tuple[Bool[Array, 'B K'], Bool[Array, 'B 1']]:
  """Keeps EOS for last: it is written only where nothing else is proposed.

  Args:
    candidate_ids: the proposals.
    masked: slots that may be written.
    eos_ids: ids that end a text.

  Returns:
    Slots whose candidate is EOS; and the rows in which these have to wait,
    since a masked slot has another candidate. In the other rows every masked
    slot is to be written at once: written in turn, the next look might propose
    something else beside an EOS.
  """
  ends = is_eos(candidate_ids, eos_ids)
  return ends, (masked & ~ends).any(1, keepdims=True)


def after_end(
  ids: Int[Array, 'B L'], canvas: Canvas, vocab: Vocab
) -> tuple[Bool[Array, 'B L'], Bool[Array, 'B']]:
  """What follows the first generated EOS that has no MASK before it.

  Args:
    ids: the canvas as it is.
    canvas: gives the generation slots.
    vocab: gives EOS and MASK.

  Returns:
    The generation slots after it, and the rows that have such an EOS.
  """
  slots = canvas.generation_slots
  ends = slots & is_eos(ids, vocab.eos_ids)
  open_before = jnp.cumsum(slots & (ids == vocab.mask_id), 1)
  complete = ends & (open_before == 0)
  after = (jnp.cumsum(complete, 1) - complete) > 0
  return slots & after, complete.any(1)


def finish(
  ids: Int[Array, 'B L'], canvas: Canvas, vocab: Vocab
) -> tuple[Int[Array, 'B L'], Bool[Array, 'B']]:
  """The canvas with PAD after the end of each row that has one, and which do.

  EOS takes the place of PAD where there is no PAD.
  """
  after, ended = after_end(ids, canvas, vocab)
  fill = vocab.eos_ids[0] if vocab.pad_id is None else vocab.pad_id
  return jnp.where(after, fill, ids), ended


def count_tokens(
  ids: Int[Array, 'B L'], canvas: Canvas, vocab: Vocab
) -> Int[Array, 'B']:
  """Generated tokens of each row, up to and with its first EOS."""
  slots = canvas.generation_slots
  ends = slots & is_eos(ids, vocab.eos_ids)
  return (slots & ((jnp.cumsum(ends, 1) - ends) == 0)).sum(1)
