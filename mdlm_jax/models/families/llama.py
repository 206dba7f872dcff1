"""Causal language models: Llama, Qwen2 and Qwen3, and Llama as GGUF has it."""

import functools
from collections.abc import Mapping as MappingOf
from typing import Any

from mdlm_jax.models.config import TransformerConfig
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
from mdlm_jax.models.families.qwen import hub_layers

_CAUSAL = {'attention_block': 1, 'shifted': True}
# What config.json leaves out in models of before these fields.
_LLAMA_DEFAULTS = {'tie_word_embeddings': False, 'rope_theta': 10_000.0}


def llama(fields: Fields) -> Layout:
  fields.require(
    attention_bias=(False,), mlp_bias=(False,), rope_interleaved=(False,)
  )
  heads = {'num_key_value_heads': fields['num_attention_heads']}
  return _causal(Fields(_LLAMA_DEFAULTS | heads | fields))


def qwen2(fields: Fields) -> Layout:
  return _causal(fields, qkv_bias=True)


def qwen3(fields: Fields) -> Layout:
  fields.require(attention_bias=(False,))
  return _causal(fields, qk_norm='head')


def _causal(fields, **switches):
  return hub_layers(_with_rope_base(fields), **_CAUSAL, **switches)


def _with_rope_base(fields):
  """Newer files keep what concerns the rotation in a field of its own."""
  rope = fields.get('rope_parameters')
  if rope is None:
    return fields
  Fields(rope).require(rope_type=('default',), partial_rotary_factor=(1.0,))
  return Fields(fields | {'rope_theta': rope['rope_theta']})


def gguf_llama(
  fields: MappingOf[str, Any], shapes: MappingOf[str, tuple[int, ...]]
) -> Layout:
  """The Llama of llama.cpp.

  Args:
    fields: metadata of the file, such as 'llama.block_count'.
    shapes: of its tensors, the rows first.

  Raises:
    ValueError: a field that is missing or asks for what these layers cannot do.
  """
  kind = fields.get('general.architecture')
  if kind != 'llama':
    raise ValueError(f'general.architecture={kind!r} must be llama')
  of_llama = Fields(
    (name.removeprefix('llama.'), value)
    for name, value in fields.items()
    if name.startswith('llama.')
  )
  vocab_size, model_dim = shapes.get('token_embd.weight', (0, 0))
  if not vocab_size:
    raise ValueError('no tensor token_embd.weight')
  layers, heads = of_llama['block_count'], of_llama['attention.head_count']
  kv_heads = of_llama.get('attention.head_count_kv', heads)
  width = of_llama.get('attention.key_length', model_dim // heads)
  of_llama.require(
    **{
      'expert_count': (0,),
      'rope.dimension_count': (width,),
      'rope.scaling.type': ('none',),
      'attention.value_length': (width,),
    }
  )
  tied = 'output.weight' not in shapes
  config = TransformerConfig(
    vocab_size=vocab_size,
    num_layers=layers,
    model_dim=model_dim,
    num_heads=heads,
    mlp_dim=of_llama['feed_forward_length'],
    max_length=of_llama['context_length'],
    num_kv_heads=kv_heads,
    tied_head=tied,
    rope_base=float(of_llama.get('rope.freq_base', 10_000.0)),
    norm_eps=of_llama['attention.layer_norm_rms_epsilon'],
    head_width=width,
    embedding_scale=1.0,
    **_CAUSAL,
  )
  mappings = {
    'attn_norm.weight': whole('attention_norm/scale'),
    'attn_q.weight': _interleaved('query', heads),
    'attn_k.weight': _interleaved('key', kv_heads),
    'attn_v.weight': matrix('value'),
    'attn_output.weight': matrix('attention_out'),
    'ffn_norm.weight': whole('mlp_norm/scale'),
    'ffn_gate.weight': matrix('gate'),
    'ffn_up.weight': matrix('up'),
    'ffn_down.weight': matrix('mlp_out'),
  }
  return Layout(
    config,
    ends('token_embd.weight', 'output_norm.weight', 'output.weight', tied=tied)
    | inside('blocks', numbered('blk.{}.', mappings, layers)),
    num_tokens=vocab_size,
    mask_id=None,
    copies={},
  )


def _interleaved(name, heads):
  """A matrix whose rows of each head are ordered for another rotation.

  There (x[2i], x[2i + 1]) is a pair that turns together, here (x[i],
  x[i + D/2]).
  """
  return Mapping(
    (f'{name}/kernel',),
    functools.partial(_from_pairs, heads),
    functools.partial(_to_pairs, heads),
  )


def _from_pairs(heads, x):
  return (_reordered(x, (heads, -1, 2)).T,)


def _to_pairs(heads, kernel):
  return _reordered(kernel.T, (heads, 2, -1))


def _reordered(x, parts):
  """The rows as `parts`, the last two of which change places."""
  return x.reshape(*parts, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
