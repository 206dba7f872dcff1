"""What a transformer is made of, as Flax NNX modules.

RMSNorm before each branch (Zhang and Sennrich, 2019), rotary positions (Su et
al., 2021), SwiGLU (Shazeer, 2020), optionally grouped key/value heads (Ainslie
et al., 2023) and adaptive norms driven by the noise level (Peebles and Xie,
2023). Biases, norms of queries and keys, and scales of embeddings and logits
are those in which published models differ; `families` says which has what.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mdlm_jax.models.attention import rotate
from mdlm_jax.models.config import TransformerConfig

_TIME_FREQUENCIES = 64
# Spread of a fresh network's logits: small, so that it starts near the uniform
# distribution over the vocabulary.
_LOGIT_STD = 0.25
# The gradient of a gather is a serial scatter on CPU; for a small table the
# product with one-hot rows takes less time.
_MOST_ONE_HOT_ROWS = 512


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

  def __call__(self, x, stored, *, time_embedding, cos, sin, attend):
    """The stream after the block, and the keys and values to be stored.

    `attend(q, k, v, stored) -> (mixed, stored)` says who sees whom.
    """
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self._modulation(
      time_embedding
    )
    q, k, v = self._project(
      self.attention_norm(x) * (1 + scale) + shift, cos, sin
    )
    mixed, stored = attend(q, k, v, stored)
    x += (1 + gate) * self.attention_out(mixed.reshape(*x.shape[:2], -1))
    branch = self.mlp_norm(x) * (1 + mlp_scale) + mlp_shift
    return x + (1 + mlp_gate) * self._mlp(branch), stored

  def _modulation(self, time_embedding):
    """Shift, scale and gate of both branches, each [B, 1, d]; 0 without t."""
    if not self.config.time_conditioning:
      return [0.0] * 6
    return jnp.split(self.modulation(time_embedding)[:, None], 6, axis=-1)

  def _project(self, x, cos, sin):
    """Queries, keys and values by head, the first two rotated."""

    def heads(projected):
      return projected.reshape(*x.shape[:2], -1, self.config.head_dim)

    q, k, v = self.query(x), self.key(x), self.value(x)
    if self.config.qk_norm == 'projection':
      q, k = self.query_norm(q), self.key_norm(k)
    q, k, v = heads(q), heads(k), heads(v)
    if self.config.qk_norm == 'head':
      q, k = self.query_norm(q), self.key_norm(k)
    return rotate(q, cos, sin), rotate(k, cos, sin), v

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
