"""Quality of a model's text against the number of network calls.

  python scripts/experiments/step_count.py --plot=steps.png

For 1, 2, 4, ... calls, by the reverse kernel and by confidence: bits per
character of the samples under an order-3 character model of the training text
(Witten-Bell smoothing, see `mdlm_jax.ngrams`), and beside it, since repetitive
text needs few bits, the entropy of the characters, the share of distinct word
pairs over all samples, and the share of 4-grams that a sample repeats. Real
held-out text in pieces of the same size is the line to compare with. Means over
samples, with their standard error.

The shipped model has the order-3 counts of its training text (ngrams.npz) and
the beginnings of its held-out texts (heldout.txt) beside it, as written by
--write_reference; for another model both come from the corpus that its
training.json names.

Takes under a minute for the shipped model, half of it compilation.
"""

import json
import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import tqdm
from absl import flags

from mdlm_jax import (
  canvas,
  command_line,
  data,
  draws,
  evaluation,
  ngrams,
  rules,
  sampling,
  schedules,
)
from mdlm_jax.models import directory

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

ORDER = 3
_DEFAULT_LENGTH = 64
_BEGINNING = 8000  # Characters of each held-out text that are shipped.
# Each name with its title in the table.
MEASURES = {
  'bits_per_character': 'bits/char',
  'entropy': 'entropy',
  'repetition': 'repetition',
}
PLOT_TITLES = {
  'bits_per_character': 'bits per character, order-3 model',
  'entropy': 'entropy of the characters, bits',
  'repetition': 'share of repeated 4-grams',
}


class Reference(NamedTuple):
  """What samples are measured by: the model of one text, and another text."""

  model: ngrams.NgramModel
  held_out: str


def read_reference(path: pathlib.Path) -> Reference:
  """The reference of the model in a directory, see the top of this file."""
  if (path / 'ngrams.npz').exists():
    held_out = (path / 'heldout.txt').read_text('utf-8')
    return Reference(ngrams.load(path / 'ngrams.npz'), held_out)
  corpus = read_corpus(path)
  return Reference(
    fit(corpus), '\n\n'.join(document.text for document in corpus.validation)
  )


def write_reference(path: pathlib.Path, output: pathlib.Path) -> None:
  """Writes what `read_reference` finds beside a shipped model."""
  corpus = read_corpus(path)
  ngrams.save(fit(corpus), output / 'ngrams.npz')
  beginnings = [text[:_BEGINNING] for _, text in corpus.validation]
  (output / 'heldout.txt').write_text('\n\n'.join(beginnings), 'utf-8')


def read_corpus(path: pathlib.Path) -> data.Corpus:
  """The corpus that the model in a directory was trained on."""
  try:
    settings = directory.read_history(path)['config']['data']
  except (KeyError, TypeError):
    raise ValueError(
      f'{path} does not say what its model was trained on'
    ) from None
  return data.corpus_of(settings)


def fit(corpus: data.Corpus) -> ngrams.NgramModel:
  """The order-3 model of the training text."""
  return ngrams.fit([document.text for document in corpus.training], ORDER)


def measure(texts: Sequence[str], model: ngrams.NgramModel) -> dict:
  """Means over the texts, `NAME_error` their standard errors."""
  values = {
    'bits_per_character': [ngrams.bits_per_character(model, t) for t in texts],
    'entropy': [ngrams.entropies(text, 0)[0] for text in texts],
    'repetition': [ngrams.repetition(text) for text in texts],
  }
  numbers = {}
  for name, numbers_per_text in values.items():
    numbers[name] = float(np.mean(numbers_per_text))
    spread = float(np.std(numbers_per_text, ddof=1))
    numbers[f'{name}_error'] = spread / math.sqrt(len(texts))
  numbers['distinct_2'] = ngrams.distinct([t.split() for t in texts], 2)
  return numbers


def real_texts(held_out: str, size: int, count: int) -> list[str]:
  """Up to `count` pieces of `size` characters, evenly spread over the text."""
  starts = np.linspace(0, max(len(held_out) - size, 0), count).astype(int)
  return [held_out[start : start + size] for start in starts]


def step_counts(length: int) -> list[int]:
  """1, 2, 4, ... and `length`."""
  powers = [2**i for i in range(length.bit_length()) if 2**i < length]
  return [*powers, length]


def sample_texts(model, rule, length, draw, num_samples, seed) -> list[str]:
  """Samples from nothing."""
  result = sampling.sample(
    model.denoiser,
    model.params,
    jax.random.key(seed),
    canvas.from_prompts([[]] * num_samples, length, model.vocab),
    vocab=model.vocab,
    rule=rule,
    draw=draw,
  )
  return [model.tokenizer.decode(ids) for ids in np.asarray(result.ids)]


def run(model, reference: Reference, length: int) -> list[dict]:
  """One dictionary per rule and number of calls; the last is real text."""
  draw = draws.categorical(temperature=_TEMPERATURE.value)
  points = [
    (name, num_steps)
    for name in ('kernel', 'confidence')
    for num_steps in step_counts(length)
  ]
  rows, sizes = [], []
  for name, num_steps in tqdm.tqdm(points, unit='point', dynamic_ncols=True):
    if name == 'kernel':
      grid = schedules.uniform_grid(num_steps)
      rule = rules.kernel(grid, model.schedule)
    else:
      rule = rules.by_confidence(num_steps, schedule=model.schedule)
    texts = sample_texts(
      model, rule, length, draw, _NUM_SAMPLES.value, _SEED.value
    )
    sizes += map(len, texts)
    rows.append(
      {'rule': name, 'calls': num_steps, **measure(texts, reference.model)}
    )
  size = round(float(np.mean(sizes)))
  real = real_texts(reference.held_out, size, _NUM_SAMPLES.value)
  return [
    *rows,
    {'rule': 'real text', 'calls': None, **measure(real, reference.model)},
  ]


def table(rows: Sequence[dict]) -> str:
  """The numbers as text."""
  titles = ''.join(f'{title:>18s}' for title in MEASURES.values())
  lines = [f'{"rule":10s} {"calls":>5s}{titles}  distinct-2']
  for row in rows:
    numbers = ''.join(
      f'{row[name]:9.3f} +- {row[name + "_error"]:.3f}' for name in MEASURES
    )
    calls = row['calls'] or ''
    lines.append(
      f'{row["rule"]:10s} {calls:>5}{numbers}  {row["distinct_2"]:10.3f}'
    )
  return '\n'.join(lines)


def plot(rows: Sequence[dict], path: str) -> None:
  """Each measure against calls, real text as a line."""
  pyplot = command_line.pyplot()
  figure, all_axes = pyplot.subplots(1, len(MEASURES), figsize=(12, 3.6))
  *points, real = rows
  for axes, name in zip(all_axes, MEASURES, strict=True):
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
    axes.set(xlabel='network calls', title=PLOT_TITLES[name])
  all_axes[0].legend()
  figure.tight_layout()
  figure.savefig(path, dpi=150)


def main(argv):
  del argv
  command_line.check_outputs(plot=_PLOT.value, numbers=_JSON.value)
  path = directory.find(_CHECKPOINT.value)
  if _WRITE_REFERENCE.value:
    write_reference(path, pathlib.Path(_WRITE_REFERENCE.value))
    return
  model = directory.load(path)
  length = _LENGTH.value or min(_DEFAULT_LENGTH, model.config.max_length)
  if length > model.config.max_length:
    raise ValueError(
      f'--length={length} is more than the length {model.config.max_length} '
      'of the model'
    )
  rows = run(model, read_reference(path), length)
  print(
    f'{_NUM_SAMPLES.value} samples of {length} tokens per point, temperature '
    f'{_TEMPERATURE.value:g}; order-3 bits '
    'per character, entropy in bits, repeated 4-grams, distinct word pairs\n'
  )
  print(table(rows))
  if _JSON.value:
    content = {
      'checkpoint': str(path),
      'length': length,
      'num_samples': _NUM_SAMPLES.value,
      'temperature': _TEMPERATURE.value,
      'seed': _SEED.value,
      'dtype': model.config.dtype,
      **evaluation.environment(),
      'results': rows,
    }
    pathlib.Path(_JSON.value).write_text(json.dumps(content, indent=2) + '\n')
  if _PLOT.value:
    plot(rows, _PLOT.value)


if __name__ == '__main__':
  command_line.run(main)
