"""LLaDA's decoder, token for token, on its own network.

The network of its repository, with tiny random weights, is written out here.
"""

import functools

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from mdlm_jax import blocks, guidance, predict, sampling, sampling_step
from mdlm_jax.canvas import Canvas, from_prompts, from_rows
from mdlm_jax.draws import Draw, DrawNoise, categorical, probability
from mdlm_jax.models.attention import attention, attention_mask, rotate
from mdlm_jax.rules import by_confidence
from mdlm_jax.schedules import linear
from mdlm_jax.vocab import Vocab

GOLDEN = golden_data.load('llada/generate')
WEIGHTS = safetensors.numpy.load_file(
  golden_data.FOLDER / 'llada' / 'network.safetensors'
)
HEADS, HEAD_DIM, MASK, EOS, EOT = 4, 12, 126, 121, 123
VOCAB = Vocab(size=128, mask_id=MASK, eos_ids=(EOS, EOT))
ROTARY_BASE = 500_000.0

matrix = functools.partial(jnp.matmul, precision='highest')


def normed(x, scale):
  return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


LAYER = (
  'attn_norm', 'q_proj', 'k_proj', 'v_proj', 'attn_out',
  'ff_norm', 'ff_proj', 'up_proj', 'ff_out',
)  # fmt: skip


def features(params, cache, ids, *, at, valid, positions, **unused):
  exponents = np.arange(0, HEAD_DIM, 2) / HEAD_DIM
  angles = positions[..., None] / ROTARY_BASE**exponents
  cos, sin = jnp.cos(angles), jnp.sin(angles)

  def block(x, w):
    hidden = normed(x, w['attn_norm'])
    q, k, v = (
      matrix(hidden, w[name].T).reshape(*ids.shape, HEADS, HEAD_DIM)
      for name in ('q_proj', 'k_proj', 'v_proj')
    )
    mixed = attention(
      rotate(q, cos, sin), rotate(k, cos, sin), v, attention_mask(valid)
    )
    x += matrix(mixed.reshape(x.shape), w['attn_out'].T)
    hidden = normed(x, w['ff_norm'])
    gate, up = (matrix(hidden, w[name].T) for name in ('ff_proj', 'up_proj'))
    return x + matrix(jax.nn.silu(gate) * up, w['ff_out'].T), None

  weight = 'model.transformer.{}.weight'.format
  layers = {
    name: jnp.stack([params[weight(f'blocks.{i}.{name}')] for i in (0, 1)])
    for name in LAYER
  }
  x, _ = jax.lax.scan(block, jnp.asarray(params[weight('wte')])[ids], layers)
  if at is not None:
    x = jnp.take_along_axis(x, at[..., None], 1)
  return normed(x, params[weight('ln_f')]), ()


def head(params, hidden):
  return matrix(hidden, params['model.transformer.ff_out.weight'].T)


NETWORK = predict.Denoiser(features, head, time_free=True)


def heavy(factors):
  """The network with some rows of its head enlarged."""
  name = 'model.transformer.ff_out.weight'
  rows = WEIGHTS[name].copy()
  for token, factor in factors.items():
    rows[token] *= np.float32(factor)
  return WEIGHTS | {name: rows}


EOS_HEAVY = heavy({EOS: 2.2, EOT: 2.0})
MASK_HEAVY = heavy({MASK: 9.0})


@pytest.mark.parametrize('case', ['logits_2', 'logits_pad_left'])
def test_the_network_is_theirs(case):
  golden = GOLDEN[case]
  ids = jnp.asarray(golden['input_ids'])
  valid = jnp.asarray(golden.get('attention_mask', np.ones(ids.shape)) == 1)
  hidden, _ = features(
    WEIGHTS, None, ids, at=None, valid=valid,
    positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
  )  # fmt: skip
  np.testing.assert_allclose(head(WEIGHTS, hidden), golden['logits'], atol=1e-4)


def padded_left(prompt, attention_mask, num_tokens):
  """Their canvas: prompts padded on the left, positions from the first slot."""
  batch, length = prompt.shape
  ids = np.full((batch, length + num_tokens), MASK, np.int32)
  ids[:, :length] = prompt
  slots = np.arange(length + num_tokens) >= length
  valid = np.ones(ids.shape, bool)
  valid[:, :length] = attention_mask == 1
  positions = np.arange(length + num_tokens)
  return Canvas(
    jnp.asarray(ids),
    jnp.broadcast_to(slots, ids.shape),
    jnp.asarray(valid),
    jnp.broadcast_to(positions, ids.shape),
  )


def generate(canvas, steps, length, *, params=WEIGHTS, cfg=0.0, **options):
  """Their decoder: greedy, by the probability of the token, in blocks."""
  windows = blocks.blocks_of(canvas, length)
  options = {
    'vocab': VOCAB,
    'draw': categorical(temperature=0.0, score=probability),
  } | options
  return sampling.sample(
    NETWORK, params, jax.random.key(0), canvas,
    rule=by_confidence(blocks.steps_per_block(steps, windows.count)),
    blocks=windows, trajectory=True,
    guidance=guidance.guide(canvas, VOCAB, cfg) if cfg else None,
    **options,
  )  # fmt: skip


def rows_of(*cases):
  """The rows of several cases as one batch; no row depends on another."""
  return {
    field: np.concatenate([GOLDEN[case][field] for case in cases], axis)
    for field, axis in [
      ('prompt', 0), ('ids', 0), ('model_inputs_per_step', 1)
    ]
  }  # fmt: skip


def assert_same_steps(result, golden):
  np.testing.assert_array_equal(result.ids, golden['ids'])
  inputs = golden['model_inputs_per_step']
  np.testing.assert_array_equal(result.trajectory[:-1], inputs[1:])


@pytest.mark.parametrize(
  'num_tokens, steps, block',
  [(16, 16, 16), (16, 8, 4), (16, 6, 8), (16, 2, 16), (12, 24, 6)],
)
def test_every_step_is_theirs(num_tokens, steps, block):
  name = f'gen_g{num_tokens}_s{steps}_b{block}_B'
  golden = rows_of(name + '1', name + '3')
  canvas = from_prompts(golden['prompt'].tolist(), num_tokens, VOCAB)
  result = generate(canvas, steps, block)
  assert_same_steps(result, golden)
  assert result.calls == steps


@pytest.mark.parametrize(
  'case, num_tokens, steps, block, cfg',
  [
    ('gen_cfg0.5', 16, 8, 8, 0.5),
    ('gen_cfg1.5', 16, 8, 8, 1.5),
    ('gen_leftpad', 12, 6, 6, 0.0),
    ('gen_leftpad_cfg', 12, 6, 12, 0.8),
  ],
)
def test_guidance_and_padding_are_theirs(case, num_tokens, steps, block, cfg):
  golden = GOLDEN[case]
  canvas = padded_left(golden['prompt'], golden['attention_mask'], num_tokens)
  result = generate(canvas, steps, block, cfg=cfg)
  assert_same_steps(result, golden)
  assert result.calls == (2 * steps if cfg else steps)


def test_padding_on_either_side_gives_the_same_tokens():
  golden = GOLDEN['gen_leftpad']
  prompts = [
    prompt[valid == 1].tolist()
    for prompt, valid in zip(
      golden['prompt'], golden['attention_mask'], strict=True
    )
  ]
  result = generate(from_prompts(prompts, 12, VOCAB), 6, 6)
  for b, prompt in enumerate(prompts):
    answer = result.ids[b, len(prompt) : len(prompt) + 12]
    np.testing.assert_array_equal(answer, golden['ids'][b, -12:])


def test_a_forbidden_eos_is_theirs():
  golden = GOLDEN['gen_logits_eos_inf']
  vocab = Vocab(size=128, mask_id=MASK, forbidden_ids=(EOS,))
  canvas = from_prompts(golden['prompt'].tolist(), 12, vocab)
  result = generate(canvas, 6, 6, params=EOS_HEAVY, vocab=vocab)
  assert_same_steps(result, golden)


def test_eos_kept_for_last_is_the_definition_and_not_theirs():
  """They zero the confidence of a proposed EOS, and only without noise."""
  golden = GOLDEN['gen_confidence_eos_eot_inf']
  canvas = from_prompts(golden['prompt'].tolist(), 12, VOCAB)

  def eos_before_others(ids_of_steps):
    """Pairs of slots of a block in which EOS came first and a word later."""
    written = np.argmax(ids_of_steps != MASK, 0)
    final, count = ids_of_steps[-1], 0
    for row, when in zip(final, written, strict=True):
      for block in (slice(6, 12), slice(12, 18)):
        ends = np.isin(row[block], (EOS, EOT))
        first = when[block][:, None] < when[block][None]
        count += (first & ends[:, None] & ~ends[None]).sum()
    return count

  result = generate(canvas, 6, 6, params=EOS_HEAVY, eos_last=True)
  assert np.isin(result.ids, (EOS, EOT)).any()
  assert not (np.asarray(result.ids) == MASK).any()
  assert eos_before_others(np.asarray(result.trajectory)) == 0
  free = generate(canvas, 6, 6, params=EOS_HEAVY)
  assert eos_before_others(np.asarray(free.trajectory)) > 0


@pytest.mark.parametrize(
  'case, block', [('gen_mask_in_prompt', 8), ('gen_mask_in_prompt_2blocks', 4)]
)
def test_a_mask_in_the_prompt_is_kept_and_the_answer_is_complete(case, block):
  """They write into the prompt and leave MASK in the answer."""
  golden = GOLDEN[case]
  prompt = golden['prompt']
  theirs = golden['ids']
  assert (theirs[:, : prompt.shape[1]] != prompt).any()
  assert (theirs == MASK).any()
  canvas = from_prompts(prompt.tolist(), 8, VOCAB)
  result = generate(canvas, len(golden['model_inputs_per_step']), block)
  np.testing.assert_array_equal(result.ids[:, : prompt.shape[1]], prompt)
  assert not (result.ids[:, prompt.shape[1] :] == MASK).any()


def test_holes_in_the_prompt_are_filled_when_they_are_open():
  prompt = GOLDEN['gen_mask_in_prompt']['prompt']
  rows = [[None if v == MASK else v for v in row] for row in prompt.tolist()]
  canvas = from_rows([[*row, *[None] * 8] for row in rows], VOCAB)
  result = generate(canvas, 4, 16)
  assert result.calls == 4
  assert not (result.ids == MASK).any()


def test_mask_is_never_predicted():
  """They reveal MASK as MASK, which uses up the quota of the call."""
  golden = GOLDEN['gen_mask_predicted']
  assert (golden['ids'] == MASK).any()
  canvas = from_prompts(golden['prompt'][:2].tolist(), 12, VOCAB)
  result = generate(canvas, 6, 6, params=MASK_HEAVY)
  left = (np.asarray(result.trajectory) == MASK).sum(2)
  np.testing.assert_array_equal(left, np.array([[10, 8, 6, 4, 2, 0]] * 2).T)


@functools.partial(jax.jit, static_argnums=0)
def one_call(static, inputs, noise, step, state, window):
  noise = DrawNoise(noise, noise, noise)
  proposal, state = sampling_step.propose(
    static, inputs, noise, step, state, window
  )
  return sampling_step.apply_rule(
    static, inputs, (), step, proposal, state, window
  )


def replay(canvas, propose, noise_of_steps, length):
  """The calls of the sampler, with recorded noise `[steps, B, L, ...]`."""
  windows = blocks.blocks_of(canvas, length)
  per_block = len(noise_of_steps) // windows.count
  static = sampling_step.Decoding(
    NETWORK, VOCAB, by_confidence(per_block), Draw((), propose, ()), linear()
  )
  inputs = sampling_step.Inputs(WEIGHTS, canvas)
  ids, finite = canvas.ids, jnp.ones(len(canvas.ids), bool)
  rows = jnp.arange(len(ids))[:, None]
  seen = []
  for block in range(windows.count):
    window = blocks.window_of(windows, block, canvas)
    state = sampling_step.start_window(static, inputs, (), ids, finite, window)
    for step in range(per_block):
      seen.append(state.ids)
      noise = jnp.asarray(noise_of_steps[block * per_block + step])
      noise = noise[rows, window.slots]
      state = one_call(static, inputs, noise, step, state, window)
    ids = state.ids
  return ids, jnp.stack(seen)


def test_replayed_temperature_noise_is_theirs():
  golden = GOLDEN['gen_temperature_0.7']

  def propose(noise, prediction, context):
    ids = jnp.argmax(prediction.logits + noise.entry, -1)
    return ids, probability(prediction, ids, noise)

  # exp(logits) / (-log u)^T is largest where logits - T log(-log u) is.
  noise = -0.7 * np.log(-np.log(golden['uniform_per_step']))
  canvas = from_prompts(golden['prompt'].tolist(), 8, VOCAB)
  ids, seen = replay(canvas, propose, np.float32(noise), 4)
  np.testing.assert_array_equal(ids, golden['ids'])
  np.testing.assert_array_equal(seen, golden['model_inputs_per_step'])


def test_replayed_random_order_is_theirs():
  golden = GOLDEN['gen_random_remasking']

  def propose(noise, prediction, context):
    return jnp.argmax(prediction.logits, -1), noise.order

  canvas = from_prompts(golden['prompt'].tolist(), 8, VOCAB)
  ids, seen = replay(canvas, propose, golden['uniform_per_step'], 4)
  np.testing.assert_array_equal(ids, golden['ids'])
  np.testing.assert_array_equal(seen, golden['model_inputs_per_step'])
