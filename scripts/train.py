"""Trains a masked diffusion language model on text.

  python scripts/train.py --config=configs/tiny.py --workdir=runs/tiny \\
    [--config.model.num_layers=3 ...]

The work directory receives checkpoints/, metrics.jsonl, TensorBoard events,
incidents.jsonl, model/ (averaged weights, config and tokenizer: what sample.py
and evaluate.py read) and evaluation.json. A run whose work directory has a
checkpoint goes on from there. Ctrl-C saves and exits with code 130, SIGTERM
with code 0; before the first step and after the last one nothing is to be
saved, and both end it at once.

mdlm_jax/run_config.py explains every field of a config. docs/scaling.md says
how to use many devices and several processes.
"""

import pathlib

import jax
from absl import flags

from mdlm_jax import command_line, processes

with command_line.extra('train'):
  import grain  # noqa: F401
  from ml_collections import config_flags

  from mdlm_jax import runs

_CONFIG = config_flags.DEFINE_config_file('config', lock_config=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Where everything is written.')
_RESUME = flags.DEFINE_bool(
  'resume',
  True,
  'Goes on from the checkpoint of the work directory, if it has one; '
  '--noresume refuses such a directory.',
)
_DISTRIBUTED = flags.DEFINE_bool(
  'distributed',
  False,
  'This is one of several processes of the run, each started with the same '
  'command. Slurm, Open MPI, Kubernetes and TPU pods tell who the others are; '
  'elsewhere the next three flags do.',
)
_COORDINATOR = flags.DEFINE_string(
  'coordinator_address', None, 'host:port of the first process.'
)
_NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'How many processes there are.', 1
)
_PROCESS_ID = flags.DEFINE_integer(
  'process_id', None, 'Which of them this is, from 0.', 0
)
_COMPILATION_CACHE = flags.DEFINE_string(
  'compilation_cache',
  None,
  'Keeps compiled programs in this directory, so that a resumed run starts '
  'sooner.',
)
flags.mark_flags_as_required(['config', 'workdir'])


def main(_) -> int:
  if not _WORKDIR.value:  # As of a variable of the shell that is not set.
    raise ValueError('--workdir is empty')
  others = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
  if _DISTRIBUTED.value:
    processes.start(*others)
  elif others != (None, None, None):
    raise ValueError(
      '--coordinator_address, --num_processes and --process_id are of '
      '--distributed'
    )
  if _COMPILATION_CACHE.value:
    jax.config.update('jax_compilation_cache_dir', _COMPILATION_CACHE.value)
  workdir = pathlib.Path(_WORKDIR.value)
  return runs.train(_CONFIG.value, workdir, resume=_RESUME.value)


if __name__ == '__main__':
  command_line.run(main)
