import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_exact import (
  ABSORBED,
  JOINT,
  MASK,
  PATHS,
  STATES,
  UNIFORM,
  VOCAB,
  V,
  clean_probs,
  marginal,
  token_laws,
)
from small_joints import A, B, C

from mdlm_jax import flow, guidance

rates = jax.jit(flow.rates, static_argnames=('path', 'corrector'))
CURVES = {
  'linear': (flow.linear(), lambda s: s, lambda s: 1.0),
  'cosine': (
    flow.cosine(),
    lambda s: 1 - np.cos(np.pi / 2 * s),
    lambda s: np.pi / 2 * np.sin(np.pi / 2 * s),
  ),
  'cubic': (
    flow.cubic(),
    lambda s: 3 * s**2 - 2 * s**3,
    lambda s: 6 * s - 6 * s**2,
  ),
}
SOURCES = {
  'masked': (flow.masked, ABSORBED),
  'uniform': (flow.uniform, UNIFORM),
}
each_source = pytest.mark.parametrize('source', SOURCES)


def generator(path, probs, tau, corrector=0.0):
  """The matrix of rates between all states, one token at a time. `[25, 25]`."""
  with jax.enable_x64(True):
    tau = jnp.full(STATES.shape, tau, jnp.float64)
    q = rates(path, jnp.asarray(probs), STATES, tau, corrector=corrector)
    q = np.asarray(q)
  matrix = np.zeros((V * V, V * V))
  for state, (first, second) in enumerate(STATES):
    matrix[state, [v * V + second for v in range(V)]] += q[state, 0]
    matrix[state, [first * V + v for v in range(V)]] += q[state, 1]
  return matrix


@pytest.mark.parametrize('corrector', [0.0, 0.7])
@pytest.mark.parametrize('curve', CURVES)
@each_source
def test_marginal_rates_obey_the_kolmogorov_equation(source, curve, corrector):
  """d p / d tau = p Q on all 25 pairs, p summed over the data."""
  make, pi = SOURCES[source]
  kappa, value, slope = CURVES[curve]
  path = make(VOCAB, kappa)
  for tau in (0.1, 0.5, 0.93):
    laws = value(tau) * np.eye(V) + (1 - value(tau)) * pi
    of_each = laws[JOINT.strings[None], STATES[:, None]]
    moving = slope(tau) * (np.eye(V) - pi)[JOINT.strings[None], STATES[:, None]]
    change = (moving * of_each[..., ::-1]).sum(-1) @ JOINT.probabilities
    q = generator(path, clean_probs(laws, own=True), tau, corrector)
    np.testing.assert_allclose(marginal(laws) @ q, change, atol=1e-12)
    off = q - np.diag(np.diag(q))
    assert (off >= 0).all()
    possible = marginal(laws) > 0
    np.testing.assert_allclose(q[possible].sum(1), 0, atol=1e-12)


@each_source
def test_the_corrector_is_in_detailed_balance_with_the_path(source):
  """Given x = A; the rates without it are not, they move the law."""
  path, tau, ids = PATHS[source], 0.3, jnp.arange(V)
  law = token_laws(source, tau)[A]
  with jax.enable_x64(True):
    clean, taus = jnp.tile(jnp.eye(V)[A], (V, 1)), jnp.full(V, tau)
    plain = np.asarray(rates(path, clean, ids, taus))
    more = np.asarray(rates(path, clean, ids, taus, corrector=0.7)) - plain
  flux = law[:, None] * more
  assert np.abs(more).max() > 1
  np.testing.assert_allclose(flux, flux.T, atol=1e-12)
  assert np.abs(law[:, None] * plain - (law[:, None] * plain).T).max() > 0.1


def test_rates_of_campbell_and_gat_at_half_time():
  """kappa = tau = 1/2: 2 p(v | z); with b = 1 twice that, and 2 pi(v)."""
  p = jnp.zeros(V).at[jnp.array([A, B, C])].set(jnp.array([0.5, 0.2, 0.3]))
  half = jnp.array(0.5)
  q = rates(PATHS['masked'], p, jnp.array(MASK), half)
  np.testing.assert_allclose(q, [0, -2, 1, 0.4, 0.6], rtol=1e-6)
  q = rates(PATHS['uniform'], p, jnp.array(B), half, corrector=1.0)
  expected = 4 * np.array([0, 0, 0.5, -0.8, 0.3]) + 2 * (UNIFORM - np.eye(V)[B])
  np.testing.assert_allclose(q, expected, rtol=1e-6)


def test_a_visible_token_of_the_masked_path_never_jumps_forward():
  p = jnp.full(V, 0.2)
  q = rates(PATHS['masked'], p, jnp.array(B), jnp.array(0.5))
  np.testing.assert_array_equal(q, np.zeros(V))
  assert rates(PATHS['uniform'], p, jnp.array(B), jnp.array(0.5))[A] > 0


@pytest.mark.parametrize('scale', [0.0, 1.0, 5.0])
def test_guided_rates_are_rates(scale):
  """Differences are not: (1 + w) cond - w null is negative here for w >= 1."""
  rng = np.random.default_rng(0)
  ids = jnp.arange(V)
  cond, null = (
    np.where(np.eye(V), 0, rng.exponential(size=(V, V))) for _ in range(2)
  )
  cond[0, 1] = 0.0
  cond, null = (q - np.diag(q.sum(1)) for q in (cond, null))
  guided = np.asarray(
    jax.jit(flow.guided_rates, static_argnames='scale')(
      jnp.asarray(cond), jnp.asarray(null), ids, scale=scale
    )
  )
  off = ~np.eye(V, dtype=bool)
  assert (guided[off] >= 0).all() and np.isfinite(guided).all()
  total = np.abs(guided).sum(1)
  np.testing.assert_allclose(guided.sum(1) / total, 0, atol=1e-6)
  assert ((1 + scale) * cond - scale * null)[off].min() < 0 or scale == 0
  np.testing.assert_allclose(
    guided[off], cond[off] ** (1 + scale) / null[off] ** scale, rtol=1e-4
  )


def test_guided_rates_lead_where_guided_logits_do():
  rng = np.random.default_rng(1)
  logits = jnp.asarray(rng.normal(size=(2, V)).astype(np.float32))
  logits = logits.at[:, :2].set(-jnp.inf)  # PAD and MASK.
  here, half = jnp.array(MASK), jnp.array(0.5)

  @jax.jit
  def guided_both_ways(logits):
    cond, null = (
      flow.rates(PATHS['masked'], jax.nn.softmax(one), here, half)
      for one in logits
    )
    law = jax.nn.softmax(guidance.combine(*logits, 2.0))
    return cond, flow.guided_rates(cond, null, here, 2.0), law

  cond, guided, law = guided_both_ways(logits)
  np.testing.assert_allclose(guided[2:] / -guided[MASK], law[2:], rtol=1e-5)
  assert abs(guided[MASK] - cond[MASK]) > 0.1  # How soon is another matter.


@pytest.mark.parametrize('name', PATHS)
def test_the_posterior_is_the_other_conditional_and_the_own_token(name):
  tau = 0.35
  laws = token_laws(name, tau)
  without, posterior = (clean_probs(laws, own) for own in (False, True))
  possible = posterior.sum(-1) > 0
  with jax.enable_x64(True):
    logits = jax.jit(flow.posterior_logits, static_argnames='path')(
      np.log(without, where=without > 0, out=np.full(without.shape, -np.inf)),
      STATES, np.full(STATES.shape, tau), path=PATHS[name],
    )  # fmt: skip
  p = np.exp(np.asarray(logits))
  total = p.sum(-1, keepdims=True)
  got = p / np.where(total > 0, total, 1)
  if name == 'masked':  # A visible token is certain; the rates know that.
    possible &= STATES == MASK
    np.testing.assert_allclose(got[possible], without[possible], rtol=1e-12)
  assert possible.sum() > 7
  np.testing.assert_allclose(got[possible], posterior[possible], atol=1e-12)


def test_what_has_no_rates_is_refused():
  one = functools.partial(jnp.full, V)
  arguments = one(0.2), jnp.array(B), jnp.array(0.5)
  with pytest.raises(ValueError, match=r'corrector=-0\.1 must be finite and'):
    flow.rates(PATHS['uniform'], *arguments, corrector=-0.1)
  with pytest.raises(ValueError, match='source that does not depend on tau'):
    flow.rates(PATHS['hybrid'], *arguments)
  with pytest.raises(ValueError, match=r'scale=-2\.0 must be finite'):
    flow.guided_rates(one(1.0), one(1.0), jnp.array(0), -2.0)
  with pytest.raises(ValueError, match='null must be positive where cond is'):
    flow.guided_rates(one(1.0), one(0.0), jnp.array(0), 1.0)
