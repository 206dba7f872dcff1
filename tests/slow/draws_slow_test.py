"""Draws on numbers of samples that only minutes can give."""

import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax import draws
from mdlm_jax.draws import categorical
from mdlm_jax.predict import reduce_logits


def test_largest_of_a_hundred_million_gumbel_numbers():
  # An exact sampler stays below 16 once in 77,000 runs: exp(-1e8 e^-16).
  @jax.jit
  def largest(key):
    noise = draws.draw_noise(key, jnp.arange(10_000), 10_000)
    return jnp.maximum(noise.block.max(), noise.entry.max())

  assert max(float(largest(jax.random.key(s))) for s in range(50)) > 16.0


def frequencies(logits, count):
  draw = categorical()
  noise = draw.noise(jax.random.key(42), jnp.arange(count), len(logits))
  ids, _ = jax.vmap(draw.propose, (0, None, None))(
    noise, reduce_logits(logits), None
  )
  return np.bincount(ids, minlength=len(logits))


def test_frequencies_agree_in_32_and_64_bit_mode():
  logits = np.linspace(-2.0, 2.0, 9, dtype=np.float32)
  p = np.exp(logits.astype(np.float64))
  p /= p.sum()
  count = 200_000
  for wide in (False, True):
    with jax.enable_x64(wide):
      observed = frequencies(jnp.asarray(logits), count)
    chi2 = ((observed - count * p) ** 2 / (count * p)).sum()
    # Eight degrees of freedom: above 20.1 once in a hundred.
    assert chi2 < 20.1
