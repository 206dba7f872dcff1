"""Canvases say who owns each slot, whatever the ids are."""

import numpy as np
import pytest

from mdlm_jax.canvas import from_prompts, from_rows, row_from_template
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=10, mask_id=1, pad_id=0)
F, T = False, True


def test_ragged_prompts_are_padded_on_the_right():
  canvas = from_prompts([[5, 6, 7], [], [8]], 2, VOCAB)
  np.testing.assert_array_equal(
    canvas.ids, [[5, 6, 7, 1, 1], [1, 1, 0, 0, 0], [8, 1, 1, 0, 0]]
  )
  np.testing.assert_array_equal(
    canvas.generation_slots,
    [[F, F, F, T, T], [T, T, F, F, F], [F, T, T, F, F]],
  )
  np.testing.assert_array_equal(canvas.valid.sum(1), [5, 2, 3])
  np.testing.assert_array_equal(canvas.positions, [range(5)] * 3)


def test_holes_may_stand_anywhere():
  canvas = from_rows([[None, 5, None, 6]], VOCAB, length=6)
  np.testing.assert_array_equal(canvas.ids, [[1, 5, 1, 6, 0, 0]])
  np.testing.assert_array_equal(canvas.generation_slots, [[T, F, T, F, F, F]])


def test_mask_and_pad_ids_of_a_prompt_are_ordinary_tokens():
  canvas = from_rows([[5, 0, 1, None]], VOCAB)
  np.testing.assert_array_equal(canvas.generation_slots, [[F, F, F, T]])
  assert canvas.valid.all()


@pytest.mark.parametrize(
  ('rows', 'length', 'message'),
  [
    ([], None, 'at least one row'),
    ([[5], []], None, 'row 1 of the canvas is empty'),
    ([[5, 10]], None, r'row 0 holds id 10; ids must lie in \[0, 10\)'),
    ([[-1]], None, 'row 0 holds id -1'),
    ([[5, 6, None]], 2, 'row 0 has 3 tokens, more than length=2'),
  ],
)
def test_impossible_rows_raise(rows, length, message):
  with pytest.raises(ValueError, match=message):
    from_rows(rows, VOCAB, length=length)


def test_prompts_need_something_to_generate():
  with pytest.raises(ValueError, match='num_tokens=0 must be at least 1'):
    from_prompts([[5]], 0, VOCAB)


def letters(text):
  return [ord(letter) for letter in text]


@pytest.mark.parametrize(
  ('template', 'row'),
  [
    ('ab{2}c', [97, 98, None, None, 99]),
    ('{1}{2}', [None] * 3),
    ('{{{1}}}', [123, None, 125]),
    ('{{1}}{12}', [123, 49, 125] + [None] * 12),
    ('_{1}_', [95, None, 95]),
  ],
)
def test_templates_hold_text_and_holes(template, row):
  assert row_from_template(template, letters) == row


@pytest.mark.parametrize(
  'template',
  ['', 'abc', '{{2}}', '{}', '{0}', '{-1}', '{x}', '{2', '2}', '{ 2}'],
)
def test_templates_without_proper_holes_are_refused(template):
  with pytest.raises(ValueError, match='hole'):
    row_from_template(template, letters)
