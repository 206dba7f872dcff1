"""Language models in one file of the GGUF format (llama.cpp).

Its tensors may be quantized; they are read as float32, one at a time. Needs the
package `gguf`, of the extra `judge`.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

from mdlm_jax.models.shards import Entry

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
# How text is cut before byte pairs are merged, by tokenizer.ggml.pre.
_PRE_TOKENIZERS = {
  'gpt-2': _BYTES,
  'smollm': pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), _BYTES]
  ),
}
_USER_DEFINED = 4  # A token that is cut out of the text before anything else.


class GgufFile(NamedTuple):
  """What a file holds.

  Attributes:
    fields: its metadata, such as 'llama.block_count'.
    entries: its tensors by name, the rows first in their shapes.
    reader: the library's reader, for `tensors`.
  """

  fields: dict[str, Any]
  entries: dict[str, Entry]
  reader: Any

  def tensors(
    self, entries: dict[str, Entry]
  ) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 arrays of some of the tensors, one after another.

    Raises:
      ValueError: a kind of quantization that the library does not read.
    """
    quants = _library().quants
    for tensor in self.reader.tensors:
      if tensor.name not in entries:
        continue
      try:
        yield tensor.name, quants.dequantize(tensor.data, tensor.tensor_type)
      except NotImplementedError:
        raise ValueError(
          f'{entries[tensor.name].path}: {tensor.name} has dtype '
          f'{tensor.tensor_type.name}, which the package gguf does not read'
        ) from None


def read(path: str | os.PathLike) -> GgufFile:
  """Opens a file; its tensors stay on disk.

  Raises:
    ModuleNotFoundError: the package gguf is not installed; names the extra.
    FileNotFoundError: no such file.
    ValueError: a damaged file, or one of another format.
  """
  path = pathlib.Path(path)
  library = _library()
  if not path.is_file():
    raise FileNotFoundError(f'no such file: {path}')
  try:
    reader = library.GGUFReader(path)
    fields = {name: x.contents() for name, x in reader.fields.items()}
  except Exception as error:  # The library raises nothing more specific.
    raise ValueError(
      f'{path} is damaged or truncated, or no GGUF file: {error}'
    ) from None
  entries = {
    tensor.name: Entry(
      path,
      tuple(int(size) for size in reversed(tensor.shape)),
      tensor.tensor_type.name,
    )
    for tensor in reader.tensors
  }
  return GgufFile(fields, entries, reader)


def tokenizer(fields: dict[str, Any]) -> tokenizers.Tokenizer:
  """The tokenizer of a file: byte pairs on the bytes of the text.

  Control tokens, such as the end of a text, are not looked for in the text.

  Args:
    fields: the file's metadata.

  Raises:
    ValueError: another kind of tokenizer, or a field that is missing.
  """
  kind = fields.get('tokenizer.ggml.model')
  cut = fields.get('tokenizer.ggml.pre')
  if kind != 'gpt2' or cut not in _PRE_TOKENIZERS:
    raise ValueError(
      f'tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={cut!r} is not '
      f'supported, must be gpt2 with one of {", ".join(_PRE_TOKENIZERS)}; a '
      'directory with a tokenizer.json may hold any tokenizer'
    )
  try:
    tokens = fields['tokenizer.ggml.tokens']
    merges = [tuple(x.split(' ')) for x in fields['tokenizer.ggml.merges']]
    kinds = fields['tokenizer.ggml.token_type']
    model = tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges)
  except Exception as error:  # The library raises nothing more specific.
    raise ValueError(f'no tokenizer in the file: {error}') from None
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = _PRE_TOKENIZERS[cut]
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_tokens(
    [
      tokenizers.AddedToken(token, normalized=False)
      for token, kind in zip(tokens, kinds, strict=True)
      if kind == _USER_DEFINED
    ]
  )
  return backend


def bos_id(fields: dict[str, Any]) -> int | None:
  """The id before every text, None for a model that begins without one."""
  if not fields.get('tokenizer.ggml.add_bos_token', False):
    return None
  return fields.get('tokenizer.ggml.bos_token_id')


def _library():
  try:
    import gguf
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      "a .gguf file needs the package gguf; pip install 'mdlm_jax[judge]'",
      name=error.name,
    ) from None
  return gguf
