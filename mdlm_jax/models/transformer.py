"""A bidirectional transformer as the two pure functions of a `Denoiser`.

Flax NNX builds the parameters and names them; everything else sees a nested
dict of float32 arrays in which the blocks are stacked on axis 0:

  params = init(config, jax.random.key(0))
  network = denoiser(config)

RMSNorm before each branch (Zhang and Sennrich, 2019), rotary positions (Su et
al., 2021), SwiGLU (Shazeer, 2020), optionally grouped key/value heads (Ainslie
et al., 2023) and adaptive norms driven by the noise level (Peebles and Xie,
2023). Biases, norms of queries and keys, and scales of embeddings and logits
are those in which published models differ; `families` says which has what.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from mdlm_jax import predict
from mdlm_jax.interning import interned
from mdlm_jax.models.attention import (
  attention,
  attention_mask,
  rotary_angles,
  rotate,
)

Params = dict

_DTYPES = ('float32', 'bfloat16')
_QK_NORMS = ('head', 'projection')
_TIME_FREQUENCIES = 64
# Spread of a fresh network's logits: small, so that it starts near the uniform
# distribution over the vocabulary.
_LOGIT_STD = 0.25
# The gradient of a gather is a serial scatter on CPU; for a small table the
# product with one-hot rows takes less time.
_MOST_ONE_HOT_ROWS = 512


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Shape of the network; static and hashable.

  Attributes:
    vocab_size: rows of the embedding table, special ids included.
    num_layers: number of blocks.
    model_dim: width of the residual stream.
    num_heads: query heads; without `head_width` they must divide `model_dim`
      into heads of even width.
    mlp_dim: hidden width of SwiGLU.
    max_length: longest sequence accepted, the trained length.
    num_kv_heads: key/value heads, a divisor of `num_heads`; None: one each.
    time_conditioning: whether the noise level `t` steers the norms.
    tied_head: whether the head is the transposed embedding table.
    rope_base: base of the rotary wavelengths.
    norm_eps: added to the mean square under the root.
    dtype: compute dtype, 'float32' or 'bfloat16'. Norms, softmax and logits are
      computed in float32 either way.
    head_width: width of a head, even; None: `model_dim / num_heads`.
    qkv_bias: whether queries, keys and values have a bias.
    qk_norm: RMSNorm of queries and keys before the rotation: of each 'head'
      (Henry et al., 2020), or of the whole 'projection' at once.
    embedding_scale: factor of the embedded ids; None: the inverse of the spread
      of a fresh table, so that the stream begins with unit variance.
    logit_scale: factor of the logits.
    rope_dtype: to which the rotary cosines and sines are rounded.
    shifted: whether the logits at a slot are those of the token after it, as in
      a network that began as an autoregressive one (`Denoiser.shifted`).

  Raises:
    ValueError: for a value outside these ranges.
  """

  vocab_size: int
  num_layers: int
  model_dim: int
  num_heads: int
  mlp_dim: int
  max_length: int
  num_kv_heads: int | None = None
  time_conditioning: bool = False
  tied_head: bool = True
  rope_base: float = 10_000.0
  norm_eps: float = 1e-6
  dtype: str = 'float32'
  head_width: int | None = None
  qkv_bias: bool = False
  qk_norm: str | None = None
  embedding_scale: float | None = None
  logit_scale: float = 1.0
  rope_dtype: str = 'float32'
  shifted: bool = False

  def __post_init__(self):
    for name in (
      'vocab_size',
      'num_layers',
      'model_dim',
      'num_heads',
      'mlp_dim',
      'max_length',
    ):
      _require_positive_int(name, getattr(self, name))
    if self.head_width is not None:
      _require_positive_int('head_width', self.head_width)
      if self.head_width % 2:
        raise ValueError(
          f'head_width={self.head_width} must be even for rotary positions'
        )
    elif self.model_dim % (2 * self.num_heads):
      raise ValueError(
        f'model_dim={self.model_dim} must be a multiple of 2 * num_heads='
        f'{2 * self.num_heads}: rotary positions need heads of even width'
      )
    if self.num_kv_heads is not None:
      _require_positive_int('num_kv_heads', self.num_kv_heads)
      if self.num_heads % self.num_kv_heads:
        raise ValueError(
          f'num_kv_heads={self.num_kv_heads} must divide '
          f'num_heads={self.num_heads}'
        )
    for name in ('rope_base', 'norm_eps', 'embedding_scale', 'logit_scale'):
      value = getattr(self, name)
      if name == 'embedding_scale' and value is None:
        continue
      if not 0 < value < float('inf'):
        raise ValueError(f'{name}={value} must be positive and finite')
    for name in ('dtype', 'rope_dtype'):
      if getattr(self, name) not in _DTYPES:
        raise ValueError(
          f'{name}={getattr(self, name)!r} must be one of {_DTYPES}'
        )
    if self.qk_norm is not None and self.qk_norm not in _QK_NORMS:
      raise ValueError(
        f'qk_norm={self.qk_norm!r} must be None or one of {_QK_NORMS}'
      )

  @property
  def head_dim(self) -> int:
    return self.head_width or self.model_dim // self.num_heads

  @property
  def kv_heads(self) -> int:
    return self.num_kv_heads or self.num_heads


def _require_positive_int(name, value):
  if not isinstance(value, int) or isinstance(value, bool) or value < 1:
    raise ValueError(f'{name}={value!r} must be an integer of at least 1')


def init(config: TransformerConfig, key: Key[Array, '']) -> Params:
  """Fresh parameters.

  Args:
    config: shape of the network.
    key: consumed.

  Returns:
    Nested dict of float32 arrays; those under `blocks` have a leading axis of
    `num_layers`.
  """

  def init_one(kind, key):
    _, state = nnx.split(kind(config, rngs=nnx.Rngs(key)))
    return nnx.to_pure_dict(state)

  outer_key, blocks_key = jax.random.split(key)
  block_keys = jax.random.split(blocks_key, config.num_layers)
  blocks = jax.vmap(functools.partial(init_one, Block))(block_keys)
  return init_one(Outer, outer_key) | {'blocks': blocks}


@interned
def denoiser(config: TransformerConfig) -> predict.Denoiser:
  """The network of `config` as a `Denoiser`; equal configs give equal ones.

  It keeps no cache (`()`), ignores `step`, and ignores `t` unless
  `config.time_conditioning`. Hidden states are normed, in the compute dtype;
  logits are float32.

  `features` raises ValueError for a sequence longer than `config.max_length`
  and AssertionError for shapes that disagree.
  """
  return predict.Denoiser(
    functools.partial(_features, config),
    functools.partial(_head, config),
    time_free=not config.time_conditioning,
    shifted=config.shifted,
  )


def time_features(t: Float[Array, 'B']) -> Float[Array, 'B F']:
  """Cosines and sines of 1000 t 10,000^(-i/64) for i < 64.

  Args:
    t: noise level. Shape `[B]`.

  Returns:
    float32. Shape `[B, 128]`.
  """
  exponents = jnp.arange(_TIME_FREQUENCIES) / _TIME_FREQUENCIES
  frequencies = 10_000.0 ** -exponents[None]
  angles = 1000.0 * t[:, None].astype(jnp.float32) * frequencies
  return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class Block(nnx.Module):
  """Attention, then SwiGLU, each normed before and added to the stream."""

  def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
    self.config = config
    dim, mlp_dim = config.model_dim, config.mlp_dim
    q_dim = config.num_heads * config.head_dim
    kv_dim = config.kv_heads * config.head_dim
    linear = functools.partial(_linear, config, rngs)
    project = functools.partial(linear, dim, bias=config.qkv_bias)
    # Each of the 2 * num_layers branches adds its share of unit variance.
    branch_scale = 1 / (2 * config.num_layers)
    self.attention_norm = _norm(config, rngs, dim)
    self.query = project(q_dim)
    self.key = project(kv_dim)
    self.value = project(kv_dim)
    if config.qk_norm is not None:
      per_head = config.qk_norm == 'head'
      self.query_norm = _norm(
        config, rngs, config.head_dim if per_head else q_dim
      )
      self.key_norm = _norm(
        config, rngs, config.head_dim if per_head else kv_dim
      )
    self.attention_out = linear(q_dim, dim, scale=branch_scale)
    self.mlp_norm = _norm(config, rngs, dim)
    self.gate = linear(dim, mlp_dim)
    self.up = linear(dim, mlp_dim)
    self.mlp_out = linear(mlp_dim, dim, scale=branch_scale)
    if config.time_conditioning:
      # Zero: a fresh network is the unconditional one.
      self.modulation = linear(dim, 6 * dim, scale=0.0)

  def __call__(self, x, time_embedding, cos, sin, mask):
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self._modulation(
      time_embedding
    )
    branch = self.attention_norm(x) * (1 + scale) + shift
    x += (1 + gate) * self._attend(branch, cos, sin, mask)
    branch = self.mlp_norm(x) * (1 + mlp_scale) + mlp_shift
    return x + (1 + mlp_gate) * self._mlp(branch)

  def _modulation(self, time_embedding):
    """Shift, scale and gate of both branches, each [B, 1, d]; 0 without t."""
    if not self.config.time_conditioning:
      return [0.0] * 6
    return jnp.split(self.modulation(time_embedding)[:, None], 6, axis=-1)

  def _attend(self, x, cos, sin, mask):
    def heads(projected):
      return projected.reshape(*x.shape[:2], -1, self.config.head_dim)

    q, k, v = self.query(x), self.key(x), self.value(x)
    if self.config.qk_norm == 'projection':
      q, k = self.query_norm(q), self.key_norm(k)
    q, k, v = heads(q), heads(k), heads(v)
    if self.config.qk_norm == 'head':
      q, k = self.query_norm(q), self.key_norm(k)
    mixed = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, mask)
    return self.attention_out(mixed.reshape(*x.shape[:2], -1))

  def _mlp(self, x):
    return self.mlp_out(jax.nn.silu(self.gate(x)) * self.up(x))


class Outer(nnx.Module):
  """What lies around the blocks: embedding, last norm, head, time."""

  def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
    self.config = config
    dim = config.model_dim
    linear = functools.partial(_linear, config, rngs)
    table_init = nnx.initializers.normal(_LOGIT_STD / dim**0.5)
    self.embedding = nnx.Param(
      table_init(rngs.params(), (config.vocab_size, dim))
    )
    self.norm = _norm(config, rngs, dim)
    if not config.tied_head:
      self.head = nnx.Param(table_init(rngs.params(), (config.vocab_size, dim)))
    if config.time_conditioning:
      self.time_in = linear(2 * _TIME_FREQUENCIES, dim)
      self.time_out = linear(dim, dim)

  def embed(self, ids):
    table = self.embedding[...]
    if len(table) <= _MOST_ONE_HOT_ROWS:
      one_hot = jax.nn.one_hot(ids, len(table), dtype=table.dtype)
      rows = jnp.matmul(one_hot, table, precision='highest')
    else:
      rows = table[ids]
    scale = self.config.embedding_scale
    if scale is None:
      scale = self.config.model_dim**0.5 / _LOGIT_STD
    return (rows * scale).astype(self.config.dtype)

  def embed_time(self, t):
    """What drives every block's modulation, [B, d]; None without time."""
    if not self.config.time_conditioning:
      return None
    hidden = jax.nn.silu(self.time_in(time_features(t)))
    return jax.nn.silu(self.time_out(hidden))

  def logits(self, hidden):
    table = self.embedding if self.config.tied_head else self.head
    logits = jnp.einsum(
      'bld,vd->blv',
      hidden,
      table[...].astype(hidden.dtype),
      preferred_element_type=jnp.float32,
    )
    if self.config.logit_scale != 1:  # One pass over the logits less.
      logits *= self.config.logit_scale
    return logits


def _norm(config, rngs, dim):
  return nnx.RMSNorm(
    dim, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs
  )


def _linear(config, rngs, in_dim, out_dim, *, scale=1.0, bias=False):
  """Outputs of variance `scale` for inputs of unit variance."""
  std = (scale / in_dim) ** 0.5
  return nnx.Linear(
    in_dim,
    out_dim,
    use_bias=bias,
    kernel_init=nnx.initializers.normal(std),
    dtype=config.dtype,
    rngs=rngs,
  )


@functools.cache
def _graph(kind, config):
  """The static half of an NNX module, to be merged with its parameters."""
  module = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
  return nnx.split(module)[0]


def _outer(config, params):
  without_blocks = {k: v for k, v in params.items() if k != 'blocks'}
  return nnx.merge(_graph(Outer, config), without_blocks)


def _features(
  config, params, cache, ids, *, at, step, t, valid, positions, segments
):
  del cache, step  # every call is a full forward pass
  chex.assert_rank(ids, 2)
  chex.assert_equal_shape([ids, valid, positions])
  chex.assert_shape(t, ids.shape[:1])
  if segments is not None:
    chex.assert_equal_shape([ids, segments])
  if ids.shape[1] > config.max_length:
    raise ValueError(
      f'sequence of length {ids.shape[1]} given to a model of '
      f'max_length={config.max_length}'
    )
  outer = _outer(config, params)
  angles = rotary_angles(positions, config.head_dim, config.rope_base)
  shared = (
    outer.embed_time(t),
    *(_rounded(f(angles), config.rope_dtype) for f in (jnp.cos, jnp.sin)),
    attention_mask(valid, segments),
  )

  # The gradient keeps matrix products and recomputes the cheap rest: stacking
  # that over the layers takes more time than making it again.
  @functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  )
  def apply_block(x, block_params):
    return nnx.merge(_graph(Block, config), block_params)(x, *shared), None

  hidden, _ = jax.lax.scan(apply_block, outer.embed(ids), params['blocks'])
  if at is not None:
    hidden = jnp.take_along_axis(hidden, at[:, :, None], axis=1)
  return outer.norm(hidden), ()


def _head(config, params, hidden):
  return _outer(config, params).logits(hidden)


def _rounded(x, dtype):
  """float32 values that `dtype` can hold; XLA may drop a pair of casts."""
  if dtype == 'float32':
    return x
  info = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, info.nexp, info.nmant)
