"""Requests of benchmark tasks: exact scores, texts, and what is refused."""

import hashlib
import json
import math
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import script_runner

from mdlm_jax import decoding_flags, draws, predict, rules, schedules, tasks
from mdlm_jax.models import chat_template
from mdlm_jax.models.pretrained import Pretrained
from mdlm_jax.models.transformer import TransformerConfig
from mdlm_jax.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer(' abcdefg')  # Ids 2 to 9.


def features(params, cache, ids, *, at, **unused):
  """Sure of the successor of a visible left neighbour, else of none."""
  left = jnp.pad(ids, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
  sure = jax.nn.one_hot(2 + (left - 1) % 8, 10) * 50.0
  logits = jnp.where((left > 1)[..., None], sure, 0.0)
  if at is not None:
    logits = jnp.take_along_axis(logits, at[..., None], 1)
  return logits, ()


MODEL = Pretrained(
  TransformerConfig(
    vocab_size=10, num_layers=1, model_dim=4, num_heads=1, mlp_dim=4,
    max_length=16,
  ),
  predict.Denoiser(features, lambda params, hidden: hidden, time_free=True),
  {}, TOKENIZER.vocab, TOKENIZER, schedules.linear(), {},
)  # fmt: skip
LN8 = math.log(8)


def decoding(canvas):
  """That of the script for four new tokens."""
  return decoding_flags.Chosen(
    {
      'vocab': MODEL.vocab,
      'rule': rules.by_confidence(4),
      'draw': draws.categorical(temperature=0.0),
      'schedule': MODEL.schedule,
    },
    {}, 4, {},
  )  # fmt: skip


# Three answers of one token and three of four: tests share their programs.
PAIRS = [
  ('abc', 'd'), ('abc', 'f'), ('', 'e'),
  ('abc', 'defg'), ('', 'dacb'), ('gab', 'cadb'),
]  # fmt: skip


def score(pairs, **options):
  answers = [tasks.encode_answer(MODEL, *pair, 7) for pair in pairs]
  options = {'batch_size': 4, 'num_replicates': 2} | options
  return tasks.score_answers(MODEL, answers, **options)


def test_scores_are_those_of_the_chain_rule():
  scores = score(PAIRS)
  np.testing.assert_allclose(scores.log_prob[:3], [0, -50, -LN8], atol=1e-5)
  np.testing.assert_array_equal(scores.standard_error[:3], 0)
  # A token that is written before its neighbour on the left is a guess.
  guesses = scores.log_prob[3] / -LN8 * 2
  np.testing.assert_allclose(guesses, np.round(guesses), atol=1e-5)
  assert 0 < guesses <= 2 * 3
  np.testing.assert_array_equal(scores.is_greedy, [1, 0, 0, 1, 0, 0])


def test_a_score_does_not_depend_on_the_other_requests():
  together = score(PAIRS)
  for order, batch_size in (([5, 3, 4], 2), ([5, 2, 4, 1, 0, 3], 4)):
    other = score([PAIRS[i] for i in order], batch_size=batch_size)
    for field, value in together._asdict().items():
      np.testing.assert_allclose(
        getattr(other, field), value[order], rtol=1e-6, atol=1e-6
      )
  assert (together.log_prob != score(PAIRS, seed=2).log_prob).any()
  counts = score(PAIRS[3:], num_calls=4)
  assert (counts.standard_error != together.standard_error[3:]).any()


def test_answers_of_one_question_meet_the_same_masks():
  answers = [tasks.encode_answer(MODEL, 'abc', 'defg', i) for i in (7, 7, 9)]
  scores = tasks.score_answers(MODEL, answers, batch_size=4, num_replicates=2)
  assert scores.log_prob[0] == scores.log_prob[1] != scores.log_prob[2]


def test_a_context_is_cut_on_the_left_and_leaves_its_space_to_the_answer():
  answer = tasks.encode_answer(MODEL, 'abc ' * 8, 'dd', 3)
  assert TOKENIZER.decode(answer.ids) == ('abc ' * 8 + 'dd')[-16:]
  assert (answer.size, answer.num_given, answer.noise_id) == (3, 13, 3)
  for size in (0, 17):
    with pytest.raises(ValueError, match=f'has {size} tokens, must have 1'):
      tasks.encode_answer(MODEL, 'ab', 'a' * size, 0)


def write(texts, **options):
  prompts = [
    tasks.Prompt(TOKENIZER.encode(text).tolist(), i)
    for i, text in enumerate(texts)
  ]
  options = {'num_tokens': 4, 'decoding': decoding, 'batch_size': 1} | options
  return tasks.continuations(MODEL, prompts, **options)


def test_texts_go_on_to_the_first_stop_with_progress():
  events = []
  texts = write(
    ['abc', 'fg', 'abcdefg abcdefg '], until=('gone', 'f', ' ', 'c'),
    on_progress=lambda *event: events.append(event),
  )  # fmt: skip
  # Three prompts of 4 calls each.
  assert texts == ['de', '', 'ab']
  assert events == [(0, 12), (4, 12), (8, 12), (12, 12)]
  assert write(['fg', 'abc'], batch_size=2) == [' abc', 'defg']
  for num_tokens in (0, 17):
    with pytest.raises(ValueError, match=f'num_tokens={num_tokens}'):
      write(['a'], num_tokens=num_tokens)


def test_what_a_task_wants_of_its_texts():
  wanted = tasks.generation({'until': ['a', 'b'], 'max_new_tokens': 5})
  assert wanted == tasks.Generation(5, ('a', 'b'), 0.0)
  assert tasks.generation({}).num_tokens == 256
  assert tasks.generation({'max_gen_toks': 9}, 4).num_tokens == 4
  sampled = {'do_sample': True, 'temperature': 0.7, 'top_k': 3}
  assert tasks.generation(sampled)[2:] == (0.7, ('top_k',))
  greedy = tasks.generation(sampled | {'do_sample': False})
  assert greedy[2:] == (0.0, ())
  for wrong in ({'num_beams': 4}, {'max_gen_toks': 0}):
    with pytest.raises(ValueError, match=next(iter(wrong))):
      tasks.generation(wrong)


class Instance(NamedTuple):
  task_name: str
  doc_id: int
  args: tuple


REQUESTS = {
  'loglikelihood': [
    Instance('choose', 0, ('abc', 'd')), Instance('choose', 0, ('abc', 'f')),
    Instance('choose', 1, ('ab', 'c')),
  ],
  'loglikelihood_rolling': [
    Instance('roll', 0, ('a',)), Instance('roll', 1, ('abcdefg ' * 4,))
  ],
  'generate_until': [
    Instance('write', 0, ('abc', {'until': ['g'], 'max_gen_toks': 8})),
    Instance('write', 1, ('abc', {'until': [], 'max_gen_toks': 8})),
  ],
}  # fmt: skip
KINDS = {
  'choose': 'multiple_choice',
  'roll': 'loglikelihood_rolling',
  'write': 'generate_until',
}


@pytest.fixture
def harness(monkeypatch, tmp_path):
  """What the script needs of `lm_eval`, with the requests of above."""

  class Manager:
    all_tasks = (*KINDS, 'other')

    def __init__(self, include_path):
      pass

    def load(self, names):
      kinds = [types.SimpleNamespace(OUTPUT_TYPE=KINDS[n]) for n in names]
      return {'tasks': dict(zip(names, kinds, strict=True))}

  def simple_evaluate(model, tasks, apply_chat_template, **options):
    def asked(request):
      if not apply_chat_template:
        return request
      context, *rest = request.args
      chat = [{'role': 'user', 'content': context}]
      return request._replace(args=(model.apply_chat_template(chat), *rest))

    found = {
      kind: getattr(model, kind)([asked(request) for request in requests])
      for kind, requests in REQUESTS.items()
      if requests[0].task_name in tasks
    }
    return {'results': found, 'versions': {}, 'n-samples': {}, 'n-shot': {}}

  for name, content in {
    'lm_eval': {'simple_evaluate': simple_evaluate, '__version__': '0'},
    'lm_eval.tasks': {'TaskManager': Manager},
    'lm_eval.api': {},
    'lm_eval.api.instance': {'Instance': Instance},
    'lm_eval.api.model': {'LM': object},
  }.items():
    module = types.ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)
  sys.modules['lm_eval'].tasks = sys.modules['lm_eval.tasks']
  monkeypatch.delitem(sys.modules, 'mdlm_jax.lm_eval_adapter', raising=False)
  monkeypatch.setattr(
    'mdlm_jax.model_flags.load', lambda flags: (tmp_path, MODEL)
  )
  monkeypatch.setenv('DISABLE_MULTIPROC', '1')
  yield
  sys.modules.pop('mdlm_jax.lm_eval_adapter', None)


def run(*arguments):
  script_runner.run('evaluate_tasks.py', *arguments)


def test_the_adapter_answers_every_kind_of_request(harness, capsys):
  arguments = (
    '--tasks=choose,roll,write', '--json', '--num_replicates=2',
    '--max_new_tokens=4',
  )  # fmt: skip
  run(*arguments)
  line = capsys.readouterr().out
  run(*arguments)
  assert capsys.readouterr().out == line
  report = json.loads(line)
  results = report['results']
  scores, greedy = zip(*results['loglikelihood'], strict=True)
  np.testing.assert_allclose(scores[:2], [0, -50], atol=1e-5)
  assert greedy == (True, False, True)
  np.testing.assert_allclose(results['loglikelihood_rolling'][0], -LN8, 1e-6)
  assert results['generate_until'] == ['def', 'defg']
  assert set(report['prompts_sha256']) == set(KINDS)
  adapter = sys.modules['mdlm_jax.lm_eval_adapter']
  first, second, other = map(adapter._noise_id, REQUESTS['loglikelihood'])
  assert (
    first
    == second
    != other
    != adapter._noise_id(REQUESTS['loglikelihood'][2], repeat=1)
  )
  decodings = report['settings']['decoding']
  assert [d['temperature'] for d in decodings] == [0]
  assert [d['steps'] for d in decodings] == [4]
  assert report['dtype'] == 'float32' and report['versions']['lm_eval'] == '0'
  run('--tasks=write', '--json', '--max_new_tokens=4', '--temperature=0')
  report = json.loads(capsys.readouterr().out)
  assert report['results']['generate_until'] == ['def', 'defg']
  assert 'num_replicates' not in report['settings']


def test_chats_follow_the_template_and_end_with_the_turn(
  harness, capsys, monkeypatch, tmp_path
):
  with pytest.raises(ValueError, match='--chat cannot act'):
    run('--tasks=write', '--chat')
  source = '{{ messages[0].content }}d'
  template = chat_template.ChatTemplate(source, tmp_path, {})
  monkeypatch.setattr(chat_template, 'read', lambda path: template)
  monkeypatch.setattr(
    chat_template,
    'render',
    lambda template, messages, **unused: messages[0]['content'] + 'd',
  )
  # After its turn comes the token of 'g'.
  monkeypatch.setattr(chat_template, 'end_of_turn', lambda *unused: 9)
  run('--tasks=write', '--chat', '--json', '--max_new_tokens=4')
  report = json.loads(capsys.readouterr().out)
  assert report['results']['generate_until'] == ['ef', 'ef']
  digest = hashlib.sha256(source.encode()).hexdigest()
  assert report['chat_template_sha256'] == digest


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--tasks=choose', '--temperature=0.5'], '--temperature cannot act'),
    (['--tasks=choose,roll', '--rule=kernel'], '--rule cannot act'),
    (['--tasks=choose', '--stop_ids=3'], '--stop_ids cannot act'),
    (['--tasks=roll', '--max_new_tokens=3'], '--max_new_tokens cannot act'),
    (['--tasks=write', '--num_calls=3'], '--num_calls cannot act'),
    (['--tasks=write', '--stop_at_eos'], '--stop_at_eos cannot act'),
    (['--tasks=write', '--gamma=1'], '--gamma cannot act'),
    (['--tasks=wrong,write'], 'no task is named wrong'),
  ],
)
def test_options_that_cannot_act_are_refused(harness, arguments, message):
  with pytest.raises(ValueError, match=message):
    run(*arguments)


def test_without_the_harness_one_line_says_what_to_install(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'lm_eval', None)
  with pytest.raises(SystemExit):
    run('--tasks=choose')
  assert capsys.readouterr().err == (
    "error: lm_eval is missing; pip install 'mdlm_jax[eval]'\n"
  )
