"""Rows of tokenised documents: packed, one a row, or prompts with answers."""

import dataclasses
import functools

import numpy as np
from jaxtyping import Int

from mdlm_jax.checks import check_integer
from mdlm_jax.data import packing
from mdlm_jax.data.documents import Documents

# A document of more tokens is not read anew for every row that is a piece of
# it: the latest ones stay in memory.
_LONG, _MOST_LONG = 2**22, 4


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentRows:
  """Rows of pieces of documents, read as they are asked for; see `Rows`.

  Attributes:
    documents: what they are read from.
    plan: which pieces are in which row.
    pad_id: at the slots that hold nothing; they are not valid.
    is_packed: whether rows have `segments` and `positions`.
    filling: how many slots after its tokens hold `fill_id` and are valid, in
      each row. Shape `[R]`.
    fill_id: what they hold.
    facts: what the rows are made of, as JSON: numbers of `rows`, of
      `documents` in them, of those left out because they are `too_long` or
      `all_given`, of tokens that are `learned`, and the `utilisation` of rows;
      where answers are filled up, the `filling_share` of what is learned.
  """

  documents: Documents
  plan: packing.Packing
  pad_id: int
  is_packed: bool
  filling: Int[np.ndarray, 'R'] | None = None
  fill_id: int = 0
  facts: dict[str, int | float] = dataclasses.field(default_factory=dict)

  def __len__(self) -> int:
    return self.plan.num_rows

  @functools.cached_property
  def _has_given(self):
    return bool(np.any(self.documents.num_given))

  @functools.cached_property
  def _long_text(self):
    return functools.lru_cache(_MOST_LONG)(
      lambda document: self.documents.ids_of(np.array([document]))[0]
    )

  def _texts(self, documents):
    is_long = self.documents.lengths[documents] > _LONG
    short_texts = iter(self.documents.ids_of(documents[~is_long]))
    return [
      self._long_text(document) if is_long else next(short_texts)
      for document, is_long in zip(documents.tolist(), is_long, strict=True)
    ]

  def take(self, indices: Int[np.ndarray, 'B']) -> dict[str, np.ndarray]:
    """Some rows, `[B, L]` each.

    Returns:
      `ids` int32 and `valid` bool; `given` bool, if any document has given
      tokens; `segments` and `positions` int32, if documents share rows: the
      number of the document in its row and the slot in its piece. The slots
      that hold nothing are one more segment.
    """
    plan, indices = self.plan, np.asarray(indices)
    first = plan.row_starts[indices]
    counts = plan.row_starts[indices + 1] - first
    segments = _counted(counts)
    pieces = np.repeat(first, counts) + segments
    documents, lengths = plan.documents[pieces], plan.lengths[pieces]
    starts = plan.starts[pieces]
    ends = np.cumsum(lengths, dtype=np.int64)
    row_ends = ends[np.cumsum(counts) - 1]
    sizes = np.diff(row_ends, prepend=0)[:, None]
    slots = np.arange(plan.row_length)
    held = slots < sizes
    ids = np.full(held.shape, self.pad_id, np.int32)
    texts = self._texts(documents)
    ids[held] = np.concatenate(
      [t[s : s + n] for t, s, n in zip(texts, starts, lengths, strict=True)]
    )
    valid = held
    if self.filling is not None:
      valid = slots < sizes + self.filling[indices][:, None]
      ids[valid & ~held] = self.fill_id
    rows = {'ids': ids, 'valid': valid}
    positions = _counted(lengths)
    if self._has_given:
      num_given = self.documents.num_given[documents].astype(np.int64)
      given = np.zeros(held.shape, bool)
      given[held] = positions < np.repeat(num_given - starts, lengths)
      rows['given'] = given
    if self.is_packed:
      for name, values, rest in (
        ('segments', np.repeat(segments, lengths), counts[:, None]),
        ('positions', positions, slots - sizes),
      ):
        rows[name] = np.broadcast_to(rest, held.shape).astype(np.int32)
        rows[name][held] = values
    return rows


def packed_rows(
  documents: Documents, *, length: int, pad_id: int, seed: int
) -> DocumentRows:
  """Rows that documents share, none seeing the others; see `packing.pack`.

  Documents longer than a row are cut. Those with a prompt are not, for a piece
  of the answer would stand without it: with more than one given token, which
  may be BOS, they are left out, and so are those that are all given. `facts`
  has how many.

  Args:
    documents: from which rows are made.
    length: tokens of a row, from 1 to 2^20.
    pad_id: of the slots that hold nothing.
    seed: of which documents come together.

  Raises:
    ValueError: a number out of range, or no document is left.
  """
  kept, facts = _kept(documents, length, may_cut=True)
  plan = packing.pack(kept, row_length=length, seed=seed)
  return DocumentRows(documents, plan, pad_id, True, facts=_facts(plan, facts))


def document_rows(
  documents: Documents, *, length: int, pad_id: int
) -> DocumentRows:
  """Rows of one document each, or of a piece of one, padded.

  Args, Raises: as of `packed_rows`; the same documents are left out.
  """
  kept, facts = _kept(documents, length, may_cut=True)
  plan = packing.one_piece_a_row(kept, row_length=length)
  return DocumentRows(documents, plan, pad_id, False, facts=_facts(plan, facts))


def example_rows(
  documents: Documents,
  *,
  length: int,
  pad_id: int,
  eos_id: int | None = None,
  answer_multiple: int | None = None,
) -> DocumentRows:
  """Rows of one prompt and its answer each, to fine-tune on.

  A model that fills a canvas of many tokens must have learned what stands after
  an answer. So answers, with the token that ends them, can be filled up with
  EOS, masked and learned like any token: to the end of the row with
  `answer_multiple=length` (LLaDA, Nie et al. 2025, arXiv 2502.09992, section
  2.3), or to whole blocks. `facts` has the share of that in what is learned.

  Args:
    documents: those longer than a row and those that are all given are left
      out; `facts` has how many.
    length: tokens L of a row.
    pad_id: of the slots that hold nothing.
    eos_id: what answers are filled up with.
    answer_multiple: tokens of an answer become a multiple of so many, or reach
      the end of the row; None: nothing is filled up.

  Raises:
    ValueError: a number out of range, no document is left, or
      `answer_multiple` without `eos_id`.
  """
  kept, facts = _kept(documents, length, may_cut=False)
  plan = packing.one_piece_a_row(kept, row_length=length)
  facts = _facts(plan, facts)
  if answer_multiple is None:
    return DocumentRows(documents, plan, pad_id, False, facts=facts)
  check_integer('answer_multiple', answer_multiple, 1)
  if eos_id is None:
    raise ValueError(
      f'{answer_multiple=} fills answers up with EOS, but the vocabulary has '
      'none; those learned from text files by a run have none, those learned '
      'by scripts/prepare_data.py have one'
    )
  given = np.asarray(documents.num_given)[plan.documents].astype(np.int64)
  filling = -(plan.lengths - given) % answer_multiple
  filling = np.minimum(filling, length - plan.lengths)
  num_filled = int(filling.sum())
  facts['filling_share'] = num_filled / (num_filled + facts['learned'])
  return DocumentRows(documents, plan, pad_id, False, filling, eos_id, facts)


def _kept(documents, length, *, may_cut):
  """Length of each document, 0 of those left out, and how many these are."""
  check_integer('length', length, 1)
  lengths = np.asarray(documents.lengths)
  num_given = np.asarray(documents.num_given)
  all_given = num_given >= lengths
  too_long = ~all_given & (lengths > length)
  if may_cut:
    too_long &= num_given > 1
  kept = np.where(all_given | too_long, 0, lengths)
  facts = {
    'documents': int(np.count_nonzero(kept)),
    'too_long': int(too_long.sum()),
    'all_given': int(all_given.sum()),
    'learned': int((kept - num_given)[kept > 0].sum(dtype=np.int64)),
  }
  if not facts['documents']:
    raise ValueError(
      f'of {len(lengths)} documents none can be learned from: '
      f'{facts["too_long"]} are longer than {length=} and must not be cut, '
      f'{facts["all_given"]} are empty or all given'
    )
  return kept, facts


def _facts(plan, facts):
  return facts | {'rows': plan.num_rows, 'utilisation': plan.utilisation}


def _counted(counts):
  """0, 1, ..., n - 1 for each n, one after another."""
  ends = np.cumsum(counts, dtype=np.int64)
  return np.arange(ends[-1]) - np.repeat(ends - counts, counts)
