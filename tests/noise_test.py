import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax import noise


@jax.jit
def _uniforms(key, row_ids, positions):
  keys = noise.row_keys(key, row_ids)
  return jax.vmap(noise.position_uniforms)(keys, positions)


def _positions(num_rows, *values):
  return jnp.broadcast_to(jnp.array(values), (num_rows, len(values)))


def test_a_row_alone_equals_the_row_in_a_batch():
  key = jax.random.key(1)
  batch = _uniforms(key, jnp.arange(5), _positions(5, *range(6)))
  for row in (0, 3):
    alone = _uniforms(key, jnp.array([row]), _positions(1, *range(6)))
    np.testing.assert_array_equal(alone[0], batch[row])


def test_noise_follows_the_logical_position_and_not_the_slot():
  key = jax.random.key(2)
  right = _uniforms(key, jnp.array([4]), _positions(1, 0, 1, 2, 7, 7))
  left = _uniforms(key, jnp.array([4]), _positions(1, 7, 7, 0, 1, 2))
  np.testing.assert_array_equal(right[0, :3], left[0, 2:])


def test_rows_positions_and_keys_have_different_noise():
  rows = _uniforms(
    jax.random.key(3), jnp.arange(64), _positions(64, *range(32))
  )
  other = _uniforms(
    jax.random.key(4), jnp.arange(64), _positions(64, *range(32))
  )
  draws = np.concatenate([rows.ravel(), other.ravel()])
  # 4,096 draws of 2^23 values: one coincidence is expected, twenty never seen.
  assert len(np.unique(draws)) > len(draws) - 20
  assert draws.min() >= 0 and draws.max() < 1


def test_uniforms_have_a_uniform_law():
  draws = np.sort(
    _uniforms(
      jax.random.key(5), jnp.arange(64), _positions(64, *range(64))
    ).ravel()
  )
  # Kolmogorov-Smirnov; false alarm 1 in 1,000.
  distance = np.abs(draws - (np.arange(draws.size) + 0.5) / draws.size).max()
  assert distance < 1.95 / np.sqrt(draws.size)


def test_position_keys_are_one_key_per_position():
  row_key = jax.random.key(6)
  keys = noise.position_keys(row_key, jnp.array([3, 5]))
  expected = jax.random.uniform(keys[1])
  drawn = noise.position_uniforms(row_key, jnp.array([5]))
  np.testing.assert_array_equal(drawn[0], expected)
