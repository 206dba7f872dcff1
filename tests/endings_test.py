"""EOS kept for last, and rows that stop at it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import blocks, draws, endings, rules, sampling
from mdlm_jax.canvas import from_prompts, from_rows
from mdlm_jax.predict import Denoiser
from mdlm_jax.vocab import Vocab

EOS, PAD, MASK = 2, 0, 1
VOCAB = Vocab(size=9, mask_id=MASK, pad_id=PAD, eos_ids=(EOS,))
GREEDY = draws.categorical(temperature=0.0)


@functools.cache
def network():
  def features(params, cache, ids, *, at, positions, **unused):
    logits = params[positions]
    if at is not None:
      logits = jnp.take_along_axis(logits, at[..., None], 1)
    return logits, ()

  return Denoiser(features, lambda params, hidden: hidden)


def run(table, canvas, rule, *, vocab=VOCAB, length=None, **options):
  return sampling.sample(
    network(), table, jax.random.key(0), canvas, vocab=vocab, rule=rule,
    blocks=None if length is None else blocks.blocks_of(canvas, length),
    trajectory=True, **options,
  )  # fmt: skip


def writes(*tokens):
  """A table that is sure of one token at each position."""
  return 20.0 * jax.nn.one_hot(jnp.array(tokens), VOCAB.size)


EOS_EVERYWHERE = jnp.log(jnp.full((6, VOCAB.size), 0.1 / 6).at[:, EOS].set(0.9))


def commit_calls(result, row):
  """The call in which each slot received its token."""
  masked = np.asarray(result.trajectory[:, row] == MASK)
  return masked.sum(0)


def test_off_the_end_is_a_token_like_any_other():
  canvas = from_prompts([[]] * 50, 6, VOCAB)
  ids = np.asarray(run(EOS_EVERYWHERE, canvas, rules.by_confidence(6)).ids)
  # 300 draws at 0.9, five standard deviations.
  assert abs((ids == EOS).mean() - 0.9) < 5 * 0.0174


def test_forbidden_it_is_never_written():
  canvas = from_prompts([[]] * 50, 6, VOCAB)
  result = run(
    EOS_EVERYWHERE, canvas, rules.by_confidence(3),
    vocab=Vocab(9, MASK, PAD, forbidden_ids=(EOS,)),
  )  # fmt: skip
  assert not (result.ids == EOS).any()


@pytest.mark.parametrize(
  'rule', [rules.by_confidence(6), rules.threshold(0.8), rules.left_to_right(6)]
)
def test_last_it_is_written_after_all_others(rule):
  canvas = from_prompts([[]] * 50, 6, VOCAB)
  result = run(EOS_EVERYWHERE, canvas, rule, eos_last=True)
  assert not (result.ids == MASK).any()
  mixed = 0
  for row, ids in enumerate(np.asarray(result.ids)):
    ends = ids == EOS
    if ends.any() and not ends.all():
      mixed += 1
      calls = commit_calls(result, row)
      assert calls[ends].min() > calls[~ends].max()
  assert mixed > 10  # 1 - 0.9^6 of 50 rows draw another token at first.


def test_slots_that_end_wait_for_those_that_do_not():
  candidate_ids = jnp.array([[EOS, 5, EOS], [EOS, 7, EOS], [EOS, 5, EOS]])
  masked = jnp.array([[True] * 3, [True, False, True], [False] * 3])
  ends, waiting = endings.waits(candidate_ids, masked, (EOS,))
  np.testing.assert_array_equal(
    ends, [[True, False, True], [True, False, True], [True, False, True]]
  )
  np.testing.assert_array_equal(waiting, [[True], [False], [False]])


def test_a_row_stops_at_an_end_with_everything_before_it():
  """EOS in block 1 of 4: one call, the rest is PAD, the text is the same."""
  canvas = from_prompts([[]], 8, VOCAB)
  table = writes(5, EOS, 6, 6, 6, 6, 6, 6)
  full = run(table, canvas, rules.by_confidence(1), length=2, draw=GREEDY)
  result = run(
    table, canvas, rules.by_confidence(1), length=2, draw=GREEDY,
    stop_at_eos=True,
  )  # fmt: skip
  assert full.calls == 4
  assert result.calls == 1
  np.testing.assert_array_equal(result.calls_per_block, [1, 0, 0, 0])
  np.testing.assert_array_equal(full.ids, [[5, EOS, 6, 6, 6, 6, 6, 6]])
  np.testing.assert_array_equal(result.ids, [[5, EOS] + [PAD] * 6])
  assert result.num_tokens == full.num_tokens == 2
  assert not result.changes.any()
  # Calls that were not made repeat the canvas and have no level.
  np.testing.assert_array_equal(result.trajectory[3], result.trajectory[0])
  assert np.isnan(result.requested_t[1:]).all()


def test_an_end_after_an_open_mask_does_not_stop():
  """Slot 2, EOS, is the surest; 0 and 1 come after it."""
  table = writes(5, 6, EOS, 7) * jnp.array([0.2, 0.1, 1.0, 0.05])[:, None]
  canvas = from_prompts([[]], 4, VOCAB)
  result = run(
    table, canvas, rules.by_confidence(4), draw=GREEDY, stop_at_eos=True
  )
  np.testing.assert_array_equal(result.ids, [[5, 6, EOS, PAD]])
  assert result.calls == 3


def test_rows_end_on_their_own():
  """Row 0 ends in block 1, row 1 in block 3; row 0 equals its single run."""
  table = writes(5, EOS, 6, 6, 6, EOS, 7, 7, 7, 7)
  canvas = from_rows([[None] * 8, [3, 3] + [None] * 8], VOCAB)
  options = {'length': 2, 'draw': GREEDY, 'stop_at_eos': True}
  both = run(table, canvas, rules.by_confidence(2), **options)
  alone = run(
    table, from_rows([[None] * 8], VOCAB), rules.by_confidence(2), **options
  )
  np.testing.assert_array_equal(both.ids[0, :8], alone.ids[0])
  np.testing.assert_array_equal(both.calls_per_row, [2, 4])
  np.testing.assert_array_equal(both.num_tokens, [2, 4])
  assert both.calls == 4


def test_what_was_written_after_the_end_becomes_padding():
  table = writes(5, EOS, 6, 7)
  result = run(
    table, from_prompts([[]], 4, VOCAB), rules.by_confidence(1), draw=GREEDY,
    stop_at_eos=True,
  )  # fmt: skip
  np.testing.assert_array_equal(result.ids, [[5, EOS, PAD, PAD]])


def test_where_the_end_is_the_padding_it_fills_the_row():
  vocab = Vocab(9, MASK, pad_id=EOS, eos_ids=(EOS,), pad_is_eos=True)
  result = run(
    writes(5, EOS, 6, 7), from_prompts([[4]], 3, vocab),
    rules.left_to_right(3), vocab=vocab, draw=GREEDY, stop_at_eos=True,
  )  # fmt: skip
  np.testing.assert_array_equal(result.ids, [[4, EOS, EOS, EOS]])
  assert result.calls == 1


def test_an_end_in_the_prompt_ends_nothing():
  result = run(
    writes(5, 5, 6, 7), from_rows([[EOS, None, None]], VOCAB),
    rules.by_confidence(2), draw=GREEDY, stop_at_eos=True,
  )  # fmt: skip
  np.testing.assert_array_equal(result.ids, [[EOS, 5, 6]])
  assert result.num_tokens == 2


@pytest.mark.parametrize(
  'rule',
  [
    rules.editing(rules.threshold(0.5), 0.9, 0),
    rules.refined(rules.first_hitting(), 1, 1),
    rules.dilated(),
  ],
)
def test_rules_that_finish_early_leave_no_mask_at_a_deferred_end(rule):
  table = writes(3, 4, 5, 3, EOS, EOS)
  canvas = from_prompts([[]], 6, VOCAB)
  result = run(table, canvas, rule, draw=GREEDY, eos_last=True)
  np.testing.assert_array_equal(result.ids, [[3, 4, 5, 3, EOS, EOS]])


def test_an_edit_writes_no_end_before_the_last_mask():
  """Once slot 1 stands, the network prefers an end at slot 0."""

  def features(params, cache, ids, **unused):
    wants = writes(5, 6, 7, 7)[None].at[:, 1:].multiply(0.5)
    regret = 20.0 * jax.nn.one_hot(EOS, VOCAB.size)
    started = (ids[:, 1] != MASK)[:, None]
    return wants.at[:, 0].set(jnp.where(started, regret, wants[:, 0])), ()

  canvas = from_prompts([[]], 4, VOCAB)
  result = sampling.sample(
    Denoiser(features, lambda params, hidden: hidden), (), jax.random.key(0),
    canvas, vocab=VOCAB, rule=rules.editing(rules.left_to_right(4), 0.5, 2),
    draw=GREEDY, eos_last=True, trajectory=True,
  )  # fmt: skip
  path = np.asarray(result.trajectory[:, 0])
  np.testing.assert_array_equal(path[3], [5, 6, 7, 7])
  np.testing.assert_array_equal(result.ids, [[EOS, 6, 7, 7]])


@pytest.mark.parametrize(
  'vocab',
  [
    Vocab(9, MASK, eos_ids=(EOS,)),
    Vocab(9, MASK, pad_id=EOS, eos_ids=(EOS,), pad_is_eos=True),
  ],
)
def test_what_is_cut_off_after_an_end_counts_as_no_change(vocab):
  table = writes(5, 6, EOS, 7, 7, 7) * jnp.arange(1.0, 7)[:, None]
  result = run(
    table, from_prompts([[]], 6, vocab), rules.by_confidence(6), vocab=vocab,
    draw=GREEDY, stop_at_eos=True,
  )  # fmt: skip
  np.testing.assert_array_equal(result.ids, [[5, 6, EOS, EOS, EOS, EOS]])
  assert not result.changes.any()


@pytest.mark.parametrize('option', ['eos_last', 'stop_at_eos'])
def test_without_an_end_the_options_are_refused(option):
  vocab = Vocab(9, MASK, PAD)
  with pytest.raises(ValueError, match='with an EOS that may be drawn'):
    run(
      writes(5, 5), from_prompts([[]], 2, vocab), rules.by_confidence(1),
      vocab=vocab, **{option: True},
    )  # fmt: skip
