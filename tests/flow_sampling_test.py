import functools
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_exact import (
  JOINT,
  MASK,
  PATHS,
  STATES,
  VOCAB,
  V,
  clean_probs,
  exact_denoiser,
  token_laws,
)
from small_joints import A, B, C, chi_square, law_of, total_variation

from mdlm_jax import flow, guidance, rules
from mdlm_jax.canvas import from_rows
from mdlm_jax.constraints import constrain
from mdlm_jax.draws import categorical
from mdlm_jax.oracle import SamplerLaw
from mdlm_jax.predict import Denoiser
from mdlm_jax.schedules import cosine, cosine_grid, uniform_grid

GRID = (1.0, 0.7, 0.45, 0.2, 0.0)
TOKENS = np.arange(V)


rates = jax.jit(flow.rates, static_argnames=('path', 'corrector'))


@functools.partial(jax.jit, static_argnames=('step', 'path'))
def _jump(step, path, ids, own, tau, next_tau):
  return step(path, ids, own, tau, next_tau)


def jump(step, path, ids, own, tau, next_tau):
  """The probabilities of a step in float64, in one program for all shapes."""
  ids, own = np.broadcast_arrays(ids, np.float64(own))
  with jax.enable_x64(True):
    result = _jump(
      step, path, np.resize(ids, STATES.size), np.resize(own, STATES.size),
      np.float64(tau), np.float64(next_tau),
    )  # fmt: skip
  return [np.asarray(x)[: ids.size].reshape(ids.shape) for x in result]


def transitions(step, name, probs, ids, tau, next_tau, path=None):
  """What becomes of each token, given the prediction. Shape `[..., V]`."""
  own = np.take_along_axis(probs, ids[..., None], -1)[..., 0]
  path = PATHS[name] if path is None else path
  to_candidate, to_source = jump(step, path, ids, own, tau, next_tau)
  stays = 1 - to_candidate - to_source
  assert (to_candidate >= 0).all() and (to_source >= 0).all()
  assert (stays >= -1e-12).all()
  # The noise of the path at next_tau, read off what another token leaves.
  laws = token_laws(name, next_tau if next_tau < 1 else tau)
  source = laws[0] - np.eye(V)[0] * laws[0, 0]
  source = source / source.sum()
  return (
    stays[..., None] * np.eye(V)[ids]
    + to_candidate[..., None] * probs
    + to_source[..., None] * source
  )


def sampler_law(step, name, own, grid, path=None):
  """The law of `flow.sample` with the exact network, by matrix products."""
  taus = 1 - np.asarray(grid)
  start = token_laws(name, 0.0)[A]
  law = np.outer(start, start).ravel()
  for tau, next_tau in itertools.pairwise(taus):
    probs = clean_probs(token_laws(name, tau), own)
    each = transitions(step, name, probs, STATES, tau, next_tau, path)
    law = np.einsum('s,su,sv->uv', law, each[:, 0], each[:, 1]).ravel()
  found = zip(map(tuple, STATES.tolist()), law.tolist(), strict=True)
  return SamplerLaw({ids: p for ids, p in found if p > 1e-14}, 0.0)


def distance(law, other):
  keys = law.probabilities.keys() | other.probabilities.keys()
  pairs = [[x.probabilities.get(k, 0.0) for x in (law, other)] for k in keys]
  return 0.5 * np.abs(np.diff(pairs)).sum()


# One step.


def test_an_euler_step_past_the_end_is_cut_off():
  """h = 1/4: at 3/4 exactly 1, at 0.9 it would be 2.5."""
  step, path = flow.euler(), PATHS['masked']
  np.testing.assert_array_equal(jump(step, path, MASK, 0, 0.75, 1.0)[0], 1.0)
  np.testing.assert_array_equal(jump(step, path, MASK, 0, 0.9, 1.15)[0], 1.0)
  np.testing.assert_allclose(jump(step, path, MASK, 0, 0.5, 0.6)[0], 0.2)
  root = flow.masked(VOCAB, flow.polynomial(0.5))
  rate = 0.5 / np.sqrt(0.1) / (1 - np.sqrt(0.1))
  assert 0.8 * rate > 1
  np.testing.assert_array_equal(jump(step, root, MASK, 0, 0.1, 0.9)[0], 1.0)
  np.testing.assert_allclose(jump(step, root, MASK, 0, 0.1, 0.2)[0], 0.1 * rate)


def test_the_three_steps_by_hand():
  """From tau 0.2 to 0.5, 3 clean ids; b = 1/2 goes on to 0.65."""
  path = PATHS['uniform']
  got = jump(flow.exact(), path, B, 0.4, 0.2, 0.5)
  np.testing.assert_allclose(got, [3 / 8, 0])
  got = jump(flow.exact(corrector=0.5), path, B, 0.4, 0.2, 0.5)
  np.testing.assert_allclose(got, [45 / 80 * 50 / 65, 15 / 65])
  got = jump(flow.euler(corrector=0.5), path, B, 0.4, 0.2, 0.5)
  np.testing.assert_allclose(got, [1.5 * 3 / 8, 7 / 16])  # The rest, not 3/4.
  got = jump(flow.ancestral(), path, B, 0.4, 0.2, 0.5)
  here = 0.2 * 0.4 + 0.8 / 3
  np.testing.assert_allclose(got, [0.1 / here, 0.1 / here])


def test_a_visible_token_of_the_masked_path_stays_whatever_is_predicted():
  for step in (flow.exact(), flow.euler(), flow.ancestral()):
    got = jump(step, PATHS['masked'], B, 0.1, 0.2, 0.5)
    np.testing.assert_array_equal(got, [0, 0])


@pytest.mark.parametrize(
  ('step', 'name'),
  [
    (flow.exact(), 'masked'),
    (flow.exact(), 'uniform'),
    (flow.exact(corrector=0.5), 'masked'),
    (flow.exact(corrector=0.5), 'uniform'),
    (flow.exact(corrector=4.0), 'uniform'),
    (flow.ancestral(), 'masked'),
    (flow.ancestral(), 'uniform'),
    (flow.ancestral(), 'hybrid'),
  ],
)
@pytest.mark.parametrize('times', [(0.1, 0.35), (0.35, 0.9), (0.9, 1.0)])
def test_a_known_text_follows_its_path_at_steps_of_any_length(
  step, name, times
):
  known = np.tile(np.eye(V)[A], (V, 1))
  moved = transitions(step, name, known, TOKENS, *times)
  before, after = (token_laws(name, tau)[A] for tau in times)
  np.testing.assert_allclose(before @ moved, after, atol=1e-12)
  if step is flow.ancestral():  # And so backwards: Bayes' rule.
    forward = np.where(before > 0, moved.T * before, 0).T
    np.testing.assert_allclose(forward.sum(0), after, atol=1e-12)


@pytest.mark.parametrize('corrector', [0.0, 0.6])
@pytest.mark.parametrize('name', ['masked', 'uniform'])
def test_short_steps_are_the_rates(name, corrector):
  probs = clean_probs(token_laws(name, 0.4), own=True)
  possible = probs.sum(-1) > 0
  with jax.enable_x64(True):
    q = rates(
      PATHS[name], jnp.asarray(probs), jnp.asarray(STATES),
      jnp.full(STATES.shape, 0.4), corrector=corrector,
    )  # fmt: skip
  for step in (
    flow.exact(corrector=corrector),
    flow.euler(corrector=corrector),
  ):
    moved = transitions(step, name, probs, STATES, 0.4, 0.4 + 1e-6)
    change = (moved - np.eye(V)[STATES]) / 1e-6
    np.testing.assert_allclose(change[possible], q[possible], atol=2e-4)


def test_no_mask_is_left_after_the_last_of_1_to_20_steps():
  kappas = (flow.linear(), flow.cosine(), flow.polynomial(2.0), flow.cubic())
  paths = [flow.masked(VOCAB, kappa) for kappa in kappas]
  steps = (
    flow.euler(), flow.euler(corrector=1.0), flow.exact(corrector=1.0),
    flow.ancestral(),
  )  # fmt: skip
  cases = [*itertools.product(steps, paths), (steps[-1], PATHS['hybrid'])]

  @jax.jit
  def last_steps(tau):
    own, end = jnp.zeros_like(tau), jnp.ones_like(tau)
    ids = jnp.full(tau.shape, MASK)
    return [step(path, ids, own, tau, end) for step, path in cases]

  last = [1 - uniform_grid(count)[-2] for count in range(1, 21)]
  jumps = last_steps(np.array(last, np.float32))
  for (step, path), (forward, back) in zip(cases, jumps, strict=True):
    np.testing.assert_array_equal(forward, 1.0, err_msg=f'{step} {path}')
    np.testing.assert_array_equal(back, 0.0, err_msg=f'{step} {path}')


# The law of the sampler.


def test_from_mask_the_flow_has_the_law_of_the_reverse_kernel():
  kernel_law = law_of(JOINT, rules.kernel(GRID))
  for step, own in ((flow.exact(), True), (flow.ancestral(), False)):
    law = sampler_law(step, 'masked', own, GRID)
    assert distance(law, kernel_law) < 1e-12
  assert total_variation(kernel_law, JOINT) > 0.01


def test_another_kappa_is_another_schedule_of_the_kernel():
  path, grid = flow.masked(VOCAB, flow.cosine()), uniform_grid(3)
  # The exact network of `sampler_law` only knows what the tokens show.
  law = sampler_law(flow.exact(), 'masked', True, grid, path)
  assert distance(law, law_of(JOINT, rules.kernel(grid, cosine()))) < 1e-12
  other = sampler_law(flow.exact(), 'masked', True, grid)
  assert distance(law, other) > 1e-3
  schedule = flow.as_schedule(flow.cosine())
  assert flow.as_rule(path, grid) is rules.kernel(grid, schedule)


def test_the_rule_with_a_corrector_takes_tokens_back():
  rule = flow.as_rule(PATHS['masked'], GRID, corrector=0.8)
  law = law_of(JOINT, rule)
  expected = sampler_law(flow.exact(corrector=0.8), 'masked', True, GRID)
  assert distance(law, expected) < 1e-9
  assert distance(law, sampler_law(flow.exact(), 'masked', True, GRID)) > 1e-3


@pytest.mark.parametrize(
  ('step', 'name', 'own'),
  [
    (flow.exact(), 'uniform', True),
    (flow.exact(corrector=0.5), 'uniform', True),
    (flow.euler(), 'uniform', True),
    (flow.euler(corrector=0.5), 'uniform', True),
    (flow.ancestral(), 'uniform', False),
    (flow.ancestral(), 'hybrid', False),
  ],
)
def test_more_steps_bring_the_law_to_the_data(step, name, own):
  """First order: at least 1.6 times nearer for twice the steps."""
  far, near = (
    total_variation(sampler_law(step, name, own, uniform_grid(n)), JOINT)
    for n in (32, 64)
  )
  assert near < 0.025 and far > 1.6 * near


def test_each_network_needs_its_own_step():
  """The posterior in the ancestral step, and the other way round: biased."""
  for step, own in ((flow.ancestral(), True), (flow.exact(), False)):
    law = sampler_law(step, 'uniform', own, uniform_grid(256))
    assert total_variation(law, JOINT) > 0.2


# The compiled sampler.


COUNT = 4_000
WHOLE = from_rows([[None, None]] * COUNT, VOCAB)


def assert_samples_have_the_law(step, name, own):
  result = flow.sample(
    exact_denoiser(PATHS[name], own), JOINT, jax.random.key(0), WHOLE,
    vocab=VOCAB, path=PATHS[name], grid=GRID, step=step, trajectory=True,
  )  # fmt: skip
  statistic, freedom = chi_square(
    sampler_law(step, name, own, GRID), result.ids
  )
  # Five standard deviations above the mean: a false alarm in 10^4 or rarer.
  assert statistic < freedom + 5 * np.sqrt(2 * freedom)
  assert result.calls == 4 and result.finite.all()
  start = np.asarray(result.trajectory[0])
  assert (start == MASK).all() if name == 'hybrid' else (start > 1).all()
  np.testing.assert_array_equal(result.trajectory[-1], result.ids)


def test_samples_have_the_law():
  assert_samples_have_the_law(flow.ancestral(), 'hybrid', False)


@functools.cache
def table():
  """Fixed logits of every position, which are its params."""

  def features(params, cache, ids, *, positions, **unused):
    del cache, ids, unused
    return params[positions], ()

  return Denoiser(features, lambda params, hidden: hidden, time_free=True)


LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(6, V)), jnp.float32)
ROWS = [[A, None, None, B], [None] * 6, [C, C, None], [MASK, 0, None, None, A]]
CANVAS = from_rows(ROWS, VOCAB)
OPEN = np.asarray(CANVAS.generation_slots)
GREEDY = categorical(temperature=0.0)


def run(canvas=CANVAS, key=0, logits=LOGITS, **options):
  defaults = {'step': flow.ancestral(), 'grid': uniform_grid(32)}
  return flow.sample(
    table(), logits, jax.random.key(key), canvas, vocab=VOCAB,
    path=PATHS['uniform'], **(defaults | options),
  )  # fmt: skip


def test_what_is_given_stays_and_a_row_does_not_depend_on_its_batch():
  whole = np.asarray(run().ids)
  np.testing.assert_array_equal(whole[~OPEN], np.asarray(CANVAS.ids)[~OPEN])
  assert (whole[OPEN] > 1).all()
  order = np.array([2, 2, 0, 3])
  others = run(
    jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[order]), CANVAS),
    row_ids=jnp.asarray(order),
  )
  np.testing.assert_array_equal(others.ids, whole[order])
  assert others.trajectory is None
  assert (run(key=1).ids != whole).any()


def test_candidates_obey_draw_constraint_and_guidance():
  """Uniform noise is drawn at the start, where the greedy draw says nothing."""
  only_c = [[None if given else [C] for given in row] for row in [
    [True, False, False, True], [False] * 6
  ]] + [[None] * 3, [None] * 5]  # fmt: skip
  result = run(
    step=flow.exact(), grid=uniform_grid(5), draw=GREEDY, trajectory=True,
    constraint=constrain(CANVAS, only_c, VOCAB),
    guidance=guidance.guide(CANVAS, VOCAB, 1.0),
  )  # fmt: skip
  best = np.tile(2 + np.asarray(LOGITS[:, 2:]).argmax(-1), (4, 1))
  best[:2] = C
  np.testing.assert_array_equal(np.asarray(result.ids)[OPEN], best[OPEN])
  assert result.calls == 10
  canvases = np.asarray(result.trajectory)
  np.testing.assert_array_equal(
    canvases[:, ~OPEN], np.tile(canvases[-1, ~OPEN], (6, 1))
  )
  assert (canvases[:, OPEN] > 1).all()
  assert (canvases[0, OPEN] != best[OPEN]).any()


def test_the_program_of_the_docs_runs(capsys):
  docs = pathlib.Path(__file__).parents[1] / 'docs' / 'flow.md'
  (program,) = re.findall(r'```python\n(.*?)```', docs.read_text(), re.DOTALL)
  key, sampling_key = jax.random.split(jax.random.key(0))
  names = {
    'denoiser': table(), 'params': LOGITS, 'vocab': VOCAB,
    'key': sampling_key, 'canvas': CANVAS,
  }  # fmt: skip
  exec(program, names)
  loss = jax.jit(names['loss'])(
    LOGITS, key, jnp.full((2, 6), A), jnp.array([0.3, 0.6]),
    jnp.ones((2, 6), bool),
  )  # fmt: skip
  assert loss > 0 and capsys.readouterr().out
  assert (np.asarray(names['result'].ids)[OPEN] > 1).all()


def test_bad_grids_logits_and_paths_are_refused():
  with pytest.raises(ValueError, match='a grid must fall strictly'):
    run(grid=(1.0, 0.5, -0.25))
  with pytest.raises(ValueError, match=r'non-finite logits.*\(row 1\)'):
    run(logits=LOGITS.at[5].set(jnp.nan))  # Compiled above.
  with pytest.raises(ValueError, match='source that does not depend on tau'):
    jump(flow.exact(), PATHS['hybrid'], MASK, 0, 0.2, 0.4)
  with pytest.raises(ValueError, match='must be finite and at least 0'):
    flow.exact(corrector=-1.0)
  with pytest.raises(ValueError, match='a rule begins with MASK'):
    flow.as_rule(PATHS['uniform'], cosine_grid(3))
