"""scripts/experiments/memory.py against sizes counted by hand."""

import json

import golden_data
import pytest
import script_runner

from mdlm_jax.models import families, placement

# Width 48, 4 heads, MLP 112, 2 layers, 128 ids, separate head.
CONFIG = families.layout(
  json.loads((golden_data.FOLDER / 'llada' / 'config.json').read_text())
).config
MATRICES = 2 * (4 * 48 * 48 + 3 * 48 * 112)
REST = 2 * 128 * 48 + 5 * 48
OUTPUTS = 2 * (4 * 48 + 2 * 112 + 48)
SHARDING = placement.sharding(placement.mesh(1, 1, 1))


@pytest.fixture(scope='module')
def memory():
  return script_runner.load('experiments/memory.py')


def test_weights_cache_and_operations(memory):
  count = memory.weight_bytes
  assert count(CONFIG, SHARDING, int8=False) == 2 * (MATRICES + REST)
  eight_bits = MATRICES + 4 * OUTPUTS + 2 * REST
  assert count(CONFIG, SHARDING, int8=True) == eight_bits
  # Keys and values of two layers at 20 slots.
  assert memory.cache_bytes(CONFIG, 2, 10) == 2 * 2 * 2 * 48 * 20
  # Three of ten slots: matrices, scores and mixing in two layers, the head.
  products = 3 * (MATRICES + 2 * 2 * 48 * 10 + 128 * 48)
  assert memory.operations(CONFIG, 1, 3, 10, 3) == 2 * products


def test_a_token_passes_the_experts_that_it_chooses(memory):
  path = golden_data.FOLDER / 'llada2_moe' / 'config.json'
  config = families.layout(json.loads(path.read_text())).config
  # Width 48, 4 query heads and 2 others of width 16; a dense layer of 96, then
  # two with a router, 4 of 16 experts of 24 and a shared one.
  attention = 48 * 16 * (4 + 2 + 2) + 4 * 16 * 48
  products = 3 * attention + 3 * 48 * 96 + 2 * (48 * 16 + 5 * 3 * 48 * 24)
  # Scores and mixing at 7 slots in three layers, and the head.
  products += 2 * 3 * 4 * 16 * 7 + 48 * 128
  assert memory.operations(config, 1, 1, 7, 1) == 2 * products
