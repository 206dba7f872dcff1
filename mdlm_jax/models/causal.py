"""Causal language models, from the directory or the file that holds them.

They have no MASK, so they are not a `Pretrained`: nothing can be sampled from
them here. They judge texts (`mdlm_jax.sample_quality.judge`).
"""

import dataclasses
import os
import pathlib
from typing import NamedTuple

import tokenizers

from mdlm_jax import predict
from mdlm_jax.models import (
  families,
  gguf_file,
  hub_tokenizer,
  json_files,
  published,
  shards,
  transformer,
)
from mdlm_jax.models.families import llama


class CausalModel(NamedTuple):
  """A causal language model and its tokenizer.

  Attributes:
    config: shape of the network.
    denoiser: the network; the hidden state at a slot, which sees what is before
      it, gives the logits of the next token.
    params: nested dict of arrays.
    backend: the tokenizer.
    bos_id: the id with which its texts begin, None if they begin without one.
  """

  config: transformer.TransformerConfig
  denoiser: predict.Denoiser
  params: transformer.Params
  backend: tokenizers.Tokenizer
  bos_id: int | None

  def encode(self, text: str) -> list[int]:
    """The ids of a text, without any that begin or end it.

    The name of a special token that stands in the text is text.
    """
    return self.backend.encode(text, add_special_tokens=False).ids


def load(path: str | os.PathLike, *, dtype: str = 'float32') -> CausalModel:
  """Reads a causal language model.

  Args:
    path: a directory as it was downloaded from a hub, with config.json,
      tokenizer.json and .safetensors files, of a causal architecture (see
      `families`); or a .gguf file with Llama layers and a tokenizer of byte
      pairs.
    dtype: of the parameters and of the network, 'float32' or 'bfloat16'.

  Raises:
    OSError: a file is missing or cannot be read.
    ValueError: an architecture, a setting or a tokenizer that is not known;
      damaged files; as `published.load_params`.
    ModuleNotFoundError: a .gguf file without the extra `judge`.
  """
  path = pathlib.Path(path)
  is_file = path.suffix == '.gguf' or path.is_file()
  parts = _of_file(path) if is_file else _of_directory(path)
  layout, entries, tensors, backend, bos_id = parts
  config = dataclasses.replace(layout.config, dtype=dtype)
  params = published.load_params(layout, entries, dtype, tensors=tensors)
  network = transformer.denoiser(config)
  return CausalModel(config, network, params, backend, bos_id)


def _of_directory(path):
  layout = families.causal_layout(json_files.read(path / 'config.json'))
  backend = hub_tokenizer.read_files(path).backend
  if backend is None:
    raise ValueError(f'{path} has no tokenizer.json to read texts with')
  backend.encode_special_tokens = True
  entries = shards.entries(path)
  return layout, entries, shards.tensors, backend, _bos_id(backend)


def _of_file(path):
  file = gguf_file.read(path)
  shapes = {name: entry.shape for name, entry in file.entries.items()}
  try:
    layout = llama.gguf_llama(file.fields, shapes)
    backend = gguf_file.tokenizer(file.fields)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from None
  bos_id = gguf_file.bos_id(file.fields)
  return layout, file.entries, file.tensors, backend, bos_id


def _bos_id(backend):
  """What the tokenizer itself writes before a text, if anything."""
  alone = backend.encode('a', add_special_tokens=False).ids
  first = backend.encode('a', add_special_tokens=True).ids[0]
  return None if first == alone[0] else first
