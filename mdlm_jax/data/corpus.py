"""Corpora: texts by use, read from files, split, and their tokenizer."""

import glob
import hashlib
import itertools
import json
import os
import pathlib
import pydoc_data.topics
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    files: see `paths_of`.

  Raises:
    FileNotFoundError, ValueError: see `paths_of` and `read_document`.
  """
  return tuple(read_document(path) for path in paths_of(files))


def paths_of(files: str) -> list[str]:
  """The files that a user names, sorted.

  Args:
    files: paths or glob patterns, separated by commas.

  Raises:
    FileNotFoundError: a path or pattern that matches nothing.
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
  return sorted(paths)


def read_document(path: str) -> Document:
  """Reads a UTF-8 text file.

  Raises:
    OSError: it cannot be read.
    ValueError: it is empty, or not UTF-8 text.
  """
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
  """The corpus that the part `data` of a config names, see `read_corpus`.

  Raises:
    ValueError: it names prepared documents, which are no text; and as
      `read_corpus`.
  """
  if settings.get('prepared'):
    raise ValueError(
      f'{settings["prepared"]} holds prepared documents, whose text is not at '
      'hand'
    )
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
