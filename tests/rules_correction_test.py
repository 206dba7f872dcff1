"""Path planning, edits and refinement: by hand, exactly, and end to end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_joints import (
  TWINS,
  VOCAB,
  A,
  B,
  chi_square,
  law_of,
  total_variation,
)

from mdlm_jax import draws, oracle, rules, sampling
from mdlm_jax.blocks import blocks_of
from mdlm_jax.canvas import from_prompts
from mdlm_jax.predict import Denoiser
from mdlm_jax.rules import Proposal, Row
from mdlm_jax.schedules import uniform_grid

F, T = False, True
TOKEN, CANDIDATE = 2, 3
SHARP = draws.categorical(temperature=0.0)


def situation(masked, probs, is_open=None, planner=None):
  """Token 2 stands at committed slots, 3 is proposed; `probs` are theirs.

  At a masked slot the probability is the candidate's, elsewhere that of the
  token that stands there; the candidate has the rest.
  """
  masked, probs = np.array(masked), np.array(probs)
  is_open = np.ones(masked.shape, bool) if is_open is None else is_open
  p = np.zeros((masked.size, 5))
  p[:, CANDIDATE] = np.where(masked, probs, 1 - probs)
  p[:, TOKEN] = 1 - p[:, CANDIDATE]
  row = Row(
    jnp.asarray(np.where(masked, 1, TOKEN)), jnp.asarray(is_open),
    jnp.asarray(masked), jnp.arange(masked.size),
  )  # fmt: skip
  proposal = Proposal(
    jnp.full(masked.size, CANDIDATE), jnp.zeros(masked.size),
    jnp.log(jnp.asarray(p)), jnp.zeros(masked.size), planner,
  )  # fmt: skip
  return row, proposal


def decide(rule, step, row, proposal, state=None):
  state = rule.init((), row, 5)[0] if state is None else state
  return rule.update((), step, row, proposal, state)


@functools.cache
def stub(logits_of):
  """A denoiser whose logits are a function of the canvas."""
  return Denoiser(
    lambda params, cache, ids, *, at, **_: (
      jnp.take_along_axis(logits_of(ids), at[..., None], 1)
      if at is not None
      else logits_of(ids),
      (),
    ),
    lambda params, hidden: hidden,
  )


def flipped(ids):
  """A where there is MASK or B, B where there is A; nearly certain."""
  return 20.0 * jax.nn.one_hot(jnp.where(ids == A, B, A), VOCAB.size)


def unsure(ids):
  """Something else at every slot, and another thing in another context."""
  hashed = ids + 3 * jnp.roll(ids, 1, -1) + 7 * jnp.arange(ids.shape[1])
  tokens = jnp.arange(VOCAB.size)
  return 3 * jnp.sin(hashed[..., None] * (1.3 + tokens) + tokens)


def run(denoiser, canvas, rule, **options):
  return sampling.sample(
    denoiser, None, jax.random.key(0), canvas, vocab=VOCAB, rule=rule, **options
  )


# Path planning.

MASKED = [F, T, F, T, F]
PROBS = [0.1, 0.5, 0.9, 0.3, 0.05]
OPEN = np.array([T, T, T, T, F])  # The last slot is a prompt.


@pytest.mark.parametrize(
  ('eta', 'write', 'remask'),
  [
    (1.0, [F, T, F, F, F], [T, F, F, F, F]),  # 0.9 and 0.5 stay.
    (0.25, [F] * 5, [F] * 5),  # 0.1^0.25 = 0.56 beats 0.5.
    (0.0, [F] * 5, [F] * 5),
    (9.0, [F, T, F, T, F][:3] + [F, F], [T, F, F, F, F]),  # 0.9^9 = 0.39.
    (20.0, [F, T, F, T, F], [T, F, T, F, F]),  # 0.9^20 = 0.12.
  ],
)
def test_all_open_slots_compete_for_the_planned_places(eta, write, remask):
  row, proposal = situation(MASKED, PROBS, OPEN)
  rule = rules.path_planning(2, eta=eta)  # Two of four places at first.
  update = decide(rule, 0, row, proposal)
  np.testing.assert_array_equal(update.write, write)
  np.testing.assert_array_equal(update.remask, remask)
  last = decide(rule, 1, row, proposal)
  np.testing.assert_array_equal(last.write, MASKED)
  assert not last.remask.any()


def test_eta_zero_keeps_tokens_that_the_model_excludes():
  # 0 log 0 is no NaN, and a certain candidate does not win a tie.
  row, proposal = situation([F, T], [0.0, 1.0])
  update = decide(rules.path_planning(2, eta=0.0), 0, row, proposal)
  assert not update.write.any() and not update.remask.any()


def test_planners_score_the_slots_they_say():
  scores = jnp.log(jnp.array([0.8, 0.01, 0.4, 0.02, 1.0]))
  row, proposal = situation(MASKED, PROBS, OPEN, scores)
  expected = {
    rules.self_planner: PROBS,
    rules.external_planner: [0.8, 0.01, 0.4, 0.02, 1.0],
    rules.bert_planner: [0.8, 0.5, 0.4, 0.3, 1.0],
  }
  for planner, values in expected.items():
    np.testing.assert_allclose(
      jnp.exp(planner(row, proposal)), values, rtol=1e-5
    )
  update = decide(
    rules.path_planning(2, planner=rules.external_planner), 0, row, proposal
  )
  assert not update.write.any() and not update.remask.any()
  update = decide(
    rules.path_planning(2, planner=rules.bert_planner), 0, row, proposal
  )
  np.testing.assert_array_equal(update.write, [F, T, F, F, F])
  np.testing.assert_array_equal(update.remask, [F, F, T, F, F])
  for planner in (rules.external_planner, rules.bert_planner):
    with pytest.raises(ValueError, match='the sampler has none'):
      planner(row, proposal._replace(planner=None))


def test_path_planning_commits_the_planned_number():
  canvas = from_prompts([[A, B], [], [A] * 4], 7, VOCAB)
  result = run(
    stub(unsure), canvas, rules.path_planning(4), draw=SHARP, trajectory=True
  )
  masked = canvas.generation_slots & (result.trajectory == VOCAB.mask_id)
  # 7 slots in 4 calls: 2, 2, 2, 1.
  np.testing.assert_array_equal(
    masked.sum(-1), [[5] * 3, [3] * 3, [1] * 3, [0] * 3]
  )
  assert result.changes.sum() > 0
  assert (result.changes[~canvas.generation_slots] == 0).all()


def test_without_eta_path_planning_is_confidence_decoding():
  canvas = from_prompts([[A]] * 64, 6, VOCAB)
  draw = draws.categorical(score=draws.probability)
  first, second = (
    run(stub(unsure), canvas, rule, draw=draw).ids
    for rule in (rules.path_planning(4, eta=0.0), rules.by_confidence(4))
  )
  np.testing.assert_array_equal(first, second)


# Edits.


def test_edits_replace_what_the_model_would_write_instead():
  row, proposal = situation([F, T, F, F, F], [0.05, 0.5, 0.1, 0.3, 0.0], OPEN)
  rule = rules.editing(rules.by_confidence(1), 0.9, max_rounds=2)
  update = decide(rule, 0, row, proposal)
  # 0.95 is above the threshold, 0.9 is not; the prompt stays.
  np.testing.assert_array_equal(update.write, [T, T, F, F, F])
  assert not update.done  # It goes on when the window is full.
  lower = rules.editing(rules.by_confidence(1), 0.5, max_rounds=2)
  np.testing.assert_array_equal(
    decide(lower, 0, row, proposal).write, [T, T, T, T, F]
  )
  # The candidate that stands there already is no edit.
  same = proposal._replace(candidate_ids=jnp.full(5, TOKEN))
  full = row._replace(masked=jnp.zeros(5, bool))
  update = decide(rule, 1, full, same)
  assert not update.write.any() and update.done


def test_edits_end_after_their_rounds():
  rule = rules.editing(rules.by_confidence(2), 0.5, max_rounds=2)
  row, proposal = situation([F] * 3, [0.0] * 3)
  state = rule.init((), row, 5)[0]
  first = decide(rule, 1, row, proposal, state)
  assert first.write.all() and not first.done
  second = decide(rule, 2, row, proposal, first.state)
  assert second.write.all() and second.done


@pytest.mark.parametrize('max_rounds', [0, 1, 3])
def test_oscillation_is_reported(max_rounds):
  """Every edit makes the model want the other token again."""
  rule = rules.editing(rules.by_confidence(2), 0.5, max_rounds=max_rounds)
  result = run(stub(flipped), from_prompts([[]], 4, VOCAB), rule, draw=SHARP)
  # The first two slots are edited once more, in the call that fills the rest.
  np.testing.assert_array_equal(
    result.changes, [[max_rounds + 1] * 2 + [max_rounds] * 2]
  )
  assert result.calls == 2 + max_rounds


def test_edits_stop_when_nothing_changes():
  def copied(ids):
    tokens = jnp.where(ids == VOCAB.mask_id, A, ids)
    return 20.0 * jax.nn.one_hot(tokens, VOCAB.size)

  rule = rules.editing(rules.by_confidence(2), 0.5, max_rounds=16)
  result = run(stub(copied), from_prompts([[]], 4, VOCAB), rule, draw=SHARP)
  assert result.calls == 3  # The last one found nothing to edit.
  assert result.changes.sum() == 0


def leave_one_out(vocab=VOCAB):
  """The exact conditional of a slot given the visible tokens elsewhere.

  The exact denoiser itself copies what is visible and would never edit it.
  """
  exact = oracle.exact_denoiser(vocab)

  def features(params, cache, ids, *, at, **rest):
    del at
    length = ids.shape[1]

    def of_slot(slot):
      hidden, _ = exact.features(
        params, None, ids.at[:, slot].set(vocab.mask_id), at=None, **rest
      )
      return hidden[:, slot]

    return jnp.stack([of_slot(i) for i in range(length)], 1), ()

  return Denoiser(features, exact.head)


def test_edits_have_their_exact_law():
  """Two slots that are equal with probability 0.9, drawn independently.

  One round: of an unequal pair each slot is edited to agree with the other with
  probability 0.9; an equal pair is not, since 0.1 is below the threshold. The
  pair stays unequal when both or none are edited: 0.82.
  """
  joint = oracle.joint(
    [(A, A), (B, B), (A, B), (B, A)], [0.45] * 2 + [0.05] * 2
  )
  denoiser = leave_one_out()
  rule = rules.editing(rules.by_confidence(1), 0.8, max_rounds=1)
  law = law_of(joint, rule, denoiser=denoiser)
  np.testing.assert_allclose(
    [law.probabilities[k] for k in ((A, A), (B, B), (A, B), (B, A))],
    [0.25 + 0.5 * 0.09] * 2 + [0.25 * 0.82] * 2, rtol=1e-9,
  )  # fmt: skip
  np.testing.assert_allclose(total_variation(law, joint), 0.31, rtol=1e-9)
  result = sampling.sample(
    denoiser, joint, jax.random.key(0), from_prompts([[]] * 4_000, 2, VOCAB),
    vocab=VOCAB, rule=rule,
  )  # fmt: skip
  statistic, freedom = chi_square(law, result.ids)
  assert freedom == 3
  assert statistic < 21.1  # One false alarm in 10^4.


# Refinement.


def test_refinement_takes_back_the_weakest_token_and_not_the_prompt():
  row, proposal = situation(
    [F] * 4, [0.9, 0.1, 0.9, 0.05], np.array([T, T, T, F])
  )
  rule = rules.refined(rules.by_confidence(2), rounds=1, count=1)
  update = decide(rule, 1, row, proposal)
  np.testing.assert_array_equal(update.remask, [F, T, F, F])
  assert not decide(rule, 2, row, proposal, update.state).remask.any()
  assert not decide(rule, 0, row, proposal).remask.any()
  two = rules.refined(rules.by_confidence(2), rounds=1, count=2)
  np.testing.assert_array_equal(
    decide(two, 1, row, proposal).remask, [T, T, F, F]
  )


def test_refinement_adds_exactly_its_rounds_to_every_block():
  """16 slots in blocks of 8, 4 calls each and one round: 8 + 2 calls."""
  canvas = from_prompts([[A, A, B]], 16, VOCAB)
  result = run(
    stub(unsure), canvas, rules.refined(rules.by_confidence(4), 1, 1),
    blocks=blocks_of(canvas, 8), draw=SHARP, trajectory=True,
  )  # fmt: skip
  assert result.calls == 10
  np.testing.assert_array_equal(result.calls_per_block, [5, 5])
  states = np.concatenate([canvas.ids[None], result.trajectory])[:, 0, 3:]
  written = (states[:-1] == 1) & (states[1:] != 1)
  taken_back = (states[:-1] != 1) & (states[1:] == 1)
  for block in (slice(0, 8), slice(8, 16)):
    assert taken_back[:, block].sum() == 1
    assert written[:, block].sum() == 8 + 1
  assert not (result.ids == VOCAB.mask_id).any()


def test_refinement_follows_an_adaptive_rule_when_it_is_done():
  # Certain of everything: one call fills the row, two rounds refine it.
  result = run(
    stub(flipped), from_prompts([[]], 6, VOCAB),
    rules.refined(rules.threshold(0.9), rounds=2, count=1), draw=SHARP,
    trajectory=True,
  )  # fmt: skip
  assert result.calls == 3
  np.testing.assert_array_equal(result.trajectory[0], [[A] * 6])
  # Nothing was committed before the first call; then the first of equals.
  np.testing.assert_array_equal(result.trajectory[1], [[1] + [A] * 5])
  np.testing.assert_array_equal(result.trajectory[2], [[A] * 6])


def test_refinement_repairs_a_parallel_reveal():
  """Both twins at once fail half the time; one drawn anew never."""
  assert total_variation(law_of(TWINS, rules.by_confidence(1)), TWINS) == 0.5
  rule = rules.refined(rules.by_confidence(1), rounds=2, count=1)
  assert total_variation(law_of(TWINS, rule), TWINS) < 1e-12


# Settings.

KERNEL = rules.kernel(uniform_grid(3))
CACHED = rules.kernel(uniform_grid(3), cached=True)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: rules.path_planning(0), 'num_steps=0 must be an integer'),
    (lambda: rules.path_planning(2, eta=-1.0), 'eta=-1.0 must be finite'),
    (lambda: rules.editing(KERNEL, 1.0, 2), 'threshold=1.0 must'),
    (lambda: rules.editing(KERNEL, 0.5, -1), 'max_rounds=-1 must'),
    (lambda: rules.editing(CACHED, 0.5, 1), 'reuses proposals'),
    (lambda: rules.refined(KERNEL, 0, 1), 'rounds=0 must be'),
    (lambda: rules.refined(KERNEL, 1, 0), 'count=0 must be'),
    (lambda: rules.refined(CACHED, 1, 1), 'reuses proposals'),
    (
      lambda: run(
        stub(unsure), from_prompts([[]], 2, VOCAB),
        rules.editing(rules.path_planning(2), 0.5, 1),
      ),
      'take nothing back',
    ),
  ],
)  # fmt: skip
def test_impossible_settings_raise(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_equal_settings_are_the_same_object():
  make = rules.path_planning
  assert make(4) is make(num_steps=4, eta=1.0, planner=rules.self_planner)
  assert make(4) is not make(4, eta=2.0)
  inner = rules.by_confidence(4)
  assert rules.refined(inner, 1, 2) is rules.refined(inner, count=2, rounds=1)
  assert rules.editing(inner, 0.5, 2) is rules.editing(inner, 0.5, max_rounds=2)
