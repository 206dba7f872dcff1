"""Estimators of the bound: enumerated laws, goldens, errors, invariances."""

import functools
import itertools
import json
import math

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import script_runner
from small_joints import STRINGS, TWINS, VOCAB, A, B, random_joint

from mdlm_jax import bound_estimators as estimators
from mdlm_jax import (
  corruption,
  guidance,
  likelihood,
  losses,
  oracle,
  predict,
  schedules,
)
from mdlm_jax.bound_estimators import CallNoise
from mdlm_jax.canvas import Canvas
from mdlm_jax.models import directory, transformer
from mdlm_jax.vocab import Vocab

EXACT = oracle.exact_denoiser(VOCAB)
BY_TIME = [
  estimators.stratified_time(3),
  estimators.gauss_legendre(2),
  estimators.complement_time(4),
]
BY_COUNT = [
  estimators.exact_count(4),
  estimators.complement_count(5),
  estimators.chain_rule(3),
]
NONEMPTY = [
  estimators.stratified_time(3, nonempty=True),
  estimators.gauss_legendre(2, nonempty=True),
]
EVERY = BY_TIME + BY_COUNT + NONEMPTY


def stub(logits):
  """A network whose logits are `logits(params, ids, t)`, `[B, L, V]`."""

  def features(params, cache, ids, *, t, **unused):
    return logits(params, ids, t), ()

  return predict.Denoiser(features, lambda params, hidden: hidden)


UNIFORM = stub(lambda params, ids, t: jnp.zeros((*ids.shape, 9)))
SEVEN = Vocab(size=9, mask_id=1, pad_id=0)  # 7 real tokens: 2 to 8.
TABLE = np.random.default_rng(0).normal(size=(125, 3, 5)).astype(np.float32) * 2
# Three tokens of a network whose conditionals are those of no joint.
LOOKUP = stub(
  lambda params, ids, t: jnp.asarray(TABLE)[ids @ jnp.array([25, 5, 1])]
)


def average_over_orders(string):
  """The bound of LOOKUP by its definition, in numpy."""
  total = 0.0
  for order in itertools.permutations(range(3)):
    ids = [1, 1, 1]
    for slot in order:
      logits = TABLE[np.dot(ids, [25, 5, 1]), slot, [A, B, 4]]
      total -= logits[string[slot] - A] - np.log(np.exp(logits).sum())
      ids[slot] = string[slot]
  return total / 6


def noise_cases(estimator, length):
  """All cases of one (v, u) that every call shares, with probabilities.

  An estimate is a sum over calls, so that its expectation needs each call's own
  law only. Masks change where u passes a level, or with the ranks of u.
  """
  calls = estimator.num_calls
  if estimator in BY_COUNT:
    orders = np.array(list(itertools.permutations(range(length)))) / length
    cells = length * max(length - 1, 1)  # The counts are constant in each.
    for v in (np.arange(cells) + 0.5) / cells:
      for order in orders:
        yield v, order, 1 / (cells * len(orders))
    return
  # The integrand over v is a polynomial of degree length - 1.
  for node, weight in zip(*np.polynomial.legendre.leggauss(3), strict=True):
    v = (node + 1) / 2
    noise = CallNoise(jnp.full(calls, v), jnp.zeros((calls, length)))
    answer = jnp.ones(length, bool)
    levels = np.asarray(estimator.masks(noise, answer).mask_probability)
    edges = np.unique(np.concatenate([[0], levels, [1]]))
    cells = list(zip((edges[1:] + edges[:-1]) / 2, np.diff(edges), strict=True))
    for chosen in itertools.product(cells, repeat=length):
      u, p = zip(*chosen, strict=True)
      yield v, np.array(u), weight / 2 * np.prod(p)


def expectation(estimator, denoiser, params, string):
  """The exact mean of the estimator, by enumeration of its masks."""
  length, calls = len(string), estimator.num_calls
  v, u, probability = map(
    np.array, zip(*noise_cases(estimator, length), strict=True)
  )
  np.testing.assert_allclose(probability.sum(), 1, rtol=1e-6)
  noise = CallNoise(
    jnp.asarray(np.repeat(v[:, None], calls, 1), jnp.float32),
    jnp.asarray(np.repeat(u[:, None], calls, 1), jnp.float32),
  )
  nats = nats_of(estimator, denoiser, params, noise, jnp.array(string))
  return np.dot(probability, np.asarray(nats, np.float64))


@functools.partial(jax.jit, static_argnums=(0, 1))
def nats_of(estimator, denoiser, params, noise, string):
  """One estimate for each case of the noise."""
  cases, calls, length = noise.uniforms.shape
  masks = jax.vmap(estimator.masks, (0, None))(noise, jnp.ones(length, bool))
  rows = jnp.tile(string, (cases * calls, 1))
  masked = masks.masked.reshape(rows.shape)
  log_probs = predict.target_log_probs(
    denoiser, params, VOCAB, jnp.where(masked, 1, rows), rows,
    t=masks.mask_probability.reshape(-1), valid=jnp.ones(rows.shape, bool),
    positions=jnp.broadcast_to(jnp.arange(length), rows.shape),
  )  # fmt: skip
  nats = likelihood.weighted_nats(
    log_probs, masked, masks.weights.reshape(rows.shape)
  )
  return nats.reshape(cases, calls).sum(1)


@pytest.mark.parametrize('estimator', BY_TIME + BY_COUNT)
def test_the_expectation_is_ln_2_on_two_strings(estimator):
  for joint in (TWINS, oracle.joint([(A, B), (B, A)])):
    for string in joint.strings:
      np.testing.assert_allclose(
        expectation(estimator, EXACT, joint, string), math.log(2), rtol=1e-5
      )


@pytest.mark.parametrize('estimator', BY_TIME + BY_COUNT)
def test_the_expectation_is_the_mean_over_orders(estimator):
  for string in [(A, B, A), (4, 4, B)]:
    np.testing.assert_allclose(
      expectation(estimator, LOOKUP, {}, string),
      average_over_orders(string),
      rtol=1e-5,
    )


def test_n_nodes_are_exact_up_to_2n_tokens():
  one = estimators.gauss_legendre(1)
  got = expectation(one, EXACT, TWINS, (A, A))
  np.testing.assert_allclose(got, math.log(2), rtol=1e-5)
  exact = average_over_orders((A, B, A))
  assert abs(expectation(one, LOOKUP, {}, (A, B, A)) - exact) > 0.01


@functools.cache
def noise_of_rows():
  """Of 40,000 rows, 6 calls and 6 positions."""
  keys = jax.random.split(jax.random.key(0), 40_000)
  draw = jax.vmap(lambda key: estimators.call_noise(key, jnp.arange(6), 6))
  return jax.tree.map(np.asarray, jax.jit(draw)(keys))


def first_calls(estimator, length=6):
  levels, uniforms = noise_of_rows()
  calls = estimator.num_calls
  return CallNoise(levels[:, :calls], uniforms[:, :calls, :length])


def bound(denoiser, params, ids, answer=None, seed=0, **options):
  ids = jnp.asarray(ids)
  answer = jnp.ones(ids.shape, bool) if answer is None else answer
  options = {
    'vocab': VOCAB,
    'estimator': estimators.exact_count(8),
    'num_replicates': 16,
  } | options
  key = jax.random.key(seed)
  return likelihood.bound(denoiser, params, key, ids, answer, **options)


def test_estimates_and_their_errors_are_those_of_repetitions():
  strings = np.repeat(np.array(STRINGS)[[0, 3, 5, 13]], 100, 0)
  estimate = bound(
    LOOKUP, {}, strings, estimator=estimators.complement_count(5)
  )
  np.testing.assert_allclose(
    estimate.mean, np.mean(estimate.replicates, 0), rtol=1e-6
  )
  for rows in np.arange(400).reshape(4, 100):
    means, errors = estimate.mean[rows], estimate.standard_error[rows]
    stated = math.sqrt(np.mean(np.square(errors)))
    # 4.5 standard errors of 100 rows: false alarms below 1 in 10^4.
    exact = average_over_orders(strings[rows[0]])
    assert abs(np.mean(means) - exact) < 0.45 * stated
    # 100 repetitions: the spread itself is uncertain by 7 %.
    assert 0.7 < np.std(means, ddof=1) / stated < 1.35


def test_stratified_time_is_the_continuous_bound_at_its_times():
  levels = np.random.default_rng(0).random(6)
  uniforms = jnp.asarray(np.random.default_rng(1).random((6, 5)), jnp.float32)
  answer = jnp.array([1, 1, 0, 1, 1]) > 0
  noise = CallNoise(jnp.asarray(1 - levels, jnp.float32), uniforms)
  masks = estimators.stratified_time(6).masks(noise, answer)
  t = (np.arange(6) + 1 - levels) / 6
  np.testing.assert_allclose(masks.mask_probability, t, rtol=1e-6)
  everyone = jnp.broadcast_to(answer, (6, 5))
  _, masked = corruption.corrupt_with_noise(
    uniforms, jnp.full((6, 5), 2), masks.mask_probability, everyone, mask_id=1
  )
  np.testing.assert_array_equal(masks.masked, masked)
  log_probs = -jnp.asarray(np.random.default_rng(2).random((6, 5)), jnp.float32)
  total = losses.continuous_bound(
    log_probs, masked, everyone, masks.mask_probability
  )
  np.testing.assert_allclose(
    likelihood.weighted_nats(log_probs, masks.masked, masks.weights).sum(),
    total.sum / 6,
    rtol=1e-5,
  )


def test_a_forced_position_keeps_the_law_and_the_true_weight():
  """m = 1/4, two tokens: an empty mask has 0.5625, else 3/7, 3/7, 1/7."""
  level, side = 0.25, 100
  cells = (np.arange(side) + 0.5) / side
  u = jnp.asarray(list(itertools.product(cells, repeat=2)), jnp.float32)
  forced = estimators.stratified_time(1, nonempty=True)
  noise = CallNoise(jnp.full((len(u), 1), level), u[:, None])
  masks = jax.jit(jax.vmap(forced.masks, (0, None)))(noise, jnp.ones(2, bool))
  first, second = np.asarray(masks.masked[:, 0]).T
  assert (first | second).all()
  shares = [(first & ~second).mean(), (second & ~first).mean()]
  np.testing.assert_allclose(shares, 3 / 7, atol=0.015)
  np.testing.assert_allclose(masks.weights, (1 - 0.5625) / 0.25, rtol=1e-5)
  for nonempty in (False, True):
    estimator = estimators.stratified_time(4, nonempty=nonempty)
    row_noise = first_calls(estimator, 2)
    nats = nats_of(estimator, EXACT, TWINS, row_noise, jnp.array([A, A]))
    nats = np.asarray(nats, np.float64)
    error = np.std(nats) / math.sqrt(len(nats))
    # 4.5 standard errors: a false alarm in 10^5.
    assert abs(np.mean(nats) - math.log(2)) < 4.5 * error
    assert error < 0.005


def test_weights_are_bounded_where_masks_are_not_empty():
  """A mask at m = 1e-6 weighs 10^6 / M; L tokens need no more than L / M."""
  noise = CallNoise(np.float32([1e-6]), np.full((1, 5), 0.5, np.float32))

  def largest(estimator):
    return jax.jit(estimator.masks)(noise, np.ones(5, bool)).weights.max()

  assert largest(estimators.stratified_time(1)) > 0.9e6
  assert largest(estimators.stratified_time(1, nonempty=True)) < 5.001
  assert largest(estimators.exact_count(1)) == 5


def test_a_uniform_network_costs_the_log_of_the_real_tokens():
  """Not ln 8: MASK takes no probability, and as a token it is impossible."""
  ids = np.random.default_rng(0).integers(2, 9, (4, 6))
  ids[3, 2] = SEVEN.mask_id
  estimate = bound(UNIFORM, {}, ids, vocab=SEVEN)
  np.testing.assert_allclose(
    estimate.replicates[:, :3], 6 * math.log(7), rtol=1e-5
  )
  assert estimate.mean[3] == np.inf
  assert np.isnan(estimate.standard_error[3])


@pytest.mark.parametrize('estimator', EVERY)
def test_equal_costs_of_one_nat_sum_to_the_number_of_tokens(estimator):
  """One token, where most masks are empty and count as zero, and six."""
  if estimator.max_tokens:
    estimator = estimators.chain_rule(6)
  for length in (1, 6):
    answer = np.arange(6) < length
    sums = sum_of_weights(estimator, first_calls(estimator), answer)
    if estimator.max_tokens or estimator == estimators.exact_count(4):
      np.testing.assert_allclose(sums, length, rtol=1e-5)
    # 4.5 standard errors: a false alarm in 10^5.
    sums = np.asarray(sums, np.float64)
    error = np.std(sums) / math.sqrt(len(sums))
    assert abs(np.mean(sums) - length) < 4.5 * error + 1e-5
    assert error < 0.02 * length


@functools.partial(jax.jit, static_argnums=0)
def sum_of_weights(estimator, noise, answer):
  masks = jax.vmap(estimator.masks, (0, None))(noise, answer)
  return jnp.where(masks.masked, masks.weights, 0.0).sum((1, 2))


def test_rows_without_an_answer_cost_nothing_and_have_no_gradient():
  network = stub(lambda params, ids, t: jnp.broadcast_to(params, (2, 3, 9)))
  ids = jnp.full((2, 3), 2)

  @functools.partial(jax.jit, static_argnums=2)
  @jax.value_and_grad
  def gradient(params, answer, estimator):
    estimate = bound(
      network, params, ids, answer, vocab=SEVEN, estimator=estimator,
      num_replicates=2,
    )  # fmt: skip
    return estimate.mean.sum()

  for estimator in (NONEMPTY[0], estimators.complement_count(3)):
    value, slope = gradient(jnp.zeros(9), jnp.zeros((2, 3), bool), estimator)
    assert value == 0
    np.testing.assert_array_equal(slope, 0)
    some = jnp.array([[0, 0, 0], [0, 1, 1]]) > 0
    value, slope = gradient(jnp.zeros(9), some, estimator)
    assert np.isfinite(value)
    assert np.isfinite(slope).all()
    assert np.abs(slope).max() > 0


CONFIG = transformer.TransformerConfig(
  vocab_size=9, num_layers=1, model_dim=16, num_heads=2, mlp_dim=32,
  max_length=16,
)  # fmt: skip
SMALL = transformer.denoiser(CONFIG)
PARAMS = transformer.init(CONFIG, jax.random.key(3))
# Larger logits: an untrained network knows no context.
PARAMS = jax.tree.map(lambda x: x * 3, PARAMS)


def test_a_row_has_its_score_in_any_batch_and_with_any_calls_at_once():
  ids = np.random.default_rng(0).integers(2, 9, (6, 7))
  options = {'vocab': SEVEN, 'num_replicates': 3}
  expected = bound(SMALL, PARAMS, ids, **options).mean
  for start in (0, 2, 4):
    rows = np.arange(start, start + 2)
    got = bound(
      SMALL, PARAMS, ids[rows], row_ids=jnp.asarray(rows), calls_at_once=3,
      positions=jnp.tile(jnp.arange(7), (2, 1)), **options,
    )  # fmt: skip
    np.testing.assert_allclose(got.mean, expected[rows], atol=1e-4)
  other = bound(SMALL, PARAMS, ids, seed=1, **options)
  assert np.abs(other.mean - expected).min() > 1e-4
  other = bound(SMALL, PARAMS, ids, row_ids=jnp.arange(6) + 1, **options)
  assert np.abs(other.mean - expected).min() > 1e-4


def test_documents_together_equal_documents_apart_on_either_side():
  """Of 3 and 7 tokens: padding is neither seen nor counted."""
  ids = np.zeros((2, 7), np.int32)
  ids[0, :3], ids[1] = [2, 5, 4], [3, 3, 2, 6, 8, 7, 2]
  options = {'vocab': SEVEN, 'num_replicates': 3, 'calls_at_once': 3}
  valid = jnp.asarray(ids > 0)
  together = bound(
    SMALL, PARAMS, ids, valid, valid=valid,
    positions=jnp.tile(jnp.arange(7), (2, 1)), **options,
  ).mean  # fmt: skip
  alone = bound(SMALL, PARAMS, ids[:1, :3], **options)
  np.testing.assert_allclose(alone.mean[0], together[0], atol=1e-5)
  left = np.array([[0] * 4 + [2, 5, 4], ids[1]])
  got = bound(
    SMALL, PARAMS, left, jnp.asarray(left > 0), valid=jnp.asarray(left > 0),
    positions=jnp.array([[0] * 4 + [0, 1, 2], [*range(7)]]), **options,
  )  # fmt: skip
  np.testing.assert_allclose(got.mean, together, atol=1e-5)


def test_what_the_network_is_told():
  seen = stub(
    lambda params, ids, t: jnp.zeros((*ids.shape, 9)).at[..., 3].set(t[:, None])
  )
  options = {
    'vocab': SEVEN, 'num_replicates': 2, 'estimator': estimators.chain_rule(2)
  }  # fmt: skip

  def log_prob_at(t):
    return t - np.log(6 + np.exp(t))

  # One of two tokens: alpha = 1/2, which the polynomial 1 - t^2 has elsewhere.
  got = bound(
    seen, {}, [[3, 3]], schedule=schedules.polynomial(2.0), **options
  ).mean[0]
  expected = -log_prob_at(1.0) - log_prob_at(math.sqrt(0.5))
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  # This schedule never masks everything: it is told its own last time.
  got = bound(
    seen, {}, [[3, 3]], schedule=schedules.geometric(0.1, 0.5), **options
  ).mean[0]
  assert np.isfinite(got)


def test_a_prompt_is_seen_and_a_segment_is_not():
  ids = [[2, 5, 4, 8]]
  last = jnp.array([[0, 0, 1, 1]]) > 0
  options = {'vocab': SEVEN, 'num_replicates': 2}
  given = bound(
    SMALL, PARAMS, ids, last, segments=jnp.zeros((1, 4), int), **options
  ).mean
  apart = bound(
    SMALL, PARAMS, ids, last, segments=jnp.array([[0, 0, 1, 1]]), **options
  ).mean
  other = bound(
    SMALL, PARAMS, [[7, 3, 4, 8]], last,
    segments=jnp.array([[0, 0, 1, 1]]), **options,
  ).mean  # fmt: skip
  assert abs(given[0] - apart[0]) > 1e-3
  np.testing.assert_allclose(apart, other, rtol=1e-5)


def test_documents_packed_in_a_row_have_noise_of_their_own():
  """Two documents of equal tokens, each scored in a row of one id."""
  costly = stub(
    lambda params, ids, t: (
      jnp.zeros((*ids.shape, 9)).at[..., 3].set(jnp.arange(8) % 4)
    )
  )
  document = jnp.repeat(jnp.arange(2), 4)

  def nats(segments):
    return bound(
      costly, {}, jnp.full((2, 8), 3), document == jnp.arange(2)[:, None],
      positions=jnp.tile(jnp.arange(4), (2, 2)), row_ids=jnp.zeros(2, int),
      segments=jnp.broadcast_to(segments, (2, 8)), vocab=SEVEN,
      estimator=estimators.stratified_time(1), num_replicates=8,
    ).replicates  # fmt: skip

  shared, own = nats(0 * document), nats(document)
  np.testing.assert_array_equal(shared[:, 0], shared[:, 1])
  np.testing.assert_array_equal(own[:, 0], shared[:, 0])
  assert (own[:, 0] != own[:, 1]).any()


def close_answers():
  """Five tokens whose last one alone differs; the log ratio is 0.10."""
  p = np.random.default_rng(5).dirichlet(np.full(32, 0.5))
  strings = list(itertools.product((A, B), repeat=5))
  first, second = np.argsort(-p)[0] // 2 * 2, np.argsort(-p)[0] // 2 * 2 + 1
  both = p[first] + p[second]
  p[first] = both / (1 + math.exp(-0.1))
  p[second] = both - p[first]
  return oracle.joint(strings, p), strings[first], strings[second]


def test_common_random_numbers_shrink_the_error_of_a_gap():
  joint, first, second = close_answers()

  def score(answers, **options):
    return likelihood.log_prob(
      EXACT, joint, jax.random.key(0), first[:1],
      [answer[1:] for answer in answers], vocab=VOCAB, **options,
    )  # fmt: skip

  counts = {
    'estimator': estimators.exact_count(8), 'num_replicates': 16
  }  # fmt: skip
  scores = score([first, second], **counts)
  # 128 calls. 4.5 standard errors: a false alarm in 10^5.
  gap, error = scores.difference.mean[0, 1], scores.difference.standard_error
  assert 0 < error[0, 1] < 0.2
  assert abs(gap - 0.10) < 4.5 * error[0, 1]
  # The same two scores, each under random numbers of its own.
  other = score([first, second], prompt_id=1, **counts)
  independent = math.hypot(
    scores.log_prob.standard_error[0], other.log_prob.standard_error[1]
  )
  assert error[0, 1] < independent
  # By default in random orders: exact for one joint, to rounding.
  exact = score([first, second])
  assert exact.log_prob.replicates.shape == (8, 2)
  assert exact.difference.replicates.shape == (8, 2, 2)
  np.testing.assert_allclose(
    exact.difference.replicates[:, 0, 1], 0.1, atol=1e-5
  )
  np.testing.assert_allclose(scores.difference.mean[1, 0], -gap, rtol=1e-6)
  assert not np.diag(scores.difference.mean).any()


def test_a_score_is_the_conditional_log_probability():
  """Of two tokens given one, of one given two, and of the whole string."""
  joint = random_joint()
  p = joint.probabilities.reshape(3, 3, 3)
  string = STRINGS[np.argmax(joint.probabilities)]
  i, j, k = np.array(string) - A
  exact = [p[i, j, k], p[i, j, k] / p[i].sum(), p[i, j, k] / p[i, j].sum()]
  for size, probability in enumerate(exact):
    scores = likelihood.log_prob(
      EXACT, joint, jax.random.key(1), string[:size], [string[size:]],
      vocab=VOCAB, estimator=estimators.chain_rule(3),
    )  # fmt: skip
    # Every order of one joint gives the log-probability.
    np.testing.assert_allclose(
      scores.log_prob.replicates, np.log(probability), rtol=1e-4
    )


def test_a_score_does_not_depend_on_the_other_answers():
  answers = [[2, 3], [4], [5, 6, 7]]

  def score(answers, **more):
    scores = likelihood.log_prob(
      SMALL, PARAMS, jax.random.key(0), [8, 2], answers, vocab=SEVEN,
      num_replicates=3, **more,
    )  # fmt: skip
    return scores.log_prob.mean

  together = score(answers, length=6)
  # Alone it has other slots, and another number of calls.
  np.testing.assert_allclose(together[0], score(answers[:1])[0], atol=1e-4)
  other = score(answers, length=6, prompt_id=1)
  assert abs(other[2] - together[2]) > 1e-3


GOLDEN = golden_data.load('llada/log_likelihood')
MODEL = directory.load(golden_data.FOLDER / 'llada')
MASK = MODEL.vocab.mask_id


def their_counts(k, size, calls):
  """k, k + size / calls, ..., halves to even, wrapped into 1 ... size."""
  counts = np.round(np.linspace(k, k + (calls - 1) * size / calls, calls))
  return (counts.astype(int) - 1) % size + 1


@jax.jit
def _llada_logits(ids, valid):
  logits, _ = predict.network_logits(
    MODEL.denoiser, MODEL.params, None, ids, at=None, step=0, segments=None,
    t=jnp.ones(len(ids)), valid=valid,
    positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
  )  # fmt: skip
  return logits


def llada_logits(ids):
  """In one program for at most 32 rows of at most 15 tokens."""
  filling = [(0, most - size) for most, size in zip((32, 15), ids.shape)]
  valid = np.pad(np.ones(ids.shape, bool), filling)
  with jax.default_matmul_precision('highest'):
    logits = _llada_logits(np.pad(ids, filling), valid)
  return logits[: len(ids), : ids.shape[1]]


@pytest.mark.parametrize('case', ['ll_a', 'll_cfg', 'll_single', 'll_b16'])
def test_llada_likelihood_is_replayed(case):
  golden = GOLDEN[case]
  size, num_prompt = len(golden['answer']), len(golden['prompt'])
  row = np.concatenate([golden['prompt'], golden['answer']])
  answer = np.arange(len(row)) >= num_prompt
  shape = golden['noisy'].shape  # Estimates, calls, tokens.
  counts = [their_counts(k, size, shape[1]) for k in golden['k_draws']]
  uniforms = np.zeros(shape, np.float32)
  uniforms[..., num_prompt:] = golden['permutations'] / size
  masks = jax.jit(jax.vmap(estimators.count_masks, (0, 0, None)))(
    np.array(counts), uniforms, answer
  )
  masked = np.asarray(masks.masked)
  corrupted = np.where(masked, MASK, row)
  np.testing.assert_array_equal(corrupted, golden['noisy'])
  corrupted = corrupted.reshape(-1, len(row))
  logits = llada_logits(corrupted)
  scale = float(golden['cfg_scale'])
  if scale:
    ids = jnp.broadcast_to(row, corrupted.shape)
    canvas = Canvas(
      ids, jnp.broadcast_to(answer, ids.shape), jnp.ones(ids.shape, bool),
      jnp.broadcast_to(jnp.arange(len(row)), ids.shape),
    )  # fmt: skip
    guide = guidance.guide(canvas, MODEL.vocab, scale)
    null = llada_logits(np.asarray(guide.null_canvas(jnp.asarray(corrupted))))
    logits = guidance.combine(logits, null, scale)
  # They leave MASK its share of the probability.
  logits = np.asarray(logits).reshape(*shape, -1)
  log_probs = np.take_along_axis(
    logits, np.broadcast_to(row, shape)[..., None], -1
  )[..., 0] - np.log(np.exp(logits).sum(-1))
  nats = jax.jit(likelihood.weighted_nats)(
    log_probs, masks.masked, masks.weights
  )
  estimates = np.asarray(nats).sum(1)
  np.testing.assert_allclose(
    -log_probs[masked], golden['masked_token_nll_flat'], rtol=1e-4
  )
  np.testing.assert_allclose(estimates, golden['loss_per_iteration'], rtol=1e-4)
  np.testing.assert_allclose(
    -np.mean(estimates), golden['log_likelihood'], rtol=1e-4
  )


@pytest.mark.parametrize('calls, share', [(4, 6 / 8), (16, 9 / 16)])
def test_counts_rounded_to_even_are_biased_and_strata_are_not(calls, share):
  """Two tokens must be masked in half of the calls, or ln 2 is missed."""
  counts = np.concatenate([their_counts(k, 2, calls) for k in (1, 2)])
  assert np.mean(counts == 2) == share
  levels = np.full(calls, 0.3, np.float32)
  noise = CallNoise(levels, np.zeros((calls, 2), np.float32))
  draw = jax.jit(estimators.exact_count(calls).masks)
  masked = np.asarray(draw(noise, np.ones(2, bool)).masked)
  assert masked.all(1).mean() == 0.5


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: estimators.exact_count(0), 'num_calls=0 must be an integer'),
    (lambda: estimators.stratified_time(0), 'num_calls=0'),
    (lambda: estimators.gauss_legendre(0), 'num_calls=0'),
    (lambda: estimators.complement_time(3), 'num_calls=3 must be even'),
    (lambda: estimators.complement_count(4), 'num_calls=4 must be odd'),
    (lambda: estimators.complement_count(1), 'num_calls=1 must'),
    (lambda: estimators.chain_rule(0), 'max_tokens=0'),
    (lambda: bound(UNIFORM, {}, [[2]], num_replicates=1), 'num_replicates=1'),
    (lambda: bound(UNIFORM, {}, [[2]], calls_at_once=0), 'calls_at_once=0'),
    (
      lambda: bound(UNIFORM, {}, [[2]], valid=jnp.zeros((1, 1), bool)),
      'answer must lie within valid',
    ),
    (
      lambda: bound(UNIFORM, {}, [[2, 2]], estimator=estimators.chain_rule(1)),
      'max_tokens=1',
    ),
    (
      lambda: likelihood.log_prob(
        UNIFORM, {}, jax.random.key(0), [2], [[3], []], vocab=SEVEN
      ),
      'at least one token',
    ),
  ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_the_experiment_prints_and_writes(tmp_path, capsys):
  paths = {kind: tmp_path / f'x.{kind}' for kind in ('json', 'png')}
  script_runner.run(
    'experiments/likelihood_variance.py',
    '--length=8', '--num_texts=2', '--calls=4', '--budget=8',
    f'--json={paths["json"]}', f'--plot={paths["png"]}',
    estimators=lambda calls, num_tokens: [
      ('exact count', estimators.exact_count(calls[0]))
    ],
  )  # fmt: skip
  rows = json.loads(paths['json'].read_text())['results']
  assert [(row['part'], row['calls']) for row in rows] == [
    ('whole text', 4), ('last quarter', 4)
  ]  # fmt: skip
  for row in rows:
    assert 1 < row['nats_per_token'] < 12
    assert row['standard_error'] > 0
  assert 'exact count' in capsys.readouterr().out
  assert paths['png'].read_bytes().startswith(b'\x89PNG')
  with pytest.raises(ValueError, match='--length=999 is more than'):
    script_runner.run('experiments/likelihood_variance.py', '--length=999')
