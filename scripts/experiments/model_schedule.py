"""Quality against arithmetic, with a small model at some of the steps.

  python scripts/experiments/model_schedule.py --plot=schedule.png

A small model takes the place of a large one at a quarter and at half of the
calls: at the first, the middle or the last ones, or half of them at either end.
The exact reverse kernel on equal intervals, from nothing (Sedykh et al. 2026,
"Not all denoising steps are equal", arXiv:2604.02340). Quality is measured in
two ways:

* the bound on held-out text of the sampler as it is, a chain of so many steps
  with these models, above that of the large model alone. Step k adds its reveal
  probability times -log p of the masked tokens, so one pass of each model over
  every noise level gives the bound of all schedules, on the same text and
  masks: the differences are sharp;
* samples, as in step_count.py: bits per character under an order-3 character
  model of the training text, and beside it the entropy of the tokens and the
  share of repeated word 4-grams, since repetitive text needs few bits.

Means over windows and samples, with their standard error.

Arithmetic is counted from the shapes of the parameters: 2 operations for each
entry of each matrix and each token (the embedding once, as the head), and
4 * length * model_dim for attention in each layer.

About a minute for the shipped models, a third of it compilation. --large and
--small take any two models with the same tokenizer.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags
from jaxtyping import Array, Float, Int

from mdlm_jax import command_line, draws, provenance, rules, schedules
from mdlm_jax.model_schedule import by_step
from mdlm_jax.models import directory
from mdlm_jax.models.transformer import TransformerConfig
from mdlm_jax.predict import corrupted_log_probs
from mdlm_jax.sample_quality import measures, reference, samples
from mdlm_jax.sample_quality.measures import MEASURES
from mdlm_jax.schedules import Schedule, reveal_probability

_LARGE = flags.DEFINE_string(
  'large',
  None,
  'A model directory, or the --workdir of a training run. Default: the model '
  'that comes with the package.',
)
_SMALL = flags.DEFINE_string(
  'small', None, 'The same. Default: the small model of the package.'
)
_LENGTH = flags.DEFINE_integer(
  'length',
  None,
  'Tokens per sample. Default: 64, or what both models can take if less.',
  8,
)
_STEPS = flags.DEFINE_integer('steps', 32, 'Network calls.', 4)
_NUM_SAMPLES = flags.DEFINE_integer('num_samples', 32, 'Samples per point.', 2)
_NUM_WINDOWS = flags.DEFINE_integer(
  'num_windows', 32, 'Windows of held-out text for the bound.', 2
)
_TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Of the draws.', 0.0)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the samples.', 0, 2**32 - 1)
_PLOT = flags.DEFINE_string('plot', None, 'Writes a plot to this file.')
_JSON = flags.DEFINE_string('json', None, 'Writes the numbers to this file.')

_DEFAULT_LENGTH = 64
PLACES = ('early', 'middle', 'late', 'both ends')
SHARES = (0.25, 0.5)
COLUMNS = {
  'bound_excess': ('bound - large', 'bound above large, bits/char'),
  **MEASURES,
}


class Segments(NamedTuple):
  """Which model runs from which step on.

  Attributes:
    small: whether it is the small one.
    starts: the first step of each segment, from 0.
  """

  small: tuple[bool, ...]
  starts: tuple[int, ...]


def segments(place: str, num_small: int, num_steps: int) -> Segments:
  """Where `num_small` of the calls go to the small model.

  Example:
    >>> segments('middle', 2, 6)
    Segments(small=(False, True, False), starts=(0, 2, 4))
  """
  before, after = num_small // 2, num_small - num_small // 2
  is_small = np.zeros(num_steps, bool)
  if place == 'early':
    is_small[:num_small] = True
  elif place == 'late':
    is_small[num_steps - num_small :] = True
  elif place == 'middle':
    start = (num_steps - num_small) // 2
    is_small[start : start + num_small] = True
  else:
    is_small[:before] = is_small[num_steps - after :] = True
  starts = [0, *(np.flatnonzero(is_small[1:] != is_small[:-1]) + 1).tolist()]
  return Segments(tuple(is_small[starts].tolist()), tuple(starts))


def small_calls(parts: Segments, num_steps: int) -> int:
  """Calls of the small model."""
  lengths = np.diff([*parts.starts, num_steps])
  return int(lengths[list(parts.small)].sum())


def operations(config: TransformerConfig, length: int) -> int:
  """Multiplications and additions of one call on one row of `length` tokens."""
  dim, kv_dim = config.model_dim, config.kv_heads * config.head_dim
  layer = 2 * dim * dim + 2 * dim * kv_dim + 3 * dim * config.mlp_dim
  matrices = config.num_layers * layer + config.vocab_size * dim
  attention = config.num_layers * 4 * length * dim
  return length * (2 * matrices + attention)


def points(num_steps: int) -> list[tuple[str, int]]:
  """Every place with its number of small calls, from none to all.

  Example:
    >>> points(8)[:3]
    [('none', 0), ('early', 2), ('early', 4)]
  """
  some = [
    (place, round(share * num_steps)) for place in PLACES for share in SHARES
  ]
  return [('none', 0), *some, ('all', num_steps)]


def step_bits(
  model, ids: Int[Array, 'N L'], schedule: Schedule, num_steps: int, seed: int
) -> Float[np.ndarray, 'steps N']:
  """What each step adds to the bound of each window, in bits.

  The steps of the reverse kernel on equal intervals, from the first call on;
  other models see the same masks.
  """
  grid = jnp.array(schedules.uniform_grid(num_steps))
  key = jax.random.key(seed)

  @jax.jit
  def all_steps(params):
    def one_step(step):
      t, s = grid[step], grid[step + 1]
      log_probs, masked = corrupted_log_probs(
        model.denoiser,
        params,
        jax.random.fold_in(key, step),
        ids,
        jnp.full(len(ids), t),
        jnp.ones(ids.shape, bool),
        vocab=model.vocab,
        schedule=schedule,
        row_ids=jnp.arange(len(ids)),
      )
      nats = -jnp.where(masked, log_probs, 0.0).sum(1)
      return reveal_probability(schedule, t, s) * nats / math.log(2)

    return jax.lax.map(one_step, jnp.arange(num_steps))

  return np.asarray(all_steps(model.params))


def held_out_windows(
  text: str, tokenizer, length: int, count: int
) -> tuple[Int[Array, 'N L'], Int[np.ndarray, 'N']]:
  """Windows spread evenly over a text, and the characters of each."""
  ids = np.asarray(tokenizer.encode(text))
  if len(ids) < length:
    raise ValueError(f'the held-out text has {len(ids)} tokens, not {length}')
  starts = np.linspace(0, len(ids) - length, count).astype(int)
  windows = ids[starts[:, None] + np.arange(length)]
  sizes = np.array([len(tokenizer.decode(window)) for window in windows])
  return jnp.asarray(windows, jnp.int32), sizes


def bound_excess(
  bits: Float[np.ndarray, '2 steps N'],
  sizes: Int[np.ndarray, 'N'],
  parts: Segments,
) -> dict:
  """Bits per character above the large model alone, with its standard error.

  Args:
    bits: `step_bits` of the large and of the small model.
    sizes: characters of each window.
    parts: which model runs when.
  """
  steps = np.arange(bits.shape[1])
  segment = np.searchsorted(parts.starts, steps, side='right') - 1
  is_small = np.array(parts.small)[segment]
  excess = (bits[1] - bits[0])[is_small].sum(0)
  # A ratio of sums over the windows, and the spread of its residuals.
  ratio = excess.sum() / sizes.sum()
  residuals = (excess - ratio * sizes) / sizes.mean()
  error = np.std(residuals, ddof=1) / math.sqrt(len(sizes))
  return {'bound_excess': float(ratio), 'bound_excess_error': float(error)}


def run(large, small, compared, length: int, num_steps: int) -> list[dict]:
  """One dictionary per point; the last is real text."""
  rule = rules.kernel(schedules.uniform_grid(num_steps), large.schedule)
  draw = draws.categorical(temperature=_TEMPERATURE.value)
  costs = operations(large.config, length), operations(small.config, length)
  windows, window_sizes = held_out_windows(
    compared.held_out, large.tokenizer, length, _NUM_WINDOWS.value
  )
  bits = np.stack(
    [
      step_bits(model, windows, large.schedule, num_steps, _SEED.value)
      for model in (large, small)
    ]
  )
  rows, all_texts = [], []
  for place, num_small in tqdm.tqdm(
    points(num_steps), unit='point', dynamic_ncols=True
  ):
    parts = segments(place, num_small, num_steps)
    models = [small if is_small else large for is_small in parts.small]
    written, _ = samples.from_model(
      by_step([model.denoiser for model in models], parts.starts),
      tuple(model.params for model in models),
      jax.random.key(_SEED.value),
      large.tokenizer,
      num_samples=_NUM_SAMPLES.value,
      length=length,
      rule=rule,
      draw=draw,
    )
    all_texts += written.texts
    by_small = small_calls(parts, num_steps)
    cost = (num_steps - by_small) * costs[0] + by_small * costs[1]
    rows.append(
      {
        'small_model': place,
        'small_calls': by_small,
        'operations_per_sample': cost,
        **bound_excess(bits, window_sizes, parts),
        **measures.measure(written, model=compared.model),
      }
    )
  real = samples.real(
    compared.held_out, large.tokenizer, all_texts, _NUM_SAMPLES.value
  )
  numbers = measures.measure(real, model=compared.model)
  return [
    *rows,
    {
      'small_model': 'real text',
      'small_calls': None,
      'operations_per_sample': None,
      **numbers,
    },
  ]


def table(rows: Sequence[dict]) -> str:
  """The numbers as text."""
  titles = measures.titles(COLUMNS)
  lines = [f'{"small model":11s} {"calls":>5s} {"GFLOP":>7s}{titles}']
  for row in rows:
    numbers = measures.cells(row, COLUMNS)
    cost = row['operations_per_sample']
    calls = '' if cost is None else row['small_calls']
    giga = '' if cost is None else f'{cost / 1e9:.2f}'
    lines.append(f'{row["small_model"]:11s} {calls:>5} {giga:>7}{numbers}')
  return '\n'.join(lines)


def plot(rows: Sequence[dict], path: str) -> None:
  """Each measure against arithmetic, a line per place of the small model."""
  pyplot = command_line.pyplot()
  figure, all_axes = pyplot.subplots(1, len(COLUMNS), figsize=(19, 3.6))
  *some, real = rows
  for axes, (name, (_, title)) in zip(all_axes, COLUMNS.items(), strict=True):
    for shift, place in enumerate(PLACES):
      group = [r for r in some if r['small_model'] in (place, 'none', 'all')]
      group.sort(key=lambda row: row['small_calls'])
      axes.errorbar(
        # A little apart, so that the bars do not hide each other.
        [
          row['operations_per_sample'] / 1e9 * (1 + 0.008 * shift)
          for row in group
        ],
        [row[name] for row in group],
        [row[f'{name}_error'] for row in group],
        marker='o',
        capsize=3,
        label=place,
      )
    if name in real:
      axes.axhline(real[name], color='k', linestyle='--', label='real text')
    axes.set(xlabel='GFLOP per sample', title=title)
  all_axes[-1].legend(title='small model', fontsize='small')
  figure.tight_layout()
  figure.savefig(path, dpi=150)


def check_pair(large, small, length: int) -> None:
  """ValueError for models that cannot take turns."""
  if large.tokenizer.to_json() != small.tokenizer.to_json():
    raise ValueError('--large and --small have different tokenizers')
  longest = min(large.config.max_length, small.config.max_length)
  if length > longest:
    raise ValueError(
      f'--length={length} is more than the length {longest} of the models'
    )


def main(argv):
  del argv
  command_line.check_outputs(plot=_PLOT.value, numbers=_JSON.value)
  path = directory.find(_LARGE.value)
  small_path = (
    directory.find(_SMALL.value)
    if _SMALL.value
    else directory.find().parent / 'sotu_small'
  )
  large, small = directory.load(path), directory.load(small_path)
  length = _LENGTH.value or min(
    _DEFAULT_LENGTH, large.config.max_length, small.config.max_length
  )
  check_pair(large, small, length)
  compared = reference.read(path)
  rows = run(large, small, compared, length, _STEPS.value)
  print(
    f'{_NUM_SAMPLES.value} samples of {length} tokens in {_STEPS.value} calls '
    f'per point, temperature {_TEMPERATURE.value:g}; calls of the small model, '
    '10^9 operations per sample; bound on held-out text above the large model '
    'alone, bits per character; order-3 bits per character, entropy in nats, '
    'repeated 4-grams, distinct word pairs\n'
  )
  print(table(rows))
  command_line.write_json(
    _JSON.value,
    {
      'large': str(path),
      'small': str(small_path),
      'length': length,
      'steps': _STEPS.value,
      'num_samples': _NUM_SAMPLES.value,
      'num_windows': _NUM_WINDOWS.value,
      'temperature': _TEMPERATURE.value,
      'seed': _SEED.value,
      'dtype': large.config.dtype,
      **provenance.environment(),
      'results': rows,
    },
  )
  if _PLOT.value:
    plot(rows, _PLOT.value)


if __name__ == '__main__':
  command_line.run(main)
