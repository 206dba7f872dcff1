"""LLaDA2.0 and LLaDA2.1 (Bie et al., 2025, arXiv 2512.15745): Ling layers.

They attend by blocks: a slot sees its own block and the earlier ones.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from mdlm_jax.models.config import ExpertsConfig, TransformerConfig
from mdlm_jax.models.families.contract import (
  Fields,
  Layout,
  Mapping,
  ends,
  inside,
  matrix,
  numbered,
  whole,
)
from mdlm_jax.models.families.mixtures import (
  experts,
  released_mask_id,
  rotary_width,
)

# config.json does not say it: `generate` of the published code defaults to it,
# for 2.0 and 2.1, mini and flash alike.
_BLOCK_LENGTH = 32


def llada2(fields: Fields) -> Layout:
  fields.require(
    hidden_act=('silu',),
    rope_scaling=(None,),
    use_bias=(False,),
    use_qkv_bias=(False,),
    use_qk_norm=(True,),
    use_rmsnorm=(True,),
    using_split_qkv_in_self_attention=(False,),
    use_sliding_window=(False,),
    norm_head=(False,),
    norm_softmax=(False,),
    norm_topk_prob=(True,),
    score_function=('sigmoid',),
    moe_router_enable_expert_bias=(True,),
  )
  dim, heads = fields['hidden_size'], fields['num_attention_heads']
  head_dim = fields.get('head_dim') or dim // heads
  layers, dense = fields['num_hidden_layers'], fields['first_k_dense_replace']
  width, shared = fields['moe_intermediate_size'], fields['num_shared_experts']
  tied = fields.get('tie_word_embeddings', False)
  config = TransformerConfig(
    vocab_size=fields['vocab_size'],
    num_layers=layers,
    model_dim=dim,
    num_heads=heads,
    mlp_dim=fields['intermediate_size'],
    max_length=fields['max_position_embeddings'],
    num_kv_heads=fields.get('num_key_value_heads') or heads,
    tied_head=tied,
    rope_base=float(fields['rope_theta']),
    norm_eps=fields['rms_norm_eps'],
    head_width=head_dim,
    qk_norm='head',
    embedding_scale=1.0,
    attention_block=_BLOCK_LENGTH,
    rotary_width=rotary_width(fields, head_dim),
    experts=ExpertsConfig(
      num_experts=fields['num_experts'],
      num_chosen=fields['num_experts_per_tok'],
      width=width,
      shared_width=shared * width if shared else None,
      score='sigmoid',
      selection_bias=True,
      num_groups=fields['n_group'],
      num_chosen_groups=fields['topk_group'],
      normalized=fields['num_experts_per_tok'] > 1,
      scale=float(fields['routed_scaling_factor']),
    ),
    num_dense_layers=dense,
  )
  sizes = tuple(n * head_dim for n in (heads, config.kv_heads))
  layer = {
    'input_layernorm.weight': whole('attention_norm/scale'),
    'attention.query_key_value.weight': Mapping(
      tuple(f'{name}/kernel' for name in ('query', 'key', 'value')),
      functools.partial(_split, *sizes),
      _join,
    ),
    'attention.query_layernorm.weight': whole('query_norm/scale'),
    'attention.key_layernorm.weight': whole('key_norm/scale'),
    'attention.dense.weight': matrix('attention_out'),
    'post_attention_layernorm.weight': whole('mlp_norm/scale'),
  }
  mlp = {
    'mlp.gate_proj.weight': matrix('gate'),
    'mlp.up_proj.weight': matrix('up'),
    'mlp.down_proj.weight': matrix('mlp_out'),
  }
  mixture = experts('mlp.', config.experts)
  key = 'model.layers.{}.'
  embedding, head = 'model.word_embeddings.weight', 'lm_head.weight'
  return Layout(
    config,
    ends(embedding, 'model.norm.weight', head, tied=tied)
    | inside('dense_blocks', numbered(key, layer | mlp, dense))
    | inside(
      'blocks', numbered(key, layer | mixture, layers - dense, first=dense)
    ),
    num_tokens=fields['vocab_size'],
    mask_id=released_mask_id(fields),
    copies={head: embedding} if tied else {},
  )


def _split(
  q_rows: int, kv_rows: int, fused: Float[Array, 'R d']
) -> tuple[Float[Array, 'd Q'], Float[Array, 'd K'], Float[Array, 'd K']]:
  """Kernels of a matrix with all query rows, then key, then value rows."""
  q, k, v = jnp.split(fused.T, [q_rows, q_rows + kv_rows], axis=1)
  return q, k, v


def _join(q, k, v):
  return jnp.concatenate([q, k, v], 1).T
