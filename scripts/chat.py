"""Talks with a masked diffusion language model in a terminal.

  python scripts/chat.py --checkpoint=DIR
  python scripts/chat.py --checkpoint=DIR --steps=64 --block_length=32
  echo 'What is a mask?' | python scripts/chat.py --checkpoint=DIR

The answer is seen filling in. Ctrl-C interrupts it; /help lists the commands.
Turns that are not typed but piped in, one a line, are answered one a line
without that, with the counts on stderr.

The conversation is written as the chat template of the model's directory says
(docs/chat.md). A model without one is given the messages, one a line.
"""

import contextlib
import logging
import signal
import sys
import threading
import time
from typing import NamedTuple

import jax
import numpy as np
from absl import flags

from mdlm_jax import (
  canvas,
  command_line,
  decoding_flags,
  model_flags,
  named_rules,
  sampling,
)
from mdlm_jax.models import chat_template, hub_tokenizer
from mdlm_jax.models.pretrained import Pretrained

__doc__ += f"""
The rules, with the settings that each reads and their defaults:

{named_rules.table()}
"""

_LENGTH_DEFAULT = 128
# Canvases are padded to a multiple of so many slots: a program is compiled for
# each length, so most turns find one that is there.
_BUCKET = 128
_HOLE = '\N{LIGHT SHADE}'
_HELP = """\
/reset  forgets the conversation, but for --system
/quit   ends the program, as Ctrl-D does
/help   this
Ctrl-C  interrupts an answer; the turn is forgotten, what was before it is not
A turn is one line; a space before it sends one that begins with /."""

_MODEL = model_flags.define(stop_ids=True)
_LENGTH = flags.DEFINE_integer(
  'length',
  None,
  f'Tokens of an answer, ended or not. Default: {_LENGTH_DEFAULT}, but at most '
  "half the model's length.",
  lower_bound=1,
)
_SYSTEM = flags.DEFINE_string(
  'system', None, 'A first message that says how to answer.'
)
_DECODING = decoding_flags.define()
_SEED = flags.DEFINE_integer(
  'seed', 0, 'Seed of all random numbers.', 0, 2**32 - 1
)


class Speaker(NamedTuple):
  """A model and how it is talked with.

  Attributes:
    model: its vocabulary knows what ends a turn.
    template: how a conversation is written, None for one message a line.
    length: tokens of an answer.
  """

  model: Pretrained
  template: chat_template.ChatTemplate | None
  length: int


class Answer(NamedTuple):
  """An answer and what it cost."""

  text: str
  calls: int
  num_tokens: int
  compile_seconds: float
  run_seconds: float


class Watcher:
  """What `sampling.sample` calls after each call: shows it, may end it."""

  def __init__(self):
    self.is_stopped = False
    self.show = None  # Of the calls made, the most calls and the canvas.

  def __call__(self, calls, most, ids):
    if self.is_stopped:
      # The only way to end a compiled program before its time.
      raise KeyboardInterrupt
    if self.show is not None:
      self.show(int(calls), int(most), np.asarray(ids)[0])

  def filter(self, record):
    """Of the log: what is said of the interruption is not."""
    del record
    return not self.is_stopped


class Sampler:
  """Compiles once for each length of the canvas."""

  def __init__(self, speaker: Speaker):
    self._model = speaker.model
    self._length = speaker.length
    self._programs = {}
    self.watcher = Watcher()

  def __call__(self, prompt: list[int], turn: int) -> Answer:
    model = self._model
    row = [*prompt, *[None] * self._length]
    (row,) = canvas.whole_blocks(
      [row], model.config.attention_block, model.config.max_length
    )
    size = -(-len(row) // _BUCKET) * _BUCKET
    size = min(size, model.config.max_length)
    filled = canvas.from_rows([row], model.vocab, length=size)
    chosen = decoding_flags.decoding_of(_DECODING, model, filled)
    key = jax.random.fold_in(jax.random.key(_SEED.value), turn)
    arguments = (model.params, key, filled)
    static = {**chosen.static, 'on_call': self.watcher}
    # Blocks of a network that attends by blocks begin where they began in
    # training, so prompts of equal length differ in how many are open.
    shape = size, chosen.num_calls, jax.tree.structure(chosen.arrays)
    start = time.perf_counter()
    if shape not in self._programs:
      sampler = jax.jit(sampling.sample, static_argnames=('denoiser', *static))
      self._programs[shape] = sampler.lower(
        model.denoiser, *arguments, **static, **chosen.arrays
      ).compile()
    middle = time.perf_counter()
    result = jax.block_until_ready(
      self._programs[shape](*arguments, **chosen.arrays)
    )
    end = time.perf_counter()
    jax.effects_barrier()  # The last words of `on_call`.
    sampling.check_finite(result)
    result = jax.device_get(result)
    num_tokens = min(int(result.num_tokens[0]), self._length)
    ids = result.ids[0, len(prompt) :][:num_tokens]
    return Answer(
      model.tokenizer.decode(ids[~np.isin(ids, model.vocab.eos_ids)]),
      int(result.calls),
      num_tokens,
      middle - start,
      end - middle,
    )


def make_speaker() -> Speaker:
  """What the flags ask for."""
  path, model = model_flags.load(_MODEL)
  model = decoding_flags.with_attention_block(_DECODING, model)
  if isinstance(model.tokenizer, hub_tokenizer.NoTokenizer):
    raise ValueError(f'{path} has no tokenizer.json, so there is no text')
  template = chat_template.read(path)
  if template is not None:
    with command_line.extra('chat'):
      import jinja2  # noqa: F401
    end = chat_template.end_of_turn(template, model.tokenizer)
    if end is not None:
      model = model._replace(vocab=model_flags.with_ends(model.vocab, [end]))
  longest = model.config.max_length
  length = _LENGTH.value or max(min(_LENGTH_DEFAULT, longest // 2), 1)
  if length >= longest:
    raise ValueError(
      f'--length={length} leaves nothing of the length {longest} of the model '
      'for what is said to it'
    )
  return Speaker(model, template, length)


def set_ending(vocab) -> None:
  """An answer stops where it ends, unless the flags say otherwise."""
  stop = _DECODING['stop_at_eos']
  if not stop.present and _DECODING['eos'].value != 'forbid':
    can_end = vocab.drawable[[*vocab.eos_ids]].any()
    flags.FLAGS[stop.name].value = bool(can_end)


def prompt_of(speaker: Speaker, messages: list) -> list[int]:
  """The ids of a conversation, up to where the answer begins."""
  if speaker.template is None:
    text = chat_template.plain(messages)
  else:
    text = chat_template.render(speaker.template, messages)
  return speaker.model.tokenizer.encode(text).tolist()


def fitted(speaker: Speaker, messages: list) -> tuple[list, list[int]]:
  """The latest turns that leave room for an answer, and their ids.

  Raises:
    ValueError: the last turn alone leaves none.
  """
  room = speaker.model.config.max_length - speaker.length
  while len(prompt := prompt_of(speaker, messages)) > room:
    oldest = int(messages[0]['role'] == 'system')
    if len(messages) - oldest < 3:  # The last turn.
      raise ValueError(
        f'{len(prompt)} tokens are too many: of the length '
        f'{speaker.model.config.max_length} of the model, '
        f'--length={speaker.length} leaves {room}'
      )
    messages = messages[:oldest] + messages[oldest + 2 :]
  return messages, prompt


def interruptible(sampler: Sampler, prompt, turn) -> Answer | None:
  """The answer, None where Ctrl-C came before it."""
  watcher, outcome = sampler.watcher, []

  def work():
    try:
      outcome.append(sampler(prompt, turn))
    except Exception as error:
      outcome.append(error)

  thread = threading.Thread(target=work, daemon=True)
  watcher.is_stopped = False
  with command_line.caught_signals() as caught:
    thread.start()
    while thread.is_alive():
      thread.join(0.05)
      watcher.is_stopped = bool(caught)
  if signal.SIGTERM in caught:
    sys.exit(128 + signal.SIGTERM)
  if isinstance(outcome[0], Exception):
    if caught:
      return None
    raise outcome[0]
  return outcome[0]


@contextlib.contextmanager
def live_canvas(speaker: Speaker, watcher: Watcher, start: int):
  """Shows the answer from slot `start` on while it is filled in."""
  with command_line.extra('chat'):
    from rich import live, text

  def show(calls, most, ids):
    answer = ids[start : start + speaker.length]
    shown = text.Text(speaker.model.tokenizer.decode(answer, mask=_HOLE))
    shown.highlight_regex(f'{_HOLE}+', 'dim')
    shown.append(f'\n[call {calls} of {most}]', 'dim')
    display.update(shown)

  with live.Live(
    text.Text('...', 'dim'), refresh_per_second=15, transient=True
  ) as display:
    watcher.show = show
    try:
      yield
    finally:
      watcher.show = None


def print_counts(answer: Answer) -> None:
  compiled = ''
  if answer.compile_seconds > 0.1:
    compiled = f', after {answer.compile_seconds:.1f} s of compilation'
  print(
    f'[{answer.calls} calls, {answer.num_tokens} tokens in '
    f'{answer.run_seconds:.2f} s: '
    f'{answer.num_tokens / answer.run_seconds:.1f} tokens/s{compiled}]',
    file=sys.stderr,
  )


def read_turn(is_live: bool) -> str | None:
  """The next line, None at the end."""
  if not is_live:
    line = sys.stdin.readline()
    return line.rstrip('\n') if line else None
  previous = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    return input('> ')
  except KeyboardInterrupt:
    print('\n/quit ends the program')
    return ''
  except EOFError:
    print()
    return None
  finally:
    signal.signal(signal.SIGINT, previous)


def converse(speaker: Speaker, is_live: bool) -> None:
  """Turn after turn until the end."""
  beginning = []
  if _SYSTEM.value is not None:
    beginning = [{'role': 'system', 'content': _SYSTEM.value}]
  sampler = Sampler(speaker)
  logging.getLogger('jax._src.debugging').addFilter(sampler.watcher)
  messages, turn = beginning, 0
  while (line := read_turn(is_live)) is not None:
    if not line.strip():
      continue
    if line.startswith('/'):
      command = line.strip()
      if command == '/quit':
        break
      if command == '/reset':
        messages = beginning
      try:
        print(command_answer(command))
      except ValueError as error:
        if not is_live:
          raise
        print(f'error: {error}', file=sys.stderr)
      continue
    try:
      kept, prompt = fitted(
        speaker, [*messages, {'role': 'user', 'content': line.strip()}]
      )
      if forgotten := (len(messages) + 1 - len(kept)) // 2:
        print(
          f'[{forgotten} oldest turn(s) forgotten: the model has '
          f'{speaker.model.config.max_length} tokens]',
          file=sys.stderr,
        )
      display = contextlib.nullcontext()
      if is_live:
        display = live_canvas(speaker, sampler.watcher, len(prompt))
      with display:
        answer = interruptible(sampler, prompt, turn)
    except ValueError as error:
      if not is_live:
        raise
      print(f'error: {error}', file=sys.stderr)
      continue
    if answer is None:
      print('[interrupted: the turn is forgotten]', file=sys.stderr)
      continue
    print(answer.text, flush=True)
    print_counts(answer)
    messages = [*kept, {'role': 'assistant', 'content': answer.text}]
    turn += 1


def command_answer(command: str) -> str:
  if command == '/reset':
    return '[the conversation is forgotten]'
  if command == '/help':
    return _HELP
  raise ValueError(f'no command {command}; /help lists them')


def main(argv):
  del argv
  decoding_flags.check(_DECODING)  # Before the model is loaded.
  is_live = sys.stdin.isatty() and sys.stdout.isatty()
  speaker = make_speaker()
  set_ending(speaker.model.vocab)
  if is_live:
    with contextlib.suppress(ImportError):  # Lines that can be edited.
      import readline  # noqa: F401
    size = sum(x.size for x in jax.tree.leaves(speaker.model.params))
    how = 'its chat template'
    if speaker.template is None:
      how = 'one message a line: it has no chat template'
    print(
      f'{size:,} parameters, {speaker.model.config.max_length} tokens, answers '
      f'of {speaker.length}; {how}\n/help lists the commands'
    )
  converse(speaker, is_live)


if __name__ == '__main__':
  command_line.run(main)
