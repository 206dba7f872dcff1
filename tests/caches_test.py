"""Caches: what is computed, what is exact, and how far the others are off."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from mdlm_jax import (
  caches,
  draws,
  guidance,
  network_call,
  rules,
  sampling,
  sampling_state,
)
from mdlm_jax.blocks import blocks_of, window_of
from mdlm_jax.canvas import from_prompts, from_rows
from mdlm_jax.models import transformer
from mdlm_jax.predict import Denoiser
from mdlm_jax.schedules import linear
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=16, mask_id=1, pad_id=0, eos_ids=(2,))
GREEDY = draws.categorical(temperature=0.0)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]
# Nothing to say about block 1 of this row, and nothing opens it.
GIVEN = [*[None] * 4, 3, 4, 5, 6, *[None] * 8]
SIZE = transformer.TransformerConfig(
  vocab_size=16, num_layers=2, model_dim=16, num_heads=2, mlp_dim=24,
  max_length=32,
)  # fmt: skip
CANVAS = from_rows([*([*p, *[None] * 11] for p in PROMPTS), GIVEN], VOCAB)


@functools.cache
def network(attention_block=None, **options):
  config = dataclasses.replace(SIZE, attention_block=attention_block, **options)
  return transformer.denoiser(config), params_of_all()


@functools.cache
def params_of_all():
  """None of the options has parameters of its own."""
  generator = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: leaf + 0.4 * generator.standard_normal(leaf.shape, np.float32),
    jax.jit(transformer.init, static_argnums=0)(SIZE, jax.random.key(0)),
  )


def run(model, canvas, length, rule=None, **options):
  denoiser, params = model
  options = {'draw': GREEDY, 'vocab': VOCAB} | options
  return sampling.sample(
    denoiser, params, jax.random.key(1), canvas,
    rule=rules.by_confidence(2) if rule is None else rule,
    blocks=blocks_of(canvas, length, aligned=True), trajectory=True, **options,
  )  # fmt: skip


def assert_same_decoding(one, other):
  """The same tokens in the same order of commits."""
  np.testing.assert_array_equal(one.trajectory, other.trajectory)
  np.testing.assert_array_equal(one.calls_per_row, other.calls_per_row)


@functools.partial(jax.jit, static_argnames='denoiser')
def hidden_states(denoiser, params, ids, cache=None, at=None):
  """Of whole rows, or of some slots beside stored ones; and the cache."""
  return denoiser.features(
    params, cache, ids, at=at, step=0, t=jnp.zeros(len(ids)), segments=None,
    valid=jnp.ones(ids.shape, bool),
    positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
  )  # fmt: skip


@pytest.mark.parametrize(
  ('attention_block', 'length', 'network_options', 'rule', 'options'),
  [
    # Two windows in each block of the network.
    (4, 2, {'shifted': True}, rules.by_confidence(2), {}),
    # Two of its blocks in each window.
    (2, 4, {}, rules.by_confidence(2), {}),
    (4, 4, {}, rules.editing(rules.threshold(0.5), 0.2, 4),
     {'stop_at_eos': True}),
    (4, 4, {}, rules.kernel((1.0, 0.9, 0.5, 0.0), cached=True),
     {'draw': draws.categorical(),
      'guidance': guidance.guide(CANVAS, VOCAB, 1.5)}),
  ],
)  # fmt: skip
def test_one_loop_with_and_without_the_exact_cache(
  attention_block, length, network_options, rule, options
):
  model = network(attention_block, **network_options)
  audit = 'guidance' not in options  # It would make four calls a step.
  plain = run(model, CANVAS, length, rule, **options)
  cached = run(
    model, CANVAS, length, rule, cache=caches.exact(), audit_cache=audit,
    **options,
  )  # fmt: skip
  assert_same_decoding(plain, cached)
  assert not audit or np.nanmax(cached.cache_error) < 1e-5
  # Never more than the window and what changed since; far less than all.
  most = 2 * max(attention_block, length) + 1
  assert cached.computed[:, :2].max() <= most
  assert plain.computed is None and plain.cache_error is None


def test_a_row_does_not_depend_on_the_row_beside_it():
  """Other prompts, other open slots, and another number of calls."""
  model, rule = network(4), rules.threshold(0.3)
  one, other = (
    run(
      model, from_rows([first, second], VOCAB, length=16), 4, rule,
      draw=draws.categorical(), cache=caches.exact(),
      row_ids=jnp.array([7, 8 + len(first)]),
    )
    for first, second in (
      ([5, 6, 7, *[None] * 11], GIVEN), ([5, 6, 7, *[None] * 11], [*GIVEN[4:]])
    )
  )  # fmt: skip
  np.testing.assert_array_equal(one.ids[0], other.ids[0])
  assert one.calls_per_row[0] == other.calls_per_row[0]


def test_stored_keys_of_a_clean_block_are_those_of_a_fresh_pass():
  """Not those of the last noisy state, in which some of it was MASK."""
  denoiser, params = network(4)
  canvas = from_prompts([[5, 6, 7, 8]], 8, VOCAB)
  decoding = sampling_state.Decoding(
    denoiser, VOCAB, rules.by_confidence(1), GREEDY, linear(),
    cache=caches.exact(),
  )  # fmt: skip
  inputs = sampling_state.Inputs(params, canvas)
  blocks = blocks_of(canvas, 4)
  stored = network_call.start_cache(
    decoding, inputs, window_of(blocks, 0, canvas)
  )
  clean = canvas.ids.at[0, 4:8].set(jnp.array([9, 3, 4, 12]))
  for block, ids in enumerate([canvas.ids, clean]):
    window = window_of(blocks, block, canvas)
    state = sampling_state.SamplerState(
      ids, jnp.ones(1), (), None, None, stored=stored
    )
    _, stored = jax.jit(network_call.predict_window, static_argnums=0)(
      decoding, inputs, 0, state, window
    )
  _, fresh = hidden_states(denoiser, params, clean[:, :8])
  for ours, theirs in zip(
    jax.tree.leaves(stored.cache), jax.tree.leaves(fresh), strict=True
  ):
    np.testing.assert_allclose(ours[:, :, :8], theirs, atol=1e-5)


def test_what_is_not_stored_yet_is_never_seen():
  denoiser, params = network(4)
  ids = jnp.array([[5, 6, 7, 8, 9, 10, 11, 12, 1, 1, 1, 1, 1, 1, 1, 1]])

  def block(length, poison):
    cut = ids[:, :length]
    _, cache = hidden_states(denoiser, params, cut)
    # Slots 4 to 7 are computed, those from 8 on are not there yet.
    cache = jax.tree.map(lambda leaf: leaf.at[:, :, 8:].set(poison), cache)
    at = jnp.arange(4, 8)[None]
    return hidden_states(denoiser, params, cut, cache, at)[0]

  np.testing.assert_allclose(block(16, 1e4), block(8, 0.0), atol=1e-5)


@pytest.mark.parametrize(
  ('options', 'policy', 'width', 'sizes'),
  [
    ({}, caches.dual(), 4, (4, 32)),
    # The slot before the window is computed too: one more, and not all.
    ({'shifted': True}, caches.dual(), 4, (5, 32)),
    ({'shifted': True}, caches.prefix(), 8, (9, 17, 32)),
    ({'attention_block': 4}, caches.exact(), 4, (4, 8, 32)),
    ({'attention_block': 4, 'shifted': True}, caches.exact(), 4, (5, 9, 32)),
    # A window inside a block, which may see the block before it change.
    ({'attention_block': 8}, caches.exact(), 4, (8, 16, 32)),
    ({'attention_block': 4}, caches.exact(), 8, (8, 16, 32)),
  ],
)
def test_calls_are_compiled_for_what_they_compute(
  options, policy, width, sizes
):
  decoding = sampling_state.Decoding(
    network(**options)[0], VOCAB, rules.by_confidence(1), GREEDY, linear(),
    cache=policy,
  )  # fmt: skip
  assert network_call.call_sizes(decoding, 32, width) == sizes


def test_a_slot_that_is_none_stores_nothing():
  denoiser, params = network()
  ids = jnp.array([[5, 6, 7, 8], [9, 10, 11, 12]])
  shapes = jax.eval_shape(
    functools.partial(hidden_states, denoiser), params, ids
  )[1]
  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
  at = jnp.array([[1, 4], [0, 3]])
  _, after = hidden_states(denoiser, params, ids, zeros, at)
  for leaf in jax.tree.leaves(after):
    written = np.asarray(leaf != 0).any((0, 3, 4))
    assert written.tolist() == [
      [False, True, False, False],
      [True, False, False, True],
    ]
  # A slot after it is a mistake.
  call = jax.jit(checkify.checkify(functools.partial(hidden_states, denoiser)))
  error, _ = call(params, ids, zeros, at)
  error.throw()
  error, _ = call(params, ids, zeros, at + 1)
  with pytest.raises(checkify.JaxRuntimeError, match=r'at must .*\[0, 4\]'):
    error.throw()


@pytest.mark.parametrize(
  ('policy', 'computed'),
  [
    # 16 tokens after 3, blocks of 8 in two calls each.
    (caches.prefix(), [19, 16, 19, 8]),
    (caches.dual(), [19, 8, 19, 8]),
  ],
)
def test_approximate_policies_compute_what_they_say(policy, computed):
  canvas = from_prompts([PROMPTS[0]], 16, VOCAB)
  denoiser, params = network()
  options = {
    'vocab': VOCAB, 'rule': rules.by_confidence(2), 'draw': GREEDY,
    'blocks': blocks_of(canvas, 8), 'audit_cache': True,
  }  # fmt: skip
  result = sampling.sample(
    denoiser, params, jax.random.key(0), canvas, cache=policy, **options
  )
  assert result.computed[:, 0].tolist() == computed
  error = np.asarray(result.cache_error[:, 0])
  assert (error[::2] < 1e-5).all()  # The first calls compute everything.
  assert (error[1::2] > 1e-3).all()
  assert not policy.is_exact


@pytest.mark.parametrize(
  ('interval', 'computed'), [(4, [9, 6, 5, 4, 9, 2]), (1, [9] * 6)]
)
def test_a_delayed_token_is_computed_once_more_and_then_stored(
  interval, computed
):
  """One token a call: all, then what is MASK and the one just written."""
  canvas = from_prompts([PROMPTS[0]], 6, VOCAB)
  denoiser, params = network()
  result = sampling.sample(
    denoiser, params, jax.random.key(0), canvas, vocab=VOCAB, draw=GREEDY,
    rule=rules.by_confidence(6), cache=caches.delayed(interval),
    audit_cache=True,
  )  # fmt: skip
  assert result.computed[:, 0].tolist() == computed
  error = np.asarray(result.cache_error[:, 0])
  assert (error[::interval] < 1e-5).all()
  assert interval == 1 or error.max() > 1e-3


def test_windows_inside_an_attention_block_cost_the_dual_cache_exactness():
  """A window that is the network's block leaves nothing out of date."""
  canvas = from_prompts([[5, 6, 7, 8]], 8, VOCAB)
  model = network(4)
  for length, is_exact in ((4, True), (2, False)):
    result = run(model, canvas, length, cache=caches.dual(), audit_cache=True)
    assert (np.nanmax(result.cache_error) < 1e-5) == is_exact


def refuse(model, message, rule=None, **options):
  denoiser, params = model
  canvas = from_prompts([[5]], 4, VOCAB)
  with pytest.raises(ValueError, match=message):
    sampling.sample(
      denoiser, params, jax.random.key(0), canvas, vocab=VOCAB,
      rule=rules.by_confidence(2) if rule is None else rule, **options,
    )  # fmt: skip


def test_policies_that_do_not_fit_are_refused():
  refuse(network(), 'attends by blocks', cache=caches.exact())
  timed = network(4)[0]._replace(time_free=False), params_of_all()
  refuse(timed, 'time_free', cache=caches.exact())
  refuse(network(), 'needs a cache policy', audit_cache=True)
  refuse(
    network(), 'takes tokens back', cache=caches.delayed(2),
    rule=rules.editing(rules.threshold(0.5), 0.5, 2),
  )  # fmt: skip
  stub = Denoiser(
    lambda params, cache, ids, **_: (jnp.zeros((1, 5, 16)), ()),
    lambda params, hidden: hidden,
  )
  refuse((stub, ()), 'keeps a cache', cache=caches.dual())
  with pytest.raises(ValueError, match='interval=0'):
    caches.delayed(0)


def test_a_context_that_slides_is_that_of_the_trained_length():
  """Of 16 slots a model of length 8 sees, in each block, the last 8."""
  model = short, params = network(4, max_length=8)
  ids = jnp.array([[5, 6, 7, 8, 9, 10, 11, 12, 3, 4, 5, 6, 13, 14, 15, 3]] * 2)
  far = ids.at[1, :4].set(2)  # Beyond the reach of two layers of two blocks.
  near = ids.at[1, 8:12].set(2)
  for changed, is_seen in ((far, False), (near, True)):
    hidden = np.asarray(hidden_states(short, params, changed)[0])[:, -4:]
    assert (np.abs(hidden[0] - hidden[1]).max() > 1e-3) == is_seen
  cached = run(model, CANVAS, 4, cache=caches.exact(), audit_cache=True)
  assert np.nanmax(cached.cache_error) < 1e-5
