"""A training run in its work directory, from the config to the evaluation.

Needs the extra `train`. The work directory receives

checkpoints/      everything that is needed to go on, see `checkpoints`
metrics.jsonl     the log, see `run_log`; TensorBoard events beside it
model/            averaged weights, tokenizer, and how they were trained
evaluation.json   the bound on held-out text, at the end
"""

import collections
import contextlib
import functools
import json
import pathlib
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from mdlm_jax import (
  checkpoints,
  command_line,
  directory_lock,
  evaluation,
  optimizers,
  processes,
  program_cost,
  provenance,
  run_config,
  run_data,
  run_model,
  schedules,
  time_draws,
  training,
)
from mdlm_jax.data.batches import batches, row_numbers
from mdlm_jax.models import directory, placement, transformer
from mdlm_jax.run_log import RunLog


class Run(NamedTuple):
  """What the config stands for.

  Attributes:
    config: of the run.
    mesh: all devices.
    data: what is learned from.
    model: the network.
    optimizer: an optax transformation.
    make_step: `make_step(state_sharding=...) -> step`, see
      `training.train_step`.
    train_key: key of all noise of training.
  """

  config: ConfigDict
  mesh: jax.sharding.Mesh
  data: run_data.RunData
  model: run_model.RunModel
  optimizer: optax.GradientTransformation
  make_step: Callable
  train_key: jax.Array


def prepare(config: ConfigDict) -> Run:
  """Reads and checks everything; writes nothing and compiles no step.

  Args:
    config: of `run_config.defaults`, with other values.

  Raises:
    ValueError, OSError: the first mistake in the config or in its files.
  """
  run_config.check(config)
  mesh = placement.mesh(**config.mesh)
  loaded = run_model.load(config, mesh) if config.init_from else None
  make_data = (
    run_data.prepared_data if config.data.prepared else run_data.text_data
  )
  data = make_data(config, loaded and loaded.tokenizer)
  if loaded is None:
    shape = transformer.TransformerConfig(
      vocab_size=data.tokenizer.vocab.size,
      max_length=config.data.length,
      **config.model,
    )
    make_model = functools.partial(run_model.fresh_model, shape, mesh)
  else:
    make_model = functools.partial(run_model.loaded_model, config, mesh, loaded)
  return assemble(config, mesh, data, make_model)


def assemble(
  config: ConfigDict,
  mesh: jax.sharding.Mesh,
  data: run_data.RunData,
  make_model: Callable[[jax.Array], run_model.RunModel],
) -> Run:
  """A run of some model on some data.

  Args:
    config: of the run.
    mesh: all devices.
    data: what is learned from.
    make_model: `make_model(key) -> model`; the key is of what is random in it.

  Raises:
    ValueError: a mistake in what the config says of the model, the optimizer,
      the loss or the devices.
  """
  init_key, train_key = jax.random.split(jax.random.key(config.seed))
  model = make_model(init_key)
  shape = model.config
  if shape.time_conditioning and shape.attention_block is not None:
    # One pass tells the clean blocks level 0, a sampler all of them one level.
    raise ValueError('attention_block cannot be used with time_conditioning')
  batch_size, parts = config.data.batch_size, config.accumulation
  if parts < 1 or batch_size % parts:
    raise ValueError(
      f'config.accumulation={parts} must divide config.data.{batch_size=}'
    )
  placement.check(mesh, shape, batch_size // parts)
  optimizer = optimizers.make_optimizer(steps=config.steps, **config.optimizer)
  make_step = functools.partial(
    training.train_step,
    transformer.denoiser(shape, remat=config.remat),
    optimizer,
    vocab=data.tokenizer.vocab,
    ema_decay=config.ema_decay,
    loss=run_config.LOSSES[config.loss.kind],
    schedule=schedules.named_schedule(config.loss.schedule),
    times=time_draws.named_times(config.loss.times),
    t_min=config.loss.t_min,
    t_max=config.loss.t_max,
    weight_power=config.loss.weight_power,
    # Data that a script makes itself need not have it.
    random_length_share=config.data.get('random_length_share', 0.0),
    accumulation=parts,
    join=model.join,
  )
  make_step()  # Finds what is wrong in the options.
  return Run(config, mesh, data, model, optimizer, make_step, train_key)


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
    ValueError, OSError: a mistake of `prepare`, or `workdir` holds another run.
    FloatingPointError: training diverged.
  """
  run = prepare(config)
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
    run: of `prepare` or `assemble`.
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
    target = state_target(run)
    step = compiled_step(run, target)
    if latest is None:
      state = fresh_state(run, target)
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


def state_target(run: Run) -> training.TrainState:
  """Shapes of the train state, and where each array belongs."""
  state = jax.eval_shape(
    lambda: training.init_state(run.model.init(), run.optimizer)
  )
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    state,
    placement.state_sharding(run.mesh, state),
  )


def fresh_state(run: Run, target: training.TrainState) -> training.TrainState:
  """The state before the first step."""
  return jax.jit(
    functools.partial(training.init_state, optimizer=run.optimizer),
    out_shardings=jax.tree.map(lambda x: x.sharding, target),
    donate_argnums=0,
  )(run.model.init())


def compiled_step(run: Run, target: training.TrainState) -> Callable:
  """The step, compiled before anything is allocated; prints what it takes.

  Returns:
    `step(state, batch, key, frozen, flags) -> (state, metrics, is_raised)`,
    see `training.train_step` and `processes.flags`.

  Raises:
    ValueError: a device cannot hold it.
  """
  step = run.make_step(
    state_sharding=jax.tree.map(lambda x: x.sharding, target)
  )

  def step_and_answer(state, batch, key, frozen, flags):
    return *step(state, batch, key, frozen), jnp.any(flags)

  batch_size = run.config.data.batch_size
  place = placement.batch_sharding(run.mesh)
  one = next(batches(run.data.rows, batch_size=1, seed=0))
  batch = {
    name: jax.ShapeDtypeStruct(
      (batch_size, *x.shape[1:]), x.dtype, sharding=place
    )
    for name, x in one.items()
  }
  begin = time.monotonic()
  traced = jax.jit(step_and_answer, donate_argnums=0).trace(
    target,
    batch,
    run.train_key,
    run.model.frozen,
    processes.flags(run.mesh, False),
  )
  compiled = traced.lower().compile()
  cost = program_cost.program_cost(traced, compiled)
  capacity = program_cost.device_capacity(jax.local_devices()[0])
  processes.say(
    program_cost.summary(
      cost,
      num_parameters=sum(
        x.size for x in jax.tree.leaves((target.params, run.model.frozen))
      ),
      num_tokens=batch['ids'].size,
      capacity=capacity,
    )
    + f'\ncompiled in {time.monotonic() - begin:.1f} s'
  )
  program_cost.check_fits(cost, capacity)
  return compiled


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
