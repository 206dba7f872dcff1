"""The real text that samples of a model are compared with.

A shipped model has the order-3 counts of its training text (ngrams.npz) and the
beginnings of its held-out texts (heldout.txt) beside it; for another one both
come from the corpus that its training.json names.
"""

import pathlib
from typing import NamedTuple

from mdlm_jax import ngrams
from mdlm_jax.data.corpus import Corpus, corpus_of
from mdlm_jax.models import directory

ORDER = 3
BEGINNING = 8000  # Characters of each held-out text that are shipped.
_NGRAMS, _HELD_OUT = 'ngrams.npz', 'heldout.txt'


class Reference(NamedTuple):
  """What samples are measured by: the model of one text, and another text."""

  model: ngrams.NgramModel
  held_out: str


def read(path: pathlib.Path) -> Reference:
  """The reference of the model in a directory.

  Raises:
    OSError: the corpus cannot be read.
    ValueError: the directory does not say what the model was trained on.
  """
  if (path / _NGRAMS).exists():
    return Reference(ngrams.load(path / _NGRAMS), held_out(path))
  return Reference(fit(read_corpus(path)), held_out(path))


def held_out(path: pathlib.Path) -> str:
  """The text of the reference only.

  Raises:
    OSError, ValueError: as `read`.
  """
  if (path / _HELD_OUT).exists():
    return (path / _HELD_OUT).read_text('utf-8')
  return '\n\n'.join(document.text for document in read_corpus(path).validation)


def write(path: pathlib.Path, output: pathlib.Path) -> None:
  """Writes what `read` finds beside a shipped model."""
  corpus = read_corpus(path)
  ngrams.save(fit(corpus), output / _NGRAMS)
  beginnings = [document.text[:BEGINNING] for document in corpus.validation]
  (output / _HELD_OUT).write_text('\n\n'.join(beginnings), 'utf-8')


def read_corpus(path: pathlib.Path) -> Corpus:
  """The corpus that the model in a directory was trained on."""
  try:
    settings = directory.read_history(path)['config']['data']
  except (KeyError, TypeError):
    raise ValueError(
      f'{path} does not say what its model was trained on'
    ) from None
  return corpus_of(settings)


def fit(corpus: Corpus) -> ngrams.NgramModel:
  """The order-3 model of the training text."""
  return ngrams.fit([document.text for document in corpus.training], ORDER)
