"""Training as pure functions: a state, an optimizer, one compiled step.

Everything random in a step is a function of (seed, step, row), so a run that
was stopped and resumed equals one that was not.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from mdlm_jax import losses, predict, schedules, time_draws
from mdlm_jax.vocab import Vocab

Params = Any


class TrainState(NamedTuple):
  """What a step reads and writes.

  Attributes:
    step: number of updates made, int32 scalar.
    params: float32 parameters.
    ema: exponential moving sum of the parameters, from zero; see
      `averaged_params`.
    opt_state: the optimizer's.
  """

  step: Int[Array, '']
  params: Params
  ema: Params
  opt_state: optax.OptState


def init_state(
  params: Params, optimizer: optax.GradientTransformation
) -> TrainState:
  """The state before the first step; `params` belong to it from now on."""
  return TrainState(
    jnp.int32(0),
    params,
    jax.tree.map(jnp.zeros_like, params),
    optimizer.init(params),
  )


def make_optimizer(
  *,
  steps: int,
  learning_rate: float,
  warmup_steps: int,
  weight_decay: float,
  clip_norm: float,
  beta1: float = 0.9,
  beta2: float = 0.99,
  muon_learning_rate: float = 0.0,
) -> optax.GradientTransformation:
  """AdamW or Muon with clipping, linear warm-up and cosine decay to zero.

  Muon (Jordan et al. 2024) replaces the update of a matrix inside the blocks
  by the nearest orthogonal one; a small model then learns from fewer steps.
  Everything else is AdamW's (Loshchilov and Hutter 2019), beside Muon with
  Nesterov momentum (Dozat 2016).

  Args:
    steps: length of the run; the learning rate is 0 at its end.
    learning_rate: the highest of AdamW, after the warm-up; positive.
    warmup_steps: steps of linear growth from 0, fewer than `steps`.
    weight_decay: at least 0. AdamW decays all matrices, embeddings included;
      with Muon only its own are decayed.
    clip_norm: largest global norm of the gradient; positive.
    beta1: decay of the first moment, in [0, 1).
    beta2: decay of the second moment, in [0, 1).
    muon_learning_rate: the highest of Muon; 0: AdamW for everything.

  Raises:
    ValueError: a value outside its range.
  """
  if steps < 1:
    raise ValueError(f'{steps=} must be at least 1')
  if not 0 <= warmup_steps < steps:
    raise ValueError(
      f'optimizer.{warmup_steps=} must be from 0 to below {steps=}'
    )
  for name, value, is_legal in (
    ('learning_rate', learning_rate, 0 < learning_rate < math.inf),
    ('clip_norm', clip_norm, 0 < clip_norm < math.inf),
    ('weight_decay', weight_decay, 0 <= weight_decay < math.inf),
    ('beta1', beta1, 0 <= beta1 < 1),
    ('beta2', beta2, 0 <= beta2 < 1),
    (
      'muon_learning_rate',
      muon_learning_rate,
      0 <= muon_learning_rate < math.inf,
    ),
  ):
    if not is_legal:
      raise ValueError(f'{name}={value} is outside its range')

  def rate(peak):
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup_steps, steps)

  if muon_learning_rate:
    update = optax.contrib.muon(
      rate(muon_learning_rate),
      weight_decay=weight_decay,
      adam_b1=beta1,
      adam_b2=beta2,
      adam_learning_rate=rate(learning_rate),
      muon_weight_dimension_numbers=_stacked_matrices,
    )
  else:
    update = optax.adamw(
      rate(learning_rate),
      beta1,
      beta2,
      weight_decay=weight_decay,
      mask=_is_decayed,
    )
  return optax.chain(optax.clip_by_global_norm(clip_norm), update)


def _is_decayed(params):
  """Which leaves are decayed: all but biases and the scales of norms."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key not in ('scale', 'bias'), params
  )


def _stacked_matrices(params):
  """Input and output axis of Muon's leaves, the blocks' `[layers, in, out]`."""
  return jax.tree.map(
    lambda leaf: (
      optax.contrib.MuonDimensionNumbers(1, 2) if leaf.ndim == 3 else None
    ),
    params,
  )


def averaged_params(state: TrainState, decay: float) -> Params:
  """The average of the parameters over the past steps, newest first.

  The step j steps ago has weight proportional to decay^j, and the weights sum
  to one from the first step on (the bias correction of Adam, Kingma and Ba
  2015, section 3). Before the first step: the initial parameters.

  Args:
    state: its `ema` was updated with the same decay; concrete.
    decay: in [0, 1).

  Returns:
    float32 parameters.
  """
  if int(state.step) == 0:
    return state.params
  # 1 - decay^step without cancellation.
  weight = -math.expm1(int(state.step) * math.log(decay)) if decay else 1.0
  return jax.tree.map(lambda total: total / weight, state.ema)


class Metrics(NamedTuple):
  """What one step measured, each a sum and a count.

  Attributes:
    bound: nats over valid tokens.
    masked_cross_entropy: unweighted, over masked tokens.
    weighted_sum: the same sum as `bound`, over rows.
    empty_rows: rows where nothing was masked, over rows.
    gradient_norm: before clipping, over steps.
  """

  bound: losses.Total
  masked_cross_entropy: losses.Total
  weighted_sum: losses.Total
  empty_rows: losses.Total
  gradient_norm: losses.Total


def train_step(
  denoiser: predict.Denoiser,
  optimizer: optax.GradientTransformation,
  *,
  vocab: Vocab,
  ema_decay: float,
  schedule: schedules.Schedule = schedules.linear(),
  times: Callable = time_draws.stratified_times,
  t_min: float = 0.0,
  t_max: float = 1.0,
  weight_power: float = 1.0,
) -> Callable[[TrainState, dict, Array], tuple[TrainState, Metrics]]:
  """The compiled update on the continuous-time bound, its weights tempered.

  A network that attends by blocks is trained by block diffusion (Arriola et al.
  2025, arXiv 2503.09573): each block has its own noise level and is given the
  clean blocks before it.

  Args:
    denoiser: the network.
    optimizer: an optax transformation.
    vocab: roles of the ids.
    ema_decay: decay of the averaged parameters, in [0, 1).
    schedule: the masking schedule.
    times: draw of the noise levels, such as `time_draws.stratified_times`.
    t_min: smallest noise level; bounds the weight -alpha'/(1 - alpha).
    t_max: largest. A narrow range makes the gradient vary less, see
      `block_diffusion.variance_by_range`; what is reported as the bound is then
      the mean over that range, and no bound.
    weight_power: the loss weighs by this power of that weight: 1 is the bound
      itself, 0 the unweighted cross-entropy. A power between makes the gradient
      vary less; what is reported is the bound whatever it is.

  Returns:
    `step(state, batch, key) -> (state, metrics)`. The state is donated. The
    batch has `ids` int32 `[B, L]`, `valid` bool `[B, L]` and `row_ids` `[B]`,
    ids within the global batch of B rows; it may have `given` bool `[B, L]`,
    tokens such as BOS that are never masked and not counted. `key` is the
    run's, the same at every step.

  Raises:
    ValueError: `ema_decay` outside [0, 1), `weight_power` outside [0, 1], not
      0 <= `t_min` <= `t_max` <= 1 with `t_max` above 0.
  """
  if not 0 <= ema_decay < 1:
    raise ValueError(f'{ema_decay=} must be at least 0 and below 1')
  if not 0 <= t_min <= t_max <= 1 or not t_max:
    raise ValueError(f'0 <= {t_min=} <= {t_max=} <= 1 and t_max > 0 must hold')
  if not 0 <= weight_power <= 1:
    raise ValueError(f'{weight_power=} must be from 0 to 1')
  objective = schedule._replace(
    weight=lambda t: schedule.weight(t) ** weight_power
  )

  def loss(params, batch, key):
    times_key, corruption_key = jax.random.split(key)
    ids, valid, row_ids = batch['ids'], batch['valid'], batch['row_ids']
    num_rows, length = ids.shape
    draw = times
    block = denoiser.attention_block
    if block is not None and block < length:
      draw = functools.partial(
        time_draws.block_times, times, length=length, block=block
      )
    t = draw(times_key, row_ids, num_rows, t_min=t_min, t_max=t_max)
    given = batch.get('given')
    log_probs, masked = predict.corrupted_log_probs(
      denoiser,
      params,
      corruption_key,
      ids,
      t,
      valid,
      vocab=vocab,
      schedule=schedule,
      row_ids=row_ids,
      given=given,
    )
    if given is not None:
      valid &= ~given
    bound = losses.continuous_bound(
      log_probs, masked, valid, t, schedule=schedule
    )
    rows = jnp.float32(num_rows)
    empty = jnp.sum(~masked.any(1), dtype=jnp.float32)
    objective_value = losses.continuous_bound(
      log_probs, masked, valid, t, schedule=objective
    ).mean
    return objective_value, {
      'bound': bound,
      'masked_cross_entropy': losses.cross_entropy(log_probs, masked),
      'weighted_sum': losses.Total(bound.sum, rows),
      'empty_rows': losses.Total(empty, rows),
    }

  def step(state, batch, key: Key[Array, '']):
    step_key = jax.random.fold_in(key, state.step)
    grads, measured = jax.grad(loss, has_aux=True)(
      state.params, batch, step_key
    )
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = optax.incremental_update(params, state.ema, 1 - ema_decay)
    norm = losses.Total(optax.tree.norm(grads), jnp.float32(1))
    return (
      TrainState(state.step + 1, params, ema, opt_state),
      Metrics(gradient_norm=norm, **measured),
    )

  return jax.jit(step, donate_argnums=0)


def check_finite(metrics: Metrics, step: int) -> None:
  """Stops a run that diverged.

  Raises:
    FloatingPointError: the loss or its gradient is not finite; names the step.
  """
  loss = float(metrics.bound.mean)
  norm = float(metrics.gradient_norm.mean)
  if not math.isfinite(loss + norm):
    raise FloatingPointError(
      f'training diverged at step {step}: loss {loss}, gradient norm {norm}; '
      'try a lower learning rate'
    )
