"""Generates text with a masked diffusion language model.

  python scripts/sample.py                            from nothing
  python scripts/sample.py --prompt='The value of '   goes on from a prefix
  python scripts/sample.py --template='The {24} of the people.'   fills a hole
  python scripts/sample.py --tour                     all three, step by step

Without --checkpoint the model that comes with the package is used. In a
template {24} is a hole of 24 tokens (characters, for a model of characters);
the braces themselves are written {{ and }}.

Decoding has independent axes (docs/decoding.md):

  values      --temperature --top_k --top_p --min_p --repetition_penalty
              --cfg_scale
  positions   --rule, its settings, --score, --steps
  blocks      --block_length --attention_block --eos --stop_at_eos
  cache       --cache --refresh_interval --audit_cache
  correction  --rule=remdm_..., p2 and others; --edit_threshold and
              --refine_rounds beside any rule
"""

import json
import math
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from absl import flags

from mdlm_jax import (
  canvas,
  command_line,
  decoding_flags,
  model_flags,
  named_rules,
  provenance,
  sampling,
)
from mdlm_jax.decoding_flags import Chosen
from mdlm_jax.models.pretrained import Pretrained

__doc__ += f"""
The rules, with the settings that each reads and their defaults:

{named_rules.table()}
"""

# Many published models are declared longer than anybody fills unasked.
_MOST_NEW_TOKENS = 1024

_MODEL = model_flags.define(stop_ids=True)
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
  "New tokens after the prompt. Default: what is left of the model's length, "
  f'at most {_MOST_NEW_TOKENS}. A model that attends by blocks takes any '
  'length: its context slides.',
)
_DECODING = decoding_flags.define()
_SEED = flags.DEFINE_integer(
  'seed', 0, 'Seed of all random numbers.', 0, 2**32 - 1
)
_NUM_SAMPLES = flags.DEFINE_integer(
  'num_samples', 1, 'Samples, generated as one batch.', lower_bound=1
)
_SHOW_STEPS = flags.DEFINE_integer(
  'show_steps', 0, 'Intermediate canvases to show.', lower_bound=0
)
_PROGRESS = flags.DEFINE_bool(
  'progress',
  None,
  'Shows the calls made and the time left, on stderr. Default: on a terminal.',
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
  if _LENGTH.value is not None and _LENGTH.value < 1:
    raise ValueError(f'--length={_LENGTH.value} must be at least 1')
  decoding_flags.check(_DECODING)


def _exclude(present: dict[str, bool]) -> None:
  names = [name for name, is_present in present.items() if is_present]
  if len(names) > 1:
    raise ValueError(f'{" and ".join(names)} exclude each other')


def make_rows(model: Pretrained) -> list[Row]:
  """The rows that the flags ask for, None at every slot to be generated."""
  encode, max_length = model.tokenizer.encode, model.config.max_length
  if _TOUR.value:
    rows = tour_rows(model)
  elif _TEMPLATE.value is not None:
    row = canvas.row_from_template(_TEMPLATE.value, encode)
    rows = [row] * _NUM_SAMPLES.value
  else:
    prompt = make_prompt(model)
    left = min(max_length - len(prompt), _MOST_NEW_TOKENS)
    length = _LENGTH.value or max(left, 1)
    rows = [[*prompt, *[None] * length]] * _NUM_SAMPLES.value
  if model.config.attention_block is not None:
    return rows  # Its context slides over a row of any length.
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


def make_prompt(model: Pretrained) -> list[int]:
  """The ids of the prompt, none without one."""
  if _PROMPT_IDS.value is None:
    return model.tokenizer.encode(_PROMPT.value or '').tolist()
  ids = []
  for word in _PROMPT_IDS.value.split(',') if _PROMPT_IDS.value else ():
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


def tour_rows(model: Pretrained) -> list[Row]:
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


class Generated(NamedTuple):
  """A finished batch and what it cost."""

  result: sampling.SampleResult
  compile_seconds: float
  run_seconds: float

  def cut(self, num_new: list[int]) -> 'Generated':
    """Counts at most so many generated tokens of each row."""
    num_tokens = np.minimum(self.result.num_tokens, num_new)
    return self._replace(result=self.result._replace(num_tokens=num_tokens))


def generate(
  model: Pretrained,
  filled: canvas.Canvas,
  chosen: Chosen,
  *,
  trajectory: bool,
  on_call: Callable | None = None,
) -> Generated:
  """Compiles the sampler and runs it once, each timed."""
  arguments = (model.params, jax.random.key(_SEED.value), filled)
  static = {**chosen.static, 'trajectory': trajectory, 'on_call': on_call}
  sampler = jax.jit(sampling.sample, static_argnames=('denoiser', *static))
  start = time.perf_counter()
  compiled = sampler.lower(
    model.denoiser, *arguments, **static, **chosen.arrays
  ).compile()
  middle = time.perf_counter()
  result = jax.block_until_ready(compiled(*arguments, **chosen.arrays))
  end = time.perf_counter()
  jax.effects_barrier()  # The last words of `on_call`.
  sampling.check_finite(result)
  return Generated(jax.device_get(result), middle - start, end - middle)


def settings(model: Pretrained, path, chosen: Chosen) -> dict:
  """All that is needed to generate the same samples again."""
  return {
    'checkpoint': str(path),
    'prompt': _PROMPT.value,
    'prompt_ids': _PROMPT_IDS.value,
    'template': _TEMPLATE.value,
    'tour': _TOUR.value,
    **chosen.settings,
    'seed': _SEED.value,
    'num_samples': _NUM_SAMPLES.value,
    'dtype': model.config.dtype,
    'int8': _MODEL['int8'].value,
    'eos_ids': model.vocab.eos_ids,
    **provenance.environment(),
  }


def print_json(model, path, rows, generated: Generated, chosen: Chosen) -> None:
  """One line per sample; what belongs to a call not made is null."""
  result = generated.result

  def of_calls(values):
    return [None if math.isnan(value) else value for value in values.tolist()]

  def of_cache(result, b):
    record = {}
    if result.computed is not None:
      record['computed'] = result.computed[:, b].tolist()
    if result.cache_error is not None:
      record['cache_error'] = of_calls(result.cache_error[:, b])
    return record

  for b, row in enumerate(rows):
    ids = result.ids[b, : len(row)]
    record = {
      'text': model.tokenizer.decode(ids),
      'ids': ids.tolist(),
      'new_tokens': row.count(None),
      'num_tokens': int(result.num_tokens[b]),
      'calls': int(result.calls),
      'calls_per_block': result.calls_per_block.tolist(),
      'calls_per_row': int(result.calls_per_row[b]),
      'tokens_per_call': float(result.tokens_per_call[b]),
      'changes': int(result.changes[b].sum()),
      'requested_t': of_calls(result.requested_t[:, b]),
      'masked_fraction': of_calls(result.masked_fraction[:, b]),
      **of_cache(result, b),
      'settings': settings(model, path, chosen),
    }
    print(json.dumps(record))


def print_text(model, path, rows, generated, chosen, num_canvases: int) -> None:
  """For a person: the samples, with some of the canvases on the way."""
  result = generated.result
  size = sum(x.size for x in jax.tree.leaves(model.params))
  print(
    f'{path}: {size:,} parameters, {model.vocab.size} tokens, length '
    f'{model.config.max_length}\n'
    f'{len(rows)} sample(s) by {int(result.calls)} network calls with '
    f'--rule={chosen.settings["rule"]} '
    f'--temperature={chosen.settings["temperature"]:g} --seed={_SEED.value}: '
    f'{generated.run_seconds:.2f} s, after {generated.compile_seconds:.2f} s '
    'of compilation'
  )
  if result.computed is not None:
    print_cache(result, chosen)
  titles = [f'sample {b + 1}' for b in range(len(rows))]
  if _TOUR.value:
    titles = ['from nothing', 'from a prefix', 'into a hole']
  for b, (row, title) in enumerate(zip(rows, titles, strict=True)):
    calls = int(result.calls_per_row[b])
    print(
      f'\n=== {title}: {int(result.num_tokens[b])} new tokens in {calls} '
      f'call(s), {result.tokens_per_call[b]:.2g} per call'
    )
    # Evenly spaced, without the empty canvas and the finished one.
    made = np.flatnonzero(~np.isnan(result.masked_fraction[:, b]))
    shown = [
      i * len(made) // (num_canvases + 1) for i in range(1, num_canvases + 1)
    ]
    for call in dict.fromkeys(shown):
      if call > 0:
        ids = result.trajectory[made[call - 1], b, : len(row)]
        print(f'--- after call {call}')
        print(model.tokenizer.decode(ids, mask=HOLE))
    if shown:
      print(f'--- after call {len(made)}')
    print(model.tokenizer.decode(result.ids[b, : len(row)]))


def print_cache(result, chosen) -> None:
  """What the cache saved, and what it cost."""
  kind = 'exact' if chosen.static['cache'].is_exact else 'approximate'
  length = result.ids.shape[1]
  made = result.computed[result.computed.any(1)]
  line = (
    f'--cache={chosen.settings["cache"]} ({kind}): {made.mean():.1f} of '
    f'{length} tokens computed a call'
  )
  if result.cache_error is not None:
    line += f', logits off by at most {np.nanmax(result.cache_error):.2g}'
  print(line)


def main(argv):
  del argv
  check_flags()  # Before the model is loaded, so that a mistake costs no time.
  path, model = model_flags.load(_MODEL)
  model = decoding_flags.with_attention_block(_DECODING, model)
  rows = make_rows(model)
  whole = canvas.whole_blocks(
    rows, model.config.attention_block, model.config.max_length
  )
  filled = canvas.from_rows(whole, model.vocab)
  chosen = decoding_flags.decoding_of(
    _DECODING,
    model,
    filled,
    num_equal_rows=_NUM_SAMPLES.value,
  )
  num_canvases = _SHOW_STEPS.value
  if _TOUR.value and not _SHOW_STEPS.present and not _JSON.value:
    num_canvases = min(_TOUR_CANVASES, chosen.num_calls - 1)
  if num_canvases >= chosen.num_calls:
    raise ValueError(
      f'--show_steps={num_canvases}: {chosen.num_calls} calls have '
      f'{chosen.num_calls - 1} canvases on the way'
    )
  progress = None
  if sys.stderr.isatty() if _PROGRESS.value is None else _PROGRESS.value:
    progress = command_line.Progress()
  generated = generate(
    model, filled, chosen, trajectory=num_canvases > 0, on_call=progress
  )
  if progress is not None:
    progress.close()
  generated = generated.cut([row.count(None) for row in rows])
  if _JSON.value:
    print_json(model, path, rows, generated, chosen)
  else:
    print_text(model, path, rows, generated, chosen, num_canvases)


if __name__ == '__main__':
  command_line.run(main)
