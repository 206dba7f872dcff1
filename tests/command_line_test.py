import os
import signal
import subprocess
import sys

import pytest
from absl import flags

from mdlm_jax import command_line

flags.DEFINE_integer('command_line_test_number', 1, 'For this test.')


@pytest.fixture(autouse=True)
def own_arguments(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['program'])
  yield
  flags.FLAGS.unparse_flags()
  flags.FLAGS.mark_as_parsed()


def exit_of(main):
  with pytest.raises(SystemExit) as exit_:
    command_line.run(main)
  return exit_.value.code


@pytest.mark.parametrize(
  'error',
  [
    ValueError('steps=0 must be\n  at least 1'),
    FileNotFoundError(2, 'No such file', 'a.txt'),
    FloatingPointError('diverged at step 3'),
  ],
)
def test_mistakes_are_one_line_and_exit_code_2(error, capsys):
  def main(_):
    raise error

  assert exit_of(main) == 2
  out, err = capsys.readouterr()
  assert out == ''
  assert err.startswith('error: ') and err.count('\n') == 1
  assert ' '.join(str(error).split()) in err


def test_faults_of_the_program_keep_their_traceback():
  def main(_):
    raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    command_line.run(main)


def test_interruption_ends_the_program_at_once_and_silently():
  program = (
    'import time\n'
    'from mdlm_jax import command_line\n'
    'command_line.run(lambda _: (print("ready", flush=True), time.sleep(60)))'
  )
  process = subprocess.Popen(
    [sys.executable, '-c', program],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == 'ready\n'
  process.send_signal(signal.SIGINT)
  _, errors = process.communicate(timeout=30)
  assert (process.returncode, errors) == (-signal.SIGINT, '')


@pytest.mark.parametrize(('result', 'code'), [(None, None), (0, 0), (130, 130)])
def test_result_of_main_is_the_exit_code(result, code):
  assert exit_of(lambda _: result) == code


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    ('--command_line_test_number=x', 'command_line_test_number'),
    ('--no_such_flag=1', 'no_such_flag'),
    ('stray', "unexpected argument 'stray'"),
  ],
)
def test_flag_errors_are_one_line(argument, message, monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['program', argument])
  assert exit_of(lambda _: pytest.fail('main ran')) == 2
  err = capsys.readouterr().err
  assert err.startswith('error: ') and err.count('\n') == 1
  assert message in err


def test_flags_are_parsed(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['program', '--command_line_test_number=7'])
  assert exit_of(lambda _: flags.FLAGS.command_line_test_number) == 7


def test_missing_extra_names_what_to_install(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'grain', None)
  with pytest.raises(SystemExit) as exit_, command_line.extra('train'):
    import grain  # noqa: F401
  assert exit_.value.code == 2
  err = capsys.readouterr().err
  assert err == "error: grain is missing; pip install 'mdlm_jax[train]'\n"


def test_a_missing_module_of_ours_is_a_fault():
  with pytest.raises(ModuleNotFoundError), command_line.extra('train'):
    import mdlm_jax.no_such_module  # noqa: F401


@pytest.mark.parametrize(
  ('kind', 'at_once'), [(signal.SIGINT, 1), (signal.SIGTERM, 0)]
)
def test_signals_are_held_back_but_for_a_second_ctrl_c(kind, at_once):
  deaths = []
  previous = signal.signal(kind, lambda *_: deaths.append(kind))
  try:
    with command_line.caught_signals() as caught:
      assert not caught
      os.kill(os.getpid(), kind)
      assert caught == [kind] and not deaths
      os.kill(os.getpid(), kind)
      assert deaths == [kind] * at_once
    os.kill(os.getpid(), kind)
    assert len(deaths) == at_once + 1
  finally:
    signal.signal(kind, previous)
