"""SMDM's Monte-Carlo likelihood: our times, corruption and bound on its net.

The network of its repository, with tiny random weights, is written out here:
its rotary tables are rounded to bfloat16, which ours are not.
"""

import functools

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from mdlm_jax import corruption, losses, predict, time_draws
from mdlm_jax.models.attention import attention, attention_mask, rotate
from mdlm_jax.vocab import Vocab

GOLDEN = golden_data.load('smdm/likelihood')
WEIGHTS = safetensors.numpy.load_file(
  golden_data.FOLDER / 'smdm' / 'network.safetensors'
)
HEADS, HEAD_DIM, MASK = 4, 12, 128
# Its head has no row for MASK; ours has one that is never drawn.
VOCAB = Vocab(size=129, mask_id=MASK)


def normed(x, scale):
  return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def features(params, cache, ids, *, valid, positions, **unused):
  matrix = functools.partial(jnp.matmul, precision='highest')
  x = params['transformer.wte.weight'][ids]
  cos = jnp.asarray(GOLDEN['rope_tables']['cos_bf16_as_f32'])[positions]
  sin = jnp.asarray(GOLDEN['rope_tables']['sin_bf16_as_f32'])[positions]
  for layer in (0, 1):
    weight = {
      name.removeprefix(f'transformer.h.{layer}.').removesuffix('.weight'): w
      for name, w in params.items()
    }
    hidden = matrix(normed(x, weight['norm_1']), weight['attn.attn'].T)
    # One matrix, laid out per head: query, key, value.
    hidden = hidden.reshape(*ids.shape, HEADS, 3, HEAD_DIM)
    q, k, v = (hidden[..., i, :] for i in range(3))
    mixed = attention(
      rotate(q, cos, sin), rotate(k, cos, sin), v, attention_mask(valid)
    )
    x += matrix(mixed.reshape(x.shape), weight['attn.proj'].T)
    hidden = normed(x, weight['norm_2'])
    gate = matrix(hidden, weight['mlp.swiglu.w1'].T)
    up = matrix(hidden, weight['mlp.swiglu.w2'].T)
    x += matrix(jax.nn.silu(gate) * up, weight['mlp.swiglu.w3'].T)
  return normed(x, params['transformer.ln_f.weight']), ()


def head(params, hidden):
  logits = jnp.matmul(hidden, params['lm_head.weight'].T, precision='highest')
  return jnp.pad(logits, ((0, 0), (0, 0), (0, 1)))


NETWORK = predict.Denoiser(features, head)


def log_probs_of(corrupted_ids, ids):
  return predict.target_log_probs(
    NETWORK,
    WEIGHTS,
    VOCAB,
    corrupted_ids,
    ids,
    t=jnp.ones(len(ids)),
    valid=jnp.ones(ids.shape, bool),
    positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
  )


def rows_of(case, count):
  """`count` equal rows of prefix and target, and the map of the target."""
  golden = GOLDEN[case]
  row = np.concatenate([golden['prefix'], golden['target']])
  target = np.arange(len(row)) >= len(golden['prefix'])
  return jnp.tile(row, (count, 1)), jnp.tile(target, (count, 1))


def test_the_network_is_theirs():
  ids = jnp.asarray(GOLDEN['logits_1']['input_ids'])
  hidden, _ = features(
    WEIGHTS,
    None,
    ids,
    valid=jnp.ones(ids.shape, bool),
    positions=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
  )
  np.testing.assert_allclose(
    head(WEIGHTS, hidden)[..., :128],
    GOLDEN['logits_1']['logits_bf16_rope'],
    atol=1e-4,
  )


def test_monte_carlo_bound_of_a_target():
  golden = GOLDEN['nll_mc']
  ids, target = rows_of('nll_mc', 8)
  bounds = []
  for u0, uniforms in zip(
    golden['u0_per_iteration'], golden['mask_uniform'], strict=True
  ):
    t = time_draws.spread(jnp.asarray(u0), jnp.arange(8), 8)
    corrupted_ids, masked = corruption.corrupt_with_noise(
      jnp.asarray(uniforms), ids, t, target, mask_id=MASK
    )
    total = losses.continuous_bound(
      log_probs_of(corrupted_ids, ids), masked, target, t
    )
    assert total.count == 8 * 8
    bounds.append(total.sum / 8)
  np.testing.assert_allclose(np.mean(bounds), golden['nll'], rtol=1e-4)


def test_chain_rule_of_a_target():
  """Row i hides the target from token i on and scores token i alone."""
  golden = GOLDEN['nll_chain']
  length = len(golden['target'])
  ids, _ = rows_of('nll_chain', length)
  scored = jnp.arange(ids.shape[1]) - len(golden['prefix'])
  hidden = scored[None] >= jnp.arange(length)[:, None]
  log_probs = log_probs_of(jnp.where(hidden, MASK, ids), ids)
  total = losses.cross_entropy(
    log_probs, scored[None] == jnp.arange(length)[:, None]
  )
  assert total.count == length
  np.testing.assert_allclose(total.sum, golden['nll'], rtol=1e-4)
