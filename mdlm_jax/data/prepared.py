"""Tokenised documents on disk, at random access.

prepared.json               what is here and what it was made of
tokenizer.json              in the layout of the tokenizers library
training/00000.arrayrecord  a record per document: how many of its tokens are
                            given, as uint32, then its ids, as uint16 or uint32
training/lengths.npy        tokens of each document
training/num_given.npy      how many of them are given
validation/                 the same, if anything is held out

All numbers are little endian. `preparation` writes such a directory. Needs
array_record, of the extra `train`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_record.python import array_record_module
from jaxtyping import Int

from mdlm_jax.models import hub_tokenizer, json_files
from mdlm_jax.tokenizer import Tokenizer
from mdlm_jax.vocab import Vocab

FORMAT = 1
PARTS = ('training', 'validation')
RECORD, TOKENIZER = 'prepared.json', 'tokenizer.json'
UNFINISHED = 'unfinished.json'  # There until RECORD is.
LENGTHS, NUM_GIVEN = 'lengths.npy', 'num_given.npy'
# Files that stay open; shards may be more than a process may open.
_MOST_OPEN = 256
_HEADER = np.dtype('<u4')
# A record is read alone and not after those before it.
_READ_OPTIONS = 'readahead_buffer_size:0,max_parallelism:0'
_WRITE_OPTIONS = 'group_size:1'


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentsOnDisk:
  """Tokenised documents in a fixed order; lengths are known without reading.

  Attributes:
    lengths: tokens of each document, at least 1. Shape `[N]`.
    num_given: how many of them are given: at the beginning and never masked,
      as a prompt or BOS. Shape `[N]`.
    shards: the files and how many documents each has, in order.
    dtype: of the ids in the files.
  """

  lengths: Int[np.ndarray, 'N']
  num_given: Int[np.ndarray, 'N']
  shards: tuple[tuple[pathlib.Path, int], ...]
  dtype: np.dtype

  def __len__(self) -> int:
    return len(self.lengths)

  def ids_of(self, indices: Sequence[int] | Int[np.ndarray, 'B']) -> list:
    """Ids of some documents, int32, one array each.

    Args:
      indices: from 0 to `len(self)` - 1, in any order, also repeated.

    Raises:
      IndexError: an index out of range.
      ValueError: a damaged file.
    """
    indices = np.asarray(indices, np.int64)
    if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
      raise IndexError(
        f'documents {indices.min()} to {indices.max()} of {len(self)}'
      )
    shards = np.searchsorted(self._ends, indices, side='right')
    found = [None] * len(indices)
    for shard in np.unique(shards):
      slots = np.flatnonzero(shards == shard)
      path, count = self.shards[shard]
      records = indices[slots] - (self._ends[shard] - count)
      contents = self._read(path, count, records.tolist())
      for slot, content in zip(slots, contents, strict=True):
        found[slot] = self._ids(path, indices[slot], content)
    return found

  @functools.cached_property
  def _ends(self):
    """How many documents there are up to the end of each shard."""
    return np.cumsum([count for _, count in self.shards], dtype=np.int64)

  @functools.cached_property
  def _open(self):
    # A reader that is dropped closes its file once no thread reads from it.
    return functools.lru_cache(_MOST_OPEN)(_open_shard)

  def _read(self, path, count, records):
    reader = self._open(path, count)
    try:
      return reader.read(records)
    except RuntimeError as error:
      raise ValueError(f'{path} is damaged: {error}') from None

  def _ids(self, path, index, content):
    ids = np.frombuffer(content, self.dtype, offset=_HEADER.itemsize)
    given = int(np.frombuffer(content, _HEADER, count=1)[0])
    if (len(ids), given) != (self.lengths[index], self.num_given[index]):
      raise ValueError(
        f'{path} is damaged: document {index} has {len(ids)} tokens, {given} '
        f'of them given, and must have {self.lengths[index]} and '
        f'{self.num_given[index]}'
      )
    return ids.astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
  """What a prepared directory holds.

  Attributes:
    training: documents to train on.
    validation: documents held out, perhaps none.
    tokenizer: text to ids and back; its `vocab` has the roles of the ids.
    record: the content of prepared.json.
    digest: SHA-256 of the documents, their order and the tokenizer, in
      hexadecimal.
  """

  training: DocumentsOnDisk
  validation: DocumentsOnDisk
  tokenizer: Tokenizer | hub_tokenizer.HubTokenizer
  record: dict[str, Any]
  digest: str

  @property
  def vocab(self) -> Vocab:
    return self.tokenizer.vocab


def open_prepared(directory: str | os.PathLike) -> Prepared:
  """Opens what `preparation.prepare` wrote; no document is read yet.

  Raises:
    FileNotFoundError: the directory holds no prepared data.
    ValueError: it is unfinished, damaged or of another version; says how.
  """
  directory = pathlib.Path(directory)
  path = directory / RECORD
  if not path.exists():
    if (directory / UNFINISHED).exists():
      raise ValueError(
        f'{directory} is not prepared to the end; the command that began it '
        'goes on where it stopped'
      )
    raise FileNotFoundError(f'no prepared data in {directory}: no {RECORD}')
  record = json_files.read(path)
  if record.get('format') != FORMAT:
    raise ValueError(
      f'{path} has format {record.get("format")!r}, this version reads {FORMAT}'
    )
  try:
    tokenizer = _tokenizer(directory, record)
    training, validation = (
      _documents(directory / part, record['parts'][part], record['dtype'])
      for part in PARTS
    )
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{path} is damaged: {error!r}') from None
  return Prepared(training, validation, tokenizer, record, _digest(record))


class ShardWriter:
  """A shard while it is written; it has its own name once it is whole.

  Attributes:
    lengths: tokens of the documents so far.
    num_given: how many of them are given.
  """

  def __init__(self, path: pathlib.Path, dtype: np.dtype):
    """Begins a shard.

    Args:
      path: its file.
      dtype: of the ids, see `id_dtype`.
    """
    self.lengths: list[int] = []
    self.num_given: list[int] = []
    self._path, self._dtype = path, dtype
    self._unfinished = unfinished(path)
    self._writer = array_record_module.ArrayRecordWriter(
      str(self._unfinished), _WRITE_OPTIONS
    )

  def write(self, ids: Int[np.ndarray, 'n'], num_given: int) -> None:
    """Adds a document.

    Raises:
      OSError: it cannot be written, as on a full disk.
    """
    header = np.array(num_given, _HEADER).tobytes()
    with self._errors():
      self._writer.write(header + ids.astype(self._dtype).tobytes())
    self.lengths.append(len(ids))
    self.num_given.append(num_given)

  def finish(self) -> dict[str, Any]:
    """Gives the shard its name; what prepared.json says of it.

    Raises:
      OSError: as `write`.
    """
    with self._errors():
      self._writer.close()
    digest, size = (
      file_digest(self._unfinished),
      self._unfinished.stat().st_size,
    )
    finish(self._unfinished, self._path)
    return {
      'name': self._path.name,
      'documents': len(self.lengths),
      'bytes': size,
      'sha256': digest,
    }

  @contextlib.contextmanager
  def _errors(self):
    try:
      yield
    except RuntimeError as error:  # The library raises nothing more specific.
      raise OSError(f'{self._path} cannot be written: {error}') from None


def unfinished(path: pathlib.Path, *, process: str = '') -> pathlib.Path:
  """What a file of a process is called until it is whole; '': this process."""
  return path.with_name(f'.{path.name}.{process or os.getpid()}.tmp')


def finish(written: pathlib.Path, path: pathlib.Path) -> None:
  """Gives a whole file its name, so that it is never seen in part."""
  with open(written, 'rb') as file:
    os.fsync(file.fileno())
  written.replace(path)


def write(path: pathlib.Path, content: str) -> None:
  """Writes or replaces a text file, see `finish`."""
  written = unfinished(path)
  written.write_text(content, 'utf-8')
  finish(written, path)


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
  """Writes or replaces a JSON file, see `finish`."""
  write(path, json.dumps(content, indent=2) + '\n')


def write_index(
  folder: pathlib.Path,
  lengths: Int[np.ndarray, 'N'],
  num_given: Int[np.ndarray, 'N'],
) -> None:
  """Writes the numbers of the documents of a part."""
  for name, values in ((LENGTHS, lengths), (NUM_GIVEN, num_given)):
    written = unfinished(folder / name)
    with open(written, 'wb') as file:
      np.save(file, np.asarray(values, '<i4'))
    finish(written, folder / name)


def id_dtype(vocab: Vocab) -> np.dtype:
  """The integers that ids are stored as."""
  return np.dtype('<u2' if vocab.size <= 2**16 else '<u4')


def _tokenizer(directory, record):
  path = directory / TOKENIZER
  _check_file(path)
  if file_digest(path) != record['tokenizer_sha256']:
    raise ValueError(f'{path} is not the tokenizer that {RECORD} tells of')
  vocab = Vocab(**record['vocab'])
  if record['hub_tokenizer']:
    backend = hub_tokenizer.read_files(directory).backend
    return hub_tokenizer.HubTokenizer(backend, vocab)
  tokenizer = Tokenizer.load(path)
  if tokenizer.vocab != vocab:
    raise ValueError(f'{path} has {tokenizer.vocab}, {RECORD} has {vocab}')
  return tokenizer


def _documents(folder, part, dtype):
  shards = []
  for shard in part['shards']:
    path = folder / shard['name']
    _check_file(path)
    size = path.stat().st_size
    if size != shard['bytes']:
      raise ValueError(
        f'{path} is damaged: it has {size} bytes, must have {shard["bytes"]}'
      )
    shards.append((path, shard['documents']))
  count = sum(count for _, count in shards)
  lengths, num_given = (
    _index(folder / name, count) for name in (LENGTHS, NUM_GIVEN)
  )
  tokens = int(lengths.sum(dtype=np.int64))
  if (count, tokens) != (part['documents'], part['tokens']):
    raise ValueError(
      f'{folder} is damaged: it has {count} documents of {tokens} tokens, must '
      f'have {part["documents"]} of {part["tokens"]}'
    )
  return DocumentsOnDisk(lengths, num_given, tuple(shards), np.dtype(dtype))


def _index(path, count):
  """One number a document, read as it is needed."""
  if not count:  # Nothing is held out: there is no file.
    return np.zeros(0, np.int32)
  _check_file(path)
  try:
    values = np.load(path, mmap_mode='r')
  except (ValueError, EOFError, OSError) as error:
    raise ValueError(f'{path} is damaged: {error}') from None
  if values.shape != (count,) or values.dtype != np.int32:
    raise ValueError(
      f'{path} is damaged: {values.dtype} {values.shape}, must be int32 '
      f'{(count,)}'
    )
  return values


def _check_file(path):
  if not path.is_file():
    raise ValueError(f'{path} is missing')


def _open_shard(path, count):
  _check_file(path)
  reader = array_record_module.ArrayRecordReader(str(path), _READ_OPTIONS)
  # A file that is no ArrayRecord opens as one without records.
  if not reader.ok() or reader.num_records() != count:
    raise ValueError(
      f'{path} is damaged: it has {reader.num_records()} documents, must have '
      f'{count}'
    )
  return reader


def file_digest(path: pathlib.Path) -> str:
  """SHA-256 of a file, in hexadecimal."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _digest(record):
  told = {key: record[key] for key in ('dtype', 'tokenizer_sha256', 'vocab')}
  shards = {
    part: [shard['sha256'] for shard in record['parts'][part]['shards']]
    for part in PARTS
  }
  content = json.dumps([told, shards], sort_keys=True)
  return hashlib.sha256(content.encode()).hexdigest()
