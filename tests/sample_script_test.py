"""scripts/sample.py on a small untrained model."""

import json
import subprocess
import sys

import jax
import pytest
import script_runner

from mdlm_jax.models import directory, transformer
from mdlm_jax.tokenizer import character_tokenizer

ALPHABET = ' .abcdefghijklmnopqrstuvwxyzIT{}'
# With it 8 of the model's 24 positions are open. Tests that share their shapes
# and settings share their compilation.
PROMPT = 'the people {is} '


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A work directory with a model of 24 characters."""
  tokenizer = character_tokenizer(ALPHABET)
  config = transformer.TransformerConfig(
    vocab_size=tokenizer.vocab.size,
    num_layers=1,
    model_dim=16,
    num_heads=1,
    mlp_dim=16,
    max_length=24,
  )
  workdir = tmp_path_factory.mktemp('run')
  directory.save(
    workdir / 'model',
    config,
    transformer.init(config, jax.random.key(0)),
    tokenizer.vocab,
    tokenizer,
  )
  return workdir


@pytest.fixture
def sample(checkpoint, capsys):
  """Runs the script and gives what it printed."""

  def run(*arguments):
    script_runner.run('sample.py', f'--checkpoint={checkpoint}', *arguments)
    return capsys.readouterr().out

  return run


@pytest.fixture
def records(sample):
  """Runs the script with --json and gives one dictionary per line."""

  def run(*arguments):
    lines = sample('--json', *arguments).splitlines()
    return [json.loads(line) for line in lines]

  return run


def test_json_record_of_the_kernel(records):
  (record,) = records(
    '--rule=kernel', f'--prompt={PROMPT}', '--length=8', '--steps=4'
  )
  assert record['text'].startswith(PROMPT)
  assert len(record['text']) == len(record['ids']) == 24
  assert 1 not in record['ids']  # MASK
  assert (record['new_tokens'], record['calls']) == (8, 4)
  assert record['tokens_per_call'] == 2.0
  assert record['requested_t'] == [1, 0.75, 0.5, 0.25]
  assert len(record['masked_fraction']) == 4
  assert record['masked_fraction'][0] == 1
  settings = record['settings']
  assert settings['dtype'] == 'float32'
  assert settings['versions']['jax'] == jax.__version__
  assert (settings['rule'], settings['score']) == ('kernel', None)


def test_samples_repeat_and_do_not_depend_on_the_batch(records):
  arguments = ('--steps=4', '--seed=3')
  three = records('--num_samples=3', *arguments)
  assert records('--num_samples=3', *arguments) == three
  (alone,) = records(*arguments)
  assert alone['ids'] == three[0]['ids']
  assert len({record['text'] for record in three}) == 3


def test_confidence_plans_its_counts(records):
  arguments = ('--rule=confidence', f'--prompt={PROMPT}', '--steps=4')
  (even,) = records(*arguments, '--score=margin')
  assert even['masked_fraction'] == [1, 0.75, 0.5, 0.25]
  assert even['settings']['score'] == 'margin'
  assert even['settings']['score_distribution'] == 'untempered'
  # round(8 cos(pi k / 8)) = 8, 7, 6, 3 slots are masked at the four calls.
  (cosine,) = records(*arguments, '--grid=cosine')
  assert cosine['masked_fraction'] == [1, 0.875, 0.75, 0.375]


def test_more_steps_than_positions_is_legal(records):
  (record,) = records('--length=2', '--steps=5', '--rule=confidence')
  assert record['calls'] == 5
  assert record['masked_fraction'] == [1, 0.5, 0, 0, 0]
  assert record['tokens_per_call'] == 0.4


def test_temperature_zero_by_confidence_ignores_the_seed(records):
  def texts(temperature):
    return {
      records(
        '--rule=confidence',
        '--score=margin',
        f'--temperature={temperature}',
        '--steps=4',
        f'--seed={seed}',
      )[0]['text']
      for seed in (0, 1)
    }

  assert len(texts(0)) == 1
  assert len(texts(0.8)) == 2


def test_prompt_ids_are_kept_and_the_length_is_filled(records):
  (record,) = records('--prompt_ids=5,6,7', '--steps=4')
  assert record['ids'][:3] == [5, 6, 7]
  assert len(record['ids']) == 24


def test_template_keeps_its_text(records):
  (record,) = records('--template=a{{b{5}c}}d{13}', '--steps=4')
  assert record['text'].startswith('a{b')
  assert record['text'][8:11] == 'c}d'
  assert len(record['text']) == 24
  assert record['new_tokens'] == 18


def test_text_shows_evenly_spaced_canvases(sample):
  printed = sample(
    '--prompt=ab',
    '--length=12',
    '--steps=4',
    '--rule=confidence',
    '--show_steps=3',
  )
  lines = printed.splitlines()
  shown = {
    int(lines[i].removeprefix('--- after call ')): lines[i + 1]
    for i in range(len(lines))
    if lines[i].startswith('--- after call')
  }
  assert {call: text.count('░') for call, text in shown.items()} == {
    1: 9,
    2: 6,
    3: 3,
    4: 0,
  }
  assert all(text.startswith('ab') for text in shown.values())
  assert '4 network calls' in printed
  assert 's of compilation' in printed


def test_tour_shows_the_three_ways(sample):
  printed = sample('--tour', '--steps=4')
  nothing, prefix, hole = printed.split('\n=== ')[1:]
  assert nothing.startswith('from nothing: 24 new tokens')
  assert prefix.startswith('from a prefix: 11 new tokens')
  assert prefix.count('The value of ') == 4
  # (24 - 6 - 14) // 2 tokens between the two sides.
  assert hole.startswith('into a hole: 2 new tokens')
  assert hole.count('It is ') == hole.count(' in this case.') == 4
  assert '░' in printed


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--prompt=a€b'], "unknown characters '€'"),
    (['--prompt=abc', '--length=22'], '3 given and 22 new tokens are 25, more'),
    (['--prompt=' + 'a' * 24], '24 given and 1 new tokens are 25'),
    (['--template=a{30}'], '1 given and 30 new tokens are 31'),
    (['--template=abc'], 'has no hole'),
    (['--template=a{b}'], "'{b}' in the template is no hole"),
    (['--template=a{0}b'], "'{0}' in the template is no hole"),
    (['--template=a{2}}b'], "'}' in the template is no hole"),
    (['--prompt_ids=5,x'], "'x' is not a number"),
    (['--prompt_ids=5,99'], '99 is no id of a token'),
    (['--prompt_ids=5,-1'], '-1 is no id of a token'),
    (['--prompt_ids=5,1'], '1 is no id of a token'),
    (['--prompt_ids='], "'' is not a number"),
    (['--steps=0'], '--steps=0 must be at least 1'),
    (['--length=0'], '--length=0 must be at least 1'),
    (['--temperature=-1'], 'temperature=-1.0 must be'),
    (['--temperature=nan'], 'temperature=nan must be'),
    (['--top_p=0'], r'top_p=0.0 must be in (0, 1]'),
    (['--top_p=1.5'], r'top_p=1.5 must be in (0, 1]'),
    (['--top_k=0'], 'top_k=0 must be an integer of at least 1'),
    (['--temperature=0', '--top_p=.9'], 'cannot act at temperature 0'),
    (
      ['--rule=kernel', '--score=margin'],
      '--score cannot act with --rule=kernel',
    ),
    (['--prompt=a', '--template=b{2}'], '--prompt and --template exclude'),
    (['--prompt=a', '--prompt_ids=5'], '--prompt and --prompt_ids exclude'),
    (['--template=b{2}', '--length=2'], '--template and --length exclude'),
    (['--tour', '--prompt=a'], '--prompt and --tour exclude'),
    (['--tour', '--num_samples=2'], '--tour and --num_samples exclude'),
    (['--json', '--show_steps=2'], '--json and --show_steps exclude'),
    (['--steps=2', '--show_steps=2'], '2 calls have 1 canvases on the way'),
    (
      ['--rule=confidence', '--temperature=0', '--num_samples=2'],
      'would be equal samples',
    ),
  ],
)
def test_mistakes_are_named(sample, capsys, arguments, message):
  with pytest.raises(ValueError) as caught:
    sample(*arguments)
  assert message in str(caught.value)
  assert capsys.readouterr().out == ''


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    ('--checkpoint=no/such', 'no/such'),
    ('--rule=foo', 'kernel|confidence'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argument, message):
  script = script_runner.ROOT / 'scripts' / 'sample.py'
  done = subprocess.run(
    [sys.executable, script, argument],
    capture_output=True,
    text=True,
    cwd=script_runner.ROOT,
    env={'PYTHONPATH': str(script_runner.ROOT), 'JAX_PLATFORMS': 'cpu'},
  )
  assert done.returncode == 2
  assert done.stdout == ''
  assert len(done.stderr.splitlines()) == 1
  assert message in done.stderr


def test_without_a_checkpoint_the_shipped_model_writes_words(capsys):
  arguments = ('--json', '--prompt=My fellow citizens, ', '--length=40')
  script_runner.run('sample.py', *arguments, '--steps=20')
  record = json.loads(capsys.readouterr().out)
  assert record['text'].startswith('My fellow citizens, ')
  # The commonest words of the corpus, which noise would hardly contain.
  assert set(record['text'].split()) & {'the', 'of', 'to', 'and', 'in'}
