"""LLaDA-MoE and LLaDA2 with tiny weights, and what their decoders wrote."""

import dataclasses
import functools
import json

import golden_data
import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax import blocks, rules, sampling
from mdlm_jax.canvas import from_rows
from mdlm_jax.draws import categorical, probability
from mdlm_jax.models import directory, transformer

LLADA_MOE, LLADA2 = (
  golden_data.FOLDER / name for name in ('llada_moe', 'llada2_moe')
)
GREEDY = categorical(temperature=0.0, score=probability)
EOS = 121
# By case: block length, steps of a block, threshold; then, for LLaDA2.1, the
# threshold of edits and the most calls for them. Prompts of 6 and 8 tokens.
QUOTAS = {
  'b4_s4_t0.95': (4, 4, 0.95),
  'b8_s8_t0.6': (8, 8, 0.6),
  'b8_s3_t0.95': (8, 3, 0.95),
  'b8_s8_t0.25': (8, 8, 0.25),
  'b8_s16_t0.3': (8, 16, 0.3),
  # 8 steps, but no more than 12 new tokens / minimal_topk=4.
  'b4_s4_mt4': (4, 3, 0.3),
}
EDITS = {
  'gen21_b4': (4, 4, 0.95, 0.9, 16),
  'gen21_b8_edit': (8, 8, 0.4, 0.3, 16),
  'gen21_b8_edit_low': (8, 8, 0.25, 0.2, 3),
  # At least two tokens a call.
  'gen21_b8_ntt2': (8, 4, 0.9, 0.5, 16),
}
# New tokens, where they are not 16.
SHORTER = {'gen_b8_s16_t0.3_P6': 14, 'gen_b4_s4_mt4_P6': 12, 'gen21_b4': 12}


@functools.cache
def model(path):
  return directory.load(path)


@functools.cache
def denoiser(path, attention_block):
  config = dataclasses.replace(
    model(path).config, attention_block=attention_block
  )
  return transformer.denoiser(config)


@functools.cache
def decoded(name):
  """The rows of golden cases, by their field."""
  return golden_data.load(f'{name}/generate')


def assert_llada2_decodes(names, block, rule, *, params=None, **options):
  """The cases, a row each, token for token and call for call."""
  cases = [decoded('llada2_moe')[name] for name in names]
  prompts = [case['prompt'][0].tolist() for case in cases]
  most = SHORTER.get(names[0], 16)
  rows = [
    [*prompt, *[None] * (-(len(prompt) + most) % block + most)]
    for prompt in prompts
  ]
  vocab = model(LLADA2).vocab
  canvas = from_rows(rows, vocab)
  result = sampling.sample(
    denoiser(LLADA2, block), params or model(LLADA2).params,
    jax.random.key(0), canvas, vocab=vocab, rule=rule, draw=GREEDY,
    blocks=blocks.blocks_of(canvas, block, aligned=True), **options,
  )  # fmt: skip
  for b, case in enumerate(cases):
    answer = until_end(np.asarray(result.ids)[b, len(prompts[b]) :][:most])
    np.testing.assert_array_equal(answer, case['ids'][0])
    # They hand over everything up to the end of the open block.
    assert result.calls_per_row[b] == len(case['window_length_per_call'])
  return result


def until_end(answer):
  """The answer up to and with its first EOS, as they return it."""
  ends = np.flatnonzero(answer == EOS)
  return answer[: ends[0] + 1] if len(ends) else answer


def quota_rule(case):
  _, steps, threshold = QUOTAS[case]
  return rules.quota_threshold(steps, threshold)


def edit_rule(case):
  _, steps, threshold, edit_threshold, rounds = EDITS[case]
  rule = rules.quota_threshold(steps, threshold)
  return rules.editing(rule, edit_threshold, rounds)


def tensors_at(path, target, tensors):
  """A directory like that of `path` with other tensors."""
  import safetensors.numpy

  for source in path.glob('*.json'):
    (target / source.name).write_text(source.read_text())
  safetensors.numpy.save_file(
    {key: np.ascontiguousarray(x) for key, x in tensors.items()},
    target / 'model.safetensors',
  )
  return target


def config_of(path):
  return json.loads((path / 'config.json').read_text())


@functools.partial(jax.jit, static_argnums=0)
def outputs(network, params, ids, valid):
  """Normed hidden states and logits of whole rows."""
  slots = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  hidden, _ = network.features(
    params, None, ids, at=None, step=0, t=jnp.ones(len(ids)), valid=valid,
    positions=slots, segments=None,
  )  # fmt: skip
  return hidden, network.head(params, hidden)
