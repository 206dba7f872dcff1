"""What another language model thinks of texts.

The negative log-likelihood of samples under a causal model is their generative
perplexity. It is flattered by repetition, so `measures` never gives it
without entropy, distinct n-grams and repetition.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mdlm_jax.checks import check_integer
from mdlm_jax.data.windows import rolling_windows
from mdlm_jax.models.causal import CausalModel

_SHORTEST = 16  # Tokens to which texts are filled up: few shapes.
_POSITIONS = 64  # Whose logits are in memory at a time, for each row.


class Judgement(NamedTuple):
  """What a judge says of each text; a ratio of sums is a mean over tokens.

  Attributes:
    nats: -log p of the counted tokens, float64. Shape `[N]`.
    tokens: how many of the judge's tokens were counted. Shape `[N]`.
  """

  nats: Float[np.ndarray, 'N']
  tokens: Int[np.ndarray, 'N']


def negative_log_likelihood(
  judge: CausalModel,
  texts: Sequence[str],
  *,
  context: int = 1024,
  batch_size: int = 8,
  on_progress: Callable[[int, int], object] | None = None,
) -> Judgement:
  """Sum over tokens of -log p(token | the tokens before it), of each text.

  Every token of a text is counted once. Where the judge's texts begin with BOS,
  so does each of these, and all its tokens are counted; else the first one is
  what the second is given, and is not counted itself, as GPT-2 is used in the
  literature (Sahoo et al. 2024, arXiv 2406.07524). No end of the text is
  counted. A text of more than `context` tokens is read in windows that advance
  by half of it, so that a token has at least `context / 2` tokens before it.

  A text's numbers do not depend on the others, nor on the batch size, but for
  rounding.

  Args:
    judge: see `models.causal.load`.
    texts: any strings.
    context: the most tokens that the judge sees at once; its own length where
      that is less.
    batch_size: windows per network call.
    on_progress: called with the network calls done and planned, after each.

  Returns:
    Sums and counts; a text without a token to be counted has 0 and 0.

  Raises:
    ValueError: a number out of range, or NaN from the network.
  """
  check_integer('context', context, 2)
  check_integer('batch_size', batch_size, 1)
  context = min(context, judge.config.max_length)
  begin = [] if judge.bos_id is None else [judge.bos_id]
  by_length = {}
  for index, text in enumerate(texts):
    ids = np.array(begin + judge.encode(text), np.int32)
    if len(ids) > 1:
      length = min(context, max(_SHORTEST, 1 << (len(ids) - 1).bit_length()))
      by_length.setdefault(length, []).append((index, ids))
  batches = [
    batch
    for length, documents in sorted(by_length.items())
    for batch in _batches(documents, length, batch_size)
  ]
  nats, tokens = np.zeros(len(texts)), np.zeros(len(texts), np.int64)
  for done, (documents, ids, counted) in enumerate(batches, 1):
    sums = np.asarray(_sums(judge.denoiser, judge.params, ids, counted))
    np.add.at(nats, documents, sums[: len(documents)].astype(np.float64))
    np.add.at(tokens, documents, counted.sum(1)[: len(documents)])
    if on_progress is not None:
      on_progress(done, len(batches))
  if not np.isfinite(nats).all():
    raise ValueError('the judge gave non-finite log-probabilities')
  return Judgement(nats, tokens)


def _batches(documents, length, batch_size):
  """Windows of one length: their texts, and filled up to whole batches."""
  indices, sequences = zip(*documents, strict=True)
  windows = rolling_windows(
    sequences, length=length, context=length // 2, pad_id=0
  )
  # The first token of a window has nothing before it.
  counted = windows.new & (np.arange(length) > 0)
  batch_size = min(batch_size, len(counted))
  for start in range(0, len(counted), batch_size):
    part = slice(start, start + batch_size)
    missing = ((0, max(start + batch_size - len(counted), 0)), (0, 0))
    yield (
      np.array(indices)[windows.document[part]],
      np.pad(windows.ids[part], missing),
      np.pad(counted[part], missing),
    )


@functools.partial(jax.jit, static_argnames='denoiser')
def _sums(
  denoiser, params, ids: Int[Array, 'B L'], counted: Bool[Array, 'B L']
) -> Float[Array, 'B']:
  """-log p of the counted tokens of each row."""
  batch, length = ids.shape
  hidden, _ = denoiser.features(
    params,
    None,
    ids,
    at=None,
    step=0,
    t=jnp.zeros(batch),
    # A causal network sees no padding from before it.
    valid=jnp.ones(ids.shape, bool),
    positions=jnp.broadcast_to(jnp.arange(length), ids.shape),
    segments=None,
  )

  def of_position(position):
    hidden, targets = position
    logits = denoiser.head(params, hidden[:, None])[:, 0].astype(jnp.float32)
    target = jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
    return jax.nn.logsumexp(logits, -1) - target

  # The logits of all positions at once would be the largest array by far.
  nats = jax.lax.map(
    of_position,
    (hidden[:, :-1].swapaxes(0, 1), ids[:, 1:].T),
    batch_size=_POSITIONS,
  )
  return jnp.where(counted[:, 1:].T, nats, 0.0).sum(0)
