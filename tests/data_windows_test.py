import itertools

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mdlm_jax.data.corpus import Document
from mdlm_jax.data.windows import (
  every_window,
  rolling_windows,
  training_windows,
)
from mdlm_jax.models.hub_tokenizer import HubTokenizer
from mdlm_jax.tokenizer import character_tokenizer
from mdlm_jax.vocab import Vocab


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


def test_a_text_that_spells_mask_out_is_refused_and_pad_need_not_exist():
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({'<mask>': 0, 'a': 1, 'b': 2})
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Split('', 'isolated')
  backend.add_special_tokens(['<mask>'])
  tokenizer = HubTokenizer(backend, Vocab(size=3, mask_id=0))
  found = training_windows(
    [Document('one', 'abba'), Document('two', 'b')], tokenizer, 3
  ).take(np.arange(3))
  assert found['ids'][found['valid']].tolist() == [1, 2, 2, 2, 2, 1, 2]
  with pytest.raises(ValueError, match='two holds MASK'):
    training_windows(
      [Document('one', 'abba'), Document('two', 'ab<mask>ab')], tokenizer, 3
    )
