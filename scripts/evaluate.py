"""The bound of a model on held-out text, with its standard error.

  python scripts/evaluate.py [--checkpoint=runs/tiny] [--file=text.txt] [--json]

Without --file: the held-out part of the text that the model was trained on.
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
_NUM_REPLICATES = flags.DEFINE_integer(
  'num_replicates', 8, 'Independent passes over the text.'
)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 64, 'Rows per network call.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the noise.')
_JSON = flags.DEFINE_bool('json', False, 'Print one line of JSON.')


def held_out_documents(history: dict | None) -> tuple[data.Document, ...]:
  """The held-out text of a model's training run."""
  if history is None:
    raise ValueError(
      'the model does not say what it was trained on; use --file'
    )
  settings = history['config']['data']
  corpus = data.read_corpus(
    settings['files'],
    validation_files=settings['validation_files'],
    split=settings['split'],
  )
  if data.corpus_digest(corpus) != history['corpus_sha256']:
    print('note: the text is not the one of the training run', file=sys.stderr)
  return corpus.validation


def main(_) -> None:
  path = directory.find(_CHECKPOINT.value)
  model = directory.load(path)
  training_path = path / 'training.json'
  history = None
  if training_path.exists():
    history = json.loads(training_path.read_text())
  documents = (
    data.read_documents(_FILE.value)
    if _FILE.value
    else held_out_documents(history)
  )
  report = evaluation.evaluate_documents(
    model.denoiser,
    model.params,
    model.tokenizer,
    documents,
    length=model.config.max_length,
    schedule=model.schedule,
    num_replicates=_NUM_REPLICATES.value,
    batch_size=_BATCH_SIZE.value,
    seed=_SEED.value,
  )
  report |= {
    'checkpoint': str(path),
    'file': _FILE.value,
    **(history or {}),
    **evaluation.environment(),
  }
  print(json.dumps(report) if _JSON.value else evaluation.summary(report))


if __name__ == '__main__':
  command_line.run(main)
