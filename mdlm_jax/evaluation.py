"""The bound on held-out text, with its standard error."""

import functools
import importlib.metadata
import math
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax import (
  data,
  losses,
  predict,
  schedules,
  time_draws,
)
from mdlm_jax.tokenizer import Tokenizer
from mdlm_jax.vocab import Vocab


class HeldOutBound(NamedTuple):
  """An estimate of the continuous-time bound on -log p(text).

  Attributes:
    nats_per_token: mean over the replicates.
    standard_error: of that mean, from the spread of the replicates; it is the
      noise of the estimate on this text, not of the choice of the text.
    num_tokens: tokens scored, each once per replicate.
  """

  nats_per_token: float
  standard_error: float
  num_tokens: int

  def bits_per_character(self, num_characters: int) -> tuple[float, float]:
    """The bound and its standard error in bits per character of the text."""
    scale = self.num_tokens / num_characters / math.log(2)
    return self.nats_per_token * scale, self.standard_error * scale


def held_out_bound(
  denoiser: predict.Denoiser,
  params: Any,
  key: Key[Array, ''],
  ids: Int[np.ndarray, 'N L'],
  valid: Bool[np.ndarray, 'N L'],
  *,
  vocab: Vocab,
  schedule: schedules.Schedule = schedules.linear(),
  num_replicates: int = 8,
  batch_size: int = 64,
  t_min: float = 1e-4,
) -> HeldOutBound:
  """Monte-Carlo estimate of the bound (MD4, arXiv 2406.04329, section 3).

  Every replicate masks every row once. Its noise levels are stratified over
  all rows and dealt to them at random, so that each row's is uniform. The
  result does not depend on `batch_size`: noise belongs to (replicate, row,
  position), and the sum over valid tokens is divided once.

  Args:
    denoiser: the network.
    params: its parameters.
    key: consumed.
    ids: rows of text, such as windows side by side. int32, shape `[N, L]`.
    valid: False at filling, which is neither seen nor counted. Shape `[N, L]`.
    vocab: roles of the ids.
    schedule: masking schedule the network was trained with; None: linear.
    num_replicates: independent passes over the text, at least 2.
    batch_size: rows per network call, at least 1.
    t_min: noise levels are drawn from (t_min, 1]. What is left out below
      t_min is replaced by the mean over the rest; where it is the easiest part
      (a trained network, the linear schedule) the estimate is too high, by less
      than t_min times itself.

  Returns:
    The estimate. It is of the integral over t only: for a schedule that is not
    complete (see `schedules.Schedule`) it lacks the other terms of the bound.

  Raises:
    ValueError: too few replicates or rows per call, or no valid token.
  """
  if num_replicates < 2:
    raise ValueError(
      f'{num_replicates=} must be at least 2 for a standard error'
    )
  if batch_size < 1:
    raise ValueError(f'{batch_size=} must be at least 1')
  if not np.any(valid):
    raise ValueError('no token to evaluate')
  times_key, corruption_key = jax.random.split(key)
  num_rows = len(ids)
  t = np.asarray(_dealt_times(times_key, num_replicates, num_rows, t_min))
  sums = []
  for start in range(0, len(t), batch_size):
    # The last batch is filled up with rows that have no valid token.
    noise_rows = start + np.arange(batch_size)
    kept = noise_rows < len(t)
    rows = noise_rows % num_rows
    sums.append(
      _row_bounds(
        denoiser,
        params,
        corruption_key,
        ids[rows],
        valid[rows] & kept[:, None],
        t[noise_rows % len(t)],
        noise_rows.astype(np.int32),
        vocab=vocab,
        schedule=schedule,
      )
    )
  totals = np.concatenate(jax.device_get(sums))[: len(t)].astype(np.float64)
  if not np.isfinite(totals).all():
    raise ValueError('the network gave non-finite log-probabilities')
  num_tokens = int(np.sum(valid))
  estimates = totals.reshape(num_replicates, -1).sum(1) / num_tokens
  error = float(np.std(estimates, ddof=1)) / math.sqrt(num_replicates)
  return HeldOutBound(float(np.mean(estimates)), error, num_tokens)


def evaluate_documents(
  denoiser: predict.Denoiser,
  params: Any,
  tokenizer: Tokenizer,
  documents: Sequence[data.Document],
  *,
  length: int,
  schedule: schedules.Schedule = schedules.linear(),
  num_replicates: int = 8,
  batch_size: int = 64,
  seed: int = 0,
) -> dict:
  """The bound on texts, cut into windows side by side, as a JSON report.

  Each window is scored alone, without the text before it. Two models are
  compared under the same noise when `seed` and the windows are the same.

  Args:
    denoiser: the network.
    params: its parameters.
    tokenizer: text to ids.
    documents: the texts, cut into windows one by one.
    length: tokens per window, at most what the network accepts.
    schedule: masking schedule the network was trained with; None: linear.
    num_replicates: independent passes over the text, at least 2.
    batch_size: windows per network call, at least 1.
    seed: of all noise.

  Returns:
    The bound in nats per token and in bits per character, each with its
    standard error, and what it was measured on. JSON can hold it.

  Raises:
    ValueError: as `held_out_bound`; no text, or characters that the tokenizer
      does not know.
  """
  windows = data.consecutive_windows(documents, tokenizer, length)
  ids, valid = windows.take(np.arange(len(windows.starts)))
  bound = held_out_bound(
    denoiser,
    params,
    jax.random.key(seed),
    ids,
    valid,
    vocab=tokenizer.vocab,
    schedule=schedule,
    num_replicates=num_replicates,
    batch_size=batch_size,
  )
  num_characters = sum(len(document.text) for document in documents)
  bits, bits_error = bound.bits_per_character(num_characters)
  return {
    'nats_per_token': bound.nats_per_token,
    'nats_per_token_standard_error': bound.standard_error,
    'bits_per_character': bits,
    'bits_per_character_standard_error': bits_error,
    'num_tokens': bound.num_tokens,
    'num_characters': num_characters,
    'length': length,
    'num_replicates': num_replicates,
    'seed': seed,
  }


def summary(report: dict) -> str:
  """Lines for a person: the bound beside the corpus's entropies."""
  lines = [
    f'held-out text ({report["num_characters"]:,} characters): at most '
    f'{report["nats_per_token"]:.4f} +- '
    f'{report["nats_per_token_standard_error"]:.4f} nats per token, '
    f'{report["bits_per_character"]:.4f} +- '
    f'{report["bits_per_character_standard_error"]:.4f} bits per character '
    '(+- one standard error of the noise levels and masks)'
  ]
  entropies = report.get('corpus_entropies_bits_per_character')
  if entropies and not report.get('file'):
    lines.append(
      'entropy of its whole corpus given the 0, 1, 2 characters before: '
      + ', '.join(f'{bits:.2f}' for bits in entropies)
      + ' bits per character, counted on the corpus itself'
    )
  return '\n'.join(lines)


def environment() -> dict:
  """Versions, device and precision: what a number needs to be reproduced."""
  packages = ('mdlm_jax', 'jax', 'jaxlib', 'flax', 'optax', 'numpy')
  versions = {'python': platform.python_version()}
  for package in packages:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      versions[package] = None  # Run from a checkout, not installed.
  return {
    'versions': versions,
    'device': jax.devices()[0].device_kind,
    'matmul_precision': jax.config.jax_default_matmul_precision,
  }


@functools.partial(
  jax.jit, static_argnames=('num_replicates', 'num_rows', 't_min')
)
def _dealt_times(key, num_replicates, num_rows, t_min) -> Float[Array, 'N']:
  """Stratified times, dealt to the rows at random in every replicate."""

  def deal(key):
    deal_key, draw_key = jax.random.split(key)
    strata = jax.random.permutation(deal_key, num_rows)
    return time_draws.stratified_times(draw_key, strata, num_rows, t_min=t_min)

  keys = jax.random.split(key, num_replicates)
  return jax.vmap(deal)(keys).reshape(-1)


@functools.partial(jax.jit, static_argnames=('denoiser', 'vocab', 'schedule'))
def _row_bounds(
  denoiser,
  params,
  key,
  ids: Int[Array, 'B L'],
  valid: Bool[Array, 'B L'],
  t: Float[Array, 'B'],
  row_ids: Int[Array, 'B'],
  *,
  vocab,
  schedule,
) -> Float[Array, 'B']:
  """Weighted sum of each row, in nats."""
  log_probs, masked = predict.corrupted_log_probs(
    denoiser,
    params,
    key,
    ids,
    t,
    valid,
    vocab=vocab,
    schedule=schedule,
    row_ids=row_ids,
  )

  def row_bound(*row):
    return losses.continuous_bound(
      *(x[None] for x in row), schedule=schedule
    ).sum

  return jax.vmap(row_bound)(log_probs, masked, valid, t)
