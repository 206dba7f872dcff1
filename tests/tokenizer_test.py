import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdlm_jax import tokenizer as tokenizer_lib

TEXT = 'The cat\n\n sat.\r\n\t[MASK] [PAD] é\u3000\N{GRINNING FACE}  end '
CHARACTERS = tokenizer_lib.character_tokenizer(TEXT)
BPE = tokenizer_lib.train_bpe([TEXT, '[MASK][PAD]' * 500], 270)


def test_characters_are_numbered_from_two_in_code_point_order():
  tokenizer = tokenizer_lib.character_tokenizer('cab\n')
  np.testing.assert_array_equal(tokenizer.encode('\nabcab'), [2, 3, 4, 5, 3, 4])
  assert tokenizer.encode('ab').dtype == np.int32
  assert tokenizer.vocab.size == 6
  assert (tokenizer.vocab.pad_id, tokenizer.vocab.mask_id) == (0, 1)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=sorted(set(TEXT))))
def test_character_round_trip(text):
  ids = CHARACTERS.encode(text)
  assert len(ids) == len(text)
  assert CHARACTERS.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=['Cs'])))
def test_bpe_round_trip_of_any_text(text):
  assert BPE.decode(BPE.encode(text)) == text


@pytest.mark.parametrize('tokenizer', [CHARACTERS, BPE])
@pytest.mark.parametrize('text', ['[MASK]', '[PAD]', 'a [MASK][PAD]\n', ''])
def test_no_text_encodes_to_a_special_id(tokenizer, text):
  # The byte pairs were learned from a text full of '[MASK][PAD]'.
  ids = tokenizer.encode(text.replace('a', 'e'))
  assert not np.isin(ids, [0, 1]).any()
  assert tokenizer.decode(ids) == text.replace('a', 'e')


def test_bpe_uses_its_merges_and_has_the_size_asked_for():
  tokenizer = tokenizer_lib.train_bpe(['the the the then'], 261)
  assert tokenizer.vocab.size == 261
  # t+h, th+e and Ġ+the are the three most frequent pairs.
  assert len(tokenizer.encode('the the')) == 2


def test_bpe_size_out_of_reach_is_refused():
  with pytest.raises(ValueError, match='at least 258'):
    tokenizer_lib.train_bpe(['abc'], 257)
  with pytest.raises(ValueError, match='fewer than vocab_size=1000'):
    tokenizer_lib.train_bpe(['abc'], 1000)
  with pytest.raises(ValueError, match='at most 4194304'):
    tokenizer_lib.train_bpe(['abc'], 2**31)


def test_unknown_characters_are_listed():
  with pytest.raises(ValueError, match=r"unknown characters 'q' 'ß'"):
    CHARACTERS.encode('cat qßq')


def test_decode_leaves_padding_out_and_shows_holes_only_on_request():
  tokenizer = tokenizer_lib.character_tokenizer('abc')
  ids = [2, 1, 1, 3, 0, 0]
  assert tokenizer.decode(ids) == 'ab'
  assert tokenizer.decode(np.array(ids), mask='_') == 'a__b'
  assert tokenizer.decode([]) == ''


def test_partial_utf8_decodes_to_the_replacement_character():
  ids = BPE.encode('€')
  assert len(ids) > 1
  assert BPE.decode(ids[1:]).count('\N{REPLACEMENT CHARACTER}') >= 1
  assert BPE.decode(np.insert(ids, 1, 1), mask='_').count('_') == 1


@pytest.mark.parametrize('tokenizer', [CHARACTERS, BPE])
def test_save_and_load(tokenizer, tmp_path):
  tokenizer.save(tmp_path / 'tokenizer.json')
  loaded = tokenizer_lib.Tokenizer.load(tmp_path / 'tokenizer.json')
  assert loaded.vocab == tokenizer.vocab
  assert loaded.alphabet == tokenizer.alphabet
  np.testing.assert_array_equal(
    loaded.encode('The cat'), tokenizer.encode('The cat')
  )


def test_what_is_no_tokenizer_of_ours_is_refused():
  with pytest.raises(ValueError, match='not a tokenizer'):
    tokenizer_lib.Tokenizer.from_json('{}')
  other = BPE.to_json().replace('[MASK]', '<mask>')
  with pytest.raises(ValueError, match=r'must be \[PAD\], \[MASK\]'):
    tokenizer_lib.Tokenizer.from_json(other)


@pytest.mark.parametrize('bpe_vocab_size', [0, 262])
def test_an_end_that_no_text_encodes_to(bpe_vocab_size):
  text = 'see [EOS] and [MASK], the end. ' * 5
  tokenizer = (
    tokenizer_lib.train_bpe([text], bpe_vocab_size, eos=True)
    if bpe_vocab_size
    else tokenizer_lib.character_tokenizer(text, eos=True)
  )
  assert tokenizer.vocab.eos_ids == (2,)
  assert (
    tokenizer_lib.Tokenizer.from_json(tokenizer.to_json()).vocab
    == tokenizer.vocab
  )
  ids = tokenizer.encode(text)
  assert ids.min() >= 3
  assert tokenizer.decode([0, *ids.tolist(), 2]) == text
  # Without one there is none.
  assert tokenizer_lib.character_tokenizer(text).vocab.eos_ids == ()
