"""Character n-gram models and text statistics, on cases done by hand."""

import math

import numpy as np
import pytest

from mdlm_jax import ngrams


def test_probabilities_are_witten_bell_by_hand():
  # Windows of two characters of 'aab' and 'ba': aa, ab, ba.
  model = ngrams.fit(['aab', 'ba'], order=1)
  # Order 0 counts their last characters: a 2, b 1; 2 kinds, base 1/3.
  a, b = (2 + 2 / 3) / 5, (1 + 2 / 3) / 5
  # After a: a 1, b 1, 2 kinds. After b: a 1, 1 kind.
  b_after_a, a_after_b = (1 + 2 * b) / 4, (1 + a) / 2
  np.testing.assert_allclose(
    ngrams.probabilities(model, 'aba'), [a, b_after_a, a_after_b], rtol=1e-12
  )
  # An unknown character has only the share that is set aside for it, and a
  # context with it in falls back on the order below.
  unknown_after_a = (2 * (2 / 3) / 5) / 4
  np.testing.assert_allclose(
    ngrams.probabilities(model, 'axb'), [a, unknown_after_a, b], rtol=1e-12
  )


def test_order_three_by_hand():
  # One window: every context has one kind, seen once, so each order halves.
  model = ngrams.fit(['abcd'], order=3)
  base = 1 / 5
  d = (1 + base) / 2  # Only the last character of a window counts.
  d_after_c = (1 + d) / 2
  d_after_bc = (1 + d_after_c) / 2
  d_after_abc = (1 + d_after_bc) / 2
  a = base / 2
  expected = [a, a, a, d_after_abc]
  np.testing.assert_allclose(
    ngrams.probabilities(model, 'abcd'), expected, rtol=1e-12
  )
  bits = -sum(math.log2(p) for p in expected) / 4
  assert ngrams.bits_per_character(model, 'abcd') == pytest.approx(bits)


@pytest.mark.parametrize('context', ['', 'a', 'abr', 'cad', 'zzz', 'xab'])
def test_probabilities_sum_to_one(context):
  model = ngrams.fit(['abracadabra', 'ab', 'cabbage'], order=3)
  known = ''.join(map(chr, model.symbols))
  total = sum(ngrams.probabilities(model, context + x)[-1] for x in known + '?')
  assert total == pytest.approx(1, abs=1e-12)


def test_windows_do_not_cross_documents():
  apart = ngrams.fit(['ab', 'cd'], order=1)
  assert set(apart.tables[1].counts.tolist()) == {1}
  assert len(apart.tables[1].ngrams) == 2  # ab, cd and no bc


def test_long_text_costs_its_conditional_entropy():
  # Smoothing and the text's edges cost a few counts in 4000.
  rng = np.random.default_rng(0)
  text = ''.join(rng.choice(list('aabc'), 4000))
  model = ngrams.fit([text], order=1)
  entropy = ngrams.entropies(text, 1)[1]
  bits = ngrams.bits_per_character(model, text)
  assert bits == pytest.approx(entropy, abs=5e-3)


def test_saved_model_is_the_same(tmp_path):
  model = ngrams.fit(['the cat sat on the mat', 'é€'], order=2)
  ngrams.save(model, tmp_path / 'ngrams.npz')
  loaded = ngrams.load(tmp_path / 'ngrams.npz')
  assert loaded.order == 2
  text = 'the mat é?'
  np.testing.assert_array_equal(
    ngrams.probabilities(loaded, text), ngrams.probabilities(model, text)
  )


def test_errors_name_what_is_wrong(tmp_path):
  with pytest.raises(ValueError, match='order=-1 must be at least 0'):
    ngrams.fit(['abc'], order=-1)
  with pytest.raises(ValueError, match='as long as 4 characters'):
    ngrams.fit(['abc'], order=3)
  with pytest.raises(ValueError, match='as long as 1 characters'):
    ngrams.fit([], order=0)
  (tmp_path / 'x.npz').write_bytes(b'x')
  with pytest.raises(ValueError, match=r'x\.npz is not an n-gram model'):
    ngrams.load(tmp_path / 'x.npz')
  assert math.isnan(ngrams.bits_per_character(ngrams.fit(['ab'], 0), ''))


def test_distinct_and_repetition_by_hand():
  # ab, bc, ab and bc: two of four.
  assert ngrams.distinct(['abc', 'abc'], 2) == 0.5
  assert ngrams.distinct(['abc', 'd'], 1) == 1
  assert math.isnan(ngrams.distinct(['a'], 2))
  # abab, baba, abab, baba, abab: two kinds of five.
  assert ngrams.repetition('abababab') == pytest.approx(1 - 2 / 5)
  assert ngrams.repetition('abcdefgh') == 0
