"""What a transformer is made of, as Flax NNX modules.

A norm before each branch, rotary positions (Su et al., 2021), an MLP; grouped
key/value heads (Ainslie et al., 2023), and norms and branches modulated by the
noise level (Peebles and Xie, 2023), where asked for. The kind of norm and MLP,
biases, norms of queries and keys, and scales of embeddings and logits are those
in which published models differ; `families` says which has what.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mdlm_jax import schedules
from mdlm_jax.mesh_context import ROWS, TENSOR, fits, sharded
from mdlm_jax.models import adapters
from mdlm_jax.models.attention import rotate
from mdlm_jax.models.config import TransformerConfig
from mdlm_jax.models.experts import Experts

_NUM_WAVES = 128
# Spread of a fresh network's logits: small, so that it starts near the uniform
# distribution over the vocabulary.
_LOGIT_STD = 0.25
# The gradient of a gather is a serial scatter on CPU; for a small table the
# product with one-hot rows takes less time.
_MOST_ONE_HOT_ROWS = 512
# A linear layer whose matrix may have an adapter.
_Linear = functools.partial(
  nnx.Linear, dot_general=adapters.dot_general, promote_dtype=adapters.cast
)


def waves(levels: Float[Array, '*S']) -> Float[Array, '*S F']:
  """Cosines, then sines, of level * 10,000^(-i/128) for i < 128.

  Args:
    levels: any shape.

  Returns:
    float32. Shape `[..., 256]`.
  """
  frequencies = 10_000.0 ** -(jnp.arange(_NUM_WAVES) / _NUM_WAVES)
  angles = levels[..., None].astype(jnp.float32) * frequencies
  return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def level_of(
  t: Float[Array, '*S'], config: TransformerConfig
) -> Float[Array, '*S']:
  """What the network reads of t: 1000 t, or sigma = -log alpha(t)."""
  t = t.astype(jnp.float32)
  if config.time_input == 'sigma':
    return -jnp.log1p(-schedules.log_linear().masked(t))
  return 1000 * t


def modulate(x, shift, scale):
  """x (1 + scale) + shift."""
  return x * (1 + scale) + shift


def embedding_scale(config: TransformerConfig) -> float:
  """The factor of the embedded ids."""
  if config.embedding_scale is None:
    return config.model_dim**0.5 / _LOGIT_STD
  return config.embedding_scale


class Block(nnx.Module):
  """Attention, then an MLP, each normed before and added to the stream."""

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
    if config.experts is not None:
      self.experts = Experts(config, rngs=rngs, scale=branch_scale)
    else:
      gelu = config.mlp == 'gelu'
      if not gelu:
        self.gate = linear(dim, mlp_dim)
      self.up = linear(dim, mlp_dim, bias=gelu)
      self.mlp_out = linear(mlp_dim, dim, scale=branch_scale, bias=gelu)
    if config.modulation_width:
      self.modulation = _modulator(config, rngs, (0, 0, 1, 0, 0, 1))

  def __call__(self, x, stored, *, layer, conditioning, cos, sin, attend):
    """The stream after the block, and the keys and values to be stored.

    `attend(q, k, v, stored) -> (mixed, stored)` says who sees whom; `layer` is
    the number of the block in its stack.
    """
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self._modulation(
      conditioning
    )
    branch = modulate(self.attention_norm(x), shift, scale)
    q, k, v = self._project(_gathered(branch), cos, sin)
    mixed, stored = attend(q, k, v, stored)
    mixed = sharded(mixed, ROWS, None, TENSOR, None)
    mixed = self.attention_out(mixed.reshape(*x.shape[:2], -1))
    x += gate * sharded(mixed, ROWS, TENSOR, None)
    branch = modulate(self.mlp_norm(x), mlp_shift, mlp_scale)
    mixed = self._mlp(_gathered(branch), layer)
    return x + mlp_gate * sharded(mixed, ROWS, TENSOR, None), stored

  def _modulation(self, conditioning):
    """Shift, scale and gate of both branches, each [B, 1 or W, d]."""
    if conditioning is None:
      return 0, 0, 1, 0, 0, 1
    modulation = sharded(self.modulation(conditioning), ROWS, TENSOR, None)
    return jnp.split(modulation, 6, axis=-1)

  def _project(self, x, cos, sin):
    """Queries, keys and values by head, the first two rotated."""

    def heads(projected):
      by_head = projected.reshape(*x.shape[:2], -1, self.config.head_dim)
      return sharded(by_head, ROWS, None, TENSOR, None)

    q, k, v = self.query(x), self.key(x), self.value(x)
    if self.config.qk_norm == 'projection':
      q, k = self.query_norm(q), self.key_norm(k)
    q, k, v = heads(q), heads(k), heads(v)
    if self.config.qk_norm == 'head':
      q, k = self.query_norm(q), self.key_norm(k)
    return rotate(q, cos, sin), rotate(k, cos, sin), v

  def _mlp(self, x, layer):
    if self.config.experts is not None:
      return self.experts(x, layer)
    if self.config.mlp == 'gelu':
      hidden = jax.nn.gelu(self.up(x), approximate=True)
    else:
      hidden = jax.nn.silu(self.gate(x)) * self.up(x)
    return self.mlp_out(sharded(hidden, ROWS, None, TENSOR))


def _gathered(branch):
  """All slots of a row on each of its devices."""
  # First where it lies: XLA would gather the float32 that it was cast from.
  return sharded(sharded(branch, ROWS, TENSOR, None), ROWS, None, None)


class Outer(nnx.Module):
  """What lies around the blocks: embedding, last norm, head, time."""

  def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
    self.config = config
    dim = config.model_dim
    linear = functools.partial(_linear, config, rngs)
    std = _LOGIT_STD / dim**0.5
    table_init = nnx.initializers.normal(std, jnp.float32)
    self.embedding = nnx.Param(
      table_init(rngs.params(), (config.vocab_size, dim))
    )
    self.norm = _norm(config, rngs, dim)
    if not config.tied_head:
      self.head = nnx.Param(table_init(rngs.params(), (config.vocab_size, dim)))
    if config.head_bias:
      self.head_bias = nnx.Param(jnp.zeros(config.vocab_size, jnp.float32))
    width = config.modulation_width
    if width:
      self.time_in = linear(2 * _NUM_WAVES, width, bias=True)
      self.time_out = linear(width, width, bias=True)
      self.modulation = _modulator(config, rngs, (0, 0))

  def embed(self, ids):
    # Whole along the width, or every device would look up all rows of a batch.
    table = sharded(self.embedding[...], TENSOR, None)
    if len(table) <= _MOST_ONE_HOT_ROWS:
      one_hot = jax.nn.one_hot(ids, len(table), dtype=table.dtype)
      rows = jnp.matmul(one_hot, table, precision='highest')
    else:
      rows = table[ids]
    rows = sharded(rows, ROWS, None, None)
    stream = (rows * embedding_scale(self.config)).astype(self.config.dtype)
    return sharded(stream, ROWS, TENSOR, None)

  def embed_time(self, t):
    """What modulates norms and branches, `[B, W]` to `[B, W, c]`, or None.

    It is `[1, 1, c]` where it does not depend on the level.
    """
    if not self.config.modulation_width:
      return None
    level = jnp.zeros((1, 1))
    if self.config.time_conditioning:
      level = level_of(t, self.config)
    features = waves(level)
    return jax.nn.silu(self.time_out(jax.nn.silu(self.time_in(features))))

  def last_norm(self, hidden, conditioning):
    """The hidden states as the head reads them."""
    if conditioning is None:
      return self.norm(hidden)
    shift, scale = jnp.split(self.modulation(conditioning), 2, axis=-1)
    return modulate(self.norm(hidden), shift, scale)

  def logits(self, hidden):
    table = self.embedding if self.config.tied_head else self.head
    table = sharded(table[...].astype(hidden.dtype), TENSOR, None)
    logits = jnp.einsum(
      'bld,vd->blv', hidden, table, preferred_element_type=jnp.float32
    )
    # By slots where not by ids.
    by_ids = fits(len(table), TENSOR)
    over = (None, TENSOR) if by_ids else (TENSOR, None)
    logits = sharded(logits, ROWS, *over)
    if self.config.logit_scale != 1:  # One pass over the logits less.
      logits *= self.config.logit_scale
    if self.config.head_bias:
      logits += self.head_bias[...]
    return logits


def _norm(config, rngs, dim):
  kind = nnx.RMSNorm
  if config.norm == 'layer':
    kind = functools.partial(
      nnx.LayerNorm, use_bias=False, use_fast_variance=False
    )
  return kind(dim, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs)


def _modulator(config, rngs, values):
  """Vectors that steer the stream; fresh ones have the values, whatever t is.

  So a fresh network is the unconditional one.
  """

  def bias(key, shape, dtype):
    del key
    return jnp.repeat(jnp.asarray(values, dtype), shape[0] // len(values))

  return _Linear(
    config.modulation_width,
    len(values) * config.model_dim,
    kernel_init=nnx.initializers.zeros,
    bias_init=bias,
    dtype=config.dtype,
    rngs=rngs,
  )


def _linear(config, rngs, in_dim, out_dim, *, scale=1.0, bias=False):
  """Outputs of variance `scale` for inputs of unit variance."""
  std = (scale / in_dim) ** 0.5
  return _Linear(
    in_dim,
    out_dim,
    use_bias=bias,
    kernel_init=nnx.initializers.normal(std),
    dtype=config.dtype,
    rngs=rngs,
  )
