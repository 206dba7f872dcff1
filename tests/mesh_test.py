"""Training on one to eight devices; mesh_program.py computes it."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import script_runner

DENSE = [
  f'dense {shape}'
  for shape in (
    (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (8, 1, 1), (2, 2, 2),
  )
]  # fmt: skip
PAIRS = [(name, 'dense (1, 1, 1)') for name in DENSE]
PAIRS.append(('mixed (2, 2, 2)', 'mixed (1, 1, 1)'))


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  path = tmp_path_factory.mktemp('mesh') / 'found.json'
  environment = os.environ | {
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8 '
    '--xla_backend_optimization_level=0',
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': str(script_runner.ROOT),
  }
  program = script_runner.ROOT / 'tests' / 'mesh_program.py'
  subprocess.run([sys.executable, program, path], env=environment, check=True)
  return json.loads(path.read_text())


@pytest.mark.parametrize(('name', 'alone'), PAIRS)
def test_losses_are_those_of_one_device(found, name, alone):
  # Experts and blocks of attention in the mixed one; logits in chunks of slots
  # on eight devices of the dense one.
  expected = found[alone]['losses']
  assert len(set(expected)) == 5
  np.testing.assert_allclose(found[name]['losses'], expected, atol=1e-5)


@pytest.mark.parametrize('name', DENSE)
def test_times_and_masks_are_of_rows(found, name):
  """To the bit, on every device that has the row, and no two alike."""
  expected = found['dense (1, 1, 1)']['draws']
  drawn = found[name]['draws']
  assert drawn.keys() == expected.keys() == set('01234567')
  tensor = 2 if name.endswith('2)') else 1
  for row, of_devices in drawn.items():
    assert of_devices == expected[row] * tensor
  assert len({times for ((times, _),) in expected.values()}) == 8
  # Rows 5 and 6 have the same tokens.
  assert expected['5'][0][1] != expected['6'][0][1]


@pytest.mark.parametrize('name', DENSE)
def test_devices_without_tokens_change_nothing(found, name):
  loss, count = found[name]['lonely']
  expected, expected_count = found['dense (1, 1, 1)']['lonely']
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert count == expected_count == 8
  assert found[name]['finite']


def test_logits_stay_where_they_are(found):
  assert not any(result['moved_logits'] for result in found.values())


def test_state_is_split_and_donated(found):
  assert all(result['donated'] for result in found.values())
  shards = found['dense (2, 2, 2)']['shards']
  for place in 'params', 'ema', 'mu', 'nu':
    for end, shape in (
      ('blocks/query/kernel', [2, 8, 8]),  # Of [2, 16, 16].
      ('blocks/mlp_out/kernel', [2, 16, 8]),  # Of [2, 32, 16].
      ('embedding', [24, 8]),  # Of [48, 16].
      ('norm/scale', [16]),
    ):
      keys = [key for key in shards if key.endswith(f'/{place}/{end}')]
      keys += [key for key in shards if key == f'{place}/{end}']
      assert len(keys) == 1, (place, end)
      assert shards[keys[0]][1] == shape
  mixed = found['mixed (2, 2, 2)']['shards']
  whole, part = mixed['params/blocks/experts/out']
  assert whole == [2, 4, 8, 16] and part == [2, 4, 4, 8]
