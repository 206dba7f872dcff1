"""Semi-autoregressive blocks with stub networks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from small_joints import law_of, random_joint, total_variation

from mdlm_jax import blocks as blocks_lib
from mdlm_jax import draws, rules, sampling
from mdlm_jax.canvas import Canvas, from_prompts, from_rows
from mdlm_jax.predict import Denoiser
from mdlm_jax.schedules import uniform_grid
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=9, mask_id=1, pad_id=0)
GREEDY = draws.categorical(temperature=0.0)


@functools.cache
def stub(function):
  """Logits at every slot from `function(params, ids, positions, step)`."""

  def features(params, cache, ids, *, at, positions, step, **unused):
    logits = function(params, ids, positions, step)
    if at is not None:
      logits = jnp.take_along_axis(logits, at[..., None], 1)
    return logits, ()

  return Denoiser(features, lambda params, hidden: hidden)


TABLE = stub(lambda params, ids, positions, step: params[positions])
FLAT = stub(
  lambda params, ids, positions, step: jnp.zeros((*ids.shape, VOCAB.size))
)


def run(denoiser, canvas, rule, length, *, params=(), seed=0, **options):
  return sampling.sample(
    denoiser, params, jax.random.key(seed), canvas, vocab=VOCAB, rule=rule,
    blocks=blocks_lib.blocks_of(canvas, length), **options,
  )  # fmt: skip


def test_a_later_block_waits_however_confident_it_is():
  p = np.full((8, VOCAB.size), 0.0)
  p[:4, [4, 5]] = 0.6, 0.4
  p[4:, [4, 5]] = 0.9, 0.1
  result = run(
    TABLE, from_prompts([[]], 8, VOCAB), rules.by_confidence(2), 4,
    params=jnp.log(jnp.array(p)), draw=GREEDY, trajectory=True,
  )  # fmt: skip
  masked = np.asarray(result.trajectory[:, 0] == VOCAB.mask_id)
  np.testing.assert_array_equal(masked[:, :4].sum(1), [2, 0, 0, 0])
  np.testing.assert_array_equal(masked[:, 4:].sum(1), [4, 4, 2, 0])
  np.testing.assert_array_equal(result.calls_per_block, [2, 2])
  assert result.calls == 4
  np.testing.assert_array_equal(result.tokens_per_call, [2.0])


def test_the_last_block_may_be_short():
  """Prompt 5, 6 new tokens, blocks of 4: 11 slots, counts 2 2 and 1 1."""
  canvas = from_prompts([[5] * 5], 6, VOCAB)
  result = run(FLAT, canvas, rules.by_confidence(2), 4, trajectory=True)
  assert result.ids.shape == (1, 11)
  assert not (result.ids == VOCAB.mask_id).any()
  left = (np.asarray(result.trajectory[:, 0]) == VOCAB.mask_id).sum(1)
  np.testing.assert_array_equal(left, [4, 2, 1, 0])
  # A network that ignores its context draws the same in any division.
  whole = run(FLAT, canvas, rules.by_confidence(2), 6)
  again = run(FLAT, canvas, rules.by_confidence(2), 64)
  np.testing.assert_array_equal(whole.ids, again.ids)


def test_boundaries_are_of_each_row():
  canvas = from_prompts([[5, 5], [6] * 5], 4, VOCAB)
  result = run(FLAT, canvas, rules.by_confidence(1), 2, trajectory=True)
  first = np.asarray(result.trajectory[0] == VOCAB.mask_id)
  np.testing.assert_array_equal(np.flatnonzero(first[0]), [4, 5])
  np.testing.assert_array_equal(np.flatnonzero(first[1]), [7, 8])


def test_a_window_that_would_leave_the_canvas_slides_back():
  canvas = from_prompts([[5]], 6, VOCAB)
  blocks = blocks_lib.blocks_of(canvas, 4)
  assert blocks.count == 2
  window = blocks_lib.window_of(blocks, 1, canvas)
  np.testing.assert_array_equal(window.slots, [[3, 4, 5, 6]])
  np.testing.assert_array_equal(window.open, [[False, False, True, True]])
  values = jnp.arange(7)[None]
  np.testing.assert_array_equal(
    blocks_lib.at(values, window.slots), [[3, 4, 5, 6]]
  )
  put = blocks_lib.put(values, jnp.full((1, 4), 9), window.slots)
  np.testing.assert_array_equal(put, [[0, 1, 2, 9, 9, 9, 9]])


def test_aligned_blocks_begin_at_multiples_of_their_length():
  rows = [[5] * 3 + [None] * 6, [5] * 4 + [None] * 6]
  canvas = from_rows(rows, VOCAB, length=11)
  blocks = blocks_lib.blocks_of(canvas, 4, aligned=True)
  np.testing.assert_array_equal(blocks.starts, [0, 4])
  assert blocks.count == 3  # Slots 0 to 8 of the first row.
  # Left padding shifts slots, not logical positions.
  roll = functools.partial(jnp.roll, shift=1, axis=1)
  left = Canvas(*(roll(x) for x in canvas[:4]))
  np.testing.assert_array_equal(
    blocks_lib.blocks_of(left, 4, aligned=True).starts, [1, 5]
  )


def test_holes_between_fixed_text_are_filled_block_by_block():
  row = [5, None, None, 6, None, 6, None, None]
  result = run(
    FLAT, from_rows([row], VOCAB), rules.by_confidence(1), 3, trajectory=True
  )
  masked = np.asarray(result.trajectory[:, 0] == VOCAB.mask_id)
  expected = [[4, 6, 7], [7], []]
  assert [np.flatnonzero(m).tolist() for m in masked] == expected
  fixed = np.array([token is not None for token in row])
  assert (np.asarray(result.ids)[0, fixed] == [5, 6, 6]).all()


def test_the_network_is_told_the_call_over_all_blocks():
  """A token that encodes the step: model schedules count on."""
  by_step = stub(
    lambda params, ids, positions, step: (
      20.0
      * jnp.broadcast_to(
        jax.nn.one_hot(step + 2, VOCAB.size), (*ids.shape, VOCAB.size)
      )
    )
  )
  result = run(
    by_step, from_prompts([[]], 6, VOCAB), rules.left_to_right(3), 3,
    draw=GREEDY,
  )  # fmt: skip
  np.testing.assert_array_equal(result.ids, [[2, 3, 4, 5, 6, 7]])


def test_adaptive_rows_wait_at_the_end_of_a_block():
  """Row 0 is sure of block 2, row 1 of block 1: each needs 1 + 4 calls."""
  sure = jnp.zeros((2, 8, VOCAB.size))
  sure = sure.at[0, 4:, 5].set(20.0).at[1, :4, 5].set(20.0)
  network = stub(lambda params, ids, positions, step: params)
  result = run(
    network, from_prompts([[], []], 8, VOCAB), rules.threshold(0.9), 4,
    params=sure, trajectory=True,
  )  # fmt: skip
  np.testing.assert_array_equal(result.calls_per_row, [5, 5])
  np.testing.assert_array_equal(result.calls_per_block, [4, 4])
  assert result.calls == 8
  waiting = np.asarray(result.trajectory[1:4, 1] == VOCAB.mask_id)
  np.testing.assert_array_equal(waiting.sum(1), [4, 4, 4])


def test_a_row_in_blocks_equals_the_row_alone():
  prompts = [[5], [6, 7, 2]]
  rule = rules.kernel(uniform_grid(3))
  together = run(FLAT, from_prompts(prompts, 5, VOCAB), rule, 2)
  for b, prompt in enumerate(prompts):
    alone = run(
      FLAT, from_prompts([prompt], 5, VOCAB), rule, 2, row_ids=jnp.array([b])
    )
    length = len(prompt) + 5
    np.testing.assert_array_equal(alone.ids[0], together.ids[b, :length])


def test_blocks_of_one_slot_are_the_chain_rule():
  joint = random_joint(3)
  canvas = from_rows([[None] * 3], VOCAB)
  blocks = blocks_lib.blocks_of(canvas, 1)
  for rule in (rules.by_confidence(1), rules.kernel((1.0, 0.0))):
    law = law_of(joint, rule, blocks=blocks)
    assert total_variation(law, joint) < 1e-12


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (
      lambda: blocks_lib.blocks_of(from_prompts([[]], 4, VOCAB), 0),
      'length=0 must be an integer of at least 1',
    ),
    (
      lambda: blocks_lib.steps_per_block(8, 16),
      '8 steps cannot be shared equally by 16 blocks',
    ),
    (lambda: blocks_lib.steps_per_block(20, 16), 'a multiple of 16'),
  ],
)  # fmt: skip
def test_what_cannot_be_raises(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize('slots', [[[2, 3]], [[-1, 0]]])
def test_no_value_is_written_beside_the_canvas(slots):
  """Or it would be moved on one device and lost on several."""
  values, new = jnp.arange(3)[None], jnp.array([[8, 9]])
  slots = jnp.array(slots)
  with pytest.raises(ValueError, match=r'slots must lie in \[0, 3\) \(row 0\)'):
    blocks_lib.put(values, new, slots)
  error, _ = jax.jit(checkify.checkify(blocks_lib.put))(values, new, slots)
  with pytest.raises(checkify.JaxRuntimeError, match='slots must lie in'):
    error.throw()


def test_512_tokens_in_32_steps_are_16_a_call():
  canvas = from_prompts([[]], 512, VOCAB)
  blocks = blocks_lib.blocks_of(canvas, 32)
  steps = blocks_lib.steps_per_block(32, blocks.count)
  result = run(FLAT, canvas, rules.by_confidence(steps), 32)
  assert result.calls == 32
  np.testing.assert_array_equal(result.tokens_per_call, [16.0])
