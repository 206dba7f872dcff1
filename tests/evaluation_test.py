"""Rows and documents: every token once, in any batch, on any devices."""

import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import script_runner

from mdlm_jax import bound_estimators, evaluation, predict, schedules
from mdlm_jax.data.corpus import Document
from mdlm_jax.models.pretrained import Pretrained
from mdlm_jax.models.transformer import TransformerConfig
from mdlm_jax.tokenizer import character_tokenizer
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=9, mask_id=1, pad_id=0)  # 7 real tokens: 2 to 8.
FEW = bound_estimators.exact_count(2)


def features(params, cache, ids, **unused):
  """Logits by the token on the left; that of a first token is MASK."""
  left = jnp.pad(ids, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
  return params[left], ()


# All tests share its programs: tables are parameters.
DENOISER = predict.Denoiser(
  features, lambda params, hidden: hidden, time_free=True
)


def costs():
  """Token k costs k - 2 + 1 nats: 1, 2, 3, 4; the rest is that of 8."""
  nats = np.arange(1.0, 6.0)
  row = np.full(9, -1e9, np.float32)
  row[2:] = [*-nats, np.log1p(-np.exp(-nats).sum()), -1e9]
  return np.tile(row, (9, 1))


def successor():
  """Sure of the token after a visible one on its left, else of none."""
  table = np.zeros((9, 9), np.float32)
  table[range(2, 9), [3, 4, 5, 6, 7, 8, 2]] = 50.0
  return table


COSTS, SUCCESSOR = costs(), successor()
NAN = np.full((9, 9), np.nan, np.float32)


def rows(params, ids, answer=None, seed=0, **options):
  ids = np.asarray(ids, np.int32)
  valid = ids > 0
  options = {
    'vocab': VOCAB, 'estimator': FEW, 'num_replicates': 2, 'batch_size': 4,
  } | options  # fmt: skip
  return evaluation.row_bounds(
    DENOISER, params, jax.random.key(seed), ids, valid,
    valid if answer is None else answer, **options,
  )  # fmt: skip


def documents(params, ids, **options):
  options = {
    'vocab': VOCAB, 'estimator': FEW, 'num_replicates': 2, 'batch_size': 4,
  } | options  # fmt: skip
  return evaluation.document_bounds(
    DENOISER, params, jax.random.key(0),
    [np.asarray(x, np.int32) for x in ids], **options,
  )  # fmt: skip


def test_a_row_does_not_depend_on_its_batch():
  """Nor on the size of batches: see the test of eight devices."""
  ids = np.random.default_rng(0).integers(2, 7, (7, 4))
  expected = rows(SUCCESSOR, ids)
  order = np.array([5, 0, 3, 6, 1, 2, 4])
  got = rows(SUCCESSOR, ids[order], row_ids=order.astype(np.int32))
  np.testing.assert_allclose(got, np.array(expected)[:, order], rtol=1e-6)
  assert (expected.standard_error > 0).any()
  assert (rows(SUCCESSOR, ids, seed=1).nats != expected.nats).any()
  # Rows of one id have the same noise.
  same = rows(SUCCESSOR, ids[[0, 0, 0, 0]], row_ids=np.array([3, 3, 5, 3])).nats
  assert same[0] == same[1] != same[2]


def test_progress_counts_the_calls_of_every_batch():
  events = []
  rows(
    COSTS, np.full((11, 4), 2),
    on_progress=lambda *event: events.append(event),
  )  # fmt: skip
  # Three batches, each 2 replicates of 2 calls.
  assert events == [(0, 12), (4, 12), (8, 12), (12, 12)]


def test_every_token_is_counted_once_and_once_only():
  """Documents of one token are exact: 1 to 4 nats; 100 of 2 and 10 of 4."""
  bounds = documents(COSTS, [[2], [3], [4], [5]], length=4)
  np.testing.assert_allclose(bounds.nats, [1, 2, 3, 4], rtol=1e-6)
  np.testing.assert_array_equal(bounds.standard_error, 0)
  bounds = documents(COSTS, [[3] * 100, [], [5] * 10], length=4)
  np.testing.assert_allclose(bounds.nats, [200, 0, 40], rtol=1e-5)
  perplexity = math.exp(bounds.nats.sum() / 110)
  np.testing.assert_allclose(perplexity, 8.862, rtol=1e-3)


def test_context_is_seen_and_not_scored():
  """Given its left neighbour a token costs nothing, else the log of 7."""
  text = 2 + np.arange(30) % 7
  once = bound_estimators.chain_rule(4)
  first = documents(SUCCESSOR, [text[:4]] * 4, length=4, estimator=once)
  whole = documents(SUCCESSOR, [text], length=4, context=3, estimator=once)
  assert first.nats[0] >= math.log(7) - 1e-5
  np.testing.assert_allclose(whole.nats[0], first.nats[0], rtol=1e-6)
  apart = documents(SUCCESSOR, [text], length=4, estimator=once)
  # Each of 8 windows but the last begins without its left neighbour.
  assert apart.nats[0] > 7 * math.log(7) - 1e-3


def test_the_error_is_that_of_repeated_estimates():
  ids = np.tile(2 + np.arange(4), (24, 1))
  found = [rows(SUCCESSOR, ids, seed=seed) for seed in range(40)]
  spread = np.std([bounds.nats.sum() for bounds in found], ddof=1)
  squares = [np.sum(bounds.standard_error**2) for bounds in found]
  # 40 repetitions: the spread is uncertain by 11 %; false alarms 1 in 300.
  assert 0.7 < spread / math.sqrt(np.mean(squares)) < 1.4


SHARDED = """
import jax, numpy as np
from evaluation_test import COSTS, SUCCESSOR, documents, rows
assert jax.device_count() == 8
# 5 documents of 1 ... 5 nats, batches of 2 that 8 devices share.
bounds = documents(COSTS, [[2], [3], [4], [5], [6]], length=4, batch_size=2)
assert len(bounds.nats) == 5
np.testing.assert_allclose(bounds.nats, [1, 2, 3, 4, 5], rtol=1e-6)
np.testing.assert_allclose(bounds.nats.mean(), 3, rtol=1e-6)
ids = np.random.default_rng(0).integers(2, 7, (11, 4))
print(rows(SUCCESSOR, ids, batch_size=8).nats.tolist())
"""


def test_rows_on_eight_devices_are_counted_once():
  here = pathlib.Path(__file__).parent
  result = subprocess.run(
    [sys.executable, '-c', SHARDED],
    check=True,
    capture_output=True,
    text=True,
    env={
      **os.environ,
      'PYTHONPATH': os.pathsep.join([str(here), str(here.parent), *sys.path]),
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    },
  )
  ids = np.random.default_rng(0).integers(2, 7, (11, 4))
  np.testing.assert_allclose(
    json.loads(result.stdout), rows(SUCCESSOR, ids).nats, rtol=1e-6
  )


CONFIG = TransformerConfig(
  vocab_size=9, num_layers=1, model_dim=4, num_heads=1, mlp_dim=4, max_length=4
)
MODEL = Pretrained(
  CONFIG, DENOISER, SUCCESSOR, VOCAB, character_tokenizer('abcdefg'),
  schedules.linear(), {},
)  # fmt: skip


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: rows(COSTS, [[2]], batch_size=0), 'batch_size=0'),
    (lambda: rows(COSTS, [[2]], num_replicates=1), 'num_replicates=1'),
    (lambda: rows(NAN, [[2] * 4] * 4), 'NaN'),
    (lambda: documents(COSTS, [[], []], length=4), 'no token'),
    (lambda: documents(COSTS, [[1]] * 4, length=4), 'probability 0'),
    (lambda: documents(COSTS, [[2]], length=4, context=4), 'context=4'),
    (lambda: documents(COSTS, [[2]], length=0), 'length=0'),
    (
      lambda: evaluation.evaluate_rows(
        MODEL, dict.fromkeys(('ids', 'valid', 'segments'), np.ones((1, 4)))
      ),
      'rows that documents share',
    ),
  ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_the_report_has_the_whole_and_its_documents():
  texts = [Document('1', 'abcdefgabc'), Document('2', 'ba')]
  report = evaluation.evaluate_documents(MODEL, texts, length=4)
  assert report['num_tokens'] == report['num_characters'] == 12
  sizes = [part['num_tokens'] for part in report['documents']]
  assert sizes == [10, 2]
  nats = sum(part['nats'] for part in report['documents'])
  np.testing.assert_allclose(report['nats_per_token'], nats / 12)
  np.testing.assert_allclose(report['perplexity'], math.exp(nats / 12))
  bits, error = (
    report[f'bits_per_character{suffix}'] for suffix in ('', '_standard_error')
  )
  np.testing.assert_allclose(bits, nats / 12 / math.log(2))
  assert f'{bits:.4f} +- {error:.4f} bits' in evaluation.summary(report)
  assert 'xz ' in evaluation.summary(report)
  # What a number needs to be measured again, in the same words every time.
  again = evaluation.evaluate_documents(MODEL, texts, length=4)
  assert json.dumps(report, allow_nan=False) == json.dumps(again)
  for name, value in (
    ('seed', 1), ('num_calls', 2), ('context', 1),
  ):  # fmt: skip
    other = evaluation.evaluate_documents(
      MODEL, texts, length=4, **{name: value}
    )
    assert other[name] == value
    assert other['nats_per_token'] != report['nats_per_token'], name


def test_the_report_of_rows_counts_what_is_not_given():
  ids = np.array([[5, 4, 4, 4], [4, 4, 0, 0]], np.int32)
  row = {'ids': ids, 'valid': ids > 0, 'given': np.arange(4) < [[1], [0]]}
  model = MODEL._replace(params=COSTS)
  report = evaluation.evaluate_rows(model, row, num_calls=2)
  assert (report['num_tokens'], report['num_rows']) == (5, 2)
  # Token 4 costs 3 nats; 5 would cost 4.
  np.testing.assert_allclose(report['nats_per_token'], 3, rtol=1e-5)
  np.testing.assert_allclose(report['perplexity'], math.exp(3), rtol=1e-5)
  assert '2 rows (5 tokens): at most 3.0000' in evaluation.summary(report)


def test_any_file_is_read_in_the_symbols_of_the_model(
  tmp_path, capsys, monkeypatch
):
  (tmp_path / 'a.txt').write_text('A, b -- C\n' * 2 + 'B')
  model = MODEL._replace(
    tokenizer=character_tokenizer('abcdef '),
    history={'config': {'data': {'text8': True}}},
  )

  monkeypatch.setattr(
    'mdlm_jax.model_flags.load', lambda flags: (tmp_path, model)
  )

  def run(*arguments):
    script_runner.run(
      'evaluate.py', f'--file={tmp_path}/a.txt', '--json', *arguments
    )
    return capsys.readouterr().out

  line = run()
  report = json.loads(line)
  assert report['num_characters'] == len('a b c a b c b')
  assert run() == line  # Nothing in it depends on the clock.
  assert (report['dtype'], report['length']) == ('float32', 4)
  other = json.loads(run('--length=3', '--context=2', '--num_calls=2'))
  assert (other['length'], other['context'], other['num_calls']) == (3, 2, 2)
  with pytest.raises(ValueError, match='--length=5 must be from 1 to'):
    run('--length=5')
