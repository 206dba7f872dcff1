"""scripts/experiments/training_cost.py and cost_model.py, against counts."""

import json
import os
import subprocess
import sys

import golden_data
import jax
import jax.numpy as jnp
import pytest
import script_runner

from mdlm_jax import optimizers, program_cost, training
from mdlm_jax.models import families, transformer
from mdlm_jax.models.config import TransformerConfig
from mdlm_jax.vocab import Vocab

EXPERIMENTS = script_runner.ROOT / 'scripts' / 'experiments'
sys.path.insert(0, str(EXPERIMENTS))

import cost_model  # noqa: E402

V, D, M, H = 600, 64, 96, 4


def config_of(**changes):
  sizes = {
    'vocab_size': V,
    'num_layers': 3,
    'model_dim': D,
    'num_heads': H,
    'mlp_dim': M,
    'max_length': 32,
  }
  return TransformerConfig(**sizes | changes)


@pytest.mark.parametrize(
  ('changes', 'layer', 'rest'),
  [
    # Four matrices of attention and three of the MLP; norms; table.
    ({}, 4 * D * D + 3 * D * M + 2 * D, V * D + D),
    # Keys and values of half the width, norms of a head of 16; a second table.
    (
      {'num_kv_heads': 2, 'qk_norm': 'head', 'tied_head': False},
      3 * D * D + 3 * D * M + 2 * D + 2 * 16,
      2 * V * D + D,
    ),
    # Biases everywhere but at the output of attention.
    (
      {'mlp': 'gelu', 'qkv_bias': True, 'head_bias': True},
      4 * D * D + 3 * D + 2 * D * M + M + D + 2 * D,
      V * D + D + V,
    ),
    # Six vectors a layer and two at the end, made of 256 waves by two layers.
    (
      {'time_conditioning': True},
      4 * D * D + 3 * D * M + 2 * D + 6 * D * (D + 1),
      V * D + D + 257 * D + (D + 1) * D + 2 * D * (D + 1),
    ),
  ],
)
def test_parameters_by_hand(changes, layer, rest):
  config = config_of(**changes)
  assert cost_model.parameters(config) == 3 * layer + rest
  # Beside the state of one device, all of it.
  plan = cost_model.Plan(8, 32)
  assert cost_model.state_bytes(config, plan) == 16 * (3 * layer + rest)


def test_a_device_of_a_mesh_has_its_part():
  config = config_of()
  plan = cost_model.Plan(8, 32, fsdp=2, tensor=4)
  matrices = 3 * (4 * D * D + 3 * D * M) + V * D
  norms = 7 * D
  assert cost_model.local_parameters(config, plan) == matrices // 8 + norms
  # What is gathered along 'fsdp'.
  assert cost_model.local_parameters(config, plan, ('tensor',)) == (
    matrices // 4 + norms
  )


def test_operations_of_a_call_by_hand():
  path = golden_data.FOLDER / 'llada' / 'config.json'
  config = families.layout(json.loads(path.read_text())).config
  # Width 48, 4 heads, MLP 112, 2 layers, 128 ids; three of ten slots.
  matrices = 2 * (4 * 48 * 48 + 3 * 48 * 112)
  products = 3 * (matrices + 2 * 2 * 48 * 10 + 128 * 48)
  assert cost_model.forward_operations(config, 3, 10, 3) == 2 * products


def test_a_token_passes_the_experts_that_it_chooses():
  path = golden_data.FOLDER / 'llada2_moe' / 'config.json'
  config = families.layout(json.loads(path.read_text())).config
  # Width 48, 4 query heads and 2 others of width 16; a dense layer of 96, then
  # two with a router, 4 of 16 experts of 24 and a shared one.
  attention = 48 * 16 * (4 + 2 + 2) + 4 * 16 * 48
  products = 3 * attention + 3 * 48 * 96 + 2 * (48 * 16 + 5 * 3 * 48 * 24)
  # Scores and mixing at 7 slots in three layers, and the head.
  products += 2 * 3 * 4 * 16 * 7 + 48 * 128
  assert cost_model.forward_operations(config, 1, 7, 1) == 2 * products


def traced_flops(config, plan):
  optimizer = optimizers.make_optimizer(
    steps=2, learning_rate=0.1, warmup_steps=1, weight_decay=0.0, clip_norm=1.0
  )
  step = training.train_step(
    transformer.denoiser(config, remat=plan.remat),
    optimizer,
    vocab=Vocab(config.vocab_size, mask_id=1),
    ema_decay=0.9,
    accumulation=plan.accumulation,
  )

  def init(key):
    return training.init_state(transformer.init(config, key), optimizer)

  shape = (plan.rows, plan.length)
  batch = {
    'ids': jax.ShapeDtypeStruct(shape, jnp.int32),
    'valid': jax.ShapeDtypeStruct(shape, bool),
    'row_ids': jax.ShapeDtypeStruct(shape[:1], jnp.int32),
  }
  key = jax.random.key(0)
  traced = step.trace(jax.eval_shape(init, jax.random.clone(key)), batch, key)
  return program_cost.matmul_flops(traced.jaxpr.jaxpr)


@pytest.mark.parametrize(
  ('changes', 'rows', 'remat', 'parts'),
  [
    ({}, 8, 'dots', 1),
    ({}, 8, 'none', 4),
    ({'mlp': 'gelu'}, 8, 'all', 1),
    ({'num_kv_heads': 2, 'tied_head': False}, 8, 'dots', 2),
    # So many logits that the loss takes them in chunks.
    ({'vocab_size': 500_000}, 8, 'dots', 1),
  ],
)
def test_operations_of_a_step_are_those_of_its_trace(
  changes, rows, remat, parts
):
  config = config_of(**changes)
  plan = cost_model.Plan(rows, 32, accumulation=parts, remat=remat)
  assert (cost_model.loss_chunks(config, plan) > 1) == (config.vocab_size > V)
  assert cost_model.step_operations(config, plan) == traced_flops(config, plan)


def test_a_step_takes_the_time_of_what_it_does():
  config = config_of(dtype='bfloat16')
  plan = cost_model.Plan(16, 32, data=2, fsdp=2, tensor=2)
  device = cost_model.Device(
    tera_operations=1e-6,
    memory_gb=1,
    memory_gb_per_second=1e-6,
    group=2,
    near_gb_per_second=3e-6,
    far_gb_per_second=1e-6,
  )
  seconds = cost_model.step_seconds(config, plan, device)
  operations = cost_model.step_operations(config, plan)
  assert seconds.arithmetic == operations / 8 / 1e6
  # The state is read and written, gradients too.
  moved = (32 + 8) * cost_model.local_parameters(config, plan)
  assert seconds.memory > moved / 1e3
  # Matrices in bfloat16 are gathered twice and their gradients summed, tables
  # once, in float32, and twice. Each has its half; of it half leaves a device.
  matrices, table = 2 * 3 * (4 * D * D + 3 * D * M), 4 * V * D
  gathered, summed = 2 * matrices + table, matrices + 2 * table
  along_fsdp, along_data = (gathered + summed) / 2 / 2, 2 * summed / 4 / 2
  # In each layer six streams are gathered and seven scattered, and five at the
  # ends; of a stream of 4 rows half leaves a device.
  along_tensor = (3 * (6 + 7) + 5) * 2 * 4 * 32 * D / 2
  # Only neighbours along 'tensor' are near.
  assert seconds.exchanges == pytest.approx(
    along_tensor / 3e3 + along_fsdp / 1e3 + along_data / 1e3
  )


def test_a_group_has_the_links_of_its_devices():
  config = config_of()
  device = cost_model.DEVICES['H100']

  def seconds(device, **axes):
    return cost_model.step_seconds(
      config, cost_model.Plan(64, 32, **axes), device
    ).exchanges

  # Eight devices of 50 GB a second bring 400 into a group, not 450; were all
  # near, 63 of 64 parts would take as long as 7 of 8 take in one group.
  alone, many = seconds(device, fsdp=8), seconds(device, fsdp=64)
  assert many == pytest.approx(alone * (63 / 64) / (7 / 8) * 450 / 400)
  # A device along 'data' has its own part to send, through its own link.
  far = cost_model.data_traffic(config, cost_model.Plan(64, 32, 8, 8))
  assert seconds(device, data=8, fsdp=8) == pytest.approx(alone + far / 50e9)


def test_the_program_of_a_mesh_is_that_of_the_model(tmp_path):
  numbers = tmp_path / 'numbers.json'
  arguments = {
    'config': script_runner.ROOT / 'configs' / 'prepared.py',
    'vocab_size': 16_384,
    'devices': 8,
    'json': numbers,
    'config.data.length': 256,
    'config.data.batch_size': 16,
    'config.model.num_layers': 2,
    'config.model.model_dim': 256,
    'config.model.num_heads': 4,
    'config.model.mlp_dim': 512,
    'config.mesh.fsdp': 2,
    'config.mesh.tensor': 2,
    'config.accumulation': 2,
  }
  done = subprocess.run(
    [
      sys.executable,
      str(EXPERIMENTS / 'training_cost.py'),
      *(f'--{name}={value}' for name, value in arguments.items()),
    ],
    env=os.environ | {'PYTHONPATH': str(script_runner.ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert 'seconds of a step, predicted' in done.stdout
  record = json.loads(numbers.read_text())
  program, wide, narrow = record['columns'].values()
  # Beside the state: ids, segments, positions and what is valid of four rows,
  # their numbers; five counts and a key.
  batch = 4 * (256 * (3 * 4 + 1) + 4) + 4 * 4 + 8
  assert program['state_gb'] * 1e9 == pytest.approx(
    wide['state_gb'] * 1e9 + batch, abs=0.5
  )
  assert program['operations'] == wide['operations']
  # Attention masks and the like are no products; no device repeats any.
  assert abs(program['repeated']) < 1e-6
  assert program['sent_gb'] == pytest.approx(wide['sent_gb'], rel=0.05)
  assert program['temporaries_gb'] == pytest.approx(
    wide['temporaries_gb'], rel=0.3
  )
  # In bfloat16 activations are half as large, gradients and tables are not;
  # sums are scattered at once.
  assert narrow['temporaries_gb'] < wide['temporaries_gb']
  assert narrow['sent_gb'] < 0.6 * wide['sent_gb']
