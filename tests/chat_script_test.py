"""scripts/chat.py: what the model is told, what is shown, what is forgotten."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time

import jax
import pytest
import script_runner
import tiny_checkpoint
import tokenizers

from mdlm_jax import rules, sampling
from mdlm_jax.canvas import from_prompts
from mdlm_jax.draws import categorical
from mdlm_jax.models import directory

ALPHABET = ' \nabcdefghijklmnopqrstuvwxyz'
COUNTS = '3 calls, 5 tokens in 2.00 s: 2.5 tokens/s'


def save(path, max_length):
  return tiny_checkpoint.write(path, ALPHABET, max_length)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A model of 24 characters, without a chat template."""
  return save(tmp_path_factory.mktemp('chat') / 'model', 24)


@pytest.fixture
def chat(checkpoint, capsys, monkeypatch):
  """Runs the script on turns piped in; gives what it wrote."""

  def run(turns, *arguments, path=checkpoint, **replaced):
    monkeypatch.setattr(sys, 'stdin', io.StringIO(turns))
    script_runner.run('chat.py', f'--checkpoint={path}', *arguments, **replaced)
    return capsys.readouterr()

  return run


class Parrot:
  """In place of the sampler: keeps the prompts and answers 'ok'."""

  prompts = ()

  def __init__(self, speaker):
    self.params = speaker.model.params
    self.decode = speaker.model.tokenizer.decode
    self.vocab = speaker.model.vocab
    self.watcher = script_runner.load('chat.py').Watcher()
    Parrot.prompts = []
    Parrot.last = self

  def __call__(self, prompt, turn):
    Parrot.prompts.append(self.decode(prompt))
    if 'stop' in Parrot.prompts[-1]:
      os.kill(os.getpid(), signal.SIGINT)
      while not self.watcher.is_stopped:
        time.sleep(0.01)
      raise RuntimeError('stopped')
    return script_runner.load('chat.py').Answer('ok', 3, 5, 0.0, 2.0)


def test_turns_are_told_line_by_line_without_a_template(chat):
  out, err = chat(
    'a b\n\nc\n/reset\nd\n/quit\nnever\n', '--system=s', '--length=4',
    Sampler=Parrot,
  )  # fmt: skip
  assert Parrot.prompts == ['s\na b\n', 's\na b\nok\nc\n', 's\nd\n']
  assert out == 'ok\nok\n[the conversation is forgotten]\nok\n'
  assert err.count(f'[{COUNTS}]\n') == 3


def test_the_oldest_turns_are_forgotten_when_there_is_no_room(chat):
  # 24 - 10 leaves 14: 's', a turn and its answer, and the next one do fit.
  _, err = chat('aaa\nbbb\nccc\n', '--length=10', '--system=s', Sampler=Parrot)
  assert Parrot.prompts == [
    's\naaa\n',
    's\naaa\nok\nbbb\n',
    's\nbbb\nok\nccc\n',
  ]
  assert err.count('[1 oldest turn(s) forgotten: the model has 24 tokens]') == 1
  with pytest.raises(
    ValueError,
    match='15 tokens are too many: of the length 24 of the model, '
    '--length=10 leaves 14',
  ):
    chat('aaa\nfourteen chars\n', '--length=10', Sampler=Parrot)


def test_an_interrupted_turn_is_forgotten_and_nothing_else(chat):
  out, err = chat('a\nstop\nb\n', '--length=4', Sampler=Parrot)
  assert Parrot.prompts == ['a\n', 'a\nok\nstop\n', 'a\nok\nb\n']
  assert out == 'ok\nok\n'
  assert err.count('[interrupted: the turn is forgotten]') == 1


def test_parameters_have_the_dtype_asked_for(chat):
  for dtype in ('float32', 'bfloat16'):
    chat('/quit\n', f'--dtype={dtype}', Sampler=Parrot)
    assert {str(x.dtype) for x in jax.tree.leaves(Parrot.last.params)} == {
      dtype
    }


def test_commands_and_mistakes(chat):
  out, _ = chat('/help\n', Sampler=Parrot)
  assert '/reset  forgets' in out
  with pytest.raises(ValueError, match='no command /no'):
    chat('/no\n', Sampler=Parrot)
  with pytest.raises(ValueError, match='unknown characters'):
    chat('1\n', Sampler=Parrot)
  with pytest.raises(ValueError, match='--length=24 leaves nothing of'):
    chat('a\n', '--length=24')
  with pytest.raises(ValueError, match=r'--stop_ids=x must be ids'):
    chat('a\n', '--stop_ids=x')
  with pytest.raises(ValueError, match='--steps=4 cannot act with --rule=thr'):
    chat('a\n', '--rule=threshold', '--steps=4')


def test_padding_to_a_common_length_changes_nothing(chat, checkpoint):
  """And the second turn finds its program compiled."""
  compiled = []
  flags = '--length=4', '--steps=2', '--temperature=0', '--block_length=4'

  class Counting(script_runner.load('chat.py').Sampler):
    def __call__(self, prompt, turn):
      answer = super().__call__(prompt, turn)
      compiled.append(len(self._programs))
      return answer

  out, err = chat('ab\nc\n', *flags, Sampler=Counting)
  assert compiled == [1, 1]
  assert err.count('[2 calls, 4 tokens in') == 2
  model = directory.load(checkpoint)
  prompt = model.tokenizer.encode('ab\n').tolist()
  result = sampling.sample(
    model.denoiser, model.params, jax.random.key(0),
    from_prompts([prompt], 4, model.vocab), vocab=model.vocab,
    rule=rules.by_confidence(2), draw=categorical(temperature=0.0),
  )  # fmt: skip
  assert out.startswith(model.tokenizer.decode(result.ids[0, 3:]) + '\n')


def test_a_template_says_what_is_told_and_what_ends_a_turn(chat, tmp_path):
  golden = script_runner.ROOT / 'tests' / 'golden' / 'llada'
  config = json.loads((golden / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'model.safetensors').symlink_to(golden / 'model.safetensors')
  words = {f'w{i}': i for i in range(126)}
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, 'w0'))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  backend.add_special_tokens(['<|mask|>', '<|eot|>'])
  backend.save(str(tmp_path / 'tokenizer.json'))
  template = (
    '{% for m in messages %}w9 {{ m.content }}<|eot|>{% endfor %}'
    '{% if add_generation_prompt %}w8{% endif %}'
  )
  (tmp_path / 'tokenizer_config.json').write_text(
    json.dumps({'chat_template': template})
  )
  chat(
    'w5\nw6\n', '--length=4', '--stop_ids=7,121', path=tmp_path, Sampler=Parrot
  )
  assert Parrot.prompts[0] == 'w9 w5 w8'
  assert Parrot.prompts[1] == 'w9 w5 w9 ok w9 w6 w8'.replace('ok', 'w0')
  # Of config.json, of --stop_ids, of the template.
  assert Parrot.last.vocab.eos_ids == (121, 7, 127)


def test_in_a_terminal_the_answer_is_seen_and_can_be_interrupted(tmp_path):
  model = save(tmp_path / 'model', 2048)
  main, child = pty.openpty()
  process = subprocess.Popen(
    [
      sys.executable, script_runner.ROOT / 'scripts' / 'chat.py',
      f'--checkpoint={model}', '--length=1900', '--temperature=0',
    ],
    stdin=child, stdout=child, stderr=child, close_fds=True,
    env=os.environ | {'TERM': 'xterm', 'COLUMNS': '80', 'LINES': '24',
                      'PYTHONPATH': str(script_runner.ROOT)},
  )  # fmt: skip
  os.close(child)
  seen = ''

  def wait_for(text):
    nonlocal seen
    end = time.monotonic() + 120
    while text not in seen:
      assert time.monotonic() < end, seen
      try:
        seen += os.read(main, 4096).decode(errors='replace')
      except OSError:  # The other end is closed.
        assert text in seen, seen
    seen = seen.partition(text)[2]

  try:
    wait_for('/help lists the commands')
    os.write(main, b'hello\n')
    wait_for('\N{LIGHT SHADE}' * 20)  # The canvas,
    process.send_signal(signal.SIGINT)
    wait_for('[interrupted: the turn is forgotten]')
    os.write(main, b'/quit\n')
    assert process.wait(60) == 0
  finally:
    process.kill()
    os.close(main)
