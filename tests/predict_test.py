"""The adapter: forbidden columns, the two-level sum, target log-probs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import draws
from mdlm_jax import predict as predict_lib
from mdlm_jax.predict import Denoiser, block_shape, predict, reduce_logits
from mdlm_jax.vocab import Vocab

# A head of 12 rows for a tokenizer of 9 tokens: 10 and 11 have none.
VOCAB = Vocab(size=12, mask_id=9, forbidden_ids=(10, 11))


def table_denoiser():
  """`params` are the logits; `at` selects their rows."""

  def features(params, cache, ids, *, at, **unused):
    hidden = params
    if at is not None:
      hidden = jnp.take_along_axis(params, at[..., None], 1)
    return hidden, ()

  return Denoiser(features, lambda params, hidden: hidden)


def call(logits, **options):
  batch, length = logits.shape[:2]
  prediction, _ = predict(
    table_denoiser(), logits, None, jnp.zeros((batch, length), jnp.int32),
    vocab=VOCAB, t=jnp.ones(batch), valid=jnp.ones((batch, length), bool),
    positions=jnp.zeros((batch, length), jnp.int32), **options,
  )  # fmt: skip
  return prediction


def test_probabilities_are_the_softmax_over_drawable_ids():
  logits = jax.random.normal(jax.random.key(0), (2, 3, 12)) * 30
  logits = logits.at[..., 9].set(1e4)  # the network is sure of MASK
  prediction = call(logits)
  log_p = np.asarray(prediction.logits - prediction.log_z[..., None])
  exact = np.asarray(logits[..., :9], np.float64)
  exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
  np.testing.assert_allclose(log_p[..., :9], exact, rtol=1e-6, atol=1e-6)
  assert (log_p[..., 9:] == -np.inf).all()


@pytest.mark.parametrize('num_ids', [1, 2, 7, 36, 1000])
def test_two_level_sum_equals_logsumexp(num_ids):
  logits = 20 * jax.random.normal(jax.random.key(1), (3, num_ids))
  logits = logits.at[0, : num_ids // 2].set(-jnp.inf)
  prediction = reduce_logits(logits)
  expected = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
  np.testing.assert_allclose(prediction.log_z, expected, rtol=1e-6)
  num_blocks, block_size = block_shape(num_ids)
  assert num_blocks * block_size == num_ids
  assert prediction.block_log_sums.shape == (3, num_blocks)


def test_log_z_tells_of_unusable_logits():
  for bad in (jnp.nan, jnp.inf):
    logits = jnp.zeros((1, 1, 12)).at[0, 0, 3].set(bad)
    assert not jnp.isfinite(call(logits).log_z).any()
  nothing = jnp.full((1, 1, 12), -jnp.inf).at[0, 0, 9].set(0.0)
  assert call(nothing).log_z == -jnp.inf
  harmless = jnp.zeros((1, 1, 12)).at[0, 0, 10].set(jnp.nan)
  np.testing.assert_allclose(call(harmless).log_z, np.log(9), rtol=1e-6)


def test_a_constant_added_to_the_logits_changes_nothing():
  logits = jnp.round(8 * jax.random.normal(jax.random.key(5), (1, 2, 12))) / 8
  moved = call(logits + 2.0**16)  # Exact in float32.
  np.testing.assert_allclose(moved.log_z, call(logits).log_z, rtol=1e-6)


def test_at_selects_the_slots():
  logits = jax.random.normal(jax.random.key(2), (2, 5, 12))
  at = jnp.array([[1, 2], [3, 4]])
  whole, part = call(logits), call(logits, at=at)
  np.testing.assert_array_equal(part.log_z[0], whole.log_z[0, 1:3])
  np.testing.assert_array_equal(part.log_z[1], whole.log_z[1, 3:5])


def test_target_log_probs_exclude_what_may_not_be_drawn():
  """Uniform logits over 7 real tokens cost ln 7, not ln 8 with MASK."""
  vocab = Vocab(size=8, mask_id=7)
  ids = jnp.array([[0, 3, 6, 7]])
  got = predict_lib.target_log_probs(
    table_denoiser(), jnp.zeros((1, 4, 8), jnp.bfloat16), vocab, ids, ids,
    t=jnp.ones(1), valid=jnp.ones((1, 4), bool), positions=ids,
  )  # fmt: skip
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got[0, :3], -np.log(7), rtol=1e-6)
  assert got[0, 3] == -jnp.inf


def test_many_logits_are_made_in_chunks_of_slots(monkeypatch):
  """The same numbers and gradients; all logits never are together."""
  rows, length, num_ids, width = 4, 48, 512, 8
  vocab = Vocab(size=num_ids, mask_id=7)
  denoiser = Denoiser(
    lambda params, cache, ids, **unused: (params['hidden'], ()),
    lambda params, hidden: hidden @ params['table'],
  )
  rng = np.random.default_rng(0)
  params = {
    'hidden': rng.normal(size=(rows, length, width)).astype(np.float32),
    'table': rng.normal(size=(width, num_ids)).astype(np.float32),
  }
  ids = jnp.asarray(rng.integers(8, num_ids, (rows, length), np.int32))
  weights = rng.normal(size=(rows, length)).astype(np.float32)

  def computed(most):
    monkeypatch.setattr(predict_lib, '_MOST_LOGITS', most)

    def loss(params):
      log_probs = predict_lib.target_log_probs(
        denoiser, params, vocab, ids, ids, t=jnp.ones(rows),
        valid=jnp.ones((rows, length), bool),
      )  # fmt: skip
      return jnp.sum(weights * log_probs), log_probs

    gradient = jax.jit(jax.grad(loss, has_aux=True)).lower(params).compile()
    return gradient(params), gradient.memory_analysis().temp_size_in_bytes

  whole, whole_bytes = computed(rows * length * num_ids)
  # The least divisor of 48 that is at least 13 is 16.
  parts, bytes_in_parts = computed(rows * length * num_ids / 13)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
    whole, parts,
  )  # fmt: skip
  all_logits = 4 * rows * length * num_ids
  assert whole_bytes > all_logits > 2 * bytes_in_parts


@pytest.mark.parametrize('outside', [-1, 12])
def test_an_id_that_is_none_has_no_probability(outside):
  ids = jnp.array([[3, outside]])
  log_probs = predict_lib.target_log_probs(
    table_denoiser(), jnp.zeros((1, 2, 12)), VOCAB, ids, ids,
    t=jnp.ones(1), valid=jnp.ones((1, 2), bool), positions=ids,
  )  # fmt: skip
  assert np.isnan(log_probs).tolist() == [[False, True]]


def test_a_head_of_another_vocabulary_is_refused():
  with pytest.raises(ValueError, match='11 columns for a vocabulary of 12'):
    call(jnp.zeros((1, 1, 11)))


def test_probability_needs_no_second_array_of_the_logits():
  """Argmax and its probability from log_z: no [B, L, V] but the logits."""
  shape = (4, 64, 1000)
  logits = 5 * jax.random.normal(jax.random.key(3), shape)
  vocab = Vocab(size=1000, mask_id=0)
  prediction = reduce_logits(predict_lib.allowed(logits, vocab))
  best = np.exp(prediction.logits.max(-1) - prediction.log_z)
  exact = np.asarray(logits[..., 1:], np.float64)
  exact = np.exp(exact - exact.max(-1, keepdims=True))
  np.testing.assert_allclose(best, exact.max(-1) / exact.sum(-1), atol=1e-6)
  compiled = jax.jit(
    lambda x: jnp.exp(x.max(-1) - reduce_logits(x).log_z)
  ).lower(logits)
  memory = compiled.compile().memory_analysis()
  assert memory.temp_size_in_bytes < logits.nbytes / 4


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_whole_step_holds_what_the_head_gave_and_what_may_be_drawn(
  temperature,
):
  """No softmax, log-softmax or noise of the size [B, L, V] beside the two.

  CPU and its compiler; a log-softmax would be a third array.
  """
  batch, length, num_ids = 4, 64, 4000
  vocab = Vocab(size=num_ids, mask_id=0)
  network = Denoiser(
    lambda params, cache, ids, **unused: (params[0][ids], ()),
    lambda params, hidden: hidden @ params[1],
  )
  draw = draws.categorical(temperature=temperature)
  ids = jnp.zeros((batch, length), jnp.int32)

  @jax.jit
  def step(params, noise):
    prediction, _ = predict(
      network, params, None, ids, vocab=vocab, t=jnp.ones(batch),
      valid=ids == 0, positions=ids,
    )  # fmt: skip
    return draw.propose(noise, prediction, None)

  params = jnp.ones((num_ids, 8)), jnp.ones((8, num_ids))
  noise = draw.noise(jax.random.key(0), ids[0], num_ids)
  noise = jax.tree.map(lambda x: jnp.stack([x] * batch), noise)
  memory = step.lower(params, noise).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 2.25 * 4 * batch * length * num_ids


def test_block_maxima_are_those_of_the_ids_that_may_be_drawn():
  logits = (
    jax.random.normal(jax.random.key(4), (2, 3, 12)).at[0, 0, 9].set(99.0)
  )
  got = call(logits).block_maxima
  free = np.where(np.arange(12) < 9, logits, -np.inf)
  free -= free.max(-1, keepdims=True)
  np.testing.assert_allclose(got, free.reshape(2, 3, 4, 3).max(-1), atol=1e-5)
