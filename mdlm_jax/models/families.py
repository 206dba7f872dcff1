"""Published layouts: what a config.json says, in the terms of this library.

A family is a `TransformerConfig` and a table of names. Those known, by the
`architectures` of config.json:

  LLaDAModelLM         LLaDA 8B and LLaDA 1.5, dense (Nie et al., 2025)
  DreamModel           Dream (Ye et al., 2025), Dream-Coder, DiffuCoder: Qwen2
                       layers, logits shifted by one
  A2DQwen3LMHeadModel  Qwen3 layers made bidirectional
  SMDM                 TinyLlama layers (Nie et al., 2024); its config.json
                       holds the fields of its own configuration class and is
                       known by a name Diff_LLaMA_...

Mixtures of experts and the adaLN transformers of MDLM and BD3-LM are not among
them. A field that asks for something else than these layers is an error.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from mdlm_jax.models.transformer import TransformerConfig

_VOCAB_MULTIPLE = 64


class Mapping(NamedTuple):
  """How one tensor of a file becomes parameters of one layer, and back.

  Attributes:
    leaves: keys of the parameters, such as 'blocks/query/kernel'.
    from_file: the file's tensor to a tuple of arrays, one for each leaf.
    to_file: those arrays to the file's tensor.
  """

  leaves: tuple[str, ...]
  from_file: Callable
  to_file: Callable


class Layout(NamedTuple):
  """A published model, before its files are opened.

  Attributes:
    config: shape of the network, dtype float32.
    outer: mappings by key, for the tensors outside the layers.
    layer: mappings by key for the tensors of layer `{}`.
    num_tokens: ids from this one on are rows of the table without a token.
    mask_id: None where only the tokenizer's files tell.
    copies: keys that a file may hold beside the key of which they are copies,
      such as the head of a model whose head is its embedding table.
  """

  config: TransformerConfig
  outer: dict[str, Mapping]
  layer: dict[str, Mapping]
  num_tokens: int
  mask_id: int | None
  copies: dict[str, str]


def layout(content: dict[str, Any]) -> Layout:
  """What the content of a config.json describes.

  Raises:
    ValueError: an unknown architecture, with the known ones; a field that is
      missing, of another type, or asks for what these layers cannot do.
  """
  name = _architecture(content)
  if name not in _FAMILIES:
    raise ValueError(
      f'config.json: unknown architecture {name!r}; known are '
      f'{", ".join(sorted(_FAMILIES))}'
    )
  try:
    return _FAMILIES[name](_Fields(content))
  except (TypeError, AttributeError) as error:  # JSON holds values of any kind.
    raise ValueError(f'config.json of {name}: {error}') from None


def _architecture(content):
  named = content.get('architectures')
  if isinstance(named, list) and named:
    return str(named[0])
  if str(content.get('name', '')).startswith('Diff_LLaMA'):
    return 'SMDM'
  model_type = str(content.get('model_type'))
  return _MODEL_TYPES.get(model_type, model_type)


class _Fields(dict):
  """The fields of a config.json; a missing one is the user's error."""

  def __missing__(self, name):
    raise ValueError(f'config.json lacks {name}')

  def require(self, **allowed: tuple) -> None:
    """Refuses a field with another value; absent is the first one."""
    for name, values in allowed.items():
      if self.get(name, values[0]) not in values:
        raise ValueError(
          f'config.json: {name}={self[name]!r} is not supported, must be one '
          f'of {values}'
        )


def _whole(leaf: str) -> Mapping:
  return Mapping((leaf,), _identity, _only)


def _matrix(name: str) -> Mapping:
  """A linear map, stored [out, in] in files and [in, out] here."""
  return Mapping((f'{name}/kernel',), _transposed, _only_transposed)


def _table(leaf: str, rows: int, size: int) -> Mapping:
  """A table that has `rows` rows in files, and zeros up to `size` here."""
  return Mapping(
    (leaf,),
    functools.partial(_padded, size),
    functools.partial(_first, rows),
  )


def _identity(x):
  return (x,)


def _only(x):
  return x


def _transposed(x):
  return (x.T,)


def _only_transposed(x):
  return x.T


def _padded(size, x):
  return (jnp.pad(x, ((0, size - len(x)), (0, 0))),)


def _first(rows, x):
  return x[:rows]


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


def _llada(fields):
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
  layer = 'model.transformer.blocks.{}.'
  mappings = {
    'attn_norm.weight': _whole('blocks/attention_norm/scale'),
    'q_proj.weight': _matrix('blocks/query'),
    'k_proj.weight': _matrix('blocks/key'),
    'v_proj.weight': _matrix('blocks/value'),
    'attn_out.weight': _matrix('blocks/attention_out'),
    'ff_norm.weight': _whole('blocks/mlp_norm/scale'),
    # Not as in Llama's code: `ff_proj` goes through the activation.
    'ff_proj.weight': _matrix('blocks/gate'),
    'up_proj.weight': _matrix('blocks/up'),
    'ff_out.weight': _matrix('blocks/mlp_out'),
  }
  if config.qk_norm:
    mappings['q_norm.weight'] = _whole('blocks/query_norm/scale')
    mappings['k_norm.weight'] = _whole('blocks/key_norm/scale')
  if config.qkv_bias:
    mappings |= _biases('{}_proj.bias')
  return Layout(
    config,
    {
      weight('wte'): _whole('embedding'),
      weight('ln_f'): _whole('norm/scale'),
    }
    | ({} if tied else {weight('ff_out'): _whole('head')}),
    {layer + name: mapping for name, mapping in mappings.items()},
    num_tokens=fields['vocab_size'],
    mask_id=fields['mask_token_id'],
    copies={weight('ff_out'): weight('wte')} if tied else {},
  )


def _biases(name):
  return {
    name.format(short): _whole(f'blocks/{leaf}/bias')
    for short, leaf in (('q', 'query'), ('k', 'key'), ('v', 'value'))
  }


def _qwen(fields, **switches):
  """The layers of Qwen2 and Qwen3, without a causal mask."""
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
    'input_layernorm.weight': _whole('blocks/attention_norm/scale'),
    'self_attn.q_proj.weight': _matrix('blocks/query'),
    'self_attn.k_proj.weight': _matrix('blocks/key'),
    'self_attn.v_proj.weight': _matrix('blocks/value'),
    'self_attn.o_proj.weight': _matrix('blocks/attention_out'),
    'post_attention_layernorm.weight': _whole('blocks/mlp_norm/scale'),
    'mlp.gate_proj.weight': _matrix('blocks/gate'),
    'mlp.up_proj.weight': _matrix('blocks/up'),
    'mlp.down_proj.weight': _matrix('blocks/mlp_out'),
  }
  if config.qk_norm:
    mappings['self_attn.q_norm.weight'] = _whole('blocks/query_norm/scale')
    mappings['self_attn.k_norm.weight'] = _whole('blocks/key_norm/scale')
  if config.qkv_bias:
    mappings |= _biases('self_attn.{}_proj.bias')
  embedding, head = 'model.embed_tokens.weight', 'lm_head.weight'
  return Layout(
    config,
    {
      embedding: _whole('embedding'),
      'model.norm.weight': _whole('norm/scale'),
    }
    | ({} if tied else {head: _whole('head')}),
    {'model.layers.{}.' + name: value for name, value in mappings.items()},
    num_tokens=fields['vocab_size'],
    mask_id=fields.get('mask_token_id'),
    copies={head: embedding} if tied else {},
  )


def _dream(fields):
  return _qwen(fields, qkv_bias=True, shifted=True)


def _a2d_qwen3(fields):
  fields.require(attention_bias=(False,))
  return _qwen(fields, qk_norm='head')


def _smdm(fields):
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
  # The reduction of the logits wants blocks of the vocabulary of one size.
  size = -(-(mask_id + 1) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
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
    'norm_1.weight': _whole('blocks/attention_norm/scale'),
    'attn.attn.weight': Mapping(
      tuple(f'blocks/{name}/kernel' for name in ('query', 'key', 'value')),
      functools.partial(_split_groups, *shape),
      functools.partial(_join_groups, *shape),
    ),
    'attn.proj.weight': _matrix('blocks/attention_out'),
    'norm_2.weight': _whole('blocks/mlp_norm/scale'),
    'mlp.swiglu.w1.weight': _matrix('blocks/gate'),
    'mlp.swiglu.w2.weight': _matrix('blocks/up'),
    'mlp.swiglu.w3.weight': _matrix('blocks/mlp_out'),
  }
  return Layout(
    config,
    {
      'transformer.wte.weight': _table('embedding', mask_id + 1, size),
      'transformer.ln_f.weight': _whole('norm/scale'),
      'lm_head.weight': _table('head', mask_id, size),
    },
    {'transformer.h.{}.' + name: value for name, value in layer.items()},
    num_tokens=fields['vocab_size'],
    mask_id=mask_id,
    copies={},
  )


_FAMILIES = {
  'LLaDAModelLM': _llada,
  'DreamModel': _dream,
  'A2DQwen3LMHeadModel': _a2d_qwen3,
  'SMDM': _smdm,
}
_MODEL_TYPES = {
  'llada': 'LLaDAModelLM',
  'Dream': 'DreamModel',
  'a2d-qwen3': 'A2DQwen3LMHeadModel',
}
