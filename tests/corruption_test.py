import functools

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

from mdlm_jax import schedules
from mdlm_jax.corruption import corrupt, corrupt_with_noise, random_lengths

MASK = 99
LINEAR = schedules.linear()

ROWS, LENGTH = 64, 32
IDS = jnp.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
SLOTS = jnp.broadcast_to(jnp.arange(LENGTH), IDS.shape)

_corrupt = jax.jit(
  functools.partial(corrupt, mask_id=MASK), static_argnames='schedule'
)


def _draw(seed, t, *, ids=IDS, schedule=LINEAR, **given):
  """Corrupts with every option filled in, so that one compilation serves."""
  num_rows, length = ids.shape
  options = {
    'valid': jnp.ones(ids.shape, bool),
    'row_ids': jnp.arange(num_rows),
    'positions': jnp.broadcast_to(jnp.arange(length), ids.shape),
    'segments': jnp.zeros(ids.shape, int),
    'protected': jnp.zeros(ids.shape, bool),
  } | given
  t = jnp.broadcast_to(jnp.asarray(t, jnp.float32), (num_rows,))
  return _corrupt(jax.random.key(seed), ids, t, schedule=schedule, **options)


@pytest.mark.parametrize(
  'schedule, probability',
  [(schedules.linear(), 0.3), (schedules.cosine(), np.sin(0.15 * np.pi))],
)
def test_each_token_is_masked_with_probability_one_minus_alpha(
  schedule, probability
):
  share = np.mean(
    [_draw(seed, 0.3, schedule=schedule).masked.mean() for seed in range(10)]
  )
  error = np.sqrt(probability * (1 - probability) / (10 * IDS.size))
  # Four standard errors; false alarm 6 in 100,000.
  assert abs(share - probability) < 4 * error


def test_neighbouring_tokens_are_masked_independently():
  masked = np.array(_draw(1, 0.5).masked).reshape(-1, 2)
  patterns = np.bincount(masked @ [2, 1], minlength=4)
  expected = masked.shape[0] / 4
  # Chi-square with 3 degrees of freedom; false alarm 1 in 1,000.
  assert ((patterns - expected) ** 2 / expected).sum() < 16.3


@pytest.mark.parametrize('schedule', [schedules.linear(), schedules.cosine()])
def test_t_one_masks_all_and_t_zero_masks_nothing(schedule):
  everything = _draw(2, 1.0, schedule=schedule)
  np.testing.assert_array_equal(everything.corrupted_ids, MASK)
  nothing = _draw(2, 0.0, schedule=schedule)
  np.testing.assert_array_equal(nothing.corrupted_ids, IDS)
  assert not nothing.masked.any()


def test_a_schedule_with_a_floor_leaves_that_share_visible_at_t_one():
  visible = ~_draw(3, 1.0, schedule=schedules.log_linear(0.2)).masked
  assert abs(visible.mean() - 0.2) < 4 * np.sqrt(0.16 / IDS.size)


def test_the_mask_id_in_clean_text_is_not_masked():
  ids = IDS.at[0, 1].set(MASK)
  result = _draw(4, 0.0, ids=ids)
  assert result.masked.sum() == 0
  np.testing.assert_array_equal(result.corrupted_ids, ids)


def test_documents_packed_in_a_row_have_noise_of_their_own():
  document = SLOTS // 16
  positions = SLOTS % 16
  shared = _draw(5, 0.5, positions=positions).masked
  np.testing.assert_array_equal(shared[:, :16], shared[:, 16:])
  own = _draw(5, 0.5, positions=positions, segments=document).masked
  np.testing.assert_array_equal(own[:, :16], shared[:, :16])
  assert (own[:, 16:] != shared[:, 16:]).mean() > 0.4


def test_protected_prompts_never_change_in_a_thousand_draws():
  protected = SLOTS < 7
  for seed in range(16):  # of 64 rows each
    result = _draw(seed, 1.0, protected=protected)
    np.testing.assert_array_equal(result.corrupted_ids[:, :7], IDS[:, :7])
    np.testing.assert_array_equal(result.masked, ~protected)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_only_masked_positions_change_and_they_are_eligible(seed):
  generator = np.random.default_rng(seed)
  valid, protected = jnp.array(generator.random((2, ROWS, LENGTH)) < 0.5)
  t = generator.random(ROWS)
  result = _draw(seed, t, valid=valid, protected=protected)
  assert not (result.masked & ~(valid & ~protected)).any()
  np.testing.assert_array_equal(
    result.corrupted_ids, np.where(result.masked, MASK, IDS)
  )


def test_a_step_and_row_have_one_mask_and_other_steps_others():
  generator = np.random.default_rng(6)
  steps = [
    np.array(_draw(step, generator.random(ROWS)).masked) for step in range(100)
  ]
  for row in (0, 17):
    patterns = np.stack([masked[row] for masked in steps])
    # Equal patterns come from t near 0 or 1: 6 % of steps.
    assert len(np.unique(patterns, axis=0)) > 80
    # Standard error of the share: sqrt((1/12 + 1/6/32) / 100) = 0.030; false
    # alarm 3 in 1,000.
    assert abs(patterns.mean() - 0.5) < 3 * 0.030
  np.testing.assert_array_equal(_draw(3, 0.5).masked, _draw(3, 0.5).masked)


def test_a_row_alone_equals_the_row_in_a_batch():
  t = jnp.linspace(0.1, 0.9, ROWS)
  whole = _draw(7, t, row_ids=jnp.arange(ROWS) + 40)
  for row in (0, 5, 63):
    alone = _draw(
      7, t[row], ids=IDS[row : row + 1], row_ids=jnp.array([row + 40])
    )
    np.testing.assert_array_equal(
      alone.corrupted_ids[0], whole.corrupted_ids[row]
    )
  assert (whole.masked != _draw(7, t).masked).any()


def test_the_mask_does_not_depend_on_the_padding_side():
  right = _draw(9, 0.5, valid=SLOTS < 20)
  left = _draw(
    9,
    0.5,
    ids=jnp.roll(IDS, 12, axis=1),
    valid=SLOTS >= 12,
    positions=jnp.maximum(SLOTS - 12, 0),
  )
  np.testing.assert_array_equal(
    right.corrupted_ids[:, :20], left.corrupted_ids[:, 12:]
  )
  assert not right.masked[:, 20:].any() and not left.masked[:, :12].any()


def test_eager_with_defaults_equals_jit_with_rows_and_slots_counted_from_zero():
  t = jnp.linspace(0.0, 1.0, ROWS)
  valid = SLOTS < 30
  eager = corrupt(jax.random.key(10), IDS, t, valid, mask_id=MASK)
  jitted = _draw(10, t, valid=valid)
  np.testing.assert_array_equal(eager.corrupted_ids, jitted.corrupted_ids)
  np.testing.assert_array_equal(eager.masked, jitted.masked)
  assert eager.corrupted_ids.dtype == jnp.int32


def test_the_mask_id_is_the_one_given():
  t, valid = jnp.ones(ROWS), jnp.ones(IDS.shape, bool)
  result = corrupt(jax.random.key(12), IDS, t, valid, mask_id=5)
  np.testing.assert_array_equal(result.corrupted_ids, 5)


def test_noise_equal_to_the_probability_does_not_mask():
  # Uniforms are in [0, 1): masked with probability p exactly.
  result = corrupt_with_noise(
    jnp.array([[0.0, 0.5], [0.0, 0.5]]),
    jnp.array([[3, 4], [3, 4]]),
    jnp.array([0.0, 0.5]),
    jnp.ones((2, 2), bool),
    mask_id=MASK,
  )
  np.testing.assert_array_equal(result.masked, [[False, False], [True, False]])


def test_a_count_in_place_of_a_probability_is_refused():
  ids = jnp.zeros((2, 4), int)
  valid = jnp.ones((2, 4), bool)
  checked = jax.jit(checkify.checkify(functools.partial(corrupt, mask_id=MASK)))
  for t in (jnp.array([0.5, 3.0]), jnp.array([-0.1, 0.5]), jnp.full(2, np.nan)):
    with pytest.raises(ValueError, match=r't must lie in \[0, 1\]'):
      corrupt(jax.random.key(11), ids, t, valid, mask_id=MASK)
    error, _ = checked(jax.random.key(11), ids, t, valid)
    assert 't must lie in [0, 1]' in error.get()


@pytest.mark.parametrize('case', ['loss_subs', 'loss_subs_padded'])
def test_recorded_noise_gives_the_corruption_of_mdlm(case):
  golden = golden_data.load('mdlm_dit/schedules_losses')[case]
  probability = 1 - schedules.log_linear(1e-3).alpha(jnp.array(golden['t']))
  np.testing.assert_allclose(probability, golden['move_chance'], atol=3e-7)
  clean_ids = jnp.array(golden['x0'])
  # MDLM corrupts padding too.
  everywhere = jnp.ones(clean_ids.shape, bool)
  result = corrupt_with_noise(
    jnp.array(golden['u_mask']), clean_ids, probability, everywhere, mask_id=97
  )
  np.testing.assert_array_equal(result.corrupted_ids, golden['x_t'])


@pytest.mark.parametrize('case', ['pretrain_loss', 'sft_loss'])
def test_recorded_noise_gives_the_corruption_of_llada(case):
  golden = golden_data.load('llada/counts_losses')[case]
  clean_ids = jnp.array(golden['input_ids'])
  # (1 - eps) t + eps is the linear schedule with times above eps.
  t = 0.999 * jnp.array(golden['t']) + 1e-3
  answer = jnp.ones(clean_ids.shape, bool)
  if case == 'sft_loss':
    slots = np.arange(clean_ids.shape[1])[None]
    answer = jnp.array(slots >= golden['prompt_lengths'][:, None])
  result = corrupt_with_noise(
    jnp.array(golden['mask_uniform']), clean_ids, t, answer, mask_id=126
  )
  np.testing.assert_array_equal(result.corrupted_ids, golden['noisy'])


@functools.partial(jax.jit, static_argnames=('length', 'share'))
def _lengths(seed, row_ids, length=5, share=0.3):
  return random_lengths(jax.random.key(seed), row_ids, length, share)


def test_a_share_of_rows_keeps_a_uniform_length():
  num_rows = 100_000
  kept = _lengths(0, jnp.arange(num_rows))
  counts = np.bincount(kept, minlength=6)
  assert counts[0] == 0 and len(counts) == 6
  # A length below 5 has probability 0.3 / 5, the whole row the rest.
  expected = num_rows * np.array([0.06] * 4 + [0.76])
  # Chi-square with 4 degrees of freedom; false alarm 1 in 1,000.
  assert np.sum((counts[1:] - expected) ** 2 / expected) < 18.47
  # Of a row and the key alone.
  np.testing.assert_array_equal(
    _lengths(0, jnp.arange(num_rows)[::-1])[::-1], kept
  )
  assert (kept != _lengths(1, jnp.arange(num_rows))).mean() > 0.3


def test_every_row_may_be_cut():
  shares = np.bincount(_lengths(0, jnp.arange(6400), share=1.0)) / 6400
  np.testing.assert_allclose(shares[1:], 0.2, atol=0.025)  # 5 standard errors.
  for share in (-0.1, 1.1, float('nan')):
    with pytest.raises(ValueError, match='share='):
      random_lengths(jax.random.key(0), jnp.arange(2), 5, share)
  with pytest.raises(ValueError, match='length=0'):
    random_lengths(jax.random.key(0), jnp.arange(2), 0, 0.5)
