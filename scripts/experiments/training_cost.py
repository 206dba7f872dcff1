"""What a training run will take: its step compiled, beside a model of the cost.

  python scripts/experiments/training_cost.py --config=configs/prepared.py:8B \\
    --devices=64 --config.mesh.fsdp=64 --config.accumulation=20

The step of the run is compiled for as many emulated CPU devices as are asked
for, in float32, with nothing allocated and nothing run: the numbers of that
program are exact for it, and predictions for any other device. Those of the
model, and all times, are predictions. docs/scaling.md explains both.
"""

import dataclasses
import functools
import re
import types

import cost_model
import jax
import jax.numpy as jnp
from absl import flags

from mdlm_jax import command_line, program_cost
from mdlm_jax.models import placement
from mdlm_jax.models.config import TransformerConfig
from mdlm_jax.vocab import Vocab

with command_line.extra('train'):
  from ml_collections import config_flags

  from mdlm_jax import run_data, run_model, run_setup

_CONFIG = config_flags.DEFINE_config_file('config', lock_config=True)
_VOCAB_SIZE = flags.DEFINE_integer(
  'vocab_size', 126_464, 'Ids of the tokenizer, special ones included.', 2
)
_DEVICES = flags.DEFINE_integer('devices', 8, 'How many there are.', 1)
_COMPILE = flags.DEFINE_bool('compile', True, 'Or the model alone.')
_JSON = flags.DEFINE_string('json', None, 'File for the numbers.')
flags.mark_flag_as_required('config')

_GB = 1e9


def model_of(config, vocab_size):
  return TransformerConfig(
    vocab_size=vocab_size, max_length=config.data.length, **config.model
  )


def plan_of(config, mesh):
  return cost_model.Plan(
    config.data.batch_size,
    config.data.length,
    **mesh.shape,
    accumulation=config.accumulation,
    remat=config.remat,
  )


def traced_step(config, mesh, model):
  """The step of a run, traced for arguments that hold nothing."""
  vocab = Vocab(model.vocab_size, mask_id=model.vocab_size - 1)
  data = run_data.RunData(
    None, types.SimpleNamespace(vocab=vocab), {}, lambda model: {}
  )
  make_model = functools.partial(run_model.fresh_model, model, mesh)
  run = run_setup.assemble(config, mesh, data, make_model)
  state = run_setup.state_target(run)
  step = run.make_step(state_sharding=jax.tree.map(lambda x: x.sharding, state))
  with jax.set_mesh(mesh):
    return step.trace(state, abstract_batch(config, mesh), run.train_key)


def abstract_batch(config, mesh):
  """Shapes of the leaves of a batch."""
  rows, length = config.data.batch_size, config.data.length
  leaves = {'ids': jnp.int32, 'valid': jnp.bool_}
  if config.data.rows == 'packed':
    leaves |= {'segments': jnp.int32, 'positions': jnp.int32}
  if config.data.rows == 'examples':
    leaves |= {'given': jnp.bool_}
  place = placement.batch_sharding(mesh)
  batch = {
    name: jax.ShapeDtypeStruct((rows, length), dtype, sharding=place)
    for name, dtype in leaves.items()
  }
  row_ids = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=place)
  return batch | {'row_ids': row_ids}


def device_operations(hlo_text):
  """Multiplications and additions of one device, in XLA's program for CPU."""
  total = 0
  for times, instruction in program_cost.executed(hlo_text):
    if instruction.opcode == 'dot':
      summed = re.search(
        r'lhs_contracting_dims=\{([\d,]*)\}', instruction.attributes
      )
      left = program_cost.dimensions(instruction.operands[0])
      size = 2 * times
      for axis in summed[1].split(','):
        size *= left[int(axis)]
      for length in program_cost.dimensions(instruction.shape):
        size *= length
      total += size
  return total


def compiled(config, mesh, model):
  """What the compiled program of a step takes."""
  traced = traced_step(config, mesh, model)
  executable = traced.lower().compile()
  cost = program_cost.program_cost(traced, executable)
  return {
    'state_gb': cost.argument_bytes / _GB,
    'temporaries_gb': cost.temporary_bytes / _GB,
    'sent_gb': sum(x.sent_bytes for x in cost.collectives) / _GB,
    'operations': cost.flops,
    'repeated': device_operations(executable.as_text())
    * cost.num_devices
    / cost.flops
    - 1,
    'collectives': [x._asdict() for x in cost.collectives],
  }


def predicted(model, plan, *, sums):
  """The same by the model of the cost."""
  return {
    'state_gb': cost_model.state_bytes(model, plan) / _GB,
    'temporaries_gb': cost_model.temporary_bytes(model, plan) / _GB,
    'sent_gb': (
      cost_model.activation_traffic(model, plan, sums=sums)
      + cost_model.fsdp_traffic(model, plan, sums=sums)
      + cost_model.data_traffic(model, plan)
    )
    / _GB,
    'operations': cost_model.step_operations(model, plan),
  }


def main(argv):
  del argv
  command_line.check_outputs(plot=None, numbers=_JSON.value)
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', _DEVICES.value)
  config = _CONFIG.value
  mesh = placement.mesh(**config.mesh)
  model = model_of(config, _VOCAB_SIZE.value)
  plan = plan_of(config, mesh)
  placement.check(mesh, model, plan.rows // plan.accumulation)
  wide = dataclasses.replace(model, dtype='float32')
  columns = {
    # XLA's CPU back end sums everywhere before it scatters.
    'float32, predicted for CPU': predicted(wide, plan, sums=2),
    f'{model.dtype}, predicted': predicted(model, plan, sums=1),
  }
  if _COMPILE.value:
    with config.unlocked():
      config.model.dtype = 'float32'
    columns = {'float32, compiled for CPU': compiled(config, mesh, wide)} | (
      columns
    )
  seconds = {
    name: cost_model.step_seconds(model, plan, device)
    for name, device in cost_model.DEVICES.items()
  }
  record = {
    'parameters': cost_model.parameters(model),
    'plan': plan._asdict(),
    'devices': plan.devices,
    'columns': columns,
    'seconds': {name: x._asdict() for name, x in seconds.items()},
  }
  command_line.write_json(_JSON.value, record)
  print_report(record, plan, model, seconds)


def print_report(record, plan, model, seconds):
  print(
    f'{record["parameters"] / 1e9:.3g} * 10^9 parameters; data {plan.data} x '
    f'fsdp {plan.fsdp} x tensor {plan.tensor}; {plan.rows} rows of '
    f'{plan.length} tokens in {plan.accumulation} part(s); remat '
    f'{plan.remat}\n\nof a device, GB'
  )
  print(f'{"":28}{"state":>9}{"temporaries":>13}{"sent a step":>13}')
  for name, column in record['columns'].items():
    print(
      f'{name:28}{column["state_gb"]:9.2f}{column["temporaries_gb"]:13.2f}'
      f'{column["sent_gb"]:13.2f}'
    )
  for column in record['columns'].values():
    if 'repeated' in column:
      print(
        f'\n{column["operations"]:.4g} FLOPs a step of all devices, '
        f'{column["repeated"]:.1%} of them done by several'
      )
  print(
    f'\nseconds of a step, predicted: at the peak of {plan.devices} device(s), '
    'so at least'
  )
  print(f'{"":8}{"arithmetic":>12}{"memory":>9}{"exchanges":>11}{"fits":>6}')
  column = list(record['columns'].values())[-1]
  needed = column['state_gb'] + column['temporaries_gb']
  for name, bound in seconds.items():
    fits = needed <= cost_model.DEVICES[name].memory_gb
    print(
      f'{name:8}{bound.arithmetic:12.3g}{bound.memory:9.3g}'
      f'{bound.exchanges:11.3g}{"yes" if fits else "no":>6}'
    )


if __name__ == '__main__':
  command_line.run(main)
