"""MDLM and BD3-LM: the adaLN network, its cache, and both of their samplers."""

import dataclasses
import functools
import json
import shutil

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import script_runner

from mdlm_jax import draws, predict, rules, sampling_step, schedules
from mdlm_jax.blocks import blocks_of, window_of
from mdlm_jax.canvas import from_prompts
from mdlm_jax.models import directory, families, layers, param_tree, transformer
from mdlm_jax.rules.reverse_kernel import HitNoise

FOLDERS = {
  'mdlm': golden_data.FOLDER / 'mdlm_dit', 'bd3lm': golden_data.FOLDER / 'bd3lm'
}  # fmt: skip
GOLDEN = {
  name: golden_data.load(f'{path.name}/network')
  for name, path in FOLDERS.items()
}
MODELS = {name: directory.load(path) for name, path in FOLDERS.items()}
NUM_TOKENS, MASK, BLOCK = 98, 97, 4
# Both are published without, and can be asked with it.
TIMED = dataclasses.replace(
  MODELS['mdlm'].config, time_conditioning=True, time_input='sigma'
)


@pytest.fixture(autouse=True)
def exact_products():
  with jax.default_matmul_precision('highest'):
    yield


def time_of(sigma):
  """Where sigma = -log(1 - (1 - 1e-3) t)."""
  return -np.expm1(-np.float64(sigma)) / (1 - 1e-3)


def inputs_of(ids, t=1.0):
  batch, length = np.shape(ids)
  return {
    'step': 0,
    't': jnp.broadcast_to(jnp.asarray(t, jnp.float32), batch),
    'valid': jnp.ones((batch, length), bool),
    'positions': jnp.broadcast_to(jnp.arange(length), (batch, length)),
    'segments': None,
  }


@functools.partial(jax.jit, static_argnames='config')
def ask(config, params, ids, inputs, at=None, cache=None):
  """Hidden states and logits at some slots or all, and the cache."""
  network = transformer.denoiser(config)
  hidden, cache = network.features(params, cache, ids, at=at, **inputs)
  return hidden, network.head(params, hidden), cache


def logits(params, config, ids, t=1.0):
  found = ask(config, params, jnp.asarray(ids), inputs_of(ids, t))[1]
  return np.asarray(found)[..., :NUM_TOKENS]


def test_logits_of_mdlm_with_the_noise_level_and_without():
  model, golden = MODELS['mdlm'], GOLDEN['mdlm']
  plain, timed = golden['backbone_0_zero'], golden['backbone_0_varied']
  # Without it they read the level 0, whatever t is.
  np.testing.assert_allclose(
    logits(model.params, model.config, plain['z_t']), plain['logits'], atol=1e-4
  )
  t = time_of(timed['sigma'])
  found = logits(model.params, TIMED, timed['z_t'], t)
  np.testing.assert_allclose(found, timed['logits'], atol=1e-4)
  found = logits(model.params, model.config, timed['z_t'], t)
  assert np.abs(found - timed['logits']).max() > 1
  assert model.denoiser.time_free and not model.config.time_conditioning
  assert not transformer.denoiser(TIMED).time_free


def test_the_level_of_a_time_is_that_of_its_own_schedule():
  golden = GOLDEN['mdlm']['subs_logprobs_tc1_0']
  found = logits(MODELS['mdlm'].params, TIMED, golden['z_t'], golden['t'])
  masked = golden['z_t'] == MASK
  theirs = golden['log_probs'][masked][:, :MASK]
  ours = jax.nn.log_softmax(found[masked][:, :MASK])
  np.testing.assert_allclose(ours, theirs, atol=1e-4)
  assert MODELS['mdlm'].schedule is schedules.log_linear()
  assert MODELS['bd3lm'].schedule is schedules.linear()


def test_the_embedding_of_the_noise_level():
  golden = GOLDEN['mdlm']['time_embedding']
  np.testing.assert_allclose(
    layers.waves(jnp.asarray(golden['sigma'])), golden['sinusoid'], atol=1e-5
  )
  outer = transformer._outer(TIMED, MODELS['mdlm'].params)
  t = jnp.asarray(time_of(golden['sigma']), jnp.float32)
  np.testing.assert_allclose(
    outer.embed_time(t), golden['conditioning_after_silu'], atol=1e-4
  )


def test_the_stream_after_each_block():
  golden, params = GOLDEN['mdlm']['hidden_states'], MODELS['mdlm'].params
  stream = golden['hidden_states']
  np.testing.assert_array_equal(params['embedding'][golden['z_t']], stream[0])
  t = time_of(golden['sigma'])
  outer = transformer._outer(TIMED, params)
  conditioning = outer.embed_time(jnp.asarray(t, jnp.float32)[:, None])
  for count in (1, 2):
    # Gates of 0 let the stream pass.
    passing = jax.tree.map(
      lambda x, n=count: x.at[n:].set(0), params['blocks']['modulation']
    )
    blocks = params['blocks'] | {'modulation': passing}
    hidden, *_ = ask(
      TIMED, params | {'blocks': blocks}, jnp.asarray(golden['z_t']),
      inputs_of(golden['z_t'], t),
    )  # fmt: skip
    np.testing.assert_allclose(
      hidden, outer.last_norm(stream[count], conditioning), atol=1e-4
    )


def test_bd3lm_attends_by_blocks():
  model, golden = MODELS['bd3lm'], GOLDEN['bd3lm']['logits_sample_mode_4blocks']
  found = logits(model.params, model.config, golden['x'])
  np.testing.assert_allclose(found, golden['logits'], atol=1e-4)
  assert model.denoiser.attention_block == BLOCK
  changed = golden['x'].copy()
  changed[:, 6] = (changed[:, 6] + 1) % MASK
  moved = np.abs(logits(model.params, model.config, changed) - found).max(-1)
  assert (moved[:, :BLOCK] == 0).all() and (moved[:, BLOCK:] > 1e-4).all()


def test_noisy_canvases_beside_their_clean_text():
  """Both halves are modulated by the level of the noisy one."""
  model = MODELS['bd3lm']
  golden = GOLDEN['bd3lm']['logits_train_time_conditioning']
  config = dataclasses.replace(
    model.config, time_conditioning=True, time_input='sigma'
  )
  network = transformer.denoiser(config)
  inputs = inputs_of(golden['x_t'], time_of(golden['sigma']))
  hidden = jax.jit(network.paired)(
    model.params, golden['x_t'], golden['x_0'], t=inputs['t'],
    valid=inputs['valid'], positions=None, segments=None,
  )  # fmt: skip
  found = network.head(model.params, hidden)[..., :NUM_TOKENS]
  np.testing.assert_allclose(found, golden['logits'], atol=1e-4)


def empty_cache(model, batch):
  """Of a canvas of which nothing has been computed."""
  ids = jnp.full((batch, 16), MASK)
  cache = jax.eval_shape(
    functools.partial(ask, model.config), model.params, ids, inputs_of(ids)
  )[2]
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)


def test_stored_keys_and_values_of_bd3lm():
  model, golden = MODELS['bd3lm'], GOLDEN['bd3lm']['kv_cache_logits']
  clean = np.pad(golden['clean_tokens'], ((0, 0), (0, 4)), constant_values=MASK)
  cache = empty_cache(model, 2)
  for block, theirs in enumerate(golden['block_logits']):
    at = jnp.tile(BLOCK * block + jnp.arange(BLOCK), (2, 1))
    noisy = clean.copy()
    noisy[:, BLOCK * block : BLOCK * block + BLOCK : 2] = MASK

    def call(ids, at=at, cache=cache):
      ids, inputs = jnp.asarray(ids), inputs_of(ids)
      return ask(model.config, model.params, ids, inputs, at, cache)

    found = call(noisy)[1]
    np.testing.assert_allclose(found[..., :NUM_TOKENS], theirs, atol=1e-4)
    cache = call(clean)[2]


@pytest.mark.parametrize('name', FOLDERS)
def test_swapped_tensors_of_equal_shape_do_not_go_unnoticed(name):
  model = MODELS[name]
  case, ids = {
    'mdlm': ('backbone_0_zero', 'z_t'),
    'bd3lm': ('logits_sample_mode_4blocks', 'x'),
  }[name]
  golden = GOLDEN[name][case]
  leaves = param_tree.flat(model.params)
  halves = leaves['blocks/modulation/bias'].shape[1] // 2
  swaps = [
    {'blocks/query/kernel': leaves['blocks/key/kernel'],
     'blocks/key/kernel': leaves['blocks/query/kernel']},
    {'blocks/attention_norm/scale': leaves['blocks/mlp_norm/scale'],
     'blocks/mlp_norm/scale': leaves['blocks/attention_norm/scale']},
    {'embedding': leaves['head'], 'head': leaves['embedding']},
    # The vectors of attention and of the MLP; shift and scale of the last norm.
    {k: jnp.roll(leaves[k], halves, -1)
     for k in ('blocks/modulation/bias', 'blocks/modulation/kernel')},
    {k: jnp.roll(leaves[k], 48, -1)
     for k in ('modulation/bias', 'modulation/kernel')},
  ]  # fmt: skip
  for swapped in swaps:
    params = param_tree.nested(leaves | swapped)
    found = logits(params, model.config, golden[ids])
    assert np.abs(found - golden['logits']).max() > 1e-2, list(swapped)


@pytest.mark.parametrize('name', FOLDERS)
def test_every_tensor_goes_back_into_the_file_bit_for_bit(name):
  content = json.loads((FOLDERS[name] / 'config.json').read_text())
  layout, leaves = (
    families.layout(content),
    param_tree.flat(MODELS[name].params),
  )
  tensors = safetensors.numpy.load_file(FOLDERS[name] / 'model.safetensors')
  for key, mapping in layout.tensors.items():
    parts = [leaves[leaf][mapping.index] for leaf in mapping.leaves]
    np.testing.assert_array_equal(mapping.to_file(*parts), tensors.pop(key))
  for key, buffer in layout.buffers.items():
    assert buffer.value.dtype == np.float32
    np.testing.assert_array_equal(buffer.value, tensors.pop(key))
  assert not tensors


def copied(name, path, changes=None, drop=(), tensors=None):
  shutil.copytree(FOLDERS[name], path, dirs_exist_ok=True)
  content = json.loads((path / 'config.json').read_text()) | (changes or {})
  (path / 'config.json').write_text(json.dumps(content))
  kept = safetensors.numpy.load_file(path / 'model.safetensors')
  kept = {k: v for k, v in kept.items() if not any(d in k for d in drop)}
  safetensors.numpy.save_file(
    kept | (tensors or {}), path / 'model.safetensors'
  )
  return path


def test_without_adaln_the_norms_are_as_they_are(tmp_path):
  """As with vectors of shift 0, scale 0 and gate 1, whatever the level."""
  plain = directory.load(
    copied('bd3lm', tmp_path, {'adaln': False}, ('adaLN', 'sigma_map'))
  )
  assert 'modulation' not in plain.params
  golden, model = GOLDEN['bd3lm'], MODELS['bd3lm']
  leaves = param_tree.flat(model.params)
  leaves |= {k: 0 * v for k, v in leaves.items() if 'modulation' in k}
  gates = jnp.repeat(jnp.array([0.0, 0, 1, 0, 0, 1]), 48)
  leaves['blocks/modulation/bias'] += gates
  ids = golden['logits_sample_mode_4blocks']['x']
  np.testing.assert_allclose(
    logits(plain.params, plain.config, ids),
    logits(param_tree.nested(leaves), model.config, ids),
    atol=1e-5,
  )


def test_tensors_that_are_no_parameters(tmp_path):
  buffers = 'inv_freq', 'sampling_eps'
  assert directory.load(copied('bd3lm', tmp_path, drop=buffers)).params
  # Read by nobody once it is trained: its range of noise levels.
  other = {'sampling_eps_min': np.array(0.5, np.float32)}
  assert directory.load(copied('bd3lm', tmp_path, tensors=other)).params
  other = {'backbone.rotary_emb.inv_freq': np.ones(6, np.float32)}
  copied('bd3lm', tmp_path, tensors=other)
  with pytest.raises(ValueError, match='inv_freq has values other than config'):
    directory.load(tmp_path)
  copied(
    'mdlm', tmp_path, tensors={'sampling_eps_min': np.array(0.5, np.float32)}
  )
  with pytest.raises(ValueError, match='unused sampling_eps_min'):
    directory.load(tmp_path)


@pytest.mark.parametrize(
  'name, changes, message',
  [
    ('mdlm', {'cond_dim': 32}, r'adaLN_modulation.weight is \[288, 24\]'),
    ('bd3lm', {'causal': True}, 'causal=True is not supported'),
    ('bd3lm', {'time_conditioning': True}, 'time_conditioning=True is not'),
    ('bd3lm', {'adaln': False}, 'unused backbone.blocks.0.adaLN_modulation'),
    # Not a network in which every slot sees all others.
    ('bd3lm', {'block_size': None}, 'block_size=None must be an integer'),
  ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, name, changes, message):
  with pytest.raises(ValueError, match=message):
    directory.load(copied(name, tmp_path, changes))


def test_roles_of_the_ids():
  for model in MODELS.values():
    # Rows of the tables up to a multiple of 64 have no token.
    assert (model.vocab.size, model.vocab.mask_id) == (128, MASK)
    assert model.vocab.forbidden_ids == tuple(range(NUM_TOKENS, 128))
    assert model.config.max_length == 16
  content = {'model_type': 'mdlm', 'architectures': None}
  old = json.loads((FOLDERS['mdlm'] / 'config.json').read_text())
  # As released: GPT-2's vocabulary and one more row.
  layout = families.layout({**old, **content, 'vocab_size': 50_258})
  assert (layout.mask_id, layout.config.vocab_size) == (50_257, 50_304)


# The samplers: their recorded draws, our prediction, rule and commit.


@functools.partial(jax.jit, static_argnames='decoding')
def predicted(decoding, inputs, state, window, cache=None):
  canvas = inputs.canvas
  return predict.predict(
    decoding.denoiser, inputs.params, cache, state.ids, vocab=decoding.vocab,
    t=state.t, valid=canvas.valid, positions=canvas.positions, at=window.slots,
  )  # fmt: skip


@functools.partial(jax.jit, static_argnames='decoding')
def applied(decoding, inputs, noise, step, candidate_ids, prediction, state,
            window):  # fmt: skip
  proposal = rules.Proposal(
    candidate_ids, jnp.zeros(candidate_ids.shape), prediction.logits,
    prediction.log_z,
  )  # fmt: skip
  return sampling_step.apply_rule(
    decoding, inputs, noise, step, proposal, state, window
  )


@functools.partial(jax.jit, static_argnames='decoding')
def started(decoding, inputs, noise, ids, window):
  return sampling_step.start_window(
    decoding, inputs, noise, ids, jnp.ones(len(ids), bool), window
  )


def decoding_of(name, rule, canvas):
  model = MODELS[name]
  decoding = sampling_step.Decoding(
    model.denoiser, model.vocab, rule, draws.categorical(), model.schedule
  )
  return decoding, sampling_step.Inputs(model.params, canvas)


def probabilities(prediction):
  p = np.exp(
    np.float64(prediction.logits) - np.float64(prediction.log_z)[..., None]
  )
  return p[..., :MASK] / p[..., :MASK].sum(-1, keepdims=True)


def raced(p, uniforms):
  """Candidates, and the uniform by which one comes before MASK.

  They draw once among the tokens and MASK: the first arrival of exponential
  waiting times with rates p (1 - stay) and stay. The first of the tokens is the
  candidate, and its share of both waiting times a uniform of its own.
  """
  waits = 1e-10 - np.log(np.float64(uniforms) + 1e-10)
  arrivals = waits[..., :MASK] / np.maximum(p, 1e-300)
  first = arrivals.min(-1)
  return arrivals.argmin(-1).astype(np.int32), first / (
    first + waits[..., MASK]
  )


def test_mdlm_writes_the_tokens_of_its_sampler():
  golden, model = GOLDEN['mdlm']['sample_ddpm_6'], MODELS['mdlm']
  steps = len(golden['uniform_per_step'])
  # Its last call, at eps, takes the likeliest tokens.
  grid = (*np.linspace(1, 1e-5, steps + 1).tolist(), 0.0)
  canvas = from_prompts([[], []], 16, model.vocab)
  decoding, inputs = decoding_of(
    'mdlm', rules.kernel(grid, model.schedule), canvas
  )
  window = window_of(None, 0, canvas)
  state = started(decoding, inputs, np.ones((2, 16)), canvas.ids, window)
  uniforms = [*golden['uniform_per_step'], np.full((2, 16, 98), 0.5)]
  for step, u in enumerate(uniforms):
    np.testing.assert_array_equal(state.ids, golden['network_inputs'][step])
    prediction, _ = predicted(decoding, inputs, state, window)
    drawn, uniform = raced(probabilities(prediction), u)
    state = applied(
      decoding, inputs, jnp.asarray(uniform, jnp.float32), jnp.int32(step),
      jnp.asarray(drawn), prediction, state, window,
    )  # fmt: skip
  np.testing.assert_array_equal(state.ids, golden['ids'])


def their_nucleus(p, mass):
  """Tokens while their sum is at most `mass`; the first always."""
  order = np.argsort(-p, -1, kind='stable')
  ranked = np.take_along_axis(p, order, -1)
  kept = ranked.cumsum(-1) <= mass
  kept[..., 0] = True
  filtered = np.zeros_like(p)
  np.put_along_axis(filtered, order, ranked * kept, -1)
  return filtered / filtered.sum(-1, keepdims=True)


def block_by_block(rule, one_call, init_noise, cache=None):
  """The canvas, calls and levels of BD3-LM's sampler after a first token.

  `one_call(call, step, masked [4], p [4, V]) -> candidates [4], noise, step`.
  With a cache, a call more stores each finished block.
  """
  model = MODELS['bd3lm']
  canvas = from_prompts([[1]], 15, model.vocab)
  decoding, inputs = decoding_of('bd3lm', rule, canvas)
  blocks = blocks_of(canvas, BLOCK, aligned=True)
  stored = 0
  ids, levels = canvas.ids, []
  for block in range(blocks.count):
    window = window_of(blocks, jnp.int32(block), canvas)
    state = started(decoding, inputs, init_noise(len(levels)), ids, window)
    step = 0
    while (masked := np.asarray(state.ids[0, window.slots[0]]) == MASK).any():
      prediction, _ = predicted(decoding, inputs, state, window, cache)
      drawn, noise, index = one_call(
        len(levels), step, masked, probabilities(prediction)[0]
      )
      levels.append(float(state.t[0]))
      state = applied(
        decoding, inputs, jax.tree.map(lambda x: jnp.asarray(x)[None], noise),
        jnp.int32(index), jnp.asarray(drawn)[None], prediction, state, window,
      )  # fmt: skip
      step += 1
    ids = state.ids
    if cache is not None:
      cache = predicted(decoding, inputs, state, window, cache)[1]
      stored += 1
  return np.asarray(ids), len(levels) + stored, levels


@pytest.mark.parametrize(
  'case, mass',
  [('', 1), ('_kv', 1), ('_nucleus', 0.9)],
)
def test_bd3lm_writes_the_tokens_of_its_first_hitting_sampler(case, mass):
  golden = GOLDEN['bd3lm']['sample_first_hitting']
  times = np.append(golden['time_uniform'], 0.5).astype(np.float32)[:, None]

  def hit(call, masked):
    order = np.ones(BLOCK, np.float32)
    if masked.any():
      order[np.flatnonzero(masked)[golden['index_draw'][call]]] = 0
    return order

  def one_call(call, step, masked, p):
    # Our nucleus keeps the token that crosses its mass, theirs does not.
    p = p if mass == 1 else their_nucleus(p, mass)
    u = golden['gumbel_uniform_per_update'][call, 0]
    # The time is that of the call after this one.
    return raced(p, u)[0], HitNoise(hit(call, masked), times[call + 1]), step

  def init_noise(call):
    return HitNoise(np.ones((1, BLOCK), np.float32), times[call][None])

  cache = empty_cache(MODELS['bd3lm'], 1) if case == '_kv' else None
  ids, calls, levels = block_by_block(
    rules.first_hitting(), one_call, init_noise, cache
  )
  theirs = GOLDEN['bd3lm']['sample_first_hitting' + case]
  np.testing.assert_array_equal(ids, theirs['ids'])
  assert calls == theirs.get('n_forward_calls', 15)
  np.testing.assert_allclose(levels, golden['times'], rtol=1e-5)


def test_bd3lm_writes_the_tokens_of_its_ancestral_sampler():
  golden = GOLDEN['bd3lm']['sample_ddpm']
  uniforms = iter(golden['gumbel_uniform_per_update'])
  # Its step is 1/8, its times are those of seven: from 1 - i/7 to that - 1/8.
  pairs = [(1 - i / 7, 1 - i / 7 - 1 / 8) for i in range(7)]
  grid = (*(level for pair in pairs for level in pair), 0.0)

  def one_call(call, step, masked, p):
    drawn, uniform = raced(p, next(uniforms)[0])
    return drawn, uniform.astype(np.float32), 2 * step

  ids, _, _ = block_by_block(
    rules.kernel(grid), one_call, lambda call: np.ones((1, BLOCK))
  )
  np.testing.assert_array_equal(ids, golden['ids'])
  assert next(uniforms, None) is None


@pytest.mark.parametrize('name, block', [('mdlm', 16), ('bd3lm', BLOCK)])
def test_the_script_writes_the_surest_tokens_one_at_a_time(capsys, name, block):
  """Of the open block; in blocks where the network attends by blocks."""
  model, ids = MODELS[name], np.array([[1, 5, *[MASK] * 14]] * 2)
  for _ in range(14):
    found = logits(model.params, model.config, ids)[0, :, :MASK]
    masked = np.flatnonzero(ids[0] == MASK)
    masked = masked[masked // block == masked[0] // block]
    p = np.asarray(jax.nn.softmax(found[masked]))
    slot = p.max(-1).argmax()
    ids[:, masked[slot]] = p[slot].argmax()
  script_runner.run(
    'sample.py', f'--checkpoint={FOLDERS[name]}', '--prompt_ids=1,5',
    '--temperature=0', '--json',
  )  # fmt: skip
  record = json.loads(capsys.readouterr().out)
  assert record['ids'] == ids[0].tolist()
  # Two of the steps of the first block find nothing to write.
  assert record['calls'] == {'mdlm': 14, 'bd3lm': 16}[name]
