"""Sudoku: grids by brute force, the split, and what the order is worth."""

import collections
import itertools
import json
import runpy
import sys

import grain  # noqa: F401  Its flags are defined once, and must stay.
import jax
import numpy as np
import pytest
import script_runner

from mdlm_jax import draws, rules
from mdlm_jax.models import directory

SCRIPT = 'experiments/sudoku.py'
# As `python scripts/experiments/sudoku.py` finds it.
sys.path.insert(0, str(script_runner.ROOT / 'scripts' / 'experiments'))

import sudoku_grids as grids  # noqa: E402

PUZZLE = (
  '530070000600195000098000060800060003400803001700020006060000280000419005'
  '000080079'
)
SOLUTION = (
  '534678912672195348198342567859761423426853791713924856961537284287419635'
  '345286179'
)


@pytest.fixture(scope='module')
def script():
  return script_runner.load(SCRIPT)


@pytest.fixture(scope='module')
def all_of_size_4():
  """Every 4x4 grid, from the rules of the game alone."""
  found = []
  for rows in itertools.product(itertools.permutations(range(4)), repeat=4):
    columns = zip(*rows, strict=True)
    boxes = (
      [rows[i + a][j + b] for a in (0, 1) for b in (0, 1)]
      for i in (0, 2)
      for j in (0, 2)
    )
    if all(len(set(unit)) == 4 for unit in itertools.chain(columns, boxes)):
      found.append(rows)
  return np.array(found)


def as_grid(text):
  size = int(len(text) ** 0.5)
  return np.array([int(c) - 1 for c in text]).reshape(size, size)


def keys(some_grids):
  return {tuple(np.ravel(grid).tolist()) for grid in some_grids}


def test_boxes_are_two_by_three():
  board = np.arange(36).reshape(6, 6)
  boxes = {tuple(unit.tolist()) for unit in grids.units(6)[12:]}
  assert boxes == {
    tuple(board[i : i + 2, j : j + 3].ravel().tolist())
    for i in (0, 2, 4)
    for j in (0, 3)
  }
  assert len(grids.units(6)) == 18


def test_solver_finds_every_grid_of_size_4_once(all_of_size_4):
  assert len(all_of_size_4) == 288
  assert grids.is_valid(all_of_size_4).all()
  empty = np.full((4, 4), grids.EMPTY)
  for rng in (None, np.random.default_rng(0)):
    found = list(grids.solutions(empty, rng))
    assert len(found) == 288
    assert keys(found) == keys(all_of_size_4)


def test_there_are_as_many_grids_of_size_6_as_published():
  """28,200,960, which is 720 for each with the first row in order."""
  puzzle = np.full((6, 6), grids.EMPTY)
  puzzle[0] = range(6)
  assert sum(1 for _ in grids.solutions(puzzle)) == 28_200_960 // 720


def test_an_invalid_grid_is_found_by_row_column_and_box(all_of_size_4):
  in_rows = np.tile(np.arange(4), (4, 1))
  latin = np.array([[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]])
  bad = np.stack([in_rows, in_rows.T, latin, all_of_size_4[0]])
  assert grids.is_valid(bad).tolist() == [False, False, False, True]


def test_uniqueness_is_that_of_brute_force(all_of_size_4):
  rng = np.random.default_rng(0)
  counts = collections.Counter()
  for _ in range(300):
    puzzle = all_of_size_4[rng.integers(288)].copy()
    puzzle[rng.random((4, 4)) < 0.6] = grids.EMPTY
    if rng.random() < 0.2:
      puzzle.flat[rng.integers(16)] = rng.integers(4)  # Perhaps a wrong one.
    agree = (puzzle == grids.EMPTY) | (puzzle == all_of_size_4)
    count = int(agree.all((1, 2)).sum())
    counts[min(count, 2)] += 1
    assert grids.is_unique(puzzle) == (count == 1)
    assert len(list(grids.solutions(puzzle))) == count
  assert min(counts[n] for n in range(3)) >= 10


def test_solver_solves_a_published_puzzle():
  (found,) = grids.solutions(as_grid(PUZZLE))
  np.testing.assert_array_equal(found, as_grid(SOLUTION))
  wrong = as_grid(PUZZLE)
  wrong[0, 2] = 0  # The solution has a 4 there.
  assert list(grids.solutions(wrong)) == []


def test_shuffles_are_uniform_over_the_grids_that_symmetries_reach(
  all_of_size_4,
):
  """There are two kinds of 4x4 grids, of 96 and of 192."""
  by_class = collections.defaultdict(list)
  for grid in all_of_size_4:
    by_class[grids.grid_class(grid)].append(grid)
  assert sorted(map(len, by_class.values())) == [96, 192]
  for members in by_class.values():
    same = np.repeat(members[:1], 20_000, 0)
    counts = collections.Counter(
      map(bytes, grids.shuffled(np.random.default_rng(0), same))
    )
    assert len(counts) == len(members)
    assert set(counts) == {bytes(np.int8(grid)) for grid in members}
    expected = len(same) / len(members)
    chi2 = sum((n - expected) ** 2 / expected for n in counts.values())
    freedom = len(members) - 1
    # Five standard deviations: false alarm about 1e-5 for this wide a chi^2.
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize('size', [6, 9])
def test_symmetries_do_not_change_the_class(size):
  rng = np.random.default_rng(0)
  fills = grids.filled_grids(rng, size, 20)
  assert grids.is_valid(fills).all()
  turned = grids.shuffled(rng, fills)
  assert grids.is_valid(turned).all()
  assert (turned != fills).any((1, 2)).all()
  assert list(map(grids.grid_class, turned)) == list(
    map(grids.grid_class, fills)
  )
  assert len(set(map(grids.grid_class, fills))) > 5


@pytest.mark.parametrize(
  ('size', 'givens', 'count'), [(6, 12, 100), (9, 30, 3)]
)
def test_no_training_grid_is_a_test_solution_in_disguise(
  script, size, givens, count
):
  training = script.training_grids(size, num_fills=200, num_grids=3000, seed=0)
  puzzles = script.held_out_puzzles(size, givens=givens, count=count, seed=0)
  assert grids.is_valid(training).all()
  assert grids.is_valid(puzzles.solutions).all()
  seen, held_out = (
    set(map(grids.grid_class, some)) for some in (training, puzzles.solutions)
  )
  assert not seen & held_out
  assert not any(map(grids.is_held_out, training))
  assert all(map(grids.is_held_out, puzzles.solutions))
  # About one class in eight is held out, so the parts are not tiny.
  assert len(seen) > 10


def test_puzzles_have_one_solution_and_the_givens_asked_for(all_of_size_4):
  rng = np.random.default_rng(0)
  made = grids.random_puzzles(rng, all_of_size_4, givens=5, count=30)
  given = made.puzzles != grids.EMPTY
  assert (given.sum((1, 2)) == 5).all()
  assert (made.puzzles == made.solutions)[given].all()
  for puzzle, solution in zip(*made, strict=True):
    agree = ((puzzle == grids.EMPTY) | (puzzle == all_of_size_4)).all((1, 2))
    np.testing.assert_array_equal(all_of_size_4[agree], solution[None])
  with pytest.raises(ValueError, match='givens=3'):  # Four is the least.
    grids.random_puzzles(rng, all_of_size_4, givens=3, count=1)


def test_errors_of_rates_and_gaps_by_hand(script):
  assert script.rate_error([1, 1, 0, 0]) == pytest.approx((0.25 / 4) ** 0.5)
  assert script.rate_error([0] * 8) == pytest.approx((0.09 / 8) ** 0.5)
  first, second = ({'solved': s} for s in ('1110', '0100'))
  # Differences 1, 0, 1, 0: mean 1/2, variance 1/3.
  assert script.gap(first, second) == pytest.approx((0.5, (1 / 12) ** 0.5))


def small_config():
  config = runpy.run_path(str(script_runner.ROOT / 'configs' / 'sudoku6.py'))[
    'get_config'
  ]()
  config.update(steps=4, log_every=2)
  config.data.update(size=4, num_fills=50, num_grids=64, batch_size=8)
  config.model.num_layers = 1
  config.optimizer.update(warmup_steps=1, muon_learning_rate=0.0)
  return config


def test_training_goes_on_where_it_was_stopped(script, tmp_path):
  config = small_config()
  assert script.train(config, tmp_path) is None
  log = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert [json.loads(line)['step'] for line in log] == [2, 4]
  model = directory.load(tmp_path / 'model')
  assert model.tokenizer.alphabet == frozenset('1234')
  # A complete run stays as it is; another one is refused.
  script.train(config, tmp_path)
  jax.tree.map(
    np.testing.assert_array_equal,
    directory.load(tmp_path / 'model').params,
    model.params,
  )
  config.data.num_grids = 65
  with pytest.raises(ValueError, match='num_grids=64, not 65'):
    script.train(config, tmp_path)


def test_experiment_prints_and_writes(script, tmp_path, capsys):
  config = small_config()
  run = script.prepare(config)
  directory.save(
    tmp_path,
    run.model.config,
    run.model.init(),
    run.data.tokenizer.vocab,
    run.data.tokenizer,
  )

  def few(size, num_open):
    assert (size, num_open) == (4, 8)
    rule = rules.by_confidence(4)
    return [
      script.Case('positions', 'confidence', rule),
      script.Case('positions', 'random', rule),
      script.Case('blocks', '1 row', rules.by_confidence(2), block_length=4),
    ]

  script_runner.run(
    SCRIPT,
    f'--checkpoint={tmp_path}',
    '--givens=8',
    '--num_puzzles=5',
    f'--json={tmp_path}/x.json',
    f'--plot={tmp_path}/x.png',
    cases=few,
  )
  content = json.loads((tmp_path / 'x.json').read_text())
  calls = [(row['name'], row['calls']) for row in content['results']]
  assert calls == [('confidence', 4), ('random', 4), ('1 row', 8)]
  assert all(len(row['solved']) == 5 for row in content['results'])
  assert (tmp_path / 'x.png').read_bytes().startswith(b'\x89PNG')
  assert 'confidence minus random: 0.000 +- 0.000' in capsys.readouterr().out


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--workdir=x'], 'both --config and --workdir'),
    (['--givens=36'], 'between 0 and 36'),
    ([f'--checkpoint={directory.find()}'], 'other characters'),
  ],
)
def test_mistakes_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    script_runner.run(SCRIPT, *arguments)


def test_every_case_of_the_comparison_differs_from_the_others(script):
  """Save where an axis repeats what it is compared with."""
  compared = script.cases(6, 24)
  settings = [case[2:] for case in compared]
  assert len(settings) - len(set(settings)) == 2
  assert settings[0] == compared[3][2:]  # Confidence, at temperature 0.
  planned = [
    case.rule.calls(36)
    for case in compared
    if case.axis in ('values', 'positions', 'correction')
    and not case.rule.adaptive
  ]
  assert set(planned) == {24}


def test_adaptive_order_solves_what_random_order_does_not(script):
  """The shipped model: the gap is 0.5 and more, by four standard errors."""
  model = directory.load(script.PACKAGED)
  puzzles = script.held_out_puzzles(6, givens=12, count=200, seed=1)
  rule = rules.by_confidence(24)
  adaptive, random_order = script.compare(
    model,
    [
      script.Case('positions', score.__name__, rule, draw)
      for score in (draws.row_maximum, draws.random_order)
      for draw in [draws.categorical(temperature=0.0, score=score)]
    ],
    puzzles,
    seed=1,
  )
  difference, error = script.gap(adaptive, random_order)
  assert difference - 4 * error > 0.5
  record = json.loads((script.PACKAGED / 'comparison.json').read_text())
  recorded = {
    row['name']: row for row in record['results'] if row['axis'] == 'positions'
  }
  for name, row in (('confidence', adaptive), ('random', random_order)):
    error = np.hypot(row['rate_error'], recorded[name]['rate_error'])
    assert abs(row['rate'] - recorded[name]['rate']) < 4 * error


def test_the_shipped_model_is_that_of_the_config(script):
  model = directory.load(script.PACKAGED)
  assert model.history['step'] == model.history['config']['steps']
  weights = script.PACKAGED / 'model.safetensors'
  assert weights.stat().st_size < 500_000
  assert sum(x.size for x in jax.tree.leaves(model.params)) == 214_080
  assert model.tokenizer.decode([2, 3, 7]) == '126'
