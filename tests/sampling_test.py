"""The loop with stub networks whose right answers are known."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdlm_jax import draws, rules, sampling
from mdlm_jax.blocks import blocks_of
from mdlm_jax.canvas import from_prompts, from_rows
from mdlm_jax.constraints import constrain
from mdlm_jax.guidance import guide
from mdlm_jax.models import transformer
from mdlm_jax.predict import Denoiser
from mdlm_jax.schedules import (
  cosine,
  cosine_grid,
  grid_counts,
  uniform_grid,
)
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=9, mask_id=1, pad_id=0)
GREEDY = draws.categorical(temperature=0.0)


@functools.cache
def stub(function):
  """A network whose logits are `function(params, ids, t, positions)`."""

  def features(params, cache, ids, *, t, positions, **unused):
    return function(params, ids, t, positions), ()

  return Denoiser(features, lambda params, hidden: hidden)


def uniform_logits(params, ids, t, positions):
  return jnp.zeros((*ids.shape, VOCAB.size))


def table_logits(params, ids, t, positions):
  return params[positions]


def neighbour_logits(params, ids, t, positions):
  """One more than the token on the left; sure of it iff that is visible."""
  left = jnp.roll(ids, 1, axis=1)
  sure = jnp.where(left == VOCAB.mask_id, 0.0, 20.0)
  return sure[..., None] * jax.nn.one_hot(left + 1, VOCAB.size)


def given_logits(params, ids, t, positions):
  return params


UNIFORM, TABLE = stub(uniform_logits), stub(table_logits)
LOGITS = stub(given_logits)
NEIGHBOUR = stub(neighbour_logits)


def run(denoiser, canvas, rule, *, params=(), seed=0, **options):
  return sampling.sample(
    denoiser, params, jax.random.key(seed), canvas,
    vocab=VOCAB, rule=rule, **options,
  )  # fmt: skip


def test_each_call_sees_the_updated_canvas():
  """Every token depends on the one just written: 2, 3, 4 ... in order."""
  canvas = from_prompts([[2]], 5, VOCAB)
  result = run(
    NEIGHBOUR, canvas, rules.by_confidence(5), draw=GREEDY, trajectory=True
  )
  np.testing.assert_array_equal(result.ids, [[2, 3, 4, 5, 6, 7]])
  for call, canvas_ids in enumerate(result.trajectory):
    np.testing.assert_array_equal(
      canvas_ids, [[2, *range(3, 4 + call), *[1] * (4 - call)]]
    )
  # All at once, four of the five tokens guess at a neighbour still hidden.
  at_once = run(NEIGHBOUR, canvas, rules.by_confidence(1), draw=GREEDY)
  assert at_once.ids.tolist() != result.ids.tolist()


def test_calls_levels_and_fractions_are_reported():
  canvas = from_prompts([[], [5, 5]], 4, VOCAB)
  result = run(UNIFORM, canvas, rules.by_confidence(3))
  assert result.calls == 3
  # Counts 2, 1, 1 of 4 open slots, in both rows.
  np.testing.assert_array_equal(
    result.masked_fraction, [[1.0, 1.0], [0.5, 0.5], [0.25, 0.25]]
  )
  np.testing.assert_array_equal(result.requested_t, result.masked_fraction)
  assert result.trajectory is None
  grid = cosine_grid(3)
  result = run(UNIFORM, canvas, rules.kernel(grid))
  np.testing.assert_allclose(
    result.requested_t, np.tile(np.array(grid[:-1])[:, None], 2), rtol=1e-6
  )


def test_the_network_is_fed_the_requested_level():
  def logits_of_t(params, ids, t, positions):
    return 20.0 * jax.nn.one_hot(jnp.round(t * 4).astype(int) + 2, VOCAB.size)[
      :, None
    ].repeat(ids.shape[1], 1)

  canvas = from_prompts([[]], 4, VOCAB)
  result = run(stub(logits_of_t), canvas, rules.by_confidence(4), draw=GREEDY)
  # t = 1, 3/4, 1/2, 1/4 at the four calls, one token each.
  np.testing.assert_array_equal(result.ids, [[6, 5, 4, 3]])


def test_more_steps_than_positions_is_legal_and_costs_its_calls():
  for rule in (rules.by_confidence(7), rules.kernel(uniform_grid(7))):
    result = run(UNIFORM, from_prompts([[5]], 2, VOCAB), rule)
    assert result.calls == 7
    assert not (result.ids == VOCAB.mask_id).any()


row_strategy = st.lists(
  st.sampled_from([None, None, 0, 1, 4, 7]), min_size=1, max_size=5
)


@settings(max_examples=30, deadline=None)
@given(
  st.lists(row_strategy, min_size=2, max_size=2),
  st.sampled_from(
    [
      rules.by_confidence(3, counts=grid_counts(cosine_grid(3))),
      rules.kernel(uniform_grid(3), cosine()),
    ]
  ),
  st.integers(0, 3),
)
def test_invariants_hold_for_any_rows(rows, rule, seed):
  """Prompt, padding and committed tokens stay; no MASK is left or drawn."""
  canvas = from_rows(rows, VOCAB, length=5)
  result = run(UNIFORM, canvas, rule, seed=seed, trajectory=True)
  slots = np.asarray(canvas.generation_slots)
  before = np.asarray(canvas.ids)
  for ids in np.asarray(result.trajectory):
    np.testing.assert_array_equal(ids[~slots], before[~slots])
    committed = slots & (before != VOCAB.mask_id)
    np.testing.assert_array_equal(ids[committed], before[committed])
    before = ids
  np.testing.assert_array_equal(before, result.ids)
  assert VOCAB.drawable[before[slots]].all()


def test_a_row_alone_equals_the_row_in_any_batch():
  """With attention; `every_rule_test` has the other rules."""
  rule = rules.kernel(uniform_grid(4))
  prompts = [[5], [6, 7, 2], [3, 3, 3, 3]]
  config = transformer.TransformerConfig(
    vocab_size=VOCAB.size, num_layers=1, model_dim=16, num_heads=2, mlp_dim=16,
    max_length=16,
  )  # fmt: skip
  params = transformer.init(config, jax.random.key(1))
  network = transformer.denoiser(config)
  together = run(network, from_prompts(prompts, 6, VOCAB), rule, params=params)
  for row, prompt in enumerate(prompts):
    length = len(prompt) + 6
    # The shortest without its padding; the others in one compiled shape.
    canvas = from_rows(
      [[*prompt, *[None] * 6]], VOCAB, length=None if row == 0 else 10
    )
    alone = run(network, canvas, rule, params=params, row_ids=jnp.array([row]))
    np.testing.assert_array_equal(
      alone.ids[0, :length], together.ids[row, :length]
    )


def test_temperature_one_gives_distinct_answers_and_zero_one():
  logits = jnp.full((16, VOCAB.size), -jnp.inf).at[:, jnp.array([4, 5])].set(0)
  canvas = from_prompts([[]] * 64, 16, VOCAB)
  for draw, low, high in [(draws.categorical(), 60, 64), (GREEDY, 1, 1)]:
    result = run(
      TABLE, canvas, rules.by_confidence(4), params=logits, draw=draw
    )
    distinct = len({tuple(row) for row in result.ids.tolist()})
    assert low <= distinct <= high


@pytest.mark.parametrize('num_steps', [1, 2, 5, 10])
def test_greedy_accuracy_does_not_depend_on_steps_or_key(num_steps):
  right = jax.random.randint(jax.random.key(9), (10,), 2, VOCAB.size)
  p = jnp.full((10, VOCAB.size), 0.4 / 6)
  p = p.at[jnp.arange(10), right].set(0.6)
  for seed in range(2):
    result = run(
      TABLE, from_prompts([[]], 10, VOCAB), rules.by_confidence(num_steps),
      params=jnp.log(p), draw=GREEDY, seed=seed,
    )  # fmt: skip
    np.testing.assert_array_equal(result.ids[0], right)


def test_a_network_sure_of_mask_commits_none():
  logits = jnp.zeros((10, VOCAB.size)).at[:, VOCAB.mask_id].set(20.0)
  canvas = from_prompts([[]] * 100, 10, VOCAB)
  result = run(TABLE, canvas, rules.kernel(uniform_grid(4)), params=logits)
  assert not (result.ids == VOCAB.mask_id).any()
  assert VOCAB.drawable[result.ids].all()


def test_ids_without_a_token_are_never_drawn():
  vocab = Vocab(size=12, mask_id=9, forbidden_ids=(10, 11))

  def flat(params, ids, t, positions):
    return jnp.zeros((*ids.shape, 12))

  result = sampling.sample(
    stub(flat), (), jax.random.key(0), from_prompts([[]] * 100, 100, vocab),
    vocab=vocab, rule=rules.by_confidence(1),
    draw=draws.categorical(temperature=5.0),
  )  # fmt: skip
  assert set(np.unique(result.ids)) == set(range(9))


@pytest.mark.parametrize(
  ('ids_of_bad', 'bad'),
  [(5, jnp.nan), (5, jnp.inf), (slice(2, None), -jnp.inf)],
  ids=['NaN', 'infinite', 'none left'],
)
def test_unusable_logits_raise_and_name_the_row(ids_of_bad, bad):
  logits = jnp.zeros((2, 4, VOCAB.size)).at[1, 2, ids_of_bad].set(bad)
  canvas = from_prompts([[], []], 4, VOCAB)
  rule = rules.by_confidence(2)
  with pytest.raises(ValueError, match=r'non-finite logits.*row\(s\) \[1\]'):
    run(LOGITS, canvas, rule, params=logits)


def test_an_outer_jit_leaves_the_check_of_logits_to_the_caller():
  canvas = from_prompts([[], []], 4, VOCAB)

  @jax.jit
  def compiled(logits):
    return run(LOGITS, canvas, rules.by_confidence(2), params=logits)

  result = compiled(jnp.full((2, 4, VOCAB.size), jnp.nan))
  with pytest.raises(ValueError, match=r'non-finite logits.*row\(s\) \[0, 1\]'):
    sampling.check_finite(result)


def test_one_program_for_a_second_prompt_of_the_same_shape():
  def counted(params, ids, t, positions):
    return traced(ids)

  @chex.assert_max_traces(n=1)
  def traced(ids):
    return jnp.zeros((*ids.shape, VOCAB.size))

  network = stub(counted)
  for prompt, seed in [([5, 6], 0), ([7, 8], 1)]:
    # Rules and draws are made anew: equal settings are the same object.
    run(
      network, from_prompts([prompt], 4, VOCAB),
      rules.kernel(uniform_grid(4)), seed=seed,
      draw=draws.categorical(temperature=0.7),
    )  # fmt: skip


def test_the_program_does_not_grow_with_the_steps():
  def lines(num_steps):
    lowered = jax.jit(
      lambda canvas: run(UNIFORM, canvas, rules.kernel(uniform_grid(num_steps)))
    ).lower(from_prompts([[]], 64, VOCAB))
    return len(lowered.as_text().splitlines())

  assert abs(lines(64) - lines(8)) <= 0.1 * lines(8)


def test_sampling_works_inside_an_outer_jit():
  canvas = from_prompts([[5]], 4, VOCAB)
  rule = rules.kernel(uniform_grid(3))
  inside = jax.jit(lambda canvas: run(UNIFORM, canvas, rule).ids)(canvas)
  np.testing.assert_array_equal(inside, run(UNIFORM, canvas, rule).ids)


def test_marginals_stay_when_commits_run_in_parallel():
  """iid tokens: any number of steps samples them exactly."""
  p = jnp.array([0, 0, 0.5, 0.25, 0.125, 0.125, 0, 0, 0])
  logits = jnp.tile(jnp.log(p), (10, 1))
  canvas = from_prompts([[]] * 500, 10, VOCAB)
  ids = np.asarray(
    run(TABLE, canvas, rules.by_confidence(3), params=logits).ids
  )
  share = np.bincount(ids.ravel(), minlength=9) / ids.size
  # Five standard deviations of the largest share.
  assert np.abs(share - p).max() < 5 * 0.0071


def test_without_a_confident_slot_a_threshold_still_writes_one_a_call():
  """A uniform network of 50 real tokens, confidence 0.02 everywhere."""
  vocab = Vocab(size=52, mask_id=1, pad_id=0)

  def flat(params, ids, t, positions):
    return jnp.zeros((*ids.shape, 52))

  result = sampling.sample(
    stub(flat), (), jax.random.key(0), from_prompts([[]], 6, vocab),
    vocab=vocab, rule=rules.threshold(0.9), trajectory=True,
  )  # fmt: skip
  assert result.calls == 6
  masked = (np.asarray(result.trajectory[:, 0]) == 1).sum(1)
  np.testing.assert_array_equal(masked, [5, 4, 3, 2, 1, 0])


def test_rows_stop_when_they_are_done_and_the_batch_with_the_last():
  """Row b is sure of its first b + 1 tokens; the others take one call each."""
  logits = jnp.zeros((3, 6, VOCAB.size))
  for b in range(3):
    logits = logits.at[b, : b + 1, 5].set(20.0)
  canvas = from_prompts([[], [], []], 6, VOCAB)
  result = run(
    LOGITS, canvas, rules.threshold(0.9), params=logits, trajectory=True
  )
  np.testing.assert_array_equal(result.calls_per_row, [6, 5, 4])
  assert result.calls == 6
  np.testing.assert_array_equal(result.calls_per_block, [6])
  np.testing.assert_allclose(result.tokens_per_call, [1.0, 6 / 5, 6 / 4])
  np.testing.assert_array_equal(result.trajectory[4, 2], result.ids[2])
  np.testing.assert_allclose(
    result.masked_fraction[:, 2], np.array([6, 3, 2, 1, 0, 0]) / 6
  )


def test_a_call_that_nobody_needs_is_not_made():
  """The cached kernel calls once more only after a row has changed."""
  calls = []

  def counted(params, ids, t, positions):
    jax.debug.callback(lambda: calls.append(1))
    return jnp.zeros((*ids.shape, VOCAB.size))

  network = stub(counted)._replace(time_free=True)
  canvas = from_prompts([[], [5]], 3, VOCAB)
  result = run(network, canvas, rules.kernel(uniform_grid(40), cached=True),
               trajectory=True)  # fmt: skip
  jax.effects_barrier()
  assert len(calls) == result.calls < 40
  assert (result.calls_per_row <= 3).all()
  assert result.calls >= result.calls_per_row.max()
  # A row needs one call, and one more after each change but the last.
  path = np.concatenate([canvas.ids[None], result.trajectory])
  changed = (path[1:] != path[:-1]).any(2).sum(0)
  np.testing.assert_array_equal(result.calls_per_row, changed)


def test_proposals_are_not_reused_for_a_network_that_reads_the_time():
  with pytest.raises(ValueError, match='time_free'):
    run(
      UNIFORM, from_prompts([[]], 3, VOCAB),
      rules.kernel(uniform_grid(4), cached=True),
    )  # fmt: skip


def test_a_planner_sees_the_canvas_with_the_candidates_filled_in():
  """Its favourite token is kept, all others are taken back."""
  right = jnp.array([4, 5, 6, 7])

  def planner(params, ids, canvas, slots):
    at = functools.partial(jnp.take_along_axis, indices=slots, axis=1)
    return jnp.where(at(ids) == params[at(canvas.positions)], 0.0, -5.0)

  options = {'planner': planner, 'planner_params': right}
  rule = rules.path_planning(4, planner=rules.external_planner)
  canvas = from_prompts([[]] * 40, 4, VOCAB)
  with_planner = run(UNIFORM, canvas, rule, **options).ids
  without = run(UNIFORM, canvas, rules.by_confidence(4)).ids
  # 160 tokens, 1/7 right by chance.
  assert (without == right).mean() < 0.3 < (with_planner == right).mean()
  with pytest.raises(ValueError, match='the sampler has none'):
    run(UNIFORM, canvas, rule)
  with pytest.raises(ValueError, match='without a planner'):
    run(UNIFORM, canvas, rule, planner_params=right)


def test_calls_can_be_watched():
  seen = []
  run(
    UNIFORM, from_prompts([[5]], 4, VOCAB), rules.by_confidence(3),
    on_call=lambda calls, most, ids: seen.append(
      (int(calls), most, int((ids == VOCAB.mask_id).sum()))
    ),
  )  # fmt: skip
  jax.effects_barrier()
  assert sorted(seen) == [(1, 3, 2), (2, 3, 1), (3, 3, 0)]


def test_a_guided_call_counts_twice():
  canvas = from_prompts([[5], [6]], 4, VOCAB)
  for scale, per_step in [(0.0, 1), (1.0, 2), (-1.0, 1)]:
    result = run(
      UNIFORM, canvas, rules.by_confidence(3),
      guidance=guide(canvas, VOCAB, scale),
    )  # fmt: skip
    assert result.calls == 3 * per_step
    np.testing.assert_array_equal(result.calls_per_row, [3 * per_step] * 2)
    np.testing.assert_array_equal(result.calls_per_block, [3 * per_step])


def test_a_repetition_penalty_keeps_to_the_document():
  """All tokens alike: the lowest id, unless it stands beside the slot."""
  lowest = int(np.flatnonzero(VOCAB.drawable)[0])
  canvas = from_rows([[lowest, None]], VOCAB)
  draw = draws.categorical(
    temperature=0.0, repetition_penalty=2.0, neighbourhood=1
  )
  ids = [
    run(UNIFORM, rows, rules.by_confidence(1), draw=draw).ids[0, 1]
    for rows in (canvas, canvas._replace(segments=jnp.array([[0, 1]])))
  ]
  assert ids[0] > ids[1] == lowest


def test_a_network_is_fed_the_level_at_which_the_share_is_masked():
  canvas = from_prompts([[5]], 4, VOCAB)
  result = run(UNIFORM, canvas, rules.left_to_right(2), schedule=cosine())
  # sin(pi/2 t) masked: half of the slots at t = arcsin(1/2) / (pi/2).
  np.testing.assert_allclose(result.requested_t[:, 0], [1, 1 / 3], atol=1e-6)


def test_documents_packed_in_a_row_have_noise_of_their_own():
  rows = from_rows([[None] * 16], VOCAB)
  second = jnp.arange(16)[None] >= 8
  packed = rows._replace(
    positions=rows.positions % 8, segments=second.astype(jnp.int32)
  )
  rule = rules.kernel(uniform_grid(2))
  ids = run(UNIFORM, packed, rule).ids[0]
  assert ids[:8].tolist() != ids[8:].tolist()
  # The first one is as it would be alone.
  alone = run(UNIFORM, from_rows([[None] * 8], VOCAB, length=16), rule).ids
  np.testing.assert_array_equal(alone[0, :8], ids[:8])


def test_nan_where_a_corrector_reads_it_raises():
  def nan_at_tokens(params, ids, t, positions):
    return jnp.where(ids == VOCAB.mask_id, 0.0, jnp.nan)[..., None] * jnp.ones(
      VOCAB.size
    )

  canvas = from_prompts([[], []], 4, VOCAB)
  rule = rules.refined(rules.by_confidence(2), 1, 1)
  with pytest.raises(ValueError, match='non-finite'):
    run(stub(nan_at_tokens), canvas, rule)
  planned = rules.path_planning(2, planner=rules.external_planner)
  with pytest.raises(ValueError, match='non-finite'):
    run(
      UNIFORM, canvas, planned,
      planner=lambda params, ids, canvas, slots: jnp.full(slots.shape, jnp.nan),
    )  # fmt: skip


def test_what_was_made_for_another_canvas_is_refused():
  canvas = from_prompts([[5], [6], [7]], 4, VOCAB)
  one_row = from_prompts([[5]], 4, VOCAB)
  short = from_prompts([[5], [6], [7]], 3, VOCAB)
  for options, message in [
    ({'guidance': guide(one_row, VOCAB, 1.0)}, 'guidance is of a canvas'),
    (
      {'constraint': constrain(one_row, [[None, [5], *[None] * 3]], VOCAB)},
      'constraint is of a canvas',
    ),
    ({'blocks': blocks_of(one_row, 2)}, 'blocks are not of a canvas'),
    ({'blocks': blocks_of(short, 3)}, 'leave out generation slots'),
  ]:
    with pytest.raises(ValueError, match=message):
      run(UNIFORM, canvas, rules.by_confidence(1), **options)
