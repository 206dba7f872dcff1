"""Standard error of the estimators of the bound at equal network calls.

  python scripts/experiments/likelihood_variance.py --plot=variance.png

Every estimator of `mdlm_jax.bound_estimators` estimates the bound of the same
pieces of held-out text, once of the whole piece and once of its last quarter
given the rest. Its calls are spent as few large or many small independent
estimates; the spread of these gives the standard error that 128 calls leave.
All have the same expectation, which the table shows beside it.

Takes about five minutes on two cores for the shipped model.
"""

import math
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags

from mdlm_jax import bound_estimators, command_line, likelihood, provenance
from mdlm_jax.models import directory
from mdlm_jax.sample_quality import reference

_CHECKPOINT = flags.DEFINE_string(
  'checkpoint',
  None,
  'A model directory, or the --workdir of a training run. Default: the model '
  'that comes with the package.',
)
_LENGTH = flags.DEFINE_integer('length', 64, 'Tokens per piece of text.', 8)
_NUM_TEXTS = flags.DEFINE_integer('num_texts', 8, 'Pieces of text.', 1)
_CALLS = flags.DEFINE_multi_integer(
  'calls', [4, 16, 64], 'Network calls of one estimate; repeatable.', 4
)
_BUDGET = flags.DEFINE_integer(
  'budget',
  256,
  'Network calls per piece of text and row of the table, about.',
  8,
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the masks.', 0, 2**32 - 1)
_PLOT = flags.DEFINE_string('plot', None, 'Writes a plot to this file.')
_JSON = flags.DEFINE_string('json', None, 'Writes the numbers to this file.')

_QUOTED_CALLS = 128  # The standard error is quoted for so many.


def estimators(
  calls: Sequence[int], num_tokens: int
) -> list[tuple[str, bound_estimators.Estimator]]:
  """Each estimator with about each number of calls, by name."""
  rows = []
  for num_calls in calls:
    even, odd = num_calls + num_calls % 2, num_calls + 1 - num_calls % 2
    rows += [
      ('stratified time', bound_estimators.stratified_time(num_calls)),
      (
        'stratified time, non-empty',
        bound_estimators.stratified_time(num_calls, nonempty=True),
      ),
      ('Gauss-Legendre', bound_estimators.gauss_legendre(num_calls)),
      ('complement, time', bound_estimators.complement_time(even)),
      ('exact count', bound_estimators.exact_count(num_calls)),
      ('complement, count', bound_estimators.complement_count(odd)),
    ]
  return [*rows, ('chain rule', bound_estimators.chain_rule(num_tokens))]


def texts(model, path: pathlib.Path, length: int, count: int) -> np.ndarray:
  """Pieces of the held-out text, evenly spread. int32, shape `[N, L]`."""
  ids = np.asarray(
    model.tokenizer.encode(reference.held_out(path)),
    np.int32,
  )
  if len(ids) < length:
    raise ValueError(
      f'the held-out text has {len(ids)} tokens, less than {length=}'
    )
  starts = np.linspace(0, len(ids) - length, count).astype(int)
  return ids[starts[:, None] + np.arange(length)]


def measure(model, ids: np.ndarray, answer: np.ndarray, estimator) -> dict:
  """Mean bound, and the standard error that 128 calls leave of a text's."""
  estimate = likelihood.bound(
    model.denoiser,
    model.params,
    jax.random.key(_SEED.value),
    jnp.asarray(ids),
    jnp.broadcast_to(answer, ids.shape),
    vocab=model.vocab,
    estimator=estimator,
    num_replicates=max(2, round(_BUDGET.value / estimator.num_calls)),
    schedule=model.bound_schedule,
  )
  num_tokens = int(answer.sum())
  error = np.asarray(estimate.standard_error, np.float64)
  replicates = len(estimate.replicates)
  per_call = np.mean(error**2) * replicates * estimator.num_calls
  return {
    'calls': estimator.num_calls,
    'nats_per_token': float(np.mean(estimate.mean)) / num_tokens,
    'nats_per_token_error': float(np.sqrt(np.sum(error**2)))
    / (num_tokens * len(ids)),
    'standard_error': float(np.sqrt(per_call / _QUOTED_CALLS)) / num_tokens,
    # Of a standard deviation with so many degrees of freedom.
    'relative_error': 1 / math.sqrt(2 * len(ids) * (replicates - 1)),
  }


def run(model, ids: np.ndarray) -> list[dict]:
  """One dictionary per part of the text, estimator and number of calls."""
  length = ids.shape[1]
  parts = {
    'whole text': np.ones(length, bool),
    'last quarter': np.arange(length) >= length - length // 4,
  }
  points = [
    (part, answer, name, estimator)
    for part, answer in parts.items()
    for name, estimator in estimators(_CALLS.value, int(answer.sum()))
  ]
  return [
    {
      'part': part,
      'estimator': name,
      **measure(model, ids, answer, estimator),
    }
    for part, answer, name, estimator in tqdm.tqdm(
      points, unit='estimator', dynamic_ncols=True
    )
  ]


def table(rows: Sequence[dict]) -> str:
  """The numbers as text."""
  lines = [
    f'{"part":13s} {"estimator":27s} {"calls":>5s} {"bound":>16s} '
    f'{f"error at {_QUOTED_CALLS} calls":>20s}'
  ]
  for row in rows:
    error = row['standard_error']
    lines.append(
      f'{row["part"]:13s} {row["estimator"]:27s} {row["calls"]:5d} '
      f'{row["nats_per_token"]:6.3f} +- {row["nats_per_token_error"]:.3f} '
      f'{error:11.4f} +- {error * row["relative_error"]:.4f}'
    )
  return '\n'.join(lines)


def plot(rows: Sequence[dict], path: str) -> None:
  """Standard error at equal calls against the calls of one estimate."""
  pyplot = command_line.pyplot()
  parts = list(dict.fromkeys(row['part'] for row in rows))
  figure, all_axes = pyplot.subplots(1, len(parts), figsize=(10, 4))
  for axes, part in zip(all_axes, parts, strict=True):
    group = [row for row in rows if row['part'] == part]
    for name in dict.fromkeys(row['estimator'] for row in group):
      points = [row for row in group if row['estimator'] == name]
      errors = [row['standard_error'] for row in points]
      axes.errorbar(
        [row['calls'] for row in points],
        errors,
        [
          e * row['relative_error']
          for e, row in zip(errors, points, strict=True)
        ],
        marker='o',
        capsize=3,
        label=name,
      )
    axes.set_xscale('log', base=2)
    axes.set_yscale('log')
    axes.set(
      title=part,
      xlabel='network calls of one estimate',
      ylabel=f'standard error at {_QUOTED_CALLS} calls, nats per token',
    )
  all_axes[0].legend(fontsize='small', loc='lower left')
  figure.tight_layout()
  figure.savefig(path, dpi=150)


def main(argv):
  del argv
  command_line.check_outputs(plot=_PLOT.value, numbers=_JSON.value)
  path = directory.find(_CHECKPOINT.value)
  model = directory.load(path)
  length = _LENGTH.value
  if length > model.config.max_length:
    raise ValueError(
      f'--length={length} is more than the length {model.config.max_length} '
      'of the model'
    )
  rows = run(model, texts(model, path, length, _NUM_TEXTS.value))
  print(
    f'{_NUM_TEXTS.value} texts of {length} tokens; nats per token; the error '
    'is that of one text\n'
  )
  print(table(rows))
  command_line.write_json(
    _JSON.value,
    {
      'checkpoint': str(path),
      'length': length,
      'num_texts': _NUM_TEXTS.value,
      'budget': _BUDGET.value,
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
