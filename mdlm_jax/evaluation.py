"""Bounds of any number of rows and documents, as a report.

Rows are spread over all devices of the process.
"""

import bz2
import gzip
import lzma
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, Key

from mdlm_jax import bound_estimators, likelihood, predict, schedules
from mdlm_jax.bound_estimators import Estimator
from mdlm_jax.checks import check_integer
from mdlm_jax.data.corpus import Document
from mdlm_jax.data.windows import rolling_windows
from mdlm_jax.models.pretrained import Pretrained
from mdlm_jax.vocab import Vocab

# Published models are declared to be longer than a window should be.
LONGEST_WINDOW = 1024


class Bounds(NamedTuple):
  """Estimates of bounds on -log p, in nats, by row or by document.

  Attributes:
    nats: float64. Shape `[N]`.
    standard_error: of each, from the spread of its replicates; it is the noise
      of the masks on this text, not of the choice of the text. Shape `[N]`.
  """

  nats: Float[np.ndarray, 'N']
  standard_error: Float[np.ndarray, 'N']


def row_batches(num_rows: int, batch_size: int) -> Int[np.ndarray, 'K B']:
  """Numbers of the rows of each batch, for batches of one size.

  Args:
    num_rows: at least 1.
    batch_size: most rows of a batch, but a multiple of the devices.

  Returns:
    0, 1, ... in order; after the last row the first ones again, to fill up the
    last batch: what they give is not to be counted.

  Raises:
    ValueError: `batch_size` is no integer of at least 1.
  """
  check_integer('batch_size', batch_size, 1)
  size = min(batch_size, num_rows)
  size += -size % jax.local_device_count()
  rows = np.arange(num_rows + -num_rows % size) % num_rows
  return rows.reshape(-1, size)


def over_devices(batch: Any) -> Any:
  """A batch on all devices, each with its share of the rows."""
  return jax.device_put(batch, _placed('rows'))


def on_every_device(arrays: Any) -> Any:
  """Parameters, keys: a copy on every device, where there are several."""
  several = jax.local_device_count() > 1
  return jax.device_put(arrays, _placed()) if several else arrays


def _placed(*axes):
  mesh = Mesh(np.array(jax.local_devices()), 'rows')
  return NamedSharding(mesh, PartitionSpec(*axes))


def row_bounds(
  denoiser: predict.Denoiser,
  params: Any,
  key: Key[jax.Array, ''],
  ids: Int[np.ndarray, 'N L'],
  valid: Bool[np.ndarray, 'N L'],
  answer: Bool[np.ndarray, 'N L'],
  *,
  vocab: Vocab,
  estimator: Estimator,
  num_replicates: int,
  schedule: schedules.Schedule = schedules.linear(),
  row_ids: Int[np.ndarray, 'N'] | None = None,
  batch_size: int = 64,
  on_progress: Callable[[int, int], object] | None = None,
) -> Bounds:
  """`likelihood.bound` of many rows, in batches over all devices.

  A row's bound does not depend on the batch size or the number of devices, and
  every row is counted once.

  Args:
    denoiser: the network.
    params: its parameters.
    key: consumed.
    ids: the rows. Shape `[N, L]`.
    valid: False at padding. Shape `[N, L]`.
    answer: positions that are scored. Shape `[N, L]`.
    vocab: roles of the ids.
    estimator: what the calls of one estimate hide.
    num_replicates: independent estimates, at least 2.
    schedule: masking schedule that the network was trained with.
    row_ids: ids of the rows for the noise; None: 0, 1, ... Shape `[N]`.
    batch_size: rows per network call, rounded up to a multiple of the devices.
    on_progress: called with the network calls done and planned, at first and
      after every batch.

  Returns:
    The bounds by row.

  Raises:
    ValueError: as `likelihood.bound`; NaN from the network.
  """
  if row_ids is None:
    row_ids = np.arange(len(ids), dtype=np.int32)
  params, key = on_every_device((params, key))
  calls = num_replicates * estimator.num_calls
  batches = row_batches(len(ids), batch_size)
  estimates = []
  for done, rows in enumerate(batches):
    if on_progress is not None:
      on_progress(done * calls, len(batches) * calls)
    # The last batch is filled up with rows that have nothing to score.
    kept = (np.arange(len(rows)) + done * len(rows) < len(ids))[:, None]
    scored, seen, row_answer, noise_ids = over_devices(
      (ids[rows], valid[rows], answer[rows] & kept, row_ids[rows])
    )
    estimate = likelihood.bound(
      denoiser,
      params,
      key,
      scored,
      row_answer,
      vocab=vocab,
      estimator=estimator,
      num_replicates=num_replicates,
      valid=seen,
      row_ids=noise_ids,
      schedule=schedule,
    )
    # Waits, so that what is said to be done is done.
    estimates.append(jax.device_get((estimate.mean, estimate.standard_error)))
  if on_progress is not None:
    on_progress(len(batches) * calls, len(batches) * calls)
  nats, error = (
    np.concatenate(parts)[: len(ids)].astype(np.float64)
    for parts in zip(*estimates, strict=True)
  )
  if np.isnan(nats).any():
    raise ValueError('the network gave NaN log-probabilities')
  return Bounds(nats, error)


def document_bounds(
  denoiser: predict.Denoiser,
  params: Any,
  key: Key[jax.Array, ''],
  documents: Sequence[Int[np.ndarray, '...']],
  *,
  vocab: Vocab,
  estimator: Estimator,
  num_replicates: int,
  length: int,
  context: int = 0,
  **options: Any,
) -> Bounds:
  """The bound of whole documents, of any length, each scored alone.

  The sum over `rolling_windows`, in which every token is scored once,
  given the tokens before it in its window; so it is a bound of the chain rule
  with a limited memory.

  Args:
    denoiser: the network.
    params: its parameters.
    key: consumed.
    documents: ids of each, `[n]` each; an empty one costs 0.
    vocab: roles of the ids.
    estimator: as in `row_bounds`.
    num_replicates: as in `row_bounds`.
    length: tokens per window, at most what the network accepts.
    context: tokens that every window but the first of a document sees before
      those that it scores.
    **options: `schedule`, `batch_size` and `on_progress` of `row_bounds`.

  Returns:
    The bounds by document.

  Raises:
    ValueError: as `row_bounds` and `rolling_windows`; a token that cannot
      be drawn.
  """
  windows = rolling_windows(
    documents,
    length=length,
    context=context,
    pad_id=0 if vocab.pad_id is None else vocab.pad_id,
  )
  bounds = row_bounds(
    denoiser,
    params,
    key,
    windows.ids,
    windows.valid,
    windows.new,
    vocab=vocab,
    estimator=estimator,
    num_replicates=num_replicates,
    **options,
  )
  if np.isinf(bounds.nats).any():
    raise ValueError('the network gave a token of the text probability 0')
  nats, squares = (
    np.bincount(windows.document, weights, minlength=len(documents))
    for weights in (bounds.nats, bounds.standard_error**2)
  )
  return Bounds(nats, np.sqrt(squares))


def evaluate_documents(
  model: Pretrained,
  documents: Sequence[Document],
  *,
  length: int,
  context: int = 0,
  num_calls: int = 4,
  num_replicates: int = 2,
  batch_size: int = 64,
  seed: int = 0,
  on_progress: Callable[[int, int], object] | None = None,
) -> dict:
  """The bound on texts as a report, with what compressors make of them.

  By `bound_estimators.exact_count`, which has the smallest standard error per
  network call of the estimators that a window of any length can afford
  (docs/likelihood.md). Two models are compared under the same noise when
  `seed` and the windows are the same.

  Args:
    model: the network and its tokenizer.
    documents: the texts, each scored alone.
    length: tokens per window, at most what the network accepts.
    context: as in `document_bounds`.
    num_calls: network calls of one estimate of a window.
    num_replicates: independent estimates of every window, at least 2.
    batch_size: windows per network call.
    seed: of all noise.
    on_progress: as in `row_bounds`.

  Returns:
    The bound in nats per token and in bits per character, each with its
    standard error, of all texts and of each, and what it was measured on. JSON
    can hold it.

  Raises:
    ValueError: as `document_bounds`; characters that the tokenizer does not
      know.
  """
  encoded = [model.tokenizer.encode(document.text) for document in documents]
  bounds = document_bounds(
    model.denoiser,
    model.params,
    jax.random.key(seed),
    encoded,
    vocab=model.vocab,
    estimator=bound_estimators.exact_count(num_calls),
    num_replicates=num_replicates,
    length=length,
    context=context,
    schedule=model.bound_schedule,
    batch_size=batch_size,
    on_progress=on_progress,
  )
  num_tokens = sum(map(len, encoded))
  text = '\n\n'.join(document.text for document in documents)
  num_characters = sum(len(document.text) for document in documents)
  nats, error = _total(bounds)
  bits = num_characters * math.log(2)
  return {
    **_per_token(bounds, num_tokens),
    'bits_per_character': nats / bits,
    'bits_per_character_standard_error': error / bits,
    'compressed_bits_per_character': compressed_bits_per_character(text),
    'num_tokens': num_tokens,
    'num_characters': num_characters,
    'length': length,
    'context': context,
    'dtype': model.config.dtype,
    'estimator': 'exact_count',
    'num_calls': num_calls,
    'num_replicates': num_replicates,
    'seed': seed,
    'documents': [
      {
        'name': document.name,
        'nats': float(nats),
        'nats_standard_error': float(error),
        'num_tokens': len(ids),
        'num_characters': len(document.text),
      }
      for document, ids, nats, error in zip(
        documents, encoded, *bounds, strict=True
      )
    ],
  }


def evaluate_rows(
  model: Pretrained,
  rows: Mapping[str, np.ndarray],
  *,
  num_calls: int = 4,
  num_replicates: int = 2,
  batch_size: int = 64,
  seed: int = 0,
  on_progress: Callable[[int, int], object] | None = None,
) -> dict:
  """The bound on the tokens of rows that are not given, as a report.

  Args:
    model: the network.
    rows: `ids`, `valid` and perhaps `given` of rows, `[N, L]` each, see
      `data.batches.Rows`; of one document each.
    num_calls: as in `evaluate_documents`.
    num_replicates: as in `evaluate_documents`.
    batch_size: rows per network call.
    seed: of all noise.
    on_progress: as in `row_bounds`.

  Returns:
    The bound in nats per token with its standard error, and what it was
    measured on. JSON can hold it.

  Raises:
    ValueError: as `row_bounds`; a token that cannot be drawn; documents that
      share rows, which would see one another.
  """
  if 'segments' in rows:
    raise ValueError('rows that documents share cannot be scored')
  scored = rows['valid']
  if 'given' in rows:
    scored = scored & ~rows['given']
  bounds = row_bounds(
    model.denoiser,
    model.params,
    jax.random.key(seed),
    rows['ids'],
    rows['valid'],
    scored,
    vocab=model.vocab,
    estimator=bound_estimators.exact_count(num_calls),
    num_replicates=num_replicates,
    schedule=model.bound_schedule,
    batch_size=batch_size,
    on_progress=on_progress,
  )
  if np.isinf(bounds.nats).any():
    raise ValueError('the network gave a token of the rows probability 0')
  num_tokens = int(scored.sum())
  return {
    **_per_token(bounds, num_tokens),
    'num_tokens': num_tokens,
    'num_rows': len(scored),
    'dtype': model.config.dtype,
    'estimator': 'exact_count',
    'num_calls': num_calls,
    'num_replicates': num_replicates,
    'seed': seed,
  }


def _total(bounds):
  """The sum of independent estimates, and its standard error."""
  error = np.sqrt(np.sum(bounds.standard_error**2))
  return float(bounds.nats.sum()), float(error)


def _per_token(bounds, num_tokens):
  nats, error = _total(bounds)
  return {
    'nats_per_token': nats / num_tokens,
    'nats_per_token_standard_error': error / num_tokens,
    'perplexity': float(np.exp(nats / num_tokens)),
  }


def compressed_bits_per_character(text: str) -> dict[str, float]:
  """What general compressors need for a text, at their best.

  Example:
    >>> bits = compressed_bits_per_character('abab' * 1000)
    >>> max(bits.values()) < 0.2
    True
  """
  content = text.encode()
  compressed = {
    'gzip': gzip.compress(content, 9, mtime=0),
    'bzip2': bz2.compress(content, 9),
    'xz': lzma.compress(content, preset=9),
  }
  return {
    name: 8 * len(result) / len(text) for name, result in compressed.items()
  }


def summary(report: dict) -> str:
  """Lines for a person: the bound, of a text beside what compressors do."""
  bound = (
    f'at most {report["nats_per_token"]:.4f} +- '
    f'{report["nats_per_token_standard_error"]:.4f} nats per token '
    f'(perplexity {report["perplexity"]:.2f})'
  )
  error = '(+- one standard error of the masks)'
  if 'num_characters' not in report:
    return (
      f'{report["num_rows"]:,} rows ({report["num_tokens"]:,} tokens): {bound} '
      f'{error}'
    )
  lines = [
    f'text ({report["num_characters"]:,} characters): {bound}, '
    f'{report["bits_per_character"]:.4f} +- '
    f'{report["bits_per_character_standard_error"]:.4f} bits per character '
    f'{error}',
    'the same text compressed: '
    + ', '.join(
      f'{name} {bits:.3f}'
      for name, bits in report['compressed_bits_per_character'].items()
    )
    + ' bits per character',
  ]
  entropies = report.get('corpus_entropies_bits_per_character')
  if entropies and not report.get('file'):
    lines.append(
      'entropy of its whole corpus given the 0, 1, 2 characters before: '
      + ', '.join(f'{bits:.2f}' for bits in entropies)
      + ' bits per character, counted on the corpus itself'
    )
  return '\n'.join(lines)
