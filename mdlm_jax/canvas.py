"""The canvas: what is generated, and who owns each of its slots."""

import operator
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from mdlm_jax.vocab import Vocab


class Canvas(NamedTuple):
  """A batch of rows to be filled in. Every map has shape `[B, L]`.

  Attributes:
    ids: token ids, MASK at the slots to be generated.
    generation_slots: slots that generation owns; the others never change.
    valid: False at padding, which no network attends to.
    positions: logical positions, 0 at a row's first token.
    segments: document of each slot when several are packed in a row, or None.
  """

  ids: Int[Array, 'B L']
  generation_slots: Bool[Array, 'B L']
  valid: Bool[Array, 'B L']
  positions: Int[Array, 'B L']
  segments: Int[Array, 'B L'] | None = None


def from_rows(
  rows: Sequence[Sequence[int | None]],
  vocab: Vocab,
  *,
  length: int | None = None,
) -> Canvas:
  """A canvas from ragged rows in which None is a slot to be generated.

  Maps are made from the rows, never from ids: a prompt may hold the ids of
  MASK or PAD as ordinary tokens.

  Args:
    rows: token ids and Nones, at least one a row.
    vocab: gives the ids of MASK and PAD.
    length: slots of every row, by default those of the longest row.

  Returns:
    The canvas, padded on the right.

  Raises:
    ValueError: for no rows, an empty row, an id outside the vocabulary, or a
      row longer than `length`.

  Example:
    >>> from_rows([[5, None], [5, 6, None]], Vocab(8, mask_id=1, pad_id=0)).ids
    Array([[5, 1, 0],
           [5, 6, 1]], dtype=int32)
  """
  if not rows:
    raise ValueError('a canvas needs at least one row')
  length = max(map(len, rows)) if length is None else length
  pad_id = 0 if vocab.pad_id is None else vocab.pad_id
  ids = np.full((len(rows), length), pad_id, np.int32)
  slots = np.zeros(ids.shape, bool)
  valid = np.zeros(ids.shape, bool)
  for b, row in enumerate(rows):
    if not row:
      raise ValueError(f'row {b} of the canvas is empty')
    if len(row) > length:
      raise ValueError(f'row {b} has {len(row)} tokens, more than {length=}')
    for slot, token in enumerate(row):
      if token is not None and not 0 <= operator.index(token) < vocab.size:
        raise ValueError(
          f'row {b} holds id {token}; ids must lie in [0, {vocab.size})'
        )
      ids[b, slot] = vocab.mask_id if token is None else token
    slots[b, : len(row)] = [token is None for token in row]
    valid[b, : len(row)] = True
  positions = np.tile(np.arange(length, dtype=np.int32), (len(rows), 1))
  return Canvas(
    jnp.asarray(ids),
    jnp.asarray(slots),
    jnp.asarray(valid),
    jnp.asarray(positions),
  )


def from_prompts(
  prompts: Sequence[Sequence[int]], num_tokens: int, vocab: Vocab
) -> Canvas:
  """A canvas of ragged prompts, each followed by `num_tokens` open slots.

  Args:
    prompts: token ids; an empty prompt generates from nothing.
    num_tokens: slots to be generated after each prompt, at least 1.
    vocab: gives the ids of MASK and PAD.

  Returns:
    The canvas, padded on the right.

  Raises:
    ValueError: as `from_rows`, and for `num_tokens` below 1.
  """
  if num_tokens < 1:
    raise ValueError(f'{num_tokens=} must be at least 1')
  return from_rows([[*p, *[None] * num_tokens] for p in prompts], vocab)


def whole_blocks(
  rows: Sequence[list[int | None]], length: int | None, max_length: int
) -> list[list[int | None]]:
  """Rows that end open, made longer to the end of a block.

  So a network that attends by blocks never sees a part of one; what is more is
  generated and cut off.

  Args:
    rows: token ids, None at slots to be generated.
    length: of a block, `Denoiser.attention_block`; None: nothing changes.
    max_length: of the model; a row that fits in it goes on fitting.

  Returns:
    The rows.

  Example:
    >>> whole_blocks([[5, None], [None, 5]], 4, max_length=32)
    [[5, None, None, None], [None, 5]]
  """
  length = length or 1
  result = []
  for row in rows:
    size = -(-len(row) // length) * length
    if len(row) <= max_length:
      size = min(size, max_length)
    is_open = bool(row) and row[-1] is None
    result.append(row + [None] * (size - len(row)) if is_open else row)
  return result


def row_from_template(
  template: str, encode: Callable[[str], Sequence[int]]
) -> list[int | None]:
  """A row of text with holes, for `from_rows`.

  `{12}` is a hole of 12 tokens; `{{` and `}}` are the braces themselves, as in
  Python's format strings.

  Args:
    template: text with at least one hole.
    encode: a tokenizer; each piece of text between holes is encoded alone.

  Returns:
    Token ids, None at every slot of a hole.

  Raises:
    ValueError: for a template without holes, a hole of another form, or a
      single brace.

  Example:
    >>> row_from_template('a{2}b', lambda text: [ord(c) for c in text])
    [97, None, None, 98]
  """
  row: list[int | None] = []
  text = ''

  def flush():
    nonlocal text
    row.extend(int(i) for i in encode(text))
    text = ''

  for piece in re.findall(r'\{\{|\}\}|\{[^{}]*\}|[^{}]+|[{}]', template):
    if piece in ('{{', '}}'):
      text += piece[0]
    elif piece[0] not in '{}':
      text += piece
    elif re.fullmatch(r'\{[1-9][0-9]{0,5}\}', piece):
      flush()
      row.extend([None] * int(piece[1:-1]))
    else:
      raise ValueError(
        f'{piece!r} in the template is no hole; a hole is a number of tokens '
        "such as {12}, and a brace is written '{{' or '}}'"
      )
  flush()
  if None not in row:
    raise ValueError(
      f'the template {template!r} has no hole; {{12}} is one of 12 tokens'
    )
  return row
