"""Rows of documents: what is in them, and that a network sees only that."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdlm_jax import losses, predict, schedules
from mdlm_jax.data.batches import Rows, batches
from mdlm_jax.data.documents import Documents, DocumentsInMemory
from mdlm_jax.data.rows import document_rows, example_rows, packed_rows
from mdlm_jax.models import transformer
from mdlm_jax.vocab import Vocab

PAD, EOS = -1, -2


def in_memory(*sizes, given=None):
  """Documents whose ids are unique: 100 * document + position."""
  ids = [100 * i + np.arange(size) for i, size in enumerate(sizes)]
  num_given = np.zeros(len(ids), int) if given is None else np.array(given)
  return DocumentsInMemory(ids, num_given)


def is_left_out(size, num_given, length):
  # One given token may be BOS, more are a prompt.
  return num_given >= size or (num_given > 1 and size > length)


# Sizes of documents and how many of their tokens are given.
SIZES = st.lists(
  st.tuples(st.integers(0, 12), st.integers(0, 3)).map(
    lambda pair: (pair[0], min(pair))
  ),
  min_size=1,
  max_size=20,
)


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 9), st.booleans(), st.randoms())
def test_rows_hold_every_document_that_can_be_learned(
  sizes, length, is_packed, random
):
  documents = in_memory(*[n for n, _ in sizes], given=[g for _, g in sizes])
  kept = [i for i, pair in enumerate(sizes) if not is_left_out(*pair, length)]
  make = functools.partial(packed_rows, seed=3) if is_packed else document_rows
  if not kept:
    with pytest.raises(ValueError, match='none can be learned from'):
      make(documents, length=length, pad_id=PAD)
    return
  rows = make(documents, length=length, pad_id=PAD)
  taken = rows.take(np.arange(len(rows)))
  ids, valid = taken['ids'], taken['valid']
  assert ids.shape == valid.shape == (len(rows), length)
  assert ids.dtype == np.int32 and valid.dtype == bool
  # Every token once; padding on the right.
  tokens = [100 * i + j for i in kept for j in range(sizes[i][0])]
  assert sorted(ids[valid].tolist()) == tokens
  assert (ids[~valid] == PAD).all() and (valid == (ids != PAD)).all()
  assert (valid[:, :-1] >= valid[:, 1:]).all() and valid[:, 0].all()
  assert ('given' in taken) == any(num_given for _, num_given in sizes)
  if 'given' in taken:
    num_given = np.array([num_given for _, num_given in sizes])
    is_given = ids % 100 < num_given[np.where(valid, ids // 100, 0)]
    np.testing.assert_array_equal(taken['given'], is_given & valid)
  if is_packed:
    segments, positions = taken['segments'], taken['positions']
    assert segments.dtype == positions.dtype == np.int32
    step = np.diff(segments, axis=1)
    assert (segments[:, 0] == 0).all() and np.isin(step, (0, 1)).all()
    for row in range(len(rows)):
      # One document, all of whose slots stand side by side; padding is another.
      for segment in range(segments[row].max() + 1):
        slots = segments[row] == segment
        assert len(set(zip(ids[row, slots] // 100, valid[row, slots]))) == 1
        assert positions[row, slots].tolist() == list(range(slots.sum()))
  else:
    assert not {'segments', 'positions'} & taken.keys()
  facts = rows.facts
  assert facts['documents'] + facts['too_long'] + facts['all_given'] == len(
    sizes
  )
  assert facts['documents'] == len(kept)
  assert facts['learned'] == valid.sum() - taken.get('given', ids * 0).sum()
  assert facts['utilisation'] == valid.mean()
  # A row is the same whenever and beside whichever others it is asked for.
  order = np.array([random.randrange(len(rows)) for _ in range(7)])
  for name, values in rows.take(order).items():
    np.testing.assert_array_equal(values, taken[name][order])


def test_packed_rows_written_out():
  # 7 takes a row, 4 and 3 share one, 2 stands alone; 3 has a prompt of one.
  rows = packed_rows(
    in_memory(4, 7, 3, 2, given=[0, 0, 1, 0]), length=7, pad_id=PAD, seed=0
  )
  taken = rows.take(np.arange(3))
  order = np.argsort(taken['ids'][:, 0])
  taken = {name: values[order].tolist() for name, values in taken.items()}
  o, x = False, True
  assert taken == {
    'ids': [
      [0, 1, 2, 3, 200, 201, 202],
      [100, 101, 102, 103, 104, 105, 106],
      [300, 301, -1, -1, -1, -1, -1],
    ],
    'valid': [[x] * 7, [x] * 7, [x] * 2 + [o] * 5],
    'given': [[o] * 4 + [x, o, o], [o] * 7, [o] * 7],
    'segments': [[0] * 4 + [1] * 3, [0] * 7, [0] * 2 + [1] * 5],
    'positions': [
      [0, 1, 2, 3, 0, 1, 2],
      [0, 1, 2, 3, 4, 5, 6],
      [0, 1, 0, 1, 2, 3, 4],
    ],
  }


@pytest.mark.parametrize(
  ('answer_multiple', 'num_learned', 'num_valid'),
  [(None, 4, 6), (4, 4, 6), (3, 6, 8), (8, 8, 10), (11, 10, 12), (12, 10, 12)],
)
def test_answers_are_filled_up_by_rule(answer_multiple, num_learned, num_valid):
  """A prompt of 2, an answer of 3 and its end; filled up with 4 EOS, say."""
  documents = in_memory(6, given=[2])
  rows = example_rows(
    documents,
    length=12,
    pad_id=PAD,
    eos_id=EOS,
    answer_multiple=answer_multiple,
  )
  taken = rows.take(np.array([0]))
  filling = [EOS] * (num_valid - 6)
  padding = [PAD] * (12 - num_valid)
  assert taken['ids'].tolist() == [[*range(6), *filling, *padding]]
  assert taken['valid'].tolist() == [[s < num_valid for s in range(12)]]
  assert taken['given'].tolist() == [[s < 2 for s in range(12)]]
  # What the loss counts says how many positions are learned.
  answer = jnp.asarray(taken['valid'] & ~taken['given'])
  total = losses.continuous_bound(
    jnp.full((1, 12), -1.0), answer, answer, jnp.ones(1)
  )
  assert total.count == total.sum == num_learned
  share = (num_learned - 4) / num_learned
  assert rows.facts.get('filling_share', 0) == share


def test_examples_are_whole_or_left_out_and_counted():
  documents = in_memory(5, 6, 7, 0, 3, given=[1, 0, 0, 0, 3])
  rows = example_rows(documents, length=6, pad_id=PAD)
  assert rows.take(np.arange(2))['ids'][:, 0].tolist() == [0, 100]
  assert rows.facts == {
    'documents': 2, 'too_long': 1, 'all_given': 2, 'learned': 10, 'rows': 2,
    'utilisation': 11 / 12,
  }  # fmt: skip
  with pytest.raises(ValueError, match='1 are longer than length=6 and must'):
    example_rows(in_memory(7), length=6, pad_id=PAD)
  with pytest.raises(ValueError, match=r'answer_multiple=2 fills .* has none'):
    example_rows(documents, length=6, pad_id=PAD, answer_multiple=2)
  with pytest.raises(ValueError, match='answer_multiple=0'):
    example_rows(documents, length=6, pad_id=PAD, answer_multiple=0, eos_id=EOS)
  for make in (document_rows, example_rows):
    with pytest.raises(ValueError, match='length=0'):
      make(documents, length=0, pad_id=PAD)


def test_given_tokens_are_no_more_than_there_are():
  with pytest.raises(ValueError, match=r'num_given\[1\]=3 must be from 0 to 2'):
    in_memory(4, 2, given=[4, 3])
  with pytest.raises(ValueError, match=r'shape \(1,\) for 2 documents'):
    in_memory(4, 2, given=[1])


def test_a_long_document_is_read_once(monkeypatch):
  monkeypatch.setattr('mdlm_jax.data.rows._LONG', 9)
  read = []

  class Counted(DocumentsInMemory):
    def ids_of(self, indices):
      read.extend(indices)
      return super().ids_of(indices)

  documents = Counted(in_memory(9, 40, 10).ids, np.zeros(3, int))
  rows = document_rows(documents, length=5, pad_id=PAD)
  for _ in range(2):
    taken = rows.take(np.arange(len(rows)))
  np.testing.assert_array_equal(
    taken['ids'][taken['valid']], np.concatenate(documents.ids)
  )
  assert sorted(read) == [0, 0, 0, 0, 1, 2]


def test_batches_are_drawn_from_rows_of_documents():
  documents = in_memory(*range(1, 30))
  assert isinstance(documents, Documents)
  rows = packed_rows(documents, length=40, pad_id=PAD, seed=0)
  assert isinstance(rows, Rows)
  whole = next(batches(rows, batch_size=4, seed=1))
  part = next(batches(rows, batch_size=4, seed=1, local=np.array([1, 3])))
  assert whole.keys() == {
    'ids', 'valid', 'segments', 'positions', 'row_ids', 'record_ids'
  }  # fmt: skip
  for name, values in part.items():
    np.testing.assert_array_equal(values, whole[name][[1, 3]])


# What a network makes of rows. Programs are shared: [2, 16], and once [2, 8].
VOCAB = Vocab(size=11, mask_id=1, pad_id=0)
CONFIG = transformer.TransformerConfig(
  vocab_size=11, num_layers=2, model_dim=16, num_heads=2, mlp_dim=24,
  max_length=16,
)  # fmt: skip
BLOCK_CONFIG = dataclasses.replace(CONFIG, attention_block=3)
TEXTS = [np.array([3, 5, 7, 2, 9]), np.array([4, 6, 8, 10, 2, 3, 5])]


@functools.cache
def random_params(config):
  params = transformer.init(config, jax.random.key(0))
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: leaf + 0.2 * rng.standard_normal(leaf.shape, np.float32),
    params,
  )


@functools.partial(jax.jit, static_argnums=0)
def _asked(config, params, batch):
  def loss(params):
    # A level for each block of three of each document.
    blocks = batch['positions'] // 3 + batch['segments']
    t = 0.4 + 0.1 * (blocks % 4)
    log_probs, masked = predict.corrupted_log_probs(
      transformer.denoiser(config), params, jax.random.key(5), batch['ids'], t,
      batch['valid'], vocab=VOCAB, schedule=schedules.linear(),
      row_ids=batch['row_ids'], positions=batch['positions'],
      segments=batch['segments'],
    )  # fmt: skip
    total = losses.continuous_bound(log_probs, masked, batch['valid'], t)
    return total.sum, (log_probs, masked)

  return jax.value_and_grad(loss, has_aux=True)(params)


def asked(config, batch):
  """((loss, (log_probs, masked)), gradient) of rows of equal row ids."""
  length = batch['ids'].shape[1]
  batch = {
    'row_ids': np.zeros(2, int),
    'segments': np.zeros((2, length), int),
    'positions': np.tile(np.arange(length), (2, 1)),
  } | batch
  return _asked(config, random_params(config), batch)


def packed_batch(texts):
  """Both documents in one row, and a row without any."""
  documents = DocumentsInMemory(texts, np.zeros(2, int))
  rows = packed_rows(documents, length=16, pad_id=0, seed=2)
  batch = rows.take(np.zeros(2, int))
  # The longer one is first.
  assert batch['ids'][0, :7].tolist() == texts[1].tolist()
  assert batch['ids'][0, 7:12].tolist() == texts[0].tolist()
  batch['valid'][1] = False
  return batch


def unpacked_batch(texts):
  """A row for each, in the order of the packed ones and with their noise."""
  documents = DocumentsInMemory(texts[::-1], np.zeros(2, int))
  batch = document_rows(documents, length=16, pad_id=0).take(np.arange(2))
  return batch | {'segments': np.tile([[0], [1]], 16)}


@pytest.mark.parametrize('config', [CONFIG, BLOCK_CONFIG])
def test_a_packed_document_equals_its_own_unpacked_run(config):
  """Log-probabilities, loss and gradient, at equal levels and noise."""
  (loss, (log_probs, masked)), gradient = asked(config, packed_batch(TEXTS))
  (expected, (alone, alone_masked)), expected_gradient = asked(
    config, unpacked_batch(TEXTS)
  )
  for row, slots in ((0, slice(7)), (1, slice(7, 12))):
    own = slice(slots.stop - (slots.start or 0))
    np.testing.assert_array_equal(masked[0, slots], alone_masked[row, own])
    assert masked[0, slots].any() and not masked[0, slots].all()
    np.testing.assert_allclose(
      log_probs[0, slots], alone[row, own], rtol=0, atol=1e-5
    )
  assert loss > 1
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
    gradient,
    expected_gradient,
  )


@pytest.mark.parametrize('config', [CONFIG, BLOCK_CONFIG])
def test_positions_alone_do_not_keep_documents_apart(config):
  other = [TEXTS[0], TEXTS[1][::-1]]

  def second(texts, **changes):
    (_, (log_probs, masked)), _ = asked(config, packed_batch(texts) | changes)
    return log_probs[0, 7:12], masked[0, 7:12]

  (before, masked), (after, same_masked) = map(second, (TEXTS, other))
  np.testing.assert_array_equal(masked, same_masked)
  np.testing.assert_array_equal(before, after)
  one = {'segments': np.zeros((2, 16), int)}
  before, after = (second(texts, **one)[0] for texts in (TEXTS, other))
  assert abs(before - after).max() > 1e-2


def test_padding_to_8_and_to_16_gives_the_same_loss_and_gradient():
  def padded(length):
    documents = DocumentsInMemory(TEXTS, np.zeros(2, int))
    rows = document_rows(documents, length=length, pad_id=0)
    (loss, _), gradient = asked(CONFIG, rows.take(np.arange(2)))
    return jax.tree.map(lambda total: total / 12, (loss, gradient))  # By token.

  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
    padded(8),
    padded(16),
  )
