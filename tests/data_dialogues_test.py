"""Examples as ids, against ids and texts written by hand."""

import json

import numpy as np
import pytest
import tokenizers

from mdlm_jax.data import dialogues
from mdlm_jax.models import chat_template, hub_tokenizer
from mdlm_jax.tokenizer import character_tokenizer
from mdlm_jax.vocab import Vocab

WORDS = ['?', 'red', 'blue', 'user', 'assistant', 'so']
BOS, HEAD, TAIL, EOT, EOS = 6, 7, 8, 9, 10
SPECIAL = '<|start|>', '<|head|>', '<|tail|>', '<|eot_id|>', '<|eos|>'
# As published with LLaDA 8B Instruct, with shorter names of the headers.
LLADA = (
  "{% for message in messages %}{% set content = '<|head|>' + message['role'] "
  "+ '<|tail|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
  '{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}'
  '{{ content }}{% endfor %}{% if add_generation_prompt %}'
  "{{ '<|head|>assistant<|tail|>\n\n' }}{% endif %}"
)
TALK = [
  {'role': 'user', 'content': ' red blue '},
  {'role': 'assistant', 'content': 'blue'},
  {'role': 'user', 'content': 'red'},
  {'role': 'assistant', 'content': 'red red'},
]
GIVEN = [
  BOS, HEAD, 3, TAIL, 1, 2, EOT, HEAD, 4, TAIL, 2, EOT,
  HEAD, 3, TAIL, 1, EOT, HEAD, 4, TAIL,
]  # fmt: skip


def message(**fields):
  return {'role': 'user', 'content': 'red'} | fields


ANSWER = message(role='assistant')


@pytest.fixture(scope='module')
def chat(tmp_path_factory):
  """`chat(template)` is the tokenizer and the template of a directory."""
  path = tmp_path_factory.mktemp('chat')
  model = tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, '?')
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  backend.add_special_tokens(list(SPECIAL))
  backend.save(str(path / 'tokenizer.json'))
  vocab = Vocab(12, mask_id=11, eos_ids=(EOS,))
  tokenizer = hub_tokenizer.HubTokenizer(backend, vocab)

  def with_template(source):
    settings = {'chat_template': source, 'bos_token': '<|start|>'}
    (path / 'tokenizer_config.json').write_text(json.dumps(settings))
    return tokenizer, chat_template.read(path)

  return with_template


def encoded(example, tokenizer, template=None):
  end_id = dialogues.end_of_answer(tokenizer, template)
  ids, num_given = dialogues.encode(
    example, tokenizer, template=template, end_id=end_id
  )
  assert ids.dtype == np.int32
  return ids[:num_given].tolist(), ids[num_given:].tolist()


def test_a_prompt_is_given_and_an_answer_ends_once(chat):
  tokenizer, template = chat(LLADA)
  example = {'prompt': 'red <|head|>', 'answer': 'blue red', 'id': 3}
  assert encoded(example, tokenizer) == ([1, HEAD], [2, 1, EOS])
  # An end that is written out is not written twice; one inside stays.
  example['answer'] = 'blue <|eos|> red <|eos|>'
  assert encoded(example, tokenizer) == ([1, HEAD], [2, EOS, 1, EOS])
  # A template writes messages only; its end of a turn is the end here too.
  example['answer'] = 'blue <|eot_id|> red'
  got = encoded(example, tokenizer, template)
  assert got == ([1, HEAD], [2, EOT, 1, EOT])
  # Nothing may be given; and a vocabulary without EOS ends nothing.
  example = {'prompt': '', 'answer': 'ab'}
  assert encoded(example, character_tokenizer('ab')) == ([], [2, 3])


def test_the_last_message_is_the_answer_as_the_template_writes_it(chat):
  tokenizer, template = chat(LLADA)
  example = {'messages': TALK}
  assert encoded(example, tokenizer, template) == (GIVEN, [1, 1, EOT])
  # What is given is what a chat asks with.
  asked = tokenizer.encode(chat_template.render(template, TALK[:-1]))
  assert asked.tolist() == GIVEN


@pytest.mark.parametrize(
  ('change', 'answer'),
  [
    # As published with ChatML: a line break after the end.
    (("'<|eot_id|>'", "'<|eot_id|> so'"), [1, 1, EOT]),
    # As of templates that always ask for the next answer.
    (('{% if add_generation_prompt %}', '{% if true %}'), [1, 1, EOT]),
    # No token ends a turn: EOS does.
    (("'<|eot_id|>'", "' so '"), [1, 1, 5, EOS]),
    # What thinks aloud does it in the answer.
    (
      (
        "message['content']",
        "('' if loop.index < 4 else 'so ') + message.content",
      ),
      [5, 1, 1, EOT],
    ),
  ],
)
def test_what_templates_write_around_an_answer(chat, change, answer):
  tokenizer, template = chat(LLADA.replace(*change))
  assert encoded({'messages': TALK}, tokenizer, template)[1] == answer


def test_without_a_template_each_message_is_a_line(chat):
  tokenizer, _ = chat(None)
  assert encoded({'messages': TALK}, tokenizer) == ([1, 2, 2, 1], [1, 1, EOS])
  characters = character_tokenizer('abc\n')
  talk = [message(content='ab'), ANSWER | {'content': 'c'}]
  given, answer = encoded({'messages': talk}, characters)
  assert characters.decode(given) == 'ab\n'
  assert characters.decode(answer) == 'c\n'  # Nothing else ends it.


@pytest.mark.parametrize(
  ('example', 'error'),
  [
    ({}, '^prompt is missing'),
    ({'prompt': 'red'}, '^answer is missing'),
    ({'prompt': 3, 'answer': 'red'}, '^prompt is 3, must be a string'),
    ({'prompt': 'red', 'answer': ''}, '^answer is empty'),
    ({'messages': [], 'answer': ''}, '^messages and answer are both there'),
    ({'messages': 'red'}, "^messages is 'red', must be a list"),
    ({'messages': [ANSWER]}, '^messages is .* at least two'),
    ({'messages': [ANSWER, 'red']}, r"^messages\[1\] is 'red'"),
    ({'messages': [{'role': 'user'}, ANSWER]}, r'\[0\]\.content is missing'),
    ({'messages': [message(content=None), ANSWER]}, r'\[0\]\.content is None'),
    ({'messages': [message(), message()]}, r"\[1\]\.role is 'user'; the last"),
    ({'messages': [message(), ANSWER | {'content': ''}]}, 'content is empty'),
    ({'messages': [message(role='tool'), ANSWER]}, '^messages: .*no tool'),
    ({'messages': [message(content='so'), ANSWER]}, '^messages: .*another way'),
  ],
)
def test_a_bad_field_is_named(chat, example, error):
  tokenizer, template = chat(
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tool') }}"
    "{% endif %}{% if messages[0].content == 'so' and messages | length == 2 %}"
    '{{ bos_token }}{% endif %}' + LLADA
  )
  with pytest.raises(ValueError, match=error):
    dialogues.encode(example, tokenizer, template=template)


def test_the_field_with_unknown_characters_is_named():
  for name in ('prompt', 'answer'):
    example = {'prompt': 'a', 'answer': 'a'} | {name: 'z'}
    with pytest.raises(ValueError, match=f"^{name}: unknown characters 'z'"):
      dialogues.encode(example, character_tokenizer('a'))
