"""What samples are measured by, on cases done by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mdlm_jax
from mdlm_jax import ngrams
from mdlm_jax.sample_quality import measures
from mdlm_jax.sample_quality.judge import Judgement
from mdlm_jax.sample_quality.samples import Samples


def samples_of(*texts):
  """Texts whose tokens are their characters."""
  tokens = [np.array([*map(ord, text)], int) for text in texts]
  return Samples(list(texts), tokens)


def error_of(values):
  return np.std(values, ddof=1) / np.sqrt(len(values))


def test_bits_of_the_order_three_model_by_hand():
  # See ngrams_test: three shorter contexts, then 'd' after 'abc'.
  model = ngrams.fit(['abcd'], order=3)
  a, d = 0.1, 15 / 16 + 1 / 16 * 0.2
  bits = (3 * -np.log2(a) - np.log2(d)) / 4, -np.log2(a)
  numbers = measures.measure(samples_of('abcd', 'aaaa'), model=model)
  assert numbers['bits_per_character'] == pytest.approx(np.mean(bits))
  assert numbers['bits_per_character_error'] == pytest.approx(error_of(bits))


def test_entropy_of_each_text_and_of_all_together():
  numbers = measures.measure(samples_of('aabb', 'aaaa', 'bcde'))
  own = [np.log(2), 0, np.log(4)]
  assert numbers['entropy'] == pytest.approx(np.mean(own))
  assert numbers['entropy_error'] == pytest.approx(error_of(own))
  # a 6, b 3, c, d, e 1 of 12.
  p = np.array([6, 3, 1, 1, 1]) / 12
  assert numbers['pooled_entropy'] == pytest.approx(-(p * np.log(p)).sum())
  # Two halves that use each token as often leave no error.
  assert measures.pooled_entropy([np.array([1, 2])] * 2) == (
    pytest.approx(np.log(2)),
    pytest.approx(0),
  )


def test_distinct_and_its_error_by_leaving_texts_out():
  texts = ['a b a', 'a b', 'c d e']
  numbers = measures.measure(samples_of(*texts))
  assert numbers['distinct_1'] == pytest.approx(5 / 8)
  assert numbers['distinct_2'] == pytest.approx(4 / 5)
  assert numbers['distinct_3'] == pytest.approx(1)
  left_out = [
    ngrams.distinct([t.split() for t in texts if t != gone], 2)
    for gone in texts
  ]
  assert left_out == pytest.approx([1, 1, 2 / 3])
  spread = np.sqrt(2 / 3 * np.sum((left_out - np.mean(left_out)) ** 2))
  assert numbers['distinct_2_error'] == pytest.approx(spread)


def test_repetition_is_of_word_four_grams():
  # 7 words hold 4 windows of four, of which one was there before.
  numbers = measures.measure(samples_of('a b c a b c a', 'a b'))
  assert numbers['repetition'] == pytest.approx((1 / 4 + 0) / 2)


def test_generative_perplexity_is_of_sums_over_all_tokens():
  # 100 tokens at 2 nats and 10 at 4.
  judged = Judgement(np.array([200.0, 40.0]), np.array([100, 10]))
  numbers = measures.measure(samples_of('a', 'b'), judgement=judged)
  assert numbers['generative_perplexity'] == pytest.approx(8.862, abs=1e-3)
  # Residuals of +-200/11 and a factor of 2.
  error = np.sqrt(2 * 2 * (200 / 11) ** 2) / 110
  assert numbers['judge_nats_per_token_error'] == pytest.approx(error)
  assert numbers['generative_perplexity_error'] == pytest.approx(
    error * 8.862, rel=1e-3
  )
  # Never alone.
  assert {'entropy', 'distinct_2', 'repetition'} <= set(numbers)


def test_errors_of_ratios_are_those_of_repetitions():
  """Within 30 % of the spread of 400 repetitions, itself known to 4 %."""
  rng = np.random.default_rng(0)
  found = []
  for _ in range(400):
    counts = rng.integers(5, 50, size=30)
    sums = counts * rng.gamma(8, 0.3, size=30)
    found.append(measures.ratio(sums, counts))
  values, errors = np.array(found).T
  assert np.mean(errors) == pytest.approx(np.std(values), rel=0.3)


def test_what_cannot_be_measured_is_refused():
  with pytest.raises(ValueError, match='1 text'):
    measures.measure(samples_of('a'))
  nothing = Judgement(np.zeros(2), np.zeros(2, int))
  with pytest.raises(ValueError, match='no token'):
    measures.measure(samples_of('a', 'b'), judgement=nothing)
  # Nothing at all has no entropy and repeats nothing.
  assert set(measures.measure(samples_of('', '')).values()) == {0.0}


def test_uniform_samples_have_the_entropy_of_the_vocabulary():
  """Counts of 80,000 draws of 1,000 lower it by 999 / 160,000 on average.

  The spread of that is sqrt(1,000 / 2) / 80,000 = 0.0003.
  """
  num_tokens, rows, length, batches = 1000, 20, 500, 8
  vocab = mdlm_jax.Vocab(size=num_tokens + 1, mask_id=num_tokens)

  def features(params, cache, ids, *, at, **inputs):
    shape = (ids if at is None else at).shape
    return jnp.zeros((*shape, 1)), ()

  def head(params, hidden):
    return jnp.broadcast_to(hidden, (*hidden.shape[:-1], vocab.size))

  uniform = mdlm_jax.Denoiser(features, head)
  canvas = mdlm_jax.from_prompts([[]] * rows, length, vocab)
  rule = mdlm_jax.kernel(mdlm_jax.uniform_grid(1))
  tokens = [
    row
    for key in jax.random.split(jax.random.key(0), batches)
    for row in np.asarray(
      mdlm_jax.sample(uniform, {}, key, canvas, vocab=vocab, rule=rule).ids
    )
  ]
  entropy, error = measures.pooled_entropy(tokens)
  assert entropy == pytest.approx(6.9078, abs=0.01)
  assert entropy == pytest.approx(6.9078 - 999 / 160_000, abs=1.5e-3)
  assert error < 1e-3
