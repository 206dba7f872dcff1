"""Texts to be measured: what a model writes from nothing, and real ones."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int, Key

from mdlm_jax import canvas, sampling
from mdlm_jax.blocks import blocks_of
from mdlm_jax.models.pretrained import TextCodec
from mdlm_jax.predict import Denoiser
from mdlm_jax.tokenizer import Tokenizer
from mdlm_jax.vocab import Vocab


class Samples(NamedTuple):
  """Texts, each with its tokens.

  A sampler may write a text in other tokens than its tokenizer would.

  Attributes:
    texts: strings.
    tokens: ids of each, without padding.
  """

  texts: list[str]
  tokens: list[Int[np.ndarray, '...']]


def of_texts(
  texts: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> Samples:
  """Texts in the tokens of a tokenizer's `encode`."""
  tokens = [np.asarray(encode(text), np.int32) for text in texts]
  return Samples(list(texts), tokens)


def of_rows(
  ids: Int[np.ndarray, 'B L'], tokenizer: TextCodec, vocab: Vocab
) -> Samples:
  """Rows that a sampler filled, each up to its first EOS or PAD."""
  ends = [i for i in (*vocab.eos_ids, vocab.pad_id) if i is not None]
  tokens = []
  for row in ids:
    (found,) = np.nonzero(np.isin(row, ends))
    tokens.append(row[: found[0]] if len(found) else row)
  return Samples([tokenizer.decode(row) for row in tokens], tokens)


def from_model(
  denoiser: Denoiser,
  params: Any,
  key: Key[Array, ''],
  tokenizer: Tokenizer,
  *,
  num_samples: int,
  length: int,
  block_length: int | None = None,
  **options: Any,
) -> tuple[Samples, sampling.SampleResult]:
  """Samples from nothing, and what the sampler returned.

  Args:
    denoiser: the network.
    params: its parameters.
    key: consumed.
    tokenizer: ids to text.
    num_samples: how many.
    length: tokens of each.
    block_length: decodes in blocks of so many tokens.
    **options: of `sampling.sample`, its rule among them.
  """
  vocab = tokenizer.vocab
  rows = canvas.from_prompts([[]] * num_samples, length, vocab)
  if block_length is not None:
    options['blocks'] = blocks_of(rows, block_length)
  result = sampling.sample(denoiser, params, key, rows, vocab=vocab, **options)
  return of_rows(np.asarray(result.ids), tokenizer, vocab), result


def real(
  held_out: str, tokenizer: TextCodec, like: Sequence[str], count: int
) -> Samples:
  """Pieces of real text, as long as other texts are on average.

  Args:
    held_out: the text, of which the pieces are evenly spread parts.
    tokenizer: text to ids.
    like: the other texts.
    count: how many pieces.
  """
  size = round(float(np.mean([len(text) for text in like])))
  return of_texts(pieces(held_out, size, count), tokenizer.encode)


def pieces(text: str, size: int, count: int) -> list[str]:
  """Up to `count` pieces of `size` characters, evenly spread over a text.

  Example:
    >>> pieces('abcdefgh', 2, 3)
    ['ab', 'de', 'gh']
  """
  starts = np.linspace(0, max(len(text) - size, 0), count).astype(int)
  return [text[start : start + size] for start in starts]
