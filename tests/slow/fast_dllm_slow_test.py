"""Every recorded run of Fast-dLLM's decoders.

Two to four minutes:

  python -m pytest -q tests/slow/fast_dllm_slow_test.py
"""

import fast_dllm
import golden_data
import pytest

from mdlm_jax.models import directory

MODEL = directory.load(golden_data.FOLDER / 'llada')


@pytest.mark.parametrize('case', fast_dllm.CASES)
def test_the_tokens_calls_and_computed_slots_are_theirs(case):
  fast_dllm.check(MODEL, case)
