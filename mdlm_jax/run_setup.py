"""What the config of a training run stands for, up to its compiled step.

Nothing is written. Needs the extra `train`.
"""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from mdlm_jax import (
  optimizers,
  processes,
  program_cost,
  run_config,
  run_data,
  run_model,
  schedules,
  time_draws,
  training,
)
from mdlm_jax.data.batches import batches
from mdlm_jax.models import placement, transformer


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
