"""Which slots a call computes; of the others it sees stored keys and values.

Under a cache every call is the same program: some slots are computed, and their
keys and values take the place of the stored ones; the first call of a window
fills what is not stored yet. The policies differ in the slots:

  exact()            those of the open block, for networks that attend by blocks
  prefix(), dual()   Fast-dLLM (Wu et al. 2025, arXiv 2505.22618, section 3.2)
  delayed(interval)  dKV-Cache (Ma et al. 2025, arXiv 2505.15781, section 3.3)

Only the first gives what no cache gives: in a network in which every slot sees
all others, what is stored of a slot is no longer what it would be.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mdlm_jax.checks import check_integer
from mdlm_jax.interning import interned


class View(NamedTuple):
  """What a policy sees before a call.

  Attributes:
    step: number of the call within the window.
    open: slots of the window that generation owns. Shape `[B, L]`.
    masked: slots that are to be generated and are MASK. Shape `[B, L]`.
    changed: slots whose token is not the one that they were last computed
      with, or that never were. Shape `[B, L]`.
    positions: logical positions. Shape `[B, L]`.
    attention_block: of the network, see `predict.Denoiser`.
  """

  step: Int[Array, '']
  open: Bool[Array, 'B L']
  masked: Bool[Array, 'B L']
  changed: Bool[Array, 'B L']
  positions: Int[Array, 'B L']
  attention_block: int | None


class CachePolicy(NamedTuple):
  """How a sampler uses the cache of its network.

  Attributes:
    computed: `computed(view) -> [B, L]`, the slots that the
      call computes.
    sizes: `sizes(length, width, attention_block)`, the numbers of slots that a
      call is compiled for, ascending, the last one `length`; `width` is that of
      the window.
    is_exact: whether the tokens are those without a cache. It is for a network
      with an `attention_block` only.
    only_masked: committed slots may be without a prediction, so that no rule
      can take them back.
  """

  computed: Callable
  sizes: Callable
  is_exact: bool = False
  only_masked: bool = False


@interned
def exact() -> CachePolicy:
  """For a network that attends by blocks: what sees a change is computed.

  That is the open block, and at its first call also the one before, which is
  clean now. What is stored of earlier blocks has seen nothing change.

  Example:
    >>> exact().is_exact
    True
  """
  return CachePolicy(_by_attention_block, _sizes_of_blocks, is_exact=True)


@interned
def prefix() -> CachePolicy:
  """What precedes the open block is stored, from its first call on."""
  return CachePolicy(_from_window_on, _halvings)


@interned
def dual() -> CachePolicy:
  """All but the open block is stored, from its first call on."""
  return CachePolicy(_window, _window_or_all)


@interned
def delayed(interval: int) -> CachePolicy:
  """A token is stored in the call after the one that committed it.

  Slots that are MASK, in the whole canvas, and those that changed since they
  were computed are; every `interval` calls of a window, all are.

  Args:
    interval: 1 computes all slots at every call, as no cache does.

  Raises:
    ValueError: `interval` is not an integer of at least 1.
  """
  check_integer('interval', interval, 1)
  return CachePolicy(
    functools.partial(_not_settled, interval), _halvings, only_masked=True
  )


def _by_attention_block(view):
  block = view.positions // view.attention_block
  first = jnp.where(view.open | view.changed, block, jnp.iinfo(block.dtype).max)
  last = jnp.where(view.open, block, -1)
  return (block >= first.min(1, keepdims=True)) & (
    block <= last.max(1, keepdims=True)
  )


def _from_window_on(view):
  return (view.step == 0) | (jnp.cumsum(view.open, 1) > 0)


def _window(view):
  return (view.step == 0) | view.open


def _not_settled(interval, view):
  return (view.step % interval == 0) | view.masked | view.changed


def _sizes_of_blocks(length, width, attention_block):
  blocks = -(-width // attention_block) * attention_block
  return _ascending(length, (blocks, 2 * blocks))


def _halvings(length, width, attention_block):
  """L, L / 2, L / 4 ... down to the window: few programs, little waste."""
  del attention_block
  sizes = [length]
  while sizes[-1] > width:
    sizes.append(-(-sizes[-1] // 2))
  return _ascending(length, sizes)


def _window_or_all(length, width, attention_block):
  del attention_block
  return _ascending(length, (width,))


def _ascending(length, sizes):
  return tuple(sorted({length, *(size for size in sizes if size < length)}))


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['slots'],
  meta_fields=['sizes'],
)
@dataclasses.dataclass(frozen=True)
class Computed:
  """The slots that a call computes.

  Attributes:
    slots: which they are. Shape `[B, L]`.
    sizes: numbers of slots that the call is compiled for, ascending, static.
  """

  slots: Any  # Not the array type: JAX also builds trees of placeholders.
  sizes: tuple[int, ...]


def computed_features(
  features: Callable,
  computed: Computed,
  params: Any,
  cache: Any,
  ids: Int[Array, 'B L'],
  *,
  at: Int[Array, 'B W'] | None,
  **inputs: Any,
) -> tuple[Float[Array, 'B W d'], Any]:
  """Hidden states of the wanted slots from a call that computes some.

  Args:
    features: of the network, see `predict.Denoiser`.
    computed: the slots that are computed, in the smallest of its sizes that
      holds those of every row.
    params: its parameters.
    cache: its cache, read for the other slots.
    ids: the canvas. Shape `[B, L]`.
    at: slots whose hidden states are wanted, None for all; of those that are
      not computed it is that of another slot. Shape `[B, W]`.
    **inputs: the other inputs of `features`, passed on.

  Returns:
    Hidden states, one for each wanted slot, and the cache brought up to date.
  """
  batch, length = ids.shape
  rows = jnp.arange(batch)[:, None]
  wanted = jnp.broadcast_to(jnp.arange(length), ids.shape) if at is None else at
  # The slots in order; L, which is none, where a row has fewer.
  order = jnp.sort(jnp.where(computed.slots, jnp.arange(length), length), 1)

  def call(size):
    slots = order[:, :size]
    hidden, after = features(params, cache, ids, at=slots, **inputs)
    place = jnp.zeros((batch, length), jnp.int32)
    place = place.at[rows, slots].set(jnp.arange(size), mode='drop')
    index = jnp.take_along_axis(place, wanted, 1)
    return jnp.take_along_axis(hidden, index[..., None], 1), after

  most = computed.slots.sum(1).max()
  return jax.lax.switch(
    jnp.searchsorted(jnp.array(computed.sizes), most),
    [functools.partial(call, size) for size in computed.sizes],
  )
