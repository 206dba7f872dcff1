"""SMDM's Monte-Carlo likelihood: our times, corruption and bound on its net."""

import dataclasses

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import corruption, losses, predict, time_draws
from mdlm_jax.models import directory

GOLDEN = golden_data.load('smdm/likelihood')
MODEL = directory.load(golden_data.FOLDER / 'smdm')
MASK = MODEL.vocab.mask_id
# They score every row of their head; the one without a token as well.
VOCAB = dataclasses.replace(
  MODEL.vocab, forbidden_ids=range(MASK + 1, MODEL.vocab.size)
)


@pytest.fixture(autouse=True)
def exact_products():
  with jax.default_matmul_precision('highest'):
    yield


def log_probs_of(corrupted_ids, ids):
  return predict.target_log_probs(
    MODEL.denoiser,
    MODEL.params,
    VOCAB,
    corrupted_ids,
    ids,
    t=jnp.ones(len(ids)),
    valid=jnp.ones(ids.shape, bool),
    positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
  )


def rows_of(case, count):
  """`count` equal rows of prefix and target, and the map of the target."""
  golden = GOLDEN[case]
  row = np.concatenate([golden['prefix'], golden['target']])
  target = np.arange(len(row)) >= len(golden['prefix'])
  return jnp.tile(row, (count, 1)), jnp.tile(target, (count, 1))


def test_monte_carlo_bound_of_a_target():
  golden = GOLDEN['nll_mc']
  ids, target = rows_of('nll_mc', 8)
  bounds = []
  for u0, uniforms in zip(
    golden['u0_per_iteration'], golden['mask_uniform'], strict=True
  ):
    t = time_draws.spread(jnp.asarray(u0), jnp.arange(8), 8)
    corrupted_ids, masked = corruption.corrupt_with_noise(
      jnp.asarray(uniforms), ids, t, target, mask_id=MASK
    )
    total = losses.continuous_bound(
      log_probs_of(corrupted_ids, ids), masked, target, t
    )
    assert total.count == 8 * 8
    bounds.append(total.sum / 8)
  np.testing.assert_allclose(np.mean(bounds), golden['nll'], rtol=1e-4)


def test_chain_rule_of_a_target():
  """Row i hides the target from token i on and scores token i alone."""
  golden = GOLDEN['nll_chain']
  length = len(golden['target'])
  ids, _ = rows_of('nll_chain', length)
  scored = jnp.arange(ids.shape[1]) - len(golden['prefix'])
  hidden = scored[None] >= jnp.arange(length)[:, None]
  log_probs = log_probs_of(jnp.where(hidden, MASK, ids), ids)
  total = losses.cross_entropy(
    log_probs, scored[None] == jnp.arange(length)[:, None]
  )
  assert total.count == length
  np.testing.assert_allclose(total.sum, golden['nll'], rtol=1e-4)
