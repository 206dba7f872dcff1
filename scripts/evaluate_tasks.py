"""Benchmark tasks of the lm-eval harness. Needs the extra `eval`.

  python scripts/evaluate_tasks.py --tasks=arc_easy,gsm8k --checkpoint=DIRECTORY
  python scripts/evaluate_tasks.py --tasks=mine --include_path=DIRECTORY

Tasks that choose among answers, or score whole texts, read bounds on the
likelihood (docs/likelihood.md); all answers of a question meet the same masks.
Tasks that read what the model writes decode as scripts/sample.py does, by the
same flags; greedily where neither the task nor --temperature says otherwise.
Models that were trained on chats need --chat, with the extra `chat`.
A flag that could act on none of the tasks is an error.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import sys
import types

from absl import flags

from mdlm_jax import (
  command_line,
  decoding_flags,
  model_flags,
  provenance,
  tasks,
)
from mdlm_jax.models import chat_template
from mdlm_jax.models.pretrained import Pretrained

with command_line.extra('eval'):
  import lm_eval
  import lm_eval.tasks

  from mdlm_jax.lm_eval_adapter import LanguageModel

_MODEL = model_flags.define(stop_ids=True)
_TASKS = flags.DEFINE_list('tasks', None, 'Names of tasks.', required=True)
_INCLUDE_PATH = flags.DEFINE_string(
  'include_path', None, 'A directory with tasks of your own, as YAML files.'
)
_LIMIT = flags.DEFINE_integer(
  'limit', None, 'The first documents of every task only.', 1
)
_NUM_FEWSHOT = flags.DEFINE_integer(
  'num_fewshot', None, "Examples in a prompt. Default: the task's.", 0
)
_CHAT = flags.DEFINE_bool(
  'chat', False, "Prompts are chats, by the template of the model's directory."
)
_NUM_REPLICATES = flags.DEFINE_integer(
  'num_replicates', 8, 'Independent estimates of every log-likelihood.', 2
)
_NUM_CALLS = flags.DEFINE_integer(
  'num_calls',
  None,
  'Network calls of one estimate. Default: one per token of an answer, in a '
  'random order; 4 per window of a longer text.',
  1,
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
  'max_new_tokens', None, 'Of every text, where its task says more.', 1
)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 32, 'Rows per call.', 1)
_DECODING = decoding_flags.define()
_SEED = flags.DEFINE_integer(
  'seed', 0, 'Seed of all random numbers.', 0, 2**32 - 1
)
_JSON = flags.DEFINE_bool('json', False, 'Prints one line of JSON.')


def check_flags(kinds: set[str]) -> None:
  """Refuses flags that cannot act on tasks of these kinds of output."""
  idle = {}
  if 'generate_until' not in kinds:
    idle['no task writes text'] = [
      *(*_DECODING.values(), _MAX_NEW_TOKENS, _MODEL['stop_ids'])
    ]
  if kinds == {'generate_until'}:
    idle['no task reads likelihoods'] = [_NUM_REPLICATES, _NUM_CALLS]
  for reason, holders in idle.items():
    for flag in holders:
      if flag.present:
        raise ValueError(f'--{flag.name} cannot act: {reason}')


def decoding(model: Pretrained, record: list[dict], wanted: tasks.Generation):
  """The arguments of the sampler for what a task wants and the flags say.

  What was chosen is added to the record.
  """
  holders = dict(_DECODING)
  if not holders['temperature'].present:
    if wanted.filters:
      raise ValueError(
        f'a task samples with {", ".join(wanted.filters)}; say how by '
        '--temperature and the flags beside it'
      )
    holders['temperature'] = types.SimpleNamespace(
      name='temperature', value=wanted.temperature, present=True
    )

  def chosen(canvas):
    result = decoding_flags.decoding_of(holders, model, canvas)
    if result.settings not in record:
      record.append(result.settings)
    return result

  return chosen


def chat_model(path: pathlib.Path, model: Pretrained):
  """The model, which ends a text where a turn ends, and its template."""
  template = chat_template.read(path)
  if template is None:
    raise ValueError(f'--chat cannot act: {path} has no chat template')
  end = chat_template.end_of_turn(template, model.tokenizer)
  if end is not None:
    model = model._replace(vocab=model_flags.with_ends(model.vocab, [end]))
  return model, template


def settings(kinds: set[str], decodings: list[dict]) -> dict:
  """Everything that was chosen and could act."""
  record = {
    'limit': _LIMIT.value,
    'num_fewshot': _NUM_FEWSHOT.value,
    'batch_size': _BATCH_SIZE.value,
    'seed': _SEED.value,
  }
  if kinds - {'generate_until'}:
    record |= {
      'num_replicates': _NUM_REPLICATES.value,
      'num_calls': _NUM_CALLS.value,
    }
  if 'generate_until' in kinds:
    record |= {
      'max_new_tokens': _MAX_NEW_TOKENS.value,
      'stop_ids': _MODEL['stop_ids'].value,
      'decoding': decodings,
    }
  return record


def main(argv):
  del argv
  decoding_flags.check(_DECODING)
  manager = lm_eval.tasks.TaskManager(include_path=_INCLUDE_PATH.value)
  unknown = set(_TASKS.value) - set(manager.all_tasks)
  if unknown:
    raise ValueError(f'no task is named {", ".join(sorted(unknown))}')
  loaded = manager.load(_TASKS.value)['tasks'].values()
  kinds = {task.OUTPUT_TYPE for task in loaded}
  check_flags(kinds)
  path, model = model_flags.load(_MODEL)
  template = None
  if _CHAT.value:
    model, template = chat_model(path, model)
  writer = decoding_flags.with_attention_block(_DECODING, model)
  progress, decodings = command_line.Progress(), []
  # The harness would fork for its error bars, which JAX does not survive.
  os.environ['DISABLE_MULTIPROC'] = '1'
  language_model = LanguageModel(
    model,
    writer=writer,
    decoding=functools.partial(decoding, writer, decodings),
    num_replicates=_NUM_REPLICATES.value,
    num_calls=_NUM_CALLS.value,
    max_new_tokens=_MAX_NEW_TOKENS.value,
    batch_size=_BATCH_SIZE.value,
    seed=_SEED.value,
    on_progress=progress,
    template=template,
  )
  with contextlib.redirect_stdout(sys.stderr):  # The report alone is output.
    found = lm_eval.simple_evaluate(
      language_model,
      tasks=_TASKS.value,
      task_manager=manager,
      limit=_LIMIT.value,
      num_fewshot=_NUM_FEWSHOT.value,
      log_samples=False,
      apply_chat_template=_CHAT.value,
    )
  progress.close()
  environment = provenance.environment()
  environment['versions']['lm_eval'] = lm_eval.__version__
  report = {
    'results': found['results'],
    'versions_of_tasks': found['versions'],
    'num_samples': found['n-samples'],
    'num_fewshot': found['n-shot'],
    **language_model.record,
    'chat_template_sha256': template
    and hashlib.sha256(template.source.encode()).hexdigest(),
    'checkpoint': str(path),
    'settings': settings(kinds, decodings),
    'dtype': model.config.dtype,
    'int8': _MODEL['int8'].value,
    **environment,
  }
  if _JSON.value:
    print(json.dumps(report))
  else:
    print(summary(report))


def summary(report: dict) -> str:
  """One line per task and metric, with the standard error over documents."""
  lines = []
  for task, metrics in report['results'].items():
    for name, value in metrics.items():
      if isinstance(value, float) and '_stderr' not in name:
        metric, _, kind = name.partition(',')
        error = metrics.get(f'{metric}_stderr,{kind}')
        error = f' +- {error:.4f}' if isinstance(error, float) else ''
        lines.append(f'{task:24s} {metric:16s} {value:.4f}{error}')
  return '\n'.join(lines)


if __name__ == '__main__':
  command_line.run(main)
