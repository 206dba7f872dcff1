"""Every decoder at equal numbers of calls, on text, one axis at a time.

  python scripts/experiments/decoders.py --plot=decoders.png

The reverse kernel at temperature 1 is where the axes start: values
(temperature, filters), positions (which slots a call writes), correction
(tokens taken back); blocks (semi-autoregressive) start from decoding by
confidence. All of them make half as many network calls as there are tokens, or
fewer where edits end early. Rules that find their own number of calls stand
apart, with the calls that a row needed on average.

Bits per character of the samples under an order-3 character model of the
training text, and beside it, since repetitive text needs few bits, the entropy
of the tokens, the share of word 4-grams that a sample repeats and that of
distinct word pairs over all samples, as in step_count.py; real held-out text is
the line to compare with. Means over samples, with their standard error.

Takes about four minutes for the shipped model, nearly all of it compilation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import tqdm
from absl import flags

from mdlm_jax import blocks, command_line, draws, provenance, rules, schedules
from mdlm_jax.draws import Draw
from mdlm_jax.models import directory
from mdlm_jax.rules import Rule, sigmas
from mdlm_jax.sample_quality import measures, reference, samples
from mdlm_jax.sample_quality.measures import MEASURES

AXES = ('values', 'positions', 'blocks', 'correction', 'adaptive')

_CHECKPOINT = flags.DEFINE_string(
  'checkpoint',
  None,
  'A model directory, or the --workdir of a training run. Default: the model '
  'that comes with the package.',
)
_LENGTH = flags.DEFINE_integer(
  'length', 64, 'Tokens per sample, a multiple of 8.', 16
)
_NUM_SAMPLES = flags.DEFINE_integer('num_samples', 32, 'Samples per line.', 2)
_AXES = flags.DEFINE_multi_enum(
  'axes', None, AXES, 'Only these axes; the flag may be repeated.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the samples.', 0, 2**32 - 1)
_PLOT = flags.DEFINE_string('plot', None, 'Writes a plot to this file.')
_JSON = flags.DEFINE_string('json', None, 'Writes the numbers to this file.')


class Case(NamedTuple):
  """A way to decode, and the axis on which it differs from the kernel."""

  axis: str
  name: str
  rule: Rule
  draw: Draw = draws.categorical()
  block_length: int | None = None


def cases(length: int, schedule: schedules.Schedule) -> list[Case]:
  """One line of the table each; `length // 2` calls but for adaptive rules."""
  calls = length // 2
  grid = schedules.uniform_grid(calls)
  kernel = rules.kernel(grid, schedule)
  confidence = rules.by_confidence(calls)

  def values(name, **settings):
    return Case('values', name, kernel, draws.categorical(**settings))

  def by_score(name, score):
    return Case('positions', name, confidence, draws.categorical(score=score))

  def in_blocks(block_length):
    steps = blocks.steps_per_block(calls, length // block_length)
    return Case(
      'blocks',
      f'confidence, {block_length}',
      rules.by_confidence(steps),
      block_length=block_length,
    )

  def remasking(name, sigma, **options):
    rule = rules.remasking(grid, sigma, schedule, **options)
    return Case('correction', name, rule)

  loop_grid, loop_sigmas = sigmas.loop(grid, 0.05, schedule)
  return [
    values('temperature 1'),
    values('temperature 0.7', temperature=0.7),
    values('temperature 0', temperature=0.0),
    values('top-k 10', top_k=10),
    values('top-p 0.9', top_p=0.9),
    values('min-p 0.1', min_p=0.1),
    values('repetition 1.2', repetition_penalty=1.2, neighbourhood=8),
    Case('positions', 'kernel', kernel),
    Case(
      'positions',
      'kernel, cosine',
      rules.kernel(schedules.cosine_grid(calls), schedule),
    ),
    Case(
      'positions', 'first hitting, 2', rules.first_hitting(schedule, per_call=2)
    ),
    by_score('confidence', draws.row_maximum),
    by_score('drawn probability', draws.probability),
    by_score('margin', draws.margin),
    by_score('entropy', draws.negative_entropy),
    by_score('random', draws.random_order),
    Case(
      'positions',
      'maskgit',
      rules.maskgit(
        calls,
        4.5,
        counts=schedules.grid_counts(schedules.cosine_grid(calls)),
      ),
      draws.categorical(score=draws.probability),
    ),
    Case('positions', 'alg_temp 0.1', rules.by_sampled_confidence(calls, 0.1)),
    Case('positions', 'binomial', rules.by_binomial_confidence(grid, schedule)),
    Case('positions', 'left to right', rules.left_to_right(calls)),
    *(in_blocks(length // n) for n in (1, 2, 4, 8)),
    Case('correction', 'none', kernel),
    remasking('cap 0.05', sigmas.cap(grid, 0.05, schedule)),
    remasking('rescale 0.05', sigmas.rescale(grid, 0.05, schedule)),
    remasking('conf', sigmas.rescale(grid, 1.0, schedule), by_confidence=True),
    remasking(
      'switch 0.5',
      sigmas.switch(grid, sigmas.cap(grid, 0.05, schedule), 0.5),
    ),
    Case(
      'correction', 'loop', rules.remasking(loop_grid, loop_sigmas, schedule)
    ),
    remasking('forward-backward', sigmas.forward_backward(grid, schedule)),
    remasking('flow 0.5', sigmas.flow_corrector(grid, 0.5, schedule)),
    remasking('Psi 0.9', sigmas.psi(grid, 0.9, schedule)),
    Case('correction', 'P2', rules.path_planning(calls)),
    Case(
      'correction',
      'edit 0.5',
      rules.editing(rules.by_confidence(calls - 4), 0.5, 4),
    ),
    Case(
      'correction',
      'refine 4',
      rules.refined(rules.by_confidence(calls - 4), 4, length // 8),
    ),
    Case('adaptive', 'threshold 0.1', rules.threshold(0.1)),
    Case('adaptive', 'factor 4', rules.factor(4.0)),
    Case('adaptive', 'entropy bound 6', rules.entropy_bound(6.0)),
    Case('adaptive', 'KLASS 0.1, 1', rules.klass(0.1, 1.0)),
    Case('adaptive', 'dilated', rules.dilated()),
  ]


def run(model, compared: reference.Reference, length: int) -> list[dict]:
  """One dictionary per case; the last is real text."""
  chosen = [
    case
    for case in cases(length, model.schedule)
    if case.axis in (_AXES.value or AXES)
  ]
  rows, all_texts = [], []
  for case in tqdm.tqdm(chosen, unit='decoder', dynamic_ncols=True):
    written, result = samples.from_model(
      model.denoiser,
      model.params,
      jax.random.key(_SEED.value),
      model.tokenizer,
      num_samples=_NUM_SAMPLES.value,
      length=length,
      block_length=case.block_length,
      rule=case.rule,
      draw=case.draw,
      schedule=model.schedule,
    )
    all_texts += written.texts
    rows.append(
      {
        'axis': case.axis,
        'name': case.name,
        'calls': float(result.calls_per_row.mean()),
        **measures.measure(written, model=compared.model),
      }
    )
  real = samples.real(
    compared.held_out, model.tokenizer, all_texts, _NUM_SAMPLES.value
  )
  numbers = measures.measure(real, model=compared.model)
  return [*rows, {'axis': 'real text', 'name': '', 'calls': 0.0, **numbers}]


def table(rows: Sequence[dict]) -> str:
  """The numbers as text, a paragraph per axis."""
  titles = measures.titles(MEASURES)
  lines = [f'{"axis":10s}  {"decoder":17s} {"calls":>5s}{titles}']
  axis = None
  for row in rows:
    if row['axis'] != axis:
      axis = row['axis']
      lines.append('')
    numbers = measures.cells(row, MEASURES)
    calls = f'{row["calls"]:.1f}' if row['calls'] else ''
    lines.append(f'{axis:10s}  {row["name"]:17s} {calls:>5s}{numbers}')
  return '\n'.join(lines)


def plot(rows: Sequence[dict], path: str) -> None:
  """Each measure of every decoder, real text as a line."""
  pyplot = command_line.pyplot()
  *points, real = rows
  points = points[::-1]
  figure, all_axes = pyplot.subplots(
    1, len(MEASURES), figsize=(16, 1 + 0.2 * len(points)), sharey=True
  )
  y = np.arange(len(points))
  axis_names = list(dict.fromkeys(row['axis'] for row in rows))
  colors = [f'C{axis_names.index(row["axis"])}' for row in points]
  for axes, (name, (_, title)) in zip(all_axes, MEASURES.items(), strict=True):
    axes.errorbar(
      [row[name] for row in points],
      y,
      xerr=[row[f'{name}_error'] for row in points],
      fmt='none',
      ecolor=colors,
    )
    axes.scatter([row[name] for row in points], y, c=colors, s=20)
    axes.axvline(real[name], color='k', linestyle='--')
    axes.set_title(title, fontsize=10)
    for i in range(1, len(points)):
      if points[i]['axis'] != points[i - 1]['axis']:
        axes.axhline(i - 0.5, color='0.8', linewidth=0.8)
  labels = [
    f'{row["axis"]}: {row["name"]} ({row["calls"]:.0f})' for row in points
  ]
  all_axes[0].set_yticks(y, labels, fontsize=8)
  figure.suptitle(
    'one axis at a time (network calls); the nearer to real text, dashed, in '
    'all three the better',
    fontsize=10,
  )
  figure.tight_layout()
  figure.savefig(path, dpi=150)


def main(argv):
  del argv
  command_line.check_outputs(plot=_PLOT.value, numbers=_JSON.value)
  length = _LENGTH.value
  if length % 8:
    raise ValueError(f'--length={length} must be a multiple of 8')
  path = directory.find(_CHECKPOINT.value)
  model = directory.load(path)
  if length > model.config.max_length:
    raise ValueError(
      f'--length={length} is more than the length {model.config.max_length} '
      'of the model'
    )
  rows = run(model, reference.read(path), length)
  print(f'{_NUM_SAMPLES.value} samples of {length} tokens per line\n')
  print(table(rows))
  command_line.write_json(
    _JSON.value,
    {
      'checkpoint': str(path),
      'length': length,
      'num_samples': _NUM_SAMPLES.value,
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
