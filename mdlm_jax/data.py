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
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from mdlm_jax.checks import check_integer
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


_DIGITS = (
  *('zero', 'one', 'two', 'three', 'four'),
  *('five', 'six', 'seven', 'eight', 'nine'),
)


def text8_of(text: str) -> str:
  """A text in the 27 symbols of text8: lower-case a to z and single spaces.

  Digits are spelled out, everything else becomes a space (M. Mahoney, Large
  text compression benchmark, without its steps for markup). A text that is in
  this form stays as it is.

  Example:
    >>> text8_of('In 1790, Mr. Adams')
    'in one seven nine zero mr adams'
  """
  text = re.sub('[0-9]', lambda digit: f' {_DIGITS[int(digit[0])]} ', text)
  text = re.sub('[^a-z]+', ' ', text.lower())
  return text.strip()


def in_text8(documents: Sequence[Document]) -> tuple[Document, ...]:
  """The documents as `text8_of` writes them.

  Raises:
    ValueError: a document of which nothing is left.
  """
  documents = tuple(Document(name, text8_of(text)) for name, text in documents)
  for name, text in documents:
    if not text:
      raise ValueError(f'{name} holds no letter and no digit')
  return documents


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
  files: str = '',
  *,
  validation_files: str = '',
  split: str = 'tail',
  text8: bool = False,
) -> Corpus:
  """Reads and splits a corpus.

  Args:
    files: paths or glob patterns, separated by commas; '' is the default
      corpus, `pydoc_data.topics`.
    validation_files: held-out text of its own; '' splits `files`.
    split: 'tail', the contiguous last 5 % of the characters validates; 'tails',
      the last 5 % tests and the 5 % before it validates, as is usual for
      text8; or 'document', see `split_by_document`.
    text8: whether the texts become those of `text8_of`.

  Raises:
    FileNotFoundError, ValueError: see `read_documents`; an unknown split; a
      split other than 'tail' together with `validation_files`.
  """
  if split not in ('tail', 'tails', 'document'):
    raise ValueError(f"{split=} must be 'tail', 'tails' or 'document'")
  if split != 'tail' and validation_files:
    raise ValueError(f'{split=} cannot be used with validation_files')

  def read(files):
    documents = read_documents(files) if files else default_documents()
    return in_text8(documents) if text8 else documents

  documents = read(files)
  if split == 'document':
    return split_by_document(documents)
  if split == 'tails':
    training, held_out = split_tail(documents, 0.1)
    return Corpus(training, *split_tail(held_out, 0.5))
  if validation_files:
    return Corpus(documents, read(validation_files))
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
    text8=settings.get('text8', False),
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


def every_window(
  documents: Sequence[Int[np.ndarray, '...']], *, length: int, pad_id: int
) -> Windows:
  """The windows that start at each token and end inside the document.

  A document that is shorter than a window gives one that is filled up with
  PAD, an empty one gives none.

  Args:
    documents: ids of each document, `[n]` each.
    length: tokens per window, at least 1.
    pad_id: the filling.
  """
  check_integer('length', length, 1)
  ids, valid, starts, offset = [], [], [], 0
  for document in filter(len, documents):
    filling = max(length - len(document), 0)
    ids += [document, np.full(filling, pad_id)]
    valid += [np.ones(len(document), bool), np.zeros(filling, bool)]
    size = len(document) + filling
    starts.append(offset + np.arange(size - length + 1))
    offset += size
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
  return every_window(encoded, length=length, pad_id=tokenizer.vocab.pad_id)


class RollingWindows(NamedTuple):
  """Windows in which every token of every document is new exactly once.

  Attributes:
    ids: int32, PAD after the end of a document. Shape `[N, L]`.
    valid: False at PAD. Shape `[N, L]`.
    new: tokens that no window before has; the others are the text before them,
      to be seen and not scored. Shape `[N, L]`.
    document: index of the document of each window. Shape `[N]`.
  """

  ids: Int[np.ndarray, 'N L']
  valid: Bool[np.ndarray, 'N L']
  new: Bool[np.ndarray, 'N L']
  document: Int[np.ndarray, 'N']


def rolling_windows(
  documents: Sequence[Int[np.ndarray, '...']],
  *,
  length: int,
  context: int = 0,
  pad_id: int,
) -> RollingWindows:
  """Windows over documents of any length, each with text before what is new.

  The last window of a document moves back to end where the document ends, and
  so has more context. Of 10 tokens windows of 4 hold 0-3, 4-7 and 6-9, of which
  8 and 9 are new.

  Args:
    documents: ids of each document, `[n]` each.
    length: tokens per window, at least 1.
    context: tokens before the new ones of every window but the first, at most
      `length` - 1.
    pad_id: the filling of a document that is shorter than a window.

  Returns:
    The windows; an empty document has none.

  Raises:
    ValueError: a number out of range, or no token at all.

  Example:
    >>> windows = rolling_windows([np.arange(10)], length=4, pad_id=0)
    >>> windows.ids[2], windows.new.sum(1)
    (array([6, 7, 8, 9], dtype=int32), array([4, 4, 2]))
  """
  check_integer('length', length, 1)
  check_integer('context', context, 0)
  if context >= length:
    raise ValueError(f'{context=} must be less than {length=}')
  parts = []
  for index, document in enumerate(documents):
    size = len(document)
    if not size:
      continue
    count = 1 + -(-max(size - length, 0) // (length - context))
    ends = length + (length - context) * np.arange(count)
    ends = np.minimum(ends, size)
    slots = np.maximum(ends - length, 0)[:, None] + np.arange(length)
    valid = slots < size
    ids = np.where(valid, document[np.minimum(slots, size - 1)], pad_id)
    seen = np.append(0, ends[:-1])
    parts.append(
      (ids.astype(np.int32), valid, valid & (slots >= seen[:, None]))
      + (np.full(count, index),)
    )
  if not parts:
    raise ValueError('no token to evaluate')
  return RollingWindows(*map(np.concatenate, zip(*parts, strict=True)))


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

  check_integer('batch_size', batch_size, 1)

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
