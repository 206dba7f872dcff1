"""Generates text with a masked diffusion language model.

  python scripts/sample.py                            from nothing
  python scripts/sample.py --prompt='The value of '   goes on from a prefix
  python scripts/sample.py --template='The {24} of the people.'   fills a hole
  python scripts/sample.py --tour                     all three, step by step

Without --checkpoint the model that comes with the package is used. In a
template {24} is a hole of 24 tokens (characters, for a model of characters);
the braces themselves are written {{ and }}.
"""

import json
import time
from typing import NamedTuple

import jax
from absl import flags

from mdlm_jax import (
  canvas,
  command_line,
  draws,
  evaluation,
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
_PROMPT = flags.DEFINE_string('prompt', None, 'Text to go on from.')
_PROMPT_IDS = flags.DEFINE_string(
  'prompt_ids', None, 'Token ids to go on from, such as 5,6,7.'
)
_TEMPLATE = flags.DEFINE_string(
  'template',
  None,
  'Text with holes to be filled: {12} is a hole of 12 tokens, {{ and }} are '
  'the braces themselves.',
)
_TOUR = flags.DEFINE_bool(
  'tour',
  False,
  'Generates from nothing, from a fixed prefix and into a hole, and shows '
  'intermediate canvases.',
)
_LENGTH = flags.DEFINE_integer(
  'length',
  None,
  "New tokens after the prompt. Default: what is left of the model's length.",
)
_RULE = flags.DEFINE_enum(
  'rule',
  'confidence',
  ['kernel', 'confidence'],
  'Which positions a step reveals: the most confident ones, or a random '
  'subset, exactly as the reverse process has it (kernel).',
)
_STEPS = flags.DEFINE_integer(
  'steps', None, 'Network calls. Default: one per new token.'
)
_GRID = flags.DEFINE_enum(
  'grid',
  'uniform',
  ['uniform', 'cosine'],
  'How many tokens each step reveals: equally many, or few first.',
)
_SCORE = flags.DEFINE_enum(
  'score',
  'row_maximum',
  sorted(draws.SCORES),
  'What --rule=confidence calls confident.',
)
_TEMPERATURE = flags.DEFINE_float(
  'temperature',
  0.7,
  'Below 1 the likelier tokens gain; 1 is the model itself, 0 takes the '
  'likeliest.',
)
_TOP_K = flags.DEFINE_integer('top_k', None, 'Draws from the k likeliest only.')
_TOP_P = flags.DEFINE_float(
  'top_p', None, 'Draws from the likeliest that hold this probability only.'
)
_SEED = flags.DEFINE_integer(
  'seed', 0, 'Seed of all random numbers.', 0, 2**32 - 1
)
_NUM_SAMPLES = flags.DEFINE_integer(
  'num_samples', 1, 'Samples, generated as one batch.', lower_bound=1
)
_SHOW_STEPS = flags.DEFINE_integer(
  'show_steps', 0, 'Intermediate canvases to show.', lower_bound=0
)
_JSON = flags.DEFINE_bool('json', False, 'Prints one line of JSON per sample.')

HOLE = '\N{LIGHT SHADE}'
_TOUR_PREFIX = 'The value of '
_TOUR_SIDES = ('It is ', ' in this case.')
_TOUR_LENGTH = 256
_TOUR_CANVASES = 3

Row = list[int | None]


def check_flags() -> None:
  """Refuses what is out of range and what could not act."""
  _exclude(
    {
      '--prompt': _PROMPT.present,
      '--prompt_ids': _PROMPT_IDS.present,
      '--template': _TEMPLATE.present,
      '--tour': _TOUR.value,
    }
  )
  _exclude({'--template': _TEMPLATE.present, '--length': _LENGTH.present})
  for flag in (_LENGTH, _NUM_SAMPLES):
    _exclude({'--tour': _TOUR.value, f'--{flag.name}': flag.present})
  _exclude({'--json': _JSON.value, '--show_steps': _SHOW_STEPS.present})
  for flag in (_LENGTH, _STEPS):
    if flag.value is not None and flag.value < 1:
      raise ValueError(f'--{flag.name}={flag.value} must be at least 1')
  if _RULE.value == 'kernel' and _SCORE.present:
    raise ValueError(
      '--score cannot act with --rule=kernel, whose positions are random; it '
      'needs --rule=confidence'
    )
  fixed_order = _RULE.value == 'confidence' and _SCORE.value != 'random'
  if _TEMPERATURE.value == 0 and fixed_order and _NUM_SAMPLES.value > 1:
    raise ValueError(
      f'--num_samples={_NUM_SAMPLES.value} would be equal samples: nothing is '
      f'random with --temperature=0 and --score={_SCORE.value}'
    )


def _exclude(present: dict[str, bool]) -> None:
  names = [name for name, is_present in present.items() if is_present]
  if len(names) > 1:
    raise ValueError(f'{" and ".join(names)} exclude each other')


def make_rows(model: directory.Pretrained) -> list[Row]:
  """The rows that the flags ask for, None at every slot to be generated."""
  encode, max_length = model.tokenizer.encode, model.config.max_length
  if _TOUR.value:
    rows = tour_rows(model)
  elif _TEMPLATE.value is not None:
    row = canvas.row_from_template(_TEMPLATE.value, encode)
    rows = [row] * _NUM_SAMPLES.value
  else:
    prompt = make_prompt(model)
    length = _LENGTH.value or max(max_length - len(prompt), 1)
    _check_fits(len(prompt), length, max_length)
    rows = [[*prompt, *[None] * length]] * _NUM_SAMPLES.value
  for row in rows:
    new = row.count(None)
    _check_fits(len(row) - new, new, max_length)
  return rows


def _check_fits(given: int, new: int, max_length: int) -> None:
  if given + new > max_length:
    raise ValueError(
      f'{given} given and {new} new tokens are {given + new}, more than the '
      f'length {max_length} of the model'
    )


def make_prompt(model: directory.Pretrained) -> list[int]:
  """The ids of the prompt, none without one."""
  if _PROMPT_IDS.value is None:
    return model.tokenizer.encode(_PROMPT.value or '').tolist()
  ids = []
  for word in _PROMPT_IDS.value.split(','):
    try:
      ids.append(int(word))
    except ValueError:
      raise ValueError(
        f'--prompt_ids={_PROMPT_IDS.value}: {word!r} is not a number; ids are '
        'written 5,6,7'
      ) from None
    reserved = (model.vocab.mask_id, model.vocab.protected_pad_id)
    if not 0 <= ids[-1] < model.vocab.size or ids[-1] in reserved:
      raise ValueError(
        f'--prompt_ids: {ids[-1]} is no id of a token; ids lie in '
        f'[0, {model.vocab.size}), without MASK and PAD'
      )
  return ids


def tour_rows(model: directory.Pretrained) -> list[Row]:
  """From nothing, from a prefix, and a hole between two pieces of text."""
  encode = model.tokenizer.encode
  length = min(model.config.max_length, _TOUR_LENGTH)
  prefix = encode(_TOUR_PREFIX).tolist()
  left, right = (encode(text).tolist() for text in _TOUR_SIDES)
  hole = max((length - len(left) - len(right)) // 2, 1)
  return [
    [None] * length,
    [*prefix, *[None] * max(length - len(prefix), 1)],
    [*left, *[None] * hole, *right],
  ]


def make_rule(num_steps: int, schedule: schedules.Schedule) -> rules.Rule:
  """The rule that the flags ask for."""
  if _RULE.value == 'kernel':
    grids = {
      'uniform': schedules.uniform_grid,
      'cosine': schedules.cosine_grid,
    }
    return rules.kernel(grids[_GRID.value](num_steps), schedule)
  grid = schedules.cosine_grid(num_steps) if _GRID.value == 'cosine' else None
  return rules.by_confidence(num_steps, grid=grid, schedule=schedule)


class Generated(NamedTuple):
  """A finished batch and what it cost."""

  result: sampling.SampleResult
  compile_seconds: float
  run_seconds: float


def generate(model, rows, rule, draw, *, trajectory: bool) -> Generated:
  """Compiles the sampler and runs it once, each timed."""
  arguments = (
    model.params,
    jax.random.key(_SEED.value),
    canvas.from_rows(rows, model.vocab),
  )
  static = {
    'vocab': model.vocab,
    'rule': rule,
    'draw': draw,
    'trajectory': trajectory,
  }
  sampler = jax.jit(sampling.sample, static_argnames=('denoiser', *static))
  start = time.perf_counter()
  compiled = sampler.lower(model.denoiser, *arguments, **static).compile()
  middle = time.perf_counter()
  result = jax.block_until_ready(compiled(*arguments))
  end = time.perf_counter()
  sampling.check_finite(result)
  return Generated(jax.device_get(result), middle - start, end - middle)


def settings(model: directory.Pretrained, path, num_steps: int) -> dict:
  """All that is needed to generate the same samples again."""
  by_confidence = _RULE.value == 'confidence'
  return {
    'checkpoint': str(path),
    'prompt': _PROMPT.value,
    'prompt_ids': _PROMPT_IDS.value,
    'template': _TEMPLATE.value,
    'tour': _TOUR.value,
    'rule': _RULE.value,
    'steps': num_steps,
    'grid': _GRID.value,
    'score': _SCORE.value if by_confidence else None,
    'score_distribution': 'untempered' if by_confidence else None,
    'temperature': _TEMPERATURE.value,
    'top_k': _TOP_K.value,
    'top_p': _TOP_P.value,
    'seed': _SEED.value,
    'num_samples': _NUM_SAMPLES.value,
    'dtype': model.config.dtype,
    **evaluation.environment(),
  }


def print_json(model, path, rows, generated: Generated, num_steps) -> None:
  """One line per sample."""
  result = generated.result
  for b, row in enumerate(rows):
    ids = result.ids[b, : len(row)]
    record = {
      'text': model.tokenizer.decode(ids),
      'ids': ids.tolist(),
      'new_tokens': row.count(None),
      'calls': int(result.calls),
      'tokens_per_call': row.count(None) / int(result.calls),
      'requested_t': result.requested_t[:, b].tolist(),
      'masked_fraction': result.masked_fraction[:, b].tolist(),
      'settings': settings(model, path, num_steps),
    }
    print(json.dumps(record))


def print_text(model, path, rows, generated, num_canvases: int) -> None:
  """For a person: the samples, with some of the canvases on the way."""
  result, calls = generated.result, int(generated.result.calls)
  size = sum(x.size for x in jax.tree.leaves(model.params))
  print(
    f'{path}: {size:,} parameters, {model.vocab.size} tokens, length '
    f'{model.config.max_length}\n'
    f'{len(rows)} sample(s) by {calls} network calls with --rule={_RULE.value} '
    f'--temperature={_TEMPERATURE.value:g} --seed={_SEED.value}: '
    f'{generated.run_seconds:.2f} s, after {generated.compile_seconds:.2f} s '
    'of compilation'
  )
  titles = [f'sample {b + 1}' for b in range(len(rows))]
  if _TOUR.value:
    titles = ['from nothing', 'from a prefix', 'into a hole']
  # Evenly spaced, without the empty canvas and the finished one.
  shown = [i * calls // (num_canvases + 1) for i in range(1, num_canvases + 1)]
  for b, (row, title) in enumerate(zip(rows, titles, strict=True)):
    new = row.count(None)
    print(f'\n=== {title}: {new} new tokens, {new / calls:.2g} per call')
    for call in shown:
      ids = result.trajectory[call - 1, b, : len(row)]
      print(f'--- after call {call}')
      print(model.tokenizer.decode(ids, mask=HOLE))
    if shown:
      print(f'--- after call {calls}')
    print(model.tokenizer.decode(result.ids[b, : len(row)]))


def main(argv):
  del argv
  check_flags()
  # Before the model is loaded, so that a mistake costs no time.
  draw = draws.categorical(
    temperature=_TEMPERATURE.value,
    top_k=_TOP_K.value,
    top_p=_TOP_P.value,
    score=draws.SCORES[_SCORE.value],
  )
  path = directory.find(_CHECKPOINT.value)
  model = directory.load(path)
  rows = make_rows(model)
  num_steps = _STEPS.value or max(row.count(None) for row in rows)
  num_canvases = _SHOW_STEPS.value
  if _TOUR.value and not _SHOW_STEPS.present and not _JSON.value:
    num_canvases = min(_TOUR_CANVASES, num_steps - 1)
  if num_canvases >= num_steps:
    raise ValueError(
      f'--show_steps={num_canvases}: {num_steps} calls have '
      f'{num_steps - 1} canvases on the way'
    )
  rule = make_rule(num_steps, model.schedule)
  generated = generate(model, rows, rule, draw, trajectory=num_canvases > 0)
  if _JSON.value:
    print_json(model, path, rows, generated, num_steps)
  else:
    print_text(model, path, rows, generated, num_canvases)


if __name__ == '__main__':
  command_line.run(main)
