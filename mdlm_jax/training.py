"""Training as pure functions: a state and one compiled step.

Everything random in a step is a function of (seed, step, row), so a run that
was stopped and resumed equals one that was not, on any number of devices.
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
from mdlm_jax.checks import check_integer
from mdlm_jax.corruption import random_lengths
from mdlm_jax.vocab import Vocab

Params = Any


class TrainState(NamedTuple):
  """What a step reads and writes.

  Attributes:
    step: number of steps made, int32 scalar.
    params: float32 parameters.
    ema: exponential moving sum of the parameters, from zero; see
      `averaged_params`.
    opt_state: the optimizer's.
    skipped: how many of the steps updated nothing, because their gradient was
      not finite; int32 scalar.
  """

  step: Int[Array, '']
  params: Params
  ema: Params
  opt_state: optax.OptState
  skipped: Int[Array, '']


def init_state(
  params: Params, optimizer: optax.GradientTransformation
) -> TrainState:
  """The state before the first step; `params` belong to it from now on."""
  return TrainState(
    jnp.int32(0),
    params,
    jax.tree.map(jnp.zeros_like, params),
    optimizer.init(params),
    jnp.int32(0),
  )


def averaged_params(state: TrainState, decay: float) -> Params:
  """The average of the parameters over the past updates, newest first.

  The one j updates ago has weight proportional to decay^j, and the weights sum
  to one from the first on (the bias correction of Adam, Kingma and Ba 2015,
  section 3). Before the first update: the initial parameters.

  Args:
    state: its `ema` was updated with the same decay; concrete.
    decay: in [0, 1).

  Returns:
    float32 parameters.
  """
  updates = int(state.step) - int(state.skipped)
  if updates == 0:
    return state.params
  # 1 - decay^updates without cancellation.
  weight = -math.expm1(updates * math.log(decay)) if decay else 1.0
  return jax.tree.map(lambda total: total / weight, state.ema)


class Metrics(NamedTuple):
  """What one step measured, each a sum and a count.

  All but the last are 0 of 0 where the step updated nothing.

  Attributes:
    loss: what was minimized.
    bound: nats over valid tokens.
    masked_cross_entropy: unweighted, over masked tokens.
    bound_per_row: the same sum as `bound`, over rows.
    empty_rows: rows where nothing was masked, over rows.
    gradient_norm: before clipping, over steps.
    skipped: steps that updated nothing, over steps.
  """

  loss: losses.Total
  bound: losses.Total
  masked_cross_entropy: losses.Total
  bound_per_row: losses.Total
  empty_rows: losses.Total
  gradient_norm: losses.Total
  skipped: losses.Total


def train_step(
  denoiser: predict.Denoiser,
  optimizer: optax.GradientTransformation,
  *,
  vocab: Vocab,
  ema_decay: float,
  loss: Callable = losses.continuous_bound,
  schedule: schedules.Schedule = schedules.linear(),
  times: Callable = time_draws.stratified_times,
  t_min: float = 0.0,
  t_max: float = 1.0,
  weight_power: float = 1.0,
  random_length_share: float = 0.0,
  accumulation: int = 1,
  join: Callable | None = None,
  state_sharding: Any = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
  """The compiled update on a weighted loss, such as the continuous-time bound.

  A network that attends by blocks is trained by block diffusion (Arriola et al.
  2025, arXiv 2503.09573): each block has its own noise level and is given the
  clean blocks before it.

  A gradient that is not finite updates nothing: not the parameters, their
  average or the optimizer; the step is counted as skipped.

  Args:
    denoiser: the network.
    optimizer: an optax transformation.
    vocab: roles of the ids.
    ema_decay: decay of the averaged parameters, in [0, 1).
    loss: `losses.continuous_bound`, or `losses.answer_loss` for fine-tuning,
      where what is not given is the answer.
    schedule: the masking schedule.
    times: draw of the noise levels, such as `time_draws.stratified_times`.
    t_min: smallest noise level; bounds the weight -alpha'/(1 - alpha).
    t_max: largest. A narrow range makes the gradient vary less, see
      `block_diffusion.variance_by_range`; what is reported as the bound is then
      the mean over that range, and no bound.
    weight_power: the loss weighs by this power of that weight: 1 is the bound
      itself, 0 the unweighted cross-entropy. A power between makes the gradient
      vary less; what is reported as the bound is the bound whatever it is.
    random_length_share: of the rows that are cut at a random length, see
      `corruption.random_lengths`.
    accumulation: in how many parts a batch is computed one after another, to
      take less memory; a divisor of its rows. The gradient is that of the whole
      batch, whatever the parts hold.
    join: `join(frozen, params)` is what the network is called with, where only
      some parameters are trained; None: `params`.
    state_sharding: where the new state is placed, a `TrainState` of shardings;
      None: as XLA chooses.

  Returns:
    `step(state, batch, key, frozen=None) -> (state, metrics)`. The state is
    donated. The batch has `ids` int32 `[B, L]`, `valid` bool `[B, L]` and
    `row_ids` `[B]`, ids within the global batch of B rows; it may have `given`
    bool `[B, L]`, tokens such as BOS or a prompt that are never masked and not
    counted, and `segments` and `positions` int32 `[B, L]` of documents that are
    packed in a row. `key` is the run's, the same at every step.

  Raises:
    ValueError: `ema_decay` outside [0, 1), `weight_power` outside [0, 1], not
      0 <= `t_min` <= `t_max` <= 1 with `t_max` above 0, `accumulation` below 1
      or no divisor of the rows, `random_length_share` outside [0, 1].
  """
  if not 0 <= ema_decay < 1:
    raise ValueError(f'{ema_decay=} must be at least 0 and below 1')
  if not 0 <= t_min <= t_max <= 1 or not t_max:
    raise ValueError(f'0 <= {t_min=} <= {t_max=} <= 1 and t_max > 0 must hold')
  if not 0 <= weight_power <= 1:
    raise ValueError(f'{weight_power=} must be from 0 to 1')
  if not 0 <= random_length_share <= 1:
    raise ValueError(f'{random_length_share=} must be from 0 to 1')
  check_integer('accumulation', accumulation, 1)
  objective = schedule._replace(
    weight=lambda t: schedule.weight(t) ** weight_power
  )

  def draw_times(key, batch, num_rows):
    length, block = batch['ids'].shape[1], denoiser.attention_block
    draw = times
    if block is not None and 'segments' in batch:
      draw = functools.partial(
        time_draws.packed_block_times,
        times,
        positions=batch['positions'],
        segments=batch['segments'],
        block=block,
      )
    elif block is not None and block < length:
      draw = functools.partial(
        time_draws.block_times, times, length=length, block=block
      )
    return draw(key, batch['row_ids'], num_rows, t_min=t_min, t_max=t_max)

  def loss_sum(params, frozen, batch, key, num_rows):
    times_key, corruption_key, length_key = jax.random.split(key, 3)
    ids, valid, given = batch['ids'], batch['valid'], batch.get('given')
    if random_length_share:
      length = ids.shape[1]
      kept = random_lengths(
        length_key, batch['row_ids'], length, random_length_share
      )
      valid &= jnp.arange(length) < kept[:, None]
    t = draw_times(times_key, batch, num_rows)
    log_probs, masked = predict.corrupted_log_probs(
      denoiser,
      params if join is None else join(frozen, params),
      corruption_key,
      ids,
      t,
      valid,
      vocab=vocab,
      schedule=schedule,
      row_ids=batch['row_ids'],
      given=given,
      segments=batch.get('segments'),
      positions=batch.get('positions'),
    )
    if given is not None:
      valid &= ~given
    bound = losses.continuous_bound(
      log_probs, masked, valid, t, schedule=schedule
    )
    minimized = loss(log_probs, masked, valid, t, schedule=objective)
    rows = jnp.float32(len(ids))
    empty = jnp.sum(~masked.any(1), dtype=jnp.float32)
    return minimized.sum, {
      'loss': minimized,
      'bound': bound,
      'masked_cross_entropy': losses.cross_entropy(log_probs, masked),
      'bound_per_row': losses.Total(bound.sum, rows),
      'empty_rows': losses.Total(empty, rows),
    }

  def gradient(params, frozen, batch, key):
    """The gradient of the mean loss of a batch, and what was measured."""
    num_rows = len(batch['ids'])
    if num_rows % accumulation:
      raise ValueError(f'{accumulation=} must divide the {num_rows} rows')

    def of_part(part):
      # One key for all parts: noise is keyed by rows, of which each has one.
      return jax.grad(loss_sum, has_aux=True)(
        params, frozen, part, jax.random.clone(key), num_rows
      )

    if accumulation == 1:
      sums, measured = of_part(batch)
    else:
      parts = _parts(batch, accumulation)
      zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(of_part, jax.tree.map(lambda x: x[0], parts)),
      )

      def add(total, part):
        return jax.tree.map(jnp.add, total, of_part(part)), None

      (sums, measured), _ = jax.lax.scan(add, zeros, parts)
    # One division, by what all rows on all devices hold.
    count = measured['loss'].count
    scale = jnp.where(count > 0, 1 / jnp.maximum(count, 1), 0.0)
    return jax.tree.map(lambda x: x * scale, sums), measured

  def step(state, batch, key: Key[Array, ''], frozen=None):
    step_key = jax.random.fold_in(key, state.step)
    grads, measured = gradient(state.params, frozen, batch, step_key)
    norm = optax.tree.norm(grads)
    measured['gradient_norm'] = losses.Total(norm, jnp.float32(1))
    is_finite = jnp.isfinite(norm) & jnp.isfinite(measured['loss'].sum)

    def unless_skipped(new, old):
      return jax.tree.map(lambda n, o: jnp.where(is_finite, n, o), new, old)

    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = optax.incremental_update(params, state.ema, 1 - ema_decay)
    skipped = 1 - is_finite.astype(jnp.int32)
    new_state = TrainState(
      state.step + 1,
      *unless_skipped((params, ema, opt_state), state[1:4]),
      state.skipped + skipped,
    )
    measured = unless_skipped(measured, jax.tree.map(jnp.zeros_like, measured))
    return new_state, Metrics(
      skipped=losses.Total(jnp.float32(skipped), jnp.float32(1)), **measured
    )

  shardings = {}
  if state_sharding is not None:
    shardings['out_shardings'] = (state_sharding, None)
  return jax.jit(step, donate_argnums=0, **shardings)


def _parts(batch, count):
  """Leaves [B, ...] as [count, B / count, ...]; row r is in part r % count.

  So rows stay on the devices where they lie.
  """
  return jax.tree.map(
    lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), batch
  )
