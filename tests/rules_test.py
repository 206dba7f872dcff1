"""Rules against the formulas of their papers, on one row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import rules, schedules
from mdlm_jax.rules import Proposal, Row

F, T = False, True


def one_row(masked, confidence=None):
  masked = jnp.array(masked)
  length = masked.shape[0]
  row = Row(
    jnp.where(masked, 1, 5), jnp.ones(length, bool), masked, jnp.arange(length)
  )
  confidence = jnp.zeros(length) if confidence is None else confidence
  proposal = Proposal(
    jnp.full(length, 7), jnp.array(confidence), jnp.zeros((length, 9)),
    jnp.zeros(length),
  )  # fmt: skip
  return row, proposal


@pytest.mark.parametrize(
  'schedule',
  [schedules.linear(), schedules.cosine(), schedules.polynomial(2.0)],
)
def test_kernel_reveals_with_the_exact_probability(schedule):
  grid = (1.0, 0.7, 0.2, 0.0)
  rule = rules.kernel(grid, schedule)
  length = 20_000
  row, proposal = one_row([T] * length)
  noise = rule.noise(jax.random.key(0), row.positions)
  alpha = [float(schedule.alpha(jnp.array(t))) for t in grid]
  for step in range(3):
    write = rule.update(noise, step, row, proposal, ()).write
    p = (alpha[step + 1] - alpha[step]) / (1 - alpha[step])
    error = np.sqrt(p * (1 - p) / length)
    assert abs(write.mean() - p) <= 5 * error


def test_kernel_leaves_committed_tokens_alone():
  rule = rules.kernel((1.0, 0.0))
  row, proposal = one_row([T, F, T])
  update = rule.update(jnp.zeros(3), 0, row, proposal, ())
  np.testing.assert_array_equal(update.write, [T, F, T])
  assert update.t == 0


@pytest.mark.parametrize('step', [0, 1, 2])
def test_kernel_cells_are_its_bernoulli_law(step):
  rule = rules.kernel((1.0, 0.7, 0.2, 0.0))
  row, proposal = one_row([T, F, T])
  law = {}
  for weight, noise in rule.cells(step, np.array([T, F, T])):
    write = rule.update(jnp.asarray(noise), step, row, proposal, ()).write
    law[tuple(np.asarray(write).tolist())] = weight
  p = (0.3, 0.5 / 0.7, 1.0)[step]
  exact = {
    (T, F, T): p * p,
    (T, F, F): p * (1 - p),
    (F, F, T): p * (1 - p),
    (F, F, F): (1 - p) ** 2,
  }
  for write, weight in law.items():
    np.testing.assert_allclose(weight, exact[write], rtol=1e-6)
  np.testing.assert_allclose(sum(law.values()), 1, rtol=1e-12)


def test_confidence_takes_the_planned_number_of_best_positions():
  confidence = [0.1, 0.9, 0.3, 0.8, 0.5]
  row, proposal = one_row([T, F, T, T, T], confidence)
  rule = rules.by_confidence(3)
  state, t = rule.init(row)
  np.testing.assert_array_equal(state, [2, 1, 1])
  np.testing.assert_allclose(t, 4 / 5)
  update = rule.update((), 0, row, proposal, state)
  np.testing.assert_array_equal(update.write, [F, F, F, T, T])
  np.testing.assert_allclose(update.t, 2 / 5)


def test_confidence_counts_follow_the_grid():
  row, _ = one_row([T] * 10)
  rule = rules.by_confidence(2, grid=schedules.cosine_grid(2))
  # cos(pi/4) * 10 = 7.07: seven stay masked after the first step.
  np.testing.assert_array_equal(rule.init(row)[0], [3, 7])


@pytest.mark.parametrize('length', [1, 2, 3, 7, 8, 50])
@pytest.mark.parametrize('num_steps', [1, 2, 3, 7])
@pytest.mark.parametrize('with_grid', [False, True])
def test_the_static_bound_never_cuts_a_planned_count(
  length, num_steps, with_grid
):
  grid = schedules.cosine_grid(num_steps) if with_grid else None
  rule = rules.by_confidence(num_steps, grid=grid)
  row, proposal = one_row([T] * length, np.arange(length) / length)
  counts, _ = rule.init(row)
  masked = np.ones(length, bool)
  for step in range(num_steps):
    row = row._replace(masked=jnp.asarray(masked))
    write = rule.update((), step, row, proposal, counts).write
    assert write.sum() == counts[step]
    masked &= ~np.asarray(write)
  assert not masked.any()


def test_confidence_level_is_in_the_time_of_the_schedule():
  row, _ = one_row([T, T, F, F])
  _, t = rules.by_confidence(2, schedule=schedules.polynomial(2.0)).init(row)
  np.testing.assert_allclose(t, np.sqrt(0.5), rtol=1e-6)


@pytest.mark.parametrize(
  'schedule', [schedules.geometric(), schedules.log_linear(0.1)]
)
def test_levels_stay_in_range_where_a_schedule_does_not_reach_every_share(
  schedule,
):
  rule = rules.by_confidence(3, schedule=schedule)
  row, proposal = one_row([T, T])
  state, t = rule.init(row)
  levels = [t, rule.update((), 0, row, proposal, state).t]
  row, proposal = one_row([F, F])
  levels.append(rule.update((), 2, row, proposal, state).t)
  # float32 has alpha = 1 - 1e-5 to 6e-8: 0.6 % of geometric's sigma, whose
  # logarithm over 14.5 is the level.
  np.testing.assert_allclose(levels[0], 1, atol=5e-4)
  np.testing.assert_allclose(levels[2], 0, atol=5e-4)
  assert all(0 <= level <= 1 for level in levels)


def test_equal_settings_are_the_same_object():
  grid = schedules.uniform_grid(4)
  assert rules.kernel(grid) is rules.kernel(list(grid), schedules.linear())
  assert rules.by_confidence(4) is rules.by_confidence(num_steps=4, grid=None)
  assert rules.by_confidence(4) is not rules.by_confidence(5)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: rules.by_confidence(0), 'num_steps=0 must be at least 1'),
    (lambda: rules.by_confidence(2, grid=(1.0, 0.0)), '2 levels'),
    (lambda: rules.kernel((1.0,)), 'must fall strictly from 1.0 to 0.0'),
    (lambda: rules.kernel((1.0, 0.5, 0.5, 0.0)), 'must fall strictly'),
    (lambda: rules.kernel((0.9, 0.0)), 'must fall strictly'),
    (lambda: rules.kernel((1.0, 0.1)), 'must fall strictly'),
  ],
)
def test_impossible_settings_raise(make, message):
  with pytest.raises(ValueError, match=message):
    make()
