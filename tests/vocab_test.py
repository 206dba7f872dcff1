import numpy as np
import pytest

from mdlm_jax.vocab import Vocab


def test_drawable_excludes_mask_pad_and_forbidden_ids():
  vocab = Vocab(
    size=7, mask_id=1, pad_id=0, bos_id=2, eos_ids=(3,), forbidden_ids=(5, 6)
  )
  expected = [False, False, True, True, True, False, False]
  np.testing.assert_array_equal(vocab.drawable, expected)
  assert vocab.protected_pad_id == 0


def test_forbidding_adds_to_what_is_forbidden():
  vocab = Vocab(size=5, mask_id=1, eos_ids=(2,), forbidden_ids=(3,))
  fewer = vocab.forbidding(vocab.eos_ids)
  assert (fewer.forbidden_ids, fewer.eos_ids) == ((3, 2), (2,))
  np.testing.assert_array_equal(
    fewer.drawable, [True, False, False, False, True]
  )
  assert fewer.forbidding([2]) == fewer
  with pytest.raises(ValueError, match='no id that can be drawn'):
    fewer.forbidding([0, 4])


def test_without_pad_no_id_is_protected():
  vocab = Vocab(size=3, mask_id=2)
  np.testing.assert_array_equal(vocab.drawable, [True, True, False])
  assert vocab.protected_pad_id == -1


def test_pad_that_is_eos_is_an_ordinary_token():
  vocab = Vocab(size=4, mask_id=3, pad_id=0, eos_ids=(0, 1), pad_is_eos=True)
  np.testing.assert_array_equal(vocab.drawable, [True, True, True, False])
  assert vocab.protected_pad_id == -1


def test_a_last_row_of_the_table_may_be_mask():
  assert Vocab(size=8, mask_id=7).mask_id == 7


@pytest.mark.parametrize(
  'roles, named',
  [
    ({'mask_id': 8}, 'mask_id=8'),
    ({'mask_id': -1}, 'mask_id=-1'),
    ({'mask_id': 1, 'pad_id': 8}, 'pad_id=8'),
    ({'mask_id': 1, 'pad_id': -1}, 'pad_id=-1'),
    ({'mask_id': 1, 'bos_id': 9}, 'bos_id=9'),
    ({'mask_id': 1, 'eos_ids': (2, 8)}, 'eos_ids=8'),
    ({'mask_id': 1, 'forbidden_ids': (-2,)}, 'forbidden_ids=-2'),
    ({'mask_id': 1, 'pad_id': 1}, 'pad_id=1 is also mask_id'),
    ({'mask_id': 1, 'bos_id': 1}, 'bos_id=1 is also mask_id'),
    ({'mask_id': 1, 'eos_ids': (0, 1)}, 'eos_ids=1 is also mask_id'),
    ({'mask_id': 1, 'pad_id': 0, 'eos_ids': (0,)}, 'pad_is_eos=True'),
    ({'mask_id': 1, 'pad_id': 0, 'pad_is_eos': True}, 'pad_is_eos=True'),
    ({'mask_id': 1, 'pad_is_eos': True}, 'pad_is_eos=True'),
    ({'mask_id': 1, 'forbidden_ids': (0, 2, 3, 4, 5, 6, 7)}, 'no id'),
  ],
)
def test_wrong_roles_are_refused_by_name(roles, named):
  with pytest.raises(ValueError, match=named):
    Vocab(size=8, **roles)


def test_vocab_is_hashable_and_comparable():
  assert hash(Vocab(size=3, mask_id=0)) == hash(Vocab(size=3, mask_id=0))
  assert Vocab(size=3, mask_id=0) != Vocab(size=3, mask_id=1)
