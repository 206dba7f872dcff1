import math
import pathlib
import runpy

import pytest

from mdlm_jax import run_config

ROOT = pathlib.Path(__file__).parents[1]


def changed(**changes):
  config = run_config.defaults()
  config.update_from_flattened_dict(changes)
  return config


@pytest.mark.parametrize(
  'path', sorted((ROOT / 'configs').glob('*.py')), ids=lambda path: path.stem
)
def test_every_config_states_only_what_is_not_default(path):
  config = runpy.run_path(str(path))['get_config']()
  # It makes no field of its own but those that a script needs for its data.
  fields = run_config.defaults()
  assert set(config) <= set(fields)
  for part in ('model', 'optimizer', 'loss', 'mesh'):
    assert set(config[part]) == set(fields[part])
  if 'files' in config.data:
    if config.data.rows != 'windows':
      config.data.prepared = 'named by the user'
    if config.adapters.rank:
      config.init_from = 'named by the user'
    run_config.check(config)


def test_every_field_is_explained():
  source = (ROOT / 'mdlm_jax' / 'run_config.py').read_text()
  body = source[source.index('def defaults') : source.index('return config')]
  lines = [line for line in body.splitlines() if ' = ' in line]
  assert len(lines) > 50
  # By a comment at its end, or above it.
  unexplained = [line for line in lines if '#' not in line]
  for line in unexplained:
    above = body.splitlines()[body.splitlines().index(line) - 1]
    assert 'ConfigDict()' in line or above.strip().startswith('#'), line


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'data.length': 0}, 'config.data.length=0 must be at least 1'),
    ({'most_skipped': 0}, 'config.most_skipped=0 must be at least 1'),
    ({'adapters.rank': -1}, 'config.adapters.rank=-1 must be at least 0'),
    ({'seed': -1}, r'config.seed=-1 must lie in \[0, 2\*\*32\)'),
    # What a config takes from a file, but not from the command line.
    ({'steps': None}, 'config.steps=None must be of type int'),
    (
      {'data.batch_size': True},
      'config.data.batch_size=True must be of type int',
    ),
    ({'ema_decay': None}, 'config.ema_decay=None must be of type float'),
    ({'adapters.alpha': math.nan}, 'adapters.alpha=nan must be positive'),
    ({'adapters.alpha': 0.0}, 'adapters.alpha=0.0 must be positive'),
    (
      {'data.batch_size': 2**25},
      'data.batch_size=33554432 rows of 64 tokens must have fewer than 2\\^31',
    ),
    (
      {'evaluation.batch_size': 2**60},
      'evaluation.batch_size=1152921504606846976 rows of 64 tokens must',
    ),
    ({'loss.kind': 'mean'}, "config.loss.kind='mean' must be one of bound"),
    ({'data.rows': 'lines'}, "config.data.rows='lines' must be one of windows"),
    ({'model.dtype': 'int8'}, "config.model.dtype='int8' must be one of"),
    # Options that could not act.
    (
      {'data.prepared': 'x'},
      "rows='windows' cannot be made of a prepared",
    ),
    (
      {'data.rows': 'packed'},
      "rows='packed' cannot be made of text files",
    ),
    ({'data.answer_multiple': 8}, 'data.answer_multiple=8 needs'),
    ({'adapters.rank': 4}, 'config.adapters.rank=4 needs config.init_from'),
    (
      {'init_from': 'x', 'model.num_layers': 3},
      'config.model.num_layers=3 needs a fresh model',
    ),
    (
      {'data.prepared': 'x', 'data.rows': 'packed', 'data.files': 'a.txt'},
      "config.data.files='a.txt' needs text files",
    ),
    ({'evaluation.most_rows': 9}, 'most_rows=9 needs config.data.prepared'),
  ],
)
def test_a_value_that_no_run_can_have_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    run_config.check(changed(**changes))


def test_fields_are_those_of_the_defaults():
  config = run_config.defaults()
  config.mesh.pod = 2
  with pytest.raises(ValueError, match="mesh has an unknown field 'pod'"):
    run_config.check(config)
  config = run_config.defaults()
  del config.data.length
  with pytest.raises(ValueError, match=r"config\.data lacks 'length'"):
    run_config.check(config)


def test_good_values_pass():
  run_config.check(run_config.defaults())
  run_config.check(
    changed(
      **{
        'data.prepared': 'x',
        'data.rows': 'examples',
        'data.answer_multiple': 8,
        'init_from': 'y',
        'adapters.rank': 4,
        'model.dtype': 'bfloat16',
        'loss.kind': 'answer',
      }
    )
  )
