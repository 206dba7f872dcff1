import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_exact import (
  ENTROPY,
  JOINT,
  MASK,
  PATHS,
  STATES,
  VOCAB,
  V,
  clean_probs,
  exact_denoiser,
  token_laws,
)
from small_joints import A, B, C

from mdlm_jax import flow, losses

BOUNDS = {
  'generalised_kl': flow.generalised_kl,
  'diffusion_bound': flow.diffusion_bound,
}
OF_TOKENS = list(itertools.product((A, B, C), range(V)))  # Clean and noised.
NUM_TIMES = 48  # Of the integrals.
ROWS = NUM_TIMES * len(JOINT.strings) * len(STATES)


@functools.partial(jax.jit, static_argnames=('bound', 'path'))
def _rows(bound, path, logits, clean_ids, ids, valid, tau):
  def one_row(logits, clean_ids, ids, valid, tau):
    noised = flow.Noised(ids[None], (ids != clean_ids)[None])
    return BOUNDS[bound](
      logits[None], clean_ids[None], noised, valid[None], tau[None], path=path
    ).sum

  slopes = jax.value_and_grad(one_row)
  return jax.vmap(slopes)(logits, clean_ids, ids, valid, tau)


def each_row(bound, name, logits, clean_ids, ids, tau):
  """A bound of rows of one or two tokens, and its slopes in the logits.

  Nothing visible was replaced by chance. One program for all numbers of rows.
  """
  num_rows, length = ids.shape
  second = ((0, 0), (0, 2 - length))
  clean_ids, ids = np.int32(clean_ids), np.int32(ids)
  arrays = (
    np.pad(logits, (*second, (0, 0))), np.pad(clean_ids, second, 'edge'),
    np.pad(ids, second, 'edge'), np.pad(np.ones(ids.shape, bool), second),
    np.broadcast_to(np.asarray(tau, logits.dtype), num_rows),
  )  # fmt: skip
  with jax.enable_x64(logits.dtype == np.float64):
    found = _rows(
      bound, PATHS[name], *(np.resize(x, (ROWS, *x.shape[1:])) for x in arrays)
    )
  sums, slopes = (np.asarray(x)[:num_rows] for x in found)
  return sums, slopes[:, :length]


def log(probs):
  with np.errstate(divide='ignore'):
    return np.log(probs)


def batch(name, shape=(4, 8)):
  """Random text, noise and logits; some positions are not valid."""
  rng = np.random.default_rng(0)
  clean = rng.integers(2, 5, shape)
  logits = rng.normal(size=(*shape, V)).astype(np.float32)
  logits[..., :2] = -np.inf
  tau = rng.uniform(0.05, 0.95, shape[0]).astype(np.float32)
  valid, replaced = rng.random(shape) < 0.8, rng.random(shape) < 0.5
  noise = MASK if name == 'masked' else rng.integers(2, 5, shape)
  noised = flow.Noised(np.where(replaced, noise, clean), replaced)
  return jax.tree.map(jnp.asarray, (logits, clean, noised, valid, tau))


def target_log_probs(logits, clean):
  p = np.exp(np.asarray(logits, np.float64))
  p = np.take_along_axis(p, np.asarray(clean)[..., None], -1)[..., 0] / p.sum(
    -1
  )
  return np.log(p).astype(np.float32)


# The masked source is masked diffusion.


def test_with_mask_both_bounds_are_the_masked_one():
  logits, clean, noised, valid, tau = batch('masked')
  target = jnp.asarray(target_log_probs(logits, clean))
  kappas = flow.linear(), flow.cosine(), flow.cubic()

  @jax.jit
  def all_losses(logits):
    of_flow = [
      bound(logits, clean, noised, valid, tau, path=flow.masked(VOCAB, kappa))
      for bound in BOUNDS.values()
      for kappa in kappas
    ]
    of_masks = [
      losses.continuous_bound(
        target, noised.replaced, valid, 1 - tau,
        schedule=flow.as_schedule(kappa),
      )
      for kappa in kappas
    ]  # fmt: skip
    plain = flow.cross_entropy(
      logits, clean, noised, valid, path=PATHS['masked']
    )
    return of_flow, of_masks, plain

  of_flow, of_masks, plain = all_losses(logits)
  for got, expected in zip(of_flow, of_masks * 2, strict=True):
    np.testing.assert_allclose(got.sum, expected.sum, rtol=1e-5)
    np.testing.assert_array_equal(got.count, expected.count)
  assert np.asarray(noised.replaced).sum() > 5
  counted = np.asarray(noised.replaced & valid)
  nats = -np.asarray(target)[counted].sum()
  np.testing.assert_allclose(plain, [nats, counted.sum()], rtol=1e-6)


def test_only_masked_positions_carry_weight_under_the_masked_path():
  logits, clean, noised, valid, tau = batch('masked')
  valid = jnp.ones_like(valid)

  @jax.jit
  @jax.vmap
  def totals(logits):
    bounds = [
      functools.partial(bound, tau=tau, path=PATHS['masked'])
      for bound in BOUNDS.values()
    ]
    entropy = functools.partial(flow.cross_entropy, path=PATHS['masked'])
    return [
      jax.value_and_grad(lambda x, f=f: f(x, clean, noised, valid).sum)(logits)
      for f in (*bounds, entropy)
    ]

  visible = ~np.asarray(noised.replaced)
  wild = np.array(logits)
  wild[visible] *= 30.0
  for value, slope in totals(jnp.stack([logits, jnp.asarray(wild)])):
    slope = np.asarray(slope[0])
    assert np.isfinite(value).all() and np.isfinite(slope).all()
    np.testing.assert_array_equal(slope[visible], np.zeros((visible.sum(), V)))
    assert (np.abs(slope[~visible]).max(-1) > 1e-4).all()
    np.testing.assert_allclose(value[1], value[0], rtol=1e-6)


# Both bounds are the generalised KL of rates, summed by brute force.


def kl_of_rates(u, v, ids):
  """sum over y != z of v - u + u log(u / v). `[N, V]` to `[N]`."""
  off = np.arange(V) != ids[:, None]
  some = off & (u > 0)
  u_log = np.where(
    some, u * np.log(np.where(some, u, 1) / np.where(some, v, 1)), 0
  )
  return np.where(off, v - u, 0).sum(-1) + u_log.sum(-1)


def random_case(name):
  """Every clean and noised token that can stand together, x_theta random."""
  rng = np.random.default_rng(5)
  pairs = np.array([
    (x, z) for x, z in OF_TOKENS if token_laws(name, 0.4)[x, z] > 0
  ])  # fmt: skip
  theta = np.zeros((len(pairs), V))
  theta[:, 2:] = rng.dirichlet(np.ones(3), len(pairs))
  return *pairs.T, theta


def library_bound(bound, name, x, z, theta, tau):
  sums, _ = each_row(bound, name, log(theta)[:, None], x[:, None], z[:, None],
                     tau)  # fmt: skip
  return sums


@pytest.mark.parametrize('tau', [0.05, 0.4, 0.95])
@pytest.mark.parametrize('name', ['masked', 'uniform'])
def test_generalised_kl_is_that_of_the_mixture_rates(name, tau):
  x, z, theta = random_case(name)
  w = 1 / (1 - tau)
  uncertain = (z == MASK) | (name != 'masked')
  u, v = (
    w * uncertain[:, None] * probs for probs in (np.eye(V)[x], theta)
  )  # fmt: skip
  got = library_bound('generalised_kl', name, x, z, theta, tau)
  np.testing.assert_allclose(got, kl_of_rates(u, v, z), rtol=1e-5, atol=1e-7)


def reversed_step(name, t, s, probs, z):
  """q(z_s | z_t = z, x) for x of law `probs`, by Bayes. `[N, V]`, `[N, V]`.

  Noise levels s < t. The step of the noising process from s to t follows from
  the laws at both: it keeps the ratio of the kappas, and adds what is missing.
  """
  before, after = token_laws(name, 1 - s), token_laws(name, 1 - t)
  ratio = (after[A, A] - after[B, A]) / (before[A, A] - before[B, A])
  # A clean id that never occurs: its column is noise only, but for itself.
  noise = [laws[B] - np.eye(V)[B] * (laws[B, B] - laws[A, B]) for laws in
           (before, after)]  # fmt: skip
  fresh = noise[1] - ratio * noise[0]
  forward = ratio * np.eye(V) + fresh  # q(z_t | z_s), rows z_s.
  at_s = probs @ before
  joint = at_s * forward[:, z].T
  return joint / joint.sum(-1, keepdims=True)


@pytest.mark.parametrize('name', PATHS)
def test_the_diffusion_bound_is_the_limit_of_finite_steps(name):
  """KL of the true posteriors of n steps, times n; the error falls as 1 / n."""
  x, z, theta = random_case(name)
  t = 0.6
  bound = library_bound('diffusion_bound', name, x, z, theta, 1 - t)
  errors = []
  for count in (100, 1000, 10000):
    q, model = (
      reversed_step(name, t, t - 1 / count, probs, z)
      for probs in (np.eye(V)[x], theta)
    )
    some = q > 0
    ratio = np.where(some, q, 1) / np.where(some, model, 1)
    kl = count * np.where(some, q * np.log(ratio), 0).sum(-1)
    errors.append(np.abs(kl - bound).max())
  assert bound.max() > 0.1
  assert errors[2] < 1e-3 and errors[0] < 0.1
  if name == 'masked':  # The linear path: every number of steps agrees.
    assert errors[0] < 1e-6
  else:
    assert errors[0] > 8 * errors[1] > 64 * errors[2]


@pytest.mark.parametrize('tau', [0.05, 0.4, 0.95])
def test_the_diffusion_bound_is_udlm_with_a_uniform_source(tau):
  """As Schiff et al. write it: N clean ids, xbar = N alpha x + 1 - alpha."""
  x, z, theta = random_case('uniform')
  n, alpha = 3, tau
  bar, bar_theta = (
    (n * alpha * probs + 1 - alpha)[:, 2:] for probs in (np.eye(V)[x], theta)
  )
  i = z - 2
  own, own_theta = (
    np.take_along_axis(b, i[:, None], 1) for b in (bar, bar_theta)
  )
  inner = bar / own * np.log(own_theta * bar / (bar_theta * own))
  expected = (n / own_theta - n / own)[:, 0] + inner.sum(1)
  expected /= n * alpha
  got = library_bound('diffusion_bound', 'uniform', x, z, theta, tau)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


# The bounds of the exact network, integrated over times, texts and noise.


def integrated(bound, name, own):
  """With times dense at both ends, where the hybrid path has square roots."""
  nodes, weights = np.polynomial.legendre.leggauss(NUM_TIMES)
  nodes, weights = (nodes + 1) / 2, weights / 2
  angle = np.pi / 2 * nodes**2 * (3 - 2 * nodes)
  taus = np.sin(angle) ** 2
  weights = weights * np.sin(2 * angle) * 3 * np.pi * nodes * (1 - nodes)
  probs = np.stack([clean_probs(token_laws(name, tau), own) for tau in taus])
  shape = (NUM_TIMES, len(JOINT.strings), len(STATES))
  rows, _ = each_row(
    bound,
    name,
    log(np.repeat(probs, shape[1], 0).reshape(-1, 2, V)),
    np.tile(np.repeat(JOINT.strings, shape[2], 0), (NUM_TIMES, 1)),
    np.tile(STATES, (NUM_TIMES * shape[1], 1)),
    np.repeat(taus, shape[1] * shape[2]),
  )
  rows = rows.astype(np.float64).reshape(shape)
  laws = np.stack([token_laws(name, tau) for tau in taus])
  noise = laws[:, np.asarray(JOINT.strings)[:, None], STATES[None]].prod(-1)
  rows = np.where(noise > 0, rows, 0) * noise
  return np.einsum('k,n,kns->', weights, JOINT.probabilities, rows)


@pytest.mark.parametrize('name', PATHS)
def test_the_diffusion_bound_of_the_exact_network_is_the_entropy(name):
  got = integrated('diffusion_bound', name, own=False)
  np.testing.assert_allclose(got, ENTROPY, rtol=2e-6)


def test_the_posterior_is_not_what_the_diffusion_bound_asks_for():
  assert integrated('diffusion_bound', 'uniform', own=True) > 1.02 * ENTROPY


def test_the_mixture_rates_have_a_gap_with_a_uniform_source():
  """The conditional process knows which tokens have jumped, the model not."""
  with_mask = integrated('generalised_kl', 'masked', own=True)
  np.testing.assert_allclose(with_mask, ENTROPY, rtol=2e-6)
  gap = integrated('generalised_kl', 'uniform', own=True) - ENTROPY
  assert gap > 0.05
  without = integrated('generalised_kl', 'uniform', own=False)
  assert without - ENTROPY > gap + 0.01


def expected_slope(bound, name, own, tau=0.4):
  """Gradient in the exact logits of every state, averaged over the text."""
  laws = token_laws(name, tau)
  noise = laws[np.asarray(JOINT.strings)[:, None], STATES[None]].prod(-1)
  text, state = np.nonzero(noise)
  weights = (JOINT.probabilities[:, None] * noise)[text, state]
  clean, ids = np.asarray(JOINT.strings)[text], STATES[state]
  _, slopes = each_row(
    bound, name, log(clean_probs(laws, own))[state], clean, ids, tau
  )
  total = np.zeros((len(STATES), 2, V))
  np.add.at(total, state, weights[:, None, None] * slopes)
  return np.abs(total).max()


@pytest.mark.parametrize(
  ('bound', 'name', 'own'),
  [
    ('generalised_kl', 'uniform', True),
    ('diffusion_bound', 'uniform', False),
    ('diffusion_bound', 'hybrid', False),
  ],
)
def test_each_bound_is_least_at_its_own_conditional(bound, name, own):
  assert expected_slope(bound, name, own) < 1e-7
  assert expected_slope(bound, name, not own) > 1e-3


# Numbers and shapes.


@pytest.mark.parametrize('tau', [1e-3, 0.5, 1 - 1e-6])
@pytest.mark.parametrize('name', ['uniform', 'hybrid'])
def test_float32_keeps_the_digits_of_float64(name, tau):
  x, z, theta = random_case(name)
  logits = 3 * np.log(np.maximum(theta, 1e-30)).astype(np.float32)
  logits[:, :2] = -np.inf
  found = [
    each_row(
      'diffusion_bound', name, logits[:, None].astype(dtype), x[:, None],
      z[:, None], np.float32(tau),
    )[0]
    for dtype in (np.float32, np.float64)
  ]  # fmt: skip
  np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-6)


def test_gradients_are_finite_and_padding_costs_nothing():
  logits, clean, noised, valid, tau = batch('uniform')
  is_valid, logits = np.asarray(valid), np.array(logits)
  logits[0, 0] *= 10.0
  # Padding holds an id that may not be drawn.
  clean, ids = (
    np.where(is_valid, x, VOCAB.pad_id) for x in (clean, noised.ids)
  )
  noised = noised._replace(ids=jnp.asarray(ids))

  def totals(logits, valid):
    return [
      bound(logits, jnp.asarray(clean), noised, valid, tau,
            path=PATHS['uniform']).sum for bound in BOUNDS.values()
    ]  # fmt: skip

  values, slopes = jax.jit(
    lambda x, valid: (totals(x, valid), jax.jacrev(totals)(x, valid))
  )(jnp.asarray(logits), valid)
  for slope in map(np.asarray, slopes):
    assert np.isfinite(slope).all()
    assert (np.abs(slope).max(-1) > 0)[is_valid].all()
    assert (slope[~is_valid] == 0).all()
  # Narrow logits are read in float32.
  narrow = jnp.asarray(logits, jnp.bfloat16)
  nothing, rough, wide = jax.jit(
    lambda x: [
      totals(x, jnp.zeros_like(valid)), totals(x, valid),
      totals(x.astype(jnp.float32), valid),
    ]
  )(narrow)  # fmt: skip
  np.testing.assert_array_equal(nothing, 0)
  np.testing.assert_allclose(rough, wide, rtol=1e-6)
  np.testing.assert_allclose(rough, values, rtol=0.1)


def test_cross_entropy_counts_every_valid_token_of_other_sources():
  logits, clean, noised, valid, _ = batch('uniform')
  got = jax.jit(flow.cross_entropy, static_argnames='path')(
    logits, clean, noised, valid, path=PATHS['uniform']
  )
  nats = -target_log_probs(logits, clean)
  np.testing.assert_allclose(got.sum, nats[np.asarray(valid)].sum(), rtol=1e-5)
  assert got.count == np.asarray(valid).sum()


def test_the_network_is_asked_at_noise_level_1_minus_tau():
  """The exact network of the joint, through the library's own door."""
  clean = (STATES > 1).all(1)
  ids = jnp.asarray(STATES[clean])
  noised = flow.Noised(ids, jnp.ones(ids.shape, bool))
  logits = jax.jit(flow.clean_logits, static_argnums=(0, 2))(
    exact_denoiser(PATHS['uniform'], own=False), JOINT, VOCAB, noised,
    jnp.full(len(ids), 0.3), jnp.ones(ids.shape, bool),
  )  # fmt: skip
  p = np.exp(np.asarray(logits))
  expected = clean_probs(token_laws('uniform', 0.3), own=False)[clean]
  np.testing.assert_allclose(p / p.sum(-1, keepdims=True), expected, atol=1e-6)


def test_the_hybrid_has_no_mixture_rates():
  logits, clean, noised, valid, tau = batch('uniform')
  with pytest.raises(ValueError, match='source that does not depend on tau'):
    flow.generalised_kl(logits, clean, noised, valid, tau, path=PATHS['hybrid'])
