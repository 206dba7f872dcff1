import functools

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import time_draws

MD4 = golden_data.load('md4/schedules_losses')
MDLM = golden_data.load('mdlm_dit/schedules_losses')

DRAWS = {
  draw.__name__: jax.jit(draw, static_argnames=('num_rows', 't_min'))
  for draw in (
    time_draws.iid_times,
    time_draws.stratified_times,
    time_draws.systematic_times,
  )
}
each_draw = pytest.mark.parametrize('draw', DRAWS.values(), ids=DRAWS.keys())


@each_draw
@pytest.mark.parametrize('t_min', [0.0, 0.25])
def test_times_have_a_uniform_law_above_t_min(draw, t_min):
  keys = jax.random.split(jax.random.key(0), 512)
  times = jax.vmap(lambda key: draw(key, jnp.arange(8), 8, t_min=t_min))(keys)
  times = np.ravel(times)
  assert t_min < times.min() and times.max() <= 1
  # Kolmogorov-Smirnov for 4,096 draws; false alarm at most 1 in 1,000 (iid;
  # systematic times count as their 512 offsets).
  levels = (np.sort(times) - t_min) / (1 - t_min)
  distance = np.abs(levels - (np.arange(4096) + 0.5) / 4096).max()
  independent = 512 if draw is DRAWS['systematic_times'] else 4096
  assert distance < 1.95 / np.sqrt(independent)


@each_draw
def test_times_do_not_depend_on_how_the_batch_is_split(draw):
  whole = draw(jax.random.key(1), jnp.arange(12), 12)
  parts = jnp.arange(12).reshape(3, 4)
  split = np.concatenate([draw(jax.random.key(1), rows, 12) for rows in parts])
  np.testing.assert_array_equal(whole, split)
  assert len(np.unique(whole)) == 12


def test_packed_blocks_have_the_time_of_their_first_slot():
  segments = jnp.array([[0, 0, 0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1, 2]])
  positions = jnp.array([[0, 1, 2, 3, 4, 0, 1, 0], [0, 0, 1, 2, 3, 4, 5, 0]])
  firsts = np.array([[0, 0, 2, 2, 4, 5, 5, 7], [0, 1, 1, 3, 3, 5, 5, 7]])
  draw = jax.jit(
    functools.partial(
      time_draws.packed_block_times, time_draws.stratified_times,
      num_rows=4, block=2, t_min=0.2, t_max=0.8,
    )
  )  # fmt: skip
  t = draw(
    jax.random.key(0), jnp.array([3, 1]), positions=positions, segments=segments
  )
  np.testing.assert_array_equal(t, np.take_along_axis(t, firsts, 1))
  # Each in a stratum of its own, as its slot is.
  strata = np.ceil((np.array(t) - 0.2) / 0.6 * 32 - 1e-4)
  steps = (strata - firsts - 8 * np.array([[3], [1]])) % 32
  assert len(np.unique(steps)) == 1


def test_stratified_times_have_one_row_in_each_stratum():
  for seed in range(20):
    times = DRAWS['stratified_times'](jax.random.key(seed), jnp.arange(12), 12)
    strata = np.ceil(np.array(times) * 12 - 1e-4)
    np.testing.assert_array_equal(strata, np.arange(1, 13))


def test_systematic_times_are_equally_spaced():
  times = DRAWS['systematic_times'](jax.random.key(3), jnp.arange(12), 12)
  np.testing.assert_allclose(np.diff(np.sort(times)), 1 / 12, atol=1e-6)


@pytest.mark.parametrize('name', DRAWS)
def test_times_are_never_zero(name, monkeypatch):
  # The smallest and the largest number that `jax.random.uniform` can return.
  for uniform in (0.0, 1 - 2**-23):
    monkeypatch.setattr(
      jax.random, 'uniform', lambda _, u=uniform: jnp.array(u)
    )
    times = getattr(time_draws, name)(jax.random.key(0), jnp.arange(4), 4)
    assert times.min() > 0 and times.max() <= 1


def test_the_three_draws_differ_and_depend_on_the_key():
  times = [
    np.array(draw(jax.random.key(seed), jnp.arange(12), 12))
    for draw in DRAWS.values()
    for seed in (0, 1)
  ]
  assert len(np.unique(np.stack(times)[:, 0])) == 6


def test_a_range_outside_zero_to_one_is_refused():
  for t_min in (1.5, -0.1):
    with pytest.raises(ValueError, match=f't_min={t_min}'):
      time_draws.iid_times(jax.random.key(0), jnp.arange(2), 2, t_min=t_min)


@pytest.mark.parametrize('num_rows', [1, 2, 3, 4, 7, 8])
def test_spread_is_the_antithetic_time_of_md4(num_rows):
  golden = MD4['antithetic_times']
  times = time_draws.spread(
    jnp.array(golden[f't0_{num_rows}']), jnp.arange(num_rows), num_rows
  )
  np.testing.assert_allclose(times, golden[f't_{num_rows}'], atol=2e-7)


@pytest.mark.parametrize('num_rows', [1, 2, 3, 4, 7, 8, 16])
def test_stratify_is_the_antithetic_time_of_mdlm(num_rows):
  golden = MDLM['antithetic_sampling']
  times = time_draws.stratify(
    jnp.array(golden[f'u_{num_rows}']), jnp.arange(num_rows), num_rows
  )
  np.testing.assert_allclose(
    1e-3 + 0.999 * times, golden[f't_{num_rows}'], atol=2e-7
  )


@pytest.mark.parametrize('num_steps', [1, 10, 1000])
@pytest.mark.parametrize('name', ['linear', 'cosine', 'poly2', 'poly3'])
def test_discrete_times_are_those_of_md4(name, num_steps):
  golden = MD4[f'loss_{name}_T{num_steps}']
  times = time_draws.discrete_times(jnp.array(golden['t']), num_steps)
  np.testing.assert_allclose(times, golden['t_used'], atol=1e-7)


def test_discrete_times_keep_grid_points_and_never_reach_zero():
  times = time_draws.discrete_times(jnp.array([1e-7, 0.25, 0.26, 1.0]), 4)
  np.testing.assert_array_equal(times, [0.25, 0.25, 0.5, 1.0])


def test_a_grid_without_steps_is_refused():
  with pytest.raises(ValueError, match='num_steps=0'):
    time_draws.discrete_times(jnp.ones(1), 0)


def test_time_draws_have_names():
  for name in ('iid', 'stratified', 'systematic'):
    function = getattr(time_draws, f'{name}_times')
    assert time_draws.named_times(name) is function
  with pytest.raises(ValueError, match=r"times='even' .* stratified"):
    time_draws.named_times('even')
