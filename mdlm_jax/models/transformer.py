"""A transformer as the two pure functions of a `Denoiser`.

Flax NNX builds the parameters and names them; everything else sees a nested
dict of float32 arrays in which the blocks are stacked on axis 0:

  params = init(config, jax.random.key(0))
  network = denoiser(config)
"""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from mdlm_jax import alignment, predict
from mdlm_jax.checks import check_values
from mdlm_jax.interning import interned
from mdlm_jax.models import experts, int8
from mdlm_jax.models.attention import (
  attend_all,
  attend_stored,
  attention_blocks,
  attention_mask,
  rotary_angles,
  slots_of,
)
from mdlm_jax.models.config import TransformerConfig
from mdlm_jax.models.layers import Block, Outer
from mdlm_jax.models.paired import attend_paired

Params = dict
# What the gradient keeps of each block; the rest it computes again.
REMAT = {
  # Matrix products. To make the cheap rest again takes less time than to stack
  # it over the layers.
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'all': jax.checkpoint_policies.everything_saveable,
  # But the stream before it.
  'none': jax.checkpoint_policies.nothing_saveable,
}


def init(config: TransformerConfig, key: Key[Array, '']) -> Params:
  """Fresh parameters.

  Args:
    config: shape of the network.
    key: consumed.

  Returns:
    Nested dict of float32 arrays; those under `blocks` have a leading axis of
    `num_layers`, less those under `dense_blocks`, if any, which come first.
  """

  def init_one(kind, config, key):
    _, state = nnx.split(kind(config, rngs=nnx.Rngs(key)))
    return nnx.to_pure_dict(state)

  def init_stack(stack, key):
    keys = jax.random.split(key, stack.num_layers)
    return jax.vmap(functools.partial(init_one, Block, stack.config))(keys)

  outer_key, blocks_key = jax.random.split(key)
  return init_one(Outer, config, outer_key) | {
    stack.name: init_stack(
      stack, jax.random.fold_in(blocks_key, i) if i else blocks_key
    )
    for i, stack in enumerate(_stacks(config))
  }


@interned
def denoiser(
  config: TransformerConfig, *, remat: str = 'dots'
) -> predict.Denoiser:
  """The network of `config` as a `Denoiser`; equal configs give equal ones.

  Its cache holds the keys and values of every slot at every layer, exact for a
  network that attends by blocks as long as a stored slot sees what it saw. It
  ignores `step`, and `t` unless `config.time_conditioning`; `t` may also have
  shape `[B, L]`, a level for each slot. Hidden states are normed, in the
  compute dtype; logits are float32.

  `features` raises ValueError for a sequence longer than `config.max_length`
  and AssertionError for shapes that disagree. A network that attends by blocks
  takes any length: a block then sees the blocks of so many positions that end
  with itself.

  Args:
    config: shape of the network.
    remat: what a gradient keeps of each block to take less time, of `REMAT`;
      nothing else depends on it.

  Raises:
    ValueError: `REMAT` does not have the name.
  """
  if remat not in REMAT:
    raise ValueError(f'{remat=} must be one of {", ".join(REMAT)}')
  return predict.Denoiser(
    functools.partial(_features, config, remat),
    functools.partial(_head, config),
    time_free=not config.time_conditioning,
    shifted=config.shifted,
    attention_block=config.attention_block,
    paired=None
    if config.attention_block is None
    else functools.partial(_paired, config, remat),
  )


@functools.cache
def _graph(kind, config):
  """The static half of an NNX module, to be merged with its parameters."""
  module = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
  return nnx.split(module)[0]


def _outer(config, params):
  stacks = {stack.name for stack in _stacks(config)}
  leaves = {key: leaf for key, leaf in params.items() if key not in stacks}
  return nnx.merge(_graph(Outer, config), leaves)


class _Stack(NamedTuple):
  """Blocks of one kind, run one after another by a scan."""

  name: str
  config: TransformerConfig
  num_layers: int


def _stacks(config: TransformerConfig) -> tuple[_Stack, ...]:
  num_dense = config.num_dense_layers
  stack = _Stack('blocks', config, config.num_layers - num_dense)
  if not num_dense:
    return (stack,)
  dense = dataclasses.replace(config, experts=None, num_dense_layers=0)
  return _Stack('dense_blocks', dense, num_dense), stack


def _features(
  config, remat, params, cache, ids, *, at, step, t, valid, positions, segments
):
  del step
  reach = None
  if config.attention_block and ids.shape[1] > config.max_length:
    # A sliding context: as many blocks as it was trained to see.
    reach = config.max_length // config.attention_block
  else:
    _check_length(config, ids)
  t = _checked_level(ids, t, valid, positions, segments)
  computed = None if cache is None else at
  mask = attention_mask(
    valid,
    segments,
    attention_blocks(positions, config.attention_block),
    reach=reach,
  )
  if computed is None:
    attend = functools.partial(attend_all, mask)
  else:
    length = ids.shape[1]
    check_values(
      (computed >= 0) & (computed <= length), f'at must lie in [0, {length}]'
    )
    ids, positions, mask, t = (
      slots_of(x, computed) for x in (ids, positions, mask, t)
    )
    attend = functools.partial(attend_stored, mask, computed)
  outer = _outer(config, params)
  conditioning = outer.embed_time(t)
  hidden, cache = _run(
    config,
    remat,
    params,
    outer.embed(ids),
    cache,
    conditioning,
    positions,
    attend,
  )
  if computed is None and at is not None:
    hidden = slots_of(hidden, at)
    if conditioning is not None:
      conditioning = slots_of(conditioning, at)
  return outer.last_norm(hidden, conditioning), cache


def _paired(
  config, remat, params, noisy_ids, clean_ids, *, t, valid, positions, segments
):
  chex.assert_equal_shape([noisy_ids, clean_ids])
  length = noisy_ids.shape[1]
  slots = positions
  if positions is None:
    slots = jnp.broadcast_to(jnp.arange(length), noisy_ids.shape)
  _check_length(config, noisy_ids)
  t = _checked_level(noisy_ids, t, valid, slots, segments)
  if positions is None and length <= config.attention_block:
    # One block, which no clean slot is before.
    features = functools.partial(_features, config, remat)
    if config.shifted:
      features = functools.partial(alignment.shifted_features, features)
    hidden, _ = features(
      params, None, noisy_ids, at=None, step=0, t=t, valid=valid,
      positions=slots, segments=segments,
    )  # fmt: skip
    return hidden
  if t.shape[1] > 1:
    t = jnp.concatenate([t, jnp.zeros_like(t)], 1)
  outer = _outer(config, params)
  conditioning = outer.embed_time(t)
  hidden, _ = _run(
    config,
    remat,
    params,
    outer.embed(jnp.concatenate([noisy_ids, clean_ids], 1)),
    None,
    conditioning,
    jnp.concatenate([slots, slots], 1),
    attend_paired(valid, segments, positions, config.attention_block),
  )
  hidden = outer.last_norm(hidden, conditioning)
  if config.shifted:
    blocks = attention_blocks(slots, config.attention_block)
    return alignment.shifted_pair(
      hidden[:, :length], hidden[:, length:], blocks, valid, segments
    )
  return hidden[:, :length]


def _check_length(config, ids):
  if ids.shape[1] > config.max_length:
    raise ValueError(
      f'sequence of length {ids.shape[1]} given to a model of '
      f'max_length={config.max_length}'
    )


def _checked_level(ids, t, valid, positions, segments):
  """The noise level as [B, 1] or [B, L], after checks of all shapes."""
  chex.assert_rank(ids, 2)
  chex.assert_equal_shape([ids, valid, positions])
  if t.ndim == 1:
    t = t[:, None]
  chex.assert_shape(t, (ids.shape[0], {1, ids.shape[1]}))
  if segments is not None:
    chex.assert_equal_shape([ids, segments])
  return t


def _run(config, remat, params, hidden, cache, conditioning, positions, attend):
  """The stream after all blocks, and what they stored."""
  width = config.rotary_width or config.head_dim
  angles = rotary_angles(positions, width, config.rope_base)
  cos, sin = (
    _rounded(f(angles), config.rope_dtype) for f in (jnp.cos, jnp.sin)
  )
  kept = {}
  for name, block_config, num_layers in _stacks(config):
    layers, stacks = experts.without_stacks(
      params[name], block_config.experts, hidden.shape[0] * hidden.shape[1]
    )

    def apply_block(x, scanned, stacks, graph):
      layer, block_params, stored = scanned
      block_params = experts.with_stacks(int8.dense(block_params), stacks)
      return nnx.merge(graph, block_params)(
        x,
        stored,
        layer=layer,
        conditioning=conditioning,
        cos=cos,
        sin=sin,
        attend=attend,
      )

    apply_block = jax.checkpoint(
      functools.partial(
        apply_block, stacks=stacks, graph=_graph(Block, block_config)
      ),
      prevent_cse=False,
      policy=REMAT[remat],
    )
    stored = None if cache is None else cache[name]
    hidden, kept[name] = jax.lax.scan(
      apply_block, hidden, (jnp.arange(num_layers), layers, stored)
    )
  return hidden, kept


def _head(config, params, hidden):
  return _outer(config, params).logits(hidden)


def _rounded(x, dtype):
  """float32 values that `dtype` can hold; XLA may drop a pair of casts."""
  if dtype == 'float32':
    return x
  info = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, info.nexp, info.nmant)
