"""The README says what is so: its program runs, its names and files exist."""

import pathlib
import re

import numpy as np

import mdlm_jax

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()


def test_the_programs_run_and_fill_every_slot(capsys):
  _, first, second = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
  names = {}
  exec(first, names)
  result = names['result']
  assert result.calls == 16
  np.testing.assert_array_equal(result.ids[0, :3], [5, 6, 7])
  assert (np.asarray(result.ids) != 1).all()
  assert '16' in capsys.readouterr().out
  exec(second, names)
  result = names['result']
  np.testing.assert_array_equal(result.ids[0, :3], [5, 6, 7])
  assert not ((result.ids == 1) & names['canvas'].generation_slots).any()
  # Two calls a step; an untrained network is sure of nothing.
  np.testing.assert_array_equal(result.calls_per_row, [32, 32])


def test_names_exist():
  names = set(re.findall(r'mdlm_jax\.([a-zA-Z_]+)\(', README))
  assert len(names) > 5
  assert names <= set(mdlm_jax.__all__)


def test_links_and_scripts_exist():
  paths = re.findall(r'\]\((?!http)([^)#]+)\)', README)
  paths += re.findall(r'(?:scripts|configs)/\S+?\.py', README)
  for path in paths:
    assert (ROOT / path).exists(), path
