"""Quality of a model's text against the number of network calls.

  python scripts/experiments/step_count.py --plot=steps.png

For 1, 2, 4, ... calls, by the reverse kernel and by confidence: bits per
character of the samples under an order-3 character model of the training text
(Witten-Bell smoothing, see `mdlm_jax.ngrams`), and beside it, since repetitive
text needs few bits, the entropy of the tokens, the share of distinct word pairs
over all samples, and the share of word 4-grams that a sample repeats. Real
held-out text in pieces of the same size is the line to compare with. Means over
samples, with their standard error.

The shipped model has the order-3 counts of its training text (ngrams.npz) and
the beginnings of its held-out texts (heldout.txt) beside it, as written by
--write_reference; for another model both come from the corpus that its
training.json names.

Takes under a minute for the shipped model, half of it compilation.
"""

import pathlib
from collections.abc import Sequence

import jax
import tqdm
from absl import flags

from mdlm_jax import command_line, draws, provenance, rules, schedules
from mdlm_jax.models import directory
from mdlm_jax.sample_quality import measures, reference, samples
from mdlm_jax.sample_quality.measures import MEASURES

_CHECKPOINT = flags.DEFINE_string(
  'checkpoint',
  None,
  'A model directory, or the --workdir of a training run. Default: the model '
  'that comes with the package.',
)
_LENGTH = flags.DEFINE_integer(
  'length',
  None,
  "Tokens per sample. Default: 64, or the model's length if that is less.",
  8,
)
_NUM_SAMPLES = flags.DEFINE_integer('num_samples', 16, 'Samples per point.', 2)
_TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Of the draws.', 0.0)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the samples.', 0, 2**32 - 1)
_WRITE_REFERENCE = flags.DEFINE_string(
  'write_reference',
  None,
  'Only writes ngrams.npz and heldout.txt into this directory, from the corpus '
  'of the checkpoint.',
)
_PLOT = flags.DEFINE_string('plot', None, 'Writes a plot to this file.')
_JSON = flags.DEFINE_string('json', None, 'Writes the numbers to this file.')

_DEFAULT_LENGTH = 64


def step_counts(length: int) -> list[int]:
  """1, 2, 4, ... and `length`."""
  powers = [2**i for i in range(length.bit_length()) if 2**i < length]
  return [*powers, length]


def run(model, compared: reference.Reference, length: int) -> list[dict]:
  """One dictionary per rule and number of calls; the last is real text."""
  draw = draws.categorical(temperature=_TEMPERATURE.value)
  points = [
    (name, num_steps)
    for name in ('kernel', 'confidence')
    for num_steps in step_counts(length)
  ]
  rows, all_texts = [], []
  for name, num_steps in tqdm.tqdm(points, unit='point', dynamic_ncols=True):
    if name == 'kernel':
      grid = schedules.uniform_grid(num_steps)
      rule = rules.kernel(grid, model.schedule)
    else:
      rule = rules.by_confidence(num_steps)
    written, _ = samples.from_model(
      model.denoiser,
      model.params,
      jax.random.key(_SEED.value),
      model.tokenizer,
      num_samples=_NUM_SAMPLES.value,
      length=length,
      rule=rule,
      draw=draw,
    )
    all_texts += written.texts
    numbers = measures.measure(written, model=compared.model)
    rows.append({'rule': name, 'calls': num_steps, **numbers})
  real = samples.real(
    compared.held_out, model.tokenizer, all_texts, _NUM_SAMPLES.value
  )
  numbers = measures.measure(real, model=compared.model)
  return [*rows, {'rule': 'real text', 'calls': None, **numbers}]


def table(rows: Sequence[dict]) -> str:
  """The numbers as text."""
  titles = measures.titles(MEASURES)
  lines = [f'{"rule":10s} {"calls":>5s}{titles}']
  for row in rows:
    numbers = measures.cells(row, MEASURES)
    calls = row['calls'] or ''
    lines.append(f'{row["rule"]:10s} {calls:>5}{numbers}')
  return '\n'.join(lines)


def plot(rows: Sequence[dict], path: str) -> None:
  """Each measure against calls, real text as a line."""
  pyplot = command_line.pyplot()
  figure, all_axes = pyplot.subplots(1, len(MEASURES), figsize=(16, 3.6))
  *points, real = rows
  for axes, (name, (_, title)) in zip(all_axes, MEASURES.items(), strict=True):
    for rule in ('kernel', 'confidence'):
      group = [row for row in points if row['rule'] == rule]
      axes.errorbar(
        [row['calls'] for row in group],
        [row[name] for row in group],
        [row[f'{name}_error'] for row in group],
        marker='o',
        capsize=3,
        label=rule,
      )
    axes.axhline(real[name], color='k', linestyle='--', label='real text')
    axes.set_xscale('log', base=2)
    axes.set(xlabel='network calls', title=title)
  all_axes[0].legend()
  figure.tight_layout()
  figure.savefig(path, dpi=150)


def main(argv):
  del argv
  command_line.check_outputs(plot=_PLOT.value, numbers=_JSON.value)
  path = directory.find(_CHECKPOINT.value)
  if _WRITE_REFERENCE.value:
    reference.write(path, pathlib.Path(_WRITE_REFERENCE.value))
    return
  model = directory.load(path)
  length = _LENGTH.value or min(_DEFAULT_LENGTH, model.config.max_length)
  if length > model.config.max_length:
    raise ValueError(
      f'--length={length} is more than the length {model.config.max_length} '
      'of the model'
    )
  rows = run(model, reference.read(path), length)
  print(
    f'{_NUM_SAMPLES.value} samples of {length} tokens per point, temperature '
    f'{_TEMPERATURE.value:g}; order-3 bits '
    'per character, entropy in nats, repeated 4-grams, distinct word pairs\n'
  )
  print(table(rows))
  command_line.write_json(
    _JSON.value,
    {
      'checkpoint': str(path),
      'length': length,
      'num_samples': _NUM_SAMPLES.value,
      'temperature': _TEMPERATURE.value,
      'seed': _SEED.value,
      'dtype': model.config.dtype,
      **provenance.environment(),
      'results': rows,
    },
  )
  if _PLOT.value:
    plot(rows, _PLOT.value)


if __name__ == '__main__':
  command_line.run(main)
