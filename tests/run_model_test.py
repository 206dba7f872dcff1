"""Runs on prepared documents, and runs that go on from a model."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from mdlm_jax import (
  checkpoints,
  evaluation,
  run_config,
  run_data,
  run_model,
  runs,
)
from mdlm_jax.data import preparation
from mdlm_jax.data.prepared import open_prepared
from mdlm_jax.models import directory, placement
from mdlm_jax.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer('0123456789+=abcdefgh ', eos=True)
LENGTH = 16
SMALL = {
  'steps': 4,
  'log_every': 2,
  'checkpoint_every': 2,
  'data.length': LENGTH,
  'data.batch_size': 8,
  'optimizer.muon_learning_rate': 0.0,
  'optimizer.warmup_steps': 1,
  'ema_decay': 0.0,
}
SHAPE = {
  'model.num_layers': 1,
  'model.model_dim': 16,
  'model.num_heads': 2,
  'model.mlp_dim': 32,
}


def config(**changes):
  config = run_config.defaults()
  config.update_from_flattened_dict(SMALL | changes)
  return config


def write_lines(path, objects):
  path.write_text(''.join(json.dumps(x) + '\n' for x in objects))
  return str(path)


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  """Documents of 1 to 39 letters and their ends, every fifth held out."""
  folder = tmp_path_factory.mktemp('texts')
  rng = np.random.default_rng(0)
  documents = [
    {'text': ''.join(rng.choice(list('abcdefgh '), n))} for n in range(1, 40)
  ]
  file = write_lines(folder / 'texts.jsonl', documents)
  settings = preparation.Settings(validation_every=5)
  preparation.prepare(
    folder / 'prepared', [file], tokenizer=TOKENIZER, settings=settings
  )
  return folder / 'prepared'


@pytest.fixture(scope='module')
def examples(tmp_path_factory):
  """Sums of two digits: 4 given tokens, an answer of 1 or 2 and its end."""
  folder = tmp_path_factory.mktemp('examples')
  file = write_lines(
    folder / 'sums.jsonl',
    [
      {'prompt': f'{a}+{b}=', 'answer': str(a + b)}
      for a in range(10)
      for b in range(10)
    ],
  )
  settings = preparation.Settings(field=None, validation_every=10)
  preparation.prepare(
    folder / 'prepared', [file], tokenizer=TOKENIZER, settings=settings
  )
  return folder / 'prepared'


@pytest.fixture(scope='module')
def base(texts, tmp_path_factory):
  """The work directory of a run on packed documents."""
  workdir = tmp_path_factory.mktemp('base')
  changes = {'data.prepared': str(texts), 'data.rows': 'packed'}
  assert runs.train(config(**SHAPE, **changes), workdir) == 0
  return workdir


def lines(workdir):
  content = (workdir / 'metrics.jsonl').read_text()
  return [json.loads(line) for line in content.splitlines()]


def on_examples(base, examples, **changes):
  return config(
    **{
      'init_from': str(base),
      'data.prepared': str(examples),
      'data.rows': 'examples',
      'data.answer_multiple': 4,
      'loss.kind': 'answer',
      'optimizer.weight_decay': 0.0,
    }
    | changes
  )


def test_packed_documents_are_learned_and_evaluated(base, texts):
  report = json.loads((base / 'evaluation.json').read_text())
  prepared = open_prepared(texts)
  assert report['num_tokens'] == prepared.validation.lengths.sum()
  assert report['corpus_sha256'] == prepared.digest
  facts = report['rows']
  assert facts['learned'] == prepared.training.lengths.sum()
  assert facts['documents'] == len(prepared.training.lengths)
  # Near the uniform distribution over what may be drawn, after 4 steps.
  assert abs(report['nats_per_token'] - np.log(TOKENIZER.vocab.size - 2)) < 0.3
  assert 'rows' in evaluation.summary(report)
  assert run_data.summary(facts).startswith('31 documents in ')


def test_nothing_is_evaluated_where_no_row_is_to_be(texts):
  for most_rows, has_evaluation in ((0, False), (1, True)):
    changes = {
      'data.prepared': str(texts),
      'data.rows': 'packed',
      'evaluation.most_rows': most_rows,
    }
    data = run_data.prepared_data(config(**changes))
    assert (data.evaluate is not None) == has_evaluation


def test_other_documents_are_another_run(base, examples):
  changes = {'data.prepared': str(examples), 'data.rows': 'packed'}
  with pytest.raises(ValueError, match='another text'):
    runs.train(config(**SHAPE, **changes), base)


def test_a_run_goes_on_from_the_parameters_of_a_model(
  base, examples, tmp_path, monkeypatch
):
  changes = {'optimizer.learning_rate': 1e-12}
  assert runs.train(on_examples(base, examples, **changes), tmp_path) == 0
  before, after = (directory.load(x / 'model') for x in (base, tmp_path))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9),
    before.params,
    after.params,
  )
  assert after.config == before.config
  # Rows are counted by the loss, two steps of 8; of tokens those of answers
  # that are filled up to 4. Prompts are not learned.
  for line in lines(tmp_path):
    assert line['count'] == 16
  # Goes on without the parameters that it began with in memory.
  again = on_examples(base, examples, **changes, steps=5)
  restored, held = checkpoints.restore, []

  def restore(*arguments):
    held.extend(not x.is_deleted() for x in jax.tree.leaves(loaded.params))
    return restored(*arguments)

  loaded = run_model.load(again, placement.mesh(1, 1, 1))
  monkeypatch.setattr(run_model, 'load', lambda *_: loaded)
  monkeypatch.setattr(checkpoints, 'restore', restore)
  assert runs.train(again, tmp_path) == 0
  assert held and not any(held)
  report = json.loads((tmp_path / 'evaluation.json').read_text())
  assert report['num_tokens'] == 10 * 4
  # 55 sums have one digit: of 4 learned tokens 2 are filling, else 1.
  assert 'rows, which are 4' in run_data.summary(report['rows'])
  assert '% of what is learned is filling' in run_data.summary(report['rows'])


@pytest.mark.parametrize('int8', [False, True])
def test_adapters_leave_all_else_as_it_was(base, examples, tmp_path, int8):
  changes = {
    'adapters.rank': 2,
    'adapters.targets': ('query', 'up'),
    'adapters.int8': int8,
    'optimizer.learning_rate': 0.1,
  }
  base, workdir = shutil.copytree(base, tmp_path / 'base'), tmp_path / 'run'
  assert runs.train(on_examples(base, examples, **changes), workdir) == 0
  before, after = (directory.load(x / 'model').params for x in (base, workdir))
  for name, layer in before['blocks'].items():
    (kind,) = layer
    difference = np.abs(after['blocks'][name][kind] - layer[kind]).max()
    if name in ('query', 'up'):
      assert difference > 1e-2
    elif int8 and kind == 'kernel':
      assert difference < 1e-2  # What eight bits leave of it.
    else:
      assert difference == 0
  np.testing.assert_array_equal(after['embedding'], before['embedding'])
  # The same command goes on.
  changes['steps'] = 6
  assert runs.train(on_examples(base, examples, **changes), workdir) == 0
  assert [line['step'] for line in lines(workdir)] == [2, 4, 6]
  # But not beside other parameters in the same place.
  shutil.copytree(workdir / 'model', base / 'model', dirs_exist_ok=True)
  with pytest.raises(ValueError, match='holds adapters of another model than'):
    runs.train(on_examples(base, examples, **changes), workdir)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'data.length': 17}, 'length=17 is longer than the 16 positions'),
    ({'adapters.rank': 99}, 'rank=99 must be at most 16'),
    ({'adapters.rank': 2, 'adapters.targets': ('all',)}, "targets=.'all'."),
    ({'init_from': '/no/model'}, 'no model in /no/model'),
    ({'init_mask_id': 5}, 'mask_id=5, but the directory says 1'),
    ({'data.prepared': '/no/data'}, 'no prepared data in /no/data'),
    ({'data.length': 4}, 'none can be learned from'),
    ({'model.num_layers': 2}, 'config.model.num_layers=2 needs a fresh model'),
  ],
)
def test_mistakes_are_found_before_anything_is_written(
  base, examples, tmp_path, changes, message
):
  with pytest.raises((ValueError, OSError), match=message):
    runs.train(on_examples(base, examples, **changes), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('xyz', r'has Vocab\(size=6'),
    # As many characters, with the same roles, and z in place of h.
    ('0123456789+=abcdefgz ', "has other tokens than .*, such as 'h'"),
  ],
)
def test_documents_of_another_vocabulary_are_refused(
  base, tmp_path: pathlib.Path, text, message
):
  file = write_lines(tmp_path / 'x.jsonl', [{'text': text * 9}] * 3)
  preparation.prepare(tmp_path / 'other', [file])
  changes = {
    'init_from': str(base),
    'data.prepared': str(tmp_path / 'other'),
    'data.rows': 'documents',
  }
  with pytest.raises(ValueError, match=message):
    runs.train(config(**changes), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
