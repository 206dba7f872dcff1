"""Exact laws of noised pairs of tokens: in NumPy, and as denoisers."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
from small_joints import VOCAB, A, B, C

from mdlm_jax import flow, oracle
from mdlm_jax.predict import Denoiser

V, MASK = VOCAB.size, VOCAB.mask_id
PAIRS = list(itertools.product((A, B, C), repeat=2))
JOINT = oracle.joint(PAIRS, np.random.default_rng(3).dirichlet(np.ones(9)))
ENTROPY = -(JOINT.probabilities * np.log(JOINT.probabilities)).sum()
STATES = np.array(list(itertools.product(range(V), repeat=2)))

UNIFORM = np.isin(np.arange(V), (A, B, C)) / 3
ABSORBED = np.eye(V)[MASK]
SHARE = 0.3  # Of uniform noise in the hybrid path at tau = 1/2.

PATHS = {
  'masked': flow.masked(VOCAB),
  'uniform': flow.uniform(VOCAB),
  'hybrid': flow.hybrid(VOCAB, SHARE),
}


def token_laws(name, tau):
  """p_tau(z | x) of the paths above, from their papers. Shape `[V, V]`."""
  if name == 'hybrid':
    c = 2 * SHARE / (1 - SHARE) * np.sqrt(tau * (1 - tau))
    noise = (1 - tau) * ABSORBED + c * UNIFORM
    return (tau * np.eye(V) + noise) / (1 + c)
  source = {'masked': ABSORBED, 'uniform': UNIFORM}[name]
  return tau * np.eye(V) + (1 - tau) * source


def marginal(laws, joint=JOINT):
  """Probability of every state. Shape `[25]`."""
  of_each = laws[joint.strings[None], STATES[:, None]]  # [25, N, 2]
  return of_each.prod(-1) @ joint.probabilities


def clean_probs(laws, own, joint=JOINT):
  """p(x_l | state), with or without what slot l shows. Shape `[25, 2, V]`."""
  of_each = laws[joint.strings[None], STATES[:, None]]
  weights = of_each.prod(-1)[..., None] if own else of_each[..., ::-1]
  weights = weights * joint.probabilities[:, None]
  probs = np.einsum('snl,nlv->slv', weights, np.eye(V)[joint.strings])
  total = probs.sum(-1, keepdims=True)
  return np.where(total > 0, probs / np.where(total > 0, total, 1), 0)


@functools.cache
def exact_denoiser(path, own):
  """The same as a network whose params are the joint; `own` as above."""

  def features(params, cache, ids, *, at, t, **unused):
    del cache, at, unused
    tau = (1 - t)[:, None]
    noise = path.kappa.complement(tau) * path.source.probability(ids, tau)
    same = ids[:, None] == jnp.asarray(params.strings)
    of_each = path.kappa.kappa(tau)[..., None] * same + noise[:, None]
    of_each = jnp.maximum(of_each, 1e-30)  # Where nothing is possible.
    all_slots = of_each.prod(-1, keepdims=True)
    weights = jnp.broadcast_to(all_slots, of_each.shape)
    if not own:
      weights = weights / of_each
    weights *= params.probabilities[:, None]
    clean = jnp.eye(V)[jnp.asarray(params.strings)]
    probs = jnp.einsum('bnl,nlv->blv', weights, clean)
    return jnp.log(probs), ()

  return Denoiser(features, lambda params, hidden: hidden)
