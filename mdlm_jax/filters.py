"""Filters: which tokens stay likely enough to be drawn.

Each turns logits into logits, -inf at what it takes away. They follow each
other in the order of `draws.categorical`.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mdlm_jax.ordering import lowest_integer, ordered_integers


def temper(
  logits: Float[Array, '*S V'],
  temperature: float,
  largest: Float[Array, '*S'] | None = None,
) -> Float[Array, '*S V']:
  """Logits over temperature, less the largest; safe for any temperature > 0.

  Args:
    logits: -inf at ids that may not be drawn. Shape `[..., V]`.
    temperature: above 0.
    largest: the largest logit where it is known. Shape `[...]`.

  Returns:
    Logits of which the largest is 0. Shape `[..., V]`.

  Example:
    >>> print(temper(jnp.array([1.0, 2.0]), 0.5), temper(jnp.ones(2), 1e-38))
    [-2.  0.] [0. 0.]
  """
  # Dividing differences keeps the best token at 0 however small T is: a plain
  # quotient overflows to inf, then to NaN.
  below = logits - _largest(logits, largest)
  return jnp.where(below == 0, 0.0, below / temperature)


def _largest(logits, known):
  return logits.max(-1, keepdims=True) if known is None else known[..., None]


def keep_top_k(logits: Float[Array, '*S V'], k: int) -> Float[Array, '*S V']:
  """Minus infinity at all but the k most probable tokens; ties share a fate.

  A token stays iff fewer than `k` tokens are strictly more probable.

  Example:
    >>> print(keep_top_k(jnp.array([0.5, 2.0, 1.0]), 2))
    [-inf   2.   1.]
  """
  return _keep_best(logits, jnp.ones_like(logits), k)


def keep_top_p(logits: Float[Array, '*S V'], p: float) -> Float[Array, '*S V']:
  """Minus infinity outside the nucleus (Holtzman et al. 2020, section 3.1).

  A token stays iff the tokens strictly more probable hold less than `p`: the
  one that crosses `p` stays, and ties share a fate.

  Example:
    >>> print(keep_top_p(jnp.log(jnp.array([0.5, 0.3, 0.2])), 0.6))
    [-0.6931472 -1.2039728       -inf]
  """
  return _keep_best(logits, jax.nn.softmax(logits), p)


def keep_min_p(
  logits: Float[Array, '*S V'],
  p: float,
  largest: Float[Array, '*S'] | None = None,
) -> Float[Array, '*S V']:
  """Minus infinity at tokens less probable than p times the most probable.

  (Nguyen et al. 2024, "Turning up the heat", section 3.)

  Args:
    logits: -inf at ids that may not be drawn. Shape `[..., V]`.
    p: in (0, 1].
    largest: the largest logit where it is known. Shape `[...]`.

  Returns:
    The logits, -inf at what is not kept. Shape `[..., V]`.

  Example:
    >>> print(keep_min_p(jnp.log(jnp.array([0.5, 0.3, 0.2])), 0.5))
    [-0.6931472 -1.2039728       -inf]
  """
  least = _largest(logits, largest) + math.log(p)
  return jnp.where(logits >= least, logits, -jnp.inf)


def _keep_best(logits, weights, limit):
  """Keeps a token iff those of larger logit weigh less than `limit`.

  The smallest logit that stays is found by bisection over the integers in the
  order of the floats: a reduction a bit, cheaper on CPU than sorting the
  vocabulary or `lax.top_k`.
  """
  ranks = ordered_integers(logits)

  def halve(_, bounds):
    low, high = bounds  # weight above low >= limit > weight above high
    middle = (low & high) + ((low ^ high) >> 1)  # The mean, without overflow.
    above = jnp.where(ranks > middle[..., None], weights, 0.0).sum(-1)
    stays = above < limit
    return jnp.where(stays, low, middle), jnp.where(stays, middle, high)

  high = ranks.max(-1)
  low = jnp.full_like(high, lowest_integer(logits.dtype))
  num_bits = jnp.finfo(logits.dtype).bits
  _, smallest = jax.lax.fori_loop(0, num_bits, halve, (low, high))
  return jnp.where(ranks >= smallest[..., None], logits, -jnp.inf)
