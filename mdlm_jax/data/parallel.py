"""Work on many items in several processes that never outlive this one."""

import contextlib
import enum
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any

# Told of work done since the last time, in amounts that add up.
Advance = Callable[..., None]

_SECONDS_BETWEEN_REPORTS = 0.1


def mapped(
  function: Callable[[Any, Advance], Any],
  items: Sequence[Any],
  *,
  workers: int,
  advance: Advance,
) -> list[Any]:
  """`function(item, advance)` of every item, in order.

  A process is started anew, without what this one has in memory. It ends when
  this one does, however that ends: it then finds its pipe closed, at the
  latest when it next tells of work done. Ctrl-C is left to this one.

  Args:
    function: what is done with an item; other processes import it by its name.
    items: what it is done with.
    workers: processes; 1: this one.
    advance: is called with what the function calls its own with, added up
      since the last time.

  Raises:
    Exception: what the function raised; the other processes are then ended.
    ChildProcessError: a process was killed, as the system does where memory
      is short.

  Example:
    >>> mapped(lambda x, advance: x * x, [2, 3], workers=1, advance=print)
    [4, 9]
  """
  if min(workers, len(items)) <= 1:
    return [_result(function, item, advance) for item in items]
  results, waiting = [None] * len(items), iter(enumerate(items))
  with _processes(function, min(workers, len(items))) as processes:
    working = {}  # Which item a process works on, by the pipe to it.

    def hand_out(pipe):
      working[pipe], item = next(waiting, (None, None))
      if working[pipe] is None:
        del working[pipe]
      else:
        pipe.send(item)

    for pipe in processes:
      hand_out(pipe)
    while working:
      for pipe in multiprocessing.connection.wait(list(working)):
        try:
          kind, value = pipe.recv()
          if kind is _Told.DONE:
            results[working[pipe]] = value
            hand_out(pipe)
        except (EOFError, ConnectionError):
          processes[pipe].join()
          raise ChildProcessError(
            'a worker process was killed (exit code '
            f'{processes[pipe].exitcode}), perhaps because memory was short; '
            'use fewer workers'
          ) from None
        if kind is _Told.FAILED:
          raise value
        if kind is _Told.ADVANCED:
          advance(*value)
  return results


# What a process tells, each with a value.
_Told = enum.Enum('_Told', 'ADVANCED DONE FAILED')


@contextlib.contextmanager
def _processes(function, count) -> Iterator[dict]:
  """Processes by the pipe to each; they are ended with the context."""
  context = multiprocessing.get_context('spawn')
  processes = {}
  try:
    with _interrupts_blocked():
      for _ in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(
          target=_work, args=(function, theirs), daemon=True
        )
        process.start()
        theirs.close()
        processes[ours] = process
    yield processes
  finally:
    for pipe, process in processes.items():
      process.terminate()
      process.join()
      pipe.close()


@contextlib.contextmanager
def _interrupts_blocked():
  """Processes that are started here never hear of Ctrl-C."""
  # A helper of the first process, whose start would let Ctrl-C through again.
  resource_tracker.ensure_running()
  before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(function, pipe):
  """What a process does: items come through the pipe until it is closed."""

  def advance(*amounts):
    pipe.send((_Told.ADVANCED, amounts))

  try:
    while True:
      item = pipe.recv()
      try:
        result = _result(function, item, advance)
      except ConnectionError:
        raise
      except Exception as error:
        error.add_note(traceback.format_exc())
        pipe.send((_Told.FAILED, error))
      else:
        pipe.send((_Told.DONE, result))
  except (EOFError, ConnectionError):
    os._exit(1)  # At once: there is nobody left to work for.


def _result(function, item, advance):
  """What a function makes of an item; `advance` is called now and then."""
  waiting, told = [], time.monotonic()

  def tell():
    nonlocal told
    if waiting:
      advance(*map(sum, zip(*waiting, strict=True)))
      waiting.clear()
    told = time.monotonic()

  def remember(*amounts):
    waiting.append(amounts)
    if time.monotonic() - told > _SECONDS_BETWEEN_REPORTS:
      tell()

  result = function(item, remember)
  tell()
  return result
