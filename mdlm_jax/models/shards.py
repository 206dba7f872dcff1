"""The tensors of a directory of .safetensors files, read one at a time."""

import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import safetensors

from mdlm_jax.models import json_files

# Names of the one file, and of the index of many.
SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
_PICKLES = ('*.bin', '*.pt', '*.pth', '*.ckpt')
# What safetensors calls them.
_FLOATS = {'F64': 64, 'F32': 32, 'F16': 16, 'BF16': 16}


class Entry(NamedTuple):
  """What a file's header says of a tensor.

  Attributes:
    path: the file that holds it.
    shape: its shape.
    dtype: as the safetensors format names it, such as 'BF16'.
  """

  path: pathlib.Path
  shape: tuple[int, ...]
  dtype: str


def entries(directory: str | os.PathLike) -> dict[str, Entry]:
  """Every tensor of the directory by its key; no data is read.

  `model.safetensors` if there is one, else the files that
  `model.safetensors.index.json` names, else all .safetensors files.

  Raises:
    FileNotFoundError: no weights, or a file that the index names is missing.
    ValueError: weights only as pickles, which can run any code; a damaged or
      truncated file; a key in two files; a tensor that is no float.
  """
  found = {}
  for path in _files(pathlib.Path(directory)):
    with _opened(path) as file:
      for key in file.keys():  # noqa: SIM118
        if key in found:
          raise ValueError(f'{key} is in {found[key].path} and in {path}')
        part = file.get_slice(key)
        entry = Entry(path, tuple(part.get_shape()), str(part.get_dtype()))
        if entry.dtype not in _FLOATS:
          raise ValueError(
            f'{path}: {key} has dtype {entry.dtype}, must be one of '
            f'{", ".join(_FLOATS)}; quantized weights are not read'
          )
        found[key] = entry
  return found


def dtype_of(entries: Iterable[Entry]) -> str:
  """'bfloat16' where no tensor holds more, else 'float32'."""
  names = {entry.dtype for entry in entries}
  return 'bfloat16' if names == {'BF16'} else 'float32'


def tensors(entries: dict[str, Entry]) -> Iterator[tuple[str, np.ndarray]]:
  """Keys and arrays, file by file; one file is open and one array in memory.

  Raises:
    ValueError: a file that changed or cannot be read.
  """
  by_file = {}
  for key, entry in entries.items():
    by_file.setdefault(entry.path, []).append(key)
  for path, keys in by_file.items():
    with _opened(path) as file:
      for key in keys:
        yield key, file.get_tensor(key)


def _opened(path):
  if not path.is_file():
    raise FileNotFoundError(f'no such file: {path}')
  try:
    return safetensors.safe_open(path, framework='np')
  except safetensors.SafetensorError as error:
    raise ValueError(
      f'{path} is damaged or truncated, or no safetensors file: {error}'
    ) from None


def _files(directory):
  if (directory / SINGLE).exists():
    return [directory / SINGLE]
  if (directory / INDEX).exists():
    return [directory / name for name in _indexed(directory / INDEX)]
  files = sorted(directory.glob('*.safetensors'))
  if files:
    return files
  pickles = sorted(p.name for kind in _PICKLES for p in directory.glob(kind))
  if pickles:
    raise ValueError(
      f'{directory} has {", ".join(pickles)}: pickles can run any code and are '
      'not read; get the .safetensors files from the hub, or write them with '
      'safetensors.torch.save_file where you trust the pickle'
    )
  raise FileNotFoundError(f'no .safetensors file in {directory}')


def _indexed(path):
  """Names of the files of an index."""
  weight_map = json_files.read(path).get('weight_map')
  names = set()
  if isinstance(weight_map, dict):
    names = {str(name) for name in weight_map.values()}
  if not names or any(pathlib.Path(name).name != name for name in names):
    raise ValueError(
      f'{path} must have a weight_map from keys to file names of its directory'
    )
  return sorted(names)
