"""The experiments: their numbers, tables, plots and files."""

import itertools
import json
import sys

import pytest
import script_runner
import tiny_checkpoint

from mdlm_jax import ngrams, rules, schedules

REVEAL = 'experiments/parallel_reveal_error.py'
STEPS = 'experiments/step_count.py'
DECODERS = 'experiments/decoders.py'


@pytest.fixture(scope='module')
def reveal():
  return script_runner.load(REVEAL)


@pytest.fixture(scope='module')
def step_count():
  return script_runner.load(STEPS)


@pytest.mark.parametrize('num_steps', [1, 8, 32])
def test_formula_is_one_over_two_k_on_equal_intervals(reveal, num_steps):
  grid = schedules.uniform_grid(num_steps)
  assert reveal.formula(grid) == pytest.approx(1 / (2 * num_steps), rel=1e-12)


@pytest.mark.parametrize(
  ('grid', 'invalid'),
  [
    ((1.0, 0.75, 0.5, 0.25, 0.0), 1 / 8),
    # Half of (1/4)^2 + (3/4)^2.
    ((1.0, 0.75, 0.0), 5 / 16),
  ],
)
def test_enumerated_law_is_half_the_sum_of_squares(reveal, grid, invalid):
  assert reveal.enumerated(rules.kernel(grid)) == pytest.approx(
    invalid, abs=1e-12
  )
  assert reveal.formula(grid) == pytest.approx(invalid, abs=1e-12)


def test_one_at_a_time_is_exact_and_one_call_is_not(reveal):
  assert reveal.enumerated(rules.by_confidence(2)) == 0
  share, error = reveal.simulated(rules.by_confidence(2), 500, seed=0)
  assert (share, error) == (0, 0)


def test_equal_intervals_are_the_best_of_their_number(reveal):
  equal = 1 / 16
  for name, grid in reveal.grids().items():
    assert len(grid) == 9
    assert all(a > b for a, b in itertools.pairwise(grid)), name
    assert (grid[0], grid[-1]) == (1, 0)
    assert reveal.formula(grid) == pytest.approx(equal) or name != 'equal'
    assert reveal.formula(grid) > equal + 0.01 or name == 'equal'


def test_reveal_experiment_prints_and_writes(tmp_path, capsys):
  paths = {kind: tmp_path / f'error.{kind}' for kind in ('json', 'png')}
  script_runner.run(
    REVEAL,
    '--rows=4000',
    f'--json={paths["json"]}',
    f'--plot={paths["png"]}',
    NUM_STEPS=(2,),
    grids=dict,
  )
  equal, one = json.loads(paths['json'].read_text())['results']
  assert equal['formula'] == 0.25
  assert equal['enumerated'] == pytest.approx(0.25, abs=1e-12)
  # sqrt(1/4 3/4 / 4000) is 0.0068.
  assert abs(equal['simulated'] - 0.25) < 4 * 0.0068
  assert equal['standard_error'] == pytest.approx(0.0068, abs=4e-4)
  assert (one['grid'], one['enumerated']) == ('one at a time', 0)
  assert '25.0000%' in capsys.readouterr().out
  assert paths['png'].read_bytes().startswith(b'\x89PNG')


def test_step_counts_double_up_to_the_length(step_count):
  assert step_count.step_counts(8) == [1, 2, 4, 8]
  assert step_count.step_counts(11) == [1, 2, 4, 8, 11]


@pytest.fixture
def small_model(tmp_path):
  """The directory of an untrained model with its reference text."""
  text = 'the cat sat on the mat and the dog ran '
  tiny_checkpoint.write(tmp_path, text, 16)
  ngrams.save(ngrams.fit([text * 3], 3), tmp_path / 'ngrams.npz')
  (tmp_path / 'heldout.txt').write_text(text)
  return tmp_path


def test_step_count_runs_on_a_small_model(small_model, tmp_path, capsys):
  script_runner.run(
    STEPS,
    f'--checkpoint={small_model}',
    '--num_samples=4',
    f'--json={tmp_path / "steps.json"}',
    f'--plot={tmp_path / "steps.png"}',
    step_counts=lambda length: [1, length],
  )
  content = json.loads((tmp_path / 'steps.json').read_text())
  points = {(row['rule'], row['calls']): row for row in content['results']}
  assert list(points) == [
    ('kernel', 1),
    ('kernel', 16),
    ('confidence', 1),
    ('confidence', 16),
    ('real text', None),
  ]
  # In one call both rules reveal everything: the same samples.
  one_call = [dict(points[rule, 1]) for rule in ('kernel', 'confidence')]
  assert one_call[0].pop('rule') != one_call[1].pop('rule')
  assert one_call[0] == one_call[1]
  real = points['real text', None]
  assert real['bits_per_character'] < 2 < one_call[0]['bits_per_character']
  assert 'real text' in capsys.readouterr().out
  assert (tmp_path / 'steps.png').read_bytes().startswith(b'\x89PNG')


def test_decoders_make_equal_numbers_of_calls():
  """Half as many calls as tokens on every axis but the adaptive one."""
  cases = script_runner.load(DECODERS).cases(64, schedules.linear())
  names = [(case.axis, case.name) for case in cases]
  assert len(set(names)) == len(names) >= 40
  for case in cases:
    window = case.block_length or 64
    calls = case.rule.calls(window) * (64 // window)
    assert calls == 32 or case.axis == 'adaptive', case.name


def test_decoders_runs_on_a_small_model(small_model, tmp_path, capsys):
  script_runner.run(
    DECODERS,
    f'--checkpoint={small_model}',
    '--num_samples=3',
    '--length=16',
    '--axes=blocks',
    f'--json={tmp_path / "decoders.json"}',
    f'--plot={tmp_path / "decoders.png"}',
  )
  *rows, real = json.loads((tmp_path / 'decoders.json').read_text())['results']
  assert [(row['axis'], row['name'], row['calls']) for row in rows] == [
    ('blocks', f'confidence, {length}', 8.0) for length in (16, 8, 4, 2)
  ]
  assert real['axis'] == 'real text'
  assert 'confidence, 16' in capsys.readouterr().out
  assert (tmp_path / 'decoders.png').read_bytes().startswith(b'\x89PNG')
  with pytest.raises(ValueError, match='--length=20 must be a multiple of 8'):
    script_runner.run(DECODERS, '--length=20')


@pytest.mark.parametrize('name', [REVEAL, STEPS, DECODERS])
def test_output_that_cannot_be_written_is_named_at_once(name, tmp_path):
  with pytest.raises(OSError, match='no directory'):
    script_runner.run(name, f'--json={tmp_path}/none/x.json')
  with pytest.raises(OSError, match='is a directory'):
    script_runner.run(name, f'--plot={tmp_path}')


def test_absent_plot_library_is_one_line(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(SystemExit) as caught:
    script_runner.run(REVEAL, '--plot=x.png')
  assert caught.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert 'matplotlib is missing' in line
