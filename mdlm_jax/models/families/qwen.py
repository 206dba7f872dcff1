"""Qwen layers: Dream, Dream-Coder, DiffuCoder and A2D-Qwen3."""

from typing import Any

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


def hub_layers(fields: Fields, **switches: Any) -> Layout:
  """The layers of Llama, Qwen2 and Qwen3 under their names on the hub.

  Args:
    fields: of config.json.
    **switches: fields of `TransformerConfig` in which the families differ.
  """
  layers = fields['num_hidden_layers']
  fields.require(
    hidden_act=('silu',),
    rope_scaling=(None,),
    use_sliding_window=(False,),
    layer_types=(None, ['full_attention'] * layers),
  )
  tied = fields['tie_word_embeddings']
  config = TransformerConfig(
    vocab_size=fields['vocab_size'],
    num_layers=layers,
    model_dim=fields['hidden_size'],
    num_heads=fields['num_attention_heads'],
    mlp_dim=fields['intermediate_size'],
    max_length=fields['max_position_embeddings'],
    num_kv_heads=fields['num_key_value_heads'],
    tied_head=tied,
    rope_base=float(fields['rope_theta']),
    norm_eps=fields['rms_norm_eps'],
    head_width=fields.get('head_dim'),
    embedding_scale=1.0,
    **switches,
  )
  mappings = {
    'input_layernorm.weight': whole('attention_norm/scale'),
    'self_attn.q_proj.weight': matrix('query'),
    'self_attn.k_proj.weight': matrix('key'),
    'self_attn.v_proj.weight': matrix('value'),
    'self_attn.o_proj.weight': matrix('attention_out'),
    'post_attention_layernorm.weight': whole('mlp_norm/scale'),
    'mlp.gate_proj.weight': matrix('gate'),
    'mlp.up_proj.weight': matrix('up'),
    'mlp.down_proj.weight': matrix('mlp_out'),
  }
  if config.qk_norm:
    mappings['self_attn.q_norm.weight'] = whole('query_norm/scale')
    mappings['self_attn.k_norm.weight'] = whole('key_norm/scale')
  if config.qkv_bias:
    mappings |= biases('self_attn.{}_proj.bias')
  embedding, head = 'model.embed_tokens.weight', 'lm_head.weight'
  return Layout(
    config,
    ends(embedding, 'model.norm.weight', head, tied=tied)
    | inside('blocks', numbered('model.layers.{}.', mappings, layers)),
    num_tokens=fields['vocab_size'],
    mask_id=fields.get('mask_token_id'),
    copies={head: embedding} if tied else {},
  )


def dream(fields: Fields) -> Layout:
  return hub_layers(fields, qkv_bias=True, shifted=True)


def a2d_qwen3(fields: Fields) -> Layout:
  fields.require(attention_bias=(False,))
  return hub_layers(fields, qk_norm='head')
