"""Trains a masked diffusion language model on text.

  python scripts/train.py --config=configs/tiny.py --workdir=runs/tiny \
    [--config.model.num_layers=3 ...]

The work directory receives checkpoints/, metrics.jsonl, TensorBoard events,
model/ (averaged weights, config and tokenizer: what sample.py and evaluate.py
read) and evaluation.json. A run whose work directory has a checkpoint goes on
from there. Ctrl-C saves and exits with code 130, SIGTERM with code 0.
"""

import pathlib

from absl import flags

from mdlm_jax import command_line

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
flags.mark_flags_as_required(['config', 'workdir'])


def main(_) -> int:
  workdir = pathlib.Path(_WORKDIR.value)
  return runs.train(_CONFIG.value, workdir, resume=_RESUME.value)


if __name__ == '__main__':
  command_line.run(main)
