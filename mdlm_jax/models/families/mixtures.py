"""What LLaDA-MoE and LLaDA2 have in common."""

from mdlm_jax.models.config import ExpertsConfig
from mdlm_jax.models.families.contract import (
  Fields,
  Mapping,
  numbered,
  transposed,
  whole,
)

# The decoders published with both have the id of MASK in their code, and their
# vocabularies this size.
_RELEASED_VOCAB_SIZE, _RELEASED_MASK_ID = 157_184, 156_895


def experts(prefix: str, config: ExpertsConfig) -> dict[str, Mapping]:
  """The tensors of a layer's mixture of experts."""
  parts = ('gate', 'up', 'out'), ('gate_proj', 'up_proj', 'down_proj')
  one, shared = (
    {
      f'{theirs}.weight': transposed(f'experts/{kind}{ours}')
      for ours, theirs in zip(*parts, strict=True)
    }
    for kind in ('', 'shared_')
  )
  mappings = {f'{prefix}gate.weight': transposed('experts/router')}
  if config.selection_bias:
    mappings[f'{prefix}gate.expert_bias'] = whole('experts/selection_bias')
  mappings |= numbered(prefix + 'experts.{}.', one, config.num_experts)
  if config.shared_width is not None:
    mappings |= {f'{prefix}shared_experts.{k}': v for k, v in shared.items()}
  return mappings


def rotary_width(fields: Fields, head_dim: int) -> int | None:
  """How many channels of a head are rotated; None where all are."""
  width = int(fields['partial_rotary_factor'] * head_dim)
  return None if width == head_dim else width


def released_mask_id(fields: Fields) -> int | None:
  """The id of MASK, None where only the tokenizer's files may tell it."""
  told = fields.get('mask_token_id')
  if told is None and fields['vocab_size'] == _RELEASED_VOCAB_SIZE:
    return _RELEASED_MASK_ID
  return told
