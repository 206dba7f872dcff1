"""The recorded decoders of Fast-dLLM, run by this library's sampler."""

import golden_data
import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax import blocks, caches, rules, sampling
from mdlm_jax.canvas import from_prompts
from mdlm_jax.draws import categorical, probability
from mdlm_jax.rules import Update

_GOLDEN = golden_data.load('llada_fast/generate')
CACHE_LOGITS = _GOLDEN.pop('cache_logits')
CASES = _GOLDEN
_POLICIES = {
  'plain': None, 'prefix': caches.prefix(), 'dual': caches.dual()
}  # fmt: skip


def factor_of_theirs(value):
  """The factor rule, which commits all where only the last one fails."""
  rule = rules.factor(value)

  def update(noise, step, row, proposal, state):
    ours = rule.update(noise, step, row, proposal, state)
    left = row.masked.sum() - ours.write.sum()
    write = jnp.where(
      (left == 1) & (ours.write.sum() > 0), row.masked, ours.write
    )
    return Update(write, state=state)

  return rule._replace(update=update)


def rule_of(case, num_blocks):
  if not np.isnan(case['threshold']):
    return rules.threshold(float(case['threshold']))
  if not np.isnan(case['factor']):
    return factor_of_theirs(float(case['factor']))
  return rules.by_confidence(
    blocks.steps_per_block(int(case['settings'][1]), num_blocks)
  )


def check(model, name):
  """The ids, the number of calls and what each computed are the recorded."""
  case, policy = CASES[name], _POLICIES[name.rsplit('_', 1)[1]]
  num_tokens, _, length = case['settings'].tolist()
  canvas = from_prompts(case['prompt'].tolist(), num_tokens, model.vocab)
  windows = blocks.blocks_of(canvas, length)
  with jax.default_matmul_precision('highest'):
    result = sampling.sample(
      model.denoiser, model.params, jax.random.key(0), canvas,
      vocab=model.vocab, rule=rule_of(case, windows.count), blocks=windows,
      draw=categorical(temperature=0.0, score=probability), cache=policy,
    )  # fmt: skip
  np.testing.assert_array_equal(result.ids, case['ids'])
  assert result.calls == case['nfe']
  if policy is not None:
    computed = np.asarray(result.computed[:, 0])
    np.testing.assert_array_equal(computed[computed > 0], case['computed'])
