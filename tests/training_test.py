import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mdlm_jax import (
  losses,
  optimizers,
  predict,
  schedules,
  time_draws,
  training,
)
from mdlm_jax.models import transformer
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=9, mask_id=1, pad_id=0)  # 7 real tokens.
CONFIG = transformer.TransformerConfig(
  vocab_size=9,
  num_layers=2,
  model_dim=16,
  num_heads=2,
  mlp_dim=32,
  max_length=8,
)
TRANSFORMER = transformer.denoiser(CONFIG)
KEY = jax.random.key(0)
SGD = optax.sgd(0.1)


def bag_features(params, cache, ids, **_):
  """What is here and the mean over the row: quick to compile."""
  here = params['embedding'][ids]
  return here + jnp.mean(here, 1, keepdims=True), ()


BAG = predict.Denoiser(
  bag_features, lambda params, hidden: hidden @ params['head']['kernel']
)


def init_params(denoiser, seed=1):
  key = jax.random.key(seed)
  if denoiser is not BAG:
    return transformer.init(CONFIG, key)
  first, second = jax.random.split(key)
  return {
    'embedding': jax.random.normal(first, (9, 16)) / 4,
    'head': {'kernel': jax.random.normal(second, (16, 9)) / 8},
  }


def make_batch(num_rows=256, length=8, seed=0):
  rng = np.random.default_rng(seed)
  return {
    'ids': rng.integers(2, 9, (num_rows, length), dtype=np.int32),
    'valid': np.ones((num_rows, length), bool),
    'row_ids': np.arange(num_rows, dtype=np.int32),
  }


@functools.cache
def make_optimizer(**changes):
  options = {
    'steps': 100,
    'learning_rate': 1e-2,
    'warmup_steps': 0,
    'weight_decay': 0.1,
    'clip_norm': 1.0,
  }
  return optimizers.make_optimizer(**options | changes)


@functools.cache
def make_step(denoiser, optimizer, ema_decay, **options):
  return training.train_step(
    denoiser, optimizer, vocab=VOCAB, ema_decay=ema_decay, **options
  )


def make_run(denoiser=BAG, *, optimizer=None, ema_decay=0.9, **options):
  optimizer = optimizer or make_optimizer()
  step = make_step(denoiser, optimizer, ema_decay, **options)
  return step, training.init_state(init_params(denoiser), optimizer)


def assert_trees_equal(actual, expected):
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_fresh_model_costs_the_entropy_of_the_uniform_distribution():
  step, state = make_run(TRANSFORMER)
  _, metrics = step(state, make_batch(), KEY)
  assert abs(metrics.bound.mean - math.log(7)) < 0.3
  assert abs(metrics.masked_cross_entropy.mean - math.log(7)) < 0.3
  # The weighted sum of a row of 8 tokens is another, named metric.
  np.testing.assert_allclose(
    metrics.bound_per_row.mean, 8 * metrics.bound.mean, rtol=1e-6
  )
  assert metrics.bound.count == 256 * 8


def test_two_strings_are_learned_to_one_bit():
  # Half AB, half BA: the bound of the best model is ln 2 per string.
  batch = make_batch(256, 2)
  batch['ids'] = np.array([[2, 3], [3, 2]] * 128, np.int32)
  step, state = make_run(
    optimizer=make_optimizer(weight_decay=0.0, learning_rate=0.1)
  )
  bounds = []
  for _ in range(100):
    state, metrics = step(state, batch, KEY)
    bounds.append(float(metrics.bound.mean) * 2)
  # Stratified over 256 rows, mean of 30 steps: standard error below 0.01.
  assert abs(np.mean(bounds[-30:]) - math.log(2)) < 0.03


def test_rows_without_a_mask_are_counted_and_stay_in_the_average():
  batch = make_batch(2000, 1)
  step, state = make_run(times=time_draws.iid_times)
  _, metrics = step(state, batch, KEY)
  # P(nothing masked) = 1/2; three standard errors are 0.034.
  assert abs(metrics.empty_rows.mean - 0.5) < 0.034
  masked = metrics.masked_cross_entropy.count
  assert masked + metrics.empty_rows.sum == 2000


def test_nothing_to_supervise_changes_nothing():
  batch = make_batch() | {'valid': np.zeros((256, 8), bool)}
  step, state = make_run(optimizer=make_optimizer(weight_decay=0.0))
  before = jax.tree.map(np.array, state)
  state, metrics = step(state, batch, KEY)
  assert metrics.bound.mean == 0
  assert metrics.gradient_norm.mean == 0
  assert metrics.empty_rows.mean == 1
  assert_trees_equal(state.params, before.params)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_padding_is_not_counted():
  batch = make_batch()
  batch['valid'][:, 3:] = False
  batch['ids'][:, 3:] = 0
  step, state = make_run()
  _, metrics = step(state, batch, KEY)
  assert metrics.bound.count == 256 * 3
  assert abs(metrics.bound.mean - math.log(7)) < 0.3


def test_padding_changes_neither_loss_nor_gradient():
  # The same 5 tokens and the same noise, padded to 8 and to 16.
  config = dataclasses.replace(CONFIG, num_layers=1, max_length=16)
  short = make_batch(32, 5)
  outcomes = []
  for length in (8, 16):
    widths = ((0, 0), (0, length - 5))
    batch = short | {
      'ids': np.pad(short['ids'], widths),
      'valid': np.pad(short['valid'], widths),
    }
    step = make_step(transformer.denoiser(config), SGD, 0.0)
    params = transformer.init(config, jax.random.key(1))
    state, metrics = step(training.init_state(params, SGD), batch, KEY)
    outcomes.append((state.params, metrics))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
    *outcomes,
  )


def test_masked_share_is_one_half_on_average_and_changes_by_step():
  step, state = make_run()
  counts = []
  for _ in range(100):
    state, metrics = step(state, make_batch(), KEY)
    counts.append(float(metrics.masked_cross_entropy.count))
  # 100 stratified steps of 2,048 tokens: standard error 0.001.
  assert abs(np.mean(counts) / 2048 - 0.5) < 0.005
  assert len(set(counts)) > 20


def test_state_is_donated_and_nothing_is_aliased():
  step, state = make_run()
  old = state
  state, _ = step(state, make_batch(), KEY)
  assert all(x.is_deleted() for x in jax.tree.leaves(old.params))
  pointers = [
    x.unsafe_buffer_pointer()
    for tree in (state.params, state.ema)
    for x in jax.tree.leaves(tree)
  ]
  assert len(set(pointers)) == len(pointers)


def test_step_is_compiled_once():
  traces = []

  def features(*arguments, **inputs):
    traces.append(None)
    return BAG.features(*arguments, **inputs)

  _, state = make_run()
  step = make_step(BAG._replace(features=features), make_optimizer(), 0.9)
  for seed in range(3):
    state, _ = step(state, make_batch(seed=seed), KEY)
    if seed == 0:
      traces_of_one = len(traces)
  assert len(traces) == traces_of_one
  assert state.step == 3


def test_noise_is_a_function_of_key_and_step():
  def measured(key, at):
    step, state = make_run()
    state = state._replace(step=jnp.int32(at))
    return float(step(state, make_batch(), key)[1].bound.sum)

  assert measured(KEY, 5) == measured(KEY, 5)
  assert measured(KEY, 5) != measured(KEY, 6)
  assert measured(KEY, 5) != measured(jax.random.key(1), 5)


def test_noise_belongs_to_the_row_and_not_to_its_place():
  # Rows in another order with their ids: the same times and masks.
  batch = make_batch()
  order = np.random.default_rng(0).permutation(256)
  moved = {name: x[order] for name, x in batch.items()}
  step, state = make_run()
  _, metrics = step(state, batch, KEY)
  _, state = make_run()
  _, again = step(state, moved, KEY)
  for a, b in zip(jax.tree.leaves(metrics), jax.tree.leaves(again)):
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_restored_state_continues_bit_for_bit():
  step, state = make_run()
  for seed in range(2):
    state, _ = step(state, make_batch(seed=seed), KEY)
  copy = jax.tree.map(lambda x: jnp.array(np.array(x)), state)
  for seed in range(2, 4):
    state, metrics = step(state, make_batch(seed=seed), KEY)
    copy, copy_metrics = step(copy, make_batch(seed=seed), KEY)
  assert_trees_equal(copy, state)
  assert_trees_equal(copy_metrics, metrics)


@pytest.mark.parametrize('decay', [0.0, 0.5, 0.9999])
def test_average_is_the_weighted_mean_of_the_past(decay):
  step, state = make_run(ema_decay=decay)
  initial = np.array(state.params['embedding'])
  np.testing.assert_array_equal(
    training.averaged_params(state, decay)['embedding'], initial
  )
  history = []
  for seed in range(5):
    state, _ = step(state, make_batch(seed=seed), KEY)
    history.append(np.array(state.params['embedding'], np.float64))
    weights = decay ** np.arange(len(history))[::-1]
    expected = np.tensordot(weights / weights.sum(), history, 1)
    np.testing.assert_allclose(
      training.averaged_params(state, decay)['embedding'], expected, rtol=2e-5
    )


def update_of(optimizer, params, gradients):
  state = optimizer.init(params)
  for gradient in gradients:
    updates, state = optimizer.update(gradient, state, params)
    params = optax.apply_updates(params, updates)
  return params


def test_decay_is_on_matrices_only():
  params = {
    'embedding': jnp.ones((3, 4)),
    'blocks': {
      'norm': {'scale': jnp.ones((2, 4))},  # Stacked: rank 2, yet a vector.
      'mlp': {'kernel': jnp.ones((2, 4, 4)), 'bias': jnp.ones((2, 4))},
    },
  }
  zeros = jax.tree.map(jnp.zeros_like, params)
  after = update_of(make_optimizer(), params, [zeros])
  # First step: learning rate 0.01 times decay 0.1.
  np.testing.assert_allclose(after['embedding'], 0.999, rtol=1e-6)
  np.testing.assert_allclose(after['blocks']['mlp']['kernel'], 0.999, rtol=1e-6)
  np.testing.assert_array_equal(after['blocks']['norm']['scale'], 1)
  np.testing.assert_array_equal(after['blocks']['mlp']['bias'], 1)


def test_every_matrix_of_the_transformer_is_decayed_and_no_norm():
  params = transformer.init(CONFIG, KEY)
  zeros = jax.tree.map(jnp.zeros_like, params)
  after = update_of(make_optimizer(), params, [zeros])
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(path)
    new = after
    for key in path:
      new = new[key.key]
    factor = 1.0 if 'norm' in name else 0.999
    np.testing.assert_allclose(new, factor * leaf, rtol=1e-6, err_msg=name)


def test_muon_orthogonalizes_the_matrices_of_the_blocks():
  rng = np.random.default_rng(0)
  params = {
    'embedding': jnp.ones((3, 4)),
    'blocks': {
      'norm': {'scale': jnp.ones((2, 4))},
      'mlp': {'kernel': jnp.ones((2, 4, 6))},
    },
  }
  gradient = jax.tree.map(
    lambda x: jnp.array(rng.normal(size=x.shape), jnp.float32), params
  )
  optimizer = make_optimizer(
    muon_learning_rate=0.5, learning_rate=0.01, weight_decay=0.0
  )
  after = update_of(optimizer, params, [gradient])
  moved = np.array(after['blocks']['mlp']['kernel']) - 1
  for layer, its_gradient in zip(moved, gradient['blocks']['mlp']['kernel']):
    # The nearest orthogonal matrix times a factor; five Newton-Schulz steps
    # bring singular values to between 0.7 and 1.2 of it.
    values = np.linalg.svd(layer, compute_uv=False)
    assert values.max() / values.min() < 1.2 / 0.68
    u, _, v = np.linalg.svd(its_gradient, full_matrices=False)
    cosine = -np.sum(layer * (u @ v)) / np.linalg.norm(layer) / 2
    assert cosine > 0.97
  # Adam with Nesterov momentum: first step 1 + 0.9 * 0.1 / (1 - 0.9^2).
  for name, leaf in (
    ('embedding', after['embedding']),
    ('scale', after['blocks']['norm']['scale']),
  ):
    moves = np.abs(np.array(leaf) - 1)
    np.testing.assert_allclose(
      moves, 0.01 * (1 + 0.09 / 0.19), rtol=1e-3, err_msg=name
    )


def test_muon_decays_its_matrices_only_and_survives_a_zero_gradient():
  params = {
    'embedding': jnp.ones((3, 4)),
    'blocks': {
      'norm': {'scale': jnp.ones((2, 4))},
      'mlp': {'kernel': jnp.ones((2, 4, 6))},
    },
  }
  optimizer = make_optimizer(muon_learning_rate=0.5, weight_decay=0.1)
  zeros = jax.tree.map(jnp.zeros_like, params)
  after = update_of(optimizer, params, [zeros])
  np.testing.assert_allclose(after['blocks']['mlp']['kernel'], 0.95, rtol=1e-6)
  np.testing.assert_array_equal(after['blocks']['norm']['scale'], 1)
  np.testing.assert_array_equal(after['embedding'], 1)


@pytest.mark.parametrize(
  ('weight_power', 'factor'), [(1.0, 4.0), (0.5, 2.0), (0.0, 1.0)]
)
def test_weight_power_tempers_the_loss_and_not_the_bound(weight_power, factor):
  # At t = 1/4 a masked token weighs 4 in the bound.
  step, state = make_run(
    optimizer=SGD, times=quarter_times, weight_power=weight_power
  )
  _, metrics = step(state, make_batch(), KEY)
  np.testing.assert_allclose(
    metrics.bound.sum, 4 * metrics.masked_cross_entropy.sum, rtol=1e-5
  )
  step, state = make_run(optimizer=SGD, times=quarter_times, weight_power=0.0)
  _, unweighted = step(state, make_batch(), KEY)
  np.testing.assert_allclose(
    metrics.gradient_norm.mean,
    factor * unweighted.gradient_norm.mean,
    rtol=1e-5,
  )


def quarter_times(key, row_ids, num_rows, *, t_min, t_max):
  return jnp.full(row_ids.shape, 0.25)


def test_learning_rate_warms_up_and_falls_to_zero():
  # A constant gradient moves Adam by the learning rate at every step.
  optimizer = make_optimizer(
    steps=20, warmup_steps=10, learning_rate=0.1, weight_decay=0.0
  )
  params, state = {'w': jnp.zeros((1, 1))}, None
  state = optimizer.init(params)
  moves = []
  for _ in range(21):
    updates, state = optimizer.update({'w': jnp.ones((1, 1))}, state, params)
    moves.append(-float(updates['w'][0, 0]))
  steps = np.arange(21)
  cosine = 0.05 * (1 + np.cos(np.pi * (steps - 10) / 10))
  expected = np.where(steps < 10, 0.01 * steps, cosine)
  np.testing.assert_allclose(moves, expected, atol=1e-6)


def test_gradients_are_clipped_to_the_global_norm():
  optimizer = make_optimizer(clip_norm=1.0, weight_decay=0.0)
  params = {'a': jnp.zeros((1, 1)), 'b': jnp.zeros((1, 1))}

  def gradient(scale):
    return {
      'a': jnp.full((1, 1), 0.6 * scale),
      'b': jnp.full((1, 1), 0.8 * scale),
    }

  # Norms 10 and 1 act as 1 and 1; below the limit they act as they are.
  clipped = update_of(optimizer, params, [gradient(10), gradient(1)])
  plain = update_of(optimizer, params, [gradient(1), gradient(1)])
  small = update_of(optimizer, params, [gradient(1), gradient(0.1)])
  np.testing.assert_allclose(clipped['a'], plain['a'], rtol=1e-5)
  assert abs(small['a'] - plain['a']) > 1e-4


@pytest.mark.parametrize(
  'changes',
  [
    {'warmup_steps': 100},
    {'warmup_steps': -1},
    {'steps': 0},
    {'learning_rate': 0.0},
    {'learning_rate': 1e300},
    {'clip_norm': -1.0},
    {'clip_norm': float('nan')},
    {'weight_decay': -0.1},
    # Decayed by more than twice their size, parameters grow.
    {'weight_decay': 200.0},
    {'beta1': 1.0},
    {'beta2': -0.1},
    {'muon_learning_rate': -0.1},
  ],
)
def test_impossible_optimizers_are_refused(changes):
  (name,) = changes
  with pytest.raises(ValueError, match=name):
    make_optimizer(**changes)


@pytest.mark.parametrize(
  'options', [{'ema_decay': 1.0}, {'t_min': 1.5}, {'weight_power': 2.0}]
)
def test_impossible_steps_are_refused(options):
  (name,) = options
  with pytest.raises(ValueError, match=name):
    make_run(**options)


@pytest.mark.parametrize(
  ('schedule', 'times'),
  [('linear', 'iid'), ('linear', 'systematic'), ('cosine', 'stratified')],
)
def test_bound_depends_neither_on_the_schedule_nor_on_the_draw(schedule, times):
  step, state = make_run(
    schedule=schedules.named_schedule(schedule),
    times=time_draws.named_times(times),
    t_min=1e-2,
  )
  _, metrics = step(state, make_batch(1024), KEY)
  step, state = make_run()
  _, reference = step(state, make_batch(), KEY)
  assert metrics.bound.sum != reference.bound.sum
  assert abs(metrics.bound.mean - math.log(7)) < 0.35


def test_small_times_are_left_out_and_bound_the_weight():
  # With t > 0.5 a masked token weighs less than 2.
  step, state = make_run(t_min=0.5)
  _, metrics = step(state, make_batch(1024), KEY)
  ratio = metrics.bound.sum / metrics.masked_cross_entropy.sum
  assert 1 < ratio < 2
  # Mean weight over masked tokens: 1 / E[t] = 4/3.
  assert abs(ratio - 4 / 3) < 0.05


def test_bfloat16_computes_and_keeps_float32_parameters():
  bfloat16 = transformer.denoiser(dataclasses.replace(CONFIG, dtype='bfloat16'))
  step, state = make_run(bfloat16)
  state, metrics = step(state, make_batch(), KEY)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))
  step, state = make_run(TRANSFORMER)
  _, reference = step(state, make_batch(), KEY)
  assert metrics.bound.mean != reference.bound.mean
  np.testing.assert_allclose(
    metrics.bound.mean, reference.bound.mean, rtol=0.02
  )


def poisoned(value):
  """A network whose gradient is the value where a row begins with id 2."""

  def head(params, hidden):
    factor = jnp.where(hidden[:, :1, 2:3] > 0, value, 1.0)
    return hidden * params['w'] * factor

  return predict.Denoiser(
    lambda params, cache, ids, **_: (jax.nn.one_hot(ids, 9), ()), head
  )


@pytest.mark.parametrize('value', [jnp.nan, jnp.inf])
@pytest.mark.parametrize('accumulation', [1, 2])
def test_a_gradient_that_is_not_finite_updates_nothing(value, accumulation):
  optimizer = make_optimizer()
  step = make_step(
    poisoned(value), optimizer, 0.9, accumulation=accumulation, t_max=0.5
  )
  state = training.init_state({'w': jnp.ones((1, 9))}, optimizer)
  good, bad = make_batch(), make_batch()
  good['ids'][:, 0] = 3
  # Only one row of one part; MASK would hide the id, so many rows have it.
  bad['ids'][:, 0] = np.where(np.arange(256) % 2, 2, 3)
  state, metrics = step(state, good, KEY)
  assert metrics.skipped.mean == 0
  before = jax.tree.map(np.array, state)
  state, metrics = step(state, bad, KEY)
  assert (state.step, state.skipped) == (2, 1)
  assert metrics.skipped == (1, 1)
  assert metrics.loss == metrics.bound == metrics.gradient_norm == (0, 0)
  assert_trees_equal((state.params, state.ema, state.opt_state), before[1:4])
  # The optimizer is not poisoned: the next gradient moves the parameters.
  state, metrics = step(state, good, KEY)
  assert metrics.skipped.mean == 0
  assert np.isfinite(state.params['w']).all()
  assert (state.params['w'] != before.params['w']).any()
  # The average is over two updates.
  np.testing.assert_allclose(
    training.averaged_params(state, 0.9)['w'],
    (0.9 * before.params['w'] + state.params['w']) / 1.9,
    rtol=1e-6,
  )


@pytest.mark.parametrize('loss', [losses.continuous_bound, losses.answer_loss])
@pytest.mark.parametrize('accumulation', [2, 8])
def test_accumulated_parts_have_the_gradient_of_the_whole(loss, accumulation):
  # Parts hold different numbers of tokens, and some rows nothing at all.
  batch = make_batch(16, 8)
  lengths = np.random.default_rng(1).integers(0, 9, 16)
  batch['valid'] = np.arange(8) < lengths[:, None]
  batch['given'] = batch['valid'] & (np.arange(8) < 2)
  outcomes = []
  for parts in (1, accumulation):
    step, state = make_run(optimizer=SGD, loss=loss, accumulation=parts)
    state, metrics = step(state, batch, KEY)
    outcomes.append((state.params, metrics))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-6),
    *outcomes,
  )
  (_, metrics), _ = outcomes
  answers = np.maximum(lengths - 2, 0)
  assert metrics.bound.count == answers.sum()
  is_bound = loss is losses.continuous_bound
  assert metrics.loss.count == (answers if is_bound else answers > 0).sum()


def test_parts_must_divide_the_rows():
  step, state = make_run(accumulation=3)
  with pytest.raises(ValueError, match='accumulation=3 must divide the 256'):
    step(state, make_batch(), KEY)


def test_only_what_is_not_frozen_is_trained():
  step, state = make_run(join=lambda frozen, params: frozen | params)
  params = dict(state.params)
  frozen = {'head': params.pop('head')}
  state = training.init_state(params, make_optimizer())
  before = jax.tree.map(np.array, (frozen, params))
  state, metrics = step(state, make_batch(), KEY, frozen)
  assert set(state.params) == {'embedding'}
  assert (state.params['embedding'] != before[1]['embedding']).any()
  assert_trees_equal(frozen, before[0])
  # The same loss as with all of them.
  step, state = make_run()
  assert step(state, make_batch(), KEY)[1].loss == metrics.loss


def test_packed_documents_are_trained_by_blocks_as_alone():
  # Two documents a row, or one: the same log-probabilities at equal levels, so
  # with all of it masked the same loss.
  config = dataclasses.replace(CONFIG, attention_block=2)
  documents = make_batch(8, 4)
  packed = {
    'ids': documents['ids'].reshape(4, 8),
    'valid': documents['valid'].reshape(4, 8),
    'row_ids': np.arange(4, dtype=np.int32),
    'segments': np.tile(np.repeat(np.arange(2, dtype=np.int32), 4), (4, 1)),
    'positions': np.tile(np.arange(4, dtype=np.int32), (4, 2)),
  }
  outcomes = []
  for batch in (documents, packed):
    step = make_step(transformer.denoiser(config), SGD, 0.0, t_min=1.0)
    params = transformer.init(config, jax.random.key(1))
    state = training.init_state(params, SGD)
    state, metrics = step(state, batch, KEY)
    outcomes.append((state.params, metrics.loss))
  assert outcomes[1][1].count == 32
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
    *outcomes,
  )


def test_a_share_of_rows_is_cut_at_a_random_length():
  counts = []
  for share in (0.0, 0.5, 1.0):
    step, state = make_run(random_length_share=share)
    _, metrics = step(state, make_batch(2000, 8), KEY)
    counts.append(float(metrics.bound.count) / 2000)
  # Of 8 tokens 8, and 4.5 on average (standard deviation 2.3) of those cut:
  # four standard errors of the mean of 2,000 are 0.21 and 0.24.
  assert counts[0] == 8
  assert abs(counts[1] - 6.25) < 0.24
  assert abs(counts[2] - 4.5) < 0.21
