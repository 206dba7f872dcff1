"""Attention of a noisy canvas beside its clean text, both in one pass.

Block diffusion asks at once for every block of a noisy canvas, each given its
own noisy slots and the clean blocks before it (Arriola et al. 2025, arXiv
2503.09573, section 3.2). The stream is the L noisy slots followed by the L
clean ones. A slot of either half sees its own block in its half, and the blocks
before it in the clean half:

            noisy keys       clean keys
  noisy     own block        earlier blocks
  clean     nothing          own and earlier blocks

Attention to the two is computed apart and merged by their sums, so that no
product is made of what is nowhere seen.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from mdlm_jax.models.attention import HIDDEN_SCORE, attention_blocks

# Queries go in so many chunks, each with the clean keys up to its own end.
_CHUNKS = 4
# Own blocks are computed in tiles of at least so many slots: tiny products
# take longer than those that they save.
_LEAST_TILE = 16


def attend_paired(
  valid: Bool[Array, 'B L'],
  segments: Int[Array, 'B L'] | None,
  positions: Int[Array, 'B L'] | None,
  block: int,
) -> Callable:
  """How the 2 L slots of noisy and clean text see one another.

  Blocks may begin at any slot and be short; but their slots, like those of a
  document, stand side by side.

  Args:
    valid: False at padding. Shape `[B, L]`.
    segments: document of each slot when several are packed in a row.
    positions: logical positions; None: 0, 1, ... from the left, which costs
      less where blocks are long. Shape `[B, L]`.
    block: logical positions of a block.

  Returns:
    `attend(q, k, v, stored) -> (mixed, ())`, see `layers.Block`; 2 L slots
    each.
  """
  length = valid.shape[1]
  in_place = positions is None
  if in_place:
    positions = jnp.arange(length)[None]
  blocks = attention_blocks(positions, block)
  reach = 0 if in_place else block - 1
  parts = [blocks] if segments is None else [blocks, segments]
  tile = min(-(-_LEAST_TILE // block) * block, length)
  own_mask = _own_mask(valid, parts, tile, reach)
  chunk = -(-length // _CHUNKS)

  def keys_before(end):
    """Slots up to the last block before the end; at least 1, maybe hidden."""
    end = min(end, length) - 1
    return max(end // block * block if in_place else end, 1)

  chunks = [
    (slice(end - chunk, min(end, length)), slice(keys_before(end)))
    for end in range(chunk, length + chunk, chunk)
  ]
  earlier_masks = [
    _earlier_mask(valid, blocks, segments, *slots) for slots in chunks
  ]

  def attend(q, k, v, stored):
    del stored
    batch, _, num_heads, head_dim = q.shape
    q = q.reshape(batch, 2, length, k.shape[2], -1, head_dim)
    k, v = (x.reshape(batch, 2, length, -1, head_dim) for x in (k, v))
    own = _own(q, k, v, own_mask, tile, reach)
    earlier = [
      _earlier(q[:, :, queries], k[:, 1, keys], v[:, 1, keys], mask)
      for (queries, keys), mask in zip(chunks, earlier_masks, strict=True)
    ]
    earlier = jax.tree.map(lambda *x: jnp.concatenate(x, 2), *earlier)
    mixed = _merged(own, earlier).astype(v.dtype)
    return mixed.reshape(batch, 2 * length, num_heads, head_dim), ()

  return attend


def _own_mask(valid, parts, tile, reach) -> Bool[Array, 'B N T W']:
  """Valid slots of the same block and segment."""
  mask = _windows(valid, tile, reach)[:, :, None]
  for part in parts:
    queries, keys = _tiles(part, tile), _windows(part, tile, reach)
    mask &= queries[..., None] == keys[:, :, None]
  return mask


def _earlier_mask(valid, blocks, segments, queries, keys):
  """Valid slots of earlier blocks of the same segment, seen from a chunk."""
  mask = valid[:, None, keys]
  mask &= blocks[:, queries, None] > blocks[:, None, keys]
  if segments is not None:
    mask &= segments[:, queries, None] == segments[:, None, keys]
  return mask


def _own(q, k, v, mask, tile, reach):
  """Attention within each half to the own block, and its log-sums."""
  batch, _, length, *_ = q.shape
  q, k, v = (x.reshape(2 * batch, length, *x.shape[3:]) for x in (q, k, v))
  mask = jnp.repeat(mask, 2, axis=0)
  seen = _attended(
    _tiles(q, tile), _windows(k, tile, reach), _windows(v, tile, reach), mask
  )

  def as_halves(x):
    x = x.reshape(batch, 2, -1, *x.shape[3:])
    return x[:, :, :length]

  return jax.tree.map(as_halves, seen)


def _earlier(q, k, v, mask):
  """Attention of both halves of a chunk to clean keys, and its log-sums."""
  batch, _, chunk, *heads = q.shape
  q = q.reshape(batch, 2 * chunk, *heads)
  seen = _attended(q, k, v, jnp.concatenate([mask, mask], 1))
  return jax.tree.map(lambda x: x.reshape(batch, 2, chunk, *x.shape[2:]), seen)


def _attended(
  q: Float[Array, '*N Q K G D'],
  k: Float[Array, '*N S K D'],
  v: Float[Array, '*N S K D'],
  mask: Bool[Array, '*N Q S'],
) -> tuple[Float[Array, '*N Q K G D'], Float[Array, '*N Q K G']]:
  """Softmax attention and the log-sums of its exponentials."""
  scores = jnp.einsum(
    '...qkgd,...skd->...kgqs', q, k, preferred_element_type=jnp.float32
  )
  scores = jnp.where(
    mask[..., None, None, :, :], scores * q.shape[-1] ** -0.5, HIDDEN_SCORE
  )
  log_sums = jax.nn.logsumexp(scores, -1, keepdims=True)
  weights = jnp.exp(scores - log_sums).astype(v.dtype)
  mixed = jnp.einsum('...kgqs,...skd->...qkgd', weights, v)
  return mixed, jnp.moveaxis(log_sums[..., 0], -1, -3)


def _merged(own, earlier):
  """Attention to the union of two sets of keys."""
  (own_mixed, own_sums), (earlier_mixed, earlier_sums) = own, earlier
  share = jax.nn.sigmoid(earlier_sums - own_sums)[..., None]
  return own_mixed * (1 - share) + earlier_mixed * share


def _tiles(x: Shaped[Array, 'B L *d'], tile: int):
  """Slots in tiles, the last one filled up. Shape `[B, N, tile, ...]`."""
  filling = -x.shape[1] % tile
  widths = [(0, 0), (0, filling)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, widths).reshape(x.shape[0], -1, tile, *x.shape[2:])


def _windows(x: Shaped[Array, 'B L *d'], tile: int, reach: int):
  """Each tile with `reach` slots on either side, which may be no more."""
  tiles = _tiles(x, tile)
  if tiles.shape[1] == 1 or reach == 0:
    return tiles
  widths = [(0, 0), (1, 1)] + [(0, 0)] * (tiles.ndim - 2)
  padded = jnp.pad(tiles, widths)
  return jnp.concatenate(
    [padded[:, :-2, tile - reach :], tiles, padded[:, 2:, :reach]], 2
  )
