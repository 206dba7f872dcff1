"""Allowed sets: no forbidden token, and the law renormalised on the set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_joints

from mdlm_jax import canvas as canvas_lib
from mdlm_jax import rules
from mdlm_jax.constraints import constrain
from mdlm_jax.draws import categorical
from mdlm_jax.guidance import guide
from mdlm_jax.predict import Denoiser, predict
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=6, mask_id=1, pad_id=0)
CANVAS = canvas_lib.from_rows([[2, None, None, None], [None, 3]], VOCAB)
SETS = [[None, [3, 4], None, [5]], [[4, 3, 3], None]]
LOGITS = jax.random.normal(jax.random.key(0), (2, 4, 6))


def features(params, cache, ids, *, at, **unused):
  given = (ids == 2).any(1)[:, None, None]
  hidden = params * jnp.where(given, 1.0, 0.5)
  if at is not None:
    hidden = jnp.take_along_axis(hidden, at[..., None], 1)
  return hidden, ()


TABLE = Denoiser(features, lambda params, hidden: hidden)


def ask(canvas=CANVAS, logits=LOGITS, **options):
  prediction, _ = predict(
    TABLE, logits, None, canvas.ids, vocab=VOCAB,
    t=jnp.ones(canvas.ids.shape[0]), valid=canvas.valid,
    positions=canvas.positions, **options,
  )  # fmt: skip
  return prediction


def probabilities(prediction):
  return np.asarray(
    jnp.exp(prediction.logits - prediction.log_z[..., None]), np.float64
  )


def test_sets_are_stored_once_and_the_first_is_everything():
  constraint = constrain(CANVAS, SETS, VOCAB)
  np.testing.assert_array_equal(constraint.index, [[0, 1, 0, 2], [1, 0, 0, 0]])
  np.testing.assert_array_equal(
    constraint.sets, [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0], [0] * 5 + [1]]
  )


def test_law_is_renormalised_on_the_set():
  got = probabilities(ask(constraint=constrain(CANVAS, SETS, VOCAB)))
  free = probabilities(ask())
  for slot, allowed in [((0, 1), [3, 4]), ((0, 3), [5]), ((1, 0), [3, 4])]:
    by_hand = np.zeros(6)
    by_hand[allowed] = free[slot][allowed] / free[slot][allowed].sum()
    np.testing.assert_allclose(got[slot], by_hand, rtol=1e-6)
  np.testing.assert_array_equal(got[0, 2], free[0, 2])


def test_no_forbidden_token_in_a_thousand_draws():
  """Though the network is sure of one."""
  logits = jnp.zeros((2, 4, 6)).at[..., 2].set(30.0)
  prediction = ask(logits=logits, constraint=constrain(CANVAS, SETS, VOCAB))
  draw = categorical(temperature=2.0, top_p=0.9)

  def one(key):
    noise = jax.vmap(lambda key: draw.noise(key, jnp.arange(4), 6))(
      jax.random.split(key, 2)
    )
    return draw.propose(noise, prediction, None)[0]

  ids = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 1000))
  assert set(np.unique(ids[:, 0, 1])) == {3, 4}
  assert set(np.unique(ids[:, 0, 3])) == {5}
  assert set(np.unique(ids[:, 0, 2])) == {2}


def test_a_window_reads_the_sets_of_its_slots():
  constraint = constrain(CANVAS, SETS, VOCAB)
  at = jnp.array([[2, 3], [0, 1]])
  part = ask(constraint=constraint, at=at)
  whole = ask(constraint=constraint)
  np.testing.assert_array_equal(
    part.logits, jnp.take_along_axis(whole.logits, at[..., None], 1)
  )


def test_a_constraint_restricts_the_guided_law():
  guidance = guide(CANVAS, VOCAB, 1.0)
  free = probabilities(ask(guidance=guidance))[0, 1]
  assert not np.allclose(free, probabilities(ask())[0, 1])
  constraint = constrain(CANVAS, SETS, VOCAB)
  got = probabilities(ask(guidance=guidance, constraint=constraint))[0, 1]
  np.testing.assert_allclose(got[3:5], free[3:5] / free[3:5].sum(), rtol=1e-5)
  assert got[[0, 1, 2, 5]].sum() == 0


def test_filters_act_inside_the_set():
  """Top-k of 1 keeps the best of the set, not the set's share of the best."""
  logits = jnp.zeros((2, 4, 6)).at[..., 2].set(9.0).at[..., 4].set(1.0)
  prediction = ask(logits=logits, constraint=constrain(CANVAS, SETS, VOCAB))
  draw = categorical(top_k=1)
  noise = draw.noise(jax.random.key(0), jnp.arange(4), 6)
  noise = jax.tree.map(lambda x: jnp.stack([x, x]), noise)
  ids, _ = draw.propose(noise, prediction, None)
  assert (ids[0, 1], ids[0, 2], ids[0, 3]) == (4, 2, 5)


def test_constrained_sampler_has_the_constrained_law():
  """Left to right, the second of three slots held to two of three symbols."""
  joint = small_joints.random_joint(4)
  canvas = canvas_lib.from_rows([[None] * 3], small_joints.VOCAB)
  sets = [[None, [small_joints.A, small_joints.C], None]]
  law = small_joints.law_of(
    joint,
    rules.left_to_right(3),
    constraint=constrain(canvas, sets, small_joints.VOCAB),
  ).probabilities
  p = joint.probabilities.reshape(3, 3, 3)
  for a, b, c in np.ndindex(3, 3, 3):
    second = p[a].sum(-1) * np.array([1, 0, 1])
    by_hand = p[a].sum() * second[b] / second.sum() * p[a, b, c] / p[a, b].sum()
    got = law.get((a + 2, b + 2, c + 2), 0.0)
    assert got == pytest.approx(by_hand, abs=1e-9)


def test_the_gathered_sets_leave_no_array_of_the_size_of_the_logits():
  vocab = Vocab(size=4000, mask_id=0)
  canvas = canvas_lib.from_prompts([[]] * 4, 64, vocab)
  constraint = constrain(canvas, [[range(1, 9)] * 64] * 4, vocab)
  logits = jnp.zeros((4, 64, 4000))

  @jax.jit
  def best(logits, constraint):
    prediction, _ = predict(
      TABLE, logits, None, canvas.ids, vocab=vocab, t=jnp.ones(4),
      valid=canvas.valid, positions=canvas.positions, constraint=constraint,
    )  # fmt: skip
    return prediction.logits

  memory = best.lower(logits, constraint).compile().memory_analysis()
  assert memory.temp_size_in_bytes < logits.size / 4  # Bool would be size.


@pytest.mark.parametrize(
  ('sets', 'message'),
  [
    ([SETS[0]], '1 rows of sets for a canvas of 2'),
    ([SETS[0][:3], SETS[1]], 'row 0 has 3 sets for the 4 valid slots'),
    ([SETS[0], [None] * 4], 'row 1 has 4 sets for the 2 valid slots'),
    ([[None, [], None, None], SETS[1]], 'slot 1 of row 0 is empty'),
    (
      [[None, [6], None, None], SETS[1]],
      r'holds id 6; ids must lie in \[0, 6\)',
    ),
    ([[None, [-1], None, None], SETS[1]], 'holds id -1; ids must'),
    (
      [[None, [1, 2], None, None], SETS[1]],
      'holds id 1, which may not be drawn',
    ),
    ([[None, [0], None, None], SETS[1]], 'holds id 0, which may not be drawn'),
    ([SETS[0], [None, [3]]], 'slot 1 of row 1 is given'),
  ],
)
def test_sets_that_could_not_hold_are_refused(sets, message):
  with pytest.raises(ValueError, match=message):
    constrain(CANVAS, sets, VOCAB)


def test_left_padding_keeps_sets_with_their_slots():
  order = jnp.array([[0, 1, 2, 3], [2, 3, 0, 1]])
  left = jax.tree.map(lambda x: jnp.take_along_axis(x, order, 1), CANVAS)
  index = constrain(left, SETS, VOCAB).index
  np.testing.assert_array_equal(index, [[0, 1, 0, 2], [0, 0, 1, 0]])
