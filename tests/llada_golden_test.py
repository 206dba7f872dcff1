"""LLaDA's decoder, token for token, on its own network with tiny weights."""

import functools

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import (
  blocks,
  guidance,
  sampling,
  sampling_state,
  sampling_step,
)
from mdlm_jax.canvas import Canvas, from_prompts, from_rows
from mdlm_jax.draws import Draw, DrawNoise, categorical, probability
from mdlm_jax.models import directory
from mdlm_jax.rules import by_confidence
from mdlm_jax.schedules import linear
from mdlm_jax.vocab import Vocab

GOLDEN = golden_data.load('llada/generate')
MODEL = directory.load(golden_data.FOLDER / 'llada')
MASK, EOS, EOT = 126, 121, 123
# The id that ends a turn is written in their decoder, not in the checkpoint.
VOCAB = Vocab(size=128, mask_id=MASK, eos_ids=(EOS, EOT))


@pytest.fixture(autouse=True)
def exact_products():
  with jax.default_matmul_precision('highest'):
    yield


def heavy(factors):
  """The network with some rows of its head enlarged."""
  rows = MODEL.params['head']
  for token, factor in factors.items():
    rows = rows.at[token].multiply(factor)
  return MODEL.params | {'head': rows}


EOS_HEAVY = heavy({EOS: 2.2, EOT: 2.0})
MASK_HEAVY = heavy({MASK: 9.0})


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


def generate(canvas, steps, length, *, params=MODEL.params, cfg=0.0, **options):
  """Their decoder: greedy, by the probability of the token, in blocks."""
  windows = blocks.blocks_of(canvas, length)
  options = {
    'vocab': VOCAB,
    'draw': categorical(temperature=0.0, score=probability),
  } | options
  return sampling.sample(
    MODEL.denoiser, params, jax.random.key(0), canvas,
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
  static = sampling_state.Decoding(
    MODEL.denoiser,
    VOCAB,
    by_confidence(per_block),
    Draw((), propose, ()),
    linear(),
  )
  inputs = sampling_state.Inputs(MODEL.params, canvas)
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
