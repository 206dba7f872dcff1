import itertools
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdlm_jax import ngrams
from mdlm_jax.data.batches import batches
from mdlm_jax.data.corpus import (
  Corpus,
  Document,
  corpus_of,
  corpus_tokenizer,
  default_documents,
  in_text8,
  read_corpus,
  read_documents,
  split_tail,
  text8_of,
)
from mdlm_jax.data.windows import (
  every_window,
  rolling_windows,
  training_windows,
)
from mdlm_jax.tokenizer import character_tokenizer


def write(directory, **texts):
  for name, text in texts.items():
    (directory / f'{name}.txt').write_text(text, encoding='utf-8')
  return str(directory / '*.txt')


def test_default_corpus_entropies():
  (document,) = default_documents()
  entropies = ngrams.entropies(document.text)
  if sys.version_info[:2] == (3, 11):
    assert len(document.text) == 465_126
    assert len(set(document.text)) == 103
    np.testing.assert_allclose(entropies, [4.69, 3.55, 2.45], atol=0.005)
  else:  # The text differs a little between versions of Python.
    np.testing.assert_allclose(entropies, [4.69, 3.55, 2.45], atol=0.1)


def test_entropies_of_texts_with_known_ones():
  # ab ab ab ...: one bit for the first character, then none.
  np.testing.assert_allclose(
    ngrams.entropies('ab' * 5000, 1), [1.0, 0.0], atol=1e-3
  )
  # Independent letters: 2 bits whatever the context.
  rng = np.random.default_rng(0)
  text = ''.join(rng.choice(list('abcd'), 200_000))
  np.testing.assert_allclose(ngrams.entropies(text), [2, 2, 2], atol=0.01)


def test_files_are_documents_in_order_of_path(tmp_path):
  files = write(tmp_path, b='second', a='first\r\n', c='third')
  documents = read_documents(files)
  assert [d.text for d in documents] == ['first\r\n', 'second', 'third']
  assert documents[0].name == str(tmp_path / 'a.txt')
  both = f'{tmp_path / "c.txt"}, {tmp_path / "[ab].txt"}'
  assert read_documents(both) == documents


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'', r'bad\.txt is empty \(0 bytes\)'),
    (b' \n\n', r'bad\.txt is empty \(3 bytes\)'),
    (b'ab\xff\xfe', r'bad\.txt is not UTF-8 text: byte 0xff at offset 2'),
    (b'ab\x00c', r'bad\.txt is a binary file: NUL byte at offset 2'),
  ],
)
def test_bad_files_are_named(tmp_path, content, message):
  (tmp_path / 'bad.txt').write_bytes(content)
  with pytest.raises(ValueError, match=message):
    read_documents(str(tmp_path / 'bad.txt'))


def test_missing_files_are_named(tmp_path):
  for files in (str(tmp_path / 'none.txt'), str(tmp_path / '*.txt')):
    with pytest.raises(FileNotFoundError) as error:
      read_documents(files)
    assert files in str(error.value)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text('abc', max_size=30), min_size=1, max_size=4))
def test_tail_is_the_contiguous_last_share(texts):
  documents = [Document(str(i), text) for i, text in enumerate(texts)]
  before, after = split_tail(documents, share=0.25)
  joined = ''.join(texts)
  kept = len(joined) - round(len(joined) / 4)
  assert ''.join(d.text for d in before) == joined[:kept]
  assert ''.join(d.text for d in after) == joined[kept:]
  assert {d.name for d in before} | {d.name for d in after} <= {
    '0',
    '1',
    '2',
    '3',
  }


def test_default_split_holds_out_the_last_5_percent():
  corpus = read_corpus()
  (document,) = default_documents()
  (training,), (validation,), test = corpus
  assert training.text + validation.text == document.text
  assert len(validation.text) == round(0.05 * len(document.text))
  assert test == ()


def test_split_by_document(tmp_path):
  files = write(tmp_path, **{f'{i:02}': f'text {i}' for i in range(41)})
  corpus = read_corpus(files, split='document')
  assert [d.text for d in corpus.validation] == ['text 0', 'text 20', 'text 40']
  assert [d.text for d in corpus.test] == ['text 10', 'text 30']
  assert len(corpus.training) == 36


def test_text8_is_split_by_characters_and_spelled_in_27_symbols(tmp_path):
  files = write(tmp_path, a='In 1790, Mr. \u00c9mile --\n\n Adams' + 'x' * 65)
  corpus = read_corpus(files, split='tails', text8=True)
  spelled = 'in one seven nine zero mr mile adams' + 'x' * 65
  assert ''.join(part[0].text for part in corpus) == spelled
  assert [len(part[0].text) for part in corpus] == [91, 5, 5]
  # What has this form stays as it is; what loses everything is named.
  assert text8_of(spelled) == spelled
  with pytest.raises(ValueError, match='b holds no letter'):
    in_text8([Document('b', '... \u00e9')])
  settings = {'files': files, 'validation_files': '', 'split': 'tail'}
  assert corpus_of(settings) == read_corpus(files)
  assert corpus_of(settings | {'text8': True}) == read_corpus(files, text8=True)


def test_validation_files_leave_the_training_text_whole(tmp_path):
  write(tmp_path, a='training', b='held out')
  corpus = read_corpus(
    str(tmp_path / 'a.txt'), validation_files=str(tmp_path / 'b.txt')
  )
  assert [d.text for d in corpus.training] == ['training']
  assert [d.text for d in corpus.validation] == ['held out']


def test_impossible_splits_are_refused(tmp_path):
  files = write(tmp_path, a='text')
  with pytest.raises(ValueError, match='at least 2 documents, got 1'):
    read_corpus(files, split='document')
  with pytest.raises(ValueError, match="split='half'"):
    read_corpus(files, split='half')
  with pytest.raises(ValueError, match='validation_files'):
    read_corpus(files, split='document', validation_files=files)


def test_character_tokenizer_knows_the_held_out_text():
  corpus = Corpus((Document('a', 'abc'),), (Document('b', 'xyz'),))
  assert (
    corpus_tokenizer(corpus).decode(corpus_tokenizer(corpus).encode('zxa'))
    == 'zxa'
  )
  assert corpus_tokenizer(corpus, 258).vocab.size == 258


@settings(max_examples=200, deadline=None)
@given(
  st.lists(st.integers(0, 25), min_size=1, max_size=4).filter(any),
  st.integers(1, 8),
  st.integers(0, 7),
)
def test_windows_cover_every_token_inside_documents(sizes, length, context):
  # Token ids are unique: 100 * document + position + 1.
  documents = [100 * i + np.arange(n) + 1 for i, n in enumerate(sizes)]
  context = min(context, length - 1)
  every = every_window(documents, length=length, pad_id=0)
  assert len(every.starts) == sum(max(n - length, 0) + 1 for n in sizes if n)
  rolling = rolling_windows(documents, length=length, context=context, pad_id=0)
  taken = every.take(np.arange(len(every)))
  for ids, valid in (taken.values(), rolling[:2]):
    assert ids.shape == valid.shape == (len(ids), length)
    assert set(ids[valid]) == set(itertools.chain(*documents))
    assert not ids[~valid].any()
    assert valid[:, 0].all()
    for row, is_valid in zip(ids, valid):
      assert len(set(row[is_valid] // 100)) == 1
      np.testing.assert_array_equal(np.diff(row[is_valid]), 1)
  # Each token is new once, in order, after enough context.
  np.testing.assert_array_equal(
    rolling.ids[rolling.new], list(itertools.chain(*documents))
  )
  np.testing.assert_array_equal(rolling.ids[:, 0] // 100, rolling.document)
  later = rolling.ids[:, 0] % 100 > 1
  assert (np.argmax(rolling.new, 1)[later] >= context).all()
  assert rolling.valid[later].all()


def test_ten_tokens_in_windows_of_four():
  windows = rolling_windows([np.arange(2, 12)], length=4, pad_id=0)
  np.testing.assert_array_equal(
    windows.ids, [[2, 3, 4, 5], [6, 7, 8, 9], [8, 9, 10, 11]]
  )
  np.testing.assert_array_equal(windows.new.sum(1), [4, 4, 2])
  windows = rolling_windows([np.arange(2, 12)], length=4, context=2, pad_id=0)
  np.testing.assert_array_equal(windows.ids[:, 0], [2, 4, 6, 8])
  np.testing.assert_array_equal(windows.new.sum(1), [4, 2, 2, 2])


def test_text_shorter_than_the_sequence_length_is_named():
  documents = [Document('a.txt', 'abc'), Document('b.txt', 'abcde')]
  tokenizer = character_tokenizer('abcde')
  with pytest.raises(ValueError, match=r'b\.txt: 5 tokens .* length 6'):
    training_windows(documents, tokenizer, 6)
  # One document that is long enough will do; the other is filled up.
  windows = training_windows(documents, tokenizer, 4)
  assert len(windows.starts) == 3


def epoch_windows(num_windows, length=3):
  return every_window(
    [np.arange(num_windows + length - 1)], length=length, pad_id=99
  )


def test_batches_hold_windows_with_global_row_ids():
  batch = next(batches(epoch_windows(64), batch_size=8, seed=0))
  assert batch['ids'].shape == (8, 3) and batch['ids'].dtype == np.int32
  assert batch['valid'].dtype == bool and batch['valid'].all()
  np.testing.assert_array_equal(batch['row_ids'], np.arange(8))
  np.testing.assert_array_equal(np.diff(batch['ids']), 1)


def first_ids(iterator, num_batches):
  return np.concatenate(
    [next(iterator)['ids'][:, 0] for _ in range(num_batches)]
  )


def test_each_epoch_has_every_window_once_in_another_order():
  ids = first_ids(batches(epoch_windows(64), batch_size=8, seed=0), 24)
  epochs = ids.reshape(3, 64)
  np.testing.assert_array_equal(
    np.sort(epochs, 1), np.tile(np.arange(64), (3, 1))
  )
  assert len({tuple(epoch) for epoch in epochs}) == 3


def test_seed_orders_the_data():
  windows = epoch_windows(64)
  a, b, c = (
    first_ids(batches(windows, batch_size=8, seed=seed), 4)
    for seed in (0, 0, 1)
  )
  np.testing.assert_array_equal(a, b)
  assert (a != c).any()


@pytest.mark.parametrize('batch_size', [10, 64])
def test_restored_iterator_goes_on_with_the_next_batch(batch_size):
  # Batches of 10 end inside the epoch of 64 windows.
  windows = epoch_windows(64)
  unbroken = first_ids(batches(windows, batch_size=batch_size, seed=0), 15)
  first = batches(windows, batch_size=batch_size, seed=0)
  before = first_ids(first, 6)
  second = batches(windows, batch_size=batch_size, seed=0)
  second.set_state(first.get_state())
  after = first_ids(second, 9)
  np.testing.assert_array_equal(np.concatenate([before, after]), unbroken)


def test_batch_size_below_one_is_refused():
  with pytest.raises(ValueError, match='batch_size=0'):
    batches(epoch_windows(8), batch_size=0, seed=0)


def test_entropy_needs_enough_text():
  with pytest.raises(ValueError, match='2 characters'):
    ngrams.entropies('ab', max_order=2)
  assert ngrams.entropies('ab', max_order=0) == (math.log2(2),)
