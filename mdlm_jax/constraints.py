"""Which ids may be drawn at each slot of a canvas."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from mdlm_jax.blocks import at
from mdlm_jax.canvas import Canvas
from mdlm_jax.vocab import Vocab


class Constraint(NamedTuple):
  """Allowed sets, and which of them each slot must draw from.

  Attributes:
    sets: whether an id is in a set. Shape `[G, V]`.
    index: the set of each slot. Shape `[B, L]`.
  """

  sets: Bool[Array, 'G V']
  index: Int[Array, 'B L']


def constrain(
  canvas: Canvas,
  rows: Sequence[Sequence[Sequence[int] | None]],
  vocab: Vocab,
) -> Constraint:
  """A constraint from the allowed ids of every slot; runs on the host.

  What is drawn at a slot follows the predicted distribution restricted to its
  set and normalised there, before temperature and filters. Slots are
  constrained one by one, so what a whole string must satisfy is not for this.

  Args:
    canvas: the rows, with concrete arrays.
    rows: for every row and each of its valid slots, from left to right, the ids
      that may be drawn there, or None for every id that may be drawn at all.
    vocab: which ids may be drawn at all.

  Returns:
    The constraint; equal sets are stored once.

  Raises:
    ValueError: for another number of rows or slots than the canvas has, an
      empty set, an id outside the table or that may not be drawn, or a set at a
      slot that is given, where it could not act.

  Example:
    >>> from mdlm_jax.canvas import from_rows
    >>> vocab = Vocab(size=4, mask_id=1)
    >>> canvas = from_rows([[0, None, None]], vocab)
    >>> constrain(canvas, [[None, None, [3]]], vocab).index
    Array([[0, 0, 1]], dtype=int32)
  """
  valid, generated = (
    np.asarray(canvas.valid),
    np.asarray(canvas.generation_slots),
  )
  if len(rows) != len(valid):
    raise ValueError(f'{len(rows)} rows of sets for a canvas of {len(valid)}')
  places: dict[frozenset[int] | None, int] = {None: 0}
  index = np.zeros(valid.shape, np.int32)
  for b, row in enumerate(rows):
    slots = np.flatnonzero(valid[b])
    if len(row) != len(slots):
      raise ValueError(
        f'row {b} has {len(row)} sets for the {len(slots)} valid slots of the '
        'canvas'
      )
    for slot, ids in zip(slots, row, strict=True):
      if ids is None:
        continue
      if not generated[b, slot]:
        raise ValueError(
          f'slot {slot} of row {b} is given; a set could not act there'
        )
      allowed = _checked(ids, vocab, f'the set of slot {slot} of row {b}')
      index[b, slot] = places.setdefault(allowed, len(places))
  sets = np.zeros((len(places), vocab.size), bool)
  for allowed, place in places.items():
    sets[place, vocab.drawable if allowed is None else list(allowed)] = True
  return Constraint(jnp.asarray(sets), jnp.asarray(index))


def _checked(ids, vocab, name) -> frozenset[int]:
  allowed = frozenset(map(operator.index, ids))
  if not allowed:
    raise ValueError(f'{name} is empty')
  for token in sorted(allowed):
    if not 0 <= token < vocab.size:
      raise ValueError(
        f'{name} holds id {token}; ids must lie in [0, {vocab.size})'
      )
    if not vocab.drawable[token]:
      raise ValueError(f'{name} holds id {token}, which may not be drawn')
  return allowed


def allowed_at(
  constraint: Constraint, slots: Int[Array, 'B W'] | None
) -> Bool[Array, 'B W V']:
  """Whether each id may be drawn at the slots of a window."""
  return constraint.sets[at(constraint.index, slots)]
