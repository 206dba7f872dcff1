"""What samples are measured by, on cases done by hand."""

import json

import jax
import numpy as np
import pytest

from mdlm_jax import ngrams, text_quality


def test_order_three_measures_by_hand():
  # See ngrams_test: three shorter contexts, then 'd' after 'abc'.
  model = ngrams.fit(['abcd'], order=3)
  a, d = 0.1, 15 / 16 + 1 / 16 * 0.2
  first = (3 * -np.log2(a) - np.log2(d)) / 4
  second = -np.log2(a)  # 'aaaa': no context was seen.
  numbers = text_quality.measure(['abcd', 'aaaa'], model)
  assert numbers['bits_per_character'] == pytest.approx((first + second) / 2)
  # The standard error of two numbers is half their distance.
  assert numbers['bits_per_character_error'] == pytest.approx(
    (second - first) / 2
  )
  assert numbers['entropy'] == pytest.approx((2 + 0) / 2)
  assert numbers['repetition'] == 0
  assert text_quality.measure(['a b a', 'a b'], model)['distinct_2'] == (
    pytest.approx(2 / 3)
  )


def test_reference_comes_from_the_corpus_of_the_model(tmp_path):
  (tmp_path / 'text.txt').write_text('abcd' * 25)
  settings = {
    'files': str(tmp_path / 'text.txt'),
    'validation_files': '',
    'split': 'tail',
  }
  (tmp_path / 'training.json').write_text(
    json.dumps({'config': {'data': settings}})
  )
  reference = text_quality.read_reference(tmp_path)
  assert reference.held_out == 'dabcd'
  assert reference.model.tables[3].counts.sum() == 95 - 3
  # What a shipped model has beside it is the same without its corpus.
  (tmp_path / 'shipped').mkdir()
  text_quality.write_reference(tmp_path, tmp_path / 'shipped')
  shipped = text_quality.read_reference(tmp_path / 'shipped')
  assert shipped.held_out == reference.held_out
  jax.tree.map(np.testing.assert_array_equal, shipped.model, reference.model)


def test_real_text_is_cut_into_pieces_of_one_size():
  assert text_quality.real_texts('abcdefgh', 2, 3) == ['ab', 'de', 'gh']
  assert text_quality.real_texts('abc', 5, 2) == ['abc', 'abc']
