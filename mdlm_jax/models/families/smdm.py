"""SMDM (Nie et al., 2024): TinyLlama layers with fused projections."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from mdlm_jax.models.config import TransformerConfig
from mdlm_jax.models.families.contract import (
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


def smdm(fields: Fields) -> Layout:
  fields.require(
    _norm_class=('FusedRMSNorm', 'RMSNorm'),
    _mlp_class=('LLaMAMLP',),
    bias=(False,),
    parallel_residual=(False,),
    rotary_percentage=(1.0,),
    condense_ratio=(1,),
  )
  # The head has a row for each id below; MASK is one more row of embeddings.
  mask_id = fields['padded_vocab_size']
  size = padded_size(mask_id + 1)
  config = TransformerConfig(
    vocab_size=size,
    num_layers=fields['n_layer'],
    model_dim=fields['n_embd'],
    num_heads=fields['n_head'],
    mlp_dim=fields['intermediate_size'],
    max_length=fields['block_size'],
    num_kv_heads=fields['n_query_groups'],
    tied_head=False,
    norm_eps=fields['norm_eps'],
    embedding_scale=1.0,
    rope_dtype='bfloat16',
  )
  shape = config.kv_heads, config.head_dim
  layer = {
    'norm_1.weight': whole('attention_norm/scale'),
    'attn.attn.weight': Mapping(
      tuple(f'{name}/kernel' for name in ('query', 'key', 'value')),
      functools.partial(_split_groups, *shape),
      functools.partial(_join_groups, *shape),
    ),
    'attn.proj.weight': matrix('attention_out'),
    'norm_2.weight': whole('mlp_norm/scale'),
    'mlp.swiglu.w1.weight': matrix('gate'),
    'mlp.swiglu.w2.weight': matrix('up'),
    'mlp.swiglu.w3.weight': matrix('mlp_out'),
  }
  return Layout(
    config,
    {
      'transformer.wte.weight': table('embedding', mask_id + 1, size),
      'transformer.ln_f.weight': whole('norm/scale'),
      'lm_head.weight': table('head', mask_id, size),
    }
    | inside('blocks', numbered('transformer.h.{}.', layer, config.num_layers)),
    num_tokens=fields['vocab_size'],
    mask_id=mask_id,
    copies={},
  )


def _split_groups(
  groups: int, head_dim: int, fused: Float[Array, 'R d']
) -> tuple[Float[Array, 'd Q'], Float[Array, 'd K'], Float[Array, 'd K']]:
  """Kernels of a matrix with rows [queries, key, value] for each group."""
  width = fused.shape[1]
  heads = fused.reshape(groups, -1, head_dim, width)
  parts = heads[:, :-2], heads[:, -2], heads[:, -1]
  q, k, v = (part.reshape(-1, width).T for part in parts)
  return q, k, v


def _join_groups(groups, head_dim, q, k, v):
  heads = [x.T.reshape(groups, -1, head_dim, x.shape[0]) for x in (q, k, v)]
  return jnp.concatenate(heads, 1).reshape(-1, q.shape[0])
