"""Exact laws on small spaces against formulas and simulation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_joints import (
  STRINGS,
  TWINS,
  VOCAB,
  A,
  B,
  C,
  law_of,
  random_joint,
  total_variation,
)

from mdlm_jax import draws, oracle, rules, sampling
from mdlm_jax.canvas import from_prompts, from_rows
from mdlm_jax.predict import Denoiser, predict
from mdlm_jax.schedules import cosine, cosine_grid, polynomial, uniform_grid
from mdlm_jax.vocab import Vocab


def invalid_share(law):
  return sum(p for (a, b), p in law.probabilities.items() if a != b)


def marginals_of(joint, ids):
  batch, length = ids.shape
  prediction, _ = predict(
    oracle.exact_denoiser(VOCAB), joint, None, ids, vocab=VOCAB,
    t=jnp.ones(batch), valid=jnp.ones(ids.shape, bool),
    positions=jnp.zeros((batch, length), jnp.int32),
  )  # fmt: skip
  return np.exp(prediction.logits - prediction.log_z[..., None])


def test_exact_denoiser_gives_conditional_marginals():
  joint = oracle.joint([(A, A), (A, B), (B, B)], [0.5, 0.2, 0.3])
  p = marginals_of(joint, jnp.array([[1, 1], [A, 1], [1, B], [B, A]]))
  np.testing.assert_allclose(p[0, 0, [A, B]], [0.7, 0.3], rtol=1e-6)
  np.testing.assert_allclose(p[0, 1, [A, B]], [0.5, 0.5], rtol=1e-6)
  np.testing.assert_allclose(p[1, 1, [A, B]], [5 / 7, 2 / 7], rtol=1e-6)
  np.testing.assert_allclose(p[2, 0, [A, B]], [0.4, 0.6], rtol=1e-6)
  # (B, A) has probability zero: the unconditional marginals.
  np.testing.assert_allclose(p[3], p[0], rtol=1e-6)


@pytest.mark.parametrize('num_steps', [1, 2, 8, 32])
def test_parallel_reveal_error_is_one_over_2k(num_steps):
  law = law_of(TWINS, rules.kernel(uniform_grid(num_steps)))
  np.testing.assert_allclose(
    invalid_share(law), 1 / (2 * num_steps), rtol=1e-12
  )
  np.testing.assert_allclose(sum(law.probabilities.values()), 1, rtol=1e-12)
  np.testing.assert_allclose(law.probabilities[A, A], law.probabilities[B, B])


@pytest.mark.parametrize(
  ('grid', 'schedule'),
  [
    ((1.0, 0.9, 0.3, 0.0), None),
    (cosine_grid(4), None),
    (uniform_grid(3), cosine()),
    (uniform_grid(3), polynomial(2.0)),
  ],
)
def test_unequal_intervals_err_by_half_the_sum_of_squares(grid, schedule):
  """w_k is the share of the mask probability that interval k removes."""
  if schedule is None:
    rule, masked = rules.kernel(grid), np.array(grid)
  else:
    rule = rules.kernel(grid, schedule)
    with jax.enable_x64(True):
      masked = 1 - np.asarray(schedule.alpha(jnp.array(grid)))
  expected = 0.5 * (np.diff(masked) ** 2).sum()
  np.testing.assert_allclose(
    invalid_share(law_of(TWINS, rule)), expected, rtol=1e-12
  )
  assert expected > 1 / (2 * (len(grid) - 1))  # equal intervals are best


def conditional(joint, string, slot, visible):
  """p(string[slot] | string at the visible slots), by summing strings."""
  agrees = (joint.strings[:, visible] == np.array(string)[visible]).all(1)
  mass = joint.probabilities[agrees]
  return mass[joint.strings[agrees, slot] == string[slot]].sum() / mass.sum()


def kernel_law(joint, masked):
  """The law of the reverse kernel from its definition, without a sampler.

  Each slot is revealed in interval k with probability masked[k] - masked[k+1],
  independently, and drawn given the tokens of earlier intervals:
  p(x) = sum over intervals s of prod_i w[s_i] p(x_i | x_j with s_j < s_i).
  """
  length, w = joint.strings.shape[1], -np.diff(masked)
  law = {}
  for string in map(tuple, joint.strings.tolist()):
    for s in itertools.product(range(len(w)), repeat=length):
      p = np.prod([w[k] for k in s])
      for i in range(length):
        earlier = [j for j in range(length) if s[j] < s[i]]
        p *= conditional(joint, string, i, earlier)
      law[string] = law.get(string, 0.0) + p
  return law


@pytest.mark.parametrize(
  ('grid', 'cached'),
  [(uniform_grid(4), False), ((1.0, 0.9, 0.3, 0.0), True)],
)
def test_the_kernel_has_the_law_of_its_definition(grid, cached):
  joint = random_joint(2)
  law = law_of(joint, rules.kernel(grid, cached=cached)).probabilities
  exact = kernel_law(joint, np.array(grid))
  for string in STRINGS:
    np.testing.assert_allclose(law[string], exact[string], atol=1e-12)


def test_impossible_mass_is_what_met_a_broken_context():
  # After the first of two steps (A, B) or (B, A) stands with 1/4 * 1/2; what
  # breaks in the last step meets no further call.
  law = law_of(TWINS, rules.kernel(uniform_grid(2)))
  np.testing.assert_allclose(law.impossible_mass, 1 / 8, rtol=1e-12)
  assert law_of(TWINS, rules.kernel(uniform_grid(1))).impossible_mass == 0


@pytest.mark.parametrize('score', list(draws.SCORES))
def test_one_at_a_time_is_exact_unless_the_score_reads_the_draw(score):
  joint = random_joint()
  law = law_of(
    joint, rules.by_confidence(3),
    draw=draws.categorical(score=draws.SCORES[score]),
  )  # fmt: skip
  distance = total_variation(law, joint)
  if score == 'probability':
    assert distance > 0.3
  else:
    assert distance < 1e-12


def test_the_two_string_toy_hides_the_bias_of_the_drawn_probability():
  law = law_of(
    TWINS, rules.by_confidence(2),
    draw=draws.categorical(score=draws.probability),
  )  # fmt: skip
  assert total_variation(law, TWINS) < 1e-12


@pytest.mark.parametrize(
  ('length', 'num_steps', 'valid'), [(2, 1, 0.5), (2, 2, 1.0), (4, 2, 0.5)]
)
def test_alternating_strings_mix_under_parallel_commits(
  length, num_steps, valid
):
  strings = [(A, B) * (length // 2), (B, A) * (length // 2)]
  law = law_of(oracle.joint(strings), rules.by_confidence(num_steps))
  got = sum(law.probabilities.get(s, 0.0) for s in strings)
  np.testing.assert_allclose(got, valid, rtol=1e-12)


def test_a_prefix_conditions_the_law():
  joint = random_joint()
  law = law_of(joint, rules.by_confidence(2), row=[B, None, None])
  given_b = np.array([s[0] == B for s in STRINGS])
  conditional = np.where(given_b, joint.probabilities, 0.0)
  conditional /= conditional.sum()
  assert total_variation(law, oracle.joint(STRINGS, conditional)) < 1e-12


@pytest.mark.parametrize(
  ('rule', 'draw'),
  [
    (rules.kernel(uniform_grid(2)), draws.categorical()),
    (
      rules.by_confidence(2),
      draws.categorical(temperature=0.7, score=draws.probability),
    ),
  ],
)
def test_simulation_agrees_with_the_law(rule, draw):
  joint = random_joint(1)
  law = law_of(joint, rule, draw=draw)
  count = 4_000
  result = sampling.sample(
    oracle.exact_denoiser(VOCAB), joint, jax.random.key(0),
    from_prompts([[]] * count, 3, VOCAB), vocab=VOCAB, rule=rule, draw=draw,
  )  # fmt: skip
  observed = {}
  for string in map(tuple, result.ids.tolist()):
    observed[string] = observed.get(string, 0) + 1
  keys = [k for k, p in law.probabilities.items() if count * p >= 5]
  expected = np.array([count * law.probabilities[k] for k in keys])
  counts = np.array([observed.get(k, 0) for k in keys])
  chi2 = ((counts - expected) ** 2 / expected).sum()
  # Mean about n - 1, five standard deviations: a false alarm in 10^5.
  assert chi2 < len(keys) - 1 + 5 * np.sqrt(2 * (len(keys) - 1))


def test_the_law_of_another_network_is_its_own():
  # A network that knows nothing: all four strings, two of them impossible.
  def features(params, cache, ids, **unused):
    return jnp.zeros((*ids.shape, VOCAB.size)), ()

  flat = Denoiser(features, lambda params, hidden: hidden)
  vocab = Vocab(size=5, mask_id=1, pad_id=0, forbidden_ids=(C,))
  law = oracle.sampler_law(
    TWINS, from_rows([[None] * 2], vocab), vocab=vocab,
    rule=rules.kernel(uniform_grid(2)), denoiser=flat,
  )  # fmt: skip
  assert sorted(law.probabilities) == [(A, A), (A, B), (B, A), (B, B)]
  np.testing.assert_allclose(list(law.probabilities.values()), 0.25, rtol=1e-12)
  # Both revealed in the first step (1/4) and different (1/2).
  np.testing.assert_allclose(law.impossible_mass, 1 / 8, rtol=1e-12)


@pytest.mark.parametrize(
  ('strings', 'probabilities', 'message'),
  [
    ([(A,), (A, B)], None, 'of one length'),
    ([(A,), (A,)], None, 'distinct'),
    ([(A,), (B,)], [1.0], 'one non-negative number'),
    ([(A,), (B,)], [1.5, -0.5], 'non-negative'),
    ([(A,), (B,)], [0.5, 0.4], 'sum to 0.9'),
  ],
)
def test_impossible_joints_raise(strings, probabilities, message):
  with pytest.raises(ValueError, match=message):
    oracle.joint(strings, probabilities)


@pytest.mark.parametrize(
  ('options', 'expected'),
  [({'top_k': 1}, [1, 0, 0]), ({'top_p': 0.8}, [5 / 8, 0, 3 / 8])],
)
def test_filters_act_in_the_law(options, expected):
  """One slot: the law is the filtered categorical."""
  joint = oracle.joint([(A,), (B,), (C,)], [0.5, 0.2, 0.3])
  law = law_of(joint, rules.by_confidence(1), draw=draws.categorical(**options))
  got = [law.probabilities.get((v,), 0.0) for v in (A, B, C)]
  np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_canvas_of_another_length_is_refused():
  with pytest.raises(ValueError, match='3 slots for strings of 2'):
    law_of(TWINS, rules.by_confidence(1), row=[None] * 3)


def test_a_batch_is_refused():
  with pytest.raises(ValueError, match='one row at a time, not 2'):
    oracle.sampler_law(
      TWINS, from_prompts([[], []], 2, VOCAB), vocab=VOCAB,
      rule=rules.by_confidence(1),
    )  # fmt: skip
