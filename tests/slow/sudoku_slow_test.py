"""The Sudoku experiment from nothing, with another seed."""

import json
import pathlib
import subprocess
import sys

import numpy as np

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = _ROOT / 'scripts' / 'experiments'


def test_a_fresh_model_solves_by_adaptive_order_only(tmp_path):
  subprocess.run(
    [
      sys.executable,
      str(_FOLDER / 'sudoku.py'),
      f'--config={_ROOT / "configs" / "sudoku6.py"}',
      '--config.seed=1',
      '--axes=positions',
      '--givens=12',
      f'--workdir={tmp_path}',
      f'--json={tmp_path / "comparison.json"}',
    ],
    cwd=_ROOT,
    check=True,
  )
  content = json.loads((tmp_path / 'comparison.json').read_text())
  rows = {row['name']: row for row in content['results']}
  for name in ('confidence', 'margin', 'entropy'):
    solved, by_chance = (
      np.array(list(rows[order]['solved']), int) for order in (name, 'random')
    )
    differences = solved - by_chance
    error = differences.std(ddof=1) / len(differences) ** 0.5
    assert differences.mean() - 4 * error > 0.5, name
