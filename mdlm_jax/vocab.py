"""The token table: its size and the ids that play a role."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Vocab:
  """Roles of the ids of an embedding table with `size` rows; hashable.

  An id outside the table is never an error in JAX (a gather returns the last
  row or NaN), so everything is checked on construction.

  Attributes:
    size: rows of the embedding table, MASK included.
    mask_id: the absorbing token.
    pad_id: the id that fills unused slots, or None.
    bos_id: beginning of a sequence, or None.
    eos_ids: ids that end a sequence.
    forbidden_ids: ids that must never be drawn, such as rows of the table
      without a token.
    pad_is_eos: declares that `pad_id` is one of `eos_ids`. That id is then an
      ordinary token that may be drawn and written.

  Raises:
    ValueError: an id outside `[0, size)`, a MASK that is PAD, BOS or EOS, a PAD
      that is EOS without `pad_is_eos`, `pad_is_eos` where it is not so, or
      nothing left to draw.

  Example:
    >>> Vocab(size=4, mask_id=1, pad_id=0).drawable
    array([False, False,  True,  True])
  """

  size: int
  mask_id: int
  pad_id: int | None = None
  bos_id: int | None = None
  eos_ids: Sequence[int] = ()
  forbidden_ids: Sequence[int] = ()
  pad_is_eos: bool = False

  def __post_init__(self):
    for role in ('eos_ids', 'forbidden_ids'):
      ids = getattr(self, role)
      if not isinstance(ids, Sequence):
        raise ValueError(f'{role}={ids!r} must be a sequence of ids')
      object.__setattr__(self, role, tuple(ids))  # Lists are not hashable.
    for role, token_id in [('size', self.size), *self._roles()]:
      if not isinstance(token_id, int) or isinstance(token_id, bool):
        raise ValueError(f'{role}={token_id!r} must be an integer')
    for role, token_id in self._roles():
      if not 0 <= token_id < self.size:
        raise ValueError(
          f'{role}={token_id} must lie in [0, {self.size}), the rows of the '
          'table'
        )
      if token_id == self.mask_id and role in ('pad_id', 'bos_id', 'eos_ids'):
        raise ValueError(
          f'{role}={token_id} is also mask_id; MASK may have no other role'
        )
    if self.pad_is_eos and self.pad_id not in self.eos_ids:
      raise ValueError(
        f'pad_is_eos=True but pad_id={self.pad_id} is not among '
        f'eos_ids={self.eos_ids}'
      )
    if not self.pad_is_eos and self.pad_id in self.eos_ids:
      raise ValueError(
        f'pad_id={self.pad_id} is also an EOS id; declare it with '
        'pad_is_eos=True'
      )
    if not self.drawable.any():
      raise ValueError(f'{self} leaves no id that can be drawn')

  def _roles(self):
    yield 'mask_id', self.mask_id
    for role in ('pad_id', 'bos_id'):
      if getattr(self, role) is not None:
        yield role, getattr(self, role)
    for role in ('eos_ids', 'forbidden_ids'):
      for token_id in getattr(self, role):
        yield role, token_id

  @property
  def drawable(self) -> np.ndarray:
    """The ids that may be drawn: Boolean, shape `[size]`.

    False at MASK, at forbidden ids and at PAD (unless `pad_is_eos`).
    """
    drawable = np.ones(self.size, bool)
    drawable[[self.mask_id, *self.forbidden_ids]] = False
    if self.protected_pad_id >= 0:
      drawable[self.protected_pad_id] = False
    return drawable

  def forbidding(self, ids: Sequence[int]) -> 'Vocab':
    """The same roles, but `ids` are never drawn either.

    Raises:
      ValueError: an id outside the table, or nothing left to draw.

    Example:
      >>> Vocab(size=4, mask_id=1, eos_ids=(0,)).forbidding([0]).drawable
      array([False, False,  True,  True])
    """
    forbidden = dict.fromkeys([*self.forbidden_ids, *ids])
    return dataclasses.replace(self, forbidden_ids=tuple(forbidden))

  @property
  def protected_pad_id(self) -> int:
    """The id that marks padding and is never written; -1 when there is none.

    It is -1 also where PAD is EOS: padding is then known from `valid` only.
    """
    if self.pad_id is None or self.pad_is_eos:
      return -1
    return self.pad_id
