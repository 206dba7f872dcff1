"""Texts to be measured: rows of a sampler, and pieces of real text."""

import numpy as np

from mdlm_jax.sample_quality import samples
from mdlm_jax.tokenizer import character_tokenizer
from mdlm_jax.vocab import Vocab


def test_rows_end_at_their_first_end_or_padding():
  tokenizer = character_tokenizer('abc')  # Ids 2, 3, 4.
  vocab = Vocab(size=5, mask_id=1, pad_id=0, eos_ids=[4])
  rows = np.array([[2, 3, 4, 2], [3, 0, 0, 0], [2, 2, 2, 2], [4, 2, 2, 2]])
  found = samples.of_rows(rows, tokenizer, vocab)
  assert found.texts == ['ab', 'b', 'aaaa', '']
  assert [ids.tolist() for ids in found.tokens] == [[2, 3], [3], [2] * 4, []]


def test_real_text_is_cut_into_pieces_of_one_size():
  tokenizer = character_tokenizer('abcdefgh')
  real = samples.real('abcdefgh', tokenizer, ['x', 'xxx'], 3)
  assert real.texts == ['ab', 'de', 'gh']
  assert real.tokens[1].tolist() == [5, 6]
  assert samples.pieces('abc', 5, 2) == ['abc', 'abc']
