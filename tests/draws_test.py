"""Draws against closed forms, exact tails, and enumeration of their cells."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_joints
from hypothesis import given, settings
from hypothesis import strategies as st

from mdlm_jax import draws, filters, rules
from mdlm_jax.blocks import blocks_of
from mdlm_jax.canvas import from_rows
from mdlm_jax.draws import categorical
from mdlm_jax.predict import allowed, block_shape, reduce_logits
from mdlm_jax.vocab import Vocab


def draw_many(logits, count, *, seed=0, **options):
  """`count` independent draws at positions of one row, all of one law."""
  logits = jnp.asarray(logits)
  draw = categorical(**options)

  @jax.jit
  def run(logits, key):
    noise = draw.noise(key, jnp.arange(count), logits.shape[-1])
    return jax.vmap(draw.propose, (0, None, None))(
      noise, reduce_logits(logits), None
    )

  ids, confidence = run(logits, jax.random.key(seed))
  return np.asarray(ids), np.asarray(confidence)


def log(*probabilities):
  return jnp.log(jnp.array(probabilities, jnp.float32))


@pytest.mark.parametrize('num_ids', [7, 12, 100])
def test_frequencies_follow_the_softmax(num_ids):
  logits = jax.random.normal(jax.random.key(1), (num_ids,))
  p = np.asarray(jax.nn.softmax(logits), np.float64)
  count = 40_000
  ids, _ = draw_many(logits, count)
  observed = np.bincount(ids, minlength=num_ids)
  chi2 = ((observed - count * p) ** 2 / (count * p)).sum()
  # Mean n - 1, variance 2 (n - 1): five standard deviations, one false alarm
  # in about 10^5 for these sizes.
  assert chi2 < num_ids - 1 + 5 * np.sqrt(2 * (num_ids - 1))


def test_rare_tokens_keep_their_mass():
  logits = np.full(20_001, -17.0, np.float32)
  logits[0] = 0.0
  # Exact: 40,000 * 20,000 e^-17 / (1 + 20,000 e^-17) = 33.1; three standard
  # deviations either side, a false alarm in 400 (the seed is fixed).
  ids, _ = draw_many(logits, 40_000)
  assert 16 <= (ids != 0).sum() <= 50


def test_noise_exceeds_the_cap_of_the_default_gumbel():
  # P(none of n above 16) = exp(-n e^-16), 0.4 % for these 4.8 * 10^7 numbers;
  # the default mode can never pass 15.942.
  @jax.jit
  def largest(key):
    noise = draws.draw_noise(key, jnp.arange(20_000), 10_000)
    return jnp.maximum(noise.block.max(), noise.entry.max())

  top = max(float(largest(jax.random.key(s))) for s in range(12))
  assert top > 16.0


def test_bfloat16_logits_draw_as_float32_ones():
  logits = jnp.full(1_002, -10.0, jnp.bfloat16).at[0].set(0.0)
  # What `predict` does with a network's logits; the last id is MASK.
  logits = allowed(logits, Vocab(size=1_002, mask_id=1_001))
  ids, _ = draw_many(logits, 20_000)
  # Exact 868.6, standard deviation 28.8: three of them.
  assert 780 <= (ids != 0).sum() <= 960


@pytest.mark.parametrize('num_ids', [3, 4])
def test_infinite_noise_never_revives_a_forbidden_token(num_ids):
  logits = jnp.full(num_ids, -jnp.inf).at[1].set(0.0)
  num_blocks, block_size = block_shape(num_ids)
  noise = draws.DrawNoise(
    jnp.zeros(num_blocks).at[0].set(jnp.inf),
    jnp.zeros(block_size).at[0].set(jnp.inf),
    jnp.zeros(()),
  )
  assert draws.gumbel_max(noise, reduce_logits(logits)) == 1


def test_temperature_comes_before_top_p():
  # After T = 0.5 the distribution is 0.658, 0.237, 0.105.
  ids, _ = draw_many(log(0.5, 0.3, 0.2), 2_000, temperature=0.5, top_p=0.6)
  assert set(ids) == {0}
  # Before it, 0.5 alone does not reach 0.6 and the second token is kept.
  ids, _ = draw_many(log(0.5, 0.3, 0.2), 2_000, top_p=0.6)
  assert set(ids) == {0, 1}


def test_top_k_comes_before_top_p():
  # Kept by top-k: 0.4, 0.3 -> 0.571, 0.429: top-p 0.55 then keeps one token;
  # in the other order 0.4 + 0.3 < 0.55 would keep two.
  ids, _ = draw_many(log(0.4, 0.3, 0.2, 0.1), 2_000, top_k=2, top_p=0.55)
  assert set(ids) == {0}


def test_min_p_is_relative_to_the_most_probable():
  # The limit is 0.4 * 0.5 = 0.2.
  kept = filters.keep_min_p(log(0.5, 0.25, 0.2001, 0.0499, 0.0), 0.4) > -jnp.inf
  np.testing.assert_array_equal(kept, [True, True, True, False, False])
  equal = filters.keep_min_p(log(0.4, 0.4, 0.2), 1.0) > -jnp.inf
  np.testing.assert_array_equal(equal, [True, True, False])


def test_min_p_comes_after_temperature():
  # At T = 2 the ratio 0.1 of the last token becomes sqrt(0.1) = 0.316.
  probs = log(0.8, 0.12, 0.08)
  ids, _ = draw_many(probs, 2_000, min_p=0.3)
  assert set(ids) == {0}
  ids, _ = draw_many(probs, 2_000, min_p=0.3, temperature=2.0)
  assert set(ids) == {0, 1, 2}


def test_min_p_comes_after_top_p():
  # Top-p 0.6 keeps 0.5 and 0.3. After min-p 0.5, which leaves 0.625 and 0.375,
  # it would keep one.
  probs = log(0.5, 0.3, 0.2)
  ids, _ = draw_many(probs, 2_000, top_p=0.6, min_p=0.5)
  assert set(ids) == {0, 1}


# One row of eight slots, the window of three in its middle; slot 2 and 6 are
# padding or open.
ROW = draws.Context(
  ids=jnp.array([0, 3, 2, 0, 1, 3, 1, 2]),
  visible=jnp.array([1, 1, 0, 1, 0, 1, 0, 1], bool),
  slots=jnp.array([3, 4, 5]),
)
BATCH = jax.tree.map(lambda x: x[None], ROW)
PROBS = np.array([0.1, 0.2, 0.3, 0.4])
# By hand, from ROW: what stands visible within so many slots of 3, 4 and 5.
NEAR = {1: [[], [0, 3], []], 2: [[3], [0, 3], [0, 2]], 9: [[0, 2, 3]] * 3}


def penalised(neighbourhood, penalty):
  """p^penalty at the tokens of NEAR, renormalised."""
  p = np.tile(PROBS, (3, 1))
  for slot, tokens in enumerate(NEAR[neighbourhood]):
    p[slot, tokens] **= penalty
  return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize('neighbourhood', [1, 2, 9])
def test_repetition_penalty_is_a_power_of_the_near_tokens(neighbourhood):
  """Once each, across the window's edges, not at open slots; any constant."""
  for constant in (0.0, 50.0, -50.0):
    prediction = reduce_logits(
      jnp.tile(jnp.log(jnp.array(PROBS, jnp.float32)), (3, 1)) + constant
    )
    logits = draws.penalise_repeats(prediction, ROW, 1.5, neighbourhood)
    np.testing.assert_allclose(
      jax.nn.softmax(logits), penalised(neighbourhood, 1.5), rtol=1e-4
    )


def test_repetition_penalty_stays_inside_the_document():
  prediction = reduce_logits(jnp.tile(jnp.log(PROBS), (3, 1)))
  packed = ROW._replace(segments=jnp.array([0, 0, 0, 0, 1, 1, 1, 1]))
  logits = draws.penalise_repeats(prediction, packed, 2.0, 2)
  changed = logits < prediction.logits - 1e-4
  # Slot 3 sees the 3 at slot 1, slot 4 only the 3 at slot 5, slot 5 the 2.
  np.testing.assert_array_equal(
    changed, [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 0]]
  )


def test_repetition_penalty_comes_before_temperature_and_scores_stay():
  logits = jnp.tile(jnp.log(jnp.array(PROBS, jnp.float32)), (1, 3, 1))
  prediction = reduce_logits(logits)
  options = {'repetition_penalty': 3.0, 'neighbourhood': 2}

  def best(**more):
    draw = categorical(**options, **more)
    noise = draw.noise(jax.random.key(0), jnp.arange(3), 4)
    noise = jax.tree.map(lambda x: x[None], noise)
    return jax.jit(draw.propose)(noise, prediction, BATCH)

  # 0.4^3 is below 0.3; 0.3^3 below 0.4.
  ids, confidence = best(temperature=0.0)
  np.testing.assert_array_equal(ids, [[2, 2, 3]])
  np.testing.assert_allclose(confidence, 0.4, rtol=1e-6)
  # With top-k 1 the tempered score is 1, and the token the same.
  ids, confidence = best(temperature=0.5, top_k=1, tempered=True)
  np.testing.assert_array_equal(ids, [[2, 2, 3]])
  np.testing.assert_allclose(confidence, 1.0, rtol=1e-6)
  # p^(3/2) for near tokens at T = 2, and p^(1/2) for the others.
  _, confidence = best(temperature=2.0, tempered=True)
  power = np.full((3, 4), 0.5)
  for slot, tokens in enumerate(NEAR[2]):
    power[slot, tokens] = 1.5
  p = PROBS**power
  np.testing.assert_allclose(confidence[0], p.max(-1) / p.sum(-1), rtol=1e-5)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_cells_are_the_penalised_law(temperature):
  draw = categorical(
    temperature=temperature, repetition_penalty=2.0, neighbourhood=2
  )
  prediction = reduce_logits(jnp.log(jnp.tile(PROBS, (3, 1))))
  masked = np.array([False, True, True])
  batch = jax.tree.map(lambda x: x[None], prediction)
  propose = jax.jit(draw.propose)
  law = {}
  row = jax.tree.map(np.asarray, ROW)
  for weight, noise in draw.cells(prediction, masked, row):
    noise = jax.tree.map(lambda x: jnp.asarray(x)[None], noise)
    ids, _ = propose(noise, batch, BATCH)
    pair = tuple(np.asarray(ids)[0, masked].tolist())
    law[pair] = law.get(pair, 0.0) + weight
  first, second = penalised(2, 2.0)[1:]
  if temperature == 0:
    assert law == {(first.argmax(), second.argmax()): 1.0}
  else:
    assert len(law) == 16
    for (a, b), weight in law.items():
      assert weight == pytest.approx(first[a] * second[b], rel=1e-5)


def test_penalised_law_reaches_over_the_edge_of_a_block():
  """Left to right in blocks of one slot: the chain rule, by hand."""
  joint = small_joints.random_joint(3)
  canvas = from_rows([[None] * 3], small_joints.VOCAB)
  law = small_joints.law_of(
    joint,
    rules.left_to_right(1),
    draw=categorical(repetition_penalty=2.0, neighbourhood=1),
    blocks=blocks_of(canvas, 1),
  ).probabilities
  p = joint.probabilities.reshape(3, 3, 3)
  for a, b, c in np.ndindex(3, 3, 3):
    second = p[a].sum(-1) / p[a].sum()
    third = p[a, b] / p[a, b].sum()
    second[a] **= 2
    third[b] **= 2
    by_hand = p[a].sum() * second[b] / second.sum() * third[c] / third.sum()
    got = law.get((a + 2, b + 2, c + 2), 0.0)
    assert got == pytest.approx(by_hand, abs=1e-9)


def test_penalty_scatters_once_and_keeps_one_array_of_logits():
  """No [B, W, V] but the logits and what is made of them, at 8,000 ids."""
  logits = jnp.zeros((2, 64, 8000))
  context = draws.Context(
    jnp.zeros((2, 64), int),
    jnp.ones((2, 64), bool),
    jnp.tile(jnp.arange(64), (2, 1)),
  )

  def penalise(logits, context):
    return jax.vmap(draws.penalise_repeats, (0, 0, None, None))(
      reduce_logits(logits), context, 1.5, 8
    )

  text = str(jax.make_jaxpr(penalise)(logits, context))
  assert text.count(' scatter[') == 1
  memory = jax.jit(penalise).lower(logits, context).compile().memory_analysis()
  assert memory.temp_size_in_bytes < logits.nbytes / 4


def test_temperature_follows_the_power_law():
  ids, _ = draw_many(log(0.6, 0.4), 40_000, temperature=2.0)
  # sqrt(0.6) / (sqrt(0.6) + sqrt(0.4)) = 0.5505; five standard deviations.
  assert abs((ids == 0).mean() - 0.5505) < 5 * 0.0025


@settings(max_examples=40, deadline=None)
@given(
  st.lists(st.integers(1, 20), min_size=2, max_size=9), st.floats(0.01, 1.0)
)
def test_top_p_keeps_exactly_the_nucleus(weights, p):
  probs = np.array(weights, np.float64) / sum(weights)
  more_probable = np.array([probs[probs > q].sum() for q in probs])
  if np.abs(more_probable - p).min() < 1e-5:
    return  # which side float32 falls on is not defined
  kept = (
    filters.keep_top_p(jnp.log(jnp.array(probs, jnp.float32)), p) > -jnp.inf
  )
  np.testing.assert_array_equal(kept, more_probable < p)


def test_top_k_keeps_k_tokens_and_their_ties():
  logits = jnp.array([0.3, 0.1, 0.9, -jnp.inf, 0.5, 0.5])
  for k, kept in [(1, [2]), (2, [2, 4, 5]), (3, [2, 4, 5]), (4, [0, 2, 4, 5])]:
    got = filters.keep_top_k(logits, k) > -jnp.inf
    np.testing.assert_array_equal(np.flatnonzero(got), kept)
  np.testing.assert_array_equal(filters.keep_top_k(logits, 9), logits)


def test_top_k_tells_close_logits_apart():
  close = np.nextafter(np.float32(20), np.float32(21))
  got = filters.keep_top_k(jnp.array([20.0, close, -60.0]), 1) > -jnp.inf
  np.testing.assert_array_equal(got, [False, True, False])
  # Whose probabilities are all 0 in float32.
  got = filters.keep_top_k(jnp.array([0.0, -200.0, -300.0]), 2) > -jnp.inf
  np.testing.assert_array_equal(got, [True, True, False])


@pytest.mark.parametrize('temperature', [0.0, 1e-6, 1e-38, 1e-46])
def test_small_temperatures_are_the_argmax_without_nan(temperature):
  logits = jnp.array([0.1, 2.0, -jnp.inf, 1.0])
  ids, confidence = draw_many(logits, 500, temperature=temperature)
  assert set(ids) == {1}
  assert np.isfinite(confidence).all()


@pytest.mark.parametrize('num_ids', [7, 12, 100])
def test_the_most_probable_is_the_lowest_of_equal_ids(num_ids):
  logits = jax.random.randint(jax.random.key(2), (400, num_ids), 0, 5) * 1.0
  logits = jnp.where(logits == 0, -jnp.inf, logits)
  got = draws.most_probable(reduce_logits(logits))
  np.testing.assert_array_equal(got, np.argmax(logits, -1))


def test_scores_in_closed_form():
  prediction = reduce_logits(log(0.5, 0.3, 0.15, 0.05, 0.0))
  noise = draws.DrawNoise(jnp.zeros(5), jnp.zeros(1), jnp.array(0.625))
  expected = {
    'probability': 0.15,
    'row_maximum': 0.5,
    'margin': 0.2,
    'negative_entropy': sum(p * np.log(p) for p in (0.5, 0.3, 0.15, 0.05)),
    'random': 0.625,
  }
  for name, score in draws.SCORES.items():
    got = score(prediction, jnp.array(2), noise)
    np.testing.assert_allclose(got, expected[name], rtol=1e-6, err_msg=name)


def test_confidence_is_the_models_unless_tempered_is_chosen():
  for tempered, expected in [(False, 0.6), (True, 0.5505)]:
    _, confidence = draw_many(
      log(0.6, 0.4), 4, temperature=2.0, tempered=tempered
    )
    np.testing.assert_allclose(confidence, expected, atol=1e-4)


def test_close_winners_keep_their_order_in_float32():
  tops = jnp.array([9.00, 9.01, 9.02, 9.03], jnp.bfloat16)
  # bfloat16 itself rounds 9.01 to 9.0; what it can tell apart must stay apart.
  logits = jnp.zeros((4, 8), jnp.float32).at[:, 0].set(tops)
  exact = jnp.zeros((4, 8)).at[:, 0].set(jnp.array([9.00, 9.01, 9.02, 9.03]))
  draw = categorical(temperature=0.0)
  noise = draw.noise(jax.random.key(0), jnp.arange(4), 8)
  _, confidence = draw.propose(noise, reduce_logits(exact), None)
  assert (np.diff(confidence) > 0).all()
  _, rounded = draw.propose(noise, reduce_logits(logits), None)
  np.testing.assert_array_equal(np.diff(rounded) > 0, np.diff(tops) > 0)


def test_noise_belongs_to_the_position_and_not_to_the_slot():
  key = jax.random.key(3)
  whole = draws.draw_noise(key, jnp.arange(6), 12)
  part = draws.draw_noise(key, jnp.array([4, 2]), 12)
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
    np.testing.assert_array_equal(a[jnp.array([4, 2])], b)


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'temperature': 0.7},
    {'top_k': 2},
    {'top_p': 0.6},
    {'min_p': 0.7},
    {'temperature': 0.0},
    {'score': draws.random_order},
  ],
)
def test_cells_are_the_law_of_the_draw(options):
  """Weights sum to 1, and each cell makes `propose` return its own tokens."""
  draw = categorical(**options)
  logits = jnp.stack([log(0.4, 0.3, 0.2, 0.1), log(0.1, 0.2, 0.3, 0.4)])
  prediction = reduce_logits(logits)
  law = {}
  for weight, noise in draw.cells(prediction, np.array([True, True]), None):
    ids, confidence = draw.propose(
      jax.tree.map(jnp.asarray, noise), prediction, None
    )
    assert np.isfinite(confidence).all()
    pair = tuple(np.asarray(ids).tolist())
    law[pair] = law.get(pair, 0.0) + weight
  np.testing.assert_allclose(sum(law.values()), 1.0, rtol=1e-6)
  first = np.zeros(4)
  for (a, _), weight in law.items():
    first[a] += weight
  by_hand = {
    (): [0.4, 0.3, 0.2, 0.1],
    ('temperature', 0.0): [1, 0, 0, 0],
    ('top_k', 2): [4 / 7, 3 / 7, 0, 0],
    ('top_p', 0.6): [4 / 7, 3 / 7, 0, 0],
    ('min_p', 0.7): [4 / 7, 3 / 7, 0, 0],
    ('temperature', 0.7): (
      np.array([0.4, 0.3, 0.2, 0.1]) ** (1 / 0.7)
      / (np.array([0.4, 0.3, 0.2, 0.1]) ** (1 / 0.7)).sum()
    ),
  }
  key = next(iter(options.items()), ())
  expected = by_hand[() if 'score' in options else key]
  np.testing.assert_allclose(first, expected, atol=1e-6)


def test_one_and_the_same_object_for_equal_settings():
  assert categorical(temperature=0.5) is categorical(temperature=0.5)
  assert categorical() is categorical(temperature=1.0, top_k=None)
  assert categorical(temperature=0.5) is not categorical(temperature=0.6)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'temperature': -1.0}, 'temperature=-1.0 must be'),
    ({'temperature': float('nan')}, 'temperature=nan must be'),
    ({'temperature': float('inf')}, 'temperature=inf must be'),
    ({'temperature': 3e38}, 'temperature=3e.38 must be between 0 and 1e6'),
    ({'top_k': 0}, 'top_k=0 must be an integer of at least 1'),
    ({'top_p': 0.0}, 'top_p=0.0 must be in'),
    ({'top_p': 1.5}, 'top_p=1.5 must be in'),
    ({'min_p': 0.0}, 'min_p=0.0 must be in'),
    ({'min_p': 1.1}, 'min_p=1.1 must be in'),
    ({'repetition_penalty': 0.9}, 'repetition_penalty=0.9 must be between 1'),
    ({'repetition_penalty': 1.2}, 'neighbourhood=None must be an integer'),
    (
      {'repetition_penalty': 1.2, 'neighbourhood': 0},
      'neighbourhood=0 must be an integer of at least 1 beside',
    ),
    ({'neighbourhood': 3}, 'neighbourhood=3 cannot act without'),
    ({'temperature': 0.0, 'min_p': 0.1}, 'cannot act at temperature 0'),
    ({'temperature': 0.0, 'top_p': 0.9}, 'cannot act at temperature 0'),
    ({'temperature': 0.0, 'tempered': True}, 'cannot act at temperature 0'),
  ],
)
def test_settings_out_of_range_raise(options, message):
  with pytest.raises(ValueError, match=message):
    categorical(**options)


@pytest.mark.parametrize('num_ids', [2, 7, 12, 64])
def test_the_margin_by_blocks_is_that_of_the_two_largest(num_ids):
  rng = np.random.default_rng(num_ids)
  # Few values, so that the largest is often there twice; some rows have one id.
  logits = rng.integers(0, 4, (200, num_ids)).astype(np.float32)
  logits[:20, 1:] = -np.inf
  p = np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
  first, second = np.sort(p)[:, :-3:-1].T
  got = draws.margin(reduce_logits(jnp.array(logits)), None, None)
  np.testing.assert_allclose(got, first - second, atol=1e-6)
