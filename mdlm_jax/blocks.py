"""Semi-autoregressive decoding: a window that moves over the canvas."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from mdlm_jax.canvas import Canvas
from mdlm_jax.checks import check_integer, check_values


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['starts'],
  meta_fields=['length', 'count'],
)
@dataclasses.dataclass(frozen=True)
class Blocks:
  """A row's canvas in blocks, decoded from left to right.

  Block i of row b is the slots from `starts[b] + i * length` on, `length` of
  them, or fewer where the canvas ends. A block says which slots may be written;
  the network still sees the whole canvas.

  Attributes:
    starts: first slot of the first block of each row. Shape `[B]`.
    length: slots per block, static.
    count: blocks of every row, static.
  """

  starts: Any  # Not the array type: JAX also builds trees of placeholders.
  length: int
  count: int


class Window(NamedTuple):
  """The block that is open, as slots of the canvas.

  Attributes:
    slots: contiguous and in range, `[B, W]`; a window that would leave the
      canvas slides back. None is every slot.
    open: slots of the block that generation owns. Shape `[B, W]`.
    block: number of the block. Shape `[]`.
  """

  slots: Int[Array, 'B W'] | None
  open: Bool[Array, 'B W']
  block: Int[Array, ''] | int


def blocks_of(canvas: Canvas, length: int, *, aligned: bool = False) -> Blocks:
  """Blocks over the generation slots of a concrete canvas.

  Args:
    canvas: what is open.
    length: slots per block, at least 1; the last block may be shorter.
    aligned: whether blocks begin at multiples of `length` in the row's logical
      positions, as for a network that attends by blocks; by default the first
      begins at the first generation slot.

  Returns:
    As many blocks as the longest row needs.

  Raises:
    ValueError: for `length` below 1.

  Example:
    >>> from mdlm_jax.canvas import from_prompts
    >>> from mdlm_jax.vocab import Vocab
    >>> rows = from_prompts([[5], [5, 6]], 6, Vocab(8, mask_id=1))
    >>> blocks = blocks_of(rows, 4)
    >>> blocks.starts.tolist(), blocks.count
    ([1, 2], 2)
  """
  check_integer('length', length, 1)
  slots = np.asarray(canvas.generation_slots)
  size = slots.shape[1]
  length = min(length, size)
  some = slots.any(1)
  first = np.where(some, slots.argmax(1), 0)
  last = np.where(some, size - 1 - slots[:, ::-1].argmax(1), 0)
  if aligned:
    positions = np.asarray(canvas.positions)
    first = first - positions[np.arange(len(first)), first] % length
  count = int((-(-(last + 1 - first) // length)).max())
  return Blocks(jnp.asarray(first, jnp.int32), length, count)


def steps_per_block(num_steps: int, num_blocks: int) -> int:
  """Network calls of each block when `num_steps` are shared by all.

  Raises:
    ValueError: `num_steps` is not a multiple of `num_blocks`.

  Example:
    >>> steps_per_block(32, 16)
    2
  """
  if num_steps < 1 or num_steps % num_blocks:
    raise ValueError(
      f'{num_steps} steps cannot be shared equally by {num_blocks} blocks; the '
      f'number of steps must be a multiple of {num_blocks}'
    )
  return num_steps // num_blocks


def window_of(
  blocks: Blocks | None, block: Int[Array, ''] | int, canvas: Canvas
) -> Window:
  """The window of a block; without blocks it is the whole canvas."""
  if blocks is None:
    return Window(None, canvas.generation_slots, block)
  first = (blocks.starts + block * blocks.length)[:, None]
  start = jnp.clip(first, 0, canvas.ids.shape[1] - blocks.length)
  slots = start + jnp.arange(blocks.length)
  inside = (slots >= first) & (slots < first + blocks.length)
  return Window(slots, at(canvas.generation_slots, slots) & inside, block)


def at(values: Array, slots: Int[Array, 'B W'] | None) -> Array:
  """The values at the slots of a window, `[B, L]` to `[B, W]`."""
  return values if slots is None else jnp.take_along_axis(values, slots, 1)


def put(
  canvas_values: Array, values: Array, slots: Int[Array, 'B W'] | None
) -> Array:
  """The canvas with the window's values in place, the inverse of `at`.

  Raises:
    ValueError: a slot that the canvas has not, see `checks.check_values`; such
      a value would be lost.
  """
  if slots is None:
    return values
  length = canvas_values.shape[1]
  check_values(
    (slots >= 0) & (slots < length), f'slots must lie in [0, {length})'
  )
  rows = jnp.arange(slots.shape[0])[:, None]
  return canvas_values.at[rows, slots].set(values, unique_indices=True)
