import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import data, evaluation, predict, schedules
from mdlm_jax import tokenizer as tokenizer_lib
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=9, mask_id=1, pad_id=0)  # 7 real tokens: 2 to 8.


def stub(logits):
  """A network whose logits are `logits(ids, t)`, `[B, L, 9]`."""

  def features(params, cache, ids, *, t, **_):
    return logits(ids, t), ()

  return predict.Denoiser(features, lambda params, hidden: hidden)


UNIFORM = stub(lambda ids, t: jnp.zeros((*ids.shape, 9)))


def two_strings(ids, t):
  """Exact for half AB (2, 3) and half BA: the other one, or a coin."""
  other = ids[:, ::-1]
  a, b = (
    jnp.where(other == 5 - token, 0.0, jnp.where(other == 1, -0.69, -1e9))
    for token in (2, 3)
  )
  low = jnp.full((*ids.shape, 9), -1e9)
  return low.at[..., 2].set(a).at[..., 3].set(b)


TWO_STRINGS = stub(two_strings)


def easy_and_hard(ids, t):
  """Independent tokens: 2 costs 2 nats, 3 costs 4 nats."""
  costs = jnp.array([-2.0, -4.0])
  rest = jnp.log1p(-jnp.sum(jnp.exp(costs)))
  row = jnp.full(9, -1e9).at[2:5].set(jnp.append(costs, rest))
  return jnp.broadcast_to(row, (*ids.shape, 9))


EASY_AND_HARD = stub(easy_and_hard)


def bound(denoiser, ids, valid=None, seed=0, **options):
  ids = np.asarray(ids, np.int32)
  valid = np.ones(ids.shape, bool) if valid is None else valid
  options = {'num_replicates': 16, 'batch_size': 64, 'vocab': VOCAB} | options
  key = jax.random.key(seed)
  return evaluation.held_out_bound(denoiser, {}, key, ids, valid, **options)


def assert_within_errors(result, expected):
  """4 standard errors of 16 replicates: false alarms below 1 in 800."""
  assert result.standard_error < 0.05 * expected
  error = abs(result.nats_per_token - expected)
  assert error < 4 * result.standard_error + 1e-3 * expected


def test_two_string_toy_is_one_bit_per_string():
  result = bound(TWO_STRINGS, [[2, 3], [3, 2]] * 200)
  assert_within_errors(result, math.log(2) / 2)
  assert abs(2 * result.nats_per_token - math.log(2)) < 0.02
  assert result.num_tokens == 800


def test_uniform_network_costs_the_log_of_the_real_tokens():
  ids = np.random.default_rng(0).integers(2, 9, (100, 8))
  assert_within_errors(bound(UNIFORM, ids), math.log(7))


def test_pads_are_neither_scored_nor_counted():
  # PAD is the favourite; 3 real tokens and 13 pads per row.
  def pads(ids, t):
    row = jnp.full(9, math.log(0.01 / 7)).at[0].set(math.log(0.99))
    return jnp.broadcast_to(row, (*ids.shape, 9))

  ids = np.zeros((200, 16), np.int32)
  ids[:, :3] = 4
  result = bound(stub(pads), ids, ids != 0)
  assert result.num_tokens == 600
  # A draw of PAD is impossible, so the 0.01 is the whole: ln 7, not ln 700.
  assert_within_errors(result, math.log(7))


def test_tokens_are_pooled_and_not_averaged_by_row():
  # Per 100 tokens at 2 nats 10 at 4 nats: perplexity 8.862, not 20.09.
  ids = np.array([[2] * 50] * 40 + [[3] * 10 + [0] * 40] * 20)
  result = bound(EASY_AND_HARD, ids, ids != 0, num_replicates=40)
  assert_within_errors(result, math.log(8.862))


def test_rows_scored_together_equal_rows_scored_apart():
  # Documents of 3 and 7 tokens. Many replicates; the law is the same.
  ids = np.array([[2, 2, 3, 0, 0, 0, 0], [3, 3, 2, 2, 3, 3, 3]])
  options = {'num_replicates': 400, 'batch_size': 400}
  together = bound(EASY_AND_HARD, ids, ids != 0, **options)
  assert together.num_tokens == 10
  apart = [bound(EASY_AND_HARD, row[row != 0][None], **options) for row in ids]
  assert [result.num_tokens for result in apart] == [3, 7]
  assert_within_errors(apart[0], 8 / 3)
  assert_within_errors(apart[1], 24 / 7)
  assert_within_errors(together, 32 / 10)


@pytest.mark.parametrize('batch_size', [1, 3, 7, 64])
def test_batch_size_does_not_matter(batch_size):
  ids = np.random.default_rng(0).integers(2, 4, (7, 5))
  options = {'num_replicates': 3}
  expected = bound(TWO_STRINGS, ids[:, :2], batch_size=21, **options)
  result = bound(
    stub(two_strings), ids[:, :2], batch_size=batch_size, **options
  )
  np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_every_row_meets_all_noise_levels():
  # Token 2 costs t, token 3 costs 5 t. Were row 0 always given the low noise
  # levels and row 1 the high ones, the result would be 2 instead of 1.5.
  def rising(ids, t):
    cost = t[:, None] * jnp.array([1.0, 5.0])
    rest = jnp.log1p(-jnp.sum(jnp.exp(-cost - 1.0), 1, keepdims=True) / 2)
    row = jnp.concatenate([-cost - 1.0 - math.log(2), rest], 1)
    row = jnp.pad(row, ((0, 0), (2, 4)), constant_values=-1e9)
    return jnp.broadcast_to(row[:, None], (*ids.shape, 9))

  ids = np.array([[2] * 32, [3] * 32])
  result = bound(stub(rising), ids, num_replicates=400, batch_size=400)
  assert_within_errors(result, 1.5 + 1.0 + math.log(2))


def test_standard_error_is_that_of_repeated_estimates():
  ids = [[2, 3], [3, 2]] * 10
  results = [
    bound(TWO_STRINGS, ids, seed=seed, num_replicates=8, batch_size=160)
    for seed in range(60)
  ]
  spread = np.std([r.nats_per_token for r in results], ddof=1)
  stated = math.sqrt(np.mean([r.standard_error**2 for r in results]))
  # 60 repetitions: the spread itself is uncertain by 9 %.
  assert 0.7 < spread / stated < 1.4


def test_schedules_agree_and_seeds_differ():
  ids = np.random.default_rng(0).integers(2, 9, (200, 8))
  linear = bound(UNIFORM, ids)
  cosine = bound(UNIFORM, ids, schedule=schedules.cosine())
  assert linear.nats_per_token != cosine.nats_per_token
  assert_within_errors(cosine, math.log(7))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'num_replicates': 1}, 'num_replicates=1'),
    ({'batch_size': 0}, 'batch_size=0'),
    ({'valid': np.zeros((1, 2), bool)}, 'no token'),
  ],
)
def test_impossible_requests_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    bound(UNIFORM, [[2, 3]], **options)


def test_a_network_of_nan_is_refused():
  def features(params, cache, ids, **unused):
    return jnp.full((*ids.shape, VOCAB.size), jnp.nan), ()

  broken = predict.Denoiser(features, lambda params, hidden: hidden)
  with pytest.raises(ValueError, match='non-finite'):
    bound(broken, np.full((2, 4), 3, np.int32))


def test_bits_per_character():
  result = evaluation.HeldOutBound(2 * math.log(2), 0.1 * math.log(2), 50)
  # 2 bits per token, 50 tokens for 200 characters.
  np.testing.assert_allclose(result.bits_per_character(200), (0.5, 0.025))


def test_report_counts_every_token_of_the_text_once():
  tokenizer = tokenizer_lib.character_tokenizer('abcdefg')
  documents = [data.Document('1', 'abcdefgabc'), data.Document('2', 'ba')]
  report = evaluation.evaluate_documents(
    UNIFORM, {}, tokenizer, documents, length=4, num_replicates=200
  )
  assert report['num_tokens'] == report['num_characters'] == 12
  bits, error = (
    report[f'bits_per_character{suffix}'] for suffix in ('', '_standard_error')
  )
  assert abs(bits - math.log2(7)) < 4 * error
  assert f'{bits:.4f} +- {error:.4f} bits' in evaluation.summary(report)
  again = evaluation.evaluate_documents(
    UNIFORM, {}, tokenizer, documents, length=4, num_replicates=200, seed=1
  )
  assert again['nats_per_token'] != report['nats_per_token']


def test_environment_names_versions_device_and_precision():
  environment = evaluation.environment()
  assert environment['versions']['jax'] == jax.__version__
  assert environment['device'] == jax.devices()[0].device_kind
  assert 'matmul_precision' in environment
