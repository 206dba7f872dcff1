"""Plans of rows: nothing lost, nothing twice, little wasted."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdlm_jax import noise
from mdlm_jax.data.packing import one_piece_a_row, pack

LENGTHS = st.lists(st.integers(0, 25), max_size=30).map(np.array)


def rows_of(packing):
  """The pieces of each row, as (document, start, length)."""
  pieces = list(zip(*map(np.ndarray.tolist, packing[1:4]), strict=True))
  return [
    pieces[begin:end]
    for begin, end in zip(packing.row_starts, packing.row_starts[1:])
  ]


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 12), st.integers(0, 2**63), st.booleans())
def test_every_token_of_every_document_is_in_one_piece(
  lengths, row_length, seed, share
):
  lengths = lengths.astype(np.uint32)
  if share:
    packing = pack(lengths, row_length=row_length, seed=seed)
    again = pack(lengths, row_length=row_length, seed=seed)
    assert all(map(np.array_equal, packing, again))
  else:
    packing = one_piece_a_row(lengths, row_length=row_length)
    np.testing.assert_array_equal(np.diff(packing.row_starts), 1)
  rows = rows_of(packing)
  assert len(rows) == packing.num_rows
  tokens = []
  for row in rows:
    assert 0 < sum(length for _, _, length in row) <= row_length
    for document, start, length in row:
      assert start % row_length == 0
      # Cut only where it is longer than a row.
      assert length == min(row_length, lengths[document] - start) > 0
      tokens += [(document, start + i) for i in range(length)]
  assert sorted(tokens) == [
    (d, i) for d, n in enumerate(lengths) for i in range(n)
  ]
  slots = max(len(rows), 1) * row_length
  assert packing.utilisation == lengths.sum() / slots


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1), st.integers(0, 99))
def test_what_fits_exactly_is_found(lengths, seed):
  """Each document beside one that is as long as what is left of its row."""
  lengths = np.array([*lengths, *(41 - n for n in lengths)])
  packing = pack(lengths, row_length=41, seed=seed)
  assert packing.utilisation == 1.0
  pairs = packing.lengths.reshape(-1, 2)
  np.testing.assert_array_equal(pairs.sum(1), 41)


def test_little_is_wasted():
  """Waste of best fit falls as the square root of the number of documents.

  The logarithm of a text's tokens is near a normal law.
  """
  rng = np.random.default_rng(0)
  normal = np.exp(rng.normal(6, 1, 30_000)).astype(int) + 1
  for lengths, share in (
    (normal, 0.995),
    (rng.integers(1, 1025, 30_000), 0.995),
    # The least possible: two that are longer than half a row share none, and
    # the third part of a row is left beside each.
    (np.full(30_000, 683), 683 / 1024),
    (np.full(30_000, 2 * 1024 + 512), 1.0),
  ):
    packing = pack(lengths, row_length=1024, seed=1)
    assert share <= packing.utilisation <= 1
  alone = one_piece_a_row(normal, row_length=1024)
  assert alone.utilisation < 0.6


def test_a_row_mixes_lengths_and_the_seed_says_which():
  """In order of length almost every row would hold one of the two."""
  lengths = np.repeat([10, 30], 3000)
  packing = pack(lengths, row_length=160, seed=1)
  mixed = [len({length for *_, length in row}) == 2 for row in rows_of(packing)]
  assert np.mean(mixed) > 0.9
  other = pack(lengths, row_length=160, seed=2)
  assert (packing.documents[:1000] != other.documents[:1000]).mean() > 0.9


def test_a_plan_never_changes():
  """A run that goes on elsewhere, with other versions, has the same rows."""
  packing = pack(np.arange(13), row_length=16, seed=3)
  documents = [[d for d, *_ in row] for row in rows_of(packing)]
  assert documents == [[12, 2], [9, 7], [11, 3, 1], [10, 6], [8, 5], [4]]


def test_as_many_documents_as_a_row_may_have_share_no_noise():
  segments, positions = jnp.meshgrid(
    jnp.arange(4096), jnp.array([0, 1, 2**20 - 1])
  )
  keyed = noise.packed_positions(positions, segments)
  # As 32 bits, which a sign does not change.
  assert len(np.unique(keyed)) == keyed.size


def test_what_cannot_be_packed_is_refused():
  with pytest.raises(ValueError, match=r'4097 documents share .*=4097'):
    pack(np.ones(4097, int), row_length=4097, seed=0)
  assert pack(np.ones(4096, int), row_length=4097, seed=0).num_rows == 1
  with pytest.raises(ValueError, match='row_length=1048577 must be at most'):
    pack(np.ones(1, int), row_length=2**20 + 1, seed=0)
  with pytest.raises(ValueError, match='document 1 has 2147483648 tokens'):
    one_piece_a_row(np.array([1, 2**31]), row_length=8)
  for changes, message in (
    ({'row_length': 0}, 'row_length=0'),
    ({'seed': -1}, 'seed=-1'),
  ):
    with pytest.raises(ValueError, match=message):
      pack(np.ones(1, int), **{'row_length': 1, 'seed': 0} | changes)
