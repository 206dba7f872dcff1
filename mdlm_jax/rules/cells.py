"""Laws of noise as finitely many cases, for exact enumeration."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float

Cell = tuple[float, Float[np.ndarray, 'K']]


def bernoulli_cells(
  probabilities: Float[np.ndarray, 'K'], slots: Bool[np.ndarray, 'K']
) -> Iterator[Cell]:
  """Independent events `uniform < probability` at some slots.

  Args:
    probabilities: of the event at each slot. Shape `[K]`.
    slots: where the noise matters; elsewhere it is 1, no event.

  Yields:
    Probability, and noise that is 0 where the event happens and 1 elsewhere.

  Example:
    >>> [p for p, _ in bernoulli_cells(np.array([0.25]), np.array([True]))]
    [0.25, 0.75]
  """
  p = np.asarray(probabilities, np.float64)[slots]
  for happens in itertools.product((True, False), repeat=len(p)):
    weight = math.prod(np.where(happens, p, 1 - p).tolist())
    if weight > 0:
      noise = np.ones(slots.shape)
      noise[slots] = np.where(happens, 0.0, 1.0)
      yield weight, noise


def order_cells(
  weights: Float[np.ndarray, 'K'], slots: Bool[np.ndarray, 'K']
) -> Iterator[Cell]:
  """Sampling slots without replacement, by weight (Plackett-Luce).

  Adding Gumbel noise to log weights and sorting has this law.

  Args:
    weights: positive where `slots`. Shape `[K]`.
    slots: where the noise matters; elsewhere it is 0.

  Yields:
    Probability, and noise so far apart that it alone decides the order.

  Example:
    >>> [p for p, _ in order_cells(np.array([3.0, 1]), np.array([True, True]))]
    [0.75, 0.25]
  """
  indices = np.flatnonzero(slots)
  for order in itertools.permutations(indices):
    w = np.asarray(weights, np.float64)[list(order)]
    left = np.cumsum(w[::-1])[::-1]
    noise = np.zeros(slots.shape)
    noise[list(order)] = 1e12 * np.arange(len(order), 0, -1)
    yield float(np.prod(w / left)), noise
