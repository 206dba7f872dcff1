"""scripts/experiments/memory.py compiles what it says; on a tiny model."""

import json
import sys

import golden_data
import script_runner

from mdlm_jax.models import families, placement

sys.path.insert(0, str(script_runner.ROOT / 'scripts' / 'experiments'))


def test_temporaries_hold_the_cache_and_the_logits():
  config = families.layout(
    json.loads((golden_data.FOLDER / 'llada' / 'config.json').read_text())
  ).config
  memory = script_runner.load('experiments/memory.py')
  sharding = placement.sharding(placement.mesh(1, 1, 1))
  found = {
    name: memory.compiled_bytes(config, sharding, 1, 64, 4, policy)
    for name, policy in memory._POLICIES.items()
  }
  # In float32.
  cache, logits = 2 * memory.cache_bytes(config, 1, 64), 4 * 4 * 128
  assert found['none'] > logits
  assert found['dual'] > found['none'] + cache
