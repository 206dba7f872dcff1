"""Block diffusion: who sees whom, the bound at every block size, training."""

import dataclasses
import functools
import itertools
import math

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mdlm_jax import (
  block_diffusion,
  bound_estimators,
  corruption,
  likelihood,
  losses,
  predict,
  schedules,
  time_draws,
  training,
)
from mdlm_jax.models import directory, paired, transformer
from mdlm_jax.vocab import Vocab

GOLDEN = golden_data.load('bd3lm/masks_losses')
MODEL = directory.load(golden_data.FOLDER / 'bd3lm')
VOCAB = Vocab(size=5, mask_id=1, pad_id=0)  # 3 real tokens.
CONFIG = transformer.TransformerConfig(
  vocab_size=5,
  num_layers=2,
  model_dim=16,
  num_heads=2,
  mlp_dim=16,
  max_length=16,
  num_kv_heads=1,
  attention_block=4,
)


@pytest.fixture(autouse=True)
def exact_products():
  with jax.default_matmul_precision('highest'):
    yield


def rows(*lines):
  """'10 01', 2: a row of a table, twice."""
  return np.array(
    [
      [char == '1' for char in line.replace(' ', '')]
      for line, count in lines
      for _ in range(count)
    ]
  )


# Queries by keys, noisy slots and then clean ones.
TABLES = {
  12: rows(
    ('1111 0000 0000  0000 0000 0000', 4),
    ('0000 1111 0000  1111 0000 0000', 4),
    ('0000 0000 1111  1111 1111 0000', 4),
    ('0000 0000 0000  1111 0000 0000', 4),
    ('0000 0000 0000  1111 1111 0000', 4),
    ('0000 0000 0000  1111 1111 1111', 4),
  ),
  10: rows(
    ('1111 0000 00  0000 0000 00', 4),
    ('0000 1111 00  1111 0000 00', 4),
    ('0000 0000 11  1111 1111 00', 2),
    ('0000 0000 00  1111 0000 00', 4),
    ('0000 0000 00  1111 1111 00', 4),
    ('0000 0000 00  1111 1111 11', 2),
  ),
}


@functools.partial(jax.jit, static_argnames='block')
def seen(block, valid, positions=None, segments=None):
  """Which of the 2 L slots each attends to, read off one-hot values."""
  batch, length = valid.shape
  identity = jnp.eye(2 * length)[None, :, None]
  values = jnp.broadcast_to(identity, (batch, 2 * length, 1, 2 * length))
  attend = paired.attend_paired(valid, segments, positions, block)
  mixed, _ = attend(jnp.zeros_like(values), values, values, None)
  return mixed[:, :, 0]


def slots(length):
  return jnp.arange(length)[None]


@pytest.mark.parametrize('in_place', [True, False])
@pytest.mark.parametrize('length', TABLES)
def test_mask_is_the_hand_written_table(length, in_place):
  positions = None if in_place else slots(length)
  weights = seen(4, jnp.ones((1, length), bool), positions)[0]
  np.testing.assert_array_equal(weights > 0, TABLES[length])
  # Equal scores: each of what is seen weighs the same.
  np.testing.assert_allclose(
    weights, TABLES[length] / TABLES[length].sum(1, keepdims=True), atol=1e-6
  )


@pytest.mark.parametrize(
  'length, block, in_place',
  [(8, 1, True), (8, 4, False), (8, 8, True), (12, 3, False), (16, 4, True)],
)
def test_mask_is_that_of_the_reference(length, block, in_place):
  golden = GOLDEN[f'attention_mask_n{length}_b{block}']['mask']
  positions = None if in_place else slots(length)
  weights = seen(block, jnp.ones((1, length), bool), positions)[0]
  np.testing.assert_array_equal(weights > 0, golden)


def dense_mask(block, valid, positions, segments):
  blocks = positions // block
  same = segments[:, :, None] == segments[:, None]
  own = same & (blocks[:, :, None] == blocks[:, None])
  earlier = same & (blocks[:, :, None] > blocks[:, None])
  mask = np.block([[own, earlier], [np.zeros_like(own), own | earlier]])
  return mask & np.tile(valid, 2)[:, None]


@pytest.mark.parametrize('block', [1, 4, 50])
def test_blocks_begin_at_any_slot_of_padded_and_packed_rows(block):
  """More slots than a tile has, in rows that are no multiple of it."""
  length = 45
  valid = np.ones((3, length), bool)
  positions = np.tile(np.arange(length), (3, 1))
  segments = np.zeros((3, length), int)
  valid[0, :7] = False
  positions[0] -= 7
  valid[1, 30:] = False
  for index, start in enumerate((5, 26), 1):
    segments[2, start:] = index
    positions[2, start:] = np.arange(length - start)
  weights = seen(block, *map(jnp.asarray, (valid, positions, segments)))
  expected = dense_mask(block, valid, positions, segments)
  queries = np.tile(valid, 2)
  np.testing.assert_array_equal((weights > 0)[queries], expected[queries])


@functools.cache
def params_of(config, seed=0):
  """Every leaf random, so that zero and one initial values hide nothing."""
  params = transformer.init(config, jax.random.key(seed))
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: leaf + 0.2 * rng.standard_normal(leaf.shape, np.float32),
    params,
  )


@functools.partial(jax.jit, static_argnames='config')
def hidden_of(config, params, noisy, clean, t, valid, positions=None, **inputs):
  return transformer.denoiser(config).paired(
    params, noisy, clean, t=t, valid=valid, positions=positions,
    segments=inputs.get('segments'),
  )  # fmt: skip


@functools.partial(jax.jit, static_argnames='config')
def plain_logits(config, params, ids, t=None):
  """One canvas, as the sampler asks for it."""
  logits, _ = predict.network_logits(
    transformer.denoiser(config), params, None, ids, at=None, step=0,
    t=jnp.ones(len(ids)) if t is None else t, valid=jnp.ones(ids.shape, bool),
    positions=jnp.broadcast_to(slots(ids.shape[1]), ids.shape), segments=None,
  )  # fmt: skip
  return logits


def logits_of(config, params, noisy, clean, **inputs):
  inputs = {
    't': jnp.ones(len(noisy)), 'valid': jnp.ones(noisy.shape, bool)
  } | inputs  # fmt: skip
  hidden = hidden_of(config, params, noisy, clean, **inputs)
  return transformer.denoiser(config).head(params, hidden)


def random_pair(length, seed=0, batch=2):
  rng = np.random.default_rng(seed)
  clean = rng.integers(2, 5, (batch, length), dtype=np.int32)
  return np.where(rng.random(clean.shape) < 0.6, 1, clean), clean


@pytest.mark.parametrize('shifted', [False, True])
def test_each_block_is_what_the_sampler_would_ask_for(shifted):
  """One pass equals one call per block with the clean text before it."""
  config = dataclasses.replace(CONFIG, shifted=shifted)
  params = params_of(config)
  noisy, clean = random_pair(10)
  got = logits_of(config, params, noisy, clean)
  for start in (0, 4, 8):
    block = slice(start, start + 4)
    canvas = np.where(np.arange(10) < start, clean, noisy)
    np.testing.assert_allclose(
      got[:, block], plain_logits(config, params, canvas)[:, block],
      atol=2e-5,
    )  # fmt: skip
  general = logits_of(
    config, params, noisy, clean,
    positions=jnp.broadcast_to(slots(10), noisy.shape),
  )  # fmt: skip
  np.testing.assert_allclose(got, general, atol=2e-5)


def test_a_token_is_seen_by_its_own_noisy_block_and_by_later_blocks_if_clean():
  params = params_of(CONFIG)
  noisy, clean = random_pair(10, seed=1)
  before = hidden_of(CONFIG, params, noisy, clean, jnp.ones(2), noisy > 0)
  for changes_clean, changed in ((False, slice(4, 8)), (True, slice(8, 10))):
    pair = [noisy.copy(), clean.copy()]
    pair[changes_clean][:, 5] = 7 - np.maximum(pair[changes_clean][:, 5], 2) - 1
    after = hidden_of(CONFIG, params, *pair, jnp.ones(2), noisy > 0)
    change = np.abs(after - before).max((0, 2))
    assert (change[changed] > 1e-3).all()
    assert not np.delete(change, changed).any()


def test_packed_documents_and_padding_change_nothing():
  params = params_of(CONFIG)
  noisy, clean = random_pair(10, seed=2, batch=1)
  kept = [logits_of(CONFIG, params, x[0], x[1]) for x in (
    (noisy[:, :6], clean[:, :6]), (noisy[:, 6:], clean[:, 6:])
  )]  # fmt: skip
  positions = jnp.array([[*range(6), *range(4)]])
  segments = jnp.array([[0] * 6 + [1] * 4])
  packed = logits_of(
    CONFIG, params, noisy, clean, positions=positions, segments=segments
  )
  np.testing.assert_allclose(packed, jnp.concatenate(kept, 1), atol=2e-5)
  # Positions alone do not separate them.
  reset = logits_of(CONFIG, params, noisy, clean, positions=positions)
  assert np.abs(reset - packed).max() > 0.05
  padded = [np.pad(x[:, :6], ((0, 0), (4, 0))) for x in (noisy, clean)]
  left = logits_of(
    CONFIG, params, *padded,
    valid=jnp.arange(10)[None] > 3, positions=slots(10) - 4,
  )  # fmt: skip
  np.testing.assert_allclose(left[:, 4:], kept[0], atol=2e-5)


def test_clean_text_has_level_zero_and_slots_their_own():
  config = dataclasses.replace(CONFIG, time_conditioning=True)
  params = params_of(config)
  noisy, clean = random_pair(8, seed=3)
  t = jnp.array([[0.2] * 4 + [0.7] * 4] * 2)
  got = logits_of(config, params, noisy, clean, t=t)
  for start in (0, 4):
    block = slice(start, start + 4)
    canvas = np.where(np.arange(8) < start, clean, noisy)
    levels = jnp.where(jnp.arange(8)[None] < start, 0.0, t)
    np.testing.assert_allclose(
      got[:, block], plain_logits(config, params, canvas, levels)[:, block],
      atol=2e-5,
    )  # fmt: skip


CAUSAL = dataclasses.replace(CONFIG, attention_block=1)
STRINGS = jnp.array(list(itertools.product((2, 3, 4), repeat=3)))


@pytest.mark.parametrize('shifted', [False, True])
def test_blocks_of_one_give_the_exact_likelihood_in_one_call(shifted):
  """The chain rule of a causal network: over all strings p sums to one."""
  config = dataclasses.replace(CAUSAL, shifted=shifted)
  params = params_of(config)
  network = transformer.denoiser(config)
  estimate = likelihood.bound(
    network, params, jax.random.key(0), STRINGS, STRINGS > 0, vocab=VOCAB,
    estimator=block_diffusion.chain_rule_in_blocks(1), num_replicates=2,
  )  # fmt: skip
  np.testing.assert_array_equal(estimate.standard_error, 0)
  chain = 0
  for i in range(3):
    canvas = np.where(np.arange(3) < i, STRINGS, 1)
    logits = plain_logits(config, params, canvas)[:, i]
    log_probs = jax.nn.log_softmax(logits[:, 2:])
    chain -= log_probs[np.arange(27), STRINGS[:, i] - 2]
  np.testing.assert_allclose(estimate.mean, chain, rtol=1e-5)
  assert np.exp(-estimate.mean).sum() == pytest.approx(1, abs=1e-5)


def test_one_block_is_masked_diffusion_to_the_bit():
  config = dataclasses.replace(CONFIG, attention_block=10)
  whole = dataclasses.replace(CONFIG, attention_block=None)
  params = params_of(whole)
  optimizer = optax.sgd(0.1)
  _, clean = random_pair(10, seed=4, batch=8)
  batch = {'ids': clean, 'valid': clean > 0, 'row_ids': np.arange(8)}
  outcomes = []
  for one in (config, whole):
    step = training.train_step(
      transformer.denoiser(one), optimizer, vocab=VOCAB, ema_decay=0.0
    )
    state = training.init_state(jax.tree.map(jnp.copy, params), optimizer)
    outcomes.append(step(state, batch, jax.random.key(0)))
  jax.tree.map(np.testing.assert_array_equal, *outcomes)


def exact_pair(block):
  """The exact network of {AB, BA}, half each, by blocks of 1 or 2."""

  def logits_of(noisy, clean):
    other = jnp.flip(clean if block == 1 else noisy, 1)
    known = other > 1
    if block == 1:
      known &= jnp.arange(2)[None] == 1
    real = jnp.arange(5)[None, None]
    certain = jnp.where(real == 5 - other[..., None], 0.0, -30.0)
    even = jnp.where((real == 2) | (real == 3), 0.0, -30.0)
    return jnp.where(known[..., None], certain, even)

  return predict.Denoiser(
    features=None,
    head=lambda params, hidden: hidden,
    attention_block=block,
    paired=lambda params, noisy, clean, **_: logits_of(noisy, clean),
  )


TWO = jnp.array([[2, 3], [3, 2]] * 2000)


@pytest.mark.parametrize('block', [1, 2])
def test_two_strings_cost_one_bit(block):
  network = exact_pair(block)
  times_key, mask_key, key = jax.random.split(jax.random.key(block), 3)
  t = time_draws.block_times(
    time_draws.stratified_times, times_key, jnp.arange(4000), 4000,
    length=2, block=block,
  )  # fmt: skip
  valid = TWO > 0
  log_probs, masked = predict.corrupted_log_probs(
    network, (), mask_key, TWO, t, valid, vocab=VOCAB,
    schedule=schedules.linear(), row_ids=jnp.arange(4000),
  )  # fmt: skip
  total = losses.continuous_bound(log_probs, masked, valid, t)
  # Weights 1 / t of the 4,000 strings: a standard error of 0.02, of which
  # stratified levels keep less.
  assert total.sum / 4000 == pytest.approx(math.log(2), abs=0.08)
  exact = likelihood.bound(
    network, (), key, TWO[:2], valid[:2], vocab=VOCAB,
    estimator=block_diffusion.chain_rule_in_blocks(block), num_replicates=2,
  )  # fmt: skip
  np.testing.assert_allclose(exact.replicates, math.log(2), rtol=1e-5)


def test_estimators_of_the_bound_agree_on_a_network_of_blocks():
  params, network = params_of(CONFIG), transformer.denoiser(CONFIG)
  clean = jnp.asarray(random_pair(10, seed=5, batch=1)[1])
  estimates = [
    likelihood.bound(
      network, params, jax.random.key(6), clean, clean > 0, vocab=VOCAB,
      estimator=estimator, num_replicates=replicates, calls_at_once=16,
    )
    for estimator, replicates in (
      (block_diffusion.chain_rule_in_blocks(4), 200),
      (bound_estimators.exact_count(4), 200),
      (bound_estimators.stratified_time(4), 200),
    )
  ]  # fmt: skip
  best = estimates[0]
  for other in estimates[1:]:
    error = math.hypot(best.standard_error[0], other.standard_error[0])
    # False alarm 1 in 16,000.
    assert abs(best.mean[0] - other.mean[0]) < 4 * error
    assert best.standard_error[0] < other.standard_error[0]


def test_a_block_without_answer_or_a_short_one_counts_what_it_has():
  estimator = block_diffusion.chain_rule_in_blocks(4)
  answer = np.arange(10) > 5
  row_noise = bound_estimators.call_noise(
    jax.random.key(0), jnp.arange(10), estimator.num_calls
  )
  masks = estimator.masks(row_noise, jnp.asarray(answer))
  # Each token is scored once, in a call that hides it.
  np.testing.assert_array_equal((masks.weights * masks.masked).sum(0), answer)
  np.testing.assert_array_equal(masks.masked.sum(1), [4, 2, 0, 0])
  with pytest.raises(ValueError, match='block=0'):
    block_diffusion.chain_rule_in_blocks(0)


LOSSES = [name for name in GOLDEN if name.startswith('loss_')]
SCHEDULES = {
  'loss_cosine': schedules.mirrored_cosine(),
  'loss_square': schedules.polynomial(2.0),
  'loss_square_root': schedules.polynomial(0.5),
  'loss_log': schedules.logarithmic(),
}


@functools.partial(jax.jit, static_argnames='denoiser')
def golden_log_probs(denoiser, corrupted_ids, ids):
  return predict.target_log_probs(
    denoiser, MODEL.params, MODEL.vocab, corrupted_ids, ids,
    t=jnp.ones(len(ids)), valid=jnp.ones(ids.shape, bool),
  )  # fmt: skip


@pytest.mark.parametrize('name', LOSSES)
def test_losses_of_the_reference(name):
  golden = jax.tree.map(jnp.asarray, GOLDEN[name])
  low, high = golden['range']
  ids, uniforms = golden['x0'], golden['u_block']
  numbers = jnp.arange(uniforms.size)
  levels = uniforms.reshape(-1)
  if name != 'loss_noanti_nobos':
    levels = time_draws.stratify(levels, numbers, uniforms.size)
  t = low + (high - low) * levels.reshape(uniforms.shape)
  t = jnp.repeat(t, 4, 1)
  np.testing.assert_allclose(t, golden['t'], atol=1e-6)
  schedule = SCHEDULES.get(name, schedules.linear())
  # Their cosine has a floor of 1e-3, here and in the weight.
  floor = 1e-3 if name == 'loss_cosine' else 0.0
  masking = floor + (1 - floor) * schedule.masked(t)
  np.testing.assert_allclose(masking, golden['move_chance'], atol=2e-6)
  given = np.zeros(ids.shape, bool)
  given[:, 0] = name != 'loss_noanti_nobos'
  corrupted_ids, masked = corruption.corrupt_with_noise(
    golden['u_mask'], ids, masking, jnp.asarray(~given),
    mask_id=MODEL.vocab.mask_id,
  )  # fmt: skip
  np.testing.assert_array_equal(corrupted_ids, golden['x_t'])
  if name == 'loss_cosine':
    schedule = schedule._replace(
      weight=lambda t: -0.999 * schedules.mirrored_cosine().derivative(t)
      / (masking + 1e-3)
    )  # fmt: skip
  if low > 0.5:  # Theirs drops the weight.
    np.testing.assert_allclose(-golden['loss_scale'], 1 / t, rtol=1e-5)
    schedule = schedule._replace(weight=jnp.ones_like)
  # Padding is seen there, and not counted; so is, in training only, BOS.
  counted = golden['token_mask'] > 0
  if name != 'loss_train_mode':
    np.testing.assert_array_equal(
      counted, (golden['attention_mask'] > 0) & ~given
    )
  total = losses.continuous_bound(
    golden_log_probs(MODEL.denoiser, corrupted_ids, ids),
    masked,
    counted,
    t,
    schedule=schedule,
  )
  np.testing.assert_allclose(total.mean, golden['loss'], rtol=1e-4)


@pytest.mark.parametrize(
  'name, schedule, above',
  [
    ('loglinear', schedules.linear(), 0.0),
    ('square', schedules.polynomial(2.0), 0.032),  # Below it, their floor.
    ('square_root', schedules.polynomial(0.5), 0.0),
    ('log', schedules.logarithmic(), 0.0),
  ],
)
def test_noise_of_the_reference(name, schedule, above):
  golden = GOLDEN['noise_schedules']
  t = jnp.asarray(golden['t'][golden['t'] > above])
  for field, values in (
    ('move_chance', schedule.masked(t)),
    ('loss_scaling', -schedule.weight(t)),
  ):
    expected = golden[f'{name}_{field}'][golden['t'] > above]
    np.testing.assert_allclose(values, expected, rtol=2e-5)


def test_levels_of_blocks_are_stratified_over_rows_and_blocks():
  draw = jax.jit(
    functools.partial(
      time_draws.block_times, time_draws.stratified_times,
      num_rows=6, length=10, block=4, t_min=0.2, t_max=0.8,
    )
  )  # fmt: skip
  whole = draw(jax.random.key(0), jnp.arange(6))
  for start in (0, 4, 8):
    assert np.ptp(whole[:, start : start + 4], 1).max() == 0
  levels = (np.asarray(whole)[:, ::4] - 0.2) / 0.6
  np.testing.assert_array_equal(
    np.sort(np.ceil(levels * 18 - 1e-4).ravel()), np.arange(1, 19)
  )
  parts = [
    draw(jax.random.key(0), rows) for rows in jnp.arange(6).reshape(2, 3)
  ]
  np.testing.assert_array_equal(whole, jnp.concatenate(parts))


def test_each_block_has_every_level_alike():
  """Not so if blocks had strata by their number: one row shows it most."""
  draw = functools.partial(
    time_draws.block_times, time_draws.stratified_times,
    row_ids=jnp.arange(1), num_rows=1, length=3, block=1,
  )  # fmt: skip
  keys = jax.random.split(jax.random.key(0), 2000)
  levels = jax.jit(jax.vmap(lambda key: draw(key=key)))(keys)[:, 0]
  # Kolmogorov-Smirnov of 2,000 draws: 1 in 1,000 for each of three.
  for column in np.sort(np.asarray(levels), 0).T:
    distance = np.abs(column - (np.arange(2000) + 0.5) / 2000).max()
    assert distance < 1.95 / math.sqrt(2000)


def uniform_network(block):
  return predict.Denoiser(
    features=None,
    head=lambda params, hidden: hidden,
    attention_block=block,
    paired=lambda params, noisy, clean, **_: jnp.zeros((*noisy.shape, 5)),
  )


def test_variance_by_range_is_the_formula():
  """A token costs ln 3 / t with probability t: E = ln 3, E^2 mean 1 / t."""
  among = jnp.array([[0.999, 1.0], [0.5, 1.0], [0.25, 0.75]])
  ids = jnp.full((256, 64), 2)
  variances = block_diffusion.variance_by_range(
    uniform_network(1), (), jax.random.key(0), ids, ids > 0, among,
    vocab=VOCAB, block=1,
  )  # fmt: skip
  mean_inverse = [math.log(b / a) / (b - a) for a, b in among.tolist()]
  expected = math.log(3) ** 2 * (np.array(mean_inverse) - 1)
  # 16,384 blocks: a relative standard error of about 0.01.
  np.testing.assert_allclose(variances, expected, rtol=0.06, atol=1e-3)
  assert block_diffusion.ranges((0.9,), 0.05)[1] == (0.05, 0.95)
  assert len(block_diffusion.ranges()) == 11 + 9 + 7 + 5 + 3


def train(options, batch, network=None):
  optimizer = optax.sgd(0.1)
  network = network or transformer.denoiser(CONFIG)
  step = training.train_step(
    network, optimizer, vocab=VOCAB, ema_decay=0.0, **options
  )
  params = {'x': jnp.zeros(())}
  state = training.init_state(params, optimizer)
  return step(state, batch, jax.random.key(0))[1]


def test_training_masks_blocks_within_the_range_and_never_what_is_given():
  _, clean = random_pair(8, seed=7, batch=64)
  batch = {'ids': clean, 'valid': clean > 0, 'row_ids': np.arange(64)}
  network = uniform_network(2)._replace(
    paired=lambda params, noisy, clean, **_: jnp.zeros((*noisy.shape, 5))
    + params['x'],
  )  # fmt: skip
  everything = train({'t_min': 1.0, 't_max': 1.0}, batch, network)
  assert everything.masked_cross_entropy.count == everything.bound.count == 512
  assert everything.bound.mean == pytest.approx(math.log(3), rel=1e-5)
  given = np.zeros(clean.shape, bool)
  given[:, 0] = True
  kept = train({'t_min': 1.0, 't_max': 1.0}, batch | {'given': given}, network)
  assert kept.masked_cross_entropy.count == kept.bound.count == 64 * 7
  # 256 levels between 1/4 and 3/4: a standard error of 0.01.
  half = train({'t_min': 0.25, 't_max': 0.75}, batch, network)
  share = half.masked_cross_entropy.count / 512
  assert share == pytest.approx(0.5, abs=0.06)
