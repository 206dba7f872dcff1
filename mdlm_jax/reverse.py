"""The reverse update: choose eligible positions, commit their candidates.

`reverse_update` is the definition, for a batch and with every argument
checked. `top_eligible` and `commit` are its two halves, for one row and
unchecked; the rules of the sampler are built from the same two.
"""

import functools
from collections.abc import Sequence
from typing import SupportsIndex

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from mdlm_jax.checks import check_values
from mdlm_jax.ordering import lowest_integer, ordered_integers


def top_eligible(
  scores: Float[Array, 'L'],
  eligible: Bool[Array, 'L'],
  count: Int[Array, ''] | int,
  *,
  max_count: int | None = None,
) -> Bool[Array, 'L']:
  """Marks the `count` eligible positions of highest score, in one row.

  Ties go to the lowest position. An ineligible position is never marked,
  whatever its score, also when every eligible score is minus infinity.

  Args:
    scores: any floating dtype, without NaN where eligible. Shape `[L]`.
    eligible: positions that may be marked. Shape `[L]`.
    count: how many to mark; a count above the number of eligible positions
      marks them all. Shape `[]`.
    max_count: static upper bound of `count`, at most L (the default). A tight
      bound makes the selection several times faster.

  Returns:
    The marked positions. Shape `[L]`.

  Example:
    >>> top_eligible(jnp.array([.9, .1, .5]), jnp.array([False, True, True]), 1)
    Array([False, False,  True], dtype=bool)
  """
  scores = jnp.asarray(scores)
  chex.assert_rank(scores, 1)
  chex.assert_equal_shape([scores, eligible])
  (length,) = scores.shape
  k = length if max_count is None else min(max_count, length)
  # Integers, since masking with -inf would tie with eligible scores of -inf.
  ranks = jnp.where(
    eligible, ordered_integers(scores), lowest_integer(scores.dtype)
  )
  _, order = jax.lax.top_k(ranks, k)
  marked = jnp.arange(k) < count
  return jnp.zeros(length, bool).at[order].set(marked) & eligible


def commit(
  ids: Int[Array, '*S'],
  candidate_ids: Int[Array, '*S'],
  write: Bool[Array, '*S'],
) -> Int[Array, '*S']:
  """The ids with the candidates written where `write` is true.

  Example:
    >>> write = jnp.array([False, True])
    >>> print(commit(jnp.array([7, 1]), jnp.array([9, 8]), write))
    [7 8]
  """
  chex.assert_equal_shape([ids, candidate_ids, write])
  return jnp.where(write, candidate_ids, ids)


def reverse_update(
  x: ArrayLike | Sequence,
  candidate_ids: ArrayLike | Sequence,
  confidence: ArrayLike | Sequence,
  generation_slots: ArrayLike | Sequence,
  reveal_counts: ArrayLike | Sequence,
  mask_id: SupportsIndex,
  pad_id: SupportsIndex,
) -> Int[Array, 'B L']:
  """Commits, per row, the most confident candidates at open MASK positions.

  A position is eligible iff it is a generation slot and its token is MASK and
  not PAD. In row b the `reveal_counts[b]` eligible positions of highest
  confidence receive their candidates, ties going to the lowest position;
  everything else is unchanged. This is one step of the confidence decoding of
  MaskGIT (Chang et al. 2022, section 3.2) and LLaDA (Nie et al. 2025, section
  2.4), with the positions and counts made explicit.

  Args:
    x: token ids. Shape `[B, L]`.
    candidate_ids: the token that would be written. Shape `[B, L]`.
    confidence: floating scores, higher is earlier; ignored where not eligible.
      Shape `[B, L]`.
    generation_slots: Boolean, positions that generation owns. Shape `[B, L]`.
    reveal_counts: integers between 0 and the row's number of eligible
      positions; a list or an array. Shape `[B]`.
    mask_id: id of MASK.
    pad_id: id of PAD, never committed; -1 where there is none, or where PAD is
      an ordinary token (pad = eos).

  Returns:
    The next ids, int32. Shape `[B, L]`.

  Raises:
    ValueError: for shapes and dtypes other than these, and, on concrete
      arrays, for a count that is negative or above the eligible number, a MASK
      or PAD about to be committed, a NaN confidence at an eligible position.
      Under `jit` the value errors are found by `checkify.checkify`.

  Example:
    >>> reverse_update([[7, 1, 1]], [[7, 5, 6]], [[.9, .2, .4]],
    ...                [[False, True, True]], [1], mask_id=1, pad_id=0)
    Array([[7, 1, 6]], dtype=int32)
  """
  if mask_id == pad_id:
    raise ValueError(f'{mask_id=} and {pad_id=} must differ')
  arguments = {
    'x': (x, 'integer', jnp.int32),
    'candidate_ids': (candidate_ids, 'integer', jnp.int32),
    'confidence': (confidence, 'floating', jnp.float32),
    'generation_slots': (generation_slots, 'bool', jnp.bool_),
    'reveal_counts': (reveal_counts, 'integer', jnp.int32),
  }
  arrays = {
    name: _typed(name, *argument) for name, argument in arguments.items()
  }
  shape = arrays['x'].shape
  if len(shape) != 2:
    raise ValueError(f'x must be [batch, length], not of shape {shape}')
  for name in ('candidate_ids', 'confidence', 'generation_slots'):
    if arrays[name].shape != shape:
      raise ValueError(
        f'{name} must have the shape of x, {shape}, not {arrays[name].shape}'
      )
  if arrays['reveal_counts'].shape != shape[:1]:
    raise ValueError(
      f'reveal_counts must hold one count per row, shape {shape[:1]}, not '
      f'{arrays["reveal_counts"].shape}'
    )
  next_x, holds = _reverse_update(
    **arrays, mask_id=int(mask_id), pad_id=int(pad_id)
  )
  for rows, message in zip(holds, _MUST_HOLD, strict=True):
    check_values(rows, message)
  return next_x


_MUST_HOLD = (
  'reveal_counts must lie between 0 and the number of eligible positions',
  'candidate_ids must not be MASK or PAD where it is committed',
  'confidence must not be NaN at an eligible position',
)


@functools.partial(jax.jit, static_argnames=('mask_id', 'pad_id'))
def _reverse_update(
  x, candidate_ids, confidence, generation_slots, reveal_counts, mask_id, pad_id
):
  eligible = generation_slots & (x == mask_id)
  write = jax.vmap(top_eligible)(confidence, eligible, reveal_counts)
  forbidden = (candidate_ids == mask_id) | (candidate_ids == pad_id)
  holds = (
    (reveal_counts >= 0) & (reveal_counts <= eligible.sum(1)),
    ~(write & forbidden).any(1),
    ~(eligible & jnp.isnan(confidence)).any(1),
  )
  return commit(x, candidate_ids, write), holds


def _typed(name, value, kind, dtype) -> Array:
  """`value` as an array, checked before JAX could convert or wrap it."""
  if not isinstance(value, jax.Array):
    value = np.asarray(value)
    if value.size == 0:
      value = value.astype(dtype)
  if not jnp.issubdtype(value.dtype, getattr(np, kind)):
    raise ValueError(f'{name} must be {kind}, not {value.dtype}')
  if kind != 'integer':
    return jnp.asarray(value)
  array = jnp.asarray(value, dtype)
  if isinstance(value, np.ndarray) and (np.asarray(array) != value).any():
    raise ValueError(f'{name} holds a number outside {array.dtype}')
  return array
