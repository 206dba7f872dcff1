"""Which documents share a row.

A plan is made of the documents' lengths and a seed alone, so that every process
makes the same one, in memory, before any document is read.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Integer

from mdlm_jax.checks import check_integer

# The noise of a slot is keyed by its document and position in 32 bits, see
# `noise.packed_positions`.
_MOST_POSITIONS = 2**20
_MOST_DOCUMENTS = 2**12
_CHUNK = 2**20  # Pieces that are Python integers at a time.


class Packing(NamedTuple):
  """Rows as pieces of documents, which stand in a row side by side.

  Attributes:
    row_starts: where the pieces of each row begin; the last number is P. Shape
      `[R + 1]`.
    documents: which document each piece is of. Shape `[P]`.
    starts: where in it the piece begins. Shape `[P]`.
    lengths: tokens of the piece. Shape `[P]`.
    row_length: tokens that a row has room for.
  """

  row_starts: Int[np.ndarray, 'R1']
  documents: Int[np.ndarray, 'P']
  starts: Int[np.ndarray, 'P']
  lengths: Int[np.ndarray, 'P']
  row_length: int

  @property
  def num_rows(self) -> int:
    return len(self.row_starts) - 1

  @property
  def utilisation(self) -> float:
    """The share of all slots that hold a token; 0 without rows."""
    slots = max(self.num_rows * self.row_length, 1)
    return int(self.lengths.sum(dtype=np.int64)) / slots


def one_piece_a_row(
  lengths: Integer[np.ndarray, 'N'], *, row_length: int
) -> Packing:
  """Every document in rows of its own: one, or pieces of L and what is left.

  Args:
    lengths: tokens of each document, below 2^31; 0: it has no row. Shape `[N]`.
    row_length: tokens L of a row, at least 1.

  Example:
    >>> one_piece_a_row(np.array([3, 9]), row_length=4).lengths
    array([3, 4, 4, 1], dtype=int32)
  """
  check_integer('row_length', row_length, 1)
  documents, starts, lengths = _pieces(lengths, row_length)
  return Packing(
    np.arange(len(lengths) + 1), documents, starts, lengths, row_length
  )


def pack(
  lengths: Integer[np.ndarray, 'N'], *, row_length: int, seed: int
) -> Packing:
  """Rows that several documents share, few of them and with little waste.

  A document is cut only where it is longer than a row, into pieces of L and
  what is left (best-fit packing, Ding et al. 2024, arXiv 2404.10830, section
  3). Each piece goes to the row with the least room that is enough. Pieces
  above L/2 come first, since no two of them share a row; apart from that their
  order is random. In order of length, as there, a large corpus takes up to
  0.3 % fewer rows, but most of them then hold documents of almost one length,
  which are of a kind: a row has one noise level, so the gradient of a batch
  would vary more.

  Args:
    lengths: tokens of each document, below 2^31; 0: it has no row. Shape `[N]`.
    row_length: tokens L of a row, from 1 to 2^20.
    seed: of the order, at least 0.

  Returns:
    Every token of every document in exactly one piece.

  Raises:
    ValueError: a number out of range; more than 4096 documents in a row.

  Example:
    >>> packing = pack(np.array([3, 5, 1, 9]), row_length=6, seed=0)
    >>> packing.num_rows, packing.utilisation
    (3, 1.0)
  """
  check_integer('row_length', row_length, 1)
  check_integer('seed', seed, 0)
  if row_length > _MOST_POSITIONS:
    raise ValueError(f'{row_length=} must be at most {_MOST_POSITIONS}')
  documents, starts, lengths = _pieces(lengths, row_length)
  order = _shuffled(len(lengths), seed)
  is_small = 2 * lengths[order] <= row_length
  order = order[np.argsort(is_small, kind='stable')]
  rows, num_rows = _best_fit(lengths[order], row_length)
  order = order[np.argsort(rows, kind='stable')]
  counts = np.bincount(rows, minlength=num_rows)
  if num_rows and counts.max() > _MOST_DOCUMENTS:
    raise ValueError(
      f'{counts.max()} documents share a row of {row_length=} tokens, more '
      f'than {_MOST_DOCUMENTS}; choose shorter rows'
    )
  return Packing(
    np.concatenate([[0], np.cumsum(counts)]),
    documents[order],
    starts[order],
    lengths[order],
    row_length,
  )


def _pieces(lengths, row_length):
  """Document, start and length of each piece, int32, in order."""
  lengths = np.asarray(lengths)
  if lengths.size and lengths.max() >= 2**31:
    raise ValueError(
      f'document {lengths.argmax()} has {lengths.max()} tokens, must have '
      'fewer than 2**31'
    )
  lengths = lengths.astype(np.int32)
  counts = -(-lengths // row_length)
  documents = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
  first = np.repeat(np.cumsum(counts) - counts, counts)
  starts = (np.arange(len(documents)) - first).astype(np.int32) * row_length
  return documents, starts, np.minimum(lengths[documents] - starts, row_length)


def _shuffled(size, seed):
  """A random order, the same with every version of NumPy."""
  # Raw bits of a bit generator are kept as they are, methods of Generator not.
  bits = np.random.Philox(key=seed).random_raw(size)
  return np.argsort(bits, kind='stable')


def _best_fit(lengths, row_length):
  """The row of each piece, and how many rows there are.

  Rows are kept by the room they have left. Bit s of `rooms` tells whether there
  is one with room s, so the least that is enough is the lowest bit from the
  piece's length on: of a whole number, however long, some machine operations.
  """
  rows = np.empty(len(lengths), np.int64)
  rooms, by_room = 0, [[] for _ in range(row_length + 1)]
  num_rows = 0
  for begin in range(0, len(lengths), _CHUNK):
    chosen = []
    for length in lengths[begin : begin + _CHUNK].tolist():
      enough = rooms >> length
      if enough:
        room = length + (enough & -enough).bit_length() - 1
        row = by_room[room].pop()
        if not by_room[room]:
          rooms ^= 1 << room
      else:
        row, room = num_rows, row_length
        num_rows += 1
      chosen.append(row)
      room -= length
      if room:
        by_room[room].append(row)
        rooms |= 1 << room
    rows[begin : begin + len(chosen)] = chosen
  return rows, num_rows
