"""Published layouts: what a config.json says, in the terms of this library.

A family is a `TransformerConfig` and a table of names. Those known, by the
`architectures` of config.json:

  LLaDAModelLM         LLaDA 8B and LLaDA 1.5, dense (Nie et al., 2025)
  LLaDAMoEModelLM      LLaDA-MoE (Zhu et al., 2025), a mixture of experts
  LLaDA2MoeModelLM     LLaDA2.0 and 2.1 (Bie et al., 2025), mixtures of experts
                       that attend by blocks
  DreamModel           Dream (Ye et al., 2025), Dream-Coder, DiffuCoder: Qwen2
                       layers, logits shifted by one
  A2DQwen3LMHeadModel  Qwen3 layers made bidirectional
  SMDM                 TinyLlama layers (Nie et al., 2024); its config.json
                       holds the fields of its own configuration class and is
                       known by a name Diff_LLaMA_...
  MDLM                 adaLN layers (Sahoo et al., 2024)
  BD3LM                the same, attending by blocks (Arriola et al., 2025)

A field that asks for something else than these layers is an error.

Causal language models, which have no MASK and can only judge samples
(`sample_quality.judge`): LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM.
"""

from typing import Any

from mdlm_jax.checks import check_integer
from mdlm_jax.models.families import (
  llada,
  llada2,
  llada_moe,
  llama,
  mdlm,
  qwen,
  smdm,
)
from mdlm_jax.models.families.contract import Fields, Layout, Mapping

__all__ = ['Layout', 'Mapping', 'causal_layout', 'layout']


def layout(content: dict[str, Any]) -> Layout:
  """What the content of a config.json describes.

  Raises:
    ValueError: an unknown architecture, with the known ones; a causal language
      model; a field that is missing, of another type, or asks for what these
      layers cannot do.
  """
  name = _architecture(content)
  if name in _CAUSAL:
    raise ValueError(
      f'{name} is a causal language model: it has no MASK to fill in and can '
      'only judge samples, as --judge of scripts/sample_quality.py'
    )
  return _described(_FAMILIES, name, content)


def causal_layout(content: dict[str, Any]) -> Layout:
  """The same for a causal language model.

  Raises:
    ValueError: as `layout`; an architecture that is not causal.
  """
  return _described(_CAUSAL, _architecture(content), content)


def _described(families, name, content):
  if name not in families:
    raise ValueError(
      f'config.json: unknown architecture {name!r}; known are '
      f'{", ".join(sorted(families))}'
    )
  try:
    found = families[name](Fields(content))
  # JSON holds values of any kind and size.
  except (TypeError, AttributeError, ArithmeticError) as error:
    raise ValueError(f'config.json of {name}: {error}') from None
  _check_ids(found)
  return found


def _check_ids(found):
  """ValueError unless the roles of ids are ids of the table."""
  check_integer('config.json: vocab_size', found.num_tokens, 1)
  size = found.config.vocab_size
  if found.num_tokens > size:
    raise ValueError(
      f'config.json: vocab_size={found.num_tokens} is more than the {size} '
      'rows of the embedding table'
    )
  if found.mask_id is not None:
    check_integer('config.json: mask_token_id', found.mask_id, 0)


def _architecture(content):
  named = content.get('architectures')
  if isinstance(named, list) and named:
    return str(named[0])
  if str(content.get('name', '')).startswith('Diff_LLaMA'):
    return 'SMDM'
  model_type = str(content.get('model_type'))
  if model_type == 'llada' and 'num_experts' in content:
    return 'LLaDAMoEModelLM'  # Its configuration class has the same name.
  return _MODEL_TYPES.get(model_type, model_type)


_FAMILIES = {
  'LLaDAModelLM': llada.llada,
  'LLaDAMoEModelLM': llada_moe.llada_moe,
  'LLaDA2MoeModelLM': llada2.llada2,
  'DreamModel': qwen.dream,
  'A2DQwen3LMHeadModel': qwen.a2d_qwen3,
  'SMDM': smdm.smdm,
  'MDLM': mdlm.mdlm,
  'BD3LM': mdlm.bd3lm,
}
_CAUSAL = {
  'LlamaForCausalLM': llama.llama,
  'Qwen2ForCausalLM': llama.qwen2,
  'Qwen3ForCausalLM': llama.qwen3,
}
_MODEL_TYPES = {
  'llada': 'LLaDAModelLM',
  'lladamoe': 'LLaDAMoEModelLM',
  'llada2_moe': 'LLaDA2MoeModelLM',
  'Dream': 'DreamModel',
  'a2d-qwen3': 'A2DQwen3LMHeadModel',
  'mdlm': 'MDLM',
  'bd3lm': 'BD3LM',
  'llama': 'LlamaForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
}
