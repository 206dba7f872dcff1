"""LLaDA-MoE 7B-A1B (Zhu et al., 2025, arXiv 2509.24389): OLMoE layers."""

from mdlm_jax.models.config import ExpertsConfig, TransformerConfig
from mdlm_jax.models.families.contract import (
  Fields,
  Layout,
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


def llada_moe(fields: Fields) -> Layout:
  layers = fields['num_hidden_layers']
  fields.require(
    hidden_act=('silu',),
    rope_scaling=(None,),
    attention_bias=(False,),
    clip_qkv=(None,),
    qk_layernorm=(True,),
    moe_layer_freq=([1] * layers,),
    moe_router_score_function=('softmax',),
    moe_router_enable_expert_bias=(False, None),
    shared_expert_intermediate_size=(None,),
    router_num_group=(None,),
    router_topk_group=(None,),
    routed_scaling_factor=(1,),
  )
  dim, heads = fields['hidden_size'], fields['num_attention_heads']
  tied = fields.get('tie_word_embeddings', False)
  config = TransformerConfig(
    vocab_size=fields['vocab_size'],
    num_layers=layers,
    model_dim=dim,
    num_heads=heads,
    mlp_dim=fields['dense_intermediate_size'],
    max_length=fields['max_position_embeddings'],
    num_kv_heads=fields.get('num_key_value_heads'),
    tied_head=tied,
    rope_base=float(fields['rope_theta']),
    norm_eps=fields['rms_norm_eps'],
    qk_norm='head',
    embedding_scale=1.0,
    rotary_width=rotary_width(fields, dim // heads),
    # Their code does not read norm_topk_prob: the weights stay as they are.
    experts=ExpertsConfig(
      num_experts=fields['num_experts'],
      num_chosen=fields['num_experts_per_tok'],
      width=fields['expert_intermediate_size'],
    ),
  )
  layer = {
    'input_layernorm.weight': whole('attention_norm/scale'),
    'self_attn.q_proj.weight': matrix('query'),
    'self_attn.k_proj.weight': matrix('key'),
    'self_attn.v_proj.weight': matrix('value'),
    'self_attn.q_norm.weight': whole('query_norm/scale'),
    'self_attn.k_norm.weight': whole('key_norm/scale'),
    'self_attn.o_proj.weight': matrix('attention_out'),
    'post_attention_layernorm.weight': whole('mlp_norm/scale'),
  } | experts('mlp.', config.experts)
  embedding, head = 'model.embed_tokens.weight', 'lm_head.weight'
  return Layout(
    config,
    ends(embedding, 'model.norm.weight', head, tied=tied)
    | inside('blocks', numbered('model.layers.{}.', layer, layers)),
    num_tokens=fields['vocab_size'],
    mask_id=released_mask_id(fields),
    copies={head: embedding} if tied else {},
  )
