"""Text to batches: corpora, windows and the training pipeline.

A corpus is a list of documents. A tokenizer turns each into ids; windows of a
fixed length are cut inside documents, never across them; `batches` shuffles
every window start with Grain. Corruption is not done here: it belongs to the
jitted train step, where its key is a function of (seed, step, row).
"""

import glob
import hashlib
import itertools
import json
import os
import pathlib
import pydoc_data.topics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from mdlm_jax.tokenizer import Tokenizer, character_tokenizer, train_bpe


class Document(NamedTuple):
  """A text and where it came from."""

  name: str
  text: str


class Corpus(NamedTuple):
  """Documents by use. `test` may be empty."""

  training: tuple[Document, ...]
  validation: tuple[Document, ...]
  test: tuple[Document, ...] = ()


def default_documents() -> tuple[Document, ...]:
  """English text that ships with Python: its topics help, as one document."""
  text = '\n\n'.join(pydoc_data.topics.topics.values())
  return (Document('pydoc_data.topics', text),)


def read_documents(files: str) -> tuple[Document, ...]:
  """Reads UTF-8 text files, one document each, sorted by path.

  Args:
    files: paths or glob patterns, separated by commas.

  Raises:
    FileNotFoundError: a path or pattern that matches nothing.
    ValueError: an empty file, or one that is not UTF-8 text.
  """
  paths = set()
  for pattern in filter(None, (p.strip() for p in files.split(','))):
    matches = [pattern] if os.path.exists(pattern) else []
    matches = matches or glob.glob(pattern, recursive=True)
    if not matches:
      raise FileNotFoundError(f'no such file: {pattern}')
    paths.update(matches)
  if not paths:
    raise FileNotFoundError(f'no file is named in {files!r}')
  return tuple(_read_document(path) for path in sorted(paths))


def _read_document(path: str) -> Document:
  content = pathlib.Path(path).read_bytes()
  try:
    text = content.decode('utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path} is not UTF-8 text: byte {content[error.start]:#04x} at offset '
      f'{error.start}'
    ) from error
  if '\0' in text:
    raise ValueError(
      f'{path} is a binary file: NUL byte at offset {content.index(0)}'
    )
  if not text.strip():
    raise ValueError(f'{path} is empty ({len(content)} bytes)')
  return Document(path, text)


def split_tail(
  documents: Sequence[Document], share: float = 0.05
) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
  """Cuts off the contiguous last `share` of all characters.

  Returns:
    The documents before the cut and those after it; the document that the cut
    goes through is in both, in two parts.
  """
  remaining = sum(len(d.text) for d in documents)
  remaining -= round(remaining * share)
  before, after = [], []
  for name, text in documents:
    if remaining > 0:
      before.append(Document(name, text[:remaining]))
    if remaining < len(text):
      after.append(Document(name, text[max(remaining, 0) :]))
    remaining -= len(text)
  return tuple(before), tuple(after)


def split_by_document(documents: Sequence[Document]) -> Corpus:
  """Every 20th document validates, ten later every 20th tests, the rest train.

  Raises:
    ValueError: fewer than two documents.
  """
  if len(documents) < 2:
    raise ValueError(
      "split 'document' needs at least 2 documents, got "
      f"{len(documents)}; use split 'tail'"
    )
  held_out = {0: 'validation', 10: 'test'}
  parts = {'training': [], 'validation': [], 'test': []}
  for index, document in enumerate(documents):
    parts[held_out.get(index % 20, 'training')].append(document)
  return Corpus(**{name: tuple(part) for name, part in parts.items()})


def read_corpus(
  files: str = '', *, validation_files: str = '', split: str = 'tail'
) -> Corpus:
  """Reads and splits a corpus.

  Args:
    files: paths or glob patterns, separated by commas; '' is the default
      corpus, `pydoc_data.topics`.
    validation_files: held-out text of its own; '' splits `files`.
    split: 'tail', the contiguous last 5 % of the characters validates, or
      'document', see `split_by_document`.

  Raises:
    FileNotFoundError, ValueError: see `read_documents`; an unknown split; a
      split by document together with `validation_files`.
  """
  if split not in ('tail', 'document'):
    raise ValueError(f"{split=} must be 'tail' or 'document'")
  documents = read_documents(files) if files else default_documents()
  if split == 'document':
    if validation_files:
      raise ValueError("split 'document' cannot be used with validation_files")
    return split_by_document(documents)
  if validation_files:
    return Corpus(documents, read_documents(validation_files))
  return Corpus(*split_tail(documents))


def corpus_digest(corpus: Corpus) -> str:
  """SHA-256 of all texts and of where they are split, in hexadecimal."""
  texts = [[document.text for document in part] for part in corpus]
  return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def corpus_of(settings: Mapping[str, Any]) -> Corpus:
  """The corpus that the part `data` of a config names, see `read_corpus`."""
  return read_corpus(
    settings['files'],
    validation_files=settings['validation_files'],
    split=settings['split'],
  )


def corpus_tokenizer(corpus: Corpus, bpe_vocab_size: int = 0) -> Tokenizer:
  """The tokenizer of a corpus.

  Args:
    corpus: byte pairs are learned from its training texts; characters are
      those of all texts, so that the held-out ones can be encoded.
    bpe_vocab_size: ids of the byte-pair encoding; 0: one id per character.
  """
  if bpe_vocab_size:
    return train_bpe([d.text for d in corpus.training], bpe_vocab_size)
  return character_tokenizer(''.join(d.text for d in itertools.chain(*corpus)))


class Windows(NamedTuple):
  """Windows of one length over the concatenated documents.

  Attributes:
    ids: int32, PAD where a document had to be filled up. Shape `[N]`.
    valid: False at the filling. Shape `[N]`.
    starts: where each window begins. Shape `[M]`.
    length: tokens per window.
  """

  ids: Int[np.ndarray, 'N']
  valid: Bool[np.ndarray, 'N']
  starts: Int[np.ndarray, 'M']
  length: int

  def take(
    self, indices: Int[np.ndarray, 'B']
  ) -> tuple[Int[np.ndarray, 'B L'], Bool[np.ndarray, 'B L']]:
    """Ids and validity of the windows `indices`, `[B, L]` each."""
    slots = self.starts[indices][:, None] + np.arange(self.length)
    return self.ids[slots], self.valid[slots]


def cut_windows(
  documents: Sequence[Int[np.ndarray, '...']],
  *,
  length: int,
  stride: int,
  pad_id: int,
) -> Windows:
  """Windows that start every `stride` tokens and cover each document.

  The last window of a document is filled up with PAD where necessary; an
  empty document gives none.

  Args:
    documents: ids of each document, `[n]` each.
    length: tokens per window, at least 1.
    stride: distance of two starts, 1 to `length`.
    pad_id: the filling.
  """
  if not 1 <= stride <= length:
    raise ValueError(f'{stride=} must be from 1 to {length=}')
  ids, valid, starts, offset = [], [], [], 0
  for document in filter(len, documents):
    count = 1 + -(-max(len(document) - length, 0) // stride)
    filling = (count - 1) * stride + length - len(document)
    ids += [document, np.full(filling, pad_id)]
    valid += [np.ones(len(document), bool), np.zeros(filling, bool)]
    starts.append(offset + stride * np.arange(count))
    offset += len(document) + filling
  if not ids:
    raise ValueError('no text to cut windows from')
  return Windows(
    np.concatenate(ids).astype(np.int32),
    np.concatenate(valid),
    np.concatenate(starts),
    length,
  )


def training_windows(
  documents: Sequence[Document], tokenizer: Tokenizer, length: int
) -> Windows:
  """Every window start of every document.

  Raises:
    ValueError: no document is as long as a window.
  """
  encoded = [tokenizer.encode(document.text) for document in documents]
  longest = int(np.argmax([len(ids) for ids in encoded]))
  if len(encoded[longest]) < length:
    raise ValueError(
      f'{documents[longest].name}: {len(encoded[longest])} tokens to train on, '
      f'fewer than the sequence length {length}'
    )
  return cut_windows(
    encoded, length=length, stride=1, pad_id=tokenizer.vocab.pad_id
  )


def consecutive_windows(
  documents: Sequence[Document], tokenizer: Tokenizer, length: int
) -> Windows:
  """Windows side by side: every token of every document exactly once."""
  return cut_windows(
    [tokenizer.encode(document.text) for document in documents],
    length=length,
    stride=length,
    pad_id=tokenizer.vocab.pad_id,
  )


def batches(windows: Windows, *, batch_size: int, seed: int) -> Iterator[dict]:
  """Endless batches of shuffled windows, each window once per epoch.

  Needs grain. The iterator has `get_state` and `set_state`; a restored one
  goes on with the very next batch.

  Raises:
    ValueError: `batch_size` is below 1.

  Yields:
    `ids` int32 `[B, L]`, `valid` bool `[B, L]` and `row_ids` int32 `[B]`, the
    rows' ids within the global batch.
  """
  import grain  # Of the extra `train`; nothing else here needs it.

  if batch_size < 1:
    raise ValueError(f'{batch_size=} must be at least 1')

  def batch(indices):
    ids, valid = windows.take(indices)
    return {
      'ids': ids,
      'valid': valid,
      'row_ids': np.arange(len(indices), dtype=np.int32),
    }

  dataset = grain.MapDataset.range(len(windows.starts)).seed(seed).shuffle()
  dataset = dataset.repeat().batch(batch_size).map(batch)
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
  return iter(dataset.to_iter_dataset(options))
