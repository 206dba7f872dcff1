"""The other golden cases of the decoders of LLaDA-MoE and LLaDA2."""

import jax
import numpy as np
import pytest
from mixtures import (
  EDITS,
  GREEDY,
  LLADA_MOE,
  QUOTAS,
  assert_llada2_decodes,
  decoded,
  edit_rule,
  model,
  quota_rule,
)

from mdlm_jax import blocks, sampling
from mdlm_jax.canvas import from_prompts
from mdlm_jax.rules import by_confidence


@pytest.fixture(autouse=True)
def exact_products():
  with jax.default_matmul_precision('highest'):
    yield


@pytest.mark.parametrize('case', QUOTAS)
def test_quotas_and_a_threshold_are_those_of_llada2(case):
  names = [f'gen_{case}_P6', f'gen_{case}_P8']
  assert_llada2_decodes(names, QUOTAS[case][0], quota_rule(case))


@pytest.mark.parametrize('case', EDITS)
def test_edits_are_those_of_llada2(case):
  assert_llada2_decodes([case], EDITS[case][0], edit_rule(case))


@pytest.mark.parametrize(('steps', 'block'), [(16, 16), (8, 4), (6, 8)])
def test_every_step_of_llada_moe(steps, block):
  cases = [
    decoded('llada_moe')[f'gen_g16_s{steps}_b{block}_B{n}'] for n in (1, 2)
  ]
  prompts, ids = (
    np.concatenate([case[field] for case in cases])
    for field in ('prompt', 'ids')
  )
  inputs = np.concatenate([c['model_inputs_per_step'] for c in cases], 1)
  loaded = model(LLADA_MOE)
  canvas = from_prompts(prompts.tolist(), 16, loaded.vocab)
  windows = blocks.blocks_of(canvas, block)
  result = sampling.sample(
    loaded.denoiser, loaded.params, jax.random.key(0), canvas,
    vocab=loaded.vocab, draw=GREEDY, blocks=windows, trajectory=True,
    rule=by_confidence(blocks.steps_per_block(steps, windows.count)),
  )  # fmt: skip
  np.testing.assert_array_equal(result.ids, ids)
  np.testing.assert_array_equal(result.trajectory[:-1], inputs[1:])
  assert result.calls == steps
