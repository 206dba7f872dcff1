"""The log of a training run: a bar, metrics.jsonl, TensorBoard, incidents.

metrics.jsonl     a JSON object per `log_every` steps: `step`; `loss` and the
                  other measures as means since the line before, `sum` and
                  `count` of the loss; `tokens_per_second`
incidents.jsonl   a JSON object per step that updated nothing or whose loss was
                  far above those before it, with the rows of the batch

A resumed run goes on with both files where its checkpoint was made, and a line
that spans the restart is the one of an unbroken run.
"""

import collections
import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
import tqdm
from ml_collections import ConfigDict
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from mdlm_jax.training import Metrics

# A loss so many standard deviations above the mean of the steps before it is a
# spike; it is looked for once there are enough of them.
_SPIKE_DEVIATIONS = 6.0
_LEAST_DEVIATION = 1e-3  # Of the mean; less is rounding.
_MOST_BEFORE, _LEAST_BEFORE = 100, 20


class RunLog:
  """Takes the metrics of each step in order; to be used in a `with` statement.

  Attributes:
    skipped_in_a_row: how many of the last steps updated nothing.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    config: ConfigDict,
    start: int,
    saved: dict | None,
    row_numbers: Callable[[int], list[int]],
    *,
    is_writer: bool = True,
  ):
    """Opens the files; what is after the last checkpoint is dropped.

    Args:
      workdir: made if missing.
      config: of the run.
      start: the last step that is done.
      saved: what `state` returned at that step, None at the first.
      row_numbers: numbers in the data of the rows of a step.
      is_writer: whether this process writes; all keep the same counts.
    """
    saved = saved or {'interval': [], 'losses': [], 'skipped_in_a_row': 0}
    self._config = config
    self._interval = [list(leaves) for leaves in saved['interval']]
    self._losses = collections.deque(saved['losses'], _MOST_BEFORE)
    self.skipped_in_a_row = saved['skipped_in_a_row']
    self._row_numbers = row_numbers
    self._begin = time.monotonic()
    # Steps of the first line that an earlier session made, in its time.
    self._num_earlier = len(self._interval)
    self._files = None
    if not is_writer:
      return
    workdir.mkdir(parents=True, exist_ok=True)
    self._workdir = workdir
    with _writing(workdir):
      self._files = {
        name: _opened_after(workdir / f'{name}.jsonl', start)
        for name in ('metrics', 'incidents')
      }
      # Writes when it is called; a thread that a full disk ends would leave its
      # caller waiting.
      self._board = EventsWriter(str(workdir / 'events'))
      # TensorBoard forgets what an earlier session wrote from here on.
      session = SessionLog(status=SessionLog.START)
      self._board.write_event(Event(step=start + 1, session_log=session))
    self._bar = tqdm.tqdm(
      total=config.steps,
      initial=start,
      unit='step',
      dynamic_ncols=True,
      # A line per half minute where no terminal draws it over the last.
      mininterval=0.2 if sys.stderr.isatty() else 30,
    )

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    if self._files is None:
      return
    self._bar.close()
    for part in (*self._files.values(), self._board):
      # Where something failed before, that is what is to be told.
      with (
        contextlib.suppress(*([] if kind is None else [OSError])),
        _writing(self._workdir),
      ):
        part.close()

  def state(self) -> dict:
    """What a checkpoint keeps of the steps that no line tells of yet.

    The lines before it are on the disk then, even if the machine goes down.
    """
    if self._files is not None:
      with _writing(self._workdir):
        self._board.flush()
        for file in self._files.values():
          os.fsync(file.fileno())
    return {
      'interval': self._interval,
      'losses': list(self._losses),
      'skipped_in_a_row': self.skipped_in_a_row,
    }

  def record(self, step: int, metrics: Metrics) -> None:
    """Takes the metrics of one step, and writes a line where one is due."""
    metrics = jax.device_get(metrics)
    leaves, structure = jax.tree.flatten(metrics)
    self._interval.append([float(leaf) for leaf in leaves])
    self._look_for_incidents(step, metrics)
    if self._files is not None:
      self._bar.update()
    if step % self._config.log_every and step != self._config.steps:
      return
    total, here = (
      jax.tree.unflatten(structure, np.sum(steps, axis=0))
      for steps in (self._interval, self._interval[self._num_earlier :])
    )
    self._interval.clear()
    self._num_earlier = 0
    if self._files is not None:
      self._write(step, total, float(here.bound.count))

  def _write(self, step, total, num_tokens):
    row = {name: float(x.mean) for name, x in total._asdict().items()}
    row |= {'sum': float(total.loss.sum), 'count': float(total.loss.count)}
    now = time.monotonic()
    row['tokens_per_second'] = num_tokens / (now - self._begin)
    self._begin = now
    self._write_line('metrics', {'step': step, **row})
    values = [Summary.Value(tag=x, simple_value=row[x]) for x in row]
    with _writing(self._workdir):
      self._board.write_event(
        Event(wall_time=time.time(), step=step, summary=Summary(value=values))
      )
    self._bar.set_postfix_str(
      f'{row["bound"]:.3f} nats/token, '
      f'{row["tokens_per_second"]:,.0f} tokens/s',
      refresh=False,
    )

  def _look_for_incidents(self, step, metrics):
    if metrics.skipped.sum:
      self.skipped_in_a_row += 1
      self._incident(
        step, 'skipped', 'its gradient is not finite and updated nothing'
      )
      return
    self.skipped_in_a_row = 0
    loss = float(metrics.loss.mean)
    if len(self._losses) >= _LEAST_BEFORE:
      usual = np.mean(self._losses)
      deviation = max(np.std(self._losses), _LEAST_DEVIATION * abs(usual))
      if loss > usual + _SPIKE_DEVIATIONS * deviation:
        self._incident(
          step,
          'spike',
          f'its loss is {loss:.4g}, usually {usual:.4g} +- {deviation:.2g}',
          loss=loss,
          usual_loss=float(usual),
          usual_deviation=float(deviation),
        )
    self._losses.append(loss)

  def _incident(self, step, kind, text, **numbers):
    if self._files is None:
      return
    rows = self._row_numbers(step)
    line = {'step': step, 'incident': kind, **numbers, 'rows': rows}
    self._write_line('incidents', line)
    with contextlib.suppress(BrokenPipeError):  # Nobody reads it.
      self._bar.write(
        f'step {step}: {text}; its rows are in incidents.jsonl', file=sys.stderr
      )

  def _write_line(self, name, content):
    # One write of a whole line, which no other reader sees half of.
    with _writing(self._workdir / f'{name}.jsonl'):
      self._files[name].write(json.dumps(content) + '\n')
      self._files[name].flush()


@contextlib.contextmanager
def _writing(path: pathlib.Path):
  """Tells where there was no room."""
  try:
    yield
  except OSError as error:
    raise OSError(f'{path} could not be written: {error.strerror}') from error


def _opened_after(path: pathlib.Path, start: int):
  """A file of JSON lines, to go on after the lines of the steps up to start."""
  lines = path.read_text(errors='replace').splitlines() if path.exists() else []
  unfinished = path.with_suffix('.tmp')
  unfinished.write_text(
    ''.join(f'{x}\n' for x in lines if _line_step(x) <= start)
  )
  unfinished.replace(path)
  return path.open('a')


def _line_step(line: str) -> int | float:
  """Step of a line, infinite for one that is damaged."""
  try:
    step = json.loads(line)['step']
  except (ValueError, KeyError, TypeError, RecursionError):
    return math.inf
  return step if isinstance(step, int) else math.inf
