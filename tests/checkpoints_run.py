"""One of several processes that restore, save and restore checkpoints together.

  python checkpoints_run.py PORT NUM_PROCESSES INDEX SOURCE TARGET RESULT

Two CPU devices in each process. Goes on from the latest checkpoint in SOURCE,
draws four batches and saves to TARGET; damages what the last process reads of a
copy of that; restores; and writes what this process saw to RESULT.
"""

import pathlib
import shutil
import sys

import checkpoints_test
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mdlm_jax import checkpoints


def main(port, num_processes, index, source, target, result):
  num_processes, index = int(num_processes), int(index)
  jax.config.update('jax_num_cpu_devices', 2)
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(f'127.0.0.1:{port}', num_processes, index)
  mesh = jax.make_mesh((jax.device_count(),), ('fsdp',))

  def placed(x):
    # The last axis is split where it can be; the rest is on every device.
    split = x.shape and x.shape[-1] % mesh.size == 0
    spec = PartitionSpec(*[None] * (x.ndim - 1), 'fsdp' if split else None)
    sharding = NamedSharding(mesh, spec if x.shape else PartitionSpec())
    return jax.make_array_from_callback(
      x.shape, sharding, lambda at: np.asarray(x)[at]
    )

  state = jax.tree.map(placed, checkpoints_test.random_state(0, 0))
  local = np.arange(index, 8, num_processes)
  iterator = checkpoints_test.make_iterator(local=local)
  state = checkpoints.restore(source, state, iterator)
  seen = {'first': next(iterator)['record_ids'], 'step': state.step}
  for _ in range(3):
    next(iterator)
  state = state._replace(step=placed(np.int32(8)))
  checkpoints.save(target, state, iterator, checkpoints_test.SETTINGS)
  seen['next'] = next(iterator)['record_ids']
  if index == 0:
    damaged = pathlib.Path(target, '9')
    shutil.copytree(damaged.with_name('8'), damaged)
    last = f'ocdbt.process_{num_processes - 1}'
    for path in (damaged / 'state' / last / 'd').iterdir():
      path.write_bytes(b'')
  jax.experimental.multihost_utils.sync_global_devices('damaged')
  again = checkpoints.restore(target, state, iterator)
  seen['again'] = next(iterator)['record_ids']
  equal = jax.tree.map(
    lambda a, b: bool(np.array_equal(shards(a), shards(b))), state, again
  )
  seen['equal'] = all(jax.tree.leaves(equal))
  seen['kernel'] = shards(again.params['blocks']['kernel'])
  np.savez(result, **seen)


def shards(x):
  return np.stack([np.asarray(shard.data) for shard in x.addressable_shards])


if __name__ == '__main__':
  main(*sys.argv[1:])
