"""A small training run, to be killed, stopped and fed bad gradients.

  python survival_run.py --workdir=DIR --text=FILE [--hold=POINT --marker=FILE]
    [--processes=INDEX,COUNT,PORT]

With --hold the run stands still the next time that it comes to a point of
`POINTS`, after it has made the file --marker, until it is killed. With
--processes it is one of several processes.
"""

import json
import pathlib
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from mdlm_jax import command_line, losses, processes, run_config, runs
from mdlm_jax.models import placement

# What Python announces before it does it, and of which path.
POINTS = {
  'before the state': ('os.mkdir', r'.*/\d+\.orbax-checkpoint-tmp'),
  'between files': ('open', r'.*/state/_METADATA'),
  'before the commit': ('os.rename', r'.*/\d+\.orbax-checkpoint-tmp'),
  'before the removal': ('os.rename', r'.*/checkpoints/\d+'),
  'during the removal': ('os.rmdir', r'.*/\d+\.removed'),
  'during the export': ('os.rename', r'.*/model\.safetensors\.tmp'),
  'at the start': ('os.rename', r'.*/metrics\.tmp'),
}

_WORKDIR = flags.DEFINE_string('workdir', None, 'Of the run.')
_TEXT = flags.DEFINE_string('text', None, 'What is learned.')
_STEPS = flags.DEFINE_integer('steps', 42, 'Of the run.')
_HOLD = flags.DEFINE_enum('hold', None, list(POINTS), 'Where it stands still.')
_PASSES = flags.DEFINE_integer(
  'passes', 0, 'How often it passes --hold before.'
)
_MARKER = flags.DEFINE_string('marker', None, 'Made where it stands still.')
_STEP_SECONDS = flags.DEFINE_float('step_seconds', 0, 'Added to every step.')
_PROCESSES = flags.DEFINE_list('processes', [], 'Index, number, port.')
_POISONED = flags.DEFINE_list(
  'poisoned', [], 'First and last step, from here, with a gradient of NaN.'
)


def small_config(text, steps):
  config = run_config.defaults()
  config.update_from_flattened_dict(
    {
      'steps': steps,
      'data.files': str(text),
      'data.length': 16,
      'data.batch_size': 8,
      'model.num_layers': 1,
      'model.model_dim': 16,
      'model.num_heads': 2,
      'model.mlp_dim': 32,
      'optimizer.warmup_steps': 2,
      'ema_decay': 0.9,
      'most_skipped': 3,
      'log_every': 4,
      'checkpoint_every': 6,
      'evaluation.batch_size': 8,
    }
  )
  return config


def stand_still(point, passes, marker):
  """Waits for death where it comes to a point once more than `passes` times."""
  kind, pattern = POINTS[point]
  left = [None] * passes

  def wait(event, arguments):
    if event == kind and re.fullmatch(pattern, str(arguments[0])):
      if left:
        left.pop()
      else:
        marker.touch()
        time.sleep(600)

  sys.addaudithook(wait)


def change_batches(path, step_seconds, poisoned):
  """Notes the rows of every step; poisons some by a row without a token."""
  original, taken = placement.global_batch, []

  def global_batch(mesh, batch, batch_size):
    with path.open('a') as file:
      file.write(json.dumps(np.asarray(batch['record_ids']).tolist()) + '\n')
    time.sleep(step_seconds)
    taken.append(None)
    if poisoned and int(poisoned[0]) <= len(taken) <= int(poisoned[1]):
      batch = batch | {'valid': batch['valid'].copy()}
      batch['valid'][0] = False
    return original(mesh, batch, batch_size)

  def loss(log_probs, masked, valid, t, *, schedule):
    total = losses.continuous_bound(
      log_probs, masked, valid, t, schedule=schedule
    )
    bad = jnp.where(valid.any(1).all(), 0.0, jnp.nan)
    return total._replace(sum=total.sum + bad)

  placement.global_batch = global_batch
  if poisoned:
    run_config.LOSSES['bound'] = loss


def main(_):
  if _PROCESSES.value:
    index, count, port = _PROCESSES.value
    processes.start(f'127.0.0.1:{port}', int(count), int(index))
  workdir = pathlib.Path(_WORKDIR.value)
  workdir.mkdir(parents=True, exist_ok=True)
  if _HOLD.value:
    stand_still(_HOLD.value, _PASSES.value, pathlib.Path(_MARKER.value))
  name = f'record_ids_{jax.process_index()}.jsonl'
  change_batches(workdir / name, _STEP_SECONDS.value, _POISONED.value)
  return runs.train(small_config(_TEXT.value, _STEPS.value), workdir)


if __name__ == '__main__':
  command_line.run(main)
