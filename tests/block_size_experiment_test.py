"""The bound against the block size, on a text that trains in a moment."""

import json

import pytest
import script_runner

SCRIPT = 'experiments/block_size.py'
CONFIG = """
import runpy
get_small = runpy.run_path({path!r})['get_config']

def get_config(block):
  config = get_small(block)
  config.data.update(
    files={text!r}, split='tail', bpe_vocab_size=0, length=8, batch_size=4
  )
  config.model.update(num_layers=1, model_dim=16, num_heads=1, mlp_dim=16)
  config.optimizer.warmup_steps = 0
  config.optimizer.muon_learning_rate = 0.0
  return config
"""


def test_every_block_size_is_trained_scored_and_drawn(tmp_path, capsys):
  text = tmp_path / 'text.txt'
  text.write_text('the cat sat on the mat and the dog ran ' * 40)
  config = tmp_path / 'config.py'
  path = script_runner.ROOT / 'configs' / 'block_sotu.py'
  config.write_text(CONFIG.format(path=str(path), text=str(text)))
  arguments = [
    f'--config={config}',
    f'--workdir={tmp_path / "runs"}',
    '--steps=2',
    '--block=1',
    '--block=4',
    f'--json={tmp_path / "blocks.json"}',
    f'--plot={tmp_path / "blocks.png"}',
  ]
  script_runner.run(SCRIPT, *arguments)
  content = json.loads((tmp_path / 'blocks.json').read_text())
  one, four = content['results']
  assert (one['block'], one['range']) == (1, [1.0, 1.0])
  assert (four['block'], four['range']) == (4, [0.45, 0.95])
  assert one['nats_per_token'] != four['nats_per_token']
  assert one['least_variance_range'] == [0.5, 1.0]
  assert four['least_variance_share'] < 1
  model = json.loads((tmp_path / 'runs/block4/model/config.json').read_text())
  assert model['model']['attention_block'] == 4
  assert 'least variance' in capsys.readouterr().out
  assert (tmp_path / 'blocks.png').read_bytes().startswith(b'\x89PNG')
  # What is trained is not trained again.
  report = tmp_path / 'runs/block1/evaluation.json'
  before = report.stat().st_mtime_ns
  script_runner.run(SCRIPT, *arguments[:4])
  assert report.stat().st_mtime_ns == before


def test_a_directory_is_asked_for():
  with pytest.raises(Exception, match='workdir'):
    script_runner.run(SCRIPT)
