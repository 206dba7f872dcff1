"""Sudoku: what the order of filling in is worth, and every other choice.

  python scripts/experiments/sudoku.py --plot=sudoku.png

A masked diffusion model of full grids solves puzzles by filling in their open
cells. Every puzzle has one solution, so an answer is right or wrong, and no
symmetry of Sudoku leads from a training grid to a solution (`sudoku_grids`).
In training the network is asked for the cells of any canvas, most of them too
hard for it; which ones it is asked for in sampling is the choice of positions
(Kim et al. 2025, arXiv 2502.06768).

Printed is the share of the puzzles that is solved, with its standard error, for
one axis of decoding varied at a time around one decoder: the most probable
digit, at the cell with the most certain one, one cell per network call.

  values      the digit: the most probable one, or a draw
  positions   the order, at equal numbers of calls
  calls       several cells per call
  adaptive    as many cells per call as the prediction allows
  correction  digits are taken back, at equal numbers of calls
  blocks      rows of the grid one after another, at equal numbers of calls

The model is the one that comes with the package, of 6x6 grids, or another of
--checkpoint; with --config and --workdir it is trained first:

  python scripts/experiments/sudoku.py --config=configs/sudoku6.py \\
    --workdir=runs/sudoku6

A network that is trained longer solves more in random order too: what it sees
at a glance needs no order.

Needs the extra `train`. Takes a minute and a half of CPU time, most of it
compilation; `--axes=positions` a third of that.
"""

import functools
import hashlib
import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import sudoku_grids
import tqdm
from absl import flags

import mdlm_jax
from mdlm_jax import (
  blocks,
  canvas,
  command_line,
  draws,
  provenance,
  rules,
  sampling,
  schedules,
)
from mdlm_jax.data.windows import Windows
from mdlm_jax.models import directory, placement, transformer
from mdlm_jax.rules import sigmas
from mdlm_jax.tokenizer import Tokenizer, character_tokenizer

with command_line.extra('train'):
  import grain  # noqa: F401
  from ml_collections import ConfigDict, config_flags

  from mdlm_jax import run_data, run_model, run_setup, runs

AXES = ('values', 'positions', 'calls', 'adaptive', 'correction', 'blocks')

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Trains a model first, in --workdir.', lock_config=True
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Where --config trains; a run that is there goes on.'
)
_CHECKPOINT = flags.DEFINE_string(
  'checkpoint',
  None,
  'A model directory, or the --workdir of an earlier run. Default: the model '
  'of 6x6 grids that comes with the package.',
)
_GIVENS = flags.DEFINE_integer(
  'givens', None, 'Given cells of a puzzle. Default: a third of all cells.', 1
)
_NUM_PUZZLES = flags.DEFINE_integer('num_puzzles', 200, 'Puzzles.', 2)
_AXES = flags.DEFINE_multi_enum(
  'axes', None, AXES, 'Only these axes; the flag may be repeated.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of puzzles and draws.', 0, 2**32 - 1)
_PLOT = flags.DEFINE_string('plot', None, 'Writes a plot to this file.')
_JSON = flags.DEFINE_string('json', None, 'Writes the numbers to this file.')

PACKAGED = pathlib.Path(mdlm_jax.__file__).parent / 'pretrained' / 'sudoku6'
_NUM_FILLS = 2000  # Of which the test's puzzles are made.
_CONFIDENCE, _RANDOM = 'confidence', 'random'


class Case(NamedTuple):
  """A way to decode, and the axis on which it differs from the first one."""

  axis: str
  name: str
  rule: rules.Rule
  draw: draws.Draw = draws.categorical(temperature=0.0)
  block_length: int | None = None


def cases(size: int, num_open: int) -> list[Case]:
  """What is compared, the decoder that the others differ from first.

  Args:
    size: digits of the grid.
    num_open: open cells of every puzzle.
  """
  by_confidence = rules.by_confidence
  grid = schedules.uniform_grid(num_open)
  half = -(-num_open // 2)

  def greedy(score):
    return draws.categorical(temperature=0.0, score=score)

  def values(name, **settings):
    rule = by_confidence(num_open)
    return Case('values', name, rule, draws.categorical(**settings))

  def positions(name, rule=None, score=draws.row_maximum):
    rule = by_confidence(num_open) if rule is None else rule
    return Case('positions', name, rule, greedy(score))

  def calls(name, cells_per_call, score):
    rule = by_confidence(-(-num_open // cells_per_call))
    return Case('calls', name, rule, greedy(score))

  def remasking(name, sigmas, **settings):
    rule = rules.remasking(grid, sigmas, **settings)
    return Case('correction', name, rule)

  def in_blocks(num_rows):
    rule = by_confidence(
      blocks.steps_per_block(size * -(-num_open // size), size // num_rows)
    )
    name = f'{num_rows} rows' if num_rows > 1 else '1 row'
    return Case('blocks', name, rule, block_length=num_rows * size)

  return [
    values('temperature 0', temperature=0.0),
    values('temperature 0.5', temperature=0.5),
    values('temperature 1', temperature=1.0),
    positions(_CONFIDENCE),
    positions('margin', score=draws.margin),
    positions('entropy', score=draws.negative_entropy),
    positions('MaskGIT, 4.5', rules.maskgit(num_open, 4.5)),
    positions('sampled, 0.2', rules.by_sampled_confidence(num_open, 0.2)),
    positions('binomial', rules.by_binomial_confidence(grid)),
    positions('left to right', rules.left_to_right(num_open)),
    positions('first hitting', rules.first_hitting()),
    positions('kernel', rules.kernel(grid)),
    positions(_RANDOM, score=draws.random_order),
    *(calls(_CONFIDENCE, k, draws.row_maximum) for k in (2, 3, 4, 6)),
    *(calls(_RANDOM, k, draws.random_order) for k in (2, 4)),
    Case('adaptive', 'threshold 0.9', rules.threshold(0.9)),
    Case('adaptive', 'factor 1', rules.factor(1.0)),
    Case('adaptive', 'entropy bound 0.1', rules.entropy_bound(0.1)),
    Case('adaptive', 'KLASS 0.9, 0.01', rules.klass(0.9, 0.01)),
    Case('adaptive', 'dilated', rules.dilated()),
    Case('correction', 'none: kernel', rules.kernel(grid)),
    remasking('ReMDM-cap 0.1', sigmas.cap(grid, 0.1)),
    remasking('ReMDM-rescale 0.5', sigmas.rescale(grid, 0.5)),
    remasking('ReMDM-conf', sigmas.rescale(grid, 1.0), by_confidence=True),
    Case('correction', 'P2, eta 1', rules.path_planning(num_open)),
    Case(
      'correction',
      'refined',
      rules.refined(by_confidence(half), rounds=num_open - half, count=2),
    ),
    Case(
      'correction',
      'edits',
      rules.editing(by_confidence(half), 0.9, max_rounds=num_open - half),
    ),
    *(in_blocks(n) for n in range(1, size) if size % n == 0),
  ]


def solve(
  model, case: Case, open_canvas: canvas.Canvas, seed: int
) -> sampling.SampleResult:
  """The canvas filled in by a case."""
  length = case.block_length
  return sampling.sample(
    model.denoiser,
    model.params,
    jax.random.key(seed),
    open_canvas,
    vocab=model.vocab,
    rule=case.rule,
    draw=case.draw,
    schedule=model.schedule,
    blocks=(
      blocks.blocks_of(open_canvas, length, aligned=True) if length else None
    ),
  )


def compare(
  model,
  compared: Sequence[Case],
  puzzles: sudoku_grids.Puzzles,
  seed: int,
) -> list[dict]:
  """One dictionary per case; `solved` has a 0 or 1 for every puzzle."""
  open_canvas = canvas.from_rows(
    [
      [None if slot == sudoku_grids.EMPTY else slot for slot in row]
      for row in encode(puzzles.puzzles, model.tokenizer).tolist()
    ],
    model.vocab,
  )
  answers = encode(puzzles.solutions, model.tokenizer)
  rows = []
  for case in tqdm.tqdm(compared, unit='decoder', dynamic_ncols=True):
    result = solve(model, case, open_canvas, seed)
    solved = (np.asarray(result.ids) == answers).all(1)
    rows.append(
      {
        'axis': case.axis,
        'name': case.name,
        'calls': float(np.mean(result.calls_per_row)),
        'rate': float(solved.mean()),
        'rate_error': rate_error(solved),
        'solved': ''.join(map(str, solved.astype(int))),
      }
    )
  return rows


def rate_error(solved: Sequence[bool]) -> float:
  """Standard error of a share, sqrt(p (1 - p) / n).

  p is that of one success and one failure more, so that none of n leaves an
  error.
  """
  n = len(solved)
  p = (np.sum(solved) + 1) / (n + 2)
  return math.sqrt(p * (1 - p) / n)


def gap(first: dict, second: dict) -> tuple[float, float]:
  """Difference of two rates on the same puzzles, and its standard error."""
  differences = np.subtract(
    *(np.array(list(row['solved']), int) for row in (first, second))
  )
  error = np.std(differences, ddof=1) / math.sqrt(len(differences))
  return float(differences.mean()), float(error)


def encode(grids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
  """Grids `[B, N, N]` as rows of token ids `[B, N * N]`, `EMPTY` unchanged."""
  rows = grids.reshape(len(grids), -1)
  first = tokenizer.encode('1')[0]
  empty = sudoku_grids.EMPTY
  return np.where(rows == empty, empty, rows + first).astype(np.int32)


def size_of(model: directory.Pretrained) -> int:
  """Digits of the grids that a model knows.

  Raises:
    ValueError: it is no model of grids.
  """
  size = math.isqrt(model.config.max_length)
  digits = frozenset(_digits(size))
  if model.tokenizer.alphabet != digits or size**2 != model.config.max_length:
    raise ValueError(
      f'the model has length {model.config.max_length} and other characters '
      f'than the digits of a Sudoku grid'
    )
  return size


def held_out_puzzles(
  size: int, *, givens: int, count: int, seed: int
) -> sudoku_grids.Puzzles:
  """Puzzles of held-out grids."""
  if not 0 < givens < size**2:
    raise ValueError(f'{givens=} must lie between 0 and {size**2} cells')
  rng = np.random.default_rng([seed, 1])
  split = sudoku_grids.split_fills(rng, size, _NUM_FILLS)
  return sudoku_grids.random_puzzles(
    rng, split.held_out, givens=givens, count=count
  )


def training_grids(
  size: int, *, num_fills: int, num_grids: int, seed: int
) -> np.ndarray:
  """Grids `[num_grids, N, N]`, none of them of a held-out class."""
  rng = np.random.default_rng([seed, 0])
  split = sudoku_grids.split_fills(rng, size, num_fills)
  return sudoku_grids.random_grids(rng, split.training, num_grids)


def prepare(config: ConfigDict) -> run_setup.Run:
  """What the config stands for, without a text.

  Raises:
    ValueError: the first mistake in the config.
  """
  size = config.data.size
  if not 4 <= size <= 9:
    raise ValueError(f'config.data.size={size} must be from 4 to 9')
  tokenizer = character_tokenizer(_digits(size))
  grids = training_grids(
    size,
    num_fills=config.data.num_fills,
    num_grids=config.data.num_grids,
    seed=config.seed,
  )
  ids = encode(grids, tokenizer)
  windows = Windows(
    ids.ravel(),
    np.ones(ids.size, bool),
    size**2 * np.arange(len(ids)),
    size**2,
  )
  model = transformer.TransformerConfig(
    vocab_size=tokenizer.vocab.size, max_length=size**2, **config.model
  )
  digest = hashlib.sha256(windows.ids.tobytes()).hexdigest()
  data = run_data.RunData(
    windows, tokenizer, {'corpus_sha256': digest}, evaluate=None
  )
  mesh = placement.mesh(**config.mesh)
  return run_setup.assemble(
    config, mesh, data, functools.partial(run_model.fresh_model, model, mesh)
  )


def train(config: ConfigDict, workdir: pathlib.Path) -> int | None:
  """Trains, or goes on; the signal that ended the run early, or None."""
  return runs.train_model(prepare(config), workdir)


def _digits(size):
  """Text of the digits of a grid, 1 to `size`."""
  return ''.join(str(digit + 1) for digit in range(size))


def table(rows: Sequence[dict]) -> str:
  """The numbers as text, a paragraph per axis."""
  lines = [f'{"axis":10s}  {"name":18s} {"calls":>5s}  solved']
  axis = None
  for row in rows:
    if row['axis'] != axis:
      axis = row['axis']
      lines.append('')
    lines.append(
      f'{axis:10s}  {row["name"]:18s} {row["calls"]:5.1f}  '
      f'{row["rate"]:.3f} +- {row["rate_error"]:.3f}'
    )
  return '\n'.join(lines)


def plot(rows: Sequence[dict], path: str) -> None:
  """Bars for the axes at equal calls, and the rate against calls."""
  pyplot = command_line.pyplot()
  figure, (bars, curves) = pyplot.subplots(1, 2, figsize=(12, 6))
  by_calls = ('calls', 'adaptive')
  equal = [row for row in rows if row['axis'] not in by_calls][::-1]
  axes = list(dict.fromkeys(row['axis'] for row in equal))
  bars.barh(
    [f'{row["axis"]}: {row["name"]}' for row in equal],
    [row['rate'] for row in equal],
    xerr=[row['rate_error'] for row in equal],
    color=[f'C{axes.index(row["axis"])}' for row in equal],
    capsize=3,
  )
  bars.set(xlabel='share solved', xlim=(0, 1.05))
  bars.set_title('one axis at a time, equal numbers of calls')
  free = [
    row
    for row in rows
    if row['axis'] in by_calls
    or (row['axis'] == 'positions' and row['name'] in (_CONFIDENCE, _RANDOM))
  ]
  for name in dict.fromkeys(row['name'] for row in free):
    group = sorted(
      (row for row in free if row['name'] == name), key=lambda row: row['calls']
    )
    curves.errorbar(
      [row['calls'] for row in group],
      [row['rate'] for row in group],
      [row['rate_error'] for row in group],
      marker='o',
      capsize=3,
      label=name,
    )
  curves.set(xlabel='network calls per puzzle', ylim=(0, 1.05))
  curves.set_title('share solved against calls')
  curves.legend()
  figure.tight_layout()
  figure.savefig(path, dpi=150)


def main(argv) -> int:
  del argv
  command_line.check_outputs(plot=_PLOT.value, numbers=_JSON.value)
  if (_CONFIG.value is None) != (_WORKDIR.value is None):
    raise ValueError('training needs both --config and --workdir')
  if _WORKDIR.value and _CHECKPOINT.value:
    raise ValueError(
      '--checkpoint is a model that exists; --workdir trains one'
    )
  stopped_by = None
  if _CONFIG.value is not None:
    stopped_by = train(_CONFIG.value, pathlib.Path(_WORKDIR.value))
  if stopped_by is not None:
    return 130
  path = directory.find(_WORKDIR.value or _CHECKPOINT.value or PACKAGED)
  model = directory.load(path)
  size = size_of(model)
  givens = _GIVENS.value or size**2 // 3
  puzzles = held_out_puzzles(
    size, givens=givens, count=_NUM_PUZZLES.value, seed=_SEED.value
  )
  compared = [
    case
    for case in cases(size, size**2 - givens)
    if case.axis in (_AXES.value or AXES)
  ]
  rows = compare(model, compared, puzzles, _SEED.value)
  print(f'{_NUM_PUZZLES.value} puzzles of {size}x{size}, {givens} givens\n')
  print(table(rows))
  orders = {row['name']: row for row in rows if row['axis'] == 'positions'}
  if orders:
    difference, error = gap(orders[_CONFIDENCE], orders[_RANDOM])
    print(f'\n{_CONFIDENCE} minus {_RANDOM}: {difference:.3f} +- {error:.3f}')
  command_line.write_json(
    _JSON.value,
    {
      'checkpoint': str(path),
      'givens': givens,
      'num_puzzles': _NUM_PUZZLES.value,
      'seed': _SEED.value,
      **provenance.environment(),
      'results': rows,
    },
  )
  if _PLOT.value:
    plot(rows, _PLOT.value)
  return 0


if __name__ == '__main__':
  command_line.run(main)
