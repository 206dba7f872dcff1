"""Loader of the reference numbers in tests/golden."""

import collections
import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent / 'golden'


def load(name: str) -> dict[str, dict[str, np.ndarray]]:
  """Reads `tests/golden/<name>.npz`: case -> field -> array."""
  cases = collections.defaultdict(dict)
  with np.load(FOLDER / f'{name}.npz') as arrays:
    for key, array in arrays.items():
      case, field = key.rsplit('.', 1)
      cases[case][field] = array
  return dict(cases)
