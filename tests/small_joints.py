"""Small joint distributions, and the exact law of a sampler on them."""

import itertools

import numpy as np

from mdlm_jax import oracle
from mdlm_jax.canvas import from_rows
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=5, mask_id=1, pad_id=0)
A, B, C = 2, 3, 4
TWINS = oracle.joint([(A, A), (B, B)])
STRINGS = list(itertools.product((A, B, C), repeat=3))


def random_joint(seed=0):
  """A joint on three symbols and length 3, with few likely strings."""
  p = np.random.default_rng(seed).dirichlet(np.full(27, 0.3))
  return oracle.joint(STRINGS, p)


def independent_joint(seed=0):
  """A joint on three symbols and length 3 with independent positions."""
  p = np.random.default_rng(seed).dirichlet(np.ones(3), size=3)
  product = np.einsum('i,j,k->ijk', *p).ravel()
  return oracle.joint(STRINGS, product / product.sum())


def law_of(joint, rule, row=None, **options):
  """The law of a sampler on an all-MASK row, or on a row with `None` holes."""
  row = [None] * joint.strings.shape[1] if row is None else row
  return oracle.sampler_law(
    joint, from_rows([row], VOCAB), vocab=VOCAB, rule=rule, **options
  )


def total_variation(law, joint):
  """Half the sum of the absolute differences to the law of the data."""
  exact = dict(
    zip(map(tuple, joint.strings.tolist()), joint.probabilities, strict=True)
  )
  keys = exact.keys() | law.probabilities.keys()
  return 0.5 * sum(
    abs(law.probabilities.get(k, 0.0) - exact.get(k, 0.0)) for k in keys
  )


def in_groups(joint, groups):
  """The joint that results when groups of positions are drawn in turn.

  Positions of one group are independent given the groups before it. For
  a joint over `STRINGS`.
  """
  p = joint.probabilities.reshape(3, 3, 3)
  law, known = np.ones((3, 3, 3)), ()

  def marginal(kept):
    return p.sum(tuple({0, 1, 2} - set(kept)), keepdims=True)

  for group in groups:
    for i in group:
      law = law * marginal((*known, i)) / marginal(known)
    known += tuple(group)
  return oracle.joint(STRINGS, law.ravel() / law.sum())


def chi_square(law, ids):
  """Statistic of samples `[N, L]` against a law, and its degrees of freedom.

  Strings expected fewer than five times are counted with the rarest other.
  """
  count = len(ids)
  observed = {}
  for string in map(tuple, np.asarray(ids).tolist()):
    observed[string] = observed.get(string, 0) + 1
  by_probability = sorted(law.probabilities.items(), key=lambda item: -item[1])
  likely = [(k, count * p) for k, p in by_probability if count * p >= 5]
  expected = np.array([e for _, e in likely])
  counts = np.array([observed.get(k, 0) for k, _ in likely], np.float64)
  expected[-1] += count - expected.sum()
  counts[-1] += count - counts.sum()
  return ((counts - expected) ** 2 / expected).sum(), len(likely) - 1
