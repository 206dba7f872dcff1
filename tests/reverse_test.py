"""The reverse update against a reference written with Python's stable sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

from mdlm_jax.reverse import commit, reverse_update, top_eligible

PAD, MASK = 0, 1
F, T = False, True
WORKED = {
  'x': [[7, 8, 1, 1, 1, 0], [9, 1, 1, 1, 0, 0]],
  'candidate_ids': [[7, 8, 11, 12, 13, 0], [9, 21, 22, 23, 0, 0]],
  'confidence': [
    [0.99, 0.97, 0.55, 0.90, 0.72, 0.80],
    [0.88, 0.60, 0.30, 0.95, 0.10, 0.10],
  ],
  'generation_slots': [[F, F, T, T, T, F], [F, T, T, T, F, F]],
  'reveal_counts': [2, 1],
}
WORKED_NEXT = [[7, 8, 1, 12, 13, 0], [9, 1, 1, 23, 0, 0]]


def update(mask_id=MASK, pad_id=PAD, **changes):
  return reverse_update(**(WORKED | changes), mask_id=mask_id, pad_id=pad_id)


@jax.jit
def jitted_update(*arrays):
  return reverse_update(*arrays, mask_id=MASK, pad_id=PAD)


def reference(x, candidate_ids, confidence, slots, counts):
  """One row at a time: a stable sort of the eligible positions by score."""
  result = np.array(x)
  for row, candidates, scores, open_, count in zip(
    result, candidate_ids, confidence, slots, counts, strict=True
  ):
    eligible = [i for i in range(len(row)) if open_[i] and row[i] == MASK]
    for i in sorted(eligible, key=lambda i: -scores[i])[:count]:
      row[i] = candidates[i]
  return result


def test_worked_example():
  np.testing.assert_array_equal(update(), WORKED_NEXT)


def test_arguments_may_be_lists_numpy_or_jax_arrays():
  for convert in (np.array, jnp.array):
    arrays = {k: convert(v) for k, v in WORKED.items()}
    np.testing.assert_array_equal(update(**arrays), WORKED_NEXT)


@st.composite
def cases(draw):
  batch, length = draw(st.sampled_from([(1, 1), (3, 5)]))
  grid = functools.partial(st.lists, min_size=length, max_size=length)
  rows = functools.partial(st.lists, min_size=batch, max_size=batch)
  x = draw(rows(grid(st.sampled_from([PAD, MASK, MASK, 5]))))
  slots = draw(rows(grid(st.booleans())))
  # Few distinct scores, so that ties, zeros of both signs and infinities meet.
  scores = st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 0.5, np.inf])
  confidence = draw(rows(grid(scores)))
  candidates = draw(rows(grid(st.integers(2, 9))))
  eligible = ((np.array(x) == MASK) & np.array(slots)).sum(1)
  counts = [draw(st.integers(0, int(n))) for n in eligible]
  return x, candidates, confidence, slots, counts


@settings(max_examples=60, deadline=None)
@given(cases())
def test_equals_the_stable_sort_on_any_input(case):
  expected = reference(*case)
  got = reverse_update(*case, mask_id=MASK, pad_id=PAD)
  np.testing.assert_array_equal(got, expected)
  jitted = jitted_update(*map(jnp.array, case))
  np.testing.assert_array_equal(jitted, expected)


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float32'])
def test_ties_go_to_the_lowest_position_in_every_dtype(dtype):
  scores = jnp.array([0.0, 0.5, -0.0, 0.5, 0.0, 0.5], dtype)
  everywhere = jnp.ones(6, bool)
  for count, expected in [(2, [1, 3]), (4, [0, 1, 3, 5]), (5, [0, 1, 2, 3, 5])]:
    marked = top_eligible(scores, everywhere, jnp.int32(count))
    np.testing.assert_array_equal(np.flatnonzero(marked), expected)


def test_ineligible_scores_never_take_a_place():
  # Infinity and NaN outside the eligible positions, minus infinity inside.
  scores = jnp.array([jnp.inf, -jnp.inf, jnp.nan, -jnp.inf, jnp.inf])
  eligible = jnp.array([F, T, F, T, F])
  for count, expected in [(0, []), (1, [1]), (2, [1, 3]), (5, [1, 3])]:
    marked = top_eligible(scores, eligible, jnp.int32(count))
    np.testing.assert_array_equal(np.flatnonzero(marked), expected)


def test_a_static_bound_changes_the_work_and_not_the_result():
  key = jax.random.key(0)
  scores = jax.random.uniform(key, (64,))
  eligible = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, (64,))
  full = top_eligible(scores, eligible, jnp.int32(5))
  bounded = top_eligible(scores, eligible, jnp.int32(5), max_count=5)
  np.testing.assert_array_equal(full, bounded)
  assert full.sum() == 5
  assert top_eligible(scores, eligible, jnp.int32(5), max_count=3).sum() == 3


def test_float64_scores_keep_their_order():
  with jax.enable_x64(True):
    scores = jnp.array([0.5, 0.5 + 1e-12], jnp.float64)
    marked = top_eligible(scores, jnp.ones(2, bool), jnp.int32(1))
  np.testing.assert_array_equal(marked, [False, True])


def test_commit_writes_only_where_told():
  ids, candidates = jnp.array([5, 1, 1]), jnp.array([9, 8, 7])
  written = commit(ids, candidates, jnp.array([F, T, F]))
  np.testing.assert_array_equal(written, [5, 8, 1])


def test_narrow_ids_do_not_wrap():
  got = reverse_update(
    np.array([[5, 1]], np.uint8), [[9, 261]], [[0.1, 0.2]], [[T, T]], [1], 1, 0
  )
  np.testing.assert_array_equal(got, [[5, 261]])


@pytest.mark.parametrize('x', [[], [[], []]])
def test_empty_batches_and_rows(x):
  empty = np.zeros((len(x), 0))
  for run in (reverse_update, jax.jit(reverse_update, static_argnums=(5, 6))):
    got = run(
      empty.astype(int), empty.astype(int), empty, empty.astype(bool),
      np.zeros(len(x), int), 1, 0,
    )  # fmt: skip
    assert got.shape == (len(x), 0)


def test_committed_tokens_are_never_drawn_again():
  # Three of four committed, the network gives them confidence 0.
  got = reverse_update(
    [[5, 6, 7, MASK]], [[9, 9, 9, 8]], [[0.0, 0.0, 0.0, 0.1]],
    [[T, T, T, T]], [1], MASK, PAD,
  )  # fmt: skip
  np.testing.assert_array_equal(got, [[5, 6, 7, 8]])


def test_pad_that_is_eos_may_be_committed():
  with pytest.raises(ValueError, match='MASK or PAD'):
    reverse_update([[MASK]], [[PAD]], [[0.5]], [[T]], [1], MASK, PAD)
  got = reverse_update([[MASK]], [[PAD]], [[0.5]], [[T]], [1], MASK, -1)
  np.testing.assert_array_equal(got, [[PAD]])


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'x': [7, 1, 1]}, r'\[batch, length\]'),
    ({'candidate_ids': [[1, 2]]}, 'candidate_ids must have the shape'),
    ({'confidence': [[0.1, 0.2]]}, 'confidence must have the shape'),
    ({'generation_slots': [[T, F]]}, 'generation_slots must have the shape'),
    ({'generation_slots': [[0] * 6, [1] * 6]}, 'must be bool'),
    ({'confidence': [[1] * 6, [1] * 6]}, 'confidence must be floating'),
    ({'x': np.ones((2, 6))}, 'x must be integer'),
    ({'reveal_counts': [1.0, 1.0]}, 'reveal_counts must be integer'),
    ({'reveal_counts': 2}, 'one count per row'),
    ({'reveal_counts': [1, 1, 1]}, 'one count per row'),
    ({'mask_id': 0}, 'must differ'),
    ({'reveal_counts': [2**32 + 1, 1]}, 'reveal_counts holds a number outside'),
  ],
)
def test_static_mistakes_raise(changes, message):
  with pytest.raises(ValueError, match=message):
    update(**changes)


VALUE_MISTAKES = [
  ({'reveal_counts': [2, -1]}, r'between 0 and the number.*row 1'),
  ({'reveal_counts': [4, 1]}, r'between 0 and the number.*row 0'),
  (
    {'candidate_ids': [[7, 8, 11, MASK, 13, 0], [9, 21, 22, 23, 0, 0]]},
    r'MASK or PAD.*row 0',
  ),
  (
    {'candidate_ids': [[7, 8, 11, 12, 13, 0], [9, 21, 22, PAD, 0, 0]]},
    r'MASK or PAD.*row 1',
  ),
  (
    {'confidence': [[0.5, 0.5, 0.5, np.nan, 0.5, 0.5], [0.5] * 6]},
    r'NaN.*row 0',
  ),
]


@pytest.mark.parametrize(('changes', 'message'), VALUE_MISTAKES)
def test_value_mistakes_raise_on_concrete_arrays(changes, message):
  with pytest.raises(ValueError, match=message):
    update(**changes)


@pytest.mark.parametrize(('changes', 'message'), VALUE_MISTAKES)
def test_value_mistakes_are_found_by_checkify_under_jit(changes, message):
  arrays = [jnp.array(v) for v in (WORKED | changes).values()]
  function = functools.partial(reverse_update, mask_id=MASK, pad_id=PAD)
  jax.jit(function)(*arrays)  # silent without checkify
  error, _ = jax.jit(checkify.checkify(function))(*arrays)
  with pytest.raises(checkify.JaxRuntimeError, match=message):
    error.throw()


def test_checkify_is_silent_on_the_worked_example():
  arrays = [jnp.array(v) for v in WORKED.values()]
  function = functools.partial(reverse_update, mask_id=MASK, pad_id=PAD)
  error, got = jax.jit(checkify.checkify(function))(*arrays)
  error.throw()
  np.testing.assert_array_equal(got, WORKED_NEXT)


def test_nan_confidence_is_ignored_where_not_eligible():
  confidence = np.array(WORKED['confidence'])
  confidence[:, [0, 5]] = np.nan
  np.testing.assert_array_equal(update(confidence=confidence), WORKED_NEXT)
