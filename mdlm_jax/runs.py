"""A training run in its work directory, from the config to the evaluation.

Needs the extra `train`. The work directory receives

checkpoints/      everything that is needed to go on, see `checkpoints`
metrics.jsonl     the log, see `run_log`; TensorBoard events beside it
model/            averaged weights, tokenizer, and how they were trained
evaluation.json   the bound on held-out text, at the end
"""

import collections
import contextlib
import json
import pathlib
import signal
import time

import jax
from ml_collections import ConfigDict

from mdlm_jax import (
  checkpoints,
  command_line,
  directory_lock,
  evaluation,
  processes,
  provenance,
  run_config,
  run_data,
  run_setup,
  training,
)
from mdlm_jax.data.batches import batches, row_numbers
from mdlm_jax.models import directory, placement
from mdlm_jax.run_log import RunLog
from mdlm_jax.run_setup import Run


def train(
  config: ConfigDict, workdir: pathlib.Path, *, resume: bool = True
) -> int:
  """Trains, evaluates and writes.

  Args:
    config: of `run_config.defaults`, with other values.
    workdir: made if missing; a run that it holds goes on. Of several processes,
      one that they share.
    resume: whether it may; False refuses a directory that holds a run.

  Returns:
    The exit code: 0, and 130 where Ctrl-C ended the run early.

  Raises:
    ValueError, OSError: as `run_setup.prepare` and `train_model`.
    FloatingPointError: training diverged.
  """
  run = run_setup.prepare(config)
  if 'rows' in run.data.facts:
    processes.say(run_data.summary(run.data.facts['rows']))
  stopped_by = train_model(run, workdir, resume=resume)
  if stopped_by is not None:
    return 130 if stopped_by == signal.SIGINT else 0
  if processes.is_first() and run.data.evaluate is not None:
    _evaluate(run, workdir)
  processes.wait_for_all()
  return 0


def train_model(
  run: Run, workdir: pathlib.Path, *, resume: bool = True
) -> int | None:
  """Trains, or goes on, and writes the model.

  Args:
    run: of `run_setup.prepare` or `run_setup.assemble`.
    workdir: made if missing; a run that it holds goes on.
    resume: whether it may.

  Returns:
    The signal that ended the run early, or None.

  Raises:
    ValueError, OSError: `workdir` holds another run, or another process works
      in it.
    FloatingPointError: training diverged.
  """
  config, settings = run.config, _settings(run)
  batch_size = config.data.batch_size
  iterator = batches(
    run.data.rows,
    batch_size=batch_size,
    seed=config.seed,
    local=placement.local_rows(run.mesh, batch_size),
  )
  saves = workdir / 'checkpoints'
  with contextlib.ExitStack() as stack:
    if processes.is_first():
      stack.enter_context(directory_lock.alone(workdir))
    stack.enter_context(jax.set_mesh(run.mesh))
    latest = checkpoints.latest_step(saves)
    if latest is not None and not resume:
      raise ValueError(
        f'{workdir} holds a run at step {latest}; resume it or choose another '
        '--workdir'
      )
    if latest is not None:
      _check_same_run(checkpoints.latest_settings(saves), settings, workdir)
      if latest > config.steps:
        raise ValueError(
          f'{workdir} is at step {latest}, beyond steps={config.steps}'
        )
    target = run_setup.state_target(run)
    step = run_setup.compiled_step(run, target)
    if latest is None:
      state = run_setup.fresh_state(run, target)
    else:
      run.model.release()
      state = checkpoints.restore(saves, target, iterator)
      saved = checkpoints.latest_settings(saves)
      settings |= {name: saved[name] for name in ('train_seconds', 'log')}
      processes.say(f'resuming {workdir} at step {int(state.step)}')
    if int(state.step) == config.steps:
      # It may have been killed after its last checkpoint.
      _export(run, settings, state, workdir)
    state, stopped_by = _train_steps(
      run, step, settings, workdir, state, iterator
    )
  if stopped_by is not None:
    processes.say(
      f'stopped at step {int(state.step)}; the same command resumes'
    )
  return stopped_by


def _settings(run: Run) -> dict:
  """What is saved with each checkpoint and compared on resuming."""
  return {
    'config': json.loads(run.config.to_json()),
    'tokenizer': run.data.tokenizer.to_json(),
    **run.data.facts,
    'frozen': checkpoints.checksums(run.model.frozen),
    'train_seconds': 0.0,
    'log': None,
  }


def _check_same_run(saved: dict, settings: dict, workdir: pathlib.Path) -> None:
  """Raises ValueError where a resumed run would not be the same run."""
  before, now = _flatten(saved['config']), _flatten(settings['config'])
  for name in sorted(before.keys() | now.keys()):
    old, new = before.get(name), now.get(name)
    may_change = {name, name.split('.')[0]} & set(run_config.MAY_CHANGE)
    if old != new and not may_change:
      raise ValueError(
        f'{workdir} holds a run with config.{name}={old!r}, not {new!r}; '
        'choose another --workdir'
      )
  for name in ('corpus_sha256', 'tokenizer'):
    if saved[name] != settings[name]:
      raise ValueError(
        f'{workdir} holds a run on another text ({name} differs); choose '
        'another --workdir'
      )
  if saved['frozen'] != settings['frozen']:
    raise ValueError(
      f'{workdir} holds adapters of another model than '
      f'{settings["config"]["init_from"]} is now; choose another --workdir'
    )


def _flatten(tree, prefix=''):
  """{'a': {'b': 1}} -> {'a.b': 1}."""
  leaves = {}
  for name, value in tree.items():
    if isinstance(value, dict):
      leaves |= _flatten(value, f'{prefix}{name}.')
    else:
      leaves[prefix + name] = value
  return leaves


def _train_steps(run, step, settings, workdir, state, iterator):
  """Makes the steps that are left, with a checkpoint every so often.

  Returns:
    The state and the signal that ended the run early, or None.
  """
  config = run.config
  begin = time.monotonic() - settings['train_seconds']
  start, batch_size = int(state.step), config.data.batch_size

  def rows_of(number):
    return row_numbers(
      len(run.data.rows), number - 1, batch_size=batch_size, seed=config.seed
    ).tolist()

  pending = collections.deque()
  is_stopping = False
  diverged = None  # Number of steps, and the last of them.
  with (
    RunLog(
      workdir,
      config,
      start,
      settings['log'],
      rows_of,
      is_writer=processes.is_first(),
    ) as log,
    command_line.caught_signals() as caught,
  ):

    def read():
      nonlocal is_stopping, diverged
      number, metrics, is_raised = pending.popleft()
      log.record(number, metrics)
      is_stopping |= bool(is_raised)
      # Not of what was skipped before the run was started again.
      if log.skipped_in_a_row >= config.most_skipped:
        diverged = log.skipped_in_a_row, number

    for number in range(start + 1, config.steps + 1):
      batch = placement.global_batch(run.mesh, next(iterator), batch_size)
      flags = processes.flags(run.mesh, bool(caught))
      state, metrics, is_raised = step(
        state, batch, run.train_key, run.model.frozen, flags
      )
      pending.append((number, metrics, is_raised))
      # Read one step late, so that the device never waits for the log; all
      # before a checkpoint, which holds the log.
      while len(pending) > 1:
        read()
      is_last = number == config.steps or is_stopping or diverged is not None
      if is_last or number % config.checkpoint_every == 0:
        while pending:
          read()
        settings['train_seconds'] = time.monotonic() - begin
        settings['log'] = log.state()
        checkpoints.save(
          workdir / 'checkpoints',
          state,
          iterator,
          settings,
          keep=config.keep_checkpoints,
        )
        _export(run, settings, state, workdir)
      if diverged is not None:
        count, last = diverged
        raise FloatingPointError(
          f'training diverged: no gradient of the {count} steps up to {last} '
          'was finite; the parameters before them are saved; try a lower '
          'learning rate'
        )
      if is_last:
        break
  if not is_stopping or number == config.steps:
    return state, None
  return state, caught[0] if caught else signal.SIGTERM


def _export(run, settings, state, workdir):
  """Writes the model directory, and beside the model how it was trained."""
  config = run.config
  averaged = training.averaged_params(state, config.ema_decay)
  params = processes.gathered(run.model.whole(averaged))
  if not processes.is_first():
    return
  directory.save(
    workdir / 'model',
    run.model.config,
    params,
    run.data.tokenizer.vocab,
    run.data.tokenizer,
    schedule=config.loss.schedule,
    dtype=config.saved_dtype,
    history={'step': int(state.step)}
    | {
      name: value
      for name, value in settings.items()
      if name not in ('tokenizer', 'frozen', 'log')
    },
  )


def _evaluate(run, workdir):
  """Prints and writes the bound of the model as saved on held-out text."""
  model = directory.load(workdir / 'model')
  report = run.data.evaluate(model)
  seconds = model.history['train_seconds']
  config = run.config
  slots = config.steps * config.data.batch_size * config.data.length
  # Padding is no token.
  tokens = slots * run.data.facts.get('rows', {}).get('utilisation', 1)
  speed = {'train_tokens_per_second': tokens / seconds}
  report = {**report, **model.history, **speed, **provenance.environment()}
  report_path = workdir / 'evaluation.json'
  report_path.write_text(json.dumps(report, indent=2) + '\n')
  print(evaluation.summary(report))
  print(
    f'trained {config.steps} steps in {seconds:.0f} s, '
    f'{tokens / seconds:,.0f} tokens/s; the model is in {workdir / "model"}'
  )
