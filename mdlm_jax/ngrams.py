"""Character n-gram models and the small statistics that go beside them.

A yardstick for generated text that is not the network itself: how many bits per
character does an n-gram model of the training text need for it? Low is not
enough (a text that repeats one common word needs few), so it is read together
with entropy, distinct n-grams and repetition.
"""

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class NgramTable(NamedTuple):
  """Counts of one order k, ngrams of k + 1 characters as sorted numbers.

  Attributes:
    ngrams: the distinct ones. Shape `[N]`.
    counts: how often each was seen. Shape `[N]`.
    contexts: the distinct first k characters. Shape `[M]`.
    totals: how often each context was seen. Shape `[M]`.
    kinds: how many different characters followed it. Shape `[M]`.
  """

  ngrams: Int[np.ndarray, 'N']
  counts: Int[np.ndarray, 'N']
  contexts: Int[np.ndarray, 'M']
  totals: Int[np.ndarray, 'M']
  kinds: Int[np.ndarray, 'M']


class NgramModel(NamedTuple):
  """A character model whose probability looks `order` characters back.

  Attributes:
    symbols: the known characters as sorted code points; all others share one
      more symbol, the unknown. Shape `[S]`.
    tables: one of each order 0 ... `order`.
  """

  symbols: Int[np.ndarray, 'S']
  tables: tuple[NgramTable, ...]

  @property
  def order(self) -> int:
    return len(self.tables) - 1


def fit(texts: Iterable[str], order: int = 3) -> NgramModel:
  """Counts the windows of `order` + 1 characters inside each text.

  Args:
    texts: the documents; no window crosses from one to the next.
    order: characters of context, at least 0.

  Returns:
    The model; lower orders are counted in the same windows.

  Raises:
    ValueError: for an order below 0, for texts that are all shorter than a
      window, or for an alphabet too large for it.
  """
  if order < 0:
    raise ValueError(f'{order=} must be at least 0')
  documents = [_code_points(text) for text in texts]
  symbols = np.unique(np.concatenate([*documents, np.array([], np.int64)]))
  if (len(symbols) + 1) ** (order + 1) > np.iinfo(np.int64).max:
    raise ValueError(f'{len(symbols)} characters are too many for {order=}')
  windows = [
    _windows(_encode(document, symbols), order, len(symbols) + 1)
    for document in documents
  ]
  ngrams, counts = np.unique(
    np.concatenate([*windows, np.array([], np.int64)]), return_counts=True
  )
  if not len(ngrams):
    raise ValueError(f'no text is as long as {order + 1} characters')
  return _from_counts(symbols, order, ngrams, counts)


def probabilities(model: NgramModel, text: str) -> Float[np.ndarray, 'n']:
  """The probability of each character of a text given those before it.

  Witten and Bell (1991), method C, interpolated: with c counts and N(h) the
  number of different characters seen after the context h,

    p(x | h) = (c(h x) + N(h) p(x | h')) / (c(h) + N(h)),

  h' being h without its first character, and 1 / (symbols + 1) below order 0.
  The first characters of the text have shorter contexts.

  Args:
    model: a fitted model.
    text: any text; unknown characters are one symbol.

  Returns:
    Numbers in (0, 1). Shape `[len(text)]`.
  """
  size = len(model.symbols) + 1
  codes = _encode(_code_points(text), model.symbols)
  p = np.full(len(codes), 1 / size)
  for order, table in enumerate(model.tables[: len(codes)]):
    ngrams = _windows(codes, order, size)
    contexts = ngrams // size
    count = _look_up(table.ngrams, table.counts, ngrams)
    total = _look_up(table.contexts, table.totals, contexts)
    kinds = _look_up(table.contexts, table.kinds, contexts)
    lower = p[order:]
    seen = total > 0
    smoothed = (count + kinds * lower) / np.where(seen, total + kinds, 1)
    p[order:] = np.where(seen, smoothed, lower)
  return p


def bits_per_character(model: NgramModel, text: str) -> float:
  """Mean of -log2 p over the characters of a text, NaN for an empty one.

  Example:
    >>> round(bits_per_character(fit(['abababab'], order=1), 'abab'), 3)
    0.455
  """
  if not text:
    return math.nan
  return float(-np.log2(probabilities(model, text)).mean())


def save(model: NgramModel, path: str | os.PathLike) -> None:
  """Writes the model as a compressed npz file."""
  table = model.tables[-1]
  with open(path, 'wb') as file:
    np.savez_compressed(
      file,
      symbols=model.symbols.astype(np.int32),
      order=np.int32(model.order),
      # Differences of sorted numbers are small and compress well.
      steps=np.diff(table.ngrams, prepend=0),
      counts=table.counts.astype(np.int32),
    )


def load(path: str | os.PathLike) -> NgramModel:
  """Reads what `save` wrote.

  Raises:
    FileNotFoundError: no such file. ValueError: another kind of file.
  """
  with open(path, 'rb') as file:
    try:
      arrays = dict(np.load(file))
      ngrams = np.cumsum(arrays['steps'])
      counts = arrays['counts'].astype(np.int64)
      symbols = arrays['symbols'].astype(np.int64)
      order = int(arrays['order'])
    except Exception as error:  # Zip and npy readers raise all sorts.
      raise ValueError(f'{path} is not an n-gram model') from error
  return _from_counts(symbols, order, ngrams, counts)


def entropies(text: str, max_order: int = 2) -> tuple[float, ...]:
  """Conditional entropies of a text's characters given the k before them.

  The plug-in estimate on the text itself: H(k + 1 characters) - H(k
  characters), each the entropy of the empirical distribution of all
  substrings of that length (Shannon 1951, F_1, F_2, ...).

  Args:
    text: at least `max_order + 1` characters.
    max_order: the largest k.

  Returns:
    Bits per character for k = 0 .. `max_order`.

  Raises:
    ValueError: the text is too short.

  Example:
    >>> [round(bits, 2) for bits in entropies('aabb' * 500, max_order=1)]
    [1.0, 1.0]
  """
  if len(text) <= max_order:
    raise ValueError(f'{len(text)} characters are too few for {max_order=}')
  points = np.frombuffer(text.encode('utf-32-le'), np.uint32)
  symbols, codes = np.unique(points, return_inverse=True)
  joint = [0.0]
  ngrams = np.zeros(len(codes), np.int64)
  for order in range(max_order + 1):
    ngrams = ngrams[: len(codes) - order] * len(symbols) + codes[order:]
    # Renumbered, so that no order overflows.
    _, ngrams, counts = np.unique(
      ngrams, return_inverse=True, return_counts=True
    )
    share = counts / counts.sum()
    joint.append(float(-np.sum(share * np.log2(share))))
  return tuple(b - a for a, b in itertools.pairwise(joint))


def distinct(texts: Iterable[Sequence], n: int) -> float:
  """Distinct n-grams over all n-grams of all texts (Li et al. 2016).

  Args:
    texts: strings, or sequences of words.
    n: items per n-gram, at least 1.

  Returns:
    In (0, 1]; NaN where no text has n items.

  Example:
    >>> distinct(['to be or not to be'.split()], n=2)
    0.8
  """
  seen = [
    tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)
  ]
  return len(set(seen)) / len(seen) if seen else math.nan


def repetition(text: Sequence, n: int = 4) -> float:
  """Share of a text's n-grams that it had before (Welleck et al. 2020).

  Example:
    >>> repetition('aaaaaaaa')
    0.8
  """
  return 1 - distinct([text], n)


def _from_counts(symbols, order, ngrams, counts) -> NgramModel:
  """Derives every order from the windows of the highest."""
  size = len(symbols) + 1
  tables = []
  for k in range(order, -1, -1):
    contexts, inverse, kinds = np.unique(
      ngrams // size, return_inverse=True, return_counts=True
    )
    totals = np.bincount(inverse, counts).astype(np.int64)
    tables.append(NgramTable(ngrams, counts, contexts, totals, kinds))
    # Without its first character, the window is one of the order below.
    ngrams, inverse = np.unique(ngrams % size**k, return_inverse=True)
    counts = np.bincount(inverse, counts).astype(np.int64)
  return NgramModel(symbols, tuple(reversed(tables)))


def _code_points(text: str):
  return np.frombuffer(text.encode('utf-32-le'), np.uint32).astype(np.int64)


def _encode(points, symbols):
  """Index of each code point among the symbols, their number if unknown."""
  index = np.searchsorted(symbols, points)
  found = symbols[np.minimum(index, len(symbols) - 1)] == points
  return np.where(found, index, len(symbols))


def _windows(codes, order, size):
  """Every run of `order` + 1 codes as one number, in base `size`."""
  windows = codes
  for _ in range(order):
    windows = windows[:-1] * size + codes[len(codes) - len(windows) + 1 :]
  return windows


def _look_up(keys, values, queries):
  """The value of each query among the sorted keys, 0 where it is not one."""
  index = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
  return np.where(keys[index] == queries, values[index], 0)
