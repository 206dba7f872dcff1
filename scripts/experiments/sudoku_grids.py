"""Sudoku: random grids, puzzles with one solution, a split that holds.

A grid of size N is an int8 array `[N, N]` of the digits 0 to N - 1 in which
every row, column and box holds each digit once. Boxes have the most nearly
square shape that is not taller than wide: 2x2 for N = 4, 2x3 for 6, 3x3 for 9.
A puzzle is a grid in which cells to be filled are `EMPTY`.

The symmetries of Sudoku are the relabellings of the digits, the permutations of
rows inside a band, of columns inside a stack, of bands and of stacks, and the
transposition where boxes are square. `grid_class` is the same for all grids
that symmetries connect, and whether a grid is held out depends on it alone: no
held-out grid is a training grid in disguise.
"""

import functools
import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

EMPTY = -1
# One class in so many is held out.
_HELD_OUT_EVERY = 8


def box_shape(size: int) -> tuple[int, int]:
  """Rows and columns of a box.

  Example:
    >>> box_shape(6), box_shape(9)
    ((2, 3), (3, 3))
  """
  rows = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
  return rows, size // rows


@functools.cache
def units(size: int) -> Int[np.ndarray, 'U N']:
  """The cells, numbered by rows, of every row, column and box."""
  cells = np.arange(size * size).reshape(size, size)
  height, width = box_shape(size)
  boxes = cells.reshape(width, height, height, width).swapaxes(1, 2)
  return np.concatenate([cells, cells.T, boxes.reshape(size, size)])


def is_valid(grids: Int[np.ndarray, 'B N N']) -> Bool[np.ndarray, 'B']:
  """Whether every row, column and box holds each digit once."""
  size = grids.shape[-1]
  cells = grids.reshape(len(grids), -1)[:, units(size)]
  return (np.sort(cells) == np.arange(size)).all((1, 2))


@functools.cache
def _units_of_cells(size):
  """For each cell, its three units."""
  return [
    tuple(np.flatnonzero((units(size) == cell).any(1)).tolist())
    for cell in range(size * size)
  ]


def solutions(
  puzzle: Int[np.ndarray, 'N N'], rng: np.random.Generator | None = None
) -> Iterator[Int[np.ndarray, 'N N']]:
  """Every grid that agrees with the puzzle, by backtracking.

  The cell with the fewest digits left is filled first.

  Args:
    puzzle: digits, `EMPTY` where open.
    rng: tries the digits of each cell in random order; None: ascending.
  """
  size = len(puzzle)
  of_cell = _units_of_cells(size)
  free = [(1 << size) - 1] * (3 * size)  # Digits that each unit lacks.
  cells = puzzle.ravel().tolist()

  def put(cell, bit):
    for unit in of_cell[cell]:
      free[unit] ^= bit

  for cell, digit in enumerate(cells):
    if digit != EMPTY:
      if not all(free[unit] >> digit & 1 for unit in of_cell[cell]):
        return
      put(cell, 1 << digit)
  open_cells = [cell for cell, digit in enumerate(cells) if digit == EMPTY]

  def fill():
    if not open_cells:
      yield np.array(cells, np.int8).reshape(size, size)
      return
    best, best_digits, fewest = 0, 0, size + 1
    for index, cell in enumerate(open_cells):
      a, b, c = of_cell[cell]
      digits = free[a] & free[b] & free[c]
      count = digits.bit_count()
      if count < fewest:
        best, best_digits, fewest = index, digits, count
        if count < 2:
          break
    cell = open_cells.pop(best)
    choices = [d for d in range(size) if best_digits >> d & 1]
    if rng is not None:
      rng.shuffle(choices)
    for digit in choices:
      cells[cell] = digit
      put(cell, 1 << digit)
      yield from fill()
      put(cell, 1 << digit)
    open_cells.insert(best, cell)

  yield from fill()


def is_unique(puzzle: Int[np.ndarray, 'N N']) -> bool:
  """Whether exactly one grid agrees with the puzzle."""
  found = solutions(puzzle)
  return next(found, None) is not None and next(found, None) is None


def filled_grids(
  rng: np.random.Generator, size: int, count: int
) -> Int[np.ndarray, 'B N N']:
  """Grids filled by backtracking with the digits in random order.

  Every grid has positive probability; they are not equally likely.
  """
  empty = np.full((size, size), EMPTY, np.int8)
  return np.stack([next(solutions(empty, rng)) for _ in range(count)])


def shuffled(
  rng: np.random.Generator, grids: Int[np.ndarray, 'B N N']
) -> Int[np.ndarray, 'B N N']:
  """Each grid under a random symmetry, uniform over all of them."""
  count, size, _ = grids.shape
  height, width = box_shape(size)
  digits = _random_orders(rng, count, size).astype(np.int8)
  grids = np.take_along_axis(digits, grids.reshape(count, -1), 1)
  grids = grids.reshape(count, size, size)
  rows = _line_orders(rng, count, width, height)
  columns = _line_orders(rng, count, height, width)
  grids = np.take_along_axis(grids, rows[:, :, None], 1)
  grids = np.take_along_axis(grids, columns[:, None, :], 2)
  if height == width:
    turned = rng.random(count) < 0.5
    grids = np.where(turned[:, None, None], grids.swapaxes(1, 2), grids)
  return grids


def _random_orders(rng, *shape):
  """Uniform permutations of the last axis."""
  return np.argsort(rng.random(shape), -1)


def _line_orders(rng, count, num_groups, group_size):
  """Groups of lines in random order, the lines of each in random order."""
  groups = _random_orders(rng, count, num_groups)[:, :, None]
  lines = _random_orders(rng, count, num_groups, group_size)
  return (groups * group_size + lines).reshape(count, -1)


def with_givens(
  rng: np.random.Generator, grid: Int[np.ndarray, 'N N'], givens: int
) -> Int[np.ndarray, 'N N'] | None:
  """A puzzle whose only solution is the grid, or None where the search fails.

  Cells are emptied one by one in random order, each only if the puzzle stays
  unique, until `givens` are left. From another order the same grid may succeed.
  """
  puzzle = grid.copy()
  left = grid.size
  for cell in rng.permutation(grid.size):
    if left == givens:
      break
    digit = puzzle.flat[cell]
    puzzle.flat[cell] = EMPTY
    if is_unique(puzzle):
      left -= 1
    else:
      puzzle.flat[cell] = digit
  return puzzle if left == givens else None


def grid_class(grid: Int[np.ndarray, 'N N']) -> str:
  """A description that no symmetry changes.

  Two rows of a band are a permutation of the digits, from the one to the other;
  the lengths of its cycles do not change when digits are relabelled or columns
  permuted. The class is these lengths for all pairs, sorted inside each band
  and over the bands, and the same for columns.
  """
  height, width = box_shape(len(grid))
  sides = [_bands_class(grid, height), _bands_class(grid.T, width)]
  return repr(sorted(sides) if height == width else sides)


def _bands_class(grid, height):
  bands = grid.reshape(-1, height, len(grid))
  return sorted(
    sorted(
      _cycle_lengths(first, second)
      for i, first in enumerate(band)
      for second in band[:i]
    )
    for band in bands.tolist()
  )


def _cycle_lengths(first, second):
  """Sorted lengths of the cycles of the permutation first[i] -> second[i]."""
  image = dict(zip(first, second, strict=True))
  lengths = []
  while image:
    start, digit = image.popitem()
    length = 1
    while digit != start:
      digit = image.pop(digit)
      length += 1
    lengths.append(length)
  return sorted(lengths)


def is_held_out(grid: Int[np.ndarray, 'N N']) -> bool:
  """Whether the grid's class belongs to the test, by a hash of it."""
  digest = hashlib.sha256(grid_class(grid).encode()).digest()
  return int.from_bytes(digest, 'big') % _HELD_OUT_EVERY == 0


class Split(NamedTuple):
  """Filled grids by use; symmetries lead from none to one of the other part.

  Attributes:
    training: shape `[M, N, N]`.
    held_out: shape `[K, N, N]`.
  """

  training: Int[np.ndarray, 'M N N']
  held_out: Int[np.ndarray, 'K N N']


def split_fills(rng: np.random.Generator, size: int, count: int) -> Split:
  """Filled grids, split by their class.

  Raises:
    ValueError: one of the parts is empty.
  """
  grids = filled_grids(rng, size, count)
  held_out = np.array([is_held_out(grid) for grid in grids])
  if held_out.all() or not held_out.any():
    raise ValueError(f'{count} fills of {size=} are all of one part; take more')
  return Split(grids[~held_out], grids[held_out])


def random_grids(
  rng: np.random.Generator, fills: Int[np.ndarray, 'M N N'], count: int
) -> Int[np.ndarray, 'B N N']:
  """Fills drawn with replacement, each under a random symmetry.

  All grids that symmetries make of one fill are equally likely; which of these
  sets comes how often, backtracking decides.
  """
  return shuffled(rng, fills[rng.integers(len(fills), size=count)])


class Puzzles(NamedTuple):
  """Puzzles and their only solutions, `[B, N, N]` each."""

  puzzles: Int[np.ndarray, 'B N N']
  solutions: Int[np.ndarray, 'B N N']


def random_puzzles(
  rng: np.random.Generator,
  fills: Int[np.ndarray, 'M N N'],
  *,
  givens: int,
  count: int,
) -> Puzzles:
  """Puzzles with unique solutions; grids where the search fails are dropped.

  Raises:
    ValueError: `givens` that no search reached in a hundred times `count`.
  """
  pairs = []
  for _ in range(100 * count):
    (grid,) = random_grids(rng, fills, 1)
    puzzle = with_givens(rng, grid, givens)
    if puzzle is not None:
      pairs.append((puzzle, grid))
    if len(pairs) == count:
      return Puzzles(*map(np.stack, zip(*pairs, strict=True)))
  raise ValueError(
    f'{len(pairs)} of {count} puzzles with {givens=} were found; take more '
    'givens'
  )
