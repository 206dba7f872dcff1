"""Values: which token would be written at each position, and its score.

A draw is three functions over the same noise: `noise` makes it from a key,
`propose` turns it into candidates and scores, `cells` lists it for exact
enumeration on small spaces. `categorical` makes one from its settings.

A categorical draw is Gumbel-max in two levels: first the block of the
vocabulary, then the entry inside it. Both levels are exact, and a position
needs V / b + b random numbers in place of V.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax import noise as noise_lib
from mdlm_jax.filters import keep_min_p, keep_top_k, keep_top_p, temper
from mdlm_jax.interning import interned
from mdlm_jax.predict import Prediction, block_shape, reduce_logits


class DrawNoise(NamedTuple):
  """The noise of one draw.

  Attributes:
    block: Gumbel noise over the blocks of the vocabulary. Shape `[..., V / b]`.
    entry: Gumbel noise over the entries of a block. Shape `[..., b]`.
    order: one more number, read by the random score. Shape `[...]`.
  """

  block: Float[Array, '*S N']
  entry: Float[Array, '*S E']
  order: Float[Array, '*S']


class Context(NamedTuple):
  """What stands around the slots for which values are drawn.

  Attributes:
    ids: the whole canvas. Shape `[B, L]`.
    visible: slots whose token is given or committed: valid ones, but for MASK
      that is to be generated. Shape `[B, L]`.
    slots: the slots of the window, for which the prediction is. Shape `[B, W]`.
    segments: document of each slot when several are packed in a row, or None.
  """

  ids: Int[Array, '*B L']
  visible: Bool[Array, '*B L']
  slots: Int[Array, '*B W']
  segments: Int[Array, '*B L'] | None = None


class Draw(NamedTuple):
  """How values are drawn.

  Attributes:
    noise: `noise(row_key, positions [K], num_ids) -> DrawNoise`, for one row.
    propose: `propose(noise, prediction, context) -> candidate_ids, confidence`,
      for the batch. The context may be None for a draw that does not read it.
    cells: `cells(prediction, masked, context) -> iterator of (probability,
      noise)`: the law of the noise of one row of a small space, as finitely
      many cases; the context is that row's.
  """

  noise: Callable
  propose: Callable
  cells: Callable


ScoreFn = Callable[[Prediction, Array, DrawNoise], Array]


def probability(prediction, candidate_ids, noise) -> Float[Array, '*S']:
  """Probability of the drawn token (LLaDA's low-confidence score)."""
  del noise
  drawn = jnp.take_along_axis(prediction.logits, candidate_ids[..., None], -1)
  return jnp.exp(drawn[..., 0] - prediction.log_z)


def row_maximum(prediction, candidate_ids, noise) -> Float[Array, '*S']:
  """Largest probability at the position, whichever token was drawn."""
  del candidate_ids, noise
  return jnp.exp(prediction.block_maxima.max(-1) - prediction.log_z)


def margin(prediction, candidate_ids, noise) -> Float[Array, '*S']:
  """Largest minus second largest probability (Kim et al. 2025)."""
  del candidate_ids, noise
  # The second stands in the block of the first or leads another block.
  maxima = prediction.block_maxima
  block = jnp.argmax(maxima, -1)
  second = jnp.maximum(
    _without_largest(maxima).max(-1),
    _without_largest(_entries(prediction.logits, block)).max(-1),
  )
  first = jnp.exp(maxima.max(-1) - prediction.log_z)
  return first - jnp.exp(second - prediction.log_z)


def negative_entropy(prediction, candidate_ids, noise) -> Float[Array, '*S']:
  """Sum of p log p in nats: 0 for a certain position, -log V for a flat one."""
  del candidate_ids, noise
  log_p = prediction.logits - prediction.log_z[..., None]
  return jnp.where(log_p == -jnp.inf, 0.0, jnp.exp(log_p) * log_p).sum(-1)


def random_order(prediction, candidate_ids, noise) -> Float[Array, '*S']:
  """A random score, whatever the values: positions in random order."""
  del prediction, candidate_ids
  return noise.order


SCORES: dict[str, ScoreFn] = {
  'probability': probability,
  'row_maximum': row_maximum,
  'margin': margin,
  'negative_entropy': negative_entropy,
  'random': random_order,
}


@interned
def categorical(
  *,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
  min_p: float | None = None,
  repetition_penalty: float = 1.0,
  neighbourhood: int | None = None,
  score: ScoreFn = row_maximum,
  tempered: bool = False,
) -> Draw:
  """Draws from the predicted categorical, after penalty, temperature, filters.

  The order is repetition penalty, temperature, top-k, top-p, min-p; each reads
  the distribution that the ones before it leave, renormalised. Temperature 0 is
  the argmax (lowest id on a tie) after the penalty. Top-k keeps the tokens at
  least as probable as the k-th; top-p keeps a token iff the tokens more
  probable than it hold less than `top_p`, so the one that crosses is kept;
  min-p keeps a token iff p >= min_p max p (Nguyen et al. 2024). Equal tokens
  share one fate. The penalty is that of `penalise_repeats`.

  One at a time with an exact denoiser, at temperature 1 without filters and
  penalty, scores that do not depend on the drawn token (`row_maximum`, the
  default, `margin`, `negative_entropy`, `random_order`) sample exactly;
  `probability` does not.

  Equal settings return the same object, so nothing is compiled twice.

  Args:
    temperature: at least 0.
    top_k: at least 1, or None for all.
    top_p: in (0, 1], or None for all.
    min_p: in (0, 1], or None for all.
    repetition_penalty: at least 1, which is none.
    neighbourhood: slots to the left and to the right whose tokens are
      penalised, at least 1; given if and only if there is a penalty.
    score: confidence of a position, by default of the model's own distribution
      over the ids that may be drawn: no penalty, no temperature, no filter.
    tempered: score the distribution after all of them instead.

  Returns:
    The draw.

  Raises:
    ValueError: for settings out of range, and for one that could not act: a
      filter or `tempered` at temperature 0, a neighbourhood without penalty.
  """
  # With larger numbers float32 products overflow, and NaN would be drawn.
  if not 0 <= temperature <= 1e6:
    raise ValueError(f'{temperature=} must be between 0 and 1e6')
  if top_k is not None and not (isinstance(top_k, int) and top_k >= 1):
    raise ValueError(f'{top_k=} must be an integer of at least 1')
  if top_p is not None and not 0 < top_p <= 1:
    raise ValueError(f'{top_p=} must be in (0, 1]')
  if min_p is not None and not 0 < min_p <= 1:
    raise ValueError(f'{min_p=} must be in (0, 1]')
  if temperature == 0 and (top_k, top_p, min_p, tempered) != (
    *[None] * 3,
    False,
  ):
    raise ValueError(
      f'{top_k=}, {top_p=}, {min_p=}, {tempered=} cannot act at temperature 0'
    )
  if not 1 <= repetition_penalty <= 1e6:
    raise ValueError(f'{repetition_penalty=} must be between 1 and 1e6')
  if repetition_penalty == 1 and neighbourhood is not None:
    raise ValueError(f'{neighbourhood=} cannot act without repetition_penalty')
  if repetition_penalty != 1 and not (
    isinstance(neighbourhood, int) and neighbourhood >= 1
  ):
    raise ValueError(
      f'{neighbourhood=} must be an integer of at least 1 beside '
      f'{repetition_penalty=}'
    )

  def adjusted(prediction: Prediction, context: Context | None) -> Prediction:
    """Of one row."""
    logits = prediction.logits
    # Known already, where a reduction of the logits would be one more pass.
    largest = prediction.block_maxima.max(-1)
    if repetition_penalty != 1:
      logits = penalise_repeats(
        prediction, context, repetition_penalty, neighbourhood
      )
      largest = None
    if temperature not in (0, 1):
      logits = temper(logits, temperature, largest)
      largest = jnp.zeros_like(prediction.log_z)
    if top_k is not None:
      logits = keep_top_k(logits, top_k)
    if top_p is not None and top_p < 1:
      logits = keep_top_p(logits, top_p)
    if min_p is not None:
      logits = keep_min_p(logits, min_p, largest)
    unchanged = logits is prediction.logits
    return prediction if unchanged else reduce_logits(logits)

  # Only the penalty reads the context, row by row.
  adjusted_rows = adjusted if repetition_penalty == 1 else jax.vmap(adjusted)

  def propose(
    noise: DrawNoise, prediction: Prediction, context: Context | None
  ):
    drawn_from = adjusted_rows(prediction, context)
    if temperature == 0:
      candidate_ids = most_probable(drawn_from)
    else:
      candidate_ids = gumbel_max(noise, drawn_from)
    scored = drawn_from if tempered else prediction
    return candidate_ids, score(scored, candidate_ids, noise)

  def cells(prediction: Prediction, masked: Bool[np.ndarray, 'K'], context):
    drawn_from = adjusted(*jax.tree.map(jnp.asarray, (prediction, context)))
    if temperature == 0:
      best = np.argmax(drawn_from.logits, -1)
      p = np.eye(drawn_from.logits.shape[-1])[best]
    else:
      p = np.exp(drawn_from.logits - drawn_from.log_z[..., None])
    orders = (
      list(itertools.permutations(range(masked.sum())))
      if score is random_order
      else [range(masked.sum())]
    )
    for weight, ids in _products(np.asarray(p)[masked]):
      for order in orders:
        yield weight / len(orders), _forced_noise(ids, order, masked, p)

  return Draw(draw_noise, propose, cells)


def penalise_repeats(
  prediction: Prediction, context: Context, penalty: float, neighbourhood: int
) -> Float[Array, 'W V']:
  """log p of every token that stands near a slot, times the penalty. One row.

  The penalty of CTRL (Keskar et al. 2019, section 4.1), which divides the
  logits of tokens that were generated, depends on the sign of the logits and so
  on their arbitrary constant. On log p <= 0 it is well defined: p becomes
  p^penalty up to the normalisation. A token counts once however often it
  stands in the neighbourhood, which reaches over the edges of the window and,
  unlike an autoregressive one, to both sides; the slot's own token is not in
  it. MASK to be generated, padding and other documents do not count.

  Args:
    prediction: of the window of one row, W slots.
    context: of that row.
    penalty: at least 1.
    neighbourhood: slots to the left and to the right, at least 1.

  Returns:
    Logits with the `log_z` of the prediction, not renormalised. Shape `[W, V]`.

  Example:
    >>> prediction = reduce_logits(jnp.log(jnp.array([[0.25, 0.75]])))
    >>> visible = jnp.array([True, False])
    >>> row = Context(jnp.array([0, 0]), visible, slots=jnp.array([1]))
    >>> print(jnp.exp(penalise_repeats(prediction, row, 2.0, 1)))
    [[0.0625 0.75  ]]
  """
  length = context.ids.shape[0]
  reach = min(neighbourhood, length - 1)
  offsets = np.concatenate([np.arange(-reach, 0), np.arange(1, reach + 1)])
  near = context.slots[:, None] + offsets[None]
  inside = (near >= 0) & (near < length)
  near = jnp.clip(near, 0, length - 1)
  counts = inside & context.visible[near]
  if context.segments is not None:
    counts &= context.segments[near] == context.segments[context.slots][:, None]
  tokens = context.ids[near]
  log_z = prediction.log_z[:, None]
  log_p = jnp.take_along_axis(prediction.logits, tokens, -1) - log_z
  num_slots, num_ids = prediction.logits.shape
  return prediction.logits.at[
    jnp.arange(num_slots)[:, None], jnp.where(counts, tokens, num_ids)
  ].set(penalty * log_p + log_z, mode='drop')


def draw_noise(
  row_key: Key[Array, ''], positions: Int[Array, 'K'], num_ids: int
) -> DrawNoise:
  """The noise of one row, a function of its key and the logical positions.

  Args:
    row_key: consumed.
    positions: logical positions. Shape `[K]`.
    num_ids: number of columns V of the logits.

  Returns:
    float32 noise with leading shape `[K]`.
  """
  num_blocks, block_size = block_shape(num_ids)

  def at_position(key):
    # The default mode cannot exceed 15.94 and loses events rarer than 1e-7.
    gumbel = jax.random.gumbel(
      key, (num_blocks + block_size + 1,), jnp.float32, mode='high'
    )
    return DrawNoise(gumbel[:num_blocks], gumbel[num_blocks:-1], gumbel[-1])

  return jax.vmap(at_position)(noise_lib.position_keys(row_key, positions))


def gumbel_max(noise: DrawNoise, prediction: Prediction) -> Int[Array, '*S']:
  """Exact categorical draw: the block by its mass, then the entry inside it.

  A block of mass exp(m) wins with probability exp(m - log_z), and its entry v
  with exp(logits[v] - m): the product is the softmax.

  Args:
    noise: Gumbel noise of both levels.
    prediction: logits, block sums and log_z of the distribution.

  Returns:
    int32 ids of the leading shape; a token of logit -inf is never returned
    whatever the noise.
  """
  block = jnp.argmax(_perturb(prediction.block_log_sums, noise.block), -1)
  entries = _entries(prediction.logits, block)
  entry = jnp.argmax(_perturb(entries, noise.entry), -1)
  return (block * entries.shape[-1] + entry).astype(jnp.int32)


def most_probable(prediction: Prediction) -> Int[Array, '*S']:
  """The id of the largest logit, the lowest of equal ones.

  By blocks, whose maxima are known: `jnp.argmax` over the vocabulary takes
  longer on CPU than all else that is done with the logits.

  Example:
    >>> print(most_probable(reduce_logits(jnp.array([1.0, 3.0, 3.0, 2.0]))))
    1
  """
  block = jnp.argmax(prediction.block_maxima, -1)
  entries = _entries(prediction.logits, block)
  entry = jnp.argmax(entries, -1)
  return (block * entries.shape[-1] + entry).astype(jnp.int32)


def _entries(logits, block):
  """The logits of one block of the vocabulary, `[..., b]`."""
  blocks = logits.reshape(logits.shape[:-1] + block_shape(logits.shape[-1]))
  return jnp.take_along_axis(blocks, block[..., None, None], -2)[..., 0, :]


def _without_largest(logits):
  """Minus infinity at the first of the largest."""
  largest = jnp.argmax(logits, -1)[..., None]
  return jnp.where(jnp.arange(logits.shape[-1]) == largest, -jnp.inf, logits)


def _perturb(logits, gumbel):
  # -inf plus an infinite noise would be NaN, which argmax prefers.
  return jnp.where(logits == -jnp.inf, -jnp.inf, logits + gumbel)


def _products(
  probs: Float[np.ndarray, 'M V'],
) -> Iterator[tuple[float, tuple[int, ...]]]:
  """Every tuple of ids of positive probability, with its probability."""
  choices = [np.flatnonzero(row) for row in probs]
  for ids in itertools.product(*choices):
    weight = math.prod(float(row[v]) for row, v in zip(probs, ids, strict=True))
    yield weight, tuple(int(v) for v in ids)


def _forced_noise(ids, order, masked, p) -> DrawNoise:
  """Noise under which the masked positions draw `ids` and rank by `order`."""
  num_blocks, block_size = block_shape(p.shape[-1])
  block = np.zeros(masked.shape + (num_blocks,))
  entry = np.zeros(masked.shape + (block_size,))
  order_noise = np.zeros(masked.shape)
  for slot, v, rank in zip(np.flatnonzero(masked), ids, order, strict=True):
    block[slot, v // block_size] = np.inf
    entry[slot, v % block_size] = np.inf
    order_noise[slot] = rank
  return DrawNoise(block, entry, order_noise)
