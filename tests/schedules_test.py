import functools

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdlm_jax import schedules

MD4 = golden_data.load('md4/schedules_losses')
MDLM = golden_data.load('mdlm_dit/schedules_losses')

# The papers' formulae for 1 - alpha and its derivative, in float64.
_RATIO = np.log(20.0 / 1e-5)
FORMULAE = {
  'linear': (schedules.linear(), lambda t: t, lambda t: np.ones_like(t)),
  'cosine': (
    schedules.cosine(),
    lambda t: np.cos(np.pi / 2 * (1 - t)),
    lambda t: np.pi / 2 * np.sin(np.pi / 2 * (1 - t)),
  ),
  'mirrored_cosine': (
    schedules.mirrored_cosine(),
    lambda t: 2 * np.sin(np.pi / 4 * t) ** 2,  # 1 - cos(pi/2 t).
    lambda t: np.pi / 2 * np.sin(np.pi / 2 * t),
  ),
  'logarithmic': (
    schedules.logarithmic(),
    lambda t: np.log2(1 + t),
    lambda t: 1 / ((1 + t) * np.log(2)),
  ),
  'square': (schedules.polynomial(2.0), lambda t: t**2, lambda t: 2 * t),
  'root': (
    schedules.polynomial(0.5),
    lambda t: t**0.5,
    lambda t: 0.5 * t**-0.5,
  ),
  'geometric': (
    schedules.geometric(),
    lambda t: -np.expm1(-(1e-5 ** (1 - t)) * 20**t),
    lambda t: (
      _RATIO * 1e-5 ** (1 - t) * 20**t * np.exp(-(1e-5 ** (1 - t)) * 20**t)
    ),
  ),
  'log_linear': (
    schedules.log_linear(),
    lambda t: 0.999 * t,
    lambda t: 0.999 * np.ones_like(t),
  ),
}
each_schedule = pytest.mark.parametrize(
  'schedule, masked, slope', FORMULAE.values(), ids=FORMULAE.keys()
)
# From well below float32's resolution of alpha near 1 to the very end.
TIMES = np.array([1e-6, 1e-4, 0.01, 0.2, 0.5, 0.9, 0.999, 1.0])


@each_schedule
def test_alpha_and_derivative_are_the_formulae(schedule, masked, slope):
  t = jnp.array(TIMES, jnp.float32)
  np.testing.assert_allclose(schedule.alpha(t), 1 - masked(TIMES), atol=3e-7)
  np.testing.assert_allclose(
    schedule.derivative(t), -slope(TIMES), rtol=2e-5, atol=1e-7
  )


@each_schedule
def test_weight_has_no_cancellation(schedule, masked, slope):
  # Formed from float32 alphas the weight at t = 1e-6 would be off by 1 %.
  weight = schedule.weight(jnp.array(TIMES, jnp.float32))
  expected = slope(TIMES) / masked(TIMES)
  np.testing.assert_allclose(weight, expected, rtol=3e-5, atol=1e-7)
  assert np.all(weight >= 0)


@each_schedule
def test_inverse_undoes_alpha(schedule, masked, slope):
  t = jnp.linspace(0.05, 0.95, 19)
  if schedule == schedules.geometric():
    t = t[10:]  # Below, alpha is within float32's resolution of 1.
  np.testing.assert_allclose(schedule.inverse(schedule.alpha(t)), t, atol=1e-4)


@each_schedule
def test_alpha_is_exact_where_the_docstring_says_complete(
  schedule, masked, slope
):
  alpha = schedule.alpha(jnp.array([0.0, 1.0]))
  if schedule == schedules.geometric():
    np.testing.assert_allclose(alpha, np.exp([-1e-5, -20.0]), rtol=1e-4)
  elif schedule == schedules.log_linear():
    np.testing.assert_allclose(alpha, [1.0, 1e-3], rtol=1e-4)
  else:
    np.testing.assert_array_equal(alpha, [1.0, 0.0])


@each_schedule
def test_jit_equals_eager(schedule, masked, slope):
  t = jnp.array(TIMES, jnp.float32)
  for function in schedule[:3]:
    # Fused, 1 - x rounds once instead of twice.
    np.testing.assert_allclose(
      jax.jit(function)(t), function(t), rtol=1e-6, atol=1e-7
    )


def test_schedules_are_hashable_and_equal_when_rebuilt():
  assert schedules.polynomial(2.0) is schedules.polynomial(2.0)
  assert hash(schedules.cosine()) == hash(schedules.cosine())
  assert schedules.geometric(sigma_max=10.0) != schedules.geometric()


def test_options_change_the_schedule():
  half = jnp.array(0.5)
  assert schedules.polynomial(3.0).alpha(half) == 0.875
  np.testing.assert_allclose(
    schedules.geometric(0.25, 4.0).alpha(half), np.exp(-1), rtol=1e-6
  )
  np.testing.assert_allclose(
    schedules.log_linear(0.1).alpha(half), 0.55, rtol=1e-6
  )


@pytest.mark.parametrize(
  'build, named',
  [
    (lambda: schedules.polynomial(0.0), 'exponent=0'),
    (lambda: schedules.geometric(2.0, 1.0), 'sigma_min=2'),
    (lambda: schedules.geometric(0.0, 1.0), 'sigma_min=0'),
    (lambda: schedules.log_linear(1.0), 'floor=1'),
    (lambda: schedules.log_linear(-0.1), 'floor=-0.1'),
    (lambda: schedules.uniform_grid(0), 'num_steps=0'),
    (lambda: schedules.cosine_grid(-1), 'num_steps=-1'),
  ],
)
def test_wrong_settings_are_refused_by_name(build, named):
  with pytest.raises(ValueError, match=named):
    build()


@pytest.mark.parametrize(
  'name, schedule',
  [
    ('linear', schedules.linear()),
    ('cosine', schedules.cosine()),
    ('poly2', schedules.polynomial(2.0)),
    ('poly3', schedules.polynomial(3.0)),
    ('poly0.5', schedules.polynomial(0.5)),
    ('poly1', schedules.polynomial(1.0)),
  ],
)
def test_schedules_are_those_of_md4(name, schedule):
  # MD4 squeezes alpha to [1e-4, 1 - 1e-4]; the same is done here around ours.
  golden = MD4[f'schedule_{name}']
  t = jnp.array(golden['t'])
  alpha = (1 - 2e-4) * schedule.alpha(t) + 1e-4
  derivative = (1 - 2e-4) * schedule.derivative(t)
  np.testing.assert_allclose(alpha, golden['alpha'], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(derivative, golden['dalpha'], rtol=1e-5, atol=1e-6)
  late = golden['t'] >= 0.01
  weight = golden['dgamma_times_alpha']
  ours = derivative / (1 - alpha)
  np.testing.assert_allclose(ours[late], weight[late], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(ours[~late], weight[~late], rtol=1e-3)


@pytest.mark.parametrize(
  'name, schedule',
  [
    ('loglinear', schedules.log_linear(1e-3)),
    ('geometric', schedules.geometric(1e-4, 20.0)),
  ],
)
def test_schedules_are_those_of_mdlm(name, schedule):
  golden = MDLM['noise_schedules']
  t = jnp.array(golden['t'])
  alpha = schedule.alpha(t)
  np.testing.assert_allclose(
    1 - alpha, golden[f'{name}_move_chance'], atol=3e-7
  )
  np.testing.assert_allclose(
    alpha, np.exp(-golden[f'{name}_total']), rtol=1e-5, atol=1e-7
  )
  # sigma' = -alpha' / alpha
  np.testing.assert_allclose(
    -schedule.derivative(t) / alpha, golden[f'{name}_rate'], rtol=1e-4
  )
  positive = golden['t'] > 0
  np.testing.assert_allclose(
    schedule.weight(t)[positive],
    golden[f'{name}_nelbo_weight'][positive],
    rtol=1e-4,
  )


def test_reveal_probability_of_the_linear_schedule_is_t_minus_s_over_t():
  t, s = jnp.array([1.0, 0.8, 0.5]), jnp.array([0.75, 0.2, 0.0])
  revealed = schedules.reveal_probability(schedules.linear(), t, s)
  np.testing.assert_allclose(revealed, [0.25, 0.75, 1.0], rtol=1e-6)


@each_schedule
def test_steps_of_the_kernel_compose_to_one_step(schedule, masked, slope):
  grid = np.linspace(0.9, 0.3, 7)
  t, s = jnp.array(grid[:-1]), jnp.array(grid[1:])
  kept = np.prod(1 - schedules.reveal_probability(schedule, t, s))
  np.testing.assert_allclose(kept, masked(0.3) / masked(0.9), rtol=1e-3)


@each_schedule
@pytest.mark.parametrize('num_steps', [64, 1000])
def test_the_kernel_keeps_its_precision_on_fine_grids(
  schedule, masked, slope, num_steps
):
  grid = np.float32(np.arange(1, num_steps + 1) / num_steps)
  t, s = grid[1:], grid[:-1]
  exact = 1 - masked(np.float64(s)) / masked(np.float64(t))
  revealed = schedules.reveal_probability(schedule, jnp.array(t), jnp.array(s))
  # The interval is 1/K of the levels, whose own rounding is 6e-8 of them; near
  # t = 1 both may round to 1, to within two steps of float32 below it.
  np.testing.assert_allclose(revealed, exact, 1e-6 * num_steps, 1.2e-7)


@each_schedule
def test_masked_is_the_formula_in_full_precision(schedule, masked, slope):
  got = schedule.masked(jnp.array(TIMES, jnp.float32))
  np.testing.assert_allclose(got, masked(np.float64(np.float32(TIMES))), 2e-6)


def test_the_last_step_reveals_all_also_where_alpha_rounds_to_one():
  t, s = jnp.array([0.5, 1e-3]), jnp.zeros(2)
  for exponent in (1.0, 2.0, 4.0):
    revealed = schedules.reveal_probability(
      schedules.polynomial(exponent), t, s
    )
    np.testing.assert_array_equal(revealed, 1.0)


@pytest.mark.parametrize('num_steps', [1, 4, 16, 100])
@pytest.mark.parametrize('name', ['uniform', 'cosine'])
def test_grids_are_those_of_md4(name, num_steps):
  grid = getattr(schedules, f'{name}_grid')(num_steps)
  golden = MD4[f'grid_{name}_{num_steps}']
  np.testing.assert_allclose(grid[:-1], golden['t'], atol=2e-7)
  np.testing.assert_allclose(grid[1:], golden['s'], atol=2e-7)


@pytest.mark.parametrize('num_steps', [1, 2, 7, 1000])
@pytest.mark.parametrize('name', ['uniform', 'cosine'])
def test_grids_fall_from_exactly_one_to_exactly_zero(name, num_steps):
  grid = getattr(schedules, f'{name}_grid')(num_steps)
  assert len(grid) == num_steps + 1
  assert (grid[0], grid[-1]) == (1.0, 0.0)
  assert np.all(np.diff(np.float32(grid)) < 0)


_plan = functools.partial(jax.jit, static_argnames=('num_steps', 'grid'))(
  schedules.plan_counts
)


@settings(max_examples=60, deadline=None)
@given(
  num_open=st.lists(st.integers(0, 5000), min_size=6, max_size=6),
  num_steps=st.sampled_from([1, 7, 64]),
  grid=st.sampled_from([None, schedules.uniform_grid, schedules.cosine_grid]),
)
def test_planned_counts_are_never_negative_and_sum_to_the_open_positions(
  num_open, num_steps, grid
):
  grid = grid and grid(num_steps)
  counts = _plan(jnp.array(num_open), num_steps, grid)
  assert counts.shape == (6, num_steps) and counts.dtype == jnp.int32
  assert np.all(counts >= 0)
  np.testing.assert_array_equal(counts.sum(1), num_open)


def test_an_even_split_is_that_of_llada():
  golden = golden_data.load('llada/counts_losses')['num_transfer_tokens']
  np.testing.assert_array_equal(golden['steps'], np.arange(1, 25))
  for num_steps in (1, 2, 3, 7, 16, 24):
    counts = _plan(jnp.array(golden['mask_counts']), num_steps)
    expected = golden['table'][:, num_steps - 1, :num_steps]
    np.testing.assert_array_equal(counts, expected)


def test_steps_over_blocks_give_the_remainder_to_the_first_blocks():
  counts = schedules.plan_counts(20, 16)
  np.testing.assert_array_equal(counts, [2] * 4 + [1] * 12)
  np.testing.assert_array_equal(schedules.plan_counts(32, 16), [2] * 16)


def test_more_steps_than_positions_leaves_steps_empty():
  np.testing.assert_array_equal(schedules.plan_counts(2, 4), [1, 1, 0, 0])


def test_a_grid_sets_what_is_still_masked_after_each_step():
  grid = (1.0, 0.9, 0.4, 0.0)
  counts = schedules.plan_counts(jnp.array([[10], [5]]), 3, grid)
  # 10, 9, 4, 0 masked; 5, 4.5 -> 4, 2, 0 masked.
  np.testing.assert_array_equal(counts, [[[1, 5, 4]], [[1, 2, 2]]])


def test_counts_do_not_depend_on_the_64_bit_mode():
  # cos(pi/3) is 1/2 in float32 and a little above it in float64.
  arguments = jnp.array([1, 5, 7]), 3, schedules.cosine_grid(3)
  counts = schedules.plan_counts(*arguments)
  with jax.enable_x64(True):
    np.testing.assert_array_equal(schedules.plan_counts(*arguments), counts)


@pytest.mark.parametrize(
  'num_steps, grid, named',
  [
    (0, None, 'num_steps=0'),
    (3, (1.0, 0.5, 0.0), '3 levels is not for num_steps=3'),
    (2, (1.0, 0.5, 0.1), 'must fall strictly from 1.0 to 0.0'),
    (2, (0.9, 0.5, 0.0), 'must fall strictly from 1.0 to 0.0'),
    (3, (1.0, 0.2, 0.5, 0.0), 'must fall strictly from 1.0 to 0.0'),
  ],
)
def test_wrong_plans_are_refused(num_steps, grid, named):
  with pytest.raises(ValueError, match=named):
    schedules.plan_counts(8, num_steps, grid)


def test_a_negative_number_of_positions_is_refused():
  with pytest.raises(ValueError, match='num_open'):
    schedules.plan_counts(jnp.array([3, -1]), 2)


def test_schedules_have_names():
  for name in ('linear', 'mirrored_cosine', 'logarithmic', 'log_linear'):
    assert schedules.named_schedule(name) == getattr(schedules, name)()
  assert schedules.named_schedule('square_root') is schedules.polynomial(0.5)
  with pytest.raises(ValueError, match=r"schedule='quadratic' .* linear"):
    schedules.named_schedule('quadratic')


DREAM = golden_data.load('dream/counts')


@pytest.mark.parametrize('row, eps', [(0, 1e-3), (1, 1e-2)])
def test_floor_counts_are_those_of_dream(row, eps):
  golden = DREAM['transfer_table']
  assert golden['eps'][row] == eps
  counts = schedules.floor_counts(eps)
  for column, num_steps in enumerate(golden['steps']):
    expected = golden['tokens_revealed_per_step'][row, :, column, :num_steps]
    got = counts(jnp.array(golden['num_masked']), int(num_steps))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize('num_steps', [4, 7, 16])
def test_floor_counts_use_the_times_of_dream_to_the_last_bit(num_steps):
  t = DREAM['timesteps'][f'timesteps_{num_steps}']
  left, expected = 10_000_000, []
  for k in range(num_steps - 1):
    share = np.float32(1) - t[k + 1] / t[k]
    expected.append(int(np.float32(left) * share))
    left -= expected[-1]
  got = schedules.floor_counts()(10_000_000, num_steps)
  np.testing.assert_array_equal(got, [*expected, left])


def test_floor_counts_leave_early_steps_empty_and_the_rest_to_the_last():
  # 4 (1 - t_5 / t_4) = 0.998, then 4 * 0.332 and 3 * 0.498.
  np.testing.assert_array_equal(
    schedules.floor_counts()(4, 8), [0, 0, 0, 0, 0, 1, 1, 2]
  )
  assert schedules.floor_counts(0.5)(8, 2).tolist() != (
    schedules.floor_counts(0.01)(8, 2).tolist()
  )
  with jax.enable_x64(True):
    assert schedules.floor_counts()(8, 5).tolist() == [1, 1, 1, 2, 3]


@pytest.mark.parametrize(
  'make, named',
  [
    (lambda: schedules.floor_counts(0.0), 'eps=0'),
    (lambda: schedules.floor_counts()(3, 0), 'num_steps=0'),
    (lambda: schedules.floor_counts()(-1, 2), 'num_open'),
  ],
)
def test_wrong_floor_counts_are_refused(make, named):
  with pytest.raises(ValueError, match=named):
    make()
