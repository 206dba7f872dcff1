"""Sampling along a discrete flow, in one compiled loop.

In a step from tau to tau' every token, independently, becomes its candidate, is
drawn anew from the source, or stays. A `Step` gives the two probabilities; all
three laws are legal whatever the size of the step. With MASK as source
`as_rule` is the same process as a rule of `sampling.sample`, with all that
the sampler offers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from mdlm_jax import noise, rules
from mdlm_jax.canvas import Canvas
from mdlm_jax.checks import check_values
from mdlm_jax.constraints import Constraint
from mdlm_jax.draws import Context, Draw, categorical
from mdlm_jax.flow.kappas import as_schedule
from mdlm_jax.flow.paths import Path, PathNoise, position_noise
from mdlm_jax.flow.rates import check_corrector, check_stationary
from mdlm_jax.guidance import Guidance
from mdlm_jax.interning import interned
from mdlm_jax.predict import Denoiser, predict
from mdlm_jax.rules.sigmas import mask_levels
from mdlm_jax.sampling_state import is_masked
from mdlm_jax.schedules import check_grid
from mdlm_jax.vocab import Vocab

Grid = tuple[float, ...]


class Jump(NamedTuple):
  """What becomes of a token in a step; it stays with what is left of 1.

  Attributes:
    to_candidate: probability of the candidate, drawn from the network's
      prediction.
    to_source: probability of a token drawn from the source.
  """

  to_candidate: Float[Array, '*S']
  to_source: Float[Array, '*S']


# `step(path, ids, own_probs, tau, next_tau) -> Jump`, elementwise; `own_probs`
# is what the network says of the token that stands there.
Step = Callable[..., Jump]


@interned
def euler(*, corrector: float = 0.0) -> Step:
  """First order in the step: rates times its length, cut off at 1.

  A token jumps forward with probability (1 + b) h kappa' / (1 - kappa) and back
  with b h kappa' / kappa (Gat et al. 2024, arXiv 2407.15595), h =
  tau' - tau. Near the end the first passes 1, and is 1 then; so it is in the
  step that reaches tau = 1. What the first leaves is the most that the second
  can be. For a network that gives the posterior.

  Args:
    corrector: b, at least 0.

  Returns:
    The step.

  Raises:
    ValueError: `corrector` is negative or not finite.
  """
  check_corrector(corrector)

  def step(path, ids, own_probs, tau, next_tau):
    del own_probs
    check_stationary(path)
    kappa = path.kappa
    change = (next_tau - tau) * kappa.derivative(tau)
    forward = (1.0 + corrector) * change / kappa.complement(tau)
    forward = jnp.where(next_tau >= 1, 1.0, jnp.minimum(forward, 1.0))
    forward = _if_uncertain(path, ids, tau, forward)
    if not corrector:
      return Jump(forward, jnp.zeros_like(forward))
    kept = kappa.kappa(tau)
    back = corrector * change / jnp.where(kept > 0, kept, 1.0)
    back = jnp.where(kept > 0, jnp.minimum(back, 1.0), 1.0)
    back = jnp.where(next_tau >= 1, 0.0, back)
    return Jump(forward, jnp.minimum(back, 1.0 - forward))

  return step


@interned
def exact(*, corrector: float = 0.0) -> Step:
  """The rates integrated over the step, the prediction held.

  A token jumps with probability (kappa(tau') - kappa(tau)) / (1 - kappa(tau)),
  which is 1 in the last step. A corrector goes on to kappa* = kappa' + b
  (kappa' - kappa), at most 1, and then noises back: each token stays with
  probability kappa' / kappa* and is drawn from the source otherwise. For short
  steps these are the rates (1 + b) u and b v of `euler`; for steps of any
  length the law p_tau(. | x) of a known x goes to p_tau'(. | x) exactly. For a
  network that gives the posterior.

  Args:
    corrector: b, at least 0.

  Returns:
    The step.

  Raises:
    ValueError: `corrector` is negative or not finite.
  """
  check_corrector(corrector)

  def step(path, ids, own_probs, tau, next_tau):
    del own_probs
    check_stationary(path)
    left, after = path.kappa.complement(tau), path.kappa.complement(next_tau)
    reached = jnp.maximum(after - corrector * (left - after), 0.0)
    forward = jnp.where(
      left > 0, (left - reached) / jnp.where(left > 0, left, 1.0), 1.0
    )
    forward = _if_uncertain(path, ids, tau, forward)
    back = (after - reached) / (1.0 - reached) if corrector else 0.0
    return Jump(forward * (1.0 - back), jnp.zeros_like(forward) + back)

  return step


@interned
def ancestral() -> Step:
  """The posterior q(z_s | z_t, x) of the noising process at x = x_theta.

    (kappa_t / kappa_s 1[y = z] + m(z)) q_s(y | x_theta) / q_t(z | x_theta),
    m = (1 - kappa_t) pi_t - kappa_t / kappa_s (1 - kappa_s) pi_s

  (UDLM, Schiff et al. 2024, arXiv 2412.10193; GIDD, von Ruette et al. 2025,
  arXiv 2503.04482). It is a mixture: a token becomes its candidate with
  probability m(z) kappa_s / q_t(z | x_theta), is drawn from the source with
  m(z) (1 - kappa_s) / q_t(z | x_theta), and stays otherwise. For a network
  trained with `flow.diffusion_bound`, and for every path.

  Returns:
    The step.
  """

  def step(path, ids, own_probs, tau, next_tau):
    kappa, source = path.kappa, path.source
    kept = kappa.kappa(next_tau)
    ratio = kappa.kappa(tau) / kept
    noise = kappa.complement(tau) * source.probability(ids, tau)
    next_noise = kappa.complement(next_tau) * source.probability(ids, next_tau)
    fresh = jnp.maximum(noise - ratio * next_noise, 0.0)
    here = kappa.kappa(tau) * own_probs + noise
    changed = jnp.where(here > 0, fresh / jnp.where(here > 0, here, 1.0), 0.0)
    changed = jnp.minimum(changed, 1.0)
    return Jump(changed * kept, changed * kappa.complement(next_tau))

  return step


def _if_uncertain(path, ids, tau, probability):
  """0 at a token that the source cannot have drawn: it is clean."""
  return jnp.where(path.source.probability(ids, tau) > 0, probability, 0.0)


@interned
def as_rule(path: Path, grid: Grid, *, corrector: float = 0.0) -> rules.Rule:
  """A flow with MASK as source in `exact` steps, as a rule.

  Without corrector it is `rules.kernel`: (kappa' - kappa) / (1 - kappa) is the
  reverse kernel's (alpha_s - alpha_t) / (1 - alpha_t). With one it is
  `rules.remasking` with sigma = 1 - kappa' / kappa*: to first order in the step
  that of `rules.sigmas.flow_corrector`.

  Args:
    path: from MASK (`masked`).
    grid: noise levels t = 1 - tau from 1.0 to 0.0, strictly decreasing.
    corrector: as in `exact`.

  Returns:
    The rule.

  Raises:
    ValueError: for another source, such a grid or such a corrector.
  """
  if not path.source.absorbing:
    raise ValueError('a rule begins with MASK, and so must the path')
  check_corrector(corrector)
  check_grid(grid)
  schedule = as_schedule(path.kappa)
  if not corrector:
    return rules.kernel(grid, schedule)
  level = mask_levels(grid, schedule)
  before, after = level[:-1], level[1:]
  reached = np.maximum(after - corrector * (before - after), 0.0)
  sigmas = tuple(((after - reached) / (1.0 - reached)).tolist())
  return rules.remasking(grid, sigmas, schedule)


class FlowSample(NamedTuple):
  """What `sample` returns.

  Attributes:
    ids: the finished canvas. Shape `[B, L]`.
    calls: network calls made, each for the whole batch; a guided call counts
      twice.
    finite: whether all logits of a row were usable. Shape `[B]`.
    trajectory: the canvas before the first call and after each, `[calls + 1, B,
      L]`, or None.
  """

  ids: Int[Array, 'B L']
  calls: int
  finite: Bool[Array, 'B']
  trajectory: Int[Array, 'S B L'] | None


def sample(
  denoiser: Denoiser,
  params: Any,
  key: Key[Array, ''],
  canvas: Canvas,
  *,
  vocab: Vocab,
  path: Path,
  grid: Grid,
  step: Step | None = None,
  draw: Draw | None = None,
  guidance: Guidance | None = None,
  constraint: Constraint | None = None,
  trajectory: bool = False,
  row_ids: Int[Array, 'B'] | None = None,
) -> FlowSample:
  """Fills in the canvas along a flow, whatever its source.

  Every generation slot is drawn from the source, then goes through the steps of
  the grid; the others never change. Everything random depends on the key, the
  row id, the step and the logical position only.

  Args:
    denoiser: the network, static. Which conditional it gives is said by `step`.
    params: its parameters.
    key: consumed.
    canvas: rows with open slots.
    vocab: roles of the ids, static.
    path: the path that the network was trained on, static.
    grid: noise levels t = 1 - tau from 1.0 to 0.0, strictly decreasing, one
      more than there are calls, as of `rules.kernel`; static.
    step: `euler`, `exact` (the default) or `ancestral`, static.
    draw: how candidates are drawn, static; by default from the predicted
      categorical at temperature 1.
    guidance: classifier-free guidance of the logits (`guidance.guide`): the
      candidates change, and the rates stay rates.
    constraint: ids that a candidate may be (`constraints.constrain`); the
      tokens of the source obey none.
    trajectory: whether to return the canvas after each call.
    row_ids: ids of the rows for the noise, by default 0 to B - 1.

  Returns:
    The finished canvas.

  Raises:
    ValueError: for a grid that does not fall strictly from 1 to 0; a step that
      is not for the source of the path; on concrete arrays, for logits that are
      NaN, infinite or all forbidden.
  """
  check_grid(grid)
  chex.assert_rank(canvas.ids, 2)
  chex.assert_equal_shape([x for x in canvas if x is not None])
  if row_ids is None:
    row_ids = jnp.arange(canvas.ids.shape[0])
  ids, finite, canvases = _sample(
    params,
    noise.row_keys(key, row_ids),
    canvas,
    guidance,
    constraint,
    static=_Static(
      denoiser,
      vocab,
      path,
      tuple(grid),
      exact() if step is None else step,
      categorical() if draw is None else draw,
    ),
    trajectory=trajectory,
  )
  check_values(
    finite, 'the network gave non-finite logits, or none that may be drawn'
  )
  calls = len(grid) - 1
  calls *= 1 if guidance is None else guidance.calls_per_step
  return FlowSample(ids, calls, finite, canvases)


class _Static(NamedTuple):
  denoiser: Denoiser
  vocab: Vocab
  path: Path
  grid: Grid
  step: Step
  draw: Draw


@functools.partial(jax.jit, static_argnames=('static', 'trajectory'))
def _sample(params, keys, canvas, guidance, constraint, *, static, trajectory):
  path, is_open = static.path, canvas.generation_slots
  positions = noise.packed_positions(canvas.positions, canvas.segments)
  tau = jnp.asarray(1.0 - np.asarray(static.grid), jnp.result_type(float))
  slots = jnp.broadcast_to(jnp.arange(positions.shape[1]), positions.shape)

  def noise_of(call):
    """The noise of a draw and of a jump; the jump's of call 0 is the start."""

    def one_row(row_key, positions):
      draw_key, jump_key = jax.random.split(jax.random.fold_in(row_key, call))
      return (
        static.draw.noise(draw_key, positions, static.vocab.size),
        position_noise(jump_key, positions),
      )

    return jax.vmap(one_row)(keys, positions)

  def one_call(carry, call):
    ids, finite = carry
    now, after = tau[call], tau[call + 1]
    draw_noise, jump_noise = noise_of(call + 1)
    prediction, _ = predict(
      static.denoiser,
      params,
      None,
      ids,
      vocab=static.vocab,
      t=jnp.full(ids.shape[0], 1.0 - now),
      valid=canvas.valid,
      positions=canvas.positions,
      segments=canvas.segments,
      step=call,
      guidance=guidance,
      constraint=constraint,
    )
    visible = canvas.valid & ~is_masked(ids, canvas, static.vocab)
    context = Context(ids, visible, slots, canvas.segments)
    candidate_ids, _ = static.draw.propose(draw_noise, prediction, context)
    own = jnp.take_along_axis(prediction.logits, ids[..., None], -1)[..., 0]
    jump = static.step(path, ids, jnp.exp(own - prediction.log_z), now, after)
    next_ids = apply_jump(jump_noise, ids, candidate_ids, jump, path, after)
    usable = jnp.isfinite(prediction.log_z) | ~is_open
    ids = jnp.where(is_open, next_ids, ids)
    return (ids, finite & usable.all(1)), ids if trajectory else None

  start = path.source.draw(noise_of(0)[1], tau[0])
  ids = jnp.where(is_open, start, canvas.ids)
  finite = jnp.ones(ids.shape[0], bool)
  (last, finite), rest = jax.lax.scan(
    one_call, (ids, finite), jnp.arange(tau.size - 1)
  )
  canvases = jnp.concatenate([ids[None], rest]) if trajectory else None
  return last, finite, canvases


def apply_jump(
  jump_noise: PathNoise,
  ids: Int[Array, '*S'],
  candidate_ids: Int[Array, '*S'],
  jump: Jump,
  path: Path,
  next_tau: Float[Array, ''],
) -> Int[Array, '*S']:
  """The tokens after a step, a deterministic function of the noise.

  Args:
    jump_noise: of every position. Shape `[...]`.
    ids: the tokens before. Shape `[...]`.
    candidate_ids: drawn from the prediction. Shape `[...]`.
    jump: what becomes of each token.
    path: gives the source.
    next_tau: flow time after the step.

  Returns:
    int32. Shape `[...]`.
  """
  forward = jump_noise.keep < jump.to_candidate
  back = jump_noise.keep < jump.to_candidate + jump.to_source
  drawn = path.source.draw(jump_noise, next_tau)
  return jnp.where(forward, candidate_ids, jnp.where(back, drawn, ids))
