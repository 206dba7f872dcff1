"""What a model takes in memory and time: counted, compiled, predicted.

  python scripts/experiments/memory.py                     LLaDA 8B, 1 device
  python scripts/experiments/memory.py --devices=8 --int8
  python scripts/experiments/memory.py --checkpoint=DIR --length=4096

Nothing is loaded and nothing is run. Weights, the cache and logits are counted
from shapes; temporaries are those of the compiled sampler on as many emulated
CPU devices, with the matrices split over them. They are compiled in float32,
since XLA's CPU back end widens bfloat16 weights, so with bfloat16 they are
predicted to be at most so many. Times are what the arithmetic and the reading
of the weights take at the peak of the devices: no run is faster, most take
several times as long.
"""

import dataclasses
import pathlib

import cost_model
import jax
import numpy as np
from absl import flags

from mdlm_jax import (
  blocks,
  caches,
  canvas,
  command_line,
  draws,
  rules,
  sampling,
)
from mdlm_jax.models import (
  families,
  json_files,
  param_tree,
  placement,
  transformer,
)
from mdlm_jax.models.config import TransformerConfig
from mdlm_jax.vocab import Vocab

_CHECKPOINT = flags.DEFINE_string(
  'checkpoint',
  None,
  'A directory with the config.json of a published model. Default: the shape '
  'of LLaDA 8B.',
)
_DEVICES = flags.DEFINE_integer('devices', 1, 'How many.', lower_bound=1)
_ROWS = flags.DEFINE_integer('rows', 1, 'Rows of a batch.', lower_bound=1)
_LENGTH = flags.DEFINE_integer(
  'length', 1024, 'Slots of the canvas.', lower_bound=2
)
_BLOCK_LENGTH = flags.DEFINE_integer(
  'block_length', 32, 'Slots that are open at once.', lower_bound=1
)
_CACHE = flags.DEFINE_enum(
  'cache',
  'dual',
  ['none', 'dual'],
  'Which slots a call computes: all, or those of the open block (but for its '
  'first call).',
)
_INT8 = flags.DEFINE_bool('int8', False, 'Matrices of layers in eight bits.')
_COMPILE = flags.DEFINE_bool(
  'compile', True, 'Compiles the sampler for its temporaries.'
)
_JSON = flags.DEFINE_string('json', None, 'File for the numbers.')

_GB = 1e9
_LLADA_8B = TransformerConfig(
  vocab_size=126_464,
  num_layers=32,
  model_dim=4096,
  num_heads=32,
  mlp_dim=12_288,
  max_length=4096,
  tied_head=False,
  rope_base=500_000.0,
  norm_eps=1e-5,
  embedding_scale=1.0,
)
# Of `cost_model.DEVICES`.
_PEAKS = ('A100', 'H100', 'v5e')
_POLICIES = {'none': None, 'dual': caches.dual()}


def config_of_flags() -> TransformerConfig:
  if _CHECKPOINT.value is None:
    return _LLADA_8B
  path = pathlib.Path(_CHECKPOINT.value) / 'config.json'
  return families.layout(json_files.read(path)).config


def weight_bytes(config, sharding, *, int8: bool) -> int:
  """Of one device, in bfloat16 or with the matrices of layers in eight bits."""
  total = 0
  for key, leaf in param_tree.shapes(config).items():
    size = int(np.prod(sharding(key, leaf.shape).shard_shape(leaf.shape)))
    is_matrix = int8 and 'blocks/' in key and key.endswith('/kernel')
    # A scale of float32 for each output.
    total += size + 4 * size // leaf.shape[-2] if is_matrix else 2 * size
  return total


def cache_bytes(config, rows: int, length: int) -> int:
  """Of all devices, in bfloat16."""
  per_slot = 2 * config.num_layers * config.kv_heads * config.head_dim
  return 2 * rows * length * per_slot


def compiled_bytes(config, sharding, rows, length, width, cache) -> int:
  """Temporaries of the sampler on one device, in float32."""
  vocab = Vocab(config.vocab_size, mask_id=config.vocab_size - 1)
  prompt = [0] * (length // 2)
  filled = canvas.from_prompts([prompt] * rows, length - len(prompt), vocab)
  params = param_tree.nested(
    {
      key: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding(key, leaf.shape)
      )
      for key, leaf in param_tree.shapes(config).items()
    }
  )
  static = {
    'vocab': vocab,
    'rule': rules.by_confidence(width),
    'draw': draws.categorical(temperature=0.0),
    'cache': cache,
  }
  sampler = jax.jit(sampling.sample, static_argnames=('denoiser', *static))
  compiled = sampler.lower(
    transformer.denoiser(config),
    params,
    jax.random.key(0),
    filled,
    blocks=blocks.blocks_of(filled, width),
    **static,
  ).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def main(argv):
  del argv
  command_line.check_outputs(plot=None, numbers=_JSON.value)
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', _DEVICES.value)
  config = dataclasses.replace(config_of_flags(), dtype='float32')
  rows, length, width = _ROWS.value, _LENGTH.value, _BLOCK_LENGTH.value
  if length > config.max_length:
    raise ValueError(
      f'--length={length} is more than the length {config.max_length} of the '
      'model'
    )
  if width > length // 2:
    raise ValueError(
      f'--block_length={width} must be at most half of --length={length}; the '
      'other half is the prompt'
    )
  sharding = placement.sharding(placement.mesh(1, 1, _DEVICES.value))
  weights = weight_bytes(config, sharding, int8=_INT8.value)
  cached = _CACHE.value != 'none'
  record = {
    'parameters': cost_model.parameters(config),
    'devices': _DEVICES.value,
    'rows': rows,
    'length': length,
    'block_length': width,
    'cache': _CACHE.value,
    'int8': _INT8.value,
    'weights_gb': weights / _GB,
    'cache_gb': cached * cache_bytes(config, rows, length) / _GB,
    'logits_gb': 4 * rows * width * config.vocab_size / _GB,
    'temporaries_float32_gb': None,
    'seconds_per_call': {},
  }
  if _COMPILE.value:
    record['temporaries_float32_gb'] = (
      compiled_bytes(
        config, sharding, rows, length, width, _POLICIES[_CACHE.value]
      )
      / _GB
    )
  computed = width if _CACHE.value == 'dual' else length
  work = rows * cost_model.forward_operations(config, computed, length, width)
  for name in _PEAKS:
    device = cost_model.DEVICES[name]
    record['seconds_per_call'][name] = max(
      work / (_DEVICES.value * device.tera_operations * 1e12),
      weights / (device.memory_gb_per_second * 1e9),
    )
  command_line.write_json(_JSON.value, record)
  print(
    f'{record["parameters"] / 1e9:.2f} * 10^9 parameters, {rows} row(s) of '
    f'{length} slots, {width} open; {_DEVICES.value} device(s)\n'
    f'  weights of a device           {record["weights_gb"]:8.2f} GB\n'
    f'  cache, all devices            {record["cache_gb"]:8.2f} GB\n'
    f'  logits, all devices           {record["logits_gb"]:8.3f} GB'
  )
  if _COMPILE.value:
    print(
      '  temporaries of a device, cache and logits among them, in float32 '
      f'(predicted) {record["temporaries_float32_gb"]:.2f} GB'
    )
  print(
    f'  a call of {computed} slots at the peak of the devices (predicted, at '
    'least)'
  )
  for name, seconds in record['seconds_per_call'].items():
    print(f'    {name:<12}{1e3 * seconds:9.2f} ms')


if __name__ == '__main__':
  command_line.run(main)
