"""A conversation as the text that a chat model was trained on.

Templates are Jinja programs of the model's directory; they run in a sandbox
that can neither reach attributes of Python nor change what it is given. Needs
the package's extra `chat`.
"""

import dataclasses
import datetime
import functools
import json
import os
import pathlib
from collections.abc import Sequence

from mdlm_jax.models import hub_tokenizer, json_files

_FILE, _SETTINGS = 'chat_template.jinja', 'tokenizer_config.json'
_DEFAULT = 'default'  # Of several named templates, the one to chat with.
_PROBE = 'X'

Message = dict[str, str]  # Of 'role' and 'content'.


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
  """The template of a directory.

  Attributes:
    source: the Jinja program.
    path: the file it is from, named in errors.
    special: role to text of special tokens, such as 'bos_token' to '<s>'.
  """

  source: str
  path: pathlib.Path
  special: dict[str, str]


def read(directory: str | os.PathLike) -> ChatTemplate | None:
  """The chat template of a model's directory; None where there is none.

  The file chat_template.jinja, else `chat_template` of tokenizer_config.json: a
  string, or a list of named ones, of which the one named 'default' is taken.

  Raises:
    OSError: a file cannot be read.
    ValueError: a file is damaged, or none of the named templates is 'default'.
  """
  directory = pathlib.Path(directory)
  path = directory / _FILE
  if path.exists():
    source = path.read_text('utf-8')
  else:
    path = directory / _SETTINGS
    source = json_files.read_if_any(path).get('chat_template')
  if isinstance(source, list):
    try:
      named = {entry['name']: entry['template'] for entry in source}
    except (TypeError, KeyError):
      raise ValueError(
        f'{path}: each chat_template of a list must have a name and a template'
      ) from None
    if _DEFAULT not in named:
      raise ValueError(
        f'{path}: of the chat templates {", ".join(map(str, named))} none is '
        f'named {_DEFAULT}'
      )
    source = named[_DEFAULT]
  if source is None:
    return None
  if not isinstance(source, str):
    raise ValueError(f'{path}: chat_template is {source!r}, must be a string')
  return ChatTemplate(source, path, hub_tokenizer.read_files(directory).special)


def render(
  template: ChatTemplate,
  messages: Sequence[Message],
  *,
  add_generation_prompt: bool = True,
) -> str:
  """The text of a conversation.

  Its special tokens are written out, BOS among them where the template puts
  one; `HubTokenizer.encode` makes each a single id and adds none.

  Args:
    template: from `read`.
    messages: of 'system', 'user' and 'assistant', oldest first.
    add_generation_prompt: whether the text ends where an answer begins.

  Raises:
    ModuleNotFoundError: jinja2 is not installed.
    ValueError: the template is damaged or refuses the messages; one line.
  """
  import jinja2

  try:
    return _compiled(template.source).render(
      messages=[dict(message) for message in messages],
      add_generation_prompt=add_generation_prompt,
      tools=None,
      documents=None,
      **template.special,
    )
  # Templates run on whatever they are given and can fail in any way.
  except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError,
          ValueError, AttributeError) as error:  # fmt: skip
    raise ValueError(
      f'{template.path}: the chat template fails: {error}'
    ) from None


def end_of_turn(
  template: ChatTemplate, tokenizer: hub_tokenizer.HubTokenizer
) -> int | None:
  """The token that follows an answer in the template, None if that is text.

  Models are trained to write it, and configurations often do not name it: of
  LLaDA it is <|eot_id|>, 126348, which the published decoder holds as a number.

  Raises:
    ValueError: as `render`.
  """
  messages = [
    {'role': 'user', 'content': _PROBE},
    {'role': 'assistant', 'content': _PROBE},
  ]
  text = render(template, messages, add_generation_prompt=False)
  ids = tokenizer.encode(text.rpartition(_PROBE)[2]).tolist()
  added = tokenizer.backend.get_added_tokens_decoder()
  return ids[0] if ids and ids[0] in added else None


def plain(messages: Sequence[Message]) -> str:
  """A conversation for a model without a template: one message, one line.

  Example:
    >>> plain([{'role': 'user', 'content': 'The value of'}])
    'The value of\\n'
  """
  return ''.join(f'{message["content"]}\n' for message in messages)


@functools.lru_cache(maxsize=8)
def _compiled(source):
  import jinja2.ext
  import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an answer is and changes nothing."""

    tags = frozenset(['generation'])

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(['name:endgeneration'], drop_needle=True)

  def raise_exception(message):
    raise jinja2.TemplateError(message)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, 'jinja2.ext.loopcontrols'],
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = raise_exception
  environment.globals['strftime_now'] = _strftime_now
  return environment.from_string(source)


def _to_json(
  value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
):
  """Not that of Jinja, which escapes for HTML."""
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _strftime_now(pattern):
  return datetime.datetime.now().strftime(pattern)
