import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax import noise

ROWS = jnp.arange(64)
SLOTS = jnp.arange(64)


@jax.jit
def _uniforms(seed, row_ids, positions):
  keys = noise.row_keys(jax.random.key(seed), row_ids)
  return jax.vmap(noise.position_uniforms, (0, None))(keys, positions)


def test_a_row_alone_equals_the_row_in_a_batch():
  batch = _uniforms(1, ROWS, SLOTS)
  for row in (0, 3, 63):
    alone = _uniforms(1, jnp.array([row]), SLOTS)
    np.testing.assert_array_equal(alone[0], batch[row])


def test_noise_follows_the_logical_position_and_not_the_slot():
  right_padded = _uniforms(2, ROWS, SLOTS)
  left_padded = _uniforms(2, ROWS, jnp.roll(SLOTS, 20))
  np.testing.assert_array_equal(right_padded[:, :44], left_padded[:, 20:])


def test_rows_positions_and_keys_have_different_noise():
  draws = np.ravel([_uniforms(seed, ROWS, SLOTS) for seed in (3, 4)])
  # 8,192 draws of 2^23 values: four coincidences are expected.
  assert len(np.unique(draws)) > len(draws) - 20
  assert draws.min() >= 0 and draws.max() < 1


def test_uniforms_have_a_uniform_law():
  draws = np.sort(np.ravel(_uniforms(5, ROWS, SLOTS)))
  # Kolmogorov-Smirnov; false alarm 1 in 1,000.
  distance = np.abs(draws - (np.arange(draws.size) + 0.5) / draws.size).max()
  assert distance < 1.95 / np.sqrt(draws.size)


def test_position_keys_are_one_key_per_position():
  row_key = jax.random.key(6)
  keys = noise.position_keys(row_key, jnp.array([3, 5]))
  drawn = noise.position_uniforms(row_key, jnp.array([5]))
  np.testing.assert_array_equal(drawn[0], jax.random.uniform(keys[1]))
