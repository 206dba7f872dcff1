"""What samples are worth as text: numbers beside those of real text.

No number alone says it: repetitive text needs few bits under any model of
characters, so the entropy of the samples stands beside their bits.
"""

import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Key

from mdlm_jax import canvas, data, ngrams, sampling
from mdlm_jax.blocks import blocks_of
from mdlm_jax.models import directory
from mdlm_jax.predict import Denoiser
from mdlm_jax.tokenizer import Tokenizer

ORDER = 3
BEGINNING = 8000  # Characters of each held-out text that are shipped.
# Each name with its title in a table and in a plot.
MEASURES = {
  'bits_per_character': ('bits/char', 'bits per character, order-3 model'),
  'entropy': ('entropy', 'entropy of the characters, bits'),
  'repetition': ('repetition', 'share of repeated 4-grams'),
}


class Reference(NamedTuple):
  """What samples are measured by: the model of one text, and another text."""

  model: ngrams.NgramModel
  held_out: str


def read_reference(path: pathlib.Path) -> Reference:
  """The reference of the model in a directory.

  A shipped model has the order-3 counts of its training text (ngrams.npz) and
  the beginnings of its held-out texts (heldout.txt) beside it; for another one
  both come from the corpus that its training.json names.

  Raises:
    OSError: the corpus cannot be read.
    ValueError: the directory does not say what the model was trained on.
  """
  if (path / 'ngrams.npz').exists():
    held_out = (path / 'heldout.txt').read_text('utf-8')
    return Reference(ngrams.load(path / 'ngrams.npz'), held_out)
  corpus = read_corpus(path)
  return Reference(
    fit(corpus), '\n\n'.join(document.text for document in corpus.validation)
  )


def write_reference(path: pathlib.Path, output: pathlib.Path) -> None:
  """Writes what `read_reference` finds beside a shipped model."""
  corpus = read_corpus(path)
  ngrams.save(fit(corpus), output / 'ngrams.npz')
  beginnings = [text[:BEGINNING] for _, text in corpus.validation]
  (output / 'heldout.txt').write_text('\n\n'.join(beginnings), 'utf-8')


def read_corpus(path: pathlib.Path) -> data.Corpus:
  """The corpus that the model in a directory was trained on."""
  try:
    settings = directory.read_history(path)['config']['data']
  except (KeyError, TypeError):
    raise ValueError(
      f'{path} does not say what its model was trained on'
    ) from None
  return data.corpus_of(settings)


def fit(corpus: data.Corpus) -> ngrams.NgramModel:
  """The order-3 model of the training text."""
  return ngrams.fit([document.text for document in corpus.training], ORDER)


def measure(texts: Sequence[str], model: ngrams.NgramModel) -> dict:
  """Each of `MEASURES` as a mean over the texts, and distinct word pairs.

  Args:
    texts: at least two.
    model: a model of the characters of real text.

  Returns:
    `NAME`, and `NAME_error`, its standard error; `distinct_2`, the share of
    distinct word pairs over all texts together.
  """
  values = {
    'bits_per_character': [ngrams.bits_per_character(model, t) for t in texts],
    'entropy': [ngrams.entropies(text, 0)[0] for text in texts],
    'repetition': [ngrams.repetition(text) for text in texts],
  }
  numbers = {}
  for name, numbers_per_text in values.items():
    numbers[name] = float(np.mean(numbers_per_text))
    spread = float(np.std(numbers_per_text, ddof=1))
    numbers[f'{name}_error'] = spread / math.sqrt(len(texts))
  numbers['distinct_2'] = ngrams.distinct([t.split() for t in texts], 2)
  return numbers


def measure_real(
  reference: Reference, texts: Sequence[str], count: int
) -> dict:
  """`measure` of real text in pieces as long as the texts are on average."""
  size = round(float(np.mean([len(text) for text in texts])))
  pieces = real_texts(reference.held_out, size, count)
  return measure(pieces, reference.model)


def real_texts(held_out: str, size: int, count: int) -> list[str]:
  """Up to `count` pieces of `size` characters, evenly spread over the text."""
  starts = np.linspace(0, max(len(held_out) - size, 0), count).astype(int)
  return [held_out[start : start + size] for start in starts]


def titles(columns: dict[str, tuple[str, str]]) -> str:
  """Heads of the columns that `cells` fills; columns are as `MEASURES`."""
  return ''.join(f'{title:>18s}' for title, _ in columns.values())


def cells(row: dict, columns: dict[str, tuple[str, str]]) -> str:
  """Numbers with their standard errors, as the cells of a table.

  Example:
    >>> cells({'x': 1.0, 'x_error': 0.25}, {'x': ('a title', 'a long one')})
    '    1.000 +- 0.250'
  """
  return ''.join(
    f'{row[name]:9.3f} +- {row[name + "_error"]:.3f}'
    if name in row
    else ' ' * 18
    for name in columns
  )


def sample_texts(
  denoiser: Denoiser,
  params: Any,
  key: Key[Array, ''],
  tokenizer: Tokenizer,
  *,
  num_samples: int,
  length: int,
  block_length: int | None = None,
  **options,
) -> tuple[list[str], sampling.SampleResult]:
  """Samples from nothing, as text.

  Args:
    denoiser: the network.
    params: its parameters.
    key: consumed.
    tokenizer: ids to text.
    num_samples: how many.
    length: tokens of each.
    block_length: decodes in blocks of so many tokens.
    **options: of `sampling.sample`, its rule among them.

  Returns:
    The texts, and what the sampler returned.
  """
  vocab = tokenizer.vocab
  rows = canvas.from_prompts([[]] * num_samples, length, vocab)
  if block_length is not None:
    options['blocks'] = blocks_of(rows, block_length)
  result = sampling.sample(denoiser, params, key, rows, vocab=vocab, **options)
  return [tokenizer.decode(ids) for ids in np.asarray(result.ids)], result
