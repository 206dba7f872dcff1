"""The remasking kernel and its sigmas against formulas, ReMDM, exact laws."""

import itertools

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_joints import (
  TWINS,
  VOCAB,
  A,
  B,
  C,
  chi_square,
  law_of,
  total_variation,
)  # fmt: skip

from mdlm_jax import draws, filters, oracle, rules, sampling
from mdlm_jax.canvas import from_prompts
from mdlm_jax.reverse import commit
from mdlm_jax.rules import Proposal, Row, sigmas
from mdlm_jax.schedules import cosine, linear, polynomial, uniform_grid

GOLDEN = golden_data.load('remdm/remasking')
MASK = 11  # In the golden data.
ALPHA_ON, T_ON, T_OFF = 0.9, 0.55, 0.05
GRID = (1.0, 0.7, 0.5, 0.2, 0.0)
PAIRS = oracle.joint([(A, A), (A, B), (B, A), (B, B)], [0.4, 0.1, 0.2, 0.3])


def one_row(masked, ids=None, mask_id=1):
  masked = np.asarray(masked, bool)
  ids = np.where(masked, mask_id, 5) if ids is None else ids
  return Row(
    jnp.asarray(ids), jnp.ones(masked.shape, bool), jnp.asarray(masked),
    jnp.arange(masked.size),
  )  # fmt: skip


def proposal_of(candidate_ids, probs):
  log_p = jnp.log(jnp.asarray(probs))
  zeros = jnp.zeros(log_p.shape[0])
  return Proposal(jnp.asarray(candidate_ids), zeros, log_p, zeros)


def event_probabilities(rule, step, row, state=()):
  """Of a reveal at MASK slots and of a remask elsewhere, from the cells."""
  cells = list(rule.cells(step, jax.tree.map(np.asarray, row), None, state))
  return sum(weight * (noise == 0) for weight, noise in cells)


def reveal_and_remask(rule, step):
  """What a single slot does: the two probabilities of a step."""
  return [
    float(event_probabilities(rule, step, one_row([masked]))[0])
    for masked in (True, False)
  ]


def alphas(grid, schedule):
  with jax.enable_x64(True):
    return np.asarray(schedule.alpha(jnp.asarray(grid, jnp.float64)))


# Formulas.


@pytest.mark.parametrize(
  ('sigma', 'reveal'), [(0.0, 0.5), (0.05 / 0.9, 1.0), (0.02, 0.68)]
)
def test_reveal_probability_grows_with_sigma(sigma, reveal):
  rule = rules.remasking((1.0, 0.1, 0.05, 0.0), (0.0, sigma, 0.0))
  got = reveal_and_remask(rule, 1)
  np.testing.assert_allclose(got, [reveal, sigma], atol=1e-6)
  # The visible share after the step is alpha_s.
  np.testing.assert_allclose(0.9 * (1 - got[1]) + 0.1 * got[0], 0.95, atol=1e-6)


def test_a_sigma_above_its_bound_is_refused():
  message = r'sigma=0.2 of step 1, from level 0.1 to 0.05, .* 0.0555'
  with pytest.raises(ValueError, match=message):
    rules.remasking((1.0, 0.1, 0.05, 0.0), (0.0, 0.2, 0.0))
  with pytest.raises(ValueError, match=r'sigma=-0\.1 of step 0'):
    rules.remasking((1.0, 0.5, 0.0), (-0.1, 0.0))


def test_the_bound_is_one_where_nothing_is_visible():
  assert sigmas.bounds((1.0, 0.95, 0.0)) == (1.0, 0.0)
  rule = rules.remasking((1.0, 0.95, 0.0), (1.0, 0.0))
  np.testing.assert_allclose(reveal_and_remask(rule, 0), [0.05, 1], atol=1e-7)


def test_a_visible_token_stays_or_becomes_mask():
  """10,000 updates; the network gives the token probability 0."""
  count = 10_000
  row = one_row([False] * count)
  rule = rules.remasking((1.0, 0.1, 0.05, 0.0), (0.0, 0.05 / 0.9, 0.0))
  probs = np.zeros((count, 7))
  probs[:, 6] = 1
  noise = rule.noise(jax.random.key(0), row.positions)
  update = rule.update(noise, 1, row, proposal_of([6] * count, probs), ())
  assert not update.write.any()
  # Three standard deviations: one false alarm in 370 keys.
  assert abs(update.remask.mean() - 0.0556) < 0.007


@pytest.mark.parametrize('schedule', [linear(), cosine(), polynomial(2.0)])
@pytest.mark.parametrize('kappa', [0.0, 0.3, 1.0])
def test_psi_mixes_the_posterior_with_a_fresh_marginal(schedule, kappa):
  alpha = alphas(GRID, schedule)
  rule = rules.remasking(GRID, sigmas.psi(GRID, kappa, schedule), schedule)
  for step, (a_t, a_s) in enumerate(itertools.pairwise(alpha)):
    posterior = (a_s - a_t) / (1 - a_t)
    expected = [
      kappa * posterior + (1 - kappa) * a_s, (1 - kappa) * (1 - a_s)
    ]  # fmt: skip
    np.testing.assert_allclose(
      reveal_and_remask(rule, step), expected, atol=1e-6
    )


@pytest.mark.parametrize('schedule', [linear(), cosine()])
@pytest.mark.parametrize('beta', [0.0, 0.1, 0.25])
def test_the_flow_corrector_scales_both_rates(schedule, beta):
  grid = uniform_grid(8)
  alpha = alphas(grid, schedule)
  rule = rules.remasking(
    grid, sigmas.flow_corrector(grid, beta, schedule), schedule
  )
  for step in range(1, 5):
    a_t, a_s = alpha[step : step + 2]
    assert beta * (a_s - a_t) < 1 - a_s  # Below the bound.
    np.testing.assert_allclose(
      reveal_and_remask(rule, step),
      [(1 + beta) * (a_s - a_t) / (1 - a_t), beta * (a_s - a_t) / a_t],
      atol=1e-6,
    )


def test_confidence_shares_sigma_by_what_was_written():
  rule = rules.remasking(
    (1.0, 0.5, 0.4, 0.0), (0.0, 0.3, 0.0), by_confidence=True
  )
  row = one_row([False, True, False, False])
  state = np.array([0.9, 0.0, 0.2, 0.5])
  weights = np.exp(-state[[0, 2, 3]])
  expected = np.zeros(4)
  expected[[0, 2, 3]] = 0.3 * weights / weights.sum()
  expected[1] = 0.1 / 0.5
  np.testing.assert_allclose(
    event_probabilities(rule, 1, row, state), expected, atol=1e-6
  )
  # A written token brings its probability, one that is taken back loses it.
  probs = np.full((4, 7), 0.1)
  probs[1, 6] = 0.4
  update = rule.update(
    jnp.array([0.0, 0, 1, 1]), 1, row, proposal_of([6] * 4, probs), state
  )
  np.testing.assert_allclose(update.state, [0, 0.4, 0.2, 0.5], rtol=1e-6)
  # Nothing committed: no NaN.
  update = rule.update(
    jnp.zeros(4), 0, one_row([True] * 4), proposal_of([6] * 4, probs), state
  )
  assert update.write.all() and not update.remask.any()


def test_switch_and_loop_have_their_phases():
  ones = (0.1,) * 4
  assert sigmas.switch(GRID, ones, 0.5) == (0.0, 0.0, 0.1, 0.1)
  grid, loop = sigmas.loop(uniform_grid(20), 0.05, cosine())
  alpha = alphas(grid, cosine())
  times = np.array(uniform_grid(20))
  np.testing.assert_allclose(alpha[(times < 0.54) & (times > 0.06)], ALPHA_ON)
  assert set(loop) == {0.0, 0.05}
  assert loop.index(0.05) == 9  # The first step that starts below 0.55.
  rules.remasking(grid, loop, cosine())  # Feasible.


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: rules.remasking((1.0, 0.5, 0.6, 0.0), (0.0,) * 3), 'fall weakly'),
    (lambda: rules.remasking((1.0, 0.1), (0.0,)), 'fall weakly'),
    (lambda: rules.remasking(GRID, (0.0,)), '1 sigmas for a grid of 4 steps'),
    (lambda: sigmas.switch(GRID, (0.0,), 0.5), '1 sigmas for a grid of 4'),
    (lambda: sigmas.cap(GRID, 1.5), 'eta=1.5 must be in'),
    (lambda: sigmas.rescale(GRID, -0.5), 'eta=-0.5 must be in'),
    (lambda: sigmas.psi(GRID, 2.0), 'kappa=2.0 must be in'),
    (lambda: sigmas.flow_corrector(GRID, -1.0), 'beta=-1.0 must be finite'),
    (lambda: sigmas.loop(GRID, 0.1, t_on=0.01), 't_off=0.05 < t_on=0.01'),
    (lambda: sigmas.loop(GRID, 0.1, alpha_on=1.0), 'alpha_on=1.0 must be'),
    (lambda: sigmas.loop((1.0, 0.5, 0.5, 0.0), 0.1), 'fall strictly'),
  ],
)
def test_impossible_settings_raise(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_equal_settings_are_the_same_object():
  rule = rules.remasking(GRID, sigmas.cap(GRID, 0.1))
  assert rules.remasking(list(GRID), list(sigmas.cap(GRID, 0.1))) is rule
  assert rules.remasking(GRID, sigmas.cap(GRID, 0.2)) is not rule


# The reference implementation.


def test_sigmas_equal_those_of_remdm():
  table = GOLDEN['sigma_tables']
  for i, (a_t, a_s) in enumerate(
    zip(table['alpha_t'], table['alpha_s'], strict=True)
  ):
    grid = (1.0, float(1 - a_t), float(1 - a_s), 0.0)
    bound = sigmas.bounds(grid)[1]
    np.testing.assert_allclose(bound, table['sigma_max'][i], atol=1e-9)
    for eta, capped, rescaled in zip(
      table['etas'].tolist(), table['cap'], table['rescale'], strict=True
    ):
      got = sigmas.cap(grid, eta)[1], sigmas.rescale(grid, eta)[1]
      np.testing.assert_allclose(got, (capped[i], rescaled[i]), atol=1e-9)
    # The table holds the plain formula, which may pass the bound.
    np.testing.assert_allclose(
      sigmas.forward_backward(grid)[1],
      min(bound, table['forward_backward'][i]),
      atol=1e-9,
    )


def loop_level(t):
  return 1 - np.interp(-t, [-1, -T_ON, -T_OFF, 0], [0, ALPHA_ON, ALPHA_ON, 1])


def test_the_loop_has_the_levels_of_remdm():
  table = GOLDEN['loop_schedule']
  times = (*table['t'].tolist(), 0.0)
  grid, loop = sigmas.loop(times, 0.02)
  np.testing.assert_allclose(grid[:-1], table['move_chance_t'], atol=1e-9)
  np.testing.assert_array_equal(np.array(loop) > 0, table['phase'] == 1)
  # Where the reference starts a phase from another alpha than it had reached
  # the levels after the step differ; elsewhere they agree.
  jumps = np.flatnonzero(np.diff(table['phase']))
  agree = np.setdiff1d(np.arange(40), [*jumps, 39])
  np.testing.assert_allclose(
    np.array(grid[1:])[agree], table['move_chance_s'][agree], atol=1e-9
  )


def golden_step(sampler, eta, t, s, alpha_t, alpha_s):
  """The rule and step number of one interval of the reference."""
  before, after, sigma = 1 - alpha_t, 1 - alpha_s, None
  if sampler == 'remdm-loop':
    before, after, sigma = loop_level(t), loop_level(s), 0.0
    if t > T_ON:  # The reference goes on beyond alpha_on in this step.
      after = 1 - (1 - s) * ALPHA_ON / (1 - T_ON)
    elif t > T_OFF:
      after, sigma = before, eta
  levels = [float(np.clip(x, 0, 1)) for x in (before, after)]
  grid = (*([] if levels[0] == 1 else [1.0]), *levels, 0.0)
  step = len(grid) - 3
  chosen = {
    'mdlm': (0.0,) * (len(grid) - 1),
    'forward-backward': sigmas.forward_backward(grid),
    'remdm-cap': sigmas.cap(grid, eta),
    'remdm-rescale': sigmas.rescale(grid, eta),
    'remdm-conf': sigmas.bounds(grid),
    'remdm-loop': (*(0.0,) * step, sigma, 0.0),
  }[sampler]
  rule = rules.remasking(grid, chosen, by_confidence=sampler == 'remdm-conf')
  return rule, step, chosen[step], levels[0]


def transition(rule, step, z, probs, state):
  """The law of every slot after the step, MASK among the outcomes."""
  masked = z == MASK
  event = event_probabilities(rule, step, one_row(masked, z), state)[:, None]
  token, mask = np.eye(MASK + 1)[z], np.eye(MASK + 1)[MASK]
  return np.where(
    masked[:, None],
    event * probs + (1 - event) * mask,
    event * mask + (1 - event) * token,
  )


STEPS = sorted(name for name in GOLDEN if name.startswith('step_'))


@pytest.mark.parametrize('name', STEPS)
def test_steps_equal_those_of_remdm(name):
  case = GOLDEN[name]
  sampler = name.split('_')[1]
  for i in range(len(case['t'])):
    rule, step, sigma, before = golden_step(
      sampler, case['eta'][i].item(), case['t'][i].item(),
      case['s'][i].item(), case['alpha_t'][i].item(),
      case['alpha_s'][i].item(),
    )  # fmt: skip
    z, expected = case['z_t'][i], case['q_x_s'][i].copy()
    state = ()
    if sampler == 'remdm-conf':
      # The reference keeps minus the probability, -inf where nothing is.
      state = -np.where(z == MASK, 0, case['confidence'][i])
    got = transition(rule, step, z, case['p_x0'][i], state)
    if sampler == 'mdlm' or (sampler == 'remdm-loop' and sigma == 0):
      # Those rows are not normalised, and visible tokens are copied later.
      expected /= before
      expected[z != MASK] = np.eye(MASK + 1)[z[z != MASK]]
    elif sampler != 'remdm-loop':
      np.testing.assert_allclose(sigma, case['sigma'][i], atol=1e-6)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    if sampler == 'remdm-conf':
      x = case['x_s'][i]
      update = rule.update(
        jnp.asarray(np.where(z == x, 1.0, 0.0)), step, one_row(z == MASK, z),
        proposal_of(np.minimum(x, MASK - 1), case['p_x0'][i]), state,
      )  # fmt: skip
      np.testing.assert_allclose(
        update.state, -np.where(x == MASK, 0, case['confidence_next'][i]),
        atol=1e-6,
      )  # fmt: skip


def toy_probs(ids):
  """Neighbours vote for a token; MASK is impossible."""
  tables = GOLDEN['sample']
  votes = tables['token_table'][np.roll(ids, 1)]
  votes = votes + tables['token_table'][np.roll(ids, -1)]
  logits = votes + tables['position_table']
  logits[:, MASK] = -np.inf
  p = np.exp(logits - logits.max(-1, keepdims=True))
  return p / p.sum(-1, keepdims=True)


RUNS = sorted(name for name in GOLDEN if name.startswith('sample_'))


@pytest.mark.parametrize('name', RUNS)
def test_whole_runs_equal_those_of_remdm(name):
  """Its recorded uniforms decide the outcomes, our rule what they mean.

  The reference draws each slot once among V tokens and MASK: a token that wins
  at a MASK slot is a reveal of that candidate, a MASK that wins elsewhere a
  remask. Its forward-backward run ends with a sigma of 0.2 where 1.2e-5 is
  feasible: equal up to there.
  """
  case, sampler = GOLDEN[name], name.removeprefix('sample_')
  uniforms, eps = case['uniform_per_step'], float(case['eps'])
  times = np.linspace(1, eps, len(uniforms) + 1)
  for b, final in enumerate(case['ids']):
    ids, state, noise = np.full(10, MASK), None, ()
    for k, u in enumerate(uniforms[:, b]):
      np.testing.assert_array_equal(ids, case['states'][k, b])
      t, s = times[k : k + 2].tolist()
      rule, step, *_ = golden_step(
        sampler, case['eta'].item(), t, s, 1 - t, 1 - s
      )
      row, probs = one_row(ids == MASK, ids), toy_probs(ids)
      if state is None:
        state, _ = rule.init(noise, row, MASK + 1)
      q = transition(rule, step, ids, probs, state)
      drawn = (q / (1e-10 - np.log(u + 1e-10))).argmax(-1)
      assert ((drawn == MASK) | (ids == MASK) | (drawn == ids)).all()
      proposal = proposal_of(np.minimum(drawn, MASK - 1), probs)
      update = rule.update(
        jnp.asarray(np.where(drawn == ids, 1.0, 0.0)), step, row, proposal,
        state,
      )  # fmt: skip
      ids = np.asarray(commit(row.ids, proposal.candidate_ids, update.write))
      ids = np.where(update.remask, MASK, ids)
      state = update.state
    filled = np.where(ids == MASK, toy_probs(ids).argmax(-1), ids)
    if sampler != 'forward-backward':
      np.testing.assert_array_equal(filled, final)


def test_nucleus_differs_from_remdm_by_the_token_that_crosses():
  """Its nucleus leaves out the token that crosses p; the definition keeps it.

  At the mass that it keeps, ours is the same.
  """
  case = GOLDEN['nucleus']
  p_x0, q = case['p_x0'][0], case['q_x_s'][0]
  reveal = float(case['dt'])  # Not normalised: times t.
  for p, row in zip(p_x0, q, strict=True):
    kept = row[:MASK] > 0
    logits = jnp.log(jnp.asarray(p[:MASK]))
    mass = float(p[:MASK][kept].sum())
    at_mass = np.exp(filters.keep_top_p(logits, mass - 1e-6))
    np.testing.assert_allclose(
      reveal * at_mass / at_mass.sum(), row[:MASK], atol=1e-6
    )
    ours = np.isfinite(filters.keep_top_p(logits, float(case['nucleus_p'])))
    crossed = mass >= case['nucleus_p']
    assert (ours & kept).sum() == kept.sum()
    assert ours.sum() == kept.sum() + (not crossed)


# Exact laws.


def mask_shares(rule, num_slots, candidate_probs):
  """Expected share of MASK after each step when the candidates are known.

  Runs the rule's own `init`, `cells` and `update` on every state.
  """
  proposal = proposal_of([0] * num_slots, candidate_probs)
  start, _ = rule.init((), one_row([True] * num_slots), 7)
  states = {((True,) * num_slots, tuple(np.ravel(start))): 1.0}
  shares = []
  for step in range(rule.calls(num_slots)):
    after = {}
    for (masked, kept), mass in states.items():
      row = jax.tree.map(np.asarray, one_row(masked))
      state = np.array(kept) if kept else ()
      for weight, noise in rule.cells(step, row, proposal, state):
        update = rule.update(jnp.asarray(noise), step, row, proposal, state)
        key = (np.array(masked) & ~update.write) | update.remask
        key = (tuple(key.tolist()), tuple(np.ravel(update.state).tolist()))
        after[key] = after.get(key, 0) + mass * weight
    states = after
    shares.append(sum(np.mean(m) * p for (m, _), p in states.items()))
  return shares


SIGMAS = {
  'zero': lambda grid, schedule: (0.0,) * (len(grid) - 1),
  'bounds': sigmas.bounds,
  'cap': lambda grid, schedule: sigmas.cap(grid, 0.3, schedule),
  'rescale': lambda grid, schedule: sigmas.rescale(grid, 0.5, schedule),
  'forward_backward': sigmas.forward_backward,
  'flow': lambda grid, schedule: sigmas.flow_corrector(grid, 0.4, schedule),
  'psi': lambda grid, schedule: sigmas.psi(grid, 0.3, schedule),
  'switch': lambda grid, schedule: sigmas.switch(
    grid, sigmas.cap(grid, 0.3, schedule), 0.5
  ),
}


@pytest.mark.parametrize('name', SIGMAS)
@pytest.mark.parametrize('schedule', [linear(), cosine()])
def test_with_a_known_endpoint_the_mask_share_is_the_schedule(name, schedule):
  grid = (1.0, 0.7, 0.5, 0.5, 0.2, 0.0)  # Flat in the middle.
  rule = rules.remasking(grid, SIGMAS[name](grid, schedule), schedule)
  np.testing.assert_allclose(
    mask_shares(rule, 1, np.ones((1, 1))),
    1 - alphas(grid, schedule)[1:],
    atol=1e-6,
  )


def test_the_loop_holds_its_mask_share():
  grid, loop = sigmas.loop(uniform_grid(8), 0.1)
  got = mask_shares(rules.remasking(grid, loop), 1, np.ones((1, 1)))
  np.testing.assert_allclose(got, grid[1:], atol=1e-6)
  assert np.isclose(got, 1 - ALPHA_ON).sum() == 4


def test_by_confidence_less_is_visible_than_the_schedule_says():
  grid = (1.0, 0.7, 0.5, 0.2, 0.0)
  rule = rules.remasking(grid, sigmas.bounds(grid), by_confidence=True)
  shares = mask_shares(rule, 2, np.array([[0.9], [0.2]]))
  # The first step is that of sigma = 0. In the second MASK is revealed as with
  # sigma = 0, and sigma = 1 takes back one token of a row: the only visible
  # one, or one of the two.
  np.testing.assert_allclose(shares[0], 0.7, atol=1e-6)
  stays = 0.7 * (1 - 0.2 / 0.7)
  alone, both = 2 * 0.3 * 0.7, 0.3**2
  np.testing.assert_allclose(shares[1], stays + (alone + both) / 2, atol=1e-6)
  assert shares[1] > grid[2] and shares[2] > grid[3]


def test_sigma_zero_is_the_reverse_kernel():
  grid = (1.0, 0.7, 0.2, 0.0)
  zero, kernel = rules.remasking(grid, (0.0,) * 3), rules.kernel(grid)
  got = law_of(PAIRS, zero).probabilities
  for string, p in law_of(PAIRS, kernel).probabilities.items():
    np.testing.assert_allclose(got.pop(string), p, atol=1e-12)
  assert not got
  # Token for token, too.
  canvas = from_prompts([[]] * 64, 2, VOCAB)
  first, second = (
    sampling.sample(
      oracle.exact_denoiser(VOCAB), PAIRS, jax.random.key(0), canvas,
      vocab=VOCAB, rule=rule,
    ).ids
    for rule in (zero, kernel)
  )  # fmt: skip
  np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize('name', ['bounds', 'forward_backward', 'psi'])
def test_independent_positions_keep_the_law_of_the_data(name):
  p = np.outer([0.5, 0.3, 0.2], [0.1, 0.2, 0.7]).ravel()
  joint = oracle.joint(list(itertools.product((A, B, C), repeat=2)), p)
  grid = (1.0, 0.5, 0.25, 0.0)
  law = law_of(joint, rules.remasking(grid, SIGMAS[name](grid, linear())))
  assert total_variation(law, joint) < 1e-12


def twins_error(levels, sigma_steps):
  """Probability that the two slots of `TWINS` end up different, by hand.

  Pairs are in one of five states; slots act independently within a step, and
  both are drawn at once only where both are revealed in it.
  """
  state = np.array([1.0, 0, 0, 0])  # MASK MASK, one visible, equal, different.
  for (m_t, m_s), sigma in zip(
    itertools.pairwise(levels), sigma_steps, strict=True
  ):
    r = (m_t - m_s + sigma * (1 - m_t)) / m_t
    q = 1 - sigma
    none = [(1 - r) ** 2, 2 * r * (1 - r), r * r / 2, r * r / 2]
    # The visible slot may be taken back while the other is written.
    one = [sigma * (1 - r), q * (1 - r) + sigma * r, q * r, 0]
    equal = [sigma**2, 2 * q * sigma, q * q, 0]
    different = [sigma**2, 2 * q * sigma, 0, q * q]
    state = state @ np.array([none, one, equal, different])
  return state[3]


def test_error_of_parallel_reveals_by_sigma():
  """Twins: 1/(2K) without remasking; each sigma has its own closed form."""
  grid = uniform_grid(8)
  errors = {}
  for name in ('zero', 'cap', 'bounds'):
    chosen = SIGMAS[name](grid, linear())
    law = law_of(TWINS, rules.remasking(grid, chosen))
    errors[name] = total_variation(law, TWINS)
    np.testing.assert_allclose(
      errors[name], twins_error(grid, chosen), rtol=1e-9
    )
  np.testing.assert_allclose(errors['zero'], 1 / 16, rtol=1e-12)
  assert len({round(e, 6) for e in errors.values()}) == 3


@pytest.mark.parametrize('by_confidence', [False, True])
def test_simulation_agrees_with_the_law(by_confidence):
  joint, grid = TWINS, (1.0, 0.6, 0.3, 0.0)
  rule = rules.remasking(grid, sigmas.bounds(grid), by_confidence=by_confidence)
  draw = draws.categorical(temperature=2.0)
  law = law_of(joint, rule, draw=draw)
  result = sampling.sample(
    oracle.exact_denoiser(VOCAB), joint, jax.random.key(1),
    from_prompts([[]] * 4_000, 2, VOCAB), vocab=VOCAB, rule=rule, draw=draw,
  )  # fmt: skip
  statistic, freedom = chi_square(law, result.ids)
  # Five standard deviations above the mean: a false alarm in about 10^3 for so
  # few degrees of freedom.
  assert statistic < freedom + 5 * np.sqrt(2 * freedom)
  if not by_confidence:
    # And MASK has its share: five standard errors.
    got = result.masked_fraction.mean(1)
    error = np.sqrt(0.25 / 4_000)
    np.testing.assert_allclose(got, grid[:-1], atol=5 * error)
