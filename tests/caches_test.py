"""Caches: what is computed, what is exact, and how far the others are off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@functools.cache
def network(attention_block=None, **options):
  config = transformer.TransformerConfig(
    vocab_size=16, num_layers=2, model_dim=16, num_heads=2, mlp_dim=24,
    attention_block=attention_block, **{'max_length': 32} | options,
  )  # fmt: skip
  generator = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: leaf + 0.4 * generator.standard_normal(leaf.shape, np.float32),
    transformer.init(config, jax.random.key(0)),
  )
  return transformer.denoiser(config), params


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


# Nothing to say about block 1 of the second row, and nothing opens it.
GIVEN = [*[None] * 4, 3, 4, 5, 6, *[None] * 8]


@pytest.mark.parametrize(
  ('attention_block', 'length', 'options'),
  [
    (4, 4, {}),
    (4, 2, {'shifted': True}),  # Two windows in each block of the network.
    (2, 4, {}),  # Two of its blocks in each window.
  ],
)
def test_the_exact_cache_decodes_as_no_cache_does(
  attention_block, length, options
):
  model = network(attention_block, **options)
  canvas = from_prompts(PROMPTS, 11, VOCAB)
  plain = run(model, canvas, length)
  cached = run(model, canvas, length, cache=caches.exact(), audit_cache=True)
  assert_same_decoding(plain, cached)
  assert np.nanmax(cached.cache_error) < 1e-5
  # Never more than the window and what changed since; far less than all.
  assert cached.computed.max() <= 2 * max(attention_block, length) + 1
  assert plain.computed is None and plain.cache_error is None


def test_windows_without_a_call_are_stored_when_they_are_seen():
  canvas = from_rows([GIVEN, GIVEN], VOCAB)
  model, options = network(4), {'cache': caches.exact(), 'audit_cache': True}
  assert_same_decoding(run(model, canvas, 4), run(model, canvas, 4, **options))


@pytest.mark.parametrize(
  ('rule', 'options'),
  [
    (rules.editing(rules.threshold(0.5), 0.2, 4), {'stop_at_eos': True}),
    (
      rules.kernel((1.0, 0.9, 0.5, 0.0), cached=True),
      {'draw': draws.categorical(), 'guided': True},
    ),
  ],
)
def test_one_loop_with_and_without_the_exact_cache(rule, options):
  model = network(4)
  canvas = from_prompts(PROMPTS, 11, VOCAB)
  options = dict(options)
  if options.pop('guided', False):
    options['guidance'] = guidance.guide(canvas, VOCAB, 1.5)
  plain = run(model, canvas, 4, rule, **options)
  cached = run(model, canvas, 4, rule, cache=caches.exact(), **options)
  assert_same_decoding(plain, cached)


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
  _, fresh = denoiser.features(
    params, None, clean[:, :8], at=None, step=0, t=jnp.zeros(1),
    valid=canvas.valid[:, :8], positions=canvas.positions[:, :8], segments=None,
  )  # fmt: skip
  for ours, theirs in zip(
    jax.tree.leaves(stored.cache), jax.tree.leaves(fresh), strict=True
  ):
    np.testing.assert_allclose(ours[:, :, :8], theirs, atol=1e-5)


def test_what_is_not_stored_yet_is_never_seen():
  denoiser, params = network(4)
  ids = jnp.array([[5, 6, 7, 8, 9, 10, 11, 12, 1, 1, 1, 1, 1, 1, 1, 1]])
  inputs = {'step': 0, 't': jnp.zeros(1), 'segments': None}
  ask = jax.jit(denoiser.features)

  def block(length, poison):
    cut = {
      'valid': jnp.ones((1, length), bool),
      'positions': jnp.arange(length)[None],
    }
    _, cache = ask(params, None, ids[:, :length], at=None, **cut, **inputs)
    # Slots 4 to 7 are computed, those from 8 on are not there yet.
    cache = jax.tree.map(lambda leaf: leaf.at[:, :, 8:].set(poison), cache)
    return ask(
      params, cache, ids[:, :length], at=jnp.arange(4, 8)[None], **cut, **inputs
    )[0]

  np.testing.assert_allclose(block(16, 1e4), block(8, 0.0), atol=1e-5)


def test_a_slot_that_is_none_stores_nothing():
  denoiser, params = network()
  ids = jnp.array([[5, 6, 7, 8], [9, 10, 11, 12]])
  cut = {
    'step': 0, 't': jnp.zeros(2), 'segments': None,
    'valid': jnp.ones((2, 4), bool),
    'positions': jnp.broadcast_to(jnp.arange(4), (2, 4)),
  }  # fmt: skip
  ask = jax.jit(denoiser.features)
  _, cache = ask(params, None, ids, at=None, **cut)
  zeros = jax.tree.map(jnp.zeros_like, cache)
  _, after = ask(params, zeros, ids, at=jnp.array([[1, 4], [0, 3]]), **cut)
  for leaf in jax.tree.leaves(after):
    written = np.asarray(leaf != 0).any((0, 3, 4))
    assert written.tolist() == [
      [False, True, False, False],
      [True, False, False, True],
    ]


@pytest.mark.parametrize(
  ('policy', 'computed'),
  [
    # 16 tokens after 3, blocks of 8 in two calls each.
    (caches.prefix(), [19, 16, 19, 8]),
    (caches.dual(), [19, 8, 19, 8]),
    (caches.delayed(1), [19, 19, 19, 19]),
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
  if policy is caches.delayed(1):
    assert (error < 1e-5).all()
  else:
    assert (error[1::2] > 1e-3).all()
  assert not policy.is_exact


def test_a_delayed_token_is_computed_once_more_and_then_stored():
  """One token a call: all, then what is MASK and the one just written."""
  canvas = from_prompts([PROMPTS[0]], 6, VOCAB)
  denoiser, params = network()
  result = sampling.sample(
    denoiser, params, jax.random.key(0), canvas, vocab=VOCAB, draw=GREEDY,
    rule=rules.by_confidence(6), cache=caches.delayed(4),
  )  # fmt: skip
  assert result.computed[:, 0].tolist() == [9, 6, 5, 4, 9, 2]


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
  refuse(network(4, time_conditioning=True), 'time_free', cache=caches.exact())
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
  canvas = from_prompts([PROMPTS[0], PROMPTS[1][:3]], 13, VOCAB)
  short, params = network(4, max_length=8)
  ids = jnp.array([[5, 6, 7, 8, 9, 10, 11, 12, 3, 4, 5, 6, 13, 14, 15, 3]] * 2)

  def last_block(denoiser, ids):
    return denoiser.features(
      params, None, ids, at=None, step=0, t=jnp.zeros(2), segments=None,
      valid=jnp.ones(ids.shape, bool),
      positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
    )[0][:, -4:]  # fmt: skip

  far = ids.at[1, :4].set(2)  # Beyond the reach of two layers of two blocks.
  near = ids.at[1, 8:12].set(2)
  for changed, is_seen in ((far, False), (near, True)):
    hidden = np.asarray(last_block(short, changed))
    assert (np.abs(hidden[0] - hidden[1]).max() > 1e-3) == is_seen
  model = short, params
  plain = run(model, canvas, 4)
  assert_same_decoding(plain, run(model, canvas, 4, cache=caches.exact()))
