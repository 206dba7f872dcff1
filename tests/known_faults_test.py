"""Faults reported of other samplers that no single module answers for."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax import blocks, draws, rules, sampling
from mdlm_jax.canvas import from_rows
from mdlm_jax.predict import Denoiser
from mdlm_jax.schedules import uniform_grid
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=9, mask_id=1, pad_id=0, eos_ids=(2,))


@functools.cache
def table():
  """Fixed logits of every position, which are its params."""

  def features(params, cache, ids, *, at, positions, **unused):
    logits = params[positions]
    if at is not None:
      logits = jnp.take_along_axis(logits, at[..., None], 1)
    return logits, ()

  return Denoiser(features, lambda params, hidden: hidden, time_free=True)


def run(logits, key, canvas, rule, **options):
  return sampling.sample(
    table(), logits, key, canvas, vocab=VOCAB, rule=rule, **options
  )


def test_blocks_draw_and_do_not_take_the_argmax():
  """Two tokens of one half each: 64 keys, 64 answers of 2^16."""
  canvas = from_rows([[None] * 16], VOCAB)
  logits = jnp.full((16, 9), -jnp.inf).at[:, 3:5].set(0.0)
  windows = blocks.blocks_of(canvas, 4)

  def answer(key, **options):
    rule = rules.by_confidence(2)
    return run(logits, key, canvas, rule, blocks=windows, **options).ids[0]

  keys = jax.random.split(jax.random.key(0), 64)
  answers = np.asarray(jax.vmap(answer)(keys))
  # Five of 64 meet others once in 10^7 or less often.
  assert len(np.unique(answers, axis=0)) >= 60
  # Under vmap a key draws what it draws alone.
  alone = answer(jax.random.split(jax.random.key(0), 64)[5])
  np.testing.assert_array_equal(answers[5], alone)
  greedy = draws.categorical(temperature=0.0)
  assert (answer(jax.random.key(0), draw=greedy) == 3).all()


def test_tokens_do_not_depend_on_the_64_bit_mode():
  canvas = from_rows([[5, *[None] * 9], [None] * 7], VOCAB)
  logits = np.random.default_rng(0).normal(size=(10, 9)).astype(np.float32)
  rule = rules.kernel(uniform_grid(8))
  found = []
  for wide in (False, True):
    with jax.enable_x64(wide):
      key = jax.random.key(42)
      found.append(np.asarray(run(jnp.asarray(logits), key, canvas, rule).ids))
  np.testing.assert_array_equal(*found)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from known_faults_test import VOCAB, run
from mdlm_jax import blocks, rules
from mdlm_jax.canvas import from_rows
from mdlm_jax.schedules import uniform_grid

rng = np.random.default_rng(0)
rows = [
  [None if rng.random() < 0.7 else int(rng.integers(9)) for _ in range(n)]
  for n in (6, 1, 4, 6, 3, 5, 2, 6)
]
rows[4] = [4, 5, 6]  # Nothing to do here.
canvas = from_rows(rows, VOCAB)
logits = 2 * jax.random.normal(jax.random.key(7), (6, 9))
mesh = Mesh(np.array(jax.devices()), 'rows')
assert mesh.size == 8
by_row = NamedSharding(mesh, PartitionSpec('rows'))
windows = blocks.blocks_of(canvas, 4)
grid = uniform_grid(8)
cases = {
  'rows that end': (
    rules.threshold(0.4), {'blocks': windows}, {'stop_at_eos': True}
  ),
  'tokens taken back': (
    rules.remasking(grid, rules.sigmas.cap(grid, 0.3)), {}, {}
  ),
}
for name, (rule, arrays, options) in cases.items():
  one = run(logits, jax.random.key(1), canvas, rule, **arrays, **options)
  there, arrays = jax.device_put((canvas, arrays), by_row)
  many = run(logits, jax.random.key(1), there, rule, **arrays, **options)
  assert len(many.ids.sharding.device_set) == 8, name
  for field in ('ids', 'calls', 'calls_per_row', 'changes'):
    a, b = (np.asarray(getattr(result, field)) for result in (one, many))
    np.testing.assert_array_equal(a, b, err_msg=f'{name}: {field}')
"""


def test_rows_on_eight_devices_get_the_tokens_of_one():
  here = pathlib.Path(__file__).parent
  paths = [str(here), str(here.parent), *sys.path]
  subprocess.run(
    [sys.executable, '-c', SHARDED],
    check=True,
    env={
      **os.environ,
      'PYTHONPATH': os.pathsep.join(filter(None, paths)),
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    },
  )
