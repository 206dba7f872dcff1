"""Planned positions against the formulas of their papers and exact laws."""

import itertools
import math

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
  in_groups,
  independent_joint,
  law_of,
  random_joint,
  total_variation,
)

from mdlm_jax import draws, oracle, rules, sampling, schedules
from mdlm_jax.canvas import from_prompts
from mdlm_jax.rules import Proposal, Row

F, T = False, True
ROW_MAXIMUM = draws.categorical()
DRAWN = draws.categorical(score=draws.probability)


def one_row(masked, confidence=None, is_open=None):
  masked = jnp.array(masked)
  length = masked.shape[0]
  is_open = jnp.ones(length, bool) if is_open is None else jnp.array(is_open)
  row = Row(jnp.where(masked, 1, 5), is_open, masked, jnp.arange(length))
  confidence = jnp.zeros(length) if confidence is None else confidence
  proposal = Proposal(
    jnp.full(length, 7), jnp.array(confidence), jnp.zeros((length, 9)),
    jnp.zeros(length),
  )  # fmt: skip
  return row, proposal


def written(rule, row, proposal, noise=(), step=0):
  state, _ = rule.init(noise, row, 9)
  return rule.update(noise, step, row, proposal, state).write


def groups_of(rule, row, proposal, noise=()):
  """The slots of each call, when every write is committed."""
  state, _ = rule.init(noise, row, 9)
  groups = []
  for step in range(rule.calls(row.masked.shape[0])):
    write = rule.update(noise, step, row, proposal, state).write
    row = row._replace(masked=row.masked & ~write)
    groups.append(np.flatnonzero(write).tolist())
  assert not row.masked.any()
  return groups


def test_confidence_takes_the_planned_number_of_best_positions():
  row, proposal = one_row([T, F, T, T, T], [0.1, 0.9, 0.3, 0.8, 0.5])
  rule = rules.by_confidence(3)
  state, t = rule.init((), row, 9)
  np.testing.assert_array_equal(state, [2, 1, 1])
  assert t is None
  assert groups_of(rule, row, proposal) == [[3, 4], [2], [0]]


def test_confidence_counts_follow_the_grid():
  row, _ = one_row([T] * 10)
  grid = schedules.cosine_grid(2)
  rule = rules.by_confidence(2, counts=schedules.grid_counts(grid))
  # cos(pi/4) * 10 = 7.07: seven stay masked after the first step.
  np.testing.assert_array_equal(rule.init((), row, 9)[0], [3, 7])


@pytest.mark.parametrize('length', [1, 8, 50])
@pytest.mark.parametrize('num_steps', [1, 7])
@pytest.mark.parametrize('kind', ['even', 'cosine', 'floor'])
def test_the_static_bound_never_cuts_a_planned_count(length, num_steps, kind):
  counts = {
    'even': schedules.plan_counts,
    'cosine': schedules.grid_counts(schedules.cosine_grid(num_steps)),
    'floor': schedules.floor_counts(),
  }[kind]
  rule = rules.by_confidence(num_steps, counts=counts)
  row, proposal = one_row([T] * length, np.arange(length) / length)
  groups = groups_of(rule, row, proposal)
  assert [len(g) for g in groups] == counts(length, num_steps).tolist()


def test_equal_confidences_go_by_position():
  row, proposal = one_row([T] * 4, [0.5] * 4)
  rule = rules.by_confidence(2)
  state, _ = rule.init((), row, 9)
  expected = [T, T, F, F]

  def update(row, proposal, state):
    return rule.update((), 0, row, proposal, state).write

  def batch(x):
    return jax.tree.map(lambda leaf: leaf[None], x)

  arguments = (row, proposal, state)
  np.testing.assert_array_equal(update(*arguments), expected)
  np.testing.assert_array_equal(jax.jit(update)(*arguments), expected)
  np.testing.assert_array_equal(jax.vmap(update)(*batch(arguments)), [expected])


def test_maskgit_adds_fading_gumbel_noise_to_the_log_confidence():
  generator = np.random.default_rng(0)
  confidence = generator.uniform(0.01, 1, 12)
  gumbel = generator.gumbel(size=12)
  rule = rules.maskgit(4, 2.5)
  row, proposal = one_row([T] * 12, confidence)
  state, _ = rule.init((), row, 9)
  for step in range(4):
    score = np.log(confidence) + 2.5 * (1 - (step + 1) / 4) * gumbel
    best = np.sort(np.argsort(-score)[:3])
    write = rule.update(jnp.array(gumbel), step, row, proposal, state).write
    np.testing.assert_array_equal(np.flatnonzero(write), best)


def test_maskgit_without_noise_is_by_confidence():
  confidence = np.random.default_rng(1).uniform(0, 1, 9)
  row, proposal = one_row([T, F, T] * 3, confidence)
  noise = 10.0 * jnp.arange(9)
  assert groups_of(rules.maskgit(3, 0.0), row, proposal, noise) == groups_of(
    rules.by_confidence(3), row, proposal
  )
  loud = groups_of(rules.maskgit(3, 1.0), row, proposal, noise)
  assert loud[0] == [6, 8]


def test_maskgit_puts_scores_without_a_logarithm_last():
  row, proposal = one_row([T] * 4, [0.0, -1.0, 0.1, 0.2])
  noise = jnp.array([50.0, 50.0, 0.0, 0.0])
  assert groups_of(rules.maskgit(4, 1.0), row, proposal, noise) == [
    [3], [2], [0], [1]
  ]  # fmt: skip


def plackett_luce(weights, count):
  """P(set of the first `count`) when drawn by weight without replacement."""
  law = {}
  for order in itertools.permutations(range(len(weights)), count):
    p, left = 1.0, sum(weights)
    for i in order:
      p *= weights[i] / left
      left -= weights[i]
    law[frozenset(order)] = law.get(frozenset(order), 0.0) + p
  return law


@pytest.mark.parametrize(
  ('rule', 'weights'),
  [
    (rules.by_sampled_confidence(2, 0.5), lambda c: math.exp(c / 0.5)),
    # Half the temperature is left at the first of two calls.
    (rules.maskgit(2, 1.5), lambda c: c ** (1 / 0.75)),
  ],
)
def test_noisy_orders_sample_without_replacement(rule, weights):
  masked, confidence = [T, T, F, T, T], [0.1, 0.6, 0.9, 0.3, 0.8]
  row, proposal = one_row(masked, confidence)
  slots = np.flatnonzero(masked)
  exact = {
    frozenset(slots[list(chosen)].tolist()): p
    for chosen, p in plackett_luce(
      [weights(confidence[i]) for i in slots], 2
    ).items()
  }
  law = {}
  numpy_row, numpy_proposal = jax.tree.map(np.asarray, (row, proposal))
  for p, noise in rule.cells(0, numpy_row, numpy_proposal, ()):
    write = written(rule, row, proposal, jnp.asarray(noise))
    chosen = frozenset(np.flatnonzero(write).tolist())
    law[chosen] = law.get(chosen, 0.0) + p
  assert law.keys() == exact.keys()
  for chosen, p in exact.items():
    np.testing.assert_allclose(law[chosen], p, rtol=1e-6)

  count = 4_000
  keys = jax.random.split(jax.random.key(1), count)
  noises = jax.vmap(rule.noise, (0, None))(keys, row.positions)
  writes = jax.vmap(lambda noise: written(rule, row, proposal, noise))(noises)
  chi2 = 0.0
  for chosen, p in exact.items():
    member = np.isin(np.arange(5), list(chosen))
    hits = (np.asarray(writes) == member).all(1).sum()
    chi2 += (hits - count * p) ** 2 / (count * p)
  # Five degrees of freedom: 33.1 is a false alarm in 3 * 10^5.
  assert chi2 < 33.1


def test_a_high_temperature_forgets_the_confidence():
  row, proposal = one_row([T] * 3, [0.1, 0.5, 0.9])
  numpy_row, numpy_proposal = jax.tree.map(np.asarray, (row, proposal))
  rule = rules.by_sampled_confidence(1, 1e6)
  cells = list(rule.cells(0, numpy_row, numpy_proposal, ()))
  np.testing.assert_allclose([p for p, _ in cells], 1 / 6, rtol=1e-6)
  cold = rules.by_sampled_confidence(3, 1e-4)
  noise = cold.noise(jax.random.key(0), row.positions)
  assert groups_of(cold, row, proposal, noise) == [[2], [1], [0]]


def test_binomial_counts_take_the_best():
  rule = rules.by_binomial_confidence((1.0, 0.6, 0.0))
  row, proposal = one_row([T, T, F, T, T], [0.1, 0.6, 0.9, 0.3, 0.8])
  state, t = rule.init((), row, 9)
  assert t == 1
  pmf = np.zeros(5)
  numpy_row = jax.tree.map(np.asarray, row)
  for p, noise in rule.cells(0, numpy_row, (), ()):
    update = rule.update(jnp.asarray(noise), 0, row, proposal, state)
    chosen = np.flatnonzero(update.write).tolist()
    assert sorted(chosen) == sorted([4, 1, 3, 0][: len(chosen)])
    assert abs(update.t - 0.6) < 1e-6
    pmf[len(chosen)] += p
  exact = [math.comb(4, k) * 0.4**k * 0.6 ** (4 - k) for k in range(5)]
  np.testing.assert_allclose(pmf, exact, rtol=1e-6)


def test_left_to_right_is_in_reading_order():
  row, proposal = one_row([F, T, T, F, T, T, T], [0, 1, 2, 3, 4, 5, 6.0])
  rule = rules.left_to_right(3)
  assert groups_of(rule, row, proposal) == [[1, 2], [4, 5], [6]]


@pytest.mark.parametrize(
  ('base', 'length', 'groups'),
  [
    (2, 8, [[0, 4], [2, 6], [1, 3, 5, 7]]),
    (2, 7, [[0, 4], [2, 6], [1, 3, 5]]),
    (3, 9, [[0, 3, 6], [1, 2, 4, 5, 7, 8]]),
    (4, 17, [[0, 16], [4, 8, 12], [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15]]),
    (2, 1, [[0]]),
  ],
)
def test_dilated_groups_are_coarse_to_fine(base, length, groups):
  row, proposal = one_row([T] * length)
  assert groups_of(rules.dilated(base), row, proposal) == groups


def test_dilated_groups_count_the_slots_of_the_row():
  """Four of them, in two calls, whatever stands around them."""
  is_open = [F, F, F, *[T] * 5]
  row, proposal = one_row([F, F, F, T, T, F, T, T], None, is_open)
  assert groups_of(rules.dilated(), row, proposal) == [[3, 6], [4, 7], []]


@pytest.mark.parametrize('length', [3, 4, 5, 16, 31, 33])
def test_dilated_groups_hold_no_neighbours(length):
  row, proposal = one_row([T] * length)
  groups = groups_of(rules.dilated(), row, proposal)
  assert len(groups) == math.ceil(math.log2(length))
  assert all(min(np.diff(g), default=2) >= 2 for g in groups)


@pytest.mark.parametrize('joint', [TWINS, random_joint()])
def test_left_to_right_one_at_a_time_is_an_exact_sampler(joint):
  rule = rules.left_to_right(joint.strings.shape[1])
  law = law_of(joint, rule, draw=DRAWN)  # The positions read no score.
  assert total_variation(law, joint) < 1e-12


@pytest.mark.parametrize(
  ('rule', 'groups'),
  [
    (rules.left_to_right(2), [[0, 1], [2]]),
    (rules.dilated(), [[0, 2], [1]]),
    (rules.dilated(3), [[0, 1, 2]]),
  ],
)
def test_groups_err_by_drawing_their_positions_independently(rule, groups):
  joint = random_joint()
  exact = in_groups(joint, groups)
  law = law_of(joint, rule)
  assert total_variation(law, exact) < 1e-12
  assert total_variation(law, joint) > 0.05


@pytest.mark.parametrize(
  'rule', [rules.maskgit(3, 1.5), rules.by_sampled_confidence(3, 0.3)]
)
def test_noisy_order_is_exact_unless_the_score_reads_the_draw(rule):
  joint = random_joint()
  exact = law_of(joint, rule, draw=ROW_MAXIMUM)
  assert total_variation(exact, joint) < 1e-12
  biased = law_of(joint, rule, draw=DRAWN)
  assert total_variation(biased, joint) > 0.05


def test_binomial_counts_err_on_the_twins_as_the_kernel_does():
  # Both in one of K calls, with 1/K, and different, with 1/2.
  law = law_of(TWINS, rules.by_binomial_confidence(schedules.uniform_grid(4)))
  np.testing.assert_allclose(total_variation(law, TWINS), 1 / 8, rtol=1e-9)
  np.testing.assert_allclose(law.probabilities[A, B], 1 / 16, rtol=1e-9)


def test_binomial_counts_approach_an_exact_sampler():
  joint = random_joint()
  distances = [
    total_variation(law_of(joint, rules.by_binomial_confidence(grid)), joint)
    for grid in map(schedules.uniform_grid, (1, 4))
  ]
  product = in_groups(joint, [[0, 1, 2]])
  np.testing.assert_allclose(
    distances[0],
    abs(product.probabilities - joint.probabilities).sum() / 2,
    rtol=1e-9,
  )
  assert distances[0] > 2 * distances[1] > 0


@pytest.mark.parametrize(
  'rule',
  [
    rules.maskgit(2, 1.5),
    rules.by_sampled_confidence(2, 0.3),
    rules.by_binomial_confidence((1.0, 0.5, 0.0)),
  ],
)
def test_independent_positions_may_be_drawn_at_once(rule):
  joint = independent_joint()
  assert total_variation(law_of(joint, rule), joint) < 1e-12


@pytest.mark.parametrize(
  'rule',
  [
    rules.maskgit(2, 1.5),
    rules.by_sampled_confidence(2, 0.3),
    rules.by_binomial_confidence((1.0, 0.5, 0.0)),
  ],
)
def test_simulation_agrees_with_the_law(rule):
  joint = random_joint(1)
  result = sampling.sample(
    oracle.exact_denoiser(VOCAB), joint, jax.random.key(0),
    from_prompts([[]] * 4_000, 3, VOCAB), vocab=VOCAB, rule=rule,
  )  # fmt: skip
  statistic, freedom = chi_square(law_of(joint, rule), result.ids)
  # Five standard deviations: a false alarm in 10^5.
  assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_equal_settings_are_the_same_object():
  counts = schedules.grid_counts(schedules.cosine_grid(4))
  assert schedules.grid_counts(list(schedules.cosine_grid(4))) is counts
  assert rules.by_confidence(4) is rules.by_confidence(
    num_steps=4, counts=schedules.plan_counts
  )
  assert rules.by_confidence(4) is not rules.by_confidence(4, counts=counts)
  assert rules.by_confidence(4) is not rules.by_confidence(5)
  assert rules.maskgit(4, 1.0) is not rules.maskgit(4, 2.0)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: rules.by_confidence(0), 'num_steps=0 must be an integer'),
    (lambda: rules.left_to_right(0), 'num_steps=0 must be an integer'),
    (
      lambda: rules.by_confidence(2, counts=schedules.grid_counts((1.0, 0.0))),
      '2 levels',
    ),
    (
      lambda: rules.maskgit(2, -1.0),
      'choice_temperature=-1.0 must be between 0 and 1e6',
    ),
    (
      lambda: rules.by_sampled_confidence(2, 0.0),
      'temperature=0.0 must be between 1e-6 and 1e6',
    ),
    (lambda: rules.by_binomial_confidence((1.0,)), 'must fall strictly'),
    (lambda: rules.dilated(1), 'base=1 must be an integer of at least 2'),
  ],
)
def test_impossible_settings_raise(make, message):
  with pytest.raises(ValueError, match=message):
    make()
