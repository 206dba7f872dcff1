"""Shifted logits: which slot speaks of a token, and that all ask the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import (
  blocks,
  canvas,
  losses,
  model_schedule,
  predict,
  rules,
  sampling,
)
from mdlm_jax.predict import Denoiser
from mdlm_jax.vocab import Vocab

LENGTH, MASK = 8, 11
VOCAB = Vocab(size=12, mask_id=MASK, pad_id=10)


def index_stub(asked=None, *, shifted=True):
  """At slot j it is sure of token j."""

  def features(params, cache, ids, *, at, **unused):
    if at is None:
      at = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    if asked is not None:
      asked.append(at)
    return 20.0 * jax.nn.one_hot(at, 12), ()

  return Denoiser(features, lambda params, hidden: hidden, shifted=shifted)


def predicted(network, *, valid=None, at=None, segments=None):
  shape = (1, LENGTH)
  prediction, _ = predict.predict(
    network, (), None, jnp.full(shape, MASK), vocab=VOCAB, t=jnp.ones(1),
    valid=jnp.ones(shape, bool) if valid is None else jnp.asarray([valid]),
    positions=jnp.broadcast_to(jnp.arange(LENGTH), shape),
    segments=None if segments is None else jnp.asarray([segments]),
    at=None if at is None else jnp.asarray([at]),
  )  # fmt: skip
  return prediction.logits.argmax(-1)[0].tolist()


def test_a_token_is_read_one_slot_before_its_own_and_the_first_at_its_own():
  aligned = index_stub(shifted=False)
  assert predicted(aligned) == [0, 1, 2, 3, 4, 5, 6, 7]
  assert predicted(index_stub()) == [0, 0, 1, 2, 3, 4, 5, 6]


def test_padding_and_other_documents_say_nothing():
  valid = [False, False, True, True, True, True, True, False]
  assert predicted(index_stub(), valid=valid)[2:7] == [2, 2, 3, 4, 5]
  segments = [0, 0, 0, 1, 1, 1, 1, 1]
  assert predicted(index_stub(), segments=segments) == [0, 0, 1, 3, 3, 4, 5, 6]


@pytest.mark.parametrize('valid_from', [0, 3])
@pytest.mark.parametrize('width', [1, 2, 5, 8])
def test_a_window_costs_one_slot_more_and_says_the_same(width, valid_from):
  valid = [slot >= valid_from for slot in range(LENGTH)]
  everywhere = predicted(index_stub(), valid=valid)
  for start in range(LENGTH - width + 1):
    asked = []
    window = list(range(start, start + width))
    answer = predicted(index_stub(asked), valid=valid, at=window)
    assert answer == everywhere[start : start + width]
    (slots,) = np.asarray(asked[0]).tolist()
    assert len(slots) == min(width + 1, LENGTH)
    assert slots == list(range(slots[0], slots[0] + len(slots)))
    assert slots[0] >= 0 and slots[-1] < LENGTH


TEXT = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 0]])


def next_token_stub(*, shifted):
  """At each slot it is sure of the token of `TEXT` after it."""

  def features(params, cache, ids, *, at, **unused):
    hidden = 20.0 * jax.nn.one_hot(jnp.roll(TEXT, -1, 1), 12)
    if at is not None:
      hidden = jnp.take_along_axis(hidden, at[..., None], 1)
    return hidden, ()

  return Denoiser(features, lambda params, hidden: hidden, shifted=shifted)


def with_schedule(network):
  return model_schedule.by_step([network, network], (0, 2))


@pytest.mark.parametrize('scheduled', [False, True])
def test_loss_bound_and_sampler_read_the_same_flag(scheduled):
  masked = jnp.ones(TEXT.shape, bool).at[:, 0].set(False)

  def outcomes(shifted):
    network, params = next_token_stub(shifted=shifted), ()
    if scheduled:
      network, params = with_schedule(network), ((), ())
    log_probs = predict.target_log_probs(
      network, params, VOCAB, jnp.where(masked, MASK, TEXT), TEXT,
      t=jnp.ones(2), valid=jnp.ones(TEXT.shape, bool),
      positions=jnp.broadcast_to(jnp.arange(LENGTH), TEXT.shape),
    )  # fmt: skip
    loss = losses.cross_entropy(log_probs, masked).mean
    prompts = canvas.from_prompts(TEXT[:, :1].tolist(), LENGTH - 1, VOCAB)
    result = sampling.sample(
      network, params, jax.random.key(0), prompts, vocab=VOCAB,
      rule=rules.by_confidence(2), blocks=blocks.blocks_of(prompts, 3),
    )  # fmt: skip
    return loss, (result.ids == TEXT)[:, 1:]

  loss, right = outcomes(True)
  assert loss < 0.01 and right.all()
  loss, right = outcomes(False)
  assert loss > 5 and not right.all(1).any()
