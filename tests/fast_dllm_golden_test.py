"""Fast-dLLM's decoders: their caches and rules, call for call.

Every case runs in tests/slow; here some of each cache and rule.
"""

import functools

import fast_dllm
import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax.models import directory

MODEL = directory.load(golden_data.FOLDER / 'llada')


@pytest.mark.parametrize(
  'case',
  [
    'b1_thr0.3_dual',
    'b2_factor2.5_prefix',
    'b3_quota_prefix',
    'b3_thr0.6_dual',
  ],
)
def test_the_tokens_calls_and_computed_slots_are_theirs(case):
  fast_dllm.check(MODEL, case)


def test_logits_from_stored_keys_are_theirs():
  case = fast_dllm.CACHE_LOGITS
  then, now = case['ids_when_cache_built'], case['ids_now']
  length = now.shape[1]

  @functools.partial(jax.jit, static_argnums=2)
  def ask(cache, ids, slots):
    at = None if slots is None else jnp.arange(*slots)[None]
    hidden, cache = MODEL.denoiser.features(
      MODEL.params, cache, ids, at=at, step=0, t=jnp.zeros(1),
      valid=jnp.ones(ids.shape, bool), positions=jnp.arange(length)[None],
      segments=None,
    )  # fmt: skip
    return MODEL.denoiser.head(MODEL.params, hidden), cache

  with jax.default_matmul_precision('highest'):
    logits, cache = ask(None, then, None)
    np.testing.assert_allclose(logits, case['full_logits'], atol=1e-4)
    values = np.asarray(cache['blocks'][1]).transpose(0, 1, 3, 2, 4)
    np.testing.assert_allclose(values, case['cached_values'], atol=1e-4)
    for name, slots in (('prefix', (9, 18)), ('dual', (9, 14))):
      logits, _ = ask(cache, now, slots)
      np.testing.assert_allclose(logits, case[f'{name}_logits'], atol=1e-4)
