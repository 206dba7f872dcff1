"""The bound of a model on held-out text, with its standard error.

  python scripts/evaluate.py [--checkpoint=runs/tiny] [--file=text.txt] [--json]

Without --file: the held-out part of the text that the model was trained on. The
text of the model that comes with the package is not shipped; its held-out
beginnings are, as mdlm_jax/pretrained/sotu/heldout.txt.
"""

import json
import sys

from absl import flags

from mdlm_jax import command_line, data, evaluation
from mdlm_jax.models import directory

_CHECKPOINT = flags.DEFINE_string(
  'checkpoint',
  None,
  'A model directory, or the work directory of a training run. Default: the '
  'model that comes with the package.',
)
_FILE = flags.DEFINE_string(
  'file', None, 'Text files, paths or globs separated by commas.'
)
_PART = flags.DEFINE_enum(
  'part', None, ['validation', 'test'], 'Without --file: the part held out.'
)
_NUM_REPLICATES = flags.DEFINE_integer(
  'num_replicates', 8, 'Independent passes over the text.'
)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 64, 'Rows per network call.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the noise.', 0, 2**32 - 1)
_JSON = flags.DEFINE_bool('json', False, 'Print one line of JSON.')


def held_out_documents(history: dict, part: str) -> tuple[data.Document, ...]:
  """A held-out part of the text of a model's training run."""
  try:
    settings, digest = history['config']['data'], history['corpus_sha256']
  except (KeyError, TypeError):
    raise ValueError(
      'the model does not say what it was trained on; use --file'
    ) from None
  try:
    corpus = data.corpus_of(settings)
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f'{error}, the text that the model was trained on; name a text by --file'
    ) from None
  if data.corpus_digest(corpus) != digest:
    print('note: the text is not the one of the training run', file=sys.stderr)
  if not getattr(corpus, part):
    raise ValueError(f'the training run left no {part} text')
  return getattr(corpus, part)


def main(_) -> None:
  if _FILE.value and _PART.value:
    raise ValueError('--part chooses from the training run, not from --file')
  path = directory.find(_CHECKPOINT.value)
  model = directory.load(path)
  documents = (
    data.read_documents(_FILE.value)
    if _FILE.value
    else held_out_documents(model.history, _PART.value or 'validation')
  )
  report = evaluation.evaluate_documents(
    model.denoiser,
    model.params,
    model.tokenizer,
    documents,
    length=model.config.max_length,
    schedule=model.bound_schedule,
    num_replicates=_NUM_REPLICATES.value,
    batch_size=_BATCH_SIZE.value,
    seed=_SEED.value,
  )
  report |= {
    'checkpoint': str(path),
    'file': _FILE.value,
    **model.history,
    **evaluation.environment(),
  }
  print(json.dumps(report) if _JSON.value else evaluation.summary(report))


if __name__ == '__main__':
  command_line.run(main)
