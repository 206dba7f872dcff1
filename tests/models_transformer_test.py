"""The transformer: who sees whom, what the padding does, and its contracts."""

import dataclasses
import operator
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.models import attention, transformer

CONFIG = transformer.TransformerConfig(
  vocab_size=11,
  num_layers=2,
  model_dim=16,
  num_heads=4,
  mlp_dim=24,
  max_length=16,
)
VARIANTS = {
  'plain': {},
  'grouped': {'num_kv_heads': 2},
  'time': {'time_conditioning': True},
  'untied': {'tied_head': False},
  'head_norm': {
    'num_kv_heads': 2, 'head_width': 6, 'qkv_bias': True, 'qk_norm': 'head'
  },
  'projection_norm': {
    'num_kv_heads': 1, 'qk_norm': 'projection', 'embedding_scale': 5.0,
    'logit_scale': 0.5,
  },
  'adaln': {
    'norm': 'layer', 'mlp': 'gelu', 'tied_head': False, 'head_bias': True,
    'time_conditioning': True, 'conditioning_dim': 6, 'time_input': 'sigma',
  },
}  # fmt: skip
IDS = np.array([[3, 5, 7, 2, 9, 4, 6, 8]])


def variant(name):
  return dataclasses.replace(CONFIG, **VARIANTS[name])


def random_params(config, seed=0):
  """Every leaf random, so that zero and one initial values hide nothing."""
  params = transformer.init(config, jax.random.key(seed))
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: leaf + 0.2 * rng.standard_normal(leaf.shape, np.float32),
    params,
  )


def logits(
  config,
  params,
  ids,
  *,
  at=None,
  t=0.5,
  valid=None,
  positions=None,
  segments=None,
):
  ids = jnp.asarray(ids)
  batch, length = ids.shape
  if valid is None:
    valid = jnp.ones(ids.shape, bool)
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(length), ids.shape)
  features, head, *_ = transformer.denoiser(config)
  hidden, cache = jax.jit(features)(
    params,
    None,
    ids,
    at=at,
    step=jnp.int32(0),
    t=jnp.asarray(t) if np.ndim(t) else jnp.full(batch, t),
    valid=jnp.asarray(valid),
    positions=jnp.asarray(positions),
    segments=None if segments is None else jnp.asarray(segments),
  )
  del cache
  return jax.jit(head)(params, hidden)


def silu(x):
  return x / (1 + np.exp(-x))


def gelu(x):
  return x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2


def dense(x, weights):
  return x @ weights['kernel'] + weights.get('bias', 0)


def reference_logits(config, params, ids, t):
  """The network written again in NumPy, a loop over rows, layers and heads."""
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  dim = config.model_dim
  head_dim = config.head_width or dim // config.num_heads
  embedding_scale = config.embedding_scale or dim**0.5 / 0.25
  kv_heads = config.num_kv_heads or config.num_heads

  def norm(x, weights):
    if config.norm == 'layer':
      x = x - x.mean(-1, keepdims=True)
    mean_square = (x**2).mean(-1, keepdims=True)
    return x / np.sqrt(mean_square + config.norm_eps) * weights['scale']

  def rotate(x):  # [L, D]
    half = head_dim // 2
    out = np.empty_like(x)
    for position in range(len(x)):
      for i in range(half):
        angle = position * config.rope_base ** (-2 * i / head_dim)
        a, b = x[position, i], x[position, i + half]
        out[position, i] = a * np.cos(angle) - b * np.sin(angle)
        out[position, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out

  level = 1000 * t if config.time_input == 't' else -np.log(1 - 0.999 * t)
  angles = level * 10_000.0 ** -(np.arange(128) / 128)
  last_steer = np.zeros((2, dim))
  if config.time_conditioning:
    time = np.concatenate([np.cos(angles), np.sin(angles)])
    time = silu(dense(time, params['time_in']))
    time = silu(dense(time, params['time_out']))
    last_steer = dense(time, params['modulation']).reshape(2, dim)
  rows = []
  for row in ids:
    x = params['embedding'][row] * embedding_scale
    for layer in range(config.num_layers):
      block = jax.tree.map(operator.itemgetter(layer), params['blocks'])
      steer = np.repeat([[0], [0], [1], [0], [0], [1]], dim, axis=1)
      if config.time_conditioning:
        steer = dense(time, block['modulation']).reshape(6, dim)
      h = norm(x, block['attention_norm']) * (1 + steer[1]) + steer[0]
      q, k, v = (dense(h, block[name]) for name in ('query', 'key', 'value'))
      if config.qk_norm == 'projection':
        q, k = norm(q, block['query_norm']), norm(k, block['key_norm'])
      q, k, v = (x.reshape(len(row), -1, head_dim) for x in (q, k, v))
      if config.qk_norm == 'head':
        q, k = norm(q, block['query_norm']), norm(k, block['key_norm'])
      mixed = []
      for i in range(config.num_heads):
        group = i // (config.num_heads // kv_heads)
        scores = rotate(q[:, i]) @ rotate(k[:, group]).T / head_dim**0.5
        weights = np.exp(scores)
        mixed.append(weights / weights.sum(-1, keepdims=True) @ v[:, group])
      mixed = np.concatenate(mixed, -1) @ block['attention_out']['kernel']
      x = x + steer[2] * mixed
      h = norm(x, block['mlp_norm']) * (1 + steer[4]) + steer[3]
      if config.mlp == 'gelu':
        h = gelu(dense(h, block['up']))
      else:
        h = silu(dense(h, block['gate'])) * dense(h, block['up'])
      x = x + steer[5] * dense(h, block['mlp_out'])
    table = params['embedding' if config.tied_head else 'head']
    x = norm(x, params['norm']) * (1 + last_steer[1]) + last_steer[0]
    rows.append(x @ table.T * config.logit_scale + params.get('head_bias', 0))
  return np.stack(rows)


@pytest.mark.parametrize('name', VARIANTS)
def test_equals_the_network_written_in_numpy(name):
  config = variant(name)
  params = random_params(config)
  np.testing.assert_allclose(
    logits(config, params, IDS, t=0.3),
    reference_logits(config, params, IDS, t=0.3),
    rtol=1e-4,
    atol=1e-4,
  )


def test_rotary_tables_of_bfloat16_are_rounded_under_jit():
  config = dataclasses.replace(CONFIG, rope_dtype='bfloat16')
  params = random_params(CONFIG)
  exact, rounded = logits(CONFIG, params, IDS), logits(config, params, IDS)
  assert 1e-4 < jnp.abs(exact - rounded).max() < 0.1 * jnp.abs(exact).max()


def test_the_config_declares_the_alignment():
  shifted = dataclasses.replace(CONFIG, shifted=True)
  assert transformer.denoiser(shifted).shifted
  assert not transformer.denoiser(CONFIG).shifted


def test_attention_equals_jax_and_averages_where_nothing_is_seen():
  key = jax.random.key(1)
  q = jax.random.normal(key, (2, 5, 4, 6))
  k = jax.random.normal(jax.random.fold_in(key, 1), (2, 7, 2, 6))
  v = jax.random.normal(jax.random.fold_in(key, 2), (2, 7, 2, 6))
  mask = jax.random.bernoulli(jax.random.fold_in(key, 3), 0.6, (2, 5, 7))
  mask = mask.at[0, 0].set(False)
  ours = attention.attention(q, k, v, mask)
  theirs = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
  np.testing.assert_allclose(ours, theirs, atol=1e-5)
  np.testing.assert_allclose(
    ours[0, 0], jnp.repeat(v[0].mean(0), 2, axis=0), atol=1e-6
  )


@pytest.mark.parametrize('name', VARIANTS)
def test_every_position_sees_both_sides(name):
  config = variant(name)
  params = random_params(config)
  before = logits(config, params, IDS)
  for changed in range(IDS.shape[1]):
    ids = IDS.copy()
    ids[0, changed] = 1
    moved = jnp.abs(logits(config, params, ids) - before).max(-1)
    assert (moved > 1e-5).all()


@pytest.mark.parametrize('left', [False, True])
@pytest.mark.parametrize('name', VARIANTS)
def test_padding_on_either_side_changes_no_valid_position(name, left):
  config = variant(name)
  params = random_params(config)
  alone = logits(config, params, IDS)
  places = slice(5, 13) if left else slice(0, 8)
  for filler in (0, 10):
    ids = np.full((1, 13), filler)
    ids[:, places] = IDS
    valid = np.zeros((1, 13), bool)
    valid[:, places] = True
    positions = np.arange(13)[None] - places.start
    padded = logits(config, params, ids, valid=valid, positions=positions)
    np.testing.assert_allclose(padded[:, places], alone, atol=1e-5)
    assert jnp.isfinite(padded).all()


def test_validity_comes_from_the_map_and_never_from_an_id():
  config, params = CONFIG, random_params(CONFIG)
  ids = np.array([[7, 0], [7, 5]])
  valid = np.array([[True, False], [True, True]])
  masked = logits(config, params, ids, valid=valid)
  alone = logits(config, params, [[7]])
  np.testing.assert_allclose(masked[0, 0], alone[0, 0], atol=1e-5)
  everything = logits(config, params, ids)
  assert jnp.abs(everything[0, 0] - alone[0, 0]).max() > 1e-3


def test_a_row_without_valid_positions_is_finite_and_so_is_its_gradient():
  config, params = CONFIG, random_params(CONFIG)
  valid = np.zeros((1, 8), bool)

  def total(params):
    return logits(config, params, IDS, valid=valid).sum()

  value, gradient = jax.value_and_grad(total)(params)
  assert jnp.isfinite(value)
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_packed_documents_do_not_see_each_other():
  config, params = CONFIG, random_params(CONFIG)
  segments = np.array([[0, 0, 0, 1, 1, 1, 1, 1]])
  positions = np.array([[0, 1, 2, 0, 1, 2, 3, 4]])
  packed = logits(config, params, IDS, positions=positions, segments=segments)
  apart = jnp.concatenate(
    [logits(config, params, IDS[:, :3]), logits(config, params, IDS[:, 3:])],
    axis=1,
  )
  np.testing.assert_allclose(packed, apart, atol=1e-5)
  only_positions = logits(config, params, IDS, positions=positions)
  assert jnp.abs(only_positions - apart).max() > 1e-3
  ids = IDS.copy()
  ids[0, 0] = 1
  changed = logits(config, params, ids, positions=positions, segments=segments)
  assert (changed[:, 3:] == packed[:, 3:]).all()


def test_only_differences_of_positions_matter():
  config, params = CONFIG, random_params(CONFIG)
  positions = np.arange(8)[None]
  at_zero = logits(config, params, IDS, positions=positions)
  moved = logits(config, params, IDS, positions=positions + 100)
  np.testing.assert_allclose(moved, at_zero, atol=1e-4)
  spread = logits(config, params, IDS, positions=2 * positions)
  assert jnp.abs(spread - at_zero).max() > 1e-3


def test_rows_do_not_see_each_other():
  config, params = CONFIG, random_params(CONFIG)
  batch = np.concatenate([IDS, IDS[:, ::-1], (IDS + 1) % 11])
  together = logits(config, params, batch)
  for row in range(3):
    alone = logits(config, params, batch[row : row + 1])
    np.testing.assert_allclose(together[row], alone[0], atol=1e-5)


def test_chosen_slots_are_those_of_the_full_pass():
  config, params = CONFIG, random_params(CONFIG)
  ids = np.concatenate([IDS, IDS[:, ::-1]])
  at = jnp.array([[0, 1, 2], [4, 5, 6]])
  window = logits(config, params, ids, at=at)
  everything = logits(config, params, ids)
  expected = jnp.stack([everything[0, :3], everything[1, 4:7]])
  np.testing.assert_allclose(window, expected, atol=1e-6)


def test_the_noise_level_acts_only_with_time_conditioning():
  for name, acts in (('plain', False), ('time', True), ('adaln', True)):
    config = variant(name)
    params = random_params(config)
    early = logits(config, params, IDS, t=0.1)
    late = logits(config, params, IDS, t=0.9)
    assert (jnp.abs(early - late).max() > 1e-3) == acts


def test_a_fresh_time_conditioned_network_is_the_unconditional_one():
  plain = logits(CONFIG, transformer.init(CONFIG, jax.random.key(0)), IDS)
  for changes in ({'time_conditioning': True}, {'conditioning_dim': 6}):
    config = dataclasses.replace(CONFIG, **changes)
    params = transformer.init(config, jax.random.key(0))
    np.testing.assert_array_equal(logits(config, params, IDS, t=0.9), plain)


def test_every_slot_may_have_a_noise_level_of_its_own():
  config, params = variant('time'), random_params(variant('time'))
  # A document alone has the logits it has beside one of another level.
  segments = np.array([[0, 0, 0, 1, 1, 1, 1, 1]])
  both = logits(config, params, IDS, t=np.array(0.3 + 0.4 * segments),
                segments=segments)  # fmt: skip
  for level, slots in ((0.3, slice(0, 3)), (0.7, slice(3, 8))):
    alone = logits(config, params, IDS, t=level, segments=segments)
    np.testing.assert_allclose(both[:, slots], alone[:, slots], atol=1e-5)
  at = jnp.array([[2, 3, 4]])
  window = logits(config, params, IDS, t=np.array(0.3 + 0.4 * segments),
                  segments=segments, at=at)  # fmt: skip
  np.testing.assert_allclose(window, both[:, 2:5], atol=1e-6)


@pytest.mark.parametrize('name', ['plain', 'untied'])
@pytest.mark.parametrize('vocab_size', [8, 1000])
def test_a_fresh_network_starts_near_the_uniform_distribution(name, vocab_size):
  config = dataclasses.replace(
    variant(name), vocab_size=vocab_size, model_dim=64
  )
  params = transformer.init(config, jax.random.key(0))
  ids = np.random.default_rng(0).integers(vocab_size, size=(16, 16))
  ids[:, ::2] = 1  # MASK, which is never predicted
  masked = logits(config, params, ids)[:, ::2].at[..., 1].set(-jnp.inf)
  log_probs = jax.nn.log_softmax(masked)[..., 2:]
  assert abs(-log_probs.mean() - np.log(vocab_size - 1)) < 0.1


def test_parameters_are_float32_stacked_and_different_in_each_layer():
  for dtype in ('float32', 'bfloat16'):
    config = dataclasses.replace(CONFIG, dtype=dtype, time_conditioning=True)
    params = transformer.init(config, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {
      jnp.dtype('float32')
    }
    kernel = params['blocks']['query']['kernel']
    assert kernel.shape == (2, 16, 16)
    assert jnp.abs(kernel[0] - kernel[1]).max() > 0.01


def test_bfloat16_stays_close_and_gives_float32_logits():
  params = random_params(CONFIG)
  exact = logits(CONFIG, params, IDS)
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  rough = logits(config, params, IDS)
  assert rough.dtype == jnp.float32
  error = jnp.abs(rough - exact).max()
  # Eight bits of mantissa through two layers: about 1 % of the largest logit.
  assert 0 < error < 0.05 * jnp.abs(exact).max()


@pytest.mark.parametrize('name', VARIANTS)
def test_gradients_are_finite_and_reach_every_parameter(name):
  config = variant(name)
  params = random_params(config)

  def loss(params):
    return (logits(config, params, IDS) ** 2).mean()

  for leaf in jax.tree.leaves(jax.grad(loss)(params)):
    assert jnp.isfinite(leaf).all()
    assert (jnp.abs(leaf) > 0).any()


def test_equal_configs_give_the_same_functions_and_one_trace():
  again = dataclasses.replace(CONFIG)
  assert transformer.denoiser(CONFIG) is transformer.denoiser(again)
  traces = []

  @jax.jit
  def run(params, ids):
    traces.append(None)
    return logits(CONFIG, params, ids)

  params = random_params(CONFIG)
  np.testing.assert_allclose(
    run(params, jnp.asarray(IDS)), logits(CONFIG, params, IDS), atol=1e-5
  )
  run(params, jnp.asarray(IDS[:, ::-1]))
  assert len(traces) == 1


def test_what_a_gradient_keeps_changes_memory_only():
  config = dataclasses.replace(CONFIG, num_layers=6)
  params = random_params(config)
  ids = np.tile(IDS, (16, 2))

  def computed(remat):
    network = transformer.denoiser(config, remat=remat)

    def loss(params):
      hidden, _ = network.features(
        params, None, ids, at=None, step=0, t=jnp.ones(len(ids)),
        valid=jnp.ones(ids.shape, bool), segments=None,
        positions=jnp.broadcast_to(jnp.arange(16), ids.shape),
      )  # fmt: skip
      return (hidden**3).mean()

    gradient = jax.jit(jax.grad(loss)).lower(params).compile()
    return gradient(params), gradient.memory_analysis().temp_size_in_bytes

  found = {remat: computed(remat) for remat in transformer.REMAT}
  for gradient, _ in found.values():
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
      gradient, found['dots'][0],
    )  # fmt: skip
  assert found['all'][1] > 1.5 * found['dots'][1]
  assert found['dots'][1] > 1.5 * found['none'][1]


def test_only_known_names_say_what_a_gradient_keeps():
  assert transformer.denoiser(CONFIG) is transformer.denoiser(
    CONFIG, remat='dots'
  )
  with pytest.raises(ValueError, match="remat='some' must be one of dots, all"):
    transformer.denoiser(CONFIG, remat='some')


def test_vmap_over_models_equals_a_loop():
  both = [random_params(CONFIG, seed) for seed in (0, 1)]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *both)
  together = jax.vmap(lambda params: logits(CONFIG, params, IDS))(stacked)
  for i, params in enumerate(both):
    np.testing.assert_allclose(
      together[i], logits(CONFIG, params, IDS), atol=1e-5
    )


def test_graph_mode_off_gives_the_same_network():
  # In its own process: the mode is global.
  program = """
import jax, jax.numpy as jnp
from flax import nnx
from mdlm_jax.models import attention, transformer
config = transformer.TransformerConfig(
  vocab_size=5, num_layers=2, model_dim=8, num_heads=2, mlp_dim=8,
  max_length=4, time_conditioning=True)
def run():
  params = transformer.init(config, jax.random.key(0))
  features, head, *_ = transformer.denoiser(config)
  hidden, _ = features(
    params, None, jnp.array([[1, 2, 3]]), at=None, step=0, t=jnp.ones(1),
    valid=jnp.ones((1, 3), bool), positions=jnp.arange(3)[None],
    segments=None)
  return head(params, hidden)
with_graph = run()
nnx.set_graph_mode(False)
transformer._graph.cache_clear()
assert (run() == with_graph).all()
"""
  subprocess.run([sys.executable, '-c', program], check=True)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'vocab_size': 0}, 'vocab_size=0'),
    ({'model_dim': -16}, 'model_dim=-16'),
    ({'model_dim': 18}, 'model_dim=18 must be a multiple of .*8'),
    ({'attention_block': 2**31}, 'attention_block=2147483648 must be below'),
    ({'model_dim': 2**28}, 'would have 1.4e[+]17 elements'),
    ({'model_dim': 12}, 'model_dim=12 must be a multiple of .*8'),
    ({'mlp_dim': True}, 'mlp_dim=True'),
    ({'max_length': 0}, 'max_length=0'),
    ({'num_kv_heads': 3}, 'num_kv_heads=3 must divide num_heads=4'),
    ({'num_kv_heads': 0}, 'num_kv_heads=0'),
    ({'rope_base': 0.0}, 'rope_base=0.0'),
    ({'norm_eps': float('nan')}, 'norm_eps=nan'),
    ({'head_width': 5}, 'head_width=5 must be even'),
    ({'head_width': 0}, 'head_width=0'),
    ({'qk_norm': 'width'}, "qk_norm='width' must be one of"),
    ({'embedding_scale': 0.0}, 'embedding_scale=0.0'),
    ({'logit_scale': -1.0}, 'logit_scale=-1.0'),
    ({'rope_dtype': 'int8'}, "rope_dtype='int8' must be one of"),
    ({'dtype': 'float64'}, "dtype='float64' must be one of .*bfloat16"),
    ({'norm': 'batch'}, "norm='batch' must be one of .*rms"),
    ({'mlp': 'relu'}, "mlp='relu' must be one of .*gelu"),
    ({'conditioning_dim': 0}, 'conditioning_dim=0'),
    ({'time_input': 'sigma'}, "time_input='sigma' needs time_conditioning"),
  ],
)
def test_an_impossible_config_is_refused_by_name(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **changes)


def test_a_sequence_above_the_trained_length_is_refused():
  params = random_params(CONFIG)
  with pytest.raises(ValueError, match=r'length 17 .*max_length=16'):
    logits(CONFIG, params, np.ones((1, 17), int))


def test_shapes_that_disagree_are_refused():
  params = random_params(CONFIG)
  with pytest.raises(AssertionError):
    logits(CONFIG, params, IDS, valid=np.ones((1, 7), bool))
