"""Adapters: nothing at first, then W + (alpha / r) A B, and only they learn."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix

from mdlm_jax import training
from mdlm_jax.models import adapters, directory, int8, param_tree, transformer
from mdlm_jax.models.config import ExpertsConfig

DENSE = transformer.TransformerConfig(
  vocab_size=11,
  num_layers=2,
  model_dim=16,
  num_heads=4,
  mlp_dim=24,
  max_length=16,
)
# Two stacks of layers, and every matrix that a layer can have.
MIXED = dataclasses.replace(
  DENSE,
  num_layers=3,
  num_dense_layers=1,
  experts=ExpertsConfig(num_experts=4, num_chosen=2, width=8),
  qkv_bias=True,
  time_conditioning=True,
)
RANK, ALPHA = 3, 6.0
IDS = jnp.array([[3, 5, 7, 2, 9, 4, 6, 8]])


def four_bits(key, values):
  """The matrices of layers as NF4 with a scale for every 8 inputs."""
  if not key.endswith('/kernel'):
    return values
  return qwix.quantize(
    values, 'nf4', channelwise_axes=[0, 2], tiled_axes={1: 8}
  )


def test_all_parameters_are_float32_in_64_bits_too():
  config = dataclasses.replace(MIXED, tied_head=False, head_bias=True)

  def init(key):
    params = transformer.init(config, key)
    return params, adapters.init(params, jax.random.clone(key), rank=RANK)

  with jax.enable_x64(True):
    leaves = jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)))
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype('float32')}


@functools.partial(jax.jit, static_argnums=1)
def quantized(params, quantize):
  leaves = param_tree.flat(params)
  return param_tree.nested({k: quantize(k, v) for k, v in leaves.items()})


@functools.cache
def parameters(config):
  """Frozen parameters, fresh adapters, and some whose B is not 0."""
  rng = np.random.default_rng(0)
  params = {
    key: 0.25 * rng.standard_normal(like.shape, np.float32)
    + key.endswith('scale')
    for key, like in param_tree.shapes(config).items()
  }
  params = jax.tree.map(jnp.asarray, param_tree.nested(params))
  fresh = adapters.init(params, jax.random.key(1), rank=RANK)
  trained = jax.tree.map(
    lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), fresh
  )
  return params, fresh, trained


def logits_of(config, params):
  denoiser = transformer.denoiser(config)
  hidden, _ = denoiser.features(
    params, None, IDS, at=None, step=0, t=jnp.full(1, 0.5),
    valid=IDS > 0, positions=jnp.arange(8)[None], segments=None,
  )  # fmt: skip
  return denoiser.head(params, hidden)


logits = jax.jit(logits_of, static_argnums=0)
join = functools.partial(adapters.join, alpha=ALPHA)
merged = jax.jit(functools.partial(adapters.merged, alpha=ALPHA))
dense = jax.jit(int8.dense)


def squares(config, params):
  return jnp.sum(logits_of(config, params) ** 2)


def test_a_layer_with_a_fresh_one_is_the_layer_to_the_bit():
  params, fresh, _ = parameters(DENSE)
  x = jax.random.normal(jax.random.key(0), (1, 8, 16))
  matrix, pair = (tree['blocks']['up'] for tree in (params, fresh))
  matrix, a, b = matrix['kernel'][0], pair['a'][0], pair['b'][0]
  dimensions = ((2,), (0,)), ((), ())
  np.testing.assert_array_equal(
    adapters.dot_general(x, adapters.Adapted(matrix, a, b), dimensions),
    jax.lax.dot_general(x, matrix, dimensions),
  )


def test_a_network_with_adapters_is_the_one_of_changed_matrices():
  params, fresh, trained = parameters(MIXED)
  jax.tree.map(np.testing.assert_array_equal, merged(params, fresh), params)
  before = logits(MIXED, params)
  # Other programs round otherwise.
  close = functools.partial(
    np.testing.assert_allclose, rtol=1e-5, atol=1e-5 * np.abs(before).max()
  )
  close(logits(MIXED, join(params, fresh)), before)
  weights = merged(params, trained)
  after = logits(MIXED, join(params, trained))
  close(after, logits(MIXED, weights))
  assert jnp.abs(after - before).max() > 0.1
  # Written again in NumPy, with nothing else changed.
  trained, old = param_tree.flat(trained), param_tree.flat(params)
  adapted = {key for key in old if key.endswith('/kernel') and 'blocks/' in key}
  assert len(adapted) == 8 + 5
  assert {key[:-1] + 'kernel' for key in trained} == adapted
  for key, leaf in param_tree.flat(weights).items():
    expected = np.array(old[key])
    if key in adapted:
      name = key.removesuffix('kernel')
      for layer in range(len(expected)):
        a, b = (np.asarray(trained[name + x][layer]) for x in 'ab')
        expected[layer] += ALPHA / RANK * a @ b
    np.testing.assert_allclose(leaf, expected, rtol=1e-6, atol=1e-6)


def test_gradients_are_those_of_the_matrices_times_the_other_factor():
  """dL/dA = s dL/dW B^T and dL/dB = s A^T dL/dW at W + s A B."""
  params, _, trained = parameters(DENSE)
  of_matrix = jax.jit(jax.grad(functools.partial(squares, DENSE)))(
    merged(params, trained)
  )
  found = jax.jit(
    jax.grad(lambda adapters: squares(DENSE, join(params, adapters)))
  )(trained)
  assert jax.tree.structure(found) == jax.tree.structure(trained)
  for name, pair in found['blocks'].items():
    gradient = np.asarray(of_matrix['blocks'][name]['kernel'])
    a, b = (np.asarray(trained['blocks'][name][key]) for key in 'ab')
    for key, expected in (
      ('a', ALPHA / RANK * gradient @ b.mT),
      ('b', ALPHA / RANK * a.mT @ gradient),
    ):
      np.testing.assert_allclose(
        pair[key], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max()
      )


def gradient_program(params, joined):
  """A gradient, and what its loop over two layers keeps for the way back."""
  program = jax.make_jaxpr(jax.grad(lambda x: squares(DENSE, joined(x))))(
    params
  )
  forwards, _ = (e for e in program.eqns if e.primitive.name == 'scan')
  shapes = [v.aval.shape for v in forwards.outvars]
  return str(program), sorted(s for s in shapes if s[:1] == (2,))


def test_the_gradient_of_a_frozen_matrix_is_not_made_nor_more_kept():
  params, _, trained = parameters(DENSE)
  of_all, kept_of_all = gradient_program(params, lambda x: x)
  found, kept = gradient_program(trained, lambda x: join(params, x))
  of_matrix = re.compile(r'f32\[(16,24|24,16)\] = dot_general')
  assert of_matrix.search(of_all)
  assert not of_matrix.search(found)
  assert (2, 1, 8, 24) in kept_of_all
  assert kept == kept_of_all


@pytest.mark.parametrize(
  ('quantize', 'least'), [(int8.quantize, 1e-3), (four_bits, 0.05)]
)
def test_of_matrices_in_few_bits(quantize, least):
  params, _, trained = parameters(DENSE)
  frozen = quantized(params, quantize)
  found = logits(DENSE, join(frozen, trained))
  expected = logits(DENSE, join(dense(frozen), trained))
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert jnp.abs(found - logits(DENSE, join(params, trained))).max() > least
  np.testing.assert_allclose(
    logits(DENSE, merged(frozen, trained)), expected, rtol=1e-5, atol=1e-5
  )


def test_in_bfloat16():
  config = dataclasses.replace(DENSE, dtype='bfloat16')
  params, _, trained = parameters(DENSE)
  frozen = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), params)
  weights = merged(frozen, trained)
  assert weights['blocks']['up']['kernel'].dtype == jnp.float32
  exact = logits(DENSE, jax.tree.map(np.float32, weights))
  error = jnp.abs(logits(config, join(frozen, trained)) - exact).max()
  # Sums of numbers of 8 bits.
  assert 1e-3 < error < 0.01 * jnp.abs(exact).max()


def test_of_some_matrices():
  params, _, _ = parameters(DENSE)
  chosen = adapters.init(
    params, jax.random.key(0), rank=RANK, targets=('query', 'up')
  )
  assert {key: x.shape for key, x in param_tree.flat(chosen).items()} == {
    'blocks/query/a': (2, 16, 3),
    'blocks/query/b': (2, 3, 16),
    'blocks/up/a': (2, 16, 3),
    'blocks/up/b': (2, 3, 24),
  }
  numbers = sum(leaf.size for leaf in jax.tree.leaves(chosen))
  assert numbers == 2 * RANK * (16 + 16 + 16 + 24)


@functools.cache
def shipped():
  """The shipped model and fresh adapters of it."""
  model = directory.load(directory.find().parent / 'sotu_small')
  return model, adapters.init(model.params, jax.random.key(2), rank=4)


def test_fresh_adapters_keep_the_variance_and_are_independent():
  _, fresh = shipped()
  a = {name: pair['a'] for name, pair in fresh['blocks'].items()}
  assert not any(pair['b'].any() for pair in fresh['blocks'].values())
  # Each bound is 5 deviations, false alarm 6e-7.
  for leaf in a.values():
    assert abs(leaf.var() * leaf.shape[1] - 1) < 5 * (2 / leaf.size) ** 0.5
  query, key = np.asarray(a['query']).ravel(), np.asarray(a['key']).ravel()
  assert abs((query * key).mean() * 128) < 5 / query.size**0.5


@pytest.mark.parametrize(
  ('config', 'options', 'message'),
  [
    (DENSE, {'rank': 0}, 'rank=0 must be an integer of at least 1'),
    (DENSE, {'rank': 17}, 'rank=17 must be at most 16, the smallest side'),
    (
      DENSE,
      {'rank': 2, 'targets': ('query', 'norm')},
      r"targets=\['norm', 'query'\] must be among attention_out, gate, key, "
      'mlp_out, query, up, value$',
    ),
    (DENSE, {'rank': 2, 'targets': ()}, r'targets=\[\] must be among'),
    (MIXED, {'rank': 2, 'targets': ('experts',)}, "'experts'.* must be among"),
  ],
)
def test_what_cannot_be_is_refused(config, options, message):
  with pytest.raises(ValueError, match=message):
    adapters.init(parameters(config)[0], jax.random.key(0), **options)


def test_a_shipped_model_learns_a_narrow_text_and_stays_as_it_is(tmp_path):
  model, fresh = shipped()
  text = 'The wolves of the north sing to the moon, and the moon is silent. '
  tokens = model.tokenizer.encode(text * 4)[:32]
  batch = {
    'ids': np.tile(tokens, (8, 1)),
    'valid': np.ones((8, len(tokens)), bool),
    'row_ids': np.arange(8),
  }
  frozen = model.params
  before = jax.tree.map(np.array, frozen)
  assert sum(leaf.size for leaf in jax.tree.leaves(fresh)) == 4 * 2 * (
    4 * (128 + 128) + 3 * (128 + 192)
  )
  optimizer = optax.adam(0.01)
  step = training.train_step(
    model.denoiser, optimizer, vocab=model.vocab, ema_decay=0.9, join=join
  )
  state = training.init_state(fresh, optimizer)
  key, losses = jax.random.key(3), []
  for _ in range(50):
    state, metrics = step(state, batch, key, frozen)
    losses.append(float(metrics.masked_cross_entropy.mean))
  assert np.mean(losses[:3]) > 4
  assert np.mean(losses[-10:]) < 2
  jax.tree.map(np.testing.assert_array_equal, frozen, before)
  weights = merged(frozen, state.params)
  directory.save(tmp_path, model.config, weights, model.vocab, model.tokenizer)
  jax.tree.map(
    np.testing.assert_array_equal, directory.load(tmp_path).params, weights
  )
