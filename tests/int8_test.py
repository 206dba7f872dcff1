"""Eight bits: rounded as the formula says, layer by layer as at once."""

import os
import subprocess
import sys

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import script_runner
from absl import flags

from mdlm_jax import model_flags, predict
from mdlm_jax.models import directory, int8, param_tree

LLADA = golden_data.FOLDER / 'llada'


def check_rounded(found, kernel):
  """Every weight is the nearest multiple of its column's largest / 127.5."""
  found, kernel = np.asarray(found), np.asarray(kernel)
  scale = np.abs(kernel).max(-2, keepdims=True) / 127.5
  multiples = found / scale
  np.testing.assert_allclose(multiples, np.round(multiples), atol=1e-3)
  assert np.abs(multiples - kernel / scale).max() < 0.5 + 1e-3
  assert multiples.min() > -128.001 and multiples.max() < 127.001


def test_matrices_of_layers_are_rounded_by_column_and_nothing_else():
  whole = param_tree.flat(directory.load(LLADA).params)
  model = directory.load(LLADA, quantize=int8.quantize)
  found = param_tree.flat(int8.dense(model.params))
  assert found.keys() == whole.keys()
  for key, leaf in whole.items():
    if key.endswith('/kernel'):
      check_rounded(found[key], leaf)
      assert np.abs(found[key] - leaf).max() > 1e-5
    else:
      np.testing.assert_array_equal(found[key], leaf)
  stored = model.params['blocks']['query']['kernel']
  assert stored.qvalue.dtype == jnp.int8
  assert stored.qvalue.shape == whole['blocks/query/kernel'].shape


def test_a_layer_at_a_time_is_as_all_layers_at_once():
  model = directory.load(LLADA, quantize=int8.quantize)
  golden = golden_data.load('llada/generate')['logits_2']
  ids = jnp.asarray(golden['input_ids'])
  slots = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)

  def logits(params):
    return predict.network_logits(
      model.denoiser, params, None, ids, at=None, step=0,
      t=jnp.ones(len(ids)), valid=jnp.ones(ids.shape, bool), positions=slots,
      segments=None,
    )[0]  # fmt: skip

  found = logits(model.params)
  np.testing.assert_allclose(found, logits(int8.dense(model.params)), atol=1e-5)
  # Near the logits of all bits, and not equal to them.
  error = np.abs(found - golden['logits']).max()
  assert 1e-3 < error < 0.1 * np.abs(golden['logits']).max()


def test_values_and_scales_go_to_the_shards_that_are_asked_for():
  program = f"""
import jax
from mdlm_jax.models import directory, int8
mesh = jax.make_mesh((8,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))

def sharding(key, shape):
  axis = -2 if key.endswith('out/kernel') else -1
  spec = [None] * len(shape)
  spec[axis] = 'x'
  return jax.sharding.NamedSharding(mesh, jax.P(*spec))

model = directory.load(
  {str(LLADA)!r}, sharding=sharding, quantize=int8.quantize
)
for name in ('query', 'mlp_out'):
  kernel = model.params['blocks'][name]['kernel']
  part = kernel.qvalue.addressable_shards[0].data
  assert part.nbytes == kernel.qvalue.nbytes // 8
  parts = 8 if name == 'query' else 1
  assert kernel.scale.addressable_shards[0].data.nbytes == (
    kernel.scale.nbytes // parts
  )
"""
  environment = os.environ | {
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': str(script_runner.ROOT),
  }
  subprocess.run([sys.executable, '-c', program], env=environment, check=True)


def test_a_model_of_this_library():
  """Matrices come as stacks there."""
  stack = jax.random.normal(jax.random.key(0), (3, 8, 6))
  kept = int8.quantize('blocks/up/kernel', stack)
  check_rounded(int8.dense({'a': kept})['a'], stack)
  assert int8.quantize('embedding', stack) is stack


def test_the_flag_of_the_scripts():
  values = flags.FlagValues()
  holders = {
    'checkpoint': flags.DEFINE_string('checkpoint', '', '', values),
    'dtype': flags.DEFINE_string('dtype', None, '', values),
    'mask_id': flags.DEFINE_integer('mask_id', None, '', flag_values=values),
    'int8': flags.DEFINE_bool('int8', False, '', values),
  }
  values(['x', f'--checkpoint={LLADA}', '--dtype=bfloat16', '--int8'])
  _, model = model_flags.load(holders)
  assert model.params['blocks']['up']['kernel'].qvalue.dtype == jnp.int8
  assert model.params['embedding'].dtype == jnp.bfloat16
