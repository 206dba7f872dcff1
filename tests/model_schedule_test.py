"""A denoiser that switches by step: which network ran, how often, on what."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import canvas as canvas_lib
from mdlm_jax import draws, rules, sampling
from mdlm_jax.model_schedule import by_step
from mdlm_jax.models import transformer
from mdlm_jax.predict import Denoiser, predict
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=6, mask_id=1, pad_id=0)


def stub(token, width, ran=None):
  """Writes `token`, from hidden states of `width`; counts real executions."""

  def features(params, cache, ids, *, at, **unused):
    if ran is not None:
      jax.debug.callback(lambda: ran.update([token]))
    shape = ids.shape if at is None else at.shape
    return jnp.zeros((*shape, width)) + params, ()

  def head(params, hidden):
    logits = 9 * jax.nn.one_hot(token, VOCAB.size)
    return jnp.broadcast_to(logits, (*hidden.shape[:2], VOCAB.size))

  return Denoiser(features, head, time_free=True)


@pytest.mark.parametrize(
  ('starts', 'written'),
  [
    ((0, 3, 6), {2: 3, 3: 3, 4: 2}),
    ((0, 1, 7), {2: 1, 3: 6, 4: 1}),
    ((0, 4, 90), {2: 4, 3: 4}),
  ],
)
def test_each_network_runs_in_its_range_and_only_there(starts, written):
  ran = collections.Counter()
  denoiser = by_step(
    [stub(2, 3, ran), stub(3, 5, ran), stub(4, 7, ran)], starts
  )
  result = sampling.sample(
    denoiser,
    (jnp.zeros(()),) * 3,
    jax.random.key(0),
    canvas_lib.from_prompts([[], [5]], 8, VOCAB),
    vocab=VOCAB,
    rule=rules.by_confidence(8),
    draw=draws.categorical(temperature=0.0),
  )
  jax.effects_barrier()
  assert ran == written
  # One token a call: what stands in a row says who wrote how much.
  tokens = collections.Counter(np.asarray(result.ids[0, :8]).tolist())
  assert tokens == written
  assert int(result.calls) == 8


def ask(denoiser, params, ids, step):
  prediction, _ = predict(
    denoiser, params, None, ids, vocab=VOCAB, t=jnp.ones(len(ids)),
    valid=jnp.ones(ids.shape, bool), step=step, at=jnp.array([[1, 2]]),
    positions=jnp.arange(ids.shape[1])[None],
  )  # fmt: skip
  return prediction


def test_its_predictions_are_those_of_the_network_of_the_step():
  """Networks of different width and depth, each with its own parameters."""
  shape = dict(vocab_size=6, num_heads=1, mlp_dim=8, max_length=4)  # noqa: C408
  networks, params = [], []
  for seed, (layers, dim) in enumerate([(1, 8), (2, 4)]):
    config = transformer.TransformerConfig(
      num_layers=layers, model_dim=dim, **shape
    )
    networks.append(transformer.denoiser(config))
    params.append(transformer.init(config, jax.random.key(seed)))
  both = by_step(networks, (0, 2))
  ids = jnp.array([[1, 3, 1, 5]])
  run = jax.jit(lambda params, step: ask(both, params, ids, step))
  for step, which in [(0, 0), (1, 0), (2, 1), (7, 1)]:
    got = run(tuple(params), step)
    alone = ask(networks[which], params[which], ids, step)
    np.testing.assert_allclose(got.logits, alone.logits, atol=1e-5)
    np.testing.assert_allclose(got.log_z, alone.log_z, atol=1e-5)


def test_logits_of_any_dtype_meet():
  def low(params, cache, ids, *, at, **unused):
    return jnp.zeros((*at.shape, 6), jnp.bfloat16), ()

  both = by_step([Denoiser(low, lambda _, hidden: hidden), stub(2, 4)], (0, 1))
  prediction = ask(both, (0.0, 0.0), jnp.ones((1, 4), int), 0)
  np.testing.assert_allclose(prediction.log_z, np.log(4), rtol=1e-6)


def test_an_unchanged_canvas_is_no_reason_to_skip_the_next_network():
  assert not by_step([stub(2, 3), stub(3, 3)], (0, 4)).time_free


def test_equal_schedules_are_the_same_object():
  one, two = stub(2, 3), stub(3, 3)
  assert by_step([one, two], (0, 4)) is by_step((one, two), [0, 4])
  assert by_step([one, two], (0, 4)) is not by_step([one, two], (0, 5))


@pytest.mark.parametrize(
  'starts', [(1, 2), (0, 0), (0, 3, 2), (0,), (0, 1, 2, 3)]
)
def test_wrong_starts_are_refused(starts):
  count = 3 if len(starts) == 3 else 2
  with pytest.raises(ValueError, match='start'):
    by_step([stub(2, 3), stub(3, 3), stub(4, 3)][:count], starts)


def test_no_network_is_refused():
  with pytest.raises(ValueError, match='0 denoisers'):
    by_step([], [])
