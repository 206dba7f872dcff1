"""Chat templates against conversations written by hand."""

import datetime
import json

import pytest
import tokenizers

from mdlm_jax.models import chat_template, hub_tokenizer
from mdlm_jax.vocab import Vocab

# As published with LLaDA 8B Instruct.
LLADA = (
  '{% set loop_messages = messages %}{% for message in loop_messages %}'
  "{% set content = '<|start_header_id|>' + message['role'] + "
  "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
  '{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}'
  '{{ content }}{% endfor %}{% if add_generation_prompt %}'
  "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# ChatML as published with Qwen2.5 and Dream, the part without tools.
CHATML = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""  # noqa: E501
HEADERS = '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>'
TALK = [
  {'role': 'user', 'content': ' red blue '},
  {'role': 'assistant', 'content': 'blue'},
  {'role': 'user', 'content': 'red'},
]


def write(path, template, **settings):
  """The tokenizer's files: words, and the tokens of both templates."""
  words = {
    word: i
    for i, word in enumerate(['?', 'red', 'blue', 'user', 'assistant', 'X'])
  }
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, '?'))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  backend.add_special_tokens(['<|start|>', *HEADERS, '<|im_start|>'])
  # A tokenizer that would add BOS by itself.
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    '<|start|> $A', special_tokens=[('<|start|>', 6)]
  )
  backend.save(str(path / 'tokenizer.json'))
  settings |= {'chat_template': template, 'bos_token': '<|start|>'}
  (path / 'tokenizer_config.json').write_text(json.dumps(settings))
  return chat_template.read(path)


def codec(path):
  files = hub_tokenizer.read_files(path)
  return hub_tokenizer.HubTokenizer(files.backend, Vocab(20, mask_id=19))


def test_llada(tmp_path):
  template = write(tmp_path, LLADA)
  text = chat_template.render(template, TALK)
  assert text == (
    '<|start|><|start_header_id|>user<|end_header_id|>\n\nred blue<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\nblue<|eot_id|>'
    '<|start_header_id|>user<|end_header_id|>\n\nred<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\n'
  )
  closed = chat_template.render(template, TALK, add_generation_prompt=False)
  assert text == closed + '<|start_header_id|>assistant<|end_header_id|>\n\n'
  # Each special token is one id, BOS only where the template puts it.
  assert codec(tmp_path).encode(text).tolist() == [
    6, 7, 3, 8, 1, 2, 9, 7, 4, 8, 2, 9, 7, 3, 8, 1, 9, 7, 4, 8,
  ]  # fmt: skip


def test_chatml_with_and_without_a_system_message(tmp_path):
  template = write(tmp_path, CHATML)
  assert chat_template.render(template, TALK[2:]) == (
    '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'
    '<|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n'
  )
  system = {'role': 'system', 'content': 'Be brief.'}
  assert chat_template.render(template, [system, *TALK]) == (
    '<|im_start|>system\nBe brief.<|im_end|>\n'
    '<|im_start|>user\n red blue <|im_end|>\n'
    '<|im_start|>assistant\nblue<|im_end|>\n'
    '<|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n'
  )


def test_the_token_that_ends_a_turn(tmp_path):
  template = write(tmp_path, LLADA)
  assert chat_template.end_of_turn(template, codec(tmp_path)) == 9
  # <|im_end|> is listed in tokenizer_config.json only.
  listed = {'11': {'content': '<|im_end|>', 'special': True}}
  template = write(tmp_path, CHATML, added_tokens_decoder=listed)
  assert chat_template.end_of_turn(template, codec(tmp_path)) == 11
  template = write(
    tmp_path, '{% for m in messages %}{{m.content}} {% endfor %}'
  )
  assert chat_template.end_of_turn(template, codec(tmp_path)) is None


def test_a_listed_token_must_get_the_id_it_is_listed_with(tmp_path):
  listed = {'15': {'content': '<|im_end|>', 'special': True}}
  with pytest.raises(ValueError, match=r'<\|im_end\|> the id 15.*would be 11'):
    write(tmp_path, CHATML, added_tokens_decoder=listed)


def test_where_the_template_is_read_from(tmp_path):
  named = [
    {'name': 'tool_use', 'template': 'a'},
    {'name': 'default', 'template': 'b'},
  ]
  assert write(tmp_path, None) is None
  assert write(tmp_path, named).source == 'b'
  (tmp_path / 'chat_template.jinja').write_text('c')
  assert chat_template.read(tmp_path).source == 'c'
  (tmp_path / 'chat_template.jinja').unlink()
  for content, message in (
    (named[:1], 'of the chat templates tool_use none is named default'),
    (['a'], 'must have a name and a template'),
    (3, 'chat_template is 3'),
  ):
    with pytest.raises(ValueError, match=message):
      write(tmp_path, content)


@pytest.mark.parametrize(
  'source, text',
  [
    # As JSON in Python, not as in HTML.
    ('{{ {"b": "<é>", "a": 1} | tojson }}', '{"b": "<é>", "a": 1}'),
    ('{{ [1] | tojson(indent=1) }}', '[\n 1\n]'),
    ('{% for m in messages %}{{ m.role }}{% break %}{% endfor %}', 'user'),
    ('{% generation %}{{ bos_token }}{% endgeneration %}', '<|start|>'),
    ('  {% if tools is none %}\nno tools{% endif %}\n', 'no tools'),
  ],
)
def test_what_templates_expect(tmp_path, source, text):
  assert chat_template.render(write(tmp_path, source), TALK) == text


def test_the_date_of_today(tmp_path):
  template = write(tmp_path, '{{ strftime_now("%Y-%m-%d") }}')
  before = datetime.date.today().isoformat()
  text = chat_template.render(template, TALK)
  assert text in (before, datetime.date.today().isoformat())


@pytest.mark.parametrize(
  'source, message',
  [
    ('{{ raise_exception("no system role") }}', 'fails: no system role'),
    ('{% if %}', 'fails: Expected an expression'),
    ('{{ messages.append(1) }}', 'fails: .*unsafe|not safely callable'),
    ('{{ messages.__class__.__mro__ }}', "fails: .*'__class__'.*unsafe"),
    ('{{ nothing + "a" }}', "fails: 'nothing' is undefined"),
    ('{{ 1 / 0 }}', 'fails: division by zero'),
    ('{{ messages[0].content + 1 }}', 'fails: can only concatenate'),
  ],
)
def test_a_template_that_fails_is_named(tmp_path, source, message):
  with pytest.raises(ValueError, match=rf'tokenizer_config\.json.*{message}'):
    chat_template.render(write(tmp_path, source), TALK)
