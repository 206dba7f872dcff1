"""scripts/sample.py on a small untrained model."""

import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
import script_runner
import tiny_checkpoint

from mdlm_jax import draws, rules, schedules
from mdlm_jax.models import directory
from mdlm_jax.predict import Denoiser
from mdlm_jax.vocab import Vocab

ALPHABET = ' .abcdefghijklmnopqrstuvwxyzIT{}'
# With it 8 of the model's 24 positions are open. Tests that share their shapes
# and settings share their compilation.
PROMPT = 'the people {is} '


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A work directory with a model of 24 characters."""
  workdir = tmp_path_factory.mktemp('run')
  tiny_checkpoint.write(workdir / 'model', ALPHABET, 24)
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


class _ChosenError(Exception):
  pass


@pytest.fixture
def chosen(checkpoint):
  """What the flags were turned into, without compiling anything."""

  def run(*arguments):
    def generate(model, filled, chosen, **options):
      raise _ChosenError(chosen)

    with pytest.raises(_ChosenError) as caught:
      script_runner.run(
        'sample.py',
        f'--checkpoint={checkpoint}',
        *arguments,
        generate=generate,
      )
    return caught.value.args[0]

  return run


@pytest.fixture
def with_eos(checkpoint):
  """A model whose texts end with '.', which it wants at position 18 only."""
  model = directory.load(checkpoint / 'model')
  letter, end = model.tokenizer.encode('a.').tolist()
  size = model.vocab.size

  def features(params, cache, ids, *, positions, **unused):
    wanted = jnp.where(positions == 18, end, letter)
    return 9.0 * jax.nn.one_hot(wanted, size), ()

  model = model._replace(
    denoiser=Denoiser(features, lambda params, hidden: hidden),
    vocab=Vocab(size, mask_id=1, pad_id=0, eos_ids=[end]),
  )
  return types.SimpleNamespace(load=lambda holders: ('a model', model))


def test_json_record_of_the_kernel(records):
  (record,) = records(
    '--rule=kernel', f'--prompt={PROMPT}', '--length=8', '--steps=4'
  )
  assert record['text'].startswith(PROMPT)
  assert len(record['text']) == len(record['ids']) == 24
  assert 1 not in record['ids']  # MASK
  assert (record['new_tokens'], record['calls']) == (8, 4)
  assert (record['num_tokens'], record['calls_per_row']) == (8, 4)
  assert (record['calls_per_block'], record['changes']) == ([4], 0)
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


def test_a_threshold_in_blocks_reports_the_calls_of_each_row(records):
  """Nothing reaches 0.9 in an untrained model: one position per call."""
  arguments = ('--rule=threshold', f'--prompt={PROMPT}', '--block_length=4')
  (record,) = records(*arguments, '--temperature=0')
  assert (record['calls'], record['calls_per_row']) == (8, 8)
  assert record['calls_per_block'] == [4, 4]
  assert record['masked_fraction'] == [1 - k / 8 for k in range(8)]
  assert record['settings']['threshold'] == 0.9
  assert record['settings']['steps'] is None
  # With 0 both blocks are written at once: what was not called is null.
  (record,) = records(*arguments, '--temperature=0', '--threshold=0')
  assert record['calls_per_block'] == [1, 1]
  assert record['tokens_per_call'] == 4
  assert record['masked_fraction'] == [1, *[None] * 3, 0.5, *[None] * 3]
  assert record['requested_t'][1] is None


def test_ids_that_end_a_text_may_be_named(chosen):
  static = chosen('--stop_ids=5,6', '--stop_at_eos').static
  assert static['vocab'].eos_ids == (5, 6)
  with pytest.raises(ValueError, match=r'eos_ids=99 must lie in'):
    chosen('--stop_ids=99')


def run_stub(with_eos, capsys, *arguments):
  script_runner.run(
    'sample.py',
    '--json',
    f'--prompt={PROMPT}',
    *arguments,
    model_flags=with_eos,
  )
  return json.loads(capsys.readouterr().out)


def test_guidance_counts_both_of_its_calls(with_eos, capsys, chosen):
  record = run_stub(
    with_eos, capsys, '--steps=4', '--cfg_scale=0.5', '--eos=forbid'
  )
  assert (record['calls'], record['tokens_per_call']) == (8, 1)
  prompt = f'--prompt={PROMPT}'
  assert chosen(prompt, '--cfg_scale=0.5').arrays['guidance'].scale == 0.5
  assert chosen(prompt, '--cfg_scale=0').arrays == {}


def test_tokens_taken_back_are_counted(with_eos, capsys):
  """At a high temperature most of what is drawn anew is another token."""
  record = run_stub(
    with_eos, capsys, '--rule=remdm_rescale', '--eta=1', '--temperature=9'
  )
  assert record['calls'] == 8
  assert record['changes'] > 0
  assert record['settings']['eta'] == 1


def test_flags_choose_the_arguments_of_the_sampler(chosen):
  argument = f'--prompt={PROMPT}'  # 8 slots are open.
  default = chosen(argument)
  assert default.static['rule'] is rules.by_confidence(8)
  assert default.static['draw'] is draws.categorical(temperature=0.7)
  assert default.arrays == {}
  assert not default.static['eos_last'] and not default.static['stop_at_eos']
  assert default.num_calls == default.settings['steps'] == 8

  # Cases of the field: 4 tokens per call, and the same with the steps named.
  blocks = chosen(argument, '--block_length=4', '--steps=4')
  assert blocks.static['rule'] is rules.by_confidence(2)
  assert (blocks.arrays['blocks'].count, blocks.num_calls) == (2, 4)
  assert chosen(argument, '--block_length=3').num_calls == 9

  values = chosen(
    argument,
    '--score=probability',
    '--score_distribution=tempered',
    '--temperature=0.5',
    '--top_k=9',
    '--top_p=0.9',
    '--min_p=0.1',
    '--repetition_penalty=1.5',
  )
  assert values.static['draw'] is draws.categorical(
    temperature=0.5,
    top_k=9,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.5,
    neighbourhood=16,
    score=draws.probability,
    tempered=True,
  )
  assert values.settings['neighbourhood'] == 16

  random = chosen(argument, '--rule=random', '--steps=3', '--num_samples=2')
  assert random.static['draw'] is draws.categorical(
    temperature=0.7, score=draws.random_order
  )
  assert random.settings['score'] == 'random'

  grid = schedules.cosine_grid(3)
  remasking = chosen(argument, '--rule=psi', '--steps=3', '--grid=cosine')
  assert remasking.static['rule'] is rules.remasking(
    grid, rules.sigmas.psi(grid, 0.95), schedules.linear()
  )
  assert remasking.settings['score'] is None

  wrapped = chosen(
    argument,
    '--rule=threshold',
    '--edit_threshold=0.5',
    '--edit_rounds=2',
    '--refine_rounds=3',
  )
  assert wrapped.static['rule'] is rules.refined(
    rules.editing(rules.threshold(0.9), 0.5, 2), 3, 1
  )


@pytest.mark.parametrize(
  ('options', 'text', 'calls'),
  [
    (['--stop_at_eos'], 'aa.', 3),
    (['--stop_at_eos', '--eos=last'], 'aa.', 8),
    (['--eos=last'], 'aa.aaaaa', 8),
    (['--eos=forbid'], 'aa aaaaa', 8),
  ],
)
def test_the_end_of_a_text_is_heeded_deferred_or_forbidden(
  with_eos, capsys, options, text, calls
):
  """Without '.' the first of the other characters, which are equal."""
  record = run_stub(
    with_eos, capsys, '--rule=left_to_right', '--temperature=0', *options
  )
  assert record['text'] == PROMPT + text
  assert (record['calls'], record['calls_per_row']) == (calls, calls)
  ended = '.' in text
  assert record['num_tokens'] == (3 if ended else 8)


def test_progress_counts_up_to_the_calls_made(with_eos, monkeypatch):
  bars = []

  class Bar:
    def __init__(self, total, **options):
      self.total, self.n, self.closed = total, 0, False
      bars.append(self)

    def update(self, n):
      self.n += n

    def close(self):
      self.closed = True

  monkeypatch.setattr('mdlm_jax.command_line.tqdm.tqdm', Bar)
  script_runner.run(
    'sample.py', '--progress', '--steps=4', model_flags=with_eos
  )
  (bar,) = bars
  assert (bar.total, bar.n, bar.closed) == (4, 4, True)


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
    (['--prompt_ids=5,'], "'' is not a number"),
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
    (
      ['--prompt=ab', '--length=20', '--block_length=4', '--steps=8'],
      '8 steps cannot be shared equally by 5 blocks',
    ),
    (['--block_length=4', '--steps=3'], '--steps=3 in blocks of 4: 3 steps'),
    (['--block_length=0'], '--block_length=0 must be at least 1'),
    (
      ['--rule=threshold', '--steps=8'],
      '--steps=8 cannot act with --rule=threshold',
    ),
    (['--threshold=0.5'], '--threshold cannot act with --rule=confidence'),
    (
      ['--threshold=0.5'],
      'it acts with --rule=threshold, quota_threshold, klass',
    ),
    (['--rule=factor', '--factor=-1'], '--rule=factor --factor=-1.0: value'),
    (['--rule=kernel', '--grid=floor'], '--grid=floor: grid=floor gives'),
    (
      ['--rule=maskgit', '--score=random'],
      'which ranks by row_maximum, probability, margin',
    ),
    (
      ['--rule=kernel', '--score_distribution=tempered'],
      '--score_distribution cannot act with --rule=kernel',
    ),
    (['--edit_rounds=3'], '--edit_rounds needs --edit_threshold'),
    (
      ['--rule=p2', '--edit_threshold=0.5'],
      '--edit_threshold cannot act with --rule=p2, which takes tokens back',
    ),
    (
      ['--rule=cached_kernel', '--refine_rounds=1'],
      '--rule=cached_kernel --refine_rounds=1: a rule that reuses',
    ),
    (['--eos=last'], '--eos=last cannot act: the model has no end of text'),
    (['--stop_at_eos'], '--stop_at_eos cannot act: the model has no end'),
    (['--eos=forbid', '--stop_at_eos'], 'cannot act with --eos=forbid'),
    (['--cfg_scale=1'], 'guidance needs a condition'),
    (['--cfg_scale=nan'], '--cfg_scale=nan must be finite'),
    (['--min_p=2'], 'min_p=2.0 must be in (0, 1]'),
    (['--neighbourhood=2'], 'cannot act without repetition_penalty'),
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
    ('--rule=foo', 'kernel|cached_kernel|'),
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
