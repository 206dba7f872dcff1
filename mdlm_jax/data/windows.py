"""Windows of one length, cut inside documents and never across them."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from mdlm_jax.checks import check_integer
from mdlm_jax.data.corpus import Document
from mdlm_jax.models.pretrained import TextCodec


@dataclasses.dataclass(frozen=True)
class Windows:
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

  def __len__(self) -> int:
    return len(self.starts)

  def take(self, indices: Int[np.ndarray, 'B']) -> dict[str, np.ndarray]:
    """Ids and validity of the windows `indices`, `[B, L]` each."""
    slots = self.starts[indices][:, None] + np.arange(self.length)
    return {'ids': self.ids[slots], 'valid': self.valid[slots]}


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
  documents: Sequence[Document], tokenizer: TextCodec, length: int
) -> Windows:
  """Every window start of every document.

  Raises:
    ValueError: no document is as long as a window; one holds MASK.
  """
  encoded = [ids_without_mask(document, tokenizer) for document in documents]
  longest = int(np.argmax([len(ids) for ids in encoded]))
  if len(encoded[longest]) < length:
    raise ValueError(
      f'{documents[longest].name}: {len(encoded[longest])} tokens to train on, '
      f'fewer than the sequence length {length}'
    )
  pad_id = tokenizer.vocab.pad_id
  return every_window(
    encoded, length=length, pad_id=0 if pad_id is None else pad_id
  )


def ids_without_mask(
  document: Document, tokenizer: TextCodec
) -> Int[np.ndarray, 'n']:
  """The ids of a document.

  Raises:
    ValueError: MASK is among them, as a text may spell it out for the tokenizer
      of a published model.
  """
  ids = tokenizer.encode(document.text)
  if (ids == tokenizer.vocab.mask_id).any():
    raise ValueError(
      f'{document.name} holds MASK, which a network cannot tell from a token '
      'that it has to predict'
    )
  return ids


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
