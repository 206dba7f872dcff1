"""What a training run learns from and is evaluated on, from its config."""

from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict

from mdlm_jax import evaluation, ngrams
from mdlm_jax.data.batches import Rows
from mdlm_jax.data.corpus import corpus_digest, corpus_of, corpus_tokenizer
from mdlm_jax.data.windows import training_windows
from mdlm_jax.models.hub_tokenizer import HubTokenizer
from mdlm_jax.models.pretrained import Pretrained
from mdlm_jax.tokenizer import Tokenizer


class RunData(NamedTuple):
  """Rows to train on, and what is known of them.

  Attributes:
    rows: what batches are drawn from.
    tokenizer: text to ids.
    facts: what is saved beside the model, as JSON; `corpus_sha256` is compared
      when a run goes on.
    evaluate: `evaluate(model) -> report` on held-out text.
  """

  rows: Rows
  tokenizer: Tokenizer | HubTokenizer
  facts: dict
  evaluate: Callable[[Pretrained], dict]


def text_data(
  config: ConfigDict, tokenizer: Tokenizer | HubTokenizer | None = None
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
