"""Tokenised documents at random access."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Integer


@runtime_checkable
class Documents(Protocol):
  """What rows are made of: documents of known lengths, in a fixed order.

  They are `prepared.DocumentsOnDisk` or `DocumentsInMemory`.

  Attributes:
    lengths: tokens of each document. Shape `[N]`.
    num_given: how many of them, from the first on, are given: never masked, as
      a prompt or BOS. Shape `[N]`.
  """

  lengths: Integer[np.ndarray, 'N']
  num_given: Integer[np.ndarray, 'N']

  def ids_of(self, indices: Int[np.ndarray, 'B']) -> list[np.ndarray]:
    """Ids of some documents, int32, one array each, in the order asked."""
    ...


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentsInMemory:
  """Small documents, as they are.

  Attributes:
    ids: of each document.
    num_given: how many of them are given. Shape `[N]`.

  Raises:
    ValueError: `num_given` are not N numbers from 0 to the length of each.
  """

  ids: Sequence[Int[np.ndarray, '...']]
  num_given: Integer[np.ndarray, 'N']

  def __post_init__(self):
    given = np.asarray(self.num_given)
    if given.shape != (len(self.ids),):
      raise ValueError(
        f'num_given has shape {given.shape} for {len(self.ids)} documents'
      )
    wrong = np.flatnonzero((given < 0) | (given > self.lengths))
    if wrong.size:
      i = wrong[0]
      raise ValueError(
        f'num_given[{i}]={given[i]} must be from 0 to {self.lengths[i]}, the '
        'length of the document'
      )

  @functools.cached_property
  def lengths(self) -> Int[np.ndarray, 'N']:
    return np.array([len(ids) for ids in self.ids], np.int32)

  def ids_of(self, indices: Int[np.ndarray, 'B']) -> list[np.ndarray]:
    return [np.asarray(self.ids[i], np.int32) for i in indices]
