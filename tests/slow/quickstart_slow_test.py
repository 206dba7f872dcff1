"""The README's main job, as a newcomer runs it after the installation."""

import json
import pathlib
import subprocess
import sys
import time

_ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments):
  return subprocess.run(
    [sys.executable, *map(str, arguments)],
    cwd=_ROOT,
    check=True,
    capture_output=True,
    text=True,
  )


def test_quickstart_learns_and_writes_in_time(tmp_path):
  start = time.monotonic()
  run(
    'scripts/train.py', '--config=configs/quickstart.py',
    f'--workdir={tmp_path}',
  )  # fmt: skip
  tour = run('scripts/sample.py', f'--checkpoint={tmp_path}', '--tour').stdout
  assert time.monotonic() - start < 360
  report = json.loads((tmp_path / 'evaluation.json').read_text())
  assert report['bits_per_character'] < 2.9
  for title in ('from nothing', 'from a prefix', 'into a hole'):
    assert title in tour
