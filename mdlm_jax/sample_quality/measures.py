"""What samples are worth as text: numbers beside those of real text.

No number alone says it. Repetitive text is likely under every language model,
so what a model needs for the samples is never given without their entropy,
their distinct n-grams and their repetition (docs/sample_quality.md).
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from mdlm_jax import ngrams
from mdlm_jax.sample_quality.judge import Judgement
from mdlm_jax.sample_quality.samples import Samples

# Each name with its title in a table and in a plot.
MEASURES = {
  'bits_per_character': ('bits/char', 'bits per character, order-3 model'),
  'entropy': ('entropy', 'entropy of the tokens, nats'),
  'repetition': ('repetition', 'share of repeated word 4-grams'),
  'distinct_2': ('distinct-2', 'share of distinct word pairs'),
}
_DISTINCT = (1, 2, 3)


class Estimate(NamedTuple):
  """A number and its standard error over the choice of the texts."""

  value: float
  error: float


def measure(
  samples: Samples,
  *,
  model: ngrams.NgramModel | None = None,
  judgement: Judgement | None = None,
) -> dict[str, float]:
  """All measures of some samples, each `NAME` with a `NAME_error`.

  Args:
    samples: at least two.
    model: a model of the characters of real text, if any.
    judgement: what a judge says of the texts (`judge`), if anything.

  Returns:
    Of the sampler's tokens:

    `entropy`: of a text's own unigram distribution in nats, mean of the texts.
    `pooled_entropy`: that of all texts together, which is low also where the
      texts are alike. Both are of counted frequencies, so at most the log of
      the number of tokens counted.

    Of the words, what stands between spaces:

    `distinct_N`: distinct N-grams over all N-grams, N = 1, 2, 3, of all texts
      together (Li et al. 2016); it falls with the amount of text.
    `repetition`: share of a text's 4-grams that it had before (Welleck et al.
      2020), mean of the texts.

    With `model`: `bits_per_character`, mean of the texts. With `judgement`:
    `judge_nats_per_token`, sum of the nats over sum of the tokens, and
    `generative_perplexity`, its exponential.

  Raises:
    ValueError: fewer than two texts; no token that the judge counts.
  """
  if len(samples.texts) < 2:
    raise ValueError(
      f'{len(samples.texts)} text(s) have no standard error; at least 2 are '
      'needed'
    )
  words = [text.split() for text in samples.texts]
  estimates = {
    'entropy': mean([unigram_entropy(ids) for ids in samples.tokens]),
    'pooled_entropy': pooled_entropy(samples.tokens),
    **{f'distinct_{n}': distinct(words, n) for n in _DISTINCT},
    # NaN of a text without any 4-gram: it repeats none.
    'repetition': mean(
      np.nan_to_num([ngrams.repetition(text) for text in words]).tolist()
    ),
  }
  if model is not None:
    bits = [ngrams.bits_per_character(model, text) for text in samples.texts]
    estimates['bits_per_character'] = mean(bits)
  if judgement is not None:
    nats = ratio(judgement.nats, judgement.tokens)
    perplexity = math.exp(nats.value)
    estimates['judge_nats_per_token'] = nats
    estimates['generative_perplexity'] = Estimate(
      perplexity, perplexity * nats.error
    )
  return {
    f'{name}{suffix}': value
    for name, estimate in estimates.items()
    for suffix, value in zip(('', '_error'), estimate, strict=True)
  }


def unigram_entropy(ids: Int[np.ndarray, 'n']) -> float:
  """-sum p log p of the frequencies of a text's tokens, in nats.

  Example:
    >>> round(unigram_entropy(np.array([3, 3, 7, 7])), 4)
    0.6931
  """
  if not len(ids):
    return 0.0
  _, counts = np.unique(ids, return_counts=True)
  share = counts / counts.sum()
  return float(-np.sum(share * np.log(share)))


def pooled_entropy(tokens: Sequence[Int[np.ndarray, '...']]) -> Estimate:
  """`unigram_entropy` of all texts together.

  It is the mean of -log p over all tokens; that p is counted on them does not
  change the error in first order.
  """
  _, token, counts = np.unique(
    np.concatenate(tokens), return_inverse=True, return_counts=True
  )
  if not len(token):
    return Estimate(0.0, 0.0)
  surprise = -np.log(counts / counts.sum())[token]
  sizes = np.array([len(ids) for ids in tokens])
  text = np.repeat(np.arange(len(tokens)), sizes)
  return ratio(np.bincount(text, surprise, minlength=len(tokens)), sizes)


def distinct(texts: Sequence[Sequence[str]], n: int) -> Estimate:
  """`ngrams.distinct`, its error by leaving out each of the texts in turn.

  Without a text its n-grams are gone, but those that another one has too are
  still there: error^2 = (N - 1) / N * sum of the squared distances from their
  mean (Tukey's jackknife).
  """
  counts = [
    collections.Counter(zip(*(text[i:] for i in range(n)), strict=False))
    for text in texts
  ]
  total = sum(counts, collections.Counter())
  size = total.total()
  left_out = [
    (len(total) - sum(total[x] == k for x, k in own.items()))
    / max(size - own.total(), 1)
    for own in counts
  ]
  spread = np.std(left_out) * math.sqrt(len(texts) - 1)
  return Estimate(len(total) / size if size else 0.0, float(spread))


def mean(values: Sequence[float]) -> Estimate:
  """Mean of numbers, one a text."""
  error = np.std(values, ddof=1) / math.sqrt(len(values))
  return Estimate(float(np.mean(values)), float(error))


def ratio(
  sums: Float[np.ndarray, 'N'], counts: Int[np.ndarray, 'N']
) -> Estimate:
  """Sum over count of all texts, not the mean of their ratios.

  error^2 = N / (N - 1) * sum_i (s_i - r c_i)^2 / (sum_i c_i)^2, the linearised
  error of a ratio r.

  Raises:
    ValueError: all counts are 0.

  Example:
    >>> ratio(np.array([200.0, 40.0]), np.array([100, 10])).value  # Not 3.
    2.1818181818181817
  """
  total = int(np.sum(counts))
  if not total:
    raise ValueError('the texts have no token to be judged by')
  value = float(np.sum(sums)) / total
  squares = float(np.sum((sums - value * counts) ** 2))
  factor = len(sums) / (len(sums) - 1)
  return Estimate(value, math.sqrt(factor * squares) / total)


def titles(columns: Mapping[str, tuple[str, ...]]) -> str:
  """Heads of the columns that `cells` fills: the first of each one's titles."""
  return ''.join(f'{title:>18s}' for title, *_ in columns.values())


def cells(row: Mapping[str, Any], columns: Iterable[str]) -> str:
  """Numbers with their standard errors, as the cells of a table.

  Args:
    row: as `measure` gives it; a number that it lacks leaves its cell empty.
    columns: names of the numbers.

  Example:
    >>> cells({'x': 1.0, 'x_error': 0.25}, ['x'])
    '    1.000 +- 0.250'
  """
  return ''.join(
    f'{row[name]:9.3f} +- {row[name + "_error"]:.3f}'
    if name in row
    else ' ' * 18
    for name in columns
  )
