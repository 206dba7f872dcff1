"""Exact denoisers and exact laws on small spaces.

A joint distribution over a few short strings has a denoiser in closed form, and
the law of any sampler on it can be enumerated. `sampler_law` runs the library's
own `sampling_step` on every state and every cell of the noise, so it is the law
of the code that samples, not of a second copy.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mdlm_jax import network_call, sampling_step
from mdlm_jax.blocks import Blocks, Window, window_of
from mdlm_jax.canvas import Canvas
from mdlm_jax.constraints import Constraint
from mdlm_jax.draws import Context, Draw, categorical
from mdlm_jax.guidance import Guidance
from mdlm_jax.interning import interned
from mdlm_jax.predict import Denoiser, Prediction
from mdlm_jax.rules import Row, Rule
from mdlm_jax.sampling_state import Decoding, Inputs, window_rows
from mdlm_jax.schedules import Schedule, linear
from mdlm_jax.vocab import Vocab

_CHUNK = 256  # States that are run at once.


class Joint(NamedTuple):
  """A distribution over finitely many strings of one length.

  Attributes:
    strings: the strings of positive probability. Shape `[N, L]`.
    probabilities: theirs, summing to 1. Shape `[N]`.
  """

  strings: Int[Array, 'N L'] | Int[np.ndarray, 'N L']
  probabilities: Float[Array, 'N'] | Float[np.ndarray, 'N']


class SamplerLaw(NamedTuple):
  """The exact law of a sampler.

  Attributes:
    probabilities: of every canvas the sampler can end in, as a tuple of ids.
    impossible_mass: probability of passing, at some call, through a context
      that the joint gives probability zero.
  """

  probabilities: dict[tuple[int, ...], float]
  impossible_mass: float


def joint(
  strings: Sequence[Sequence[int]],
  probabilities: Sequence[float] | np.ndarray | None = None,
) -> Joint:
  """A joint distribution in float64, uniform by default.

  Args:
    strings: distinct, all of one length.
    probabilities: non-negative, of sum 1.

  Returns:
    The joint.

  Raises:
    ValueError: for strings or probabilities other than these.

  Example:
    >>> joint([(2, 3), (3, 2)]).probabilities
    array([0.5, 0.5])
  """
  strings = [tuple(int(token) for token in string) for string in strings]
  if len({len(s) for s in strings}) != 1 or len(set(strings)) != len(strings):
    raise ValueError('strings must be distinct and all of one length')
  if probabilities is None:
    probabilities = np.full(len(strings), 1 / len(strings))
  probabilities = np.asarray(probabilities, np.float64)
  if probabilities.shape != (len(strings),) or not (probabilities >= 0).all():
    raise ValueError('probabilities must be one non-negative number a string')
  if abs(probabilities.sum() - 1) > 1e-9:
    raise ValueError(f'probabilities sum to {probabilities.sum()}, not 1')
  return Joint(np.asarray(strings, np.int32), probabilities)


@interned
def exact_denoiser(vocab: Vocab) -> Denoiser:
  """The denoiser that knows the joint, which is its `params`.

  At every slot it gives the log-marginals of the clean token given the tokens
  that are not MASK. In a context of probability zero, where no conditional
  exists, it gives the unconditional marginals.
  """

  def features(params, cache, ids, *, at, **unused):
    del cache, unused
    matches = context_matches(params, ids, vocab)
    weights = matches * params.probabilities
    mass = weights.sum(1, keepdims=True)
    weights = jnp.where(mass > 0, weights, params.probabilities)
    weights /= weights.sum(1, keepdims=True)
    clean = jax.nn.one_hot(params.strings, vocab.size, dtype=weights.dtype)
    marginals = jnp.einsum('bn,nlv->blv', weights, clean)
    if at is not None:
      marginals = jnp.take_along_axis(marginals, at[..., None], 1)
    return jnp.log(marginals), ()

  return Denoiser(features, lambda params, hidden: hidden, time_free=True)


def context_matches(params: Joint, ids, vocab: Vocab):
  """Which strings agree with the visible tokens of each row, `[B, N]`."""
  agrees = ids[:, None] == jnp.asarray(params.strings)[None]
  return (agrees | (ids == vocab.mask_id)[:, None]).all(-1)


def sampler_law(
  params: Joint,
  canvas: Canvas,
  *,
  vocab: Vocab,
  rule: Rule,
  draw: Draw | None = None,
  denoiser: Denoiser | None = None,
  schedule: Schedule = linear(),
  blocks: Blocks | None = None,
  guidance: Guidance | None = None,
  constraint: Constraint | None = None,
  eos_last: bool = False,
  stop_at_eos: bool = False,
) -> SamplerLaw:
  """The exact law of `sampling.sample` on a canvas of one row, in float64.

  Args:
    params: the joint.
    canvas: one row, small: the cost is the number of reachable states times
      the cells of their noise.
    vocab: roles of the ids.
    rule: which positions are written in a step.
    draw: which values are proposed, by default as in `sample`.
    denoiser: by default the exact one; another one also takes the joint as its
      params, which decides what counts as impossible.
    schedule: as in `sample`, and so are all that follow.
    blocks: decodes block after block.
    guidance: classifier-free guidance.
    constraint: ids that a slot may hold.
    eos_last: writes EOS only where nothing else is proposed.
    stop_at_eos: ends the row at an EOS.

  Returns:
    The law and the mass that passed through a context of probability zero.

  Raises:
    ValueError: for a canvas of more than one row or of another length, or a
      string with an id that cannot be drawn.
  """
  if canvas.ids.shape[0] != 1:
    raise ValueError(f'one row at a time, not {canvas.ids.shape[0]}')
  if canvas.ids.shape[1] != params.strings.shape[1]:
    raise ValueError(
      f'a canvas of {canvas.ids.shape[1]} slots for strings of '
      f'{params.strings.shape[1]}'
    )
  in_table = (params.strings >= 0) & (params.strings < vocab.size)
  if not (in_table.all() and vocab.drawable[params.strings].all()):
    raise ValueError('a string holds an id that cannot be drawn')
  decoding = Decoding(
    exact_denoiser(vocab) if denoiser is None else denoiser,
    vocab,
    rule,
    categorical() if draw is None else draw,
    schedule,
    eos_last=eos_last,
    stop_at_eos=stop_at_eos,
  )
  inputs = Inputs(params, canvas, guidance, constraint)
  # Mass of each canvas, and the part of it that met an impossible context.
  law = {tuple(canvas.ids[0].tolist()): (1.0, 0.0)}
  with jax.enable_x64(True):
    for block in range(1 if blocks is None else blocks.count):
      window = window_of(blocks, block, canvas)
      law = _window_law(decoding, inputs, law, window)
  return SamplerLaw(
    {ids: mass for ids, (mass, _) in law.items()},
    sum(impossible for _, impossible in law.values()),
  )


def _window_law(decoding, inputs, law, window):
  """The law of the canvas after a window, from the law before it."""
  size = window.open.shape[1]
  # The noise of init may decide the time only, which no exact denoiser reads.
  noise = decoding.rule.noise(jax.random.key(0), jnp.arange(size))
  noise = jax.tree.map(lambda x: x[None], noise)
  masses = {}
  for ids, mass in law.items():
    start = sampling_step.start_window(
      decoding, inputs, noise, jnp.array([ids]), jnp.array([True]), window
    )
    masses[_freeze(start)[0]] = mass
  for step in range(decoding.rule.calls(size)):
    masses = _advance(decoding, inputs, masses, start, step, window)
  return _merged((ids, mass) for (ids, *_), mass in masses.items())


def _advance(decoding, inputs, masses, like, step, window):
  """The law after one call, by running the call on every state and cell.

  The cells of the draw come first, then, for every proposal, the rule's.
  """

  def run(function, *batched):
    return _run(function, decoding, inputs, window, step, *batched)

  states, masses = _thaw(list(masses), like), list(masses.values())
  parents, noises, proposed = [], [], []
  for i, view in enumerate(_rows(run(_look, states))):
    mass, impossible = masses[i]
    if view.needed and not view.possible:
      impossible = mass
    drawn = view.rows.open if decoding.rule.edits else view.rows.masked
    cells = list(decoding.draw.cells(view.prediction, drawn, view.context))
    if not view.needed:  # No call: whatever the noise, the proposal is kept.
      cells = [(1.0, cells[0][1])]
    for p, noise in cells:
      parents.append(i)
      noises.append(noise)
      proposed.append((mass * p, impossible * p))

  states, proposals, offered = run(
    _propose, _pick(states, parents), _stack(noises)
  )
  parents, noises, decided = [], [], []
  for i, (state, proposal, row) in enumerate(
    _rows((states, proposals, offered))
  ):
    mass, impossible = proposed[i]
    for p, noise in decoding.rule.cells(step, row, proposal, state.rule_state):
      parents.append(i)
      noises.append(noise)
      decided.append((mass * p, impossible * p))
  after = run(_decide, *_pick((states, proposals), parents), _stack(noises))
  return _merged(zip(_freeze(after), decided, strict=True))


class _View(NamedTuple):
  """What an enumeration has to know of its states."""

  prediction: Prediction
  context: Context
  rows: Row
  needed: Any  # A call is made.
  possible: Any  # The joint gives the context mass.


def _look(decoding, inputs, window, step, states):
  prediction, _ = network_call.predict_window(
    decoding, inputs, step, states, window
  )
  mass = context_matches(inputs.params, states.ids, decoding.vocab)
  mass = (mass * inputs.params.probabilities).sum(1)
  return _View(
    prediction,
    sampling_step.draw_context(decoding, inputs, states.ids, window),
    window_rows(decoding, inputs, states.ids, window),
    sampling_step.needs_call(decoding, inputs, states, window),
    mass > 0,
  )


def _propose(decoding, inputs, window, step, states, noise):
  proposals, states = sampling_step.propose_where_needed(
    decoding, inputs, noise, step, states, window
  )
  rows = window_rows(decoding, inputs, states.ids, window)
  offered, _ = sampling_step.offered_rows(decoding, rows, proposals)
  return states, proposals, offered


def _decide(decoding, inputs, window, step, states, proposals, noise):
  return sampling_step.apply_rule(
    decoding, inputs, noise, step, proposals, states, window
  )


def _run(function, decoding, inputs, window, step, *batched):
  """A function of one call on many states of the one row, in numpy."""
  count = len(jax.tree.leaves(batched)[0])
  # Chunks of one size, so that each function is compiled once.
  chunks = []
  for start in range(0, count, _CHUNK):
    pick = np.minimum(np.arange(start, start + _CHUNK), count - 1)
    chunk = _on_chunk(
      function, decoding, inputs, window, step, _pick(batched, pick)
    )
    chunks.append(jax.tree.map(np.asarray, chunk))
  return jax.tree.map(lambda *x: np.concatenate(x)[:count], *chunks)


@functools.partial(jax.jit, static_argnames=('function', 'decoding'))
def _on_chunk(function, decoding, inputs, window, step, batched):
  def repeat(tree):
    return jax.tree.map(lambda x: jnp.repeat(x, _CHUNK, 0), tree)

  constraint = inputs.constraint
  if constraint is not None:
    constraint = constraint._replace(index=repeat(constraint.index))
  inputs = inputs._replace(
    canvas=repeat(inputs.canvas),
    guidance=repeat(inputs.guidance),
    constraint=constraint,
  )
  window = Window(repeat(window.slots), repeat(window.open), window.block)
  return function(decoding, inputs, window, step, *batched)


def _pick(tree, indices):
  return jax.tree.map(lambda x: x[np.asarray(indices)], tree)


def _rows(tree):
  """The rows of a batched tree, one after the other."""
  leaves, structure = jax.tree.flatten(tree)
  return [structure.unflatten(row) for row in zip(*leaves, strict=True)]


def _stack(trees):
  """One batch of many trees of arrays or numbers."""
  leaves = zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)
  structure = jax.tree.structure(trees[0])
  return structure.unflatten([np.array(column) for column in leaves])


def _merged(masses):
  """Adds up the masses of equal states."""
  total = {}
  for state, (mass, impossible) in masses:
    old = total.get(state, (0.0, 0.0))
    total[state] = (old[0] + mass, old[1] + impossible)
  return total


def _freeze(states):
  """Every state of a batch as nested tuples of numbers, ids first."""
  leaves = [np.asarray(x) for x in jax.tree.leaves(states)]
  rows = [map(tuple, x.reshape(len(x), -1).tolist()) for x in leaves]
  return list(zip(*rows, strict=True))


def _thaw(frozen, like):
  """The states as one batch with the dtypes and shapes of `like`."""
  leaves, structure = jax.tree.flatten(like)
  batched = [
    jnp.asarray(values, leaf.dtype).reshape((-1,) + leaf.shape[1:])
    for values, leaf in zip(zip(*frozen, strict=True), leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, batched)
