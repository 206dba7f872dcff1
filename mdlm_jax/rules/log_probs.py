"""Log-probabilities that rules read from a proposal."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mdlm_jax.rules.contract import Proposal


def log_probs_of(ids: Int[Array, 'K'], proposal: Proposal) -> Float[Array, 'K']:
  """Log-probability of a token at every slot, under the current prediction.

  Args:
    ids: a token for each slot. Shape `[K]`.
    proposal: with logits.

  Returns:
    -inf for ids that may not be drawn. Shape `[K]`.
  """
  logits = jnp.take_along_axis(proposal.logits, ids[:, None], -1)[:, 0]
  return logits - proposal.log_z
