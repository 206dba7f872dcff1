"""The exact reverse process: its formulas, its law, and its references."""

import math

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_joints import (
  TWINS,
  VOCAB,
  chi_square,
  independent_joint,
  law_of,
  random_joint,
  total_variation,
)

from mdlm_jax import draws, filters, oracle, rules, sampling, schedules
from mdlm_jax.canvas import from_prompts
from mdlm_jax.reverse import commit
from mdlm_jax.rules import Proposal, Row

F, T = False, True
MD4 = golden_data.load('md4/sample_steps')
MDLM = golden_data.load('mdlm_dit/ancestral_updates')


def one_row(masked):
  masked = jnp.array(masked)
  length = masked.shape[0]
  row = Row(
    jnp.where(masked, 1, 5), jnp.ones(length, bool), masked, jnp.arange(length)
  )
  proposal = Proposal(
    jnp.full(length, 7), jnp.zeros(length), jnp.zeros((length, 9)),
    jnp.zeros(length),
  )  # fmt: skip
  return row, proposal


@pytest.mark.parametrize(
  'schedule',
  [schedules.linear(), schedules.cosine(), schedules.polynomial(2.0)],
)
def test_kernel_reveals_with_the_exact_probability(schedule):
  grid = (1.0, 0.7, 0.2, 0.0)
  rule = rules.kernel(grid, schedule)
  length = 20_000
  row, proposal = one_row([T] * length)
  noise = rule.noise(jax.random.key(0), row.positions)
  alpha = [float(schedule.alpha(jnp.array(t))) for t in grid]
  for step in range(3):
    write = rule.update(noise, step, row, proposal, ()).write
    p = (alpha[step + 1] - alpha[step]) / (1 - alpha[step])
    # Five standard deviations: a false alarm in 10^6.
    error = np.sqrt(p * (1 - p) / length)
    assert abs(write.mean() - p) <= 5 * error


def test_kernel_leaves_committed_tokens_alone():
  rule = rules.kernel((1.0, 0.0))
  row, proposal = one_row([T, F, T])
  update = rule.update(jnp.zeros(3), 0, row, proposal, ())
  np.testing.assert_array_equal(update.write, [T, F, T])
  assert update.t == 0


@pytest.mark.parametrize('step', [0, 1, 2])
def test_kernel_cells_are_its_bernoulli_law(step):
  rule = rules.kernel((1.0, 0.7, 0.2, 0.0))
  row, proposal = one_row([T, F, T])
  law = {}
  for weight, noise in rule.cells(step, jax.tree.map(np.asarray, row), (), ()):
    write = rule.update(jnp.asarray(noise), step, row, proposal, ()).write
    law[tuple(np.asarray(write).tolist())] = weight
  p = (0.3, 0.5 / 0.7, 1.0)[step]
  exact = {
    (T, F, T): p * p,
    (T, F, F): p * (1 - p),
    (F, F, T): p * (1 - p),
    (F, F, F): (1 - p) ** 2,
  }
  for write, weight in law.items():
    np.testing.assert_allclose(weight, exact[write], rtol=1e-6)
  np.testing.assert_allclose(sum(law.values()), 1, rtol=1e-12)


def hits(rule, num_slots, num_rows):
  """Levels fed to the network and slots written, of many rows at once."""
  calls = rule.calls(num_slots)

  @jax.jit
  @jax.vmap
  def run(key):
    keys = jax.random.split(key, calls + 1)
    row, proposal = one_row([T] * num_slots)
    noise = rule.noise(keys[0], row.positions)
    state, t = rule.init(noise, row, 9)
    times, written = [t], []
    for step in range(calls):
      noise = rule.noise(keys[step + 1], row.positions)
      update = rule.update(noise, step, row, proposal, state)
      row = row._replace(masked=row.masked & ~update.write)
      state = update.state
      times.append(update.t)
      written.append(update.write)
    return jnp.stack(times[:-1]), jnp.stack(written)

  return jax.tree.map(
    np.asarray, run(jax.random.split(jax.random.key(3), num_rows))
  )


def order_statistic_cdf(x, k, n):
  """P(the k-th largest of n uniforms <= x)."""
  return sum(
    math.comb(n, j) * x**j * (1 - x) ** (n - j) for j in range(n - k + 1, n + 1)
  )


@pytest.mark.parametrize(
  ('schedule', 'per_call'),
  [
    (schedules.linear(), 1),
    (schedules.cosine(), 1),
    (schedules.log_linear(0.2), 1),  # Its masked probability ends at 0.8.
    (schedules.linear(), 2),
  ],
)
def test_hits_come_at_the_order_statistics_of_uniform_levels(
  schedule, per_call
):
  num_slots, num_rows = 5, 4_000
  rule = rules.first_hitting(schedule, per_call=per_call)
  times, _ = hits(rule, num_slots, num_rows)
  assert times.shape[1] == rule.calls(num_slots) == -(-num_slots // per_call)
  assert (np.diff(times, axis=1) < 0).all()
  most = float(schedule.masked(jnp.array(1.0)))
  levels = np.asarray(schedule.masked(jnp.asarray(times))) / most
  # Kolmogorov-Smirnov: a false alarm in 10^5 for each call.
  bound = np.sqrt(np.log(2e5) / 2 / num_rows)
  ranks = np.arange(num_rows + 1) / num_rows
  for call in range(times.shape[1]):
    k = call * per_call + 1
    cdf = order_statistic_cdf(np.sort(levels[:, call]), k, num_slots)
    distance = max((ranks[1:] - cdf).max(), (cdf - ranks[:-1]).max())
    assert distance < bound, (call, distance)


def test_hits_come_in_uniform_order():
  _, written = hits(rules.first_hitting(), 3, 6_000)
  order = written.argmax(2) @ np.array([9, 3, 1])
  _, counts = np.unique(order, return_counts=True)
  assert len(counts) == 6
  # Five degrees of freedom: 33.1 is a false alarm in 3 * 10^5.
  assert ((counts - 1000.0) ** 2 / 1000).sum() < 33.1


def test_several_hits_per_call_write_so_many_slots():
  _, written = hits(rules.first_hitting(per_call=3), 8, 4)
  np.testing.assert_array_equal(written.sum(2), [[3, 3, 2]] * 4)
  np.testing.assert_array_equal(written.sum(1), 1)


def test_hits_leave_committed_tokens_alone():
  rule = rules.first_hitting(per_call=4)
  row, proposal = one_row([T, F, T])
  noise = rule.noise(jax.random.key(0), row.positions)
  state, t = rule.init(noise, row, 9)
  update = rule.update(noise, 0, row, proposal, state)
  np.testing.assert_array_equal(update.write, [T, F, T])
  assert 0 <= update.t < t < 1


@pytest.mark.parametrize('seed', [0, 1, None])
def test_first_hitting_is_an_exact_sampler(seed):
  joint = TWINS if seed is None else random_joint(seed)
  law = law_of(joint, rules.first_hitting())
  assert total_variation(law, joint) < 1e-12
  assert law.impossible_mass == 0


def test_several_hits_per_call_are_as_many_random_positions_at_once():
  # The order is uniform: two random positions, then the last.
  joint = random_joint()
  law = law_of(joint, rules.first_hitting(per_call=2))
  same = law_of(
    joint, rules.by_confidence(2),
    draw=draws.categorical(score=draws.random_order),
  )  # fmt: skip
  for string, p in same.probabilities.items():
    np.testing.assert_allclose(law.probabilities[string], p, rtol=1e-9)
  assert total_variation(law, joint) > 0.05
  both = law_of(TWINS, rules.first_hitting(per_call=2))
  np.testing.assert_allclose(total_variation(both, TWINS), 0.5, rtol=1e-12)


def test_independent_positions_may_be_drawn_at_once():
  joint = independent_joint()
  for rule in (rules.first_hitting(per_call=3), rules.kernel((1.0, 0.0))):
    assert total_variation(law_of(joint, rule), joint) < 1e-12


def test_simulated_hits_agree_with_the_law():
  joint, rule = random_joint(1), rules.first_hitting(per_call=2)
  result = sampling.sample(
    oracle.exact_denoiser(VOCAB), joint, jax.random.key(0),
    from_prompts([[]] * 4_000, 3, VOCAB), vocab=VOCAB, rule=rule,
  )  # fmt: skip
  statistic, freedom = chi_square(law_of(joint, rule), result.ids)
  # Five standard deviations: a false alarm in 10^5.
  assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def squeezed(schedule):
  """MD4 keeps alpha in [1e-4, 1 - 1e-4]."""
  return schedule._replace(
    alpha=lambda t: (1 - 2e-4) * schedule.alpha(t) + 1e-4,
    masked=lambda t: (1 - 2e-4) * schedule.masked(t) + 1e-4,
  )


@pytest.mark.parametrize('step', [0, 3, 7])
@pytest.mark.parametrize(
  ('name', 'schedule'),
  [
    ('linear', schedules.linear()),
    ('cosine', schedules.cosine()),
    ('poly2', schedules.polynomial(2.0)),
  ],
)
@pytest.mark.parametrize('top_p', [None, 0.9])
def test_kernel_steps_are_those_of_md4(name, schedule, step, top_p):
  """MASK is the last entry of their CDF: u below its mass is a reveal."""
  sampler = 'ancestral' if top_p is None else 'topp'
  golden = MD4[f'step_{sampler}_{name}_{step}']
  rule = rules.kernel(schedules.cosine_grid(8), squeezed(schedule))
  logits = jnp.asarray(golden['logits'])
  if top_p is not None:
    logits = filters.keep_top_p(logits, top_p)
  p = np.asarray(jax.nn.softmax(logits), np.float64)
  z_t, uniform = golden['z_t'], golden['uniform']
  masked = z_t == 13
  reveal = 1 - golden['probs'][masked][:, 13]
  for b in range(2):
    row, proposal = one_row(masked[b])
    write = rule.update(
      jnp.asarray(uniform[b], jnp.float32), step, row, proposal, ()
    ).write
    share = np.unique(np.round(reveal, 5))
    assert len(share) == 1
    below = uniform[b] / share[0]
    drawn = (np.cumsum(p[b], -1) < below[:, None]).sum(-1)
    z_s = commit(
      jnp.asarray(z_t[b]), jnp.asarray(drawn.astype(np.int32)), write
    )
    np.testing.assert_array_equal(z_s, golden['z_s'][b])
  for weight, noise in rule.cells(
    step, jax.tree.map(np.asarray, one_row([T])[0]), (), ()
  ):
    if noise[0] == 0:
      np.testing.assert_allclose(reveal, weight, atol=1e-5)
  tokens = p[masked] * reveal[:, None]
  np.testing.assert_allclose(golden['probs'][masked][:, :13], tokens, atol=1e-5)


@pytest.mark.parametrize(
  ('case', 't', 's'),
  [
    ('posterior_tc0_1', 0.7, 0.5),
    ('posterior_tc0_2', 0.3, 0.05),
    ('posterior_tc1_3', 0.2, 0.199),
  ],
)
@pytest.mark.parametrize(
  ('update', 'schedule'),
  [
    ('ddpm', schedules.log_linear(1e-3)),
    ('ddpm_cache', schedules.linear()),
  ],
)
def test_kernel_steps_are_those_of_mdlm(case, t, s, update, schedule):
  """Their race of exponentials, replayed as a uniform and a draw.

  With p the prediction and E exponential, token v arrives at E_v / (p_v r) and
  MASK at E / (1 - r), r the probability of a reveal. A token is first iff
  a / (a + b) < r for a = min E_v / p_v and b = E of MASK, and a / (a + b) is
  uniform.
  """
  golden = MDLM[case]
  z_t, q = golden['z_t'], np.float64(golden[f'q_{update}'])
  mask = q.shape[-1] - 1
  masked = z_t == mask
  total = q.sum(-1)  # The move chance of t: they leave the factor out.
  reveal = 1 - q[..., mask] / total
  p = q[..., :mask] / (total * reveal)[..., None]
  waits = 1e-10 - np.log(np.float64(golden[f'uniform_{update}']) + 1e-10)
  arrivals = waits[..., :mask] / np.maximum(p, 1e-300)
  first, other = arrivals.min(-1), waits[..., mask]
  uniform = first / (first + other)
  rule = rules.kernel((1.0, t, s, 0.0), schedule)
  for b in range(len(z_t)):
    row, proposal = one_row(masked[b])
    write = rule.update(
      jnp.asarray(uniform[b], jnp.float32), 1, row, proposal, ()
    ).write
    drawn = jnp.asarray(arrivals[b].argmin(-1), jnp.int32)
    np.testing.assert_array_equal(
      commit(jnp.asarray(z_t[b]), drawn, write), golden[f'x_next_{update}'][b]
    )
  got = schedules.reveal_probability(schedule, jnp.array(t), jnp.array(s))
  np.testing.assert_allclose(reveal[masked], got, rtol=1e-4)


def test_equal_settings_are_the_same_object():
  grid = schedules.uniform_grid(4)
  assert rules.kernel(grid) is rules.kernel(list(grid), schedules.linear())
  assert rules.kernel(grid) is not rules.kernel(grid, cached=True)
  assert rules.first_hitting() is rules.first_hitting(schedules.linear())
  assert rules.first_hitting() is not rules.first_hitting(per_call=2)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: rules.kernel((1.0,)), 'must fall strictly from 1.0 to 0.0'),
    (lambda: rules.kernel((1.0, 0.5, 0.5, 0.0)), 'must fall strictly'),
    (lambda: rules.kernel((0.9, 0.0)), 'must fall strictly'),
    (lambda: rules.kernel((1.0, 0.1)), 'must fall strictly'),
    (lambda: rules.first_hitting(per_call=0), 'per_call=0 must be an integer'),
  ],
)
def test_impossible_settings_raise(make, message):
  with pytest.raises(ValueError, match=message):
    make()
