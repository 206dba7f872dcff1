"""The price of revealing several tokens at once, exactly.

The data are 'red red' and 'blue blue', half each, and the denoiser is exact.
Two words revealed in the same call are drawn independently of each other, so
they disagree half of the time; revealed in different calls they always agree.
On a grid of intervals of lengths w the two words fall into the same interval
with probability sum w^2, which makes the invalid fraction

  (1/2) sum_k w_k^2,

1/(2K) on K equal intervals, the smallest value for K; one word at a time gives
0. Three columns show the law of the library's sampler (enumerated), a
simulation with its standard error, and this formula:

  python scripts/experiments/parallel_reveal_error.py --plot=error.png

Takes about half a minute, nearly all of it compilation.
"""

from collections.abc import Sequence

import jax
import numpy as np
from absl import flags

from mdlm_jax import (
  canvas,
  command_line,
  oracle,
  rules,
  sampling,
  schedules,
  vocab,
)

_ROWS = flags.DEFINE_integer('rows', 20_000, 'Rows of each simulation.')
_SEED = flags.DEFINE_integer(
  'seed', 0, 'Seed of the simulations.', 0, 2**32 - 1
)
_PLOT = flags.DEFINE_string('plot', None, 'Writes a plot to this file.')
_JSON = flags.DEFINE_string('json', None, 'Writes the numbers to this file.')

MASK, RED, BLUE = 0, 1, 2
VOCAB = vocab.Vocab(size=3, mask_id=MASK)
STRINGS = oracle.joint([(RED, RED), (BLUE, BLUE)])
NUM_STEPS = (1, 2, 4, 8, 16, 32)


def grids(num_steps: int = 8) -> dict[str, tuple[float, ...]]:
  """Four grids of equally many intervals, equal and unequal ones."""
  k = np.arange(num_steps, 0, -1) / num_steps
  return {
    'equal': schedules.uniform_grid(num_steps),
    'cosine': schedules.cosine_grid(num_steps),
    'square': (*(k**2).tolist(), 0.0),
    'halving': (*(0.5 ** np.arange(num_steps)).tolist(), 0.0),
  }


def formula(grid: Sequence[float]) -> float:
  """(1/2) sum_k w_k^2 over the intervals of a decreasing grid."""
  return 0.5 * float(np.sum(np.diff(grid) ** 2))


def enumerated(rule: rules.Rule) -> float:
  """Invalid mass of the exact law of the sampler, in float64."""
  open_canvas = canvas.from_prompts([[]], 2, VOCAB)
  law = oracle.sampler_law(STRINGS, open_canvas, vocab=VOCAB, rule=rule)
  return sum(p for ids, p in law.probabilities.items() if ids[0] != ids[1])


def simulated(
  rule: rules.Rule, num_rows: int, seed: int
) -> tuple[float, float]:
  """Invalid share of sampled rows, and its binomial standard error."""
  result = sampling.sample(
    oracle.exact_denoiser(VOCAB),
    STRINGS,
    jax.random.key(seed),
    canvas.from_prompts([[]] * num_rows, 2, VOCAB),
    vocab=VOCAB,
    rule=rule,
  )
  ids = np.asarray(result.ids)
  share = float(np.mean(ids[:, 0] != ids[:, 1]))
  return share, float(np.sqrt(share * (1 - share) / num_rows))


def measure(num_rows: int, seed: int) -> list[dict]:
  """One dictionary per rule: three equal intervals, grids, one at a time."""
  cases = [
    ('equal', schedules.uniform_grid(num_steps)) for num_steps in NUM_STEPS
  ]
  cases += [case for case in grids().items() if case[0] != 'equal']
  rows = [
    _row(name, len(grid) - 1, rules.kernel(grid), formula(grid), num_rows, seed)
    for name, grid in cases
  ]
  one_at_a_time = rules.by_confidence(2)
  return [*rows, _row('one at a time', 2, one_at_a_time, 0.0, num_rows, seed)]


def _row(name, calls, rule, expected, num_rows, seed) -> dict:
  share, error = simulated(rule, num_rows, seed)
  return {
    'grid': name,
    'calls': calls,
    'enumerated': enumerated(rule),
    'simulated': share,
    'standard_error': error,
    'formula': expected,
  }


def table(rows: Sequence[dict]) -> str:
  """The numbers as text, in per cent."""
  lines = ['grid           calls  enumerated   simulated +- error    formula']
  for row in rows:
    lines.append(
      f'{row["grid"]:13s} {row["calls"]:6d} {row["enumerated"]:10.4%} '
      f'{row["simulated"]:11.3%} +- {row["standard_error"]:6.3%} '
      f'{row["formula"]:10.4%}'
    )
  return '\n'.join(lines)


def plot(rows: Sequence[dict], path: str) -> None:
  """Invalid fraction against calls, and by grid at equal calls."""
  pyplot = command_line.pyplot()
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
  equal = [row for row in rows if row['grid'] == 'equal']
  at_eight = [row for row in rows if row['calls'] == 8]
  for axes, group, key in ((left, equal, 'calls'), (right, at_eight, 'grid')):
    x = [row[key] for row in group]
    axes.errorbar(
      x,
      [row['simulated'] for row in group],
      [row['standard_error'] for row in group],
      fmt='o',
      capsize=4,
      label='simulated',
    )
    style = 'k--' if axes is left else 'k_'
    axes.plot(x, [row['formula'] for row in group], style, label='formula')
    axes.plot(
      x,
      [row['enumerated'] for row in group],
      'rx',
      zorder=3,
      label='enumerated',
    )
  left.set_xscale('log', base=2)
  left.set_yscale('log', base=2)
  left.set(xlabel='calls K', ylabel='invalid fraction')
  for axis in (left.xaxis, left.yaxis):
    axis.set_major_formatter('{x:g}')
  left.set_title('equal intervals: 1 / (2K)')
  right.set(ylim=(0, None), ylabel='invalid fraction')
  right.set_title('8 intervals: half the sum of squares')
  left.legend()
  figure.tight_layout()
  figure.savefig(path, dpi=150)


def main(argv):
  del argv
  if _ROWS.value < 1:
    raise ValueError(f'--rows={_ROWS.value} must be at least 1')
  command_line.check_outputs(plot=_PLOT.value, numbers=_JSON.value)
  rows = measure(_ROWS.value, _SEED.value)
  print("invalid fraction of 'red red' / 'blue blue'\n")
  print(table(rows))
  command_line.write_json(
    _JSON.value, {'rows': _ROWS.value, 'seed': _SEED.value, 'results': rows}
  )
  if _PLOT.value:
    plot(rows, _PLOT.value)


if __name__ == '__main__':
  command_line.run(main)
