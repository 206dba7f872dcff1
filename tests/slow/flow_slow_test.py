"""The law of samples of the other flows, of which the fast tests draw one.

Half a minute:

  python -m pytest -q tests/slow/flow_slow_test.py
"""

import pytest
from flow_sampling_test import assert_samples_have_the_law

from mdlm_jax import flow


@pytest.mark.parametrize(
  ('step', 'own'),
  [
    (flow.exact(), True),
    (flow.exact(corrector=0.5), True),
    (flow.euler(corrector=0.5), True),
    (flow.ancestral(), False),
  ],
)
def test_samples_from_a_uniform_source_have_the_law(step, own):
  assert_samples_have_the_law(step, 'uniform', own)
