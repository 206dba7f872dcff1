"""How the scripts start and end: one clear line for every user's mistake."""

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import tqdm
from absl import app, flags, logging

# What a user can cause: bad values, files, flags; a loss that diverged.
_USER_ERRORS = (ValueError, OSError, FloatingPointError)


def _fail(message: object) -> NoReturn:
  """Ends the program with one line on stderr and exit code 2."""
  text = str(message)
  if 'Traceback (most recent call last)' in text:  # Of a config file.
    text = text.strip().splitlines()[-1]
  text = ' '.join(text.split())
  # How a long message about a config file ends that is not there.
  missing = re.search(r"No such file or directory: '([^']*)'$", text)
  text = f'no such file: {missing[1]}' if missing else text
  print(f'error: {text}', file=sys.stderr)
  sys.exit(2)


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
  """Imports inside this context belong to the package's extra `name`."""
  try:
    yield
  except ModuleNotFoundError as error:
    if (error.name or 'mdlm_jax').split('.')[0] == 'mdlm_jax':
      raise
    _fail(f"{error.name} is missing; pip install 'mdlm_jax[{name}]'")


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
  """Collects Ctrl-C and SIGTERM instead of dying of them.

  Yields the list of signals received so far, for a loop to look at. A second
  Ctrl-C acts at once. A second SIGTERM does not: schedulers send it again, to
  the group and to the process, while the first is being obeyed.
  """
  caught = []
  kinds = (signal.SIGINT, signal.SIGTERM)
  previous = {kind: signal.getsignal(kind) for kind in kinds}

  def remember(kind, frame):
    del frame
    caught.append(kind)
    if kind == signal.SIGINT:
      signal.signal(kind, previous[kind])

  for kind in kinds:
    signal.signal(kind, remember)
  try:
    yield caught
  finally:
    for kind in kinds:
      signal.signal(kind, previous[kind])


class Progress:
  """Shows the network calls made and the time left once they take a second."""

  def __init__(self):
    self._bar = None

  def __call__(self, done, planned, ids=None):
    """Calls made, in any order; none begins a new count."""
    del ids
    if done == 0:
      self.close()
    if self._bar is None:
      self._bar = tqdm.tqdm(
        total=int(planned),
        unit='call',
        delay=1,
        leave=False,
        dynamic_ncols=True,
        # A line per half minute where no terminal draws it over the last.
        mininterval=0.1 if sys.stderr.isatty() else 30,
      )
    self._bar.update(max(int(done) - self._bar.n, 0))

  def close(self):
    if self._bar is not None:
      self._bar.close()
      self._bar = None


def pyplot():
  """matplotlib.pyplot for files, without a window."""
  with extra('plot'):
    import matplotlib

    matplotlib.use('agg')
    from matplotlib import pyplot as module
  return module


def check_outputs(*, plot: str | None, numbers: str | None) -> None:
  """Fails now where writing results at the end would fail.

  Args:
    plot: file of the plot, or None; without matplotlib the program ends.
    numbers: file of the numbers, or None.

  Raises:
    OSError: a file that could not be written.
    ValueError: a plot of an unknown kind.
  """
  for path in filter(None, (plot, numbers)):
    _check_writable(path)
  if plot:
    kinds = pyplot().figure().canvas.get_supported_filetypes()
    kind = os.path.splitext(plot)[1].removeprefix('.')
    if kind not in kinds:
      raise ValueError(f'{plot} must end in one of .{", .".join(kinds)}')


def write_json(path: str | None, content: dict) -> None:
  """Writes numbers to a file, or nowhere without one."""
  if path:
    with open(path, 'w', encoding='utf-8') as file:
      file.write(json.dumps(content, indent=2) + '\n')


def _check_writable(path: str) -> None:
  if os.path.isdir(path):
    raise IsADirectoryError(f'{path} is a directory, not a file to write')
  folder = os.path.dirname(path) or '.'
  if not os.path.isdir(folder):
    raise FileNotFoundError(f'no directory {folder} to write {path} into')
  if not os.access(folder, os.W_OK):
    raise PermissionError(f'{path} cannot be written')


def _parse(argv: Sequence[str]) -> list[str]:
  try:
    remaining = flags.FLAGS(argv)
  except SystemExit:  # --help, which is no failure.
    sys.exit(0)
  except (KeyError, AttributeError) as error:  # Of a field it lacks.
    while isinstance(error, KeyError | AttributeError) and error.args:
      # The text of a KeyError is the repr of its argument; configs wrap one.
      error = error.args[0]
    name, *advice = str(error).splitlines()
    advice = advice or ['mdlm_jax/run_config.py lists all of them']
    _fail(f'the config has no field {name}; {" ".join(advice)}')
  except Exception as error:  # A config file is a program of the user's.
    _fail(error)
  if len(remaining) > 1:
    _fail(f'unexpected argument {remaining[1]!r}; options begin with --')
  return remaining


def run(main: Callable[[list[str]], int | None]) -> None:
  """Runs `main(argv)` as a program.

  A `ValueError`, `OSError` or `FloatingPointError`, and any mistake in the
  flags, is one line on stderr and exit code 2; other exceptions are faults of
  the program and keep their traceback. Ctrl-C ends the program at once (130 in
  a shell), also inside a compiled program, which Python's own handler would
  wait for; what has to be saved first is saved under `caught_signals`.
  """

  def guarded(argv):
    # Libraries log every detail at the level that absl programs show.
    if not flags.FLAGS['verbosity'].present:
      logging.set_verbosity(logging.WARNING)
    # A terminal that cannot show a character shows another.
    for stream in filter(None, (sys.stdout, sys.stderr)):
      stream.reconfigure(errors='replace')
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
      code = main(argv)
      print(end='', flush=True)
      return code
    except BrokenPipeError:  # The reader has seen enough, as in `| head`.
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      sys.exit(0)
    except _USER_ERRORS as error:
      _fail(error)
    finally:
      signal.signal(signal.SIGINT, interrupt)

  app.run(guarded, flags_parser=_parse)
