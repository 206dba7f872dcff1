"""Adaptive positions against the formulas of their papers and exact laws."""

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_joints import (
  VOCAB,
  A,
  B,
  in_groups,
  law_of,
  random_joint,
  total_variation,
)

from mdlm_jax import draws, oracle, rules, sampling
from mdlm_jax.canvas import from_prompts
from mdlm_jax.predict import Denoiser
from mdlm_jax.rules import Proposal, Row
from mdlm_jax.rules.adaptive import divergence
from mdlm_jax.vocab import Vocab

F, T = False, True
SELECTION = golden_data.load('llada_fast/selection')['selection_rules']
DRAWN = draws.categorical(score=draws.probability)


def one_row(masked, confidence=None, logits=None):
  masked = jnp.array(masked)
  length = masked.shape[0]
  row = Row(
    jnp.where(masked, 1, 5), jnp.ones(length, bool), masked, jnp.arange(length)
  )
  confidence = jnp.zeros(length) if confidence is None else confidence
  logits = jnp.zeros((length, 3)) if logits is None else jnp.array(logits)
  proposal = Proposal(
    jnp.full(length, 7), jnp.array(confidence), logits,
    jax.nn.logsumexp(logits, -1),
  )  # fmt: skip
  return row, proposal


def written(rule, row, proposal, step=0):
  state, t = rule.init((), row, proposal.logits.shape[1])
  assert t is None and rule.adaptive
  write = rule.update((), step, row, proposal, state).write
  return np.flatnonzero(write).tolist()


MASKED, CONFIDENCE = [T, F, T, T, T], [0.1, 0.95, 0.3, 0.9, 0.5]


@pytest.mark.parametrize(
  ('value', 'expected'),
  [
    (0.2, [2, 3, 4]),
    (0.5, [3, 4]),
    (0.9, [3]),
    (0.93, [3]),
    (-1.0, [0, 2, 3, 4]),
  ],
)
def test_threshold_takes_what_reaches_it_and_always_the_best(value, expected):
  assert written(rules.threshold(value), *one_row(MASKED, CONFIDENCE)) == (
    expected
  )


@pytest.mark.parametrize(
  ('num_steps', 'step', 'value', 'expected'),
  [
    # Five slots, so the quotas of two calls are 3 and 2.
    (2, 0, 0.2, [2, 3, 4]),
    (2, 0, 0.95, [2, 3, 4]),
    (2, 1, 0.95, [3, 4]),
    (2, 1, 0.2, [2, 3, 4]),
    (5, 0, 0.4, [3, 4]),
    (5, 0, 0.5, [3]),  # Strictly above.
    (5, 0, -1.0, [0, 2, 3, 4]),
    (9, 7, 0.95, []),
  ],
)
def test_quota_threshold_takes_what_exceeds_it_or_the_quota(
  num_steps, step, value, expected
):
  rule = rules.quota_threshold(num_steps, value)
  assert written(rule, *one_row(MASKED, CONFIDENCE), step) == expected


@pytest.mark.parametrize(
  ('value', 'expected'),
  [
    # (n + 1) (1 - c_n) = 0.2, 1.5, 2.8, 4.5 for c = 0.9, 0.5, 0.3, 0.1.
    (0.0, [3]),
    (1.4, [3]),
    (1.6, [3, 4]),
    (2.9, [2, 3, 4]),
    (4.6, [0, 2, 3, 4]),
  ],
)
def test_factor_takes_the_prefix_of_its_formula(value, expected):
  row, proposal = one_row(MASKED, CONFIDENCE)
  assert written(rules.factor(value), row, proposal) == expected


def entropies_of(logits):
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  return -(p * np.log(np.maximum(p, 1e-300))).sum(-1)


@pytest.mark.parametrize('gamma', [0.0, 0.3, 1.0, 2.0, 100.0])
def test_entropy_bound_takes_the_largest_prefix_within_it(gamma):
  generator = np.random.default_rng(0)
  for _ in range(5):
    logits = generator.normal(0, 3, (7, 6))
    masked = generator.uniform(size=7) < 0.7
    masked[0] = True
    slots = np.flatnonzero(masked)
    entropies = entropies_of(logits)[slots]
    order = slots[np.argsort(entropies)]
    ascending = np.sort(entropies)
    sums = np.array(
      [ascending[: n + 1].sum() - ascending[n] for n in range(len(slots))]
    )
    expected = sorted(order[sums <= gamma].tolist())
    # The score of the draw is not read.
    row, proposal = one_row(masked, generator.uniform(size=7), logits)
    assert written(rules.entropy_bound(gamma), row, proposal) == expected


def test_entropy_bound_of_zero_takes_what_is_certain_and_one_more():
  certain = [0.0, -jnp.inf, -jnp.inf]
  logits = [[0.1, 0.0, 0.0], certain, [2.0, 0, 0], certain]
  row, proposal = one_row([T] * 4, None, logits)
  assert written(rules.entropy_bound(0.0), row, proposal) == [1, 2, 3]


def test_klass_waits_until_the_prediction_has_settled():
  rule = rules.klass(0.4, 0.01, history=2)
  still, moving = [0.0, 1.0, 2.0], [[3.0, 0.0, 0.0], [0.0, 3.0, 0.0]]
  row, _ = one_row([T] * 4)
  state, _ = rule.init((), row, 3)
  groups = []
  for step in range(4):
    logits = [still, still, moving[step % 2], still]
    _, proposal = one_row([T] * 4, [0.5, 0.3, 0.9, 0.45], logits)
    update = rule.update((), step, row, proposal, state)
    state = update.state
    groups.append(np.flatnonzero(update.write).tolist())
  # The best alone, until two divergences in a row were small.
  assert groups == [[2], [2], [0, 3], [0, 3]]


def test_klass_starts_again_when_a_prediction_moves():
  rule = rules.klass(0.0, 0.01, history=1)
  row, _ = one_row([T] * 2)
  state, _ = rule.init((), row, 3)
  settled = []
  logits = [[0, 0, 0], [0, 0, 0], [5, 0, 0], [5, 0, 0]]
  for step in range(4):
    _, proposal = one_row([T] * 2, [0.1, 0.2], [logits[step], [0.0, 0, 0]])
    state = rule.update((), step, row, proposal, state).state
    settled.append(state[2].tolist())
  assert settled == [[0, 0], [1, 1], [0, 2], [1, 3]]


def test_divergence_is_that_of_the_present_from_the_past():
  now, before = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.75, 0.0])
  exact = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
  with np.errstate(divide='ignore'):
    rows = jnp.log(jnp.array([now, before, now]))
    others = jnp.log(jnp.array([before, before, [1.0, 0.0, 0.0]]))
  np.testing.assert_allclose(
    divergence(rows, jnp.zeros(3), others, jnp.zeros(3)),
    [exact, 0.0, np.inf],
    rtol=1e-6,
  )


ALL_RULES = [
  rules.threshold(0.9),
  rules.factor(0.1),
  rules.entropy_bound(0.0),
  rules.klass(2.0, 0.1),
]


@pytest.mark.parametrize('rule', ALL_RULES)
def test_ties_go_to_the_lowest_position(rule):
  row, proposal = one_row([F, T, T, T], [0.5] * 4)
  assert written(rule, row, proposal) == [1]
  state, _ = rule.init((), row, 3)
  batch = jax.tree.map(lambda x: x[None], (row, proposal, state))
  update = jax.vmap(rule.update, (None, None, 0, 0, 0))((), 0, *batch)
  np.testing.assert_array_equal(update.write, [[F, T, F, F]])


@pytest.mark.parametrize('rule', ALL_RULES)
def test_a_full_row_is_left_alone_without_nan(rule):
  row, proposal = one_row([F, F], [0.5, 0.5], [[0.0, -jnp.inf, 1.0]] * 2)
  state, _ = rule.init((), row, 3)
  update = jax.jit(rule.update)
  with jax.debug_nans(True):
    for step in (0, 1):
      decided = update((), step, row, proposal, state)
      state = decided.state
      assert not decided.write.any()


def uniform_network(num_ids):
  def features(params, cache, ids, **unused):
    return jnp.zeros((*ids.shape, num_ids)), ()

  return Denoiser(features, lambda params, hidden: hidden)


@pytest.mark.parametrize('rule', ALL_RULES)
def test_a_flat_network_takes_a_call_per_slot_and_ends(rule):
  # 50 tokens of probability 0.02 reach no threshold.
  vocab = Vocab(size=51, mask_id=50)
  result = sampling.sample(
    uniform_network(51), (), jax.random.key(0),
    from_prompts([[3], [4]], 6, vocab), vocab=vocab, rule=rule,
    trajectory=True, draw=DRAWN,
  )  # fmt: skip
  assert result.calls == 6
  left = (np.asarray(result.trajectory) == 50).sum(2)
  np.testing.assert_array_equal(left[:6], [[k, k] for k in (5, 4, 3, 2, 1, 0)])


def test_logits_that_are_nan_are_an_error_and_no_endless_wait():
  def features(params, cache, ids, **unused):
    return jnp.full((*ids.shape, VOCAB.size), jnp.nan), ()

  network = Denoiser(features, lambda params, hidden: hidden)
  with pytest.raises(ValueError, match='non-finite logits'):
    sampling.sample(
      network, (), jax.random.key(0), from_prompts([[]], 3, VOCAB),
      vocab=VOCAB, rule=rules.threshold(0.9),
    )  # fmt: skip


def reference_factor(confidence, masked, value):
  """Fast-dLLM's loop: it also takes all when only the last one fails."""
  slots = np.flatnonzero(masked)
  order = slots[np.argsort(-confidence[slots], kind='stable')]
  count = 1
  for n in range(2, len(order) + 1):
    if (n + 1) * (1 - confidence[order[n - 1]]) >= value:
      break
    count = n
  if count == len(order) - 1:
    count = len(order)
  return sorted(order[:count].tolist()), count


def test_selections_are_those_of_fast_dllm():
  extra = 0
  for case, masked in enumerate(SELECTION['mask_index']):
    logits = np.float64(SELECTION['logits'][case])
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    row, proposal = one_row(masked, p.max(-1))
    value = float(SELECTION['threshold'][case])
    theirs = np.flatnonzero(SELECTION['selected_by_threshold'][case]).tolist()
    assert written(rules.threshold(value), row, proposal) == theirs

    value = float(SELECTION['factor'][case])
    theirs = np.flatnonzero(SELECTION['selected_by_factor'][case]).tolist()
    assert reference_factor(p.max(-1), masked, value)[0] == theirs
    ours = written(rules.factor(value), row, proposal)
    if ours != theirs:  # By one slot, which fails the formula.
      extra += 1
      (last,) = set(theirs) - set(ours)
      assert len(theirs) == masked.sum()
      assert (len(theirs) + 1) * (1 - p.max(-1)[last]) >= value
  assert extra > 0


@pytest.mark.parametrize(
  'rule',
  [
    rules.threshold(2.0),
    rules.quota_threshold(3, 2.0),
    rules.factor(0.0),
    rules.klass(2.0, 0.1),
  ],
)
def test_one_at_a_time_is_an_exact_sampler(rule):
  joint = random_joint()
  assert total_variation(law_of(joint, rule), joint) < 1e-12


def test_one_at_a_time_is_biased_where_the_score_reads_the_draw():
  joint = random_joint()
  law = law_of(joint, rules.threshold(2.0), draw=DRAWN)
  assert total_variation(law, joint) > 0.3


def test_entropy_bound_of_zero_is_an_exact_sampler():
  joint = random_joint()
  law = law_of(joint, rules.entropy_bound(0.0), draw=DRAWN)
  assert total_variation(law, joint) < 1e-12


def test_entropy_bound_of_zero_spares_calls_without_error():
  joint, rule = oracle.joint([(A, A, A), (B, B, B)]), rules.entropy_bound(0.0)
  assert total_variation(law_of(joint, rule), joint) < 1e-12
  result = sampling.sample(
    oracle.exact_denoiser(VOCAB), joint, jax.random.key(0),
    from_prompts([[]] * 4, 3, VOCAB), vocab=VOCAB, rule=rule,
  )  # fmt: skip
  # The first token decides the others.
  np.testing.assert_array_equal(result.calls_per_row, 2)


@pytest.mark.parametrize(
  'rule',
  [
    rules.threshold(0.0),
    rules.quota_threshold(3, 0.0),
    rules.quota_threshold(1, 2.0),
    rules.factor(1e9),
    rules.entropy_bound(1e9),
  ],
)
def test_all_at_once_is_the_product_of_the_marginals(rule):
  joint = random_joint()
  law = law_of(joint, rule)
  assert total_variation(law, in_groups(joint, [[0, 1, 2]])) < 1e-12
  np.testing.assert_allclose(total_variation(law, joint), 0.42214, atol=1e-5)


def test_klass_without_bounds_writes_the_best_and_then_the_rest():
  joint = random_joint()
  p = joint.probabilities.reshape(3, 3, 3)
  maxima = [p.sum(tuple({0, 1, 2} - {i})).max() for i in range(3)]
  first = int(np.argmax(maxima))
  rest = [i for i in range(3) if i != first]
  law = law_of(joint, rules.klass(-1.0, 1e9))
  assert total_variation(law, in_groups(joint, [[first], rest])) < 1e-12


@pytest.mark.parametrize(
  'rule', [rules.threshold(0.4), rules.factor(1.5), rules.entropy_bound(1.0)]
)
def test_between_the_extremes_the_error_is_smaller(rule):
  joint = random_joint()
  law = law_of(joint, rule)
  assert 0.05 < total_variation(law, joint) < 0.1


def test_equal_settings_are_the_same_object():
  assert rules.threshold(0.9) is rules.threshold(value=0.9)
  assert rules.factor(1.0) is not rules.factor(2.0)
  assert rules.klass(0.9, 0.1) is rules.klass(0.9, 0.1, history=1)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: rules.threshold(float('nan')), 'value=nan must be finite'),
    (lambda: rules.factor(-1.0), 'value=-1.0 must be finite and at least 0'),
    (lambda: rules.entropy_bound(-0.1), 'gamma=-0.1 must be finite and at'),
    (lambda: rules.klass(float('inf'), 0.1), 'confidence=inf must be finite'),
    (lambda: rules.klass(0.9, 0.0), 'kl=0.0 must be finite and above 0'),
    (lambda: rules.klass(0.9, 0.1, history=0), 'history=0 must be an integer'),
  ],
)
def test_impossible_settings_raise(make, message):
  with pytest.raises(ValueError, match=message):
    make()
