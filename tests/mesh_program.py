"""What mesh_test.py compares, on eight emulated devices, as JSON."""

import dataclasses
import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax import (
  corruption,
  mesh_context,
  optimizers,
  predict,
  program_cost,
  time_draws,
  training,
)
from mdlm_jax.models import placement, transformer
from mdlm_jax.models.config import ExpertsConfig
from mdlm_jax.vocab import Vocab

ROWS, LENGTH, IDS, STEPS = 8, 8, 48, 5
VOCAB = Vocab(size=IDS, mask_id=1, pad_id=0)
DENSE = transformer.TransformerConfig(
  vocab_size=IDS,
  num_layers=2,
  model_dim=16,
  num_heads=4,
  num_kv_heads=2,
  mlp_dim=32,
  max_length=LENGTH,
)
MIXED = dataclasses.replace(
  DENSE,
  experts=ExpertsConfig(num_experts=4, num_chosen=2, width=8, shared_width=8),
  attention_block=4,
  tied_head=False,
)
KEY = jax.random.key(3)
EXCHANGES = (
  'all-gather', 'all-reduce', 'all-to-all', 'collective-permute',
  'reduce-scatter',
)  # fmt: skip


def text(num_valid_rows=ROWS):
  """Rows of text, 5 and 6 alike; of some all is padding."""
  ids = np.random.default_rng(0).integers(2, IDS, (ROWS, LENGTH), np.int32)
  ids[6] = ids[5]
  valid = np.arange(ROWS)[:, None] < num_valid_rows
  return {
    'ids': ids,
    'valid': np.broadcast_to(valid, ids.shape),
    'row_ids': np.arange(ROWS, dtype=np.int32),
  }


@functools.cache
def fresh(config):
  """An optimizer and a state, in the memory of the host."""
  rule = optimizers.make_optimizer(
    steps=100, learning_rate=1e-2, warmup_steps=0, weight_decay=0.1,
    clip_norm=1.0,
  )  # fmt: skip

  @jax.jit
  def init(key):
    return training.init_state(transformer.init(config, key), rule)

  return rule, jax.device_get(init(jax.random.key(0)))


def trained(config, shape):
  """Five steps on a mesh: losses, and how the state lies."""
  mesh = placement.mesh(*shape, devices=jax.devices()[: np.prod(shape)])
  rule, state = fresh(config)
  with jax.set_mesh(mesh):
    places = placement.state_sharding(mesh, state)
    state = jax.tree.map(jax.device_put, jax.tree.map(np.array, state), places)
    batch = placement.global_batch(mesh, text(), ROWS)
    step = training.train_step(
      transformer.denoiser(config), rule, vocab=VOCAB, ema_decay=0.9,
      state_sharding=places,
    )  # fmt: skip
    compiled = step.lower(state, batch, KEY).compile()
    means = []
    for _ in range(STEPS):
      before = state
      state, metrics = compiled(state, batch, KEY)
      means.append(float(metrics.loss.mean))
    found = {
      'losses': means,
      'draws': draws(mesh, batch),
      'donated': all(leaf.is_deleted() for leaf in jax.tree.leaves(before)),
      'moved_logits': moved_logits(compiled.as_text()),
      'shards': {
        jax.tree_util.keystr(path, simple=True, separator='/'): [
          leaf.shape, leaf.addressable_shards[-1].data.shape
        ]
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
      },
    }  # fmt: skip
    # Of eight rows one has tokens, on one device.
    lonely = placement.global_batch(mesh, text(num_valid_rows=1), ROWS)
    state, metrics = compiled(state, lonely, KEY)
    found['lonely'] = [float(metrics.loss.mean), float(metrics.loss.count)]
    found['finite'] = all(
      bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params)
    )
  return found


def draws(mesh, batch):
  """Times and masks of each row, from every device that has the row."""

  @jax.jit
  def draw(batch):
    times_key, corruption_key = jax.random.split(KEY)
    t = time_draws.stratified_times(times_key, batch['row_ids'], ROWS)
    _, masked = corruption.corrupt(
      corruption_key, batch['ids'], t, batch['valid'],
      mask_id=1, row_ids=batch['row_ids'],
    )  # fmt: skip
    place = placement.batch_sharding(mesh)
    return jax.lax.with_sharding_constraint((t, masked), place)

  found = {}
  for t, masked in zip(
    *(x.addressable_shards for x in draw(batch)), strict=True
  ):
    for row, t_of_row, masked_of_row in zip(
      np.arange(ROWS)[t.index],
      np.asarray(t.data),
      np.asarray(masked.data),
      strict=True,
    ):
      drawn = float(t_of_row).hex(), masked_of_row.tolist()
      found.setdefault(int(row), []).append(drawn)
  return found


def moved_logits(hlo_text):
  """Exchanges of arrays with an axis of ids beside axes of rows and slots."""
  moved = [
    tuple(map(int, size.split(',')))
    for _, instruction in program_cost.executed(hlo_text)
    if instruction.opcode.removesuffix('-start') in EXCHANGES
    for operand in instruction.operands
    for size in re.findall(r'\[([\d,]+)\]', operand)
  ]
  return [x for x in moved if len(x) > 2 and {IDS, IDS // 2} & set(x)]


def check_rows_find_their_devices():
  """Also where the devices stand in another order than their numbers."""
  devices = np.array(jax.devices())[[6, 1, 4, 3, 2, 5, 0, 7]]
  mesh = jax.sharding.Mesh(devices.reshape(2, 2, 2), mesh_context.AXES)
  rows = text()
  for key, leaf in placement.global_batch(mesh, rows, ROWS).items():
    assert len(leaf.addressable_shards) == 8
    for shard in leaf.addressable_shards:
      np.testing.assert_array_equal(shard.data, rows[key][shard.index])


def main(path):
  check_rows_find_their_devices()
  meshes = (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (8, 1, 1)
  found = {f'dense {shape}': trained(DENSE, shape) for shape in meshes} | {
    f'mixed {shape}': trained(MIXED, shape) for shape in ((1, 1, 1), (2, 2, 2))
  }
  # Logits in two chunks of slots.
  predict._MOST_LOGITS = IDS * LENGTH * ROWS // 16
  found['dense (2, 2, 2)'] = trained(DENSE, (2, 2, 2))
  with open(path, 'w') as file:
    json.dump(found, file)


if __name__ == '__main__':
  main(sys.argv[1])
