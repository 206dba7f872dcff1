"""Mixtures of experts against formulas in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.models import transformer
from mdlm_jax.models.config import ExpertsConfig, TransformerConfig
from mdlm_jax.models.experts import (
  mix_by_ragged_dot,
  mix_in_blocks,
  route,
  without_stacks,
)

DIM, WIDTH = 6, 5
LOGITS = np.random.default_rng(0).normal(0, 2, (9, 8)).astype(np.float32)
BIAS = np.linspace(0.6, -0.6, 8, dtype=np.float32)
EXPERTS = ExpertsConfig(num_experts=8, num_chosen=3, width=WIDTH)
GROUPED = dataclasses.replace(
  EXPERTS, score='sigmoid', selection_bias=True, num_groups=4,
  num_chosen_groups=2, normalized=True, scale=2.5,
)  # fmt: skip
routed = jax.jit(route, static_argnums=2)


@pytest.fixture(autouse=True)
def exact_products():
  with jax.default_matmul_precision('highest'):
    yield


def weighted(logits, bias, experts):
  """Weight of every expert, 0 where it is not chosen, one token at a time."""
  result = np.zeros(logits.shape)
  for row, weights in zip(logits.astype(np.float64), result, strict=True):
    scores = 1 / (1 + np.exp(-row))
    if experts.score == 'softmax':
      scores = np.exp(row) / np.exp(row).sum()
    ranked = scores + (0 if bias is None else bias)
    groups = np.split(np.arange(len(row)), experts.num_groups)
    worth = [np.sort(ranked[group])[-2:].sum() for group in groups]
    kept = np.argsort(worth)[-experts.num_chosen_groups :]
    allowed = np.concatenate([groups[i] for i in kept])
    best = allowed[np.argsort(ranked[allowed])[-experts.num_chosen :]]
    weights[best] = scores[best] * experts.scale
    if experts.normalized:
      weights[best] /= scores[best].sum()
  return result


@pytest.mark.parametrize(
  ('experts', 'bias'),
  [
    (EXPERTS, None),
    (GROUPED, BIAS),
    (dataclasses.replace(EXPERTS, normalized=True, scale=0.5), None),
    (dataclasses.replace(EXPERTS, score='sigmoid'), None),
    (dataclasses.replace(EXPERTS, selection_bias=True), BIAS),
  ],
)
def test_the_chosen_experts_and_their_weights(experts, bias):
  weights, chosen = routed(LOGITS, bias, experts)
  ours = np.zeros(LOGITS.shape)
  np.put_along_axis(ours, np.asarray(chosen), np.asarray(weights), 1)
  np.testing.assert_allclose(ours, weighted(LOGITS, bias, experts), atol=1e-6)


def test_groups_and_bias_change_the_choice():
  expected = weighted(LOGITS, BIAS, GROUPED) > 0
  assert expected[:, :4].sum() > expected[:, 4:].sum()  # By the bias alone.
  assert (expected[:, :4] != (weighted(LOGITS, None, GROUPED) > 0)[:, :4]).any()
  whole = dataclasses.replace(GROUPED, num_groups=1, num_chosen_groups=1)
  assert (expected != (weighted(LOGITS, BIAS, whole) > 0)).any()


def silu(x):
  return x / (1 + np.exp(-x))


def case(num_tokens, num_experts, choose):
  """Tokens, weights, choice and matrices; and what becomes of the tokens."""
  generator = np.random.default_rng(num_tokens)
  tokens = generator.normal(size=(num_tokens, DIM))
  weights = generator.uniform(size=(num_tokens, 2))
  chosen = np.array([choose(generator, i) for i in range(num_tokens)])
  gate, up = generator.normal(size=(2, num_experts, DIM, WIDTH))
  out = generator.normal(size=(num_experts, WIDTH, DIM))
  mixed = np.zeros_like(tokens)
  for i, x in enumerate(tokens):
    for weight, e in zip(weights[i], chosen[i], strict=True):
      mixed[i] += weight * (silu(x @ gate[e]) * (x @ up[e])) @ out[e]
  # The second layer of a stack, after one of zeros.
  gate, up, out = (np.stack([0 * x, x]) for x in (gate, up, out))
  arrays = [
    jnp.asarray(x, jnp.int32 if x is chosen else jnp.float32)
    for x in (tokens, weights, chosen, gate, up, out)
  ]
  return [*arrays[:3], jnp.int32(1), *arrays[3:]], mixed


CASES = {
  'one token': (1, 4, lambda generator, i: [3, 1]),
  # 200 tokens of two experts: many full blocks, and experts without any.
  'unequal shares': (200, 6, lambda generator, i: [2, 0 if i % 9 else 5]),
  'at random': (
    37, 16, lambda generator, i: generator.choice(16, 2, replace=False)
  ),
}  # fmt: skip


@pytest.mark.parametrize('mix', [mix_in_blocks, mix_by_ragged_dot])
@pytest.mark.parametrize('name', CASES)
def test_each_token_gets_the_weighted_sum_of_its_experts(mix, name):
  arrays, expected = case(*CASES[name])
  np.testing.assert_allclose(jax.jit(mix)(*arrays), expected, atol=2e-4)


def test_both_ways_have_one_gradient():
  (tokens, weights, chosen, layer, *matrices), _ = case(*CASES['at random'])

  def gradient(mix):
    def loss(differentiable):
      tokens, weights, *matrices = differentiable
      return (mix(tokens, weights, chosen, layer, *matrices) ** 2).sum()

    return jax.jit(jax.grad(loss))((tokens, weights, *matrices))

  for a, b in zip(
    gradient(mix_in_blocks), gradient(mix_by_ragged_dot), strict=True
  ):
    assert np.abs(a).max() > 1
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_many_tokens_get_what_few_get():
  """Stacks go apart where tokens are few, with the layers where many."""
  experts = ExpertsConfig(num_experts=4, num_chosen=3, width=WIDTH)
  config = TransformerConfig(
    vocab_size=9, num_layers=2, model_dim=8, num_heads=2, mlp_dim=8,
    max_length=8, experts=experts,
  )  # fmt: skip
  network = transformer.denoiser(config)
  init = jax.jit(transformer.init, static_argnums=0)
  params = init(config, jax.random.key(0))
  row = np.array([[3, 5, 7, 2, 8, 4, 6, 0]])

  @jax.jit
  def results(params, ids):
    def loss(params):
      hidden, _ = network.features(
        params, None, ids, at=None, step=0, t=jnp.ones(len(ids)),
        valid=jnp.ones(ids.shape, bool), segments=None,
        positions=jnp.broadcast_to(jnp.arange(8), ids.shape),
      )  # fmt: skip
      return (hidden**3).mean(), hidden[:1]

    return jax.grad(loss, has_aux=True)(params)

  few, many = results(params, row), results(params, np.tile(row, (6, 1)))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
    few, many,
  )  # fmt: skip
  apart = [
    bool(without_stacks(params['blocks'], experts, num_tokens)[1])
    for num_tokens in (row.size, 6 * row.size)
  ]
  assert apart == [True, False]


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_chosen': 0}, 'num_chosen=0 must be an integer of at least 1'),
    ({'shared_width': 0}, 'shared_width=0 must be an integer'),
    ({'score': 'tanh'}, "score='tanh' must be one of"),
    ({'scale': 0.0}, 'scale=0.0 must be positive'),
    ({'num_groups': 3}, 'num_groups=3 must divide num_experts=8'),
    ({'num_groups': 8}, 'num_groups=8 must leave groups of two'),
    ({'num_chosen_groups': 2}, 'num_chosen_groups=2 must be at most'),
    ({'num_groups': 4}, 'num_chosen=3 must be at most 2'),
  ],
)
def test_numbers_that_do_not_fit_together(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(EXPERTS, **changes)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_dense_layers': 2}, r'num_dense_layers=2 must lie in \[0, 1\]'),
    (
      {'num_dense_layers': 1, 'experts': None},
      r'num_dense_layers=1 must lie in \[0, 0\]',
    ),
    ({'rotary_width': 6}, 'rotary_width=6 must be even and at most 4'),
    ({'mlp': 'gelu'}, "experts are networks of SwiGLU, not mlp='gelu'"),
  ],
)
def test_what_a_network_with_experts_cannot_have(changes, message):
  config = TransformerConfig(
    vocab_size=9, num_layers=2, model_dim=8, num_heads=2, mlp_dim=8,
    max_length=9, experts=EXPERTS,
  )  # fmt: skip
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, **changes)
