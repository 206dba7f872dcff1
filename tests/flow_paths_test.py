import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_exact import MASK, PATHS, SHARE, VOCAB, V, token_laws
from small_joints import A, B

from mdlm_jax import corruption, flow
from mdlm_jax.vocab import Vocab

corrupt = jax.jit(flow.corrupt, static_argnames='path')
each_path = pytest.mark.parametrize('name', PATHS)


@each_path
@pytest.mark.parametrize('tau', [0.0, 0.2, 0.5, 0.9, 1.0])
def test_the_law_of_a_token_is_that_of_the_paper(name, tau):
  with jax.enable_x64(True):
    got = flow.token_law(PATHS[name], jnp.eye(V), jnp.full(V, tau))
  np.testing.assert_allclose(got, token_laws(name, tau), atol=1e-12)


def test_the_hybrid_has_its_share_of_uniform_noise_half_way():
  law = token_laws('hybrid', 0.5)[A]
  np.testing.assert_allclose(3 * law[B], SHARE)


def draws_of(name, tau):
  noised = corrupt(
    jax.random.key(0), jnp.full((500, 40), A), jnp.full(500, tau),
    jnp.ones((500, 40), bool), path=PATHS[name],
  )  # fmt: skip
  return jax.tree.map(np.asarray, noised)


@each_path
@pytest.mark.parametrize('tau', [0.2, 0.7])
def test_corrupted_tokens_follow_the_path(name, tau):
  """20,000 tokens; five standard deviations: one false alarm in 10^5."""
  noised = draws_of(name, tau)
  law = token_laws(name, tau)[A]
  share = np.bincount(noised.ids.ravel(), minlength=V) / noised.ids.size
  error = np.sqrt(law * (1 - law) / noised.ids.size)
  assert (np.abs(share - law) <= 5 * error).all()
  assert (noised.replaced >= (noised.ids != A)).all()
  # A uniform draw may be the token itself, MASK may not.
  assert ((noised.replaced & (noised.ids == A)).any()) == (name != 'masked')


@each_path
def test_all_is_source_at_0_and_all_is_clean_at_1(name):
  assert draws_of(name, 0.0).replaced.all()
  end = draws_of(name, 1.0)
  assert not end.replaced.any() and (end.ids == A).all()
  if name != 'uniform':
    assert (draws_of(name, 0.0).ids == MASK).all()


def test_uniform_noise_is_never_mask_nor_outside_the_table():
  """8 ids, a clean id that is MASK; 10,000 draws of the 7 others."""
  vocab = Vocab(size=8, mask_id=1)
  ids = np.asarray(
    corrupt(
      jax.random.key(1), jnp.full((100, 100), 1), jnp.zeros(100),
      jnp.ones((100, 100), bool), path=flow.uniform(vocab),
    ).ids
  )  # fmt: skip
  counts = np.bincount(ids.ravel(), minlength=8)
  assert len(counts) == 8 and counts[1] == 0
  # Chi-square of 6 degrees of freedom above 46 once in 10^7.
  assert ((np.delete(counts, 1) - 1e4 / 7) ** 2 / (1e4 / 7)).sum() < 46


def test_with_mask_it_is_the_corruption_of_masked_diffusion():
  rng = np.random.default_rng(0)
  u = rng.random((3, 7)).astype(np.float32)
  clean, t = jnp.asarray(rng.integers(2, 5, (3, 7))), jnp.array([0.2, 0.5, 0.9])
  eligible = jnp.asarray(rng.random((3, 7)) < 0.8)
  noise = flow.PathNoise(
    jnp.asarray(u), jnp.asarray(u), jnp.zeros((3, 7), 'u4')
  )
  got = flow.corrupt_with_noise(
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
  # By default rows and positions count from 0.
  default = corrupt(
    jax.random.key(2), jnp.asarray(clean), tau, jnp.asarray(valid),
    path=PATHS['hybrid'],
  )  # fmt: skip
  np.testing.assert_array_equal(default.ids[:, 1:], whole.ids[:, 1:])


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
