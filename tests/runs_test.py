"""Whole training runs, and the scripts around them as users see them."""

import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time

import grain  # noqa: F401  Defines flags, which `load` would not keep.
import jax
import numpy as np
import pytest
import script_runner
from ml_collections import ConfigDict

from mdlm_jax import checkpoints, ngrams, program_cost, run_setup, runs
from mdlm_jax.data.batches import batches
from mdlm_jax.data.corpus import read_corpus
from mdlm_jax.models import directory

ROOT = script_runner.ROOT


def tiny_config(text_file, **changes) -> ConfigDict:
  config = runpy.run_path(str(ROOT / 'configs' / 'tiny.py'))['get_config']()
  config.update_from_flattened_dict(
    {
      'steps': 6,
      'log_every': 2,
      'checkpoint_every': 3,
      'data.files': str(text_file),
      'model.num_layers': 1,
      'optimizer.warmup_steps': 2,
    }
    | changes
  )
  return config


@pytest.fixture(scope='module')
def text_file(tmp_path_factory):
  path = tmp_path_factory.mktemp('text') / 'text.txt'
  rng = np.random.default_rng(0)
  words = rng.choice(['red ', 'blue ', 'green\n', 'the '], 2000)
  path.write_text(''.join(words))
  return path


@pytest.fixture(scope='module')
def finished(text_file, tmp_path_factory):
  """The work directory of an unbroken run of 6 steps."""
  workdir = tmp_path_factory.mktemp('run') / 'workdir'
  assert runs.train(tiny_config(text_file), workdir) == 0
  return workdir


def metrics_of(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  for row in rows:
    del row['tokens_per_second']
  return rows


def test_run_leaves_everything(finished):
  assert sorted(p.name for p in (finished / 'checkpoints').iterdir()) == [
    '3',
    '6',
  ]
  rows = metrics_of(finished)
  assert [row['step'] for row in rows] == [2, 4, 6]
  assert set(rows[0]) == {
    'step',
    'loss',
    'sum',
    'count',
    'bound',
    'masked_cross_entropy',
    'bound_per_row',
    'empty_rows',
    'gradient_norm',
    'skipped',
  }
  for row in rows:
    # Two steps of 16 rows of 32 tokens.
    assert row['count'] == 2 * 16 * 32
    np.testing.assert_allclose(row['loss'], row['sum'] / row['count'])
  assert (finished / 'incidents.jsonl').read_text() == ''
  assert list(finished.glob('events.out.tfevents.*'))
  model = directory.load(finished / 'model')
  assert model.config.num_layers == 1
  assert (
    model.tokenizer.decode(model.tokenizer.encode('the red\n')) == 'the red\n'
  )


def test_report_of_the_run(finished, text_file):
  report = json.loads((finished / 'evaluation.json').read_text())
  held_out = read_corpus(str(text_file)).validation[0].text
  assert report['num_characters'] == report['num_tokens'] == len(held_out)
  np.testing.assert_allclose(
    report['bits_per_character'], report['nats_per_token'] / math.log(2)
  )
  assert 0 < report['bits_per_character_standard_error'] < 1
  # The two parts are joined by a blank line here.
  np.testing.assert_allclose(
    report['corpus_entropies_bits_per_character'],
    ngrams.entropies(text_file.read_text()),
    atol=0.01,
  )
  assert report['config']['steps'] == report['step'] == 6
  assert report['versions']['jax'] == jax.__version__
  assert report['train_tokens_per_second'] > 0


def test_resumed_run_equals_the_unbroken_one(
  finished, text_file, tmp_path, capsys
):
  workdir = tmp_path / 'workdir'
  shutil.copytree(finished, workdir)
  shutil.rmtree(workdir / 'checkpoints' / '6')
  shutil.rmtree(workdir / 'model')
  with open(workdir / 'metrics.jsonl', 'a') as stream:
    stream.write('{"step": 8, "bou')  # Killed while it wrote.
  moved = shutil.copy(text_file, tmp_path)
  assert runs.train(tiny_config(moved), workdir) == 0
  assert f'resuming {workdir} at step 3\n' in capsys.readouterr().out
  assert (workdir / 'model' / 'model.safetensors').read_bytes() == (
    finished / 'model' / 'model.safetensors'
  ).read_bytes()
  # The row of steps 3 and 4 spans the restart.
  assert metrics_of(workdir) == metrics_of(finished)
  assert [row['step'] for row in metrics_of(workdir)] == [2, 4, 6]
  first, second = (
    json.loads((path / 'evaluation.json').read_text())
    for path in (finished, workdir)
  )
  for name in ('nats_per_token', 'nats_per_token_standard_error'):
    assert first[name] == second[name]
  # And all of the train state and the data position.
  states = [state_of(path, text_file) for path in (finished, workdir)]
  jax.tree.map(np.testing.assert_array_equal, *states)


def test_a_run_is_not_touched_where_it_may_not_be_resumed(finished, text_file):
  before = snapshot(finished)
  with pytest.raises(ValueError, match='holds a run at step 6'):
    runs.train(tiny_config(text_file), finished, resume=False)
  assert snapshot(finished) == before


def state_of(workdir, text_file):
  run = run_setup.prepare(tiny_config(text_file))
  iterator = batches(run.data.rows, batch_size=16, seed=0)
  state = checkpoints.restore(
    workdir / 'checkpoints', run_setup.state_target(run), iterator
  )
  return state, next(iterator)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'seed': 1}, 'config.seed=0, not 1'),
    ({'data.length': 16}, 'config.data.length=32, not 16'),
    ({'model.num_layers': 2}, 'config.model.num_layers=1, not 2'),
    ({'ema_decay': 0.5}, 'config.ema_decay=0.9, not 0.5'),
    ({'steps': 5}, 'at step 6, beyond steps=5'),
  ],
)
def test_another_run_is_not_resumed(
  finished, text_file, changes, message, monkeypatch
):
  before = snapshot(finished)
  monkeypatch.setattr(run_setup, 'compiled_step', None)  # Not asked for.
  with pytest.raises(ValueError, match=message):
    runs.train(tiny_config(text_file, **changes), finished)
  assert snapshot(finished) == before


def test_changed_text_is_not_resumed(finished, text_file):
  content = text_file.read_text()
  try:
    text_file.write_text(content + 'the end')
    with pytest.raises(ValueError, match='another text'):
      runs.train(tiny_config(text_file), finished)
  finally:
    text_file.write_text(content)


def snapshot(directory_):
  return {
    path: path.stat().st_mtime_ns
    for path in directory_.rglob('*')
    if path.is_file()
  }


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'data.files': '/no/such/file.txt'}, 'no such file: /no/such/file.txt'),
    ({'data.length': 10**6}, r'text\.txt: \d+ tokens .* length 1000000'),
    ({'data.batch_size': 0}, 'batch_size=0'),
    ({'data.bpe_vocab_size': 10}, 'vocab_size=10'),
    ({'data.split': 'half'}, "split='half'"),
    ({'model.num_heads': 5}, 'model_dim=32'),
    ({'model.dtype': 'int8'}, 'int8'),
    ({'optimizer.warmup_steps': 6}, 'warmup_steps=6'),
    ({'steps': 0}, 'steps=0'),
    ({'loss.schedule': 'none'}, "schedule='none'"),
    ({'loss.t_min': -1.0}, 't_min=-1.0'),
    (
      {'model.attention_block': 2, 'model.time_conditioning': True},
      'attention_block cannot be used with time_conditioning',
    ),
    ({'log_every': 0}, 'log_every=0'),
    ({'accumulation': 3}, 'config.accumulation=3 must divide .*batch_size=16'),
    ({'mesh.tensor': 2}, r'data=-1, fsdp=1, tensor=2 does not fit 1 device'),
    ({'remat': 'some'}, "remat='some'"),
    ({'keep_checkpoints': 0}, 'keep_checkpoints=0'),
    ({'evaluation.num_replicates': 1}, 'num_replicates=1'),
    ({'evaluation.batch_size': 0}, 'evaluation.batch_size=0'),
    ({'saved_dtype': 'float16'}, "saved_dtype='float16'"),
  ],
)
def test_mistakes_are_found_before_anything_is_written(
  text_file, tmp_path, changes, message
):
  with pytest.raises((ValueError, OSError), match=message):
    runs.train(tiny_config(text_file, **changes), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_text_too_short_to_hold_a_part_out_is_refused(tmp_path):
  # 5 % of nine characters round to none.
  (tmp_path / 'text.txt').write_text('abcabcabc')
  config = tiny_config(tmp_path / 'text.txt', **{'data.length': 4})
  with pytest.raises(ValueError, match='too short to hold'):
    runs.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_run_that_diverged_ends_with_finite_parameters(
  text_file, tmp_path, capsys
):
  # The first updates are so large that every later gradient is NaN.
  config = tiny_config(
    text_file,
    **{
      'optimizer.muon_learning_rate': 0.0,
      'optimizer.learning_rate': 1e30,
      'optimizer.weight_decay': 0.0,
      'optimizer.warmup_steps': 0,
      'steps': 100,
      'most_skipped': 3,
    },
  )
  with pytest.raises(
    FloatingPointError, match=r'the 4 steps up to \d+ was finite'
  ):
    runs.train(config, tmp_path)
  assert 'its gradient is not finite' in capsys.readouterr().err
  lines = (tmp_path / 'incidents.jsonl').read_text().splitlines()
  incidents = [json.loads(line) for line in lines]
  steps = [x['step'] for x in incidents if x['incident'] == 'skipped']
  assert steps == list(range(steps[0], steps[0] + 4))
  state = checkpoints.latest_state(tmp_path / 'checkpoints')
  assert state['step'] == steps[-1]
  assert state['skipped'] == 4
  for leaf in jax.tree.leaves((state['params'], state['ema'])):
    assert np.isfinite(leaf).all()
  for line in (tmp_path / 'metrics.jsonl').read_text().splitlines():
    assert np.isfinite(list(json.loads(line).values())).all()


def test_a_run_that_does_not_fit_ends_before_anything_is_allocated(
  text_file, tmp_path, monkeypatch
):
  monkeypatch.setattr(program_cost, 'device_capacity', lambda device: 10**6)
  monkeypatch.setattr(run_setup, 'fresh_state', None)  # Not asked for.
  with pytest.raises(ValueError, match=r'needs [\d.]+ MB .* it has 1 MB'):
    runs.train(tiny_config(text_file), tmp_path / 'run')
  assert not (tmp_path / 'run' / 'model').exists()


def send_when_running(kind, workdir, num_rows):
  def wait_and_send():
    log = workdir / 'metrics.jsonl'
    while not log.exists() or len(log.read_text().splitlines()) < num_rows:
      time.sleep(0.02)
    os.kill(os.getpid(), kind)

  threading.Thread(target=wait_and_send, daemon=True).start()


def test_interruptions_save_and_the_run_goes_on(text_file, tmp_path, capsys):
  config = tiny_config(
    text_file, steps=10**6, checkpoint_every=10**6, log_every=1
  )
  steps = []
  for kind, code, num_rows in (
    (signal.SIGINT, 130, 1),
    (signal.SIGTERM, 0, 100),
  ):
    send_when_running(kind, tmp_path, num_rows)
    assert runs.train(config, tmp_path) == code
    out = capsys.readouterr().out
    steps.append(int(re.search(r'stopped at step (\d+)', out)[1]))
    assert checkpoints.latest_step(tmp_path / 'checkpoints') == steps[-1]
    assert [row['step'] for row in metrics_of(tmp_path)] == list(
      range(1, steps[-1] + 1)
    )
    directory.load(tmp_path / 'model')
    assert not (tmp_path / 'evaluation.json').exists()
  assert f'resuming {tmp_path} at step {steps[0]}\n' in out
  assert steps[0] < steps[1]


def test_library_works_without_the_optional_packages():
  result = subprocess.run(
    [
      sys.executable,
      '-c',
      'import sys\n'
      'for name in (\n'
      '  "grain", "ml_collections", "tensorboardX", "matplotlib", "gguf"\n'
      '):\n'
      '  sys.modules[name] = None\n'
      'from mdlm_jax import evaluation, tokenizer, training\n'
      'from mdlm_jax.data import batches, corpus, windows\n'
      'from mdlm_jax.sample_quality import judge\n'
      'from mdlm_jax.models import directory, transformer\n'
      'windows.training_windows(corpus.default_documents(),\n'
      '  corpus.corpus_tokenizer(corpus.read_corpus()), 8)\n'
      'sys.argv = ["train.py"]\n'
      'import runpy\n'
      f'runpy.run_path({str(ROOT / "scripts" / "train.py")!r})\n',
    ],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.stderr == (
    "error: grain is missing; pip install 'mdlm_jax[train]'\n"
  )
  assert result.returncode == 2


def run_script(name, *arguments):
  return subprocess.run(
    [sys.executable, ROOT / 'scripts' / name, *arguments],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )


def test_train_program_reports_a_mistake_in_one_line(tmp_path):
  result = run_script(
    'train.py',
    f'--config={ROOT / "configs" / "tiny.py"}',
    f'--workdir={tmp_path / "run"}',
    '--config.data.files=missing.txt',
  )
  assert result.returncode == 2
  assert result.stderr == 'error: no such file: missing.txt\n'
  assert result.stdout == ''
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('arguments', 'line'),
  [
    (['--config=/no/config.py'], 'error: no such file: /no/config.py\n'),
    (
      [f'--config={ROOT / "configs" / "tiny.py"}', '--config.stepz=1'],
      'error: the config has no field \'stepz\'; Did you mean "steps" instead '
      'of "stepz"?\n',
    ),
    (
      [f'--config={ROOT / "configs" / "tiny.py"}', '--config.steps=many'],
      'error: flag --config.steps=many: invalid literal for int() with base '
      "10: 'many'\n",
    ),
    (
      [f'--config={ROOT / "configs" / "tiny.py"}', '--workdir='],
      'error: --workdir is empty\n',
    ),
  ],
)
def test_mistakes_in_the_config_are_one_line(tmp_path, arguments, line):
  result = run_script('train.py', f'--workdir={tmp_path / "run"}', *arguments)
  assert (result.returncode, result.stderr) == (2, line)
  assert not (tmp_path / 'run').exists()


def test_evaluate_reads_the_files_it_is_given(finished, tmp_path, capsys):
  (tmp_path / 'a.txt').write_text('the red blue\n' * 10)
  (tmp_path / 'b.txt').write_text('green\n' * 5)
  arguments = (f'--checkpoint={finished / "model"}', f'--file={tmp_path}/*.txt')
  script_runner.run('evaluate.py', *arguments, '--json')
  report = json.loads(capsys.readouterr().out)
  assert report['num_tokens'] == report['num_characters'] == 160
  script_runner.run('evaluate.py', *arguments)
  line = capsys.readouterr().out.splitlines()[0]
  assert f'{report["bits_per_character"]:.4f} +- ' in line


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--checkpoint=/no/such'], 'no model in /no/such'),
    (['--file=/no/such.txt'], 'no such file: /no/such.txt'),
    (['--file={new}'], "unknown characters 'Q'"),
    (['--part=test'], 'left no test text'),
    (['--part=test', '--file={new}'], '--part'),
    (['--num_replicates=1'], 'num_replicates=1'),
  ],
)
def test_mistakes_in_evaluating(finished, tmp_path, arguments, message):
  (tmp_path / 'new.txt').write_text('the Q')
  arguments = [a.format(new=tmp_path / 'new.txt') for a in arguments]
  with pytest.raises((ValueError, OSError), match=re.escape(message)):
    script_runner.run('evaluate.py', f'--checkpoint={finished}', *arguments)


def test_a_model_without_its_history_needs_a_file(finished, tmp_path):
  shutil.copytree(finished / 'model', tmp_path / 'model')
  (tmp_path / 'model' / 'training.json').unlink()
  with pytest.raises(ValueError, match='use --file'):
    script_runner.run('evaluate.py', f'--checkpoint={tmp_path}')


def test_evaluate_program_repeats_the_report_of_the_run(finished):
  result = run_script(
    'evaluate.py', f'--checkpoint={finished}', '--num_replicates=2', '--json'
  )
  assert result.returncode == 0, result.stderr
  report = json.loads(result.stdout)
  of_the_run = json.loads((finished / 'evaluation.json').read_text())
  for name in ('num_tokens', 'seed', 'corpus_sha256', 'versions'):
    assert report[name] == of_the_run[name]
  np.testing.assert_allclose(
    report['nats_per_token'], of_the_run['nats_per_token'], rtol=1e-5
  )
