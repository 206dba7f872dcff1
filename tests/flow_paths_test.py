import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_exact import MASK, PATHS, SHARE, VOCAB, V, token_laws
from small_joints import A, B

from mdlm_jax import corruption, flow
from mdlm_jax.noise import row_keys
from mdlm_jax.vocab import Vocab

corrupt = jax.jit(flow.corrupt, static_argnames='path')
each_path = pytest.mark.parametrize('name', PATHS)
TAUS = (0.0, 0.2, 0.5, 0.7, 0.9, 1.0)


@functools.cache
def laws():
  """`flow.token_law` of every path, clean token and time."""

  def of_path(path, tau):
    return flow.token_law(path, jnp.eye(V), jnp.full(V, tau))

  @jax.jit
  def all_laws(taus):
    return {
      name: jax.vmap(functools.partial(of_path, path))(taus)
      for name, path in PATHS.items()
    }

  with jax.enable_x64(True):
    return jax.tree.map(np.asarray, all_laws(np.array(TAUS)))


@each_path
@pytest.mark.parametrize('tau', TAUS)
def test_the_law_of_a_token_is_that_of_the_paper(name, tau):
  got = laws()[name][TAUS.index(tau)]
  np.testing.assert_allclose(got, token_laws(name, tau), atol=1e-12)


def test_the_hybrid_has_its_share_of_uniform_noise_half_way():
  law = token_laws('hybrid', 0.5)[A]
  np.testing.assert_allclose(3 * law[B], SHARE)


@functools.cache
def noise():
  """Of 500 rows of 40 positions."""
  keys = row_keys(jax.random.key(0), jnp.arange(500))
  positions = jnp.broadcast_to(jnp.arange(40), (500, 40))
  return jax.jit(jax.vmap(flow.position_noise))(keys, positions)


@functools.cache
def draws():
  """Of every path at every time, by the same noise; all clean tokens are A."""

  @jax.jit
  def all_draws(noise):
    clean, eligible = jnp.full((500, 40), A), jnp.ones((500, 40), bool)
    return {
      (name, tau): flow.corrupt_with_noise(
        noise, clean, jnp.full(500, tau), eligible, path=path
      )
      for name, path in PATHS.items()
      for tau in TAUS
    }

  return jax.tree.map(np.asarray, all_draws(noise()))


def test_by_default_rows_and_positions_count_from_0():
  got = corrupt(
    jax.random.key(0), jnp.full((500, 40), A), jnp.full(500, 0.2),
    jnp.ones((500, 40), bool), path=PATHS['hybrid'],
  )  # fmt: skip
  jax.tree.map(np.testing.assert_array_equal, got, draws()['hybrid', 0.2])


@each_path
@pytest.mark.parametrize('tau', [0.2, 0.7])
def test_corrupted_tokens_follow_the_path(name, tau):
  """20,000 tokens; five standard deviations: one false alarm in 10^5."""
  noised = draws()[name, tau]
  law = token_laws(name, tau)[A]
  share = np.bincount(noised.ids.ravel(), minlength=V) / noised.ids.size
  error = np.sqrt(law * (1 - law) / noised.ids.size)
  assert (np.abs(share - law) <= 5 * error).all()
  assert (noised.replaced >= (noised.ids != A)).all()
  # A uniform draw may be the token itself, MASK may not.
  assert ((noised.replaced & (noised.ids == A)).any()) == (name != 'masked')


@each_path
def test_all_is_source_at_0_and_all_is_clean_at_1(name):
  start, end = draws()[name, 0.0], draws()[name, 1.0]
  assert start.replaced.all()
  assert not end.replaced.any() and (end.ids == A).all()
  if name != 'uniform':
    assert (start.ids == MASK).all()


def test_uniform_noise_is_never_mask_nor_outside_the_table():
  """8 ids, one of them MASK; 20,000 draws of the 7 others."""
  source = flow.uniform(Vocab(size=8, mask_id=1)).source
  ids = np.asarray(source.draw(noise(), jnp.array(0.0)))
  counts = np.bincount(ids.ravel(), minlength=8)
  assert len(counts) == 8 and counts[1] == 0
  # Chi-square of 6 degrees of freedom above 46 once in 10^7.
  assert ((np.delete(counts, 1) - 2e4 / 7) ** 2 / (2e4 / 7)).sum() < 46


def test_with_mask_it_is_the_corruption_of_masked_diffusion():
  rng = np.random.default_rng(0)
  u = rng.random((3, 7)).astype(np.float32)
  clean, t = jnp.asarray(rng.integers(2, 5, (3, 7))), jnp.array([0.2, 0.5, 0.9])
  eligible = jnp.asarray(rng.random((3, 7)) < 0.8)
  noise = flow.PathNoise(
    jnp.asarray(u), jnp.asarray(u), jnp.zeros((3, 7), 'u4')
  )
  got = jax.jit(flow.corrupt_with_noise, static_argnames='path')(
    noise, clean, 1 - t, eligible, path=PATHS['masked']
  )
  expected = corruption.corrupt_with_noise(
    jnp.asarray(u), clean, t, eligible, mask_id=MASK
  )
  np.testing.assert_array_equal(got.ids, expected.corrupted_ids)
  np.testing.assert_array_equal(got.replaced, expected.masked)


def test_noise_belongs_to_rows_and_positions():
  rng = np.random.default_rng(0)
  clean, tau = rng.integers(2, 5, (4, 6)), jnp.full(4, 0.3)
  valid, protected = np.ones((2, 4, 6), bool)
  valid[1, 4:] = False
  protected[:, 1:] = False

  def noised(key, order, shift):
    """The rows in another order, shifted as by padding of another side."""
    chosen = np.ix_(order, shift)
    result = corrupt(
      jax.random.key(key), *(jnp.asarray(x) for x in (clean[chosen], tau)),
      jnp.asarray(valid[chosen]), path=PATHS['hybrid'],
      protected=jnp.asarray(protected[chosen]), row_ids=jnp.array(order),
      positions=jnp.tile(jnp.array(shift), (4, 1)),
    )  # fmt: skip
    return jax.tree.map(np.asarray, result)

  rows, slots = np.arange(4), np.arange(6)
  whole = noised(2, rows, slots)
  fixed = protected | ~valid
  np.testing.assert_array_equal(whole.ids[fixed], clean[fixed])
  assert not whole.replaced[fixed].any()
  order, shift = [2, 0, 3, 1], [3, 4, 5, 0, 1, 2]
  again = noised(2, order, shift)
  np.testing.assert_array_equal(again.ids, whole.ids[np.ix_(order, shift)])
  assert (noised(3, rows, slots).ids != whole.ids).any()


def test_times_and_paths_out_of_range_are_refused():
  ids, valid = jnp.full((2, 3), A), jnp.ones((2, 3), bool)
  with pytest.raises(ValueError, match=r'tau must lie in \[0, 1\] \(row 1\)'):
    flow.corrupt(
      jax.random.key(0), ids, jnp.array([0.5, 3]), valid, path=PATHS['masked']
    )
  falling = flow.Kappa(
    lambda s: 1 - s, lambda s: s, lambda s: -jnp.ones_like(s)
  )
  with pytest.raises(ValueError, match='kappa must rise'):
    flow.uniform(VOCAB, falling)
  with pytest.raises(ValueError, match=r'uniform_share=1\.0 must lie in'):
    flow.hybrid(VOCAB, 1.0)
  assert flow.hybrid(VOCAB, 0.0) is flow.masked(VOCAB)
