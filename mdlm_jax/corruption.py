"""The forward process: clean tokens are replaced by MASK."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax import noise, schedules
from mdlm_jax.checks import check_integer, check_values


class Corruption(NamedTuple):
  """Corrupted tokens and where they were masked.

  Attributes:
    corrupted_ids: int32, MASK where masked, else the clean id. Shape `[B, L]`.
    masked: which positions were masked here. It cannot be read off the ids:
      clean text may hold the mask id. Boolean, shape `[B, L]`.
  """

  corrupted_ids: Int[Array, 'B L']
  masked: Bool[Array, 'B L']


def corrupt(
  key: Key[Array, ''],
  clean_ids: Int[Array, 'B L'],
  t: Float[Array, 'B'] | Float[Array, 'B L'],
  valid: Bool[Array, 'B L'],
  *,
  mask_id: int,
  schedule: schedules.Schedule = schedules.linear(),
  row_ids: Int[Array, 'B'] | None = None,
  positions: Int[Array, 'B L'] | None = None,
  segments: Int[Array, 'B L'] | None = None,
  protected: Bool[Array, 'B L'] | None = None,
) -> Corruption:
  """Masks each token independently with probability 1 - alpha(t).

  q(z_t | x) of MDLM (arXiv 2406.07524, section 3): the number of masked tokens
  is random; t is a probability and not a count. The noise of a position is a
  function of the key, the row's global id and its logical position only.

  Args:
    key: the key of this step, consumed.
    clean_ids: shape `[B, L]`.
    t: noise level of each row or of each slot, in [0, 1]. Shape `[B]` or
      `[B, L]`.
    valid: False at padding, which never changes. Shape `[B, L]`.
    mask_id: the id of MASK.
    schedule: the masking schedule.
    row_ids: ids of the rows within the global batch; None: 0, 1, ... Shape
      `[B]`.
    positions: logical positions, which make the noise independent of the
      padding side; None: 0, 1, ... from the left. Shape `[B, L]`.
    segments: document of each slot when several are packed in a row, which
      makes their noise independent although each begins at position 0.
    protected: True where a token must stay, such as a prompt. Shape `[B, L]`.

  Returns:
    The corrupted ids and the map of masked positions.

  Raises:
    ValueError: on concrete arrays, a t outside [0, 1] (a count, say, in place
      of a probability). Under `jit` it is found by `checkify`.
  """
  check_values((t >= 0) & (t <= 1), 't must lie in [0, 1]')
  num_rows, length = clean_ids.shape
  if row_ids is None:
    row_ids = jnp.arange(num_rows)
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(length), clean_ids.shape)
  chex.assert_shape(row_ids, (num_rows,))
  chex.assert_shape(t, (num_rows, length)[: t.ndim])
  uniforms = jax.vmap(noise.position_uniforms)(
    noise.row_keys(key, row_ids), noise.packed_positions(positions, segments)
  )
  eligible = valid if protected is None else valid & ~protected
  return corrupt_with_noise(
    uniforms, clean_ids, schedule.masked(t), eligible, mask_id=mask_id
  )


def random_lengths(
  key: Key[Array, ''],
  row_ids: Int[Array, 'B'],
  length: int,
  share: float,
) -> Int[Array, 'B']:
  """How many tokens each row keeps: a share of rows is cut at random.

  With probability `share` a row keeps a uniform number of tokens, from 1 to L,
  else all L (LLaDA, arXiv 2502.09992, section 2.2, has a share of 1 %). A model
  trained on rows of one length has never seen a shorter canvas; what is cut off
  is not valid. It is meant for rows that are windows of text: documents that
  are packed or padded have many lengths as they are, and an answer would lose
  its end.

  Args:
    key: consumed.
    row_ids: ids of the rows within the global batch. Shape `[B]`.
    length: tokens L of a row, at least 1.
    share: of the rows that are cut, from 0 to 1.

  Returns:
    int32 from 1 to L. Shape `[B]`.

  Raises:
    ValueError: a number out of range.

  Example:
    >>> random_lengths(jax.random.key(0), jnp.arange(3), 8, 0.0).tolist()
    [8, 8, 8]
  """
  check_integer('length', length, 1)
  if not 0 <= share <= 1:
    raise ValueError(f'{share=} must be from 0 to 1')

  def kept(row_key):
    cut_key, length_key = jax.random.split(row_key)
    shorter = jax.random.randint(length_key, (), 1, length + 1)
    return jnp.where(jax.random.bernoulli(cut_key, share), shorter, length)

  return jax.vmap(kept)(noise.row_keys(key, row_ids))


def corrupt_with_noise(
  uniforms: Float[Array, 'B L'],
  clean_ids: Int[Array, 'B L'],
  mask_probability: Float[Array, 'B'] | Float[Array, 'B L'],
  eligible: Bool[Array, 'B L'],
  *,
  mask_id: int,
) -> Corruption:
  """The deterministic part of `corrupt`: masked where u < probability.

  Args:
    uniforms: in [0, 1). Shape `[B, L]`.
    clean_ids: shape `[B, L]`.
    mask_probability: probability of MASK, of each row or of each slot. Shape
      `[B]` or `[B, L]`.
    eligible: positions that may be masked. Shape `[B, L]`.
    mask_id: the id of MASK.

  Returns:
    The corrupted ids and the map of masked positions.

  Example:
    >>> ids, everywhere = jnp.array([[5, 6, 7]]), jnp.ones((1, 3), bool)
    >>> u, half = jnp.array([[0.2, 0.9, 0.4]]), jnp.array([0.5])
    >>> corrupted_ids, _ = corrupt_with_noise(
    ...   u, ids, half, everywhere, mask_id=1
    ... )
    >>> print(corrupted_ids)
    [[1 6 1]]
  """
  chex.assert_equal_shape([uniforms, clean_ids, eligible])
  chex.assert_type(eligible, bool)
  if mask_probability.ndim == 1:
    mask_probability = mask_probability[:, None]
  masked = eligible & (uniforms < mask_probability)
  # int32, or a narrow dtype of the ids would wrap the mask id.
  return Corruption(jnp.where(masked, jnp.int32(mask_id), clean_ids), masked)
