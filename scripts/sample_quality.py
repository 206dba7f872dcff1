"""Measures samples: generative perplexity, entropy, distinct-n, repetition.

  python scripts/sample_quality.py --judge=judge.gguf
  python scripts/sample_quality.py --judge=DIR --rule=kernel --temperature=1
  python scripts/sample_quality.py --judge=DIR --texts=samples.jsonl

Samples from nothing of the model that comes with the package, or of
--checkpoint, beside pieces of real held-out text of the same size where the
model says what text it learned from; or the texts of a file. Without --judge
all but the generative perplexity. docs/sample_quality.md says what each number
is, and which judge can be had.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from mdlm_jax import (
  canvas,
  command_line,
  decoding_flags,
  named_rules,
  provenance,
  sampling,
)
from mdlm_jax.data.corpus import read_documents
from mdlm_jax.models import causal, directory
from mdlm_jax.models.config import DTYPES
from mdlm_jax.sample_quality import judge, measures, reference, samples

__doc__ += f"""
The rules, with the settings that each reads and their defaults:

{named_rules.table()}
"""

_CHECKPOINT = flags.DEFINE_string(
  'checkpoint',
  None,
  'The sampler: a model directory, the --workdir of a training run, or a '
  'directory downloaded from a model hub. Default: the model that comes with '
  'the package. With --texts: whose tokens the entropy is of, by default those '
  'of the judge.',
)
_TEXTS = flags.DEFINE_string(
  'texts',
  None,
  'Measures these instead of sampling: a .jsonl file with a "text" on every '
  'line, as scripts/sample.py --json prints; or text files, paths or globs '
  'separated by commas, each of them one text.',
)
_JUDGE = flags.DEFINE_string(
  'judge',
  None,
  'A causal language model: a directory downloaded from a model hub, or a '
  '.gguf file.',
)
_JUDGE_DTYPE = flags.DEFINE_enum(
  'judge_dtype', 'float32', DTYPES, 'In which the judge runs.'
)
_JUDGE_CONTEXT = flags.DEFINE_integer(
  'judge_context', 1024, 'The most tokens that the judge sees at once.', 2
)
_JUDGE_BATCH_SIZE = flags.DEFINE_integer(
  'judge_batch_size', 8, 'Texts per call of the judge.', 1
)
_DECODING = decoding_flags.define()
_LENGTH = flags.DEFINE_integer(
  'length', None, "Tokens per sample. Default: the model's, up to 1024.", 1
)
_NUM_SAMPLES = flags.DEFINE_integer('num_samples', 64, 'How many.', 2)
_BATCH_SIZE = flags.DEFINE_integer(
  'batch_size', 32, 'Samples per network call; they do not depend on it.', 1
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the samples.', 0, 2**32 - 1)
_JSON = flags.DEFINE_string('json', None, 'Writes the report to this file.')

# Published models are declared to be longer than a sample should be.
_LONGEST = 1024
COLUMNS = {
  'generative_perplexity': ('gen. perplexity',),
  'entropy': ('entropy',),
  'pooled_entropy': ('pooled entropy',),
  'distinct_2': ('distinct-2',),
  'repetition': ('repetition',),
}


def check_flags() -> None:
  """Refuses what could not act."""
  command_line.check_outputs(plot=None, numbers=_JSON.value)
  if _TEXTS.value is not None:
    for holder in (*_DECODING.values(), _LENGTH, _NUM_SAMPLES, _SEED):
      if holder.present:
        raise ValueError(f'--{holder.name} cannot act on given --texts')
    if _CHECKPOINT.value is None and _JUDGE.value is None:
      raise ValueError('--texts needs --checkpoint or --judge, for its tokens')
  if _JUDGE.value is None:
    for holder in (_JUDGE_DTYPE, _JUDGE_CONTEXT, _JUDGE_BATCH_SIZE):
      if holder.present:
        raise ValueError(f'--{holder.name} cannot act without --judge')
  decoding_flags.check(_DECODING)


class Calls:
  """What `sampling.sample` calls, added up over the batches."""

  def __init__(self, num_batches: int):
    self.batch = 0
    self.num_batches = num_batches
    self.progress = command_line.Progress()

  def __call__(self, calls, most, *canvas_now):
    del canvas_now
    self.progress(self.batch * most + int(calls), self.num_batches * most)


def write_samples(
  model: directory.Pretrained,
) -> tuple[samples.Samples, dict[str, Any]]:
  """Samples from nothing, and all that is needed to write them again."""
  length = _LENGTH.value or min(model.config.max_length, _LONGEST)
  if length > model.config.max_length:
    raise ValueError(
      f'--length={length} is more than the length {model.config.max_length} '
      'of the model'
    )
  size = min(_BATCH_SIZE.value, _NUM_SAMPLES.value)
  empty = canvas.from_prompts([[]] * size, length, model.vocab)
  chosen = decoding_flags.decoding_of(
    _DECODING,
    model,
    empty,
    num_equal_rows=_NUM_SAMPLES.value,
  )
  starts = range(0, _NUM_SAMPLES.value, size)
  on_call = Calls(len(starts))
  rows, calls = [], []
  for on_call.batch, start in enumerate(starts):
    result = sampling.sample(
      model.denoiser,
      model.params,
      jax.random.key(_SEED.value),
      empty,
      **chosen.static,
      **chosen.arrays,
      on_call=on_call,
      row_ids=jnp.arange(start, start + size),
    )
    rows.append(np.asarray(result.ids))
    calls.append(np.asarray(result.calls_per_row))
    jax.effects_barrier()
    sampling.check_finite(result)
  on_call.progress.close()
  ids, calls = (
    np.concatenate(parts)[: _NUM_SAMPLES.value] for parts in (rows, calls)
  )
  return samples.of_rows(ids, model.tokenizer, model.vocab), {
    **chosen.settings,
    'length': length,
    'num_samples': _NUM_SAMPLES.value,
    'seed': _SEED.value,
    'calls_per_sample': float(calls.mean()),
    'dtype': model.config.dtype,
  }


def read_texts(files: str) -> tuple[list[str], dict[str, Any] | None]:
  """The texts of --texts, and how they were made if every line says the same.

  Raises:
    OSError: a file cannot be read.
    ValueError: a line that is no JSON object with a text.
  """
  if not files.endswith('.jsonl'):
    return [document.text for document in read_documents(files)], None
  records = []
  with open(files, encoding='utf-8') as lines:
    for number, line in enumerate(lines, 1):
      try:
        record = json.loads(line)
        if not isinstance(record['text'], str):
          raise TypeError
      except (ValueError, KeyError, TypeError):
        raise ValueError(
          f'{files}, line {number}: must be a JSON object with a "text"'
        ) from None
      records.append(record)
  settings = [record.get('settings') for record in records]
  alike = settings and all(x == settings[0] for x in settings)
  return [record['text'] for record in records], settings[0] if alike else None


def judged(judging: causal.CausalModel | None, texts: Sequence[str]):
  """What the judge says, None without one."""
  if judging is None:
    return None
  progress = command_line.Progress()
  result = judge.negative_log_likelihood(
    judging,
    texts,
    context=_JUDGE_CONTEXT.value,
    batch_size=_JUDGE_BATCH_SIZE.value,
    on_progress=progress,
  )
  progress.close()
  return result


def real_text(
  path: pathlib.Path, model: directory.Pretrained, like: samples.Samples
) -> samples.Samples | None:
  """Held-out text in pieces of the same size, None where there is none."""
  try:
    text = reference.held_out(path)
  except (OSError, ValueError) as error:
    print(f'no real text to compare with: {error}')
    return None
  return samples.real(text, model.tokenizer, like.texts, len(like.texts))


def measured_row(
  name: str, measured: samples.Samples, judging: causal.CausalModel | None
) -> dict[str, Any]:
  """All measures of some texts, and how much text it was."""
  judgement = judged(judging, measured.texts)
  counted = None if judgement is None else int(judgement.tokens.sum())
  return {
    'texts': name,
    'num_texts': len(measured.texts),
    'num_tokens': sum(map(len, measured.tokens)),
    'num_judge_tokens': counted,
    **measures.measure(measured, judgement=judgement),
  }


def table(rows: Sequence[dict[str, Any]]) -> str:
  """The numbers as text."""
  columns = {name: title for name, title in COLUMNS.items() if name in rows[0]}
  lines = [f'{"texts":14s} {"number":>6s}{measures.titles(columns)}']
  for row in rows:
    numbers = measures.cells(row, columns)
    lines.append(f'{row["texts"]:14s} {row["num_texts"]:6d}{numbers}')
  return '\n'.join(lines)


def main(argv):
  del argv
  check_flags()
  judging = None
  if _JUDGE.value is not None:
    with command_line.extra('judge'):
      judging = causal.load(_JUDGE.value, dtype=_JUDGE_DTYPE.value)
  path = model = None
  if _TEXTS.value is None or _CHECKPOINT.value is not None:
    path = directory.find(_CHECKPOINT.value)
    model = decoding_flags.with_attention_block(_DECODING, directory.load(path))
  if _TEXTS.value is None:
    measured, settings = write_samples(model)
  else:
    texts, settings = read_texts(_TEXTS.value)
    tokenizer = judging if model is None else model.tokenizer
    measured = samples.of_texts(texts, tokenizer.encode)
  rows = [measured_row('samples', measured, judging)]
  if model is not None:
    real = real_text(path, model, measured)
    if real is not None:
      rows.append(measured_row('held-out text', real, judging))
  print(table(rows))
  if judging is None:
    print('without --judge: no generative perplexity')
  tokens = 'judge' if model is None else 'checkpoint'
  command_line.write_json(
    _JSON.value,
    {
      'results': rows,
      'entropy_is_of_tokens_of': tokens,
      'checkpoint': None if path is None else str(path),
      'texts': _TEXTS.value,
      'sampler': settings,
      'judge': judging
      and {
        'path': _JUDGE.value,
        'dtype': _JUDGE_DTYPE.value,
        'context': min(_JUDGE_CONTEXT.value, judging.config.max_length),
        'bos_id': judging.bos_id,
        'num_parameters': sum(x.size for x in jax.tree.leaves(judging.params)),
      },
      **provenance.environment(),
    },
  )


if __name__ == '__main__':
  command_line.run(main)
