"""Models back into published layouts, as files.

A layout's table of names is read backwards: `Mapping.to_file` makes each tensor
from its parameters. `as_published` finds the layout that a model trained with
this library fits into.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from mdlm_jax.models import families, layers, param_tree, shards, transformer
from mdlm_jax.models.config import TransformerConfig
from mdlm_jax.vocab import Vocab

_NUMBERED = 'model-{:05d}-of-{:05d}.safetensors'
# As the safetensors format names them.
_DTYPES = {
  'F64': 'float64',
  'F32': 'float32',
  'F16': 'float16',
  'BF16': 'bfloat16',
}


class Tensor(NamedTuple):
  """A tensor that is to be written.

  Attributes:
    shape: its shape.
    dtype: its dtype.
    make: gives the array, when its file is written.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[], np.ndarray]

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


def published_tensors(
  layout: families.Layout,
  params: transformer.Params,
  *,
  entries: Mapping[str, shards.Entry] | None = None,
  dtype: str | None = None,
) -> dict[str, Tensor]:
  """The tensors of a published layout, from parameters.

  Args:
    layout: which tensor is made of which parameters.
    params: as `transformer.init` nests them.
    entries: the tensors of the files that the parameters are from: theirs are
      the order, the dtypes, and which copies and buffers there are. None: all
      buffers, no copies.
    dtype: of all tensors; None: of the entries, else of the parameters.

  Returns:
    Tensors by key.
  """
  leaves = param_tree.flat(params)
  keys = [*layout.tensors, *layout.buffers] if entries is None else entries

  def of(key):
    mapping = layout.tensors.get(layout.copies.get(key, key))
    if mapping is None:
      array = np.asarray(layout.buffers[key].value)
      kind, make = array, lambda: array
    else:
      parts = [leaves[name] for name in mapping.leaves]
      kind = jax.eval_shape(
        lambda *parts: mapping.to_file(*(x[mapping.index] for x in parts)),
        *parts,
      )

      def make():
        return mapping.to_file(*(x[mapping.index] for x in parts))

    name = dtype
    if name is None and entries is not None:
      name = _DTYPES[entries[key].dtype]
      if entries[key].dtype == 'F64':  # Parameters are float32 at most.
        raise ValueError(
          f'{key} is float64, of which only float32 was read; name the dtype '
          'to be written'
        )
    kept = jnp.dtype(name or kind.dtype)
    return Tensor(
      tuple(kind.shape),
      kept,
      lambda: np.asarray(np.asarray(make()).astype(kept), order='C'),
    )

  return {key: of(key) for key in keys}


def write_tensors(
  directory: str | os.PathLike,
  tensors: Mapping[str, Tensor],
  *,
  max_bytes: int,
  metadata: Mapping[str, str] | None = None,
) -> list[str]:
  """Writes .safetensors files, one after another, as hubs lay them out.

  One `model.safetensors` where all tensors fit into `max_bytes`; else numbered
  files of at most so many bytes, or of one tensor that is larger, and
  `model.safetensors.index.json`.

  Args:
    directory: exists.
    tensors: by key, in the order in which they are written.
    max_bytes: of the tensors of a file, at least 1.
    metadata: text for the headers of the files.

  Returns:
    Names of the files with tensors.

  Raises:
    ValueError: `max_bytes` is not positive.
  """
  if max_bytes < 1:
    raise ValueError(f'{max_bytes=} must be at least 1')
  groups, size = [[]], 0
  for key, tensor in tensors.items():
    if groups[-1] and size + tensor.num_bytes > max_bytes:
      groups.append([])
      size = 0
    groups[-1].append(key)
    size += tensor.num_bytes
  names = [shards.SINGLE]
  if len(groups) > 1:
    names = [_NUMBERED.format(i + 1, len(groups)) for i in range(len(groups))]
  directory = pathlib.Path(directory)
  for name, keys in zip(names, groups, strict=True):
    safetensors.numpy.save_file(
      {key: tensors[key].make() for key in keys},
      directory / name,
      # Without a format the published code does not read them.
      metadata={'format': 'pt', **(metadata or {})},
    )
  if len(groups) > 1:
    index = {
      'metadata': {'total_size': sum(x.num_bytes for x in tensors.values())},
      'weight_map': {
        key: name
        for name, keys in zip(names, groups, strict=True)
        for key in keys
      },
    }
    (directory / shards.INDEX).write_text(json.dumps(index, indent=2) + '\n')
  return names


def as_published(
  config: TransformerConfig, params: transformer.Params, vocab: Vocab
) -> tuple[dict[str, Any], transformer.Params]:
  """A model in the closest published layout, the same function of its ids.

  Logits of the next slot: Dream, which has biases of queries, keys and values,
  0 where the model has none. Norms of each head: A2D-Qwen3. Else LLaDA. What
  these do not have is folded into the tables of embeddings and of the head,
  where that rounds nothing: the scale of the embedded ids, and a power of two
  as the scale of the logits. A head that is tied to the embeddings is untied
  for it.

  Args:
    config: shape of the network.
    params: its parameters.
    vocab: roles of the ids.

  Returns:
    The content of config.json, and the parameters of `families.layout` of it.

  Raises:
    ValueError: no published layout has such a network; names the fields.
  """
  params = {**params, 'blocks': dict(params['blocks'])}
  config = dataclasses.replace(config, dtype='float32')
  of_llada = not config.shifted and config.qk_norm != 'head'
  config, params = _without_scales(config, params, of_llada)
  if config.shifted and not config.qkv_bias:
    config = dataclasses.replace(config, qkv_bias=True)
    for name in ('query', 'key', 'value'):
      kernel = params['blocks'][name]['kernel']
      bias = jnp.zeros((*kernel.shape[:1], kernel.shape[-1]), kernel.dtype)
      params['blocks'][name] = {'kernel': kernel, 'bias': bias}
  content = (_llada if of_llada else _qwen)(config) | _roles(vocab)
  found = families.layout(content).config
  differing = [
    f'{field.name}={getattr(config, field.name)!r}'
    for field in dataclasses.fields(config)
    if _meaning(config, field.name) != _meaning(found, field.name)
  ]
  if differing:
    raise ValueError(
      f'{content["architectures"][0]}, the closest published layout, cannot '
      f'express {", ".join(differing)}'
    )
  return content, params


def _meaning(config, name):
  """A field's value, one for all ways to write it."""
  ways = {'num_kv_heads': config.kv_heads, 'head_width': config.head_dim}
  return ways.get(name, getattr(config, name))


def _without_scales(config, params, of_llada):
  """The same network with factors that a published layout has."""
  scale, logit_scale = layers.embedding_scale(config), config.logit_scale
  # Those two that LLaDA's configuration can ask for.
  kept_scale, kept_logit_scale = 1.0, 1.0
  if of_llada and scale == config.model_dim**0.5:
    kept_scale = scale
  if of_llada and logit_scale == config.model_dim**-0.5:
    kept_logit_scale = logit_scale
  embedding = params['embedding']
  head = embedding if config.tied_head else params['head']
  tied = config.tied_head
  if scale != kept_scale:
    # What the network itself does with a row, so nothing is rounded anew.
    params, tied = {**params, 'embedding': embedding * scale}, False
  if logit_scale != kept_logit_scale:
    if math.frexp(logit_scale)[0] != 0.5:
      raise ValueError(
        f'logit_scale={logit_scale} is in no published layout, and not being a '
        'power of two it cannot be folded into the head without rounding'
      )
    head, tied = head * logit_scale, False
  if not tied:
    params = {**params, 'head': head}
  config = dataclasses.replace(
    config,
    embedding_scale=kept_scale,
    logit_scale=kept_logit_scale,
    tied_head=tied,
  )
  return config, params


def _roles(vocab):
  eos_ids = list(vocab.eos_ids)
  return {
    'mask_token_id': vocab.mask_id,
    'pad_token_id': vocab.pad_id,
    'bos_token_id': vocab.bos_id,
    'eos_token_id': eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
  }


def _llada(config):
  return {
    'architectures': ['LLaDAModelLM'],
    'model_type': 'llada',
    'activation_type': 'silu',
    'alibi': False,
    'attention_dropout': 0.0,
    'attention_layer_norm': config.qk_norm is not None,
    'attention_layer_norm_with_affine': True,
    'bias_for_layer_norm': False,
    'block_group_size': 1,
    'block_type': 'llama',
    'd_model': config.model_dim,
    'embedding_dropout': 0.0,
    'embedding_size': config.vocab_size,
    'flash_attention': False,
    'include_bias': False,
    'include_qkv_bias': config.qkv_bias,
    'init_device': 'meta',
    'input_emb_norm': config.embedding_scale != 1,
    'layer_norm_type': 'rms',
    'layer_norm_with_affine': True,
    'max_sequence_length': config.max_length,
    'mlp_hidden_size': config.mlp_dim,
    'mlp_ratio': 4,
    'multi_query_attention': None,
    'n_heads': config.num_heads,
    'n_kv_heads': config.kv_heads,
    'n_layers': config.num_layers,
    'residual_dropout': 0.0,
    'rms_norm_eps': config.norm_eps,
    'rope': True,
    'rope_full_precision': True,
    'rope_theta': config.rope_base,
    'scale_logits': config.logit_scale != 1,
    'use_cache': False,
    'vocab_size': config.vocab_size,
    'weight_tying': config.tied_head,
  }


def _qwen(config):
  dream = {'architectures': ['DreamModel'], 'model_type': 'Dream'}
  a2d = {
    'architectures': ['A2DQwen3LMHeadModel'],
    'model_type': 'a2d-qwen3',
    'attention_bias': False,
    'head_dim': config.head_dim,
  }
  return (dream if config.shifted else a2d) | {
    'attention_dropout': 0.0,
    'hidden_act': 'silu',
    'hidden_size': config.model_dim,
    'intermediate_size': config.mlp_dim,
    'max_position_embeddings': config.max_length,
    'num_attention_heads': config.num_heads,
    'num_hidden_layers': config.num_layers,
    'num_key_value_heads': config.kv_heads,
    'rms_norm_eps': config.norm_eps,
    'rope_scaling': None,
    'rope_theta': config.rope_base,
    'sliding_window': None,
    'tie_word_embeddings': config.tied_head,
    'use_sliding_window': False,
    'vocab_size': config.vocab_size,
  }
