"""LLaDA 8B and LLaDA 1.5, dense (Nie et al., 2025): Llama layers."""

from mdlm_jax.models.config import TransformerConfig
from mdlm_jax.models.families.contract import (
  Fields,
  Layout,
  biases,
  ends,
  inside,
  matrix,
  numbered,
  whole,
)


def llada(fields: Fields) -> Layout:
  fields.require(
    block_type=('llama',),
    block_group_size=(1,),
    activation_type=('silu',),
    layer_norm_type=('rms',),
    layer_norm_with_affine=(True,),
    attention_layer_norm_with_affine=(True,),
    bias_for_layer_norm=(False, None),
    include_bias=(False,),
    rope=(True,),
    alibi=(False,),
    attention_layer_norm=(False, True, None),
    input_emb_norm=(False, True, None),
    multi_query_attention=(False, True, None),
    scale_logits=(False, True, None),
  )
  dim, tied = fields['d_model'], fields['weight_tying']
  kv_heads = fields.get('n_kv_heads')
  if kv_heads is None:
    kv_heads = 1 if fields.get('multi_query_attention') else fields['n_heads']
  mlp_dim = fields.get('mlp_hidden_size')
  config = TransformerConfig(
    vocab_size=fields.get('embedding_size') or fields['vocab_size'],
    num_layers=fields['n_layers'],
    model_dim=dim,
    num_heads=fields['n_heads'],
    mlp_dim=int(fields['mlp_ratio'] * dim) if mlp_dim is None else mlp_dim,
    max_length=fields['max_sequence_length'],
    num_kv_heads=kv_heads,
    tied_head=tied,
    rope_base=float(fields['rope_theta']),
    norm_eps=fields['rms_norm_eps'],
    qkv_bias=fields.get('include_qkv_bias') or False,
    qk_norm='projection' if fields.get('attention_layer_norm') else None,
    embedding_scale=dim**0.5 if fields.get('input_emb_norm') else 1.0,
    logit_scale=dim**-0.5 if fields.get('scale_logits') else 1.0,
  )
  weight = 'model.transformer.{}.weight'.format
  embedding, head = weight('wte'), weight('ff_out')
  mappings = {
    'attn_norm.weight': whole('attention_norm/scale'),
    'q_proj.weight': matrix('query'),
    'k_proj.weight': matrix('key'),
    'v_proj.weight': matrix('value'),
    'attn_out.weight': matrix('attention_out'),
    'ff_norm.weight': whole('mlp_norm/scale'),
    # Not as in Llama's code: `ff_proj` goes through the activation.
    'ff_proj.weight': matrix('gate'),
    'up_proj.weight': matrix('up'),
    'ff_out.weight': matrix('mlp_out'),
  }
  if config.qk_norm:
    mappings['q_norm.weight'] = whole('query_norm/scale')
    mappings['k_norm.weight'] = whole('key_norm/scale')
  if config.qkv_bias:
    mappings |= biases('{}_proj.bias')
  return Layout(
    config,
    ends(embedding, weight('ln_f'), head, tied=tied)
    | inside(
      'blocks',
      numbered('model.transformer.blocks.{}.', mappings, config.num_layers),
    ),
    num_tokens=fields['vocab_size'],
    mask_id=fields['mask_token_id'],
    copies={head: embedding} if tied else {},
  )
