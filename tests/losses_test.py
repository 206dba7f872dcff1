import functools
import itertools

import golden_data
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from mdlm_jax import losses, schedules

continuous_bound = jax.jit(losses.continuous_bound, static_argnames='schedule')
discrete_bound = jax.jit(
  losses.discrete_bound, static_argnames=('schedule', 'num_steps')
)
cross_entropy = jax.jit(losses.cross_entropy)
answer_loss = jax.jit(losses.answer_loss, static_argnames='schedule')

LN2, LN7 = np.log(2), np.log(7)
MD4 = golden_data.load('md4/schedules_losses')
MDLM = golden_data.load('mdlm_dit/schedules_losses')
LLADA = golden_data.load('llada/counts_losses')

SCHEDULES = {
  'linear': schedules.linear(),
  'cosine': schedules.cosine(),
  'square': schedules.polynomial(2.0),
  'root': schedules.polynomial(0.5),
  'geometric': schedules.geometric(),
  'log_linear': schedules.log_linear(0.05),
}


def _cross_entropy(target_log_probs, masked, valid, t):
  del valid, t
  return cross_entropy(target_log_probs, masked)


# Every exported loss with one signature.
LOSSES = {
  'continuous_bound': continuous_bound,
  'discrete_bound': functools.partial(discrete_bound, num_steps=10),
  'cross_entropy': _cross_entropy,
  'answer_loss': answer_loss,
}
each_loss = pytest.mark.parametrize('loss', LOSSES.values(), ids=LOSSES.keys())


def _per_row(loss):
  """A loss as a function of rows, without the sum over them."""

  def row_sum(*row):
    return loss(*(field[None] for field in row)).sum

  return jax.jit(jax.vmap(row_sum))


# --- The toy with a known answer: AB or BA, one half each. --------------------
# With the exact denoiser a masked token costs ln 2 when both are masked, and
# nothing when the other one is visible. The entropy is ln 2 per string.

PATTERNS = np.array(list(itertools.product([False, True], repeat=2)))
TOY_LOG_PROBS = np.where(
  [[False] * 2, [False] * 2, [False] * 2, [True] * 2], -LN2, 0
)


def _toy_expectation(loss, schedule, times):
  """E[loss | t] per string of the toy, over the four mask patterns."""
  times = np.asarray(times, np.float32)
  sums = _per_row(loss)(
    jnp.tile(jnp.array(TOY_LOG_PROBS, jnp.float32), (len(times), 1)),
    jnp.tile(jnp.array(PATTERNS), (len(times), 1)),
    jnp.ones((4 * len(times), 2), bool),
    jnp.repeat(jnp.array(times), 4),
  ).reshape(-1, 4)
  masked = 1 - np.asarray(schedule.alpha(jnp.array(times)), np.float64)
  counts = PATTERNS.sum(1)
  law = masked[:, None] ** counts * (1 - masked[:, None]) ** (2 - counts)
  return (np.array(sums, np.float64) * law).sum(1)


def _continuous_toy_bound(schedule):
  nodes, weights = np.polynomial.legendre.leggauss(200)
  loss = functools.partial(continuous_bound, schedule=schedule)
  expectation = _toy_expectation(loss, schedule, (nodes + 1) / 2)
  return expectation @ weights / 2


@pytest.mark.parametrize('name', SCHEDULES)
def test_continuous_bound_of_the_toy_is_its_entropy_for_every_schedule(name):
  expected = LN2
  if name == 'log_linear':
    # alpha(1) = 0.05: the integral ends at a masking probability of 0.95, and
    # what is missing is the prior term.
    expected = LN2 * 0.95**2
  assert _continuous_toy_bound(SCHEDULES[name]) == pytest.approx(
    expected, rel=1e-4
  )


@pytest.mark.parametrize('num_steps', [1, 2, 3, 8, 50])
def test_discrete_bound_of_the_toy_is_ln_2_times_1_plus_1_over_t(num_steps):
  loss = functools.partial(discrete_bound, num_steps=num_steps)
  times = np.arange(1, num_steps + 1) / num_steps
  bound = _toy_expectation(loss, schedules.linear(), times).mean()
  assert bound == pytest.approx(LN2 * (1 + 1 / num_steps), rel=1e-5)


def test_discrete_bound_follows_the_schedule():
  # 2 ln 2 sum_k (p_k - p_{k-1}) p_k with the masking probabilities t^2.
  schedule = schedules.polynomial(2.0)
  loss = functools.partial(discrete_bound, num_steps=4, schedule=schedule)
  times = np.arange(1, 5) / 4
  masked = np.arange(5) ** 2 / 16
  expected = 2 * LN2 * np.sum(np.diff(masked) * masked[1:])
  bound = _toy_expectation(loss, schedule, times).mean()
  assert bound == pytest.approx(expected, rel=1e-5)


# --- The uniform stub: 7 real tokens, each masked token costs ln 7. -----------


@pytest.mark.parametrize('t', [0.1, 0.5, 1.0])
@each_loss
def test_uniform_predictions_cost_ln_7_per_token(loss, t):
  # Expectation over the 16 mask patterns of 4 tokens.
  masked = jnp.array(list(itertools.product([False, True], repeat=4)))
  counts = np.array(masked).sum(1)
  law = t**counts * (1 - t) ** (4 - counts)
  log_probs = jnp.full(masked.shape, -LN7)
  times = jnp.full(len(masked), t)
  totals = jax.vmap(lambda *row: loss(*(field[None] for field in row)))(
    log_probs, masked, jnp.ones(masked.shape, bool), times
  )
  # One division, of the expected sum by the expected count.
  np.testing.assert_allclose(
    (law @ totals.sum) / (law @ totals.count), LN7, rtol=1e-5
  )


@pytest.mark.parametrize('num_rows, length', [(1, 3), (4, 64)])
def test_the_mean_is_per_token_whatever_the_batch_and_length(num_rows, length):
  everything = jnp.ones((num_rows, length), bool)
  total = continuous_bound(
    jnp.full(everything.shape, -LN7), everything, everything, jnp.ones(num_rows)
  )
  assert float(total.mean) == pytest.approx(LN7, rel=1e-6)
  assert float(total.sum) == pytest.approx(num_rows * length * LN7, rel=1e-6)


def test_draws_that_mask_nothing_stay_in_the_average():
  # 100,000 strings of one token at t = 0.01: 99 % of them have no mask. The
  # relative standard error is 3.1 %; false alarm 1 in 800.
  masked = jax.random.uniform(jax.random.key(0), (100_000, 1)) < 0.01
  total = continuous_bound(
    jnp.full(masked.shape, -LN7),
    masked,
    jnp.ones(masked.shape, bool),
    jnp.full(len(masked), 0.01),
  )
  assert float(total.count) == 100_000
  assert float(total.mean) == pytest.approx(LN7, rel=0.1)


def test_weights_of_small_times_are_large_but_finite():
  t = jnp.linspace(1e-3, 1.0, 2**14)
  middle = (t[1:] + t[:-1]) / 2
  one = jnp.ones((len(middle), 1), bool)
  weights = continuous_bound(-jnp.ones(one.shape), one, one, middle)
  # The mean of 1/t over U(0.001, 1) is ln(1000) / 0.999.
  assert float(weights.mean) == pytest.approx(6.915, abs=0.01)
  gradient = jax.grad(
    lambda log_probs: continuous_bound(log_probs, one[:1], one[:1], t[:1]).mean
  )(jnp.array([[-3.0]]))
  np.testing.assert_allclose(gradient, -1000.0, rtol=1e-5)


# --- Counts. ------------------------------------------------------------------


def test_padding_is_not_counted_and_costs_nothing():
  # 3 real tokens at 0.01/7 and 13 pads at 0.99: ln 700, not the mixed mean.
  valid = jnp.arange(16)[None] < 3
  log_probs = jnp.where(valid, np.log(0.01 / 7), np.log(0.99))
  everything = jnp.ones((1, 16), bool)
  for loss in (continuous_bound, answer_loss):
    total = loss(log_probs, everything, valid, jnp.ones(1))
    assert float(total.mean) == pytest.approx(np.log(700), rel=1e-5)
  assert float(cross_entropy(log_probs, valid).mean) == pytest.approx(
    np.log(700), rel=1e-5
  )


def test_each_loss_has_its_own_count():
  masked = jnp.array([[True, True, False, False], [False] * 4, [False] * 4])
  valid = jnp.array([[True, True, True, False], [True] * 4, [False] * 4])
  arguments = -jnp.ones((3, 4)), masked, valid, jnp.full(3, 0.5)
  counts = {
    name: float(loss(*arguments).count) for name, loss in LOSSES.items()
  }
  assert counts == {
    'continuous_bound': 7,
    'discrete_bound': 7,
    'cross_entropy': 2,
    'answer_loss': 2,
  }


def test_rows_without_active_tokens_do_not_dilute_cross_entropy():
  masked = jnp.array([[True] * 4, [False] * 4])
  assert float(cross_entropy(-jnp.ones((2, 4)), masked).mean) == 1.0


def test_answers_weigh_the_same_whatever_their_length():
  answer = jnp.array([[False, False, True, True], [True] * 4, [False] * 4])
  log_probs = jnp.array([[-9.0, -9, -1, -1], [-3.0] * 4, [-9.0] * 4])
  total = answer_loss(log_probs, answer, answer, jnp.ones(3))
  assert (float(total.sum), float(total.count)) == (4.0, 2.0)


@each_loss
def test_totals_of_two_devices_add_up_to_the_whole(loss):
  # The second device has nothing to supervise.
  masked = jnp.array([[True, False], [True, True], [False] * 2, [False] * 2])
  valid = jnp.array([[True, True], [True, True], [False] * 2, [False] * 2])
  log_probs = -jnp.arange(8.0).reshape(4, 2)
  batch = log_probs, masked, valid, jnp.array([0.1, 0.4, 0.6, 0.9])
  whole = loss(*batch)
  first, second = (
    loss(*(field[rows] for field in batch))
    for rows in (slice(0, 2), slice(2, 4))
  )
  added = jax.tree.map(jnp.add, first, second)
  np.testing.assert_allclose(added, whole, rtol=1e-6)
  assert float(second.mean) == 0.0


def test_the_mean_of_nothing_is_zero_with_zero_gradient():
  def mean(total):
    return losses.Total(total, jnp.array(0.0)).mean

  assert jax.value_and_grad(mean)(jnp.array(1.0)) == (0.0, 0.0)


def test_one_division_after_the_sum():
  batches = [losses.Total(jnp.array(200.0), jnp.array(100.0))]
  batches.append(losses.Total(jnp.array(40.0), jnp.array(10.0)))
  total = jax.tree.map(lambda *parts: sum(parts), *batches)
  assert float(jnp.exp(total.mean)) == pytest.approx(8.862, abs=5e-4)


# --- Nothing to supervise; infinities. ----------------------------------------


@each_loss
@pytest.mark.parametrize('t', [0.0, 1e-3, 0.5])
@pytest.mark.parametrize('is_valid', [False, True])
def test_nothing_masked_gives_zero_loss_and_exactly_zero_gradient(
  loss, t, is_valid
):
  def mean(log_probs):
    nothing = jnp.zeros((2, 3), bool)
    valid = jnp.full((2, 3), is_valid)
    return loss(log_probs, nothing, valid, jnp.full(2, t)).mean

  for log_prob in (-1.0, -jnp.inf, jnp.nan):
    value, gradient = jax.value_and_grad(mean)(jnp.full((2, 3), log_prob))
    assert float(value) == 0.0
    np.testing.assert_array_equal(gradient, 0.0)


@each_loss
def test_visible_positions_never_leak_infinities_or_gradient(loss):
  masked = jnp.array([[True, False, True]])
  valid = jnp.ones((1, 3), bool)

  def mean(log_probs):
    return loss(log_probs, masked, valid, jnp.array([0.5])).mean

  plain = jax.value_and_grad(mean)(jnp.array([[-1.0, -1.0, -2.0]]))
  infinite = jax.value_and_grad(mean)(jnp.array([[-1.0, -jnp.inf, -2.0]]))
  np.testing.assert_array_equal(plain[0], infinite[0])
  np.testing.assert_array_equal(plain[1], infinite[1])
  assert float(plain[1][0, 1]) == 0.0 and np.all(plain[1][0, ::2] < 0)


@each_loss
def test_jit_equals_eager_and_the_sum_is_float32_for_bfloat16(loss):
  masked = jnp.arange(8).reshape(2, 4) % 3 == 0
  log_probs = -jnp.linspace(0.1, 5.0, 8).reshape(2, 4)
  arguments = masked, jnp.ones((2, 4), bool), jnp.array([0.3, 0.8])
  with jax.disable_jit():
    eager = loss(log_probs, *arguments)
  np.testing.assert_allclose(loss(log_probs, *arguments), eager, rtol=1e-6)
  low = loss(log_probs.astype(jnp.bfloat16), *arguments)
  assert low.sum.dtype == low.count.dtype == jnp.float32


def test_sums_do_not_drift_in_bfloat16():
  one = jnp.ones((1, 100_000), bool)
  log_probs = -jnp.ones(one.shape, jnp.bfloat16)
  total = continuous_bound(log_probs, one, one, jnp.ones(1, jnp.bfloat16))
  assert float(total.sum) == float(total.count) == 100_000


@each_loss
def test_wrong_shapes_are_refused(loss):
  good = jnp.ones((2, 4), bool)
  with pytest.raises((jaxtyping.TypeCheckError, AssertionError)):
    loss(-jnp.ones((2, 5)), good, good, jnp.ones(2))


def test_options_change_the_loss():
  masked = jnp.ones((1, 2), bool)
  arguments = -jnp.ones((1, 2)), masked, masked, jnp.array([0.5])
  cosine = schedules.cosine()
  for loss in (continuous_bound, answer_loss):
    ratio = loss(*arguments, schedule=cosine).sum / loss(*arguments).sum
    # pi/2 cot(pi/4) against 1 / 0.5.
    assert float(ratio) == pytest.approx(np.pi / 4, rel=1e-5)
  coarse = discrete_bound(*arguments, num_steps=2)
  fine = discrete_bound(*arguments, num_steps=4)
  # T (t - s) / t is 1 / t for every T of the linear schedule ...
  assert float(coarse.sum) == pytest.approx(float(fine.sum))
  coarse = discrete_bound(*arguments, num_steps=2, schedule=cosine)
  fine = discrete_bound(*arguments, num_steps=4, schedule=cosine)
  # ... and for the cosine 2 * 1 against 4 (1 - sin(pi/8) / sin(pi/4)).
  expected = 2 * (1 - np.sin(np.pi / 8) / np.sin(np.pi / 4))
  assert float(fine.sum / coarse.sum) == pytest.approx(expected, rel=1e-5)


def test_steps_of_the_chain_are_found_whatever_the_rounding_of_the_grid():
  # In float32 i / 41 * 41 falls below i for i = 1, 2, 4.
  t = jnp.arange(1, 42) / 41
  one = jnp.ones((41, 1), bool)
  sums = _per_row(functools.partial(discrete_bound, num_steps=41))(
    -jnp.ones(one.shape), one, one, t
  )
  np.testing.assert_allclose(sums, 41 / np.arange(1, 42), rtol=1e-4)


def test_a_chain_without_steps_is_refused():
  one = jnp.ones((1, 1), bool)
  with pytest.raises(ValueError, match='num_steps=0'):
    discrete_bound(-jnp.ones((1, 1)), one, one, jnp.ones(1), num_steps=0)


# --- Carry-over. --------------------------------------------------------------


def test_carry_over_puts_all_mass_on_the_visible_token():
  log_probs = jnp.log(jnp.array([[[0.2, 0.8], [0.5, 0.5]]]))
  result = losses.carry_over(
    log_probs, jnp.array([[1, 0]]), jnp.array([[True, False]])
  )
  np.testing.assert_array_equal(result[0, 0], log_probs[0, 0])
  np.testing.assert_array_equal(result[0, 1], [0.0, -np.inf])


def test_carry_over_is_that_of_mdlm():
  golden = MDLM['subs_logprobs_tc0_0']
  masked = golden['z_t'] == 97
  # What a network might have said at visible positions.
  log_probs = np.where(masked[..., None], golden['log_probs'], -3.0)
  result = losses.carry_over(
    jnp.array(log_probs), jnp.array(golden['z_t']), jnp.array(masked)
  )
  # MDLM writes -1,000,000 where we write -inf.
  np.testing.assert_array_equal(
    np.maximum(result, -1e6), np.maximum(golden['log_probs'], -1e6)
  )


# --- Golden losses. -----------------------------------------------------------


def _squeezed(schedule):
  """MD4's alpha, squeezed to [1e-4, 1 - 1e-4]."""
  scale = 1 - 2e-4

  def alpha(t):
    return scale * schedule.alpha(t) + 1e-4

  def masked(t):
    return 1 - alpha(t)

  def derivative(t):
    return scale * schedule.derivative(t)

  def weight(t):
    return -derivative(t) / masked(t)

  return schedules.Schedule(alpha, masked, derivative, weight, inverse=None)


@pytest.mark.parametrize('num_steps', [None, 1, 10, 1000])
@pytest.mark.parametrize(
  'name, schedule',
  [
    ('linear', schedules.linear()),
    ('cosine', schedules.cosine()),
    ('poly2', schedules.polynomial(2.0)),
    ('poly3', schedules.polynomial(3.0)),
  ],
)
def test_bounds_are_those_of_md4(name, schedule, num_steps):
  golden = MD4[f'loss_{name}_{f"T{num_steps}" if num_steps else "cont"}']
  log_probs = jax.nn.log_softmax(jnp.array(golden['logits']))
  target = jnp.take_along_axis(log_probs, jnp.array(golden['x'])[..., None], 2)
  masked = jnp.array(golden['z_t'] == 13)
  schedule = _squeezed(schedule)
  loss = functools.partial(continuous_bound, schedule=schedule)
  if num_steps:
    loss = functools.partial(
      discrete_bound, schedule=schedule, num_steps=num_steps
    )
  sums = _per_row(loss)(
    target[..., 0],
    masked,
    jnp.ones(masked.shape, bool),
    jnp.array(golden['t_used']),
  )
  # In the reference T = 1000 loses digits in expm1 of a float32 difference.
  np.testing.assert_allclose(
    sums, golden['loss_diff_per_row'], rtol=1e-3 if num_steps == 1000 else 1e-4
  )


@pytest.mark.parametrize('case', ['loss_subs', 'loss_subs_padded'])
def test_the_bound_is_normalised_like_that_of_mdlm(case):
  golden = MDLM[case]
  # The network's share of the stored losses; the weight of MDLM is 1 / t.
  log_probs = -golden['per_token_loss'] * golden['t'][:, None]
  total = continuous_bound(
    jnp.array(log_probs),
    jnp.array(golden['x_t'] == 97),
    jnp.array(golden['attention_mask'] == 1),
    jnp.array(golden['t']),
    schedule=schedules.log_linear(1e-3),
  )
  np.testing.assert_allclose(total.mean, golden['loss'], rtol=1e-4)


@pytest.mark.parametrize('case', ['pretrain_loss', 'sft_loss'])
def test_losses_are_those_of_llada(case):
  golden = LLADA[case]
  masked = golden['noisy'] != golden['input_ids']
  t = 0.999 * golden['t'] + 1e-3
  # The network's share of the stored losses; the weight of LLaDA is 1 / t.
  log_probs = np.full(masked.shape, np.nan, np.float32)
  log_probs[masked] = -golden['masked_token_loss_flat']
  log_probs *= t[:, None]
  if case == 'pretrain_loss':
    loss, answer = continuous_bound, np.ones_like(masked)
  else:
    loss = answer_loss
    slots = np.arange(masked.shape[1])[None]
    answer = slots >= golden['prompt_lengths'][:, None]
  total = loss(
    jnp.array(log_probs), jnp.array(masked), jnp.array(answer), jnp.array(t)
  )
  np.testing.assert_allclose(total.mean, golden['loss'], rtol=1e-4)
