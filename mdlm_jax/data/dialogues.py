"""Examples to fine-tune on as ids: what is given, then the answer and its end.

An example is a dict, as a line of JSON has it: `{"prompt": ..., "answer": ...}`
or `{"messages": [{"role": ..., "content": ...}, ...]}`. The ids of the given
part are those that the finished model will be asked with.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from mdlm_jax.models import chat_template
from mdlm_jax.models.chat_template import ChatTemplate, Message
from mdlm_jax.models.hub_tokenizer import HubTokenizer
from mdlm_jax.tokenizer import Tokenizer

_ANSWERS = 'assistant'  # The role of the message that is the answer.


def encode(
  example: Mapping[str, Any],
  tokenizer: Tokenizer | HubTokenizer,
  *,
  template: ChatTemplate | None = None,
  end_id: int | None = None,
) -> tuple[Int[np.ndarray, 'n'], int]:
  """Ids of an example and how many of them are given.

  A prompt and its answer are encoded as they are written. Of messages the last
  is the answer and those before it are given, as the template writes them or,
  without one, each as a line. The two parts are encoded apart, since the model
  will be asked with the first alone. What a template writes after the token
  that ends the answer is left out.

  Args:
    example: has strings `prompt` and `answer`; or `messages`, at least two,
      each with strings `role` and `content`, the last of role 'assistant'.
      Other fields are not read.
    tokenizer: text to ids.
    template: how messages are written, of `chat_template.read`.
    end_id: the token after an answer, of `end_of_answer`; None: there is none.

  Returns:
    int32 ids and the number of those that are given.

  Raises:
    ValueError: a field that is missing, of another type or empty, or that the
      template or the tokenizer refuses; names the field.
    ModuleNotFoundError: jinja2, which templates need, is not installed.

  Example:
    >>> from mdlm_jax.tokenizer import character_tokenizer
    >>> encode({'prompt': 'ab', 'answer': 'c'}, character_tokenizer('abc'))
    (array([2, 3, 4], dtype=int32), 2)
  """
  check(example)
  if 'messages' in example:
    names = 'messages', 'messages'
    given, answer = _written(example['messages'], template, end_id)
  else:
    names = 'prompt', 'answer'
    given, answer = example['prompt'], example['answer']
  given = _ids(tokenizer, given, names[0])
  answer = _ids(tokenizer, answer, names[1])
  if end_id is not None:
    is_written = 'messages' in example and template is not None
    answer = _ended(answer, end_id, cut=is_written)
  return np.concatenate([given, answer]).astype(np.int32), len(given)


def check(example: Mapping[str, Any]) -> None:
  """Finds what is wrong in an example whatever the tokenizer and template.

  Raises:
    ValueError: as `encode`.
  """
  if 'messages' in example:
    for name in ('prompt', 'answer'):
      if name in example:
        raise ValueError(f'messages and {name} are both there')
    _check_messages(example['messages'])
  else:
    _, answer = (_text(example, name) for name in ('prompt', 'answer'))
    _check_answer(answer, 'answer')


def end_of_answer(
  tokenizer: Tokenizer | HubTokenizer, template: ChatTemplate | None = None
) -> int | None:
  """The token after an answer: that of the template, else the first EOS.

  Returns:
    None where there is neither.

  Raises:
    ValueError, ModuleNotFoundError: as `chat_template.render`.
  """
  if template is not None:
    end_id = chat_template.end_of_turn(template, tokenizer)
    if end_id is not None:
      return end_id
  return next(iter(tokenizer.vocab.eos_ids), None)


def _written(
  messages: Sequence[Message],
  template: ChatTemplate | None,
  end_id: int | None,
) -> tuple[str, str]:
  """The text that is given and that of the answer."""
  *before, last = messages
  if template is None:
    # A line ends where no token does it.
    answer = chat_template.plain([last]) if end_id is None else last['content']
    return chat_template.plain(before), answer
  try:
    given = chat_template.render(template, before)
    text = chat_template.render(template, messages, add_generation_prompt=False)
  except ValueError as error:
    raise ValueError(f'messages: {error}') from None
  if not text.startswith(given):
    raise ValueError(
      f'messages: {template.path} writes an answer in another way than it asks '
      f'for one: {given[-40:]!r} is not how the text before the answer ends'
    )
  return given, text[len(given) :]


def _ended(ids, end_id, *, cut):
  """An answer that ends with its token, cut after it where it goes on."""
  ends = np.flatnonzero(ids == end_id)
  if cut and ends.size:
    return ids[: ends[-1] + 1]
  is_ended = ends.size and ends[-1] == len(ids) - 1
  return ids if is_ended else np.append(ids, end_id)


def _check_messages(messages):
  if not isinstance(messages, list) or len(messages) < 2:
    raise ValueError(
      f'messages is {_short(messages)}, must be a list of at least two messages'
    )
  for i, message in enumerate(messages):
    if not isinstance(message, dict):
      raise ValueError(f'messages[{i}] is {_short(message)}, must be an object')
    for name in ('role', 'content'):
      _text(message, name, f'messages[{i}].')
  last, path = messages[-1], f'messages[{len(messages) - 1}]'
  if last['role'] != _ANSWERS:
    raise ValueError(
      f'{path}.role is {last["role"]!r}; the last message is the answer and '
      f'must be of {_ANSWERS!r}'
    )
  _check_answer(last['content'], f'{path}.content')


def _text(fields, name, path=''):
  if name not in fields:
    raise ValueError(f'{path}{name} is missing')
  text = fields[name]
  if not isinstance(text, str):
    raise ValueError(f'{path}{name} is {_short(text)}, must be a string')
  return text


def _check_answer(text, path):
  if not text:
    raise ValueError(f'{path} is empty, there is no answer to learn')


def _ids(tokenizer, text, name):
  try:
    return tokenizer.encode(text)
  except ValueError as error:
    raise ValueError(f'{name}: {error}') from None


def _short(value):
  text = repr(value)
  return text if len(text) <= 60 else f'{text[:57]}...'
