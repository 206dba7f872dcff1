"""Exact denoisers and exact laws on small spaces.

A joint distribution over a few short strings has a denoiser in closed form, and
the law of any sampler on it can be enumerated. `sampler_law` runs the library's
own `sampling.reverse_step` on every state and every cell of the noise, so it is
the law of the code that samples, not of a second copy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mdlm_jax import sampling
from mdlm_jax.canvas import Canvas
from mdlm_jax.draws import Draw, categorical
from mdlm_jax.interning import interned
from mdlm_jax.predict import Denoiser
from mdlm_jax.rules import Rule
from mdlm_jax.vocab import Vocab


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

  return Denoiser(features, lambda params, hidden: hidden)


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
  decoding = sampling.Decoding(
    exact_denoiser(vocab) if denoiser is None else denoiser,
    vocab,
    rule,
    categorical() if draw is None else draw,
  )
  with jax.enable_x64(True):
    start = sampling.initial_state(decoding, canvas)
    # Mass of each state, and the part of it that met an impossible context.
    masses = {_freeze(start): (1.0, 0.0)}
    for step in range(rule.calls(canvas.ids.shape[1])):
      masses = _advance(decoding, params, masses, start, step, canvas)
  law: dict[tuple[int, ...], float] = {}
  for (ids, *_), (mass, _) in masses.items():
    law[ids] = law.get(ids, 0.0) + mass
  return SamplerLaw(law, sum(impossible for _, impossible in masses.values()))


def _advance(decoding, params, masses, like, step, canvas):
  """The law after one call, by running the call on every state and cell."""
  vocab = decoding.vocab
  states = _thaw(list(masses), like)
  batch = _repeat(canvas, len(masses))
  prediction = _predict_canvas(decoding, params, step, states, batch)
  prediction = jax.tree.map(np.asarray, prediction)
  masked = np.asarray(sampling.is_masked(states.ids, batch, vocab))
  possible = context_matches(params, states.ids, vocab) * params.probabilities
  possible = np.asarray(possible).sum(1) > 0

  parents, weights, impossible, noises = [], [], [], []
  for i, (mass, was_impossible) in enumerate(masses.values()):
    row = jax.tree.map(lambda x, i=i: x[i], prediction)
    rule_cells = list(decoding.rule.cells(step, masked[i]))
    for p_draw, draw_noise in decoding.draw.cells(row, masked[i]):
      for p_rule, rule_noise in rule_cells:
        p = p_draw * p_rule
        parents.append(i)
        weights.append(mass * p)
        impossible.append((was_impossible if possible[i] else mass) * p)
        noises.append((draw_noise, rule_noise))

  # Padded to a power of two, so that few shapes are compiled.
  size = 1 << (len(parents) - 1).bit_length()
  fill = size - len(parents)
  pick = np.array(parents + [0] * fill)
  after = _reverse_step(
    decoding,
    params,
    jax.tree.map(lambda *leaves: np.stack(leaves), *noises, *noises[:1] * fill),
    step,
    jax.tree.map(lambda x: x[pick], states),
    _repeat(canvas, size),
  )
  masses = {}
  rows = jax.tree.map(np.asarray, after)
  for i, cell in enumerate(zip(weights, impossible, strict=True)):
    state = _freeze(jax.tree.map(lambda x, i=i: x[i : i + 1], rows))
    old = masses.get(state, (0.0, 0.0))
    masses[state] = (old[0] + cell[0], old[1] + cell[1])
  return masses


_predict_canvas = jax.jit(sampling.predict_canvas, static_argnames='decoding')
_reverse_step = jax.jit(sampling.reverse_step, static_argnames='decoding')


def _repeat(canvas: Canvas, count: int) -> Canvas:
  return jax.tree.map(lambda x: jnp.repeat(x, count, 0), canvas)


def _freeze(state):
  """A sampler state of one row as nested tuples of numbers, ids first."""
  leaves = jax.tree.leaves(state)
  return tuple(tuple(np.asarray(leaf)[0].ravel().tolist()) for leaf in leaves)


def _thaw(frozen, like):
  """The states as one batch with the dtypes and shapes of `like`."""
  leaves, structure = jax.tree.flatten(like)
  batched = [
    jnp.asarray(values, leaf.dtype).reshape((-1,) + leaf.shape[1:])
    for values, leaf in zip(zip(*frozen, strict=True), leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, batched)
