"""What a training run learns from and is evaluated on, from its config."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from mdlm_jax import evaluation, ngrams
from mdlm_jax.data import rows
from mdlm_jax.data.batches import Rows
from mdlm_jax.data.corpus import corpus_digest, corpus_of, corpus_tokenizer
from mdlm_jax.data.prepared import open_prepared
from mdlm_jax.data.windows import ids_without_mask, training_windows
from mdlm_jax.models import hub_tokenizer
from mdlm_jax.models.pretrained import Pretrained, TextCodec


class RunData(NamedTuple):
  """Rows to train on, and what is known of them.

  Attributes:
    rows: what batches are drawn from.
    tokenizer: text to ids.
    facts: what is saved beside the model, as JSON; `corpus_sha256` is compared
      when a run goes on.
    evaluate: `evaluate(model) -> report` on what is held out; None: nothing is.
  """

  rows: Rows
  tokenizer: TextCodec
  facts: dict
  evaluate: Callable[[Pretrained], dict] | None


def text_data(
  config: ConfigDict, tokenizer: TextCodec | None = None
) -> RunData:
  """Windows of text files.

  Args:
    config: of the run.
    tokenizer: None: one made from the text.

  Raises:
    ValueError, OSError: as `corpus.read_corpus` and `windows.training_windows`;
      a text too short to hold a part of it out.
  """
  corpus = corpus_of(config.data.to_dict())
  if not corpus.validation:
    raise ValueError('the text is too short to hold a part of it out')
  if tokenizer is None:
    tokenizer = corpus_tokenizer(corpus, config.data.bpe_vocab_size)
  for document in corpus.validation:  # Now, not after training.
    ids_without_mask(document, tokenizer)
  texts = [document.text for part in corpus for document in part]

  def evaluate(model):
    return evaluation.evaluate_documents(
      model,
      corpus.validation,
      length=config.data.length,
      num_replicates=config.evaluation.num_replicates,
      batch_size=config.evaluation.batch_size,
    )

  return RunData(
    training_windows(corpus.training, tokenizer, config.data.length),
    tokenizer,
    {
      'corpus_sha256': corpus_digest(corpus),
      'corpus_entropies_bits_per_character': ngrams.entropies(
        '\n\n'.join(texts)
      ),
    },
    evaluate,
  )


def prepared_data(
  config: ConfigDict, model_tokenizer: TextCodec | None = None
) -> RunData:
  """Rows of prepared documents.

  Args:
    config: of the run.
    model_tokenizer: of the model that the run goes on from; None: it is fresh.

  Raises:
    ValueError, OSError: as `prepared.open_prepared` and the functions of
      `rows`; documents of another vocabulary than the model's.
  """
  directory, settings = config.data.prepared, config.data
  prepared = open_prepared(directory)
  vocab = prepared.vocab
  if model_tokenizer is not None and model_tokenizer.vocab != vocab:
    raise ValueError(
      f'{directory} has {vocab}, {config.init_from} has '
      f'{model_tokenizer.vocab}: prepare it with --tokenizer={config.init_from}'
    )
  if model_tokenizer is not None:
    _check_same_tokens(config, prepared.tokenizer, model_tokenizer)
  # PAD is never seen; a vocabulary need not have one.
  options = {
    'length': settings.length,
    'pad_id': vocab.mask_id if vocab.pad_id is None else vocab.pad_id,
  }
  if settings.rows == 'examples':
    rows_of = functools.partial(
      rows.example_rows,
      eos_id=next(iter(vocab.eos_ids), None),
      answer_multiple=settings.answer_multiple or None,
      **options,
    )
  else:
    rows_of = functools.partial(rows.document_rows, **options)
  if settings.rows == 'packed':
    training = rows.packed_rows(prepared.training, seed=config.seed, **options)
  else:
    training = rows_of(prepared.training)

  evaluate = None
  if len(prepared.validation) and config.evaluation.most_rows:
    evaluate = functools.partial(
      _evaluate_rows, config, rows_of(prepared.validation)
    )
  return RunData(
    training,
    prepared.tokenizer,
    {'corpus_sha256': prepared.digest, 'rows': training.facts},
    evaluate,
  )


def _check_same_tokens(config, documents, model):
  """Vocabularies of one size and the same roles may be of other tokens."""
  if isinstance(model, hub_tokenizer.NoTokenizer):
    return
  before, now = (
    tokenizer.backend.get_vocab(with_added_tokens=True)
    for tokenizer in (model, documents)
  )
  for token in sorted(before.keys() | now.keys()):
    if before.get(token) != now.get(token):
      raise ValueError(
        f'{config.data.prepared} has other tokens than {config.init_from}, '
        f'such as {token!r}: prepare it with --tokenizer={config.init_from}'
      )


def summary(facts: dict) -> str:
  """What rows are made of, in a line, from `DocumentRows.facts`."""
  text = (
    f'{facts["documents"]:,} documents in {facts["rows"]:,} rows, which are '
    f'{facts["utilisation"]:.1%} full'
  )
  for name, meaning in (
    ('too_long', 'longer than a row'),
    ('all_given', 'without a token to learn'),
  ):
    if facts[name]:
      text += f'; left out {facts[name]:,} {meaning}'
  if 'filling_share' in facts:
    text += f'; {facts["filling_share"]:.1%} of what is learned is filling'
  return text


def _evaluate_rows(config, held_out, model):
  some = np.arange(min(len(held_out), config.evaluation.most_rows))
  return evaluation.evaluate_rows(
    model,
    held_out.take(some),
    num_replicates=config.evaluation.num_replicates,
    batch_size=config.evaluation.batch_size,
  )
