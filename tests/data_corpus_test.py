import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdlm_jax import ngrams
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


def test_prepared_documents_are_no_text():
  settings = {'prepared': 'DIR', 'files': '', 'validation_files': ''}
  with pytest.raises(ValueError, match='DIR holds prepared documents'):
    corpus_of(settings | {'split': 'tail'})


def test_character_tokenizer_knows_the_held_out_text():
  corpus = Corpus((Document('a', 'abc'),), (Document('b', 'xyz'),))
  assert (
    corpus_tokenizer(corpus).decode(corpus_tokenizer(corpus).encode('zxa'))
    == 'zxa'
  )
  assert corpus_tokenizer(corpus, 258).vocab.size == 258


def test_entropy_needs_enough_text():
  with pytest.raises(ValueError, match='2 characters'):
    ngrams.entropies('ab', max_order=2)
  assert ngrams.entropies('ab', max_order=0) == (math.log2(2),)
