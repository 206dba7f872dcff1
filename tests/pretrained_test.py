"""The model that comes with the package is what its record says."""

import json

import jax
import numpy as np

from mdlm_jax import evaluation, ngrams
from mdlm_jax.data.corpus import Document
from mdlm_jax.models import directory

MODEL = directory.load(directory.find())
RECORD = json.loads((directory.find() / 'evaluation.json').read_text())


def test_it_is_small_and_beats_the_order_2_entropy_of_its_corpus():
  assert (directory.find() / 'model.safetensors').stat().st_size <= 6_000_000
  order_2 = RECORD['corpus_entropies_bits_per_character'][2]
  bits = RECORD['bits_per_character']
  assert bits + 5 * RECORD['bits_per_character_standard_error'] < order_2


def test_it_has_the_recorded_bound_on_held_out_text():
  """On a tenth of the shipped beginnings; five errors of both numbers."""
  text = (directory.find() / 'heldout.txt').read_text('utf-8')[:10_000]
  report = evaluation.evaluate_documents(
    MODEL,
    [Document('heldout', text)],
    length=MODEL.config.max_length,
    batch_size=32,
  )
  # The beginning of one address is not the mean of thirteen: 0.3 bits is the
  # spread of single documents around it.
  assert abs(report['bits_per_character'] - RECORD['bits_per_character']) < 0.3


def test_it_was_trained_with_the_config_in_the_repository():
  history = MODEL.history
  assert history['step'] == history['config']['steps'] == 4500
  log = (directory.find() / 'metrics.jsonl').read_text().splitlines()
  assert json.loads(log[-1])['step'] == 4500
  assert MODEL.config.vocab_size == 1024
  assert sum(x.size for x in jax.tree.leaves(MODEL.params)) == 2_885_888


def test_its_reference_counts_are_those_of_english():
  model = ngrams.load(directory.find() / 'ngrams.npz')
  held_out = (directory.find() / 'heldout.txt').read_text('utf-8')
  bits = ngrams.bits_per_character(model, held_out[:20_000])
  # Between the entropy of the corpus given two and given no characters.
  assert 1.5 < bits < RECORD['corpus_entropies_bits_per_character'][1]
  assert np.isfinite(bits)
