"""MDLM (Sahoo et al., 2024) and BD3-LM (Arriola et al., 2025): adaLN layers.

Both embed the noise level and modulate every norm and branch with it. As
published they read the level 0 always (`time_conditioning` is off).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mdlm_jax import schedules
from mdlm_jax.checks import check_integer
from mdlm_jax.models.config import TransformerConfig
from mdlm_jax.models.families.contract import (
  Buffer,
  Fields,
  Layout,
  Mapping,
  inside,
  matrix,
  numbered,
  padded_size,
  table,
  whole,
)

_ROPE_BASE = 10_000.0


def mdlm(fields: Fields) -> Layout:
  time_conditioning = fields.get('time_conditioning', False)
  return _adaln(
    fields,
    schedules.log_linear(),
    conditioning_dim=fields['cond_dim'],
    time_conditioning=time_conditioning,
    time_input='sigma' if time_conditioning else 't',
  )


def bd3lm(fields: Fields) -> Layout:
  """Every slot sees its block of noise and the clean blocks before it."""
  fields.require(
    causal=(False,),
    cross_attn=(True,),
    time_conditioning=(False,),
    adaln=(True, False),
    var_min=(True, False),
  )
  check_integer('config.json: block_size', fields['block_size'], 1)
  layout = _adaln(
    fields,
    schedules.linear(),
    conditioning_dim=fields['cond_dim'] if fields.get('adaln', True) else None,
    attention_block=fields['block_size'],
  )
  if not fields.get('var_min', True):
    return layout
  # The range of noise levels of its training, that of least variance.
  levels = {
    name: Buffer(np.array(fields.get(name, default), np.float32))
    for name, default in (
      ('sampling_eps_min', 1e-3),
      ('sampling_eps_max', 0.999),
    )
  }
  return layout._replace(buffers=layout.buffers | levels)


def _adaln(fields, schedule, **switches):
  dim, rows = fields['hidden_dim'], fields['vocab_size']
  size = padded_size(rows)
  config = TransformerConfig(
    vocab_size=size,
    num_layers=fields['n_blocks'],
    model_dim=dim,
    num_heads=fields['n_heads'],
    mlp_dim=4 * dim,
    max_length=fields['model_length'],
    tied_head=False,
    rope_base=_ROPE_BASE,
    norm='layer',
    norm_eps=1e-5,
    mlp='gelu',
    head_bias=True,
    embedding_scale=1.0,
    **switches,
  )
  outer = {
    'vocab_embed.embedding': table('embedding', rows, size),
    'output_layer.norm_final.weight': whole('norm/scale'),
    'output_layer.linear.weight': table('head', rows, size),
    'output_layer.linear.bias': table('head_bias', rows, size),
  }
  layer = {
    'norm1.weight': whole('attention_norm/scale'),
    'attn_qkv.weight': Mapping(
      tuple(f'{name}/kernel' for name in ('query', 'key', 'value')),
      _split,
      _join,
    ),
    'attn_out.weight': matrix('attention_out'),
    'norm2.weight': whole('mlp_norm/scale'),
    'mlp.0.weight': matrix('up'),
    'mlp.0.bias': whole('up/bias'),
    'mlp.2.weight': matrix('mlp_out'),
    'mlp.2.bias': whole('mlp_out/bias'),
  }
  if config.conditioning_dim:
    layer |= _affine('adaLN_modulation', 'modulation')
    outer |= _affine('sigma_map.mlp.0', 'time_in')
    outer |= _affine('sigma_map.mlp.2', 'time_out')
    outer |= _affine('output_layer.adaLN_modulation', 'modulation')
  layers = inside('blocks', numbered('blocks.{}.', layer, config.num_layers))
  return Layout(
    config,
    {f'backbone.{name}': value for name, value in (outer | layers).items()},
    num_tokens=rows,
    mask_id=rows - 1,
    copies={},
    buffers={
      'backbone.rotary_emb.inv_freq': Buffer(
        _inverse_wavelengths(config.head_dim), read=True
      )
    },
    schedule=schedule,
  )


def _affine(theirs, ours):
  return {
    f'{theirs}.weight': matrix(ours),
    f'{theirs}.bias': whole(f'{ours}/bias'),
  }


def _split(
  fused: Float[Array, 'R d'],
) -> tuple[Float[Array, 'd Q'], Float[Array, 'd Q'], Float[Array, 'd Q']]:
  """Kernels of a matrix with the rows of queries, keys and values in turn."""
  q, k, v = fused.reshape(3, -1, fused.shape[1]).swapaxes(1, 2)
  return q, k, v


def _join(q, k, v):
  return jnp.concatenate([q, k, v], axis=1).T


def _inverse_wavelengths(head_dim: int) -> Float[np.ndarray, 'Half']:
  """base^(-2i/D) in float32, each step rounded as the reference rounds it."""
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  powers = _ROPE_BASE ** exponents.astype(np.float64)
  return 1 / powers.astype(np.float32)
