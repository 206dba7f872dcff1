"""scripts/experiments/memory.py against sizes counted by hand."""

import json
import sys

import golden_data
import script_runner

from mdlm_jax.models import families, placement

sys.path.insert(0, str(script_runner.ROOT / 'scripts' / 'experiments'))

# Width 48, 4 heads, MLP 112, 2 layers, 128 ids, separate head.
CONFIG = families.layout(
  json.loads((golden_data.FOLDER / 'llada' / 'config.json').read_text())
).config
MATRICES = 2 * (4 * 48 * 48 + 3 * 48 * 112)
REST = 2 * 128 * 48 + 5 * 48
OUTPUTS = 2 * (4 * 48 + 2 * 112 + 48)
SHARDING = placement.sharding(placement.mesh(1, 1, 1))


def test_weights_and_cache():
  memory = script_runner.load('experiments/memory.py')
  count = memory.weight_bytes
  assert count(CONFIG, SHARDING, int8=False) == 2 * (MATRICES + REST)
  eight_bits = MATRICES + 4 * OUTPUTS + 2 * REST
  assert count(CONFIG, SHARDING, int8=True) == eight_bits
  # Keys and values of two layers at 20 slots.
  assert memory.cache_bytes(CONFIG, 2, 10) == 2 * 2 * 2 * 48 * 20
