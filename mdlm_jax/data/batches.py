"""Rows to shuffled batches, each row once per epoch.

The order is a function of the seed alone: batch g is the g-th `batch_size` rows
of the shuffled epochs, whoever loads which of them. So the position in the data
is a number of batches, and a run may go on with more processes or fewer.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from mdlm_jax.checks import check_integer

_MOST_ROWS = 2**53  # More than any run sees.


@runtime_checkable
class Rows(Protocol):
  """What batches are drawn from: rows of one length, at random access."""

  def __len__(self) -> int: ...

  def take(self, indices: Int[np.ndarray, 'B']) -> dict[str, np.ndarray]:
    """Some rows: `ids` int32 and `valid` bool, `[B, L]` each.

    They may have more, `[B, L]` each: `given` bool, tokens that are never
    masked; `segments` and `positions` int32, of documents packed in a row.
    """
    ...


def row_numbers(
  num_rows: int, batch: int, *, batch_size: int, seed: int
) -> Int[np.ndarray, 'B']:
  """The numbers of the rows of one global batch, which `batches` would give.

  Needs grain.

  Args:
    num_rows: how many rows there are.
    batch: number of the batch, from 0.
    batch_size: rows of a global batch.
    seed: of the order.
  """
  return np.asarray(_order(num_rows, batch_size, seed)[batch])


def _order(num_rows, batch_size, seed):
  import grain  # Of the extra `train`; nothing else here needs it.

  check_integer('batch_size', batch_size, 1)
  order = grain.MapDataset.range(num_rows).seed(seed).shuffle()
  # Without a number of epochs the length is one that Grain cannot count.
  return order.repeat(_MOST_ROWS // num_rows).batch(batch_size)


def batches(
  rows: Rows,
  *,
  batch_size: int,
  seed: int,
  local: Int[np.ndarray, 'b'] | None = None,
) -> Iterator[dict]:
  """Endless batches of shuffled rows.

  Needs grain. The iterator has `get_state` and `set_state`; a restored one
  goes on with the very next batch, also where another part of it is loaded.

  Args:
    rows: what is shuffled.
    batch_size: rows of a global batch.
    seed: of the order.
    local: which rows of each global batch are loaded, numbers below
      `batch_size`; None: all. Shape `[b]`.

  Raises:
    ValueError: `batch_size` is below 1.

  Yields:
    What `rows` have, `[b, L]` each, `row_ids` int32 `[b]`, the rows' numbers
    within the global batch, and `record_ids` int32 `[b]`, those in `rows`.
  """
  import grain

  if local is None:
    local = np.arange(batch_size)
  row_ids = np.asarray(local, np.int32)

  def batch(indices):
    indices = indices[row_ids]
    return rows.take(indices) | {
      'row_ids': row_ids,
      'record_ids': indices.astype(np.int32),
    }

  dataset = _order(len(rows), batch_size, seed).map(batch)
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
  return iter(dataset.to_iter_dataset(options))
