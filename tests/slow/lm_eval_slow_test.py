"""The lm-eval harness itself on tiny tasks from local files, no network.

pip install -e '.[eval,test]'
python -m pytest -q tests/slow/lm_eval_slow_test.py -o addopts=
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / 'scripts' / 'evaluate_tasks.py'

DOCUMENTS = [
  {
    'text': f'To the Senate and House of {name}:',
    'question': 'the Congress of the United',
    'choices': ['zzqq', 'States'],
    'answer': 1,
  }
  for name in ('Representatives', 'Lords')
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: {kind}
{rest}
metadata: {{version: 1.0}}
"""
QUESTION = """
doc_to_text: '{{question}}'
doc_to_target: "{{' States'}}"
target_delimiter: ''
"""
KINDS = {
  'choose': (
    'multiple_choice',
    "doc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
    "doc_to_target: '{{answer}}'",
  ),
  'last_word': (
    'loglikelihood',
    QUESTION + 'metric_list: [{metric: perplexity}, {metric: acc}]',
  ),
  'roll': (
    'loglikelihood_rolling',
    "doc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    'metric_list: [{metric: bits_per_byte}]',
  ),
  'write': (
    'generate_until',
    QUESTION + 'metric_list: [{metric: exact_match}]\n'
    "generation_kwargs: {until: [':'], max_gen_toks: 8, temperature: 0.0}",
  ),
}


@pytest.fixture(scope='module')
def tasks(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tasks')
  data = folder / 'documents.jsonl'
  data.write_text('\n'.join(map(json.dumps, DOCUMENTS)))
  for name, (kind, rest) in KINDS.items():
    text = TASK.format(name=name, data=data, kind=kind, rest=rest)
    (folder / f'{name}.yaml').write_text(text)
  return folder


def evaluate(folder, names, *arguments):
  return subprocess.run(
    [
      *(sys.executable, SCRIPT, f'--tasks={names}'),
      *(f'--include_path={folder}', *arguments),
    ],
    capture_output=True,
    text=True,
    check=False,
    env={
      **os.environ,
      'PYTHONPATH': os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
      'HF_HUB_OFFLINE': '1',
      'HF_DATASETS_OFFLINE': '1',
      'HF_DATASETS_CACHE': str(folder / 'cache'),
    },
  )


def test_every_kind_of_task_is_evaluated_and_repeats(tasks):
  arguments = (
    *(tasks, ','.join(KINDS), '--json'),
    *('--num_replicates=2', '--steps=4'),
  )
  first, second = evaluate(*arguments), evaluate(*arguments)
  assert first.returncode == 0, first.stderr
  assert first.stdout == second.stdout
  report = json.loads(first.stdout.splitlines()[-1])
  results = report['results']
  # The model has read it thousands of times.
  assert results['choose']['acc,none'] == 1
  assert results['last_word']['acc,none'] == 1
  assert 1 <= results['last_word']['perplexity,none'] < 1.5
  assert 0.2 < results['roll']['bits_per_byte,none'] < 4
  assert results['write']['exact_match,none'] in (0, 1)
  assert set(report['prompts_sha256']) == set(KINDS)
  assert report['loglikelihood_standard_error'] >= 0
  (decoding,) = report['settings']['decoding']
  assert (decoding['steps'], decoding['temperature']) == (4, 0.0)
  assert report['versions']['lm_eval']
  other = evaluate(tasks, 'choose,roll', '--json', '--seed=1', '--limit=1')
  found = json.loads(other.stdout.splitlines()[-1])
  assert 'decoding' not in found['settings']
  assert found['results']['roll'] != results['roll']


@pytest.mark.parametrize(
  ('names', 'argument', 'message'),
  [
    ('choose', '--temperature=0.5', '--temperature cannot act'),
    ('choose,roll', '--rule=kernel', '--rule cannot act'),
    ('write', '--num_replicates=3', '--num_replicates cannot act'),
    ('write', '--eos=forbid', '--eos=forbid cannot act'),
    ('nothing', '--seed=1', 'no task is named nothing'),
    ('choose', '--temprature=1', 'temprature'),
  ],
)
def test_options_that_cannot_act_are_refused(tasks, names, argument, message):
  result = evaluate(tasks, names, argument)
  assert result.returncode == 2
  errors = [x for x in result.stderr.splitlines() if x.startswith('error: ')]
  assert message in errors[0], result.stderr
