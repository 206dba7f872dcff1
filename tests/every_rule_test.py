"""What holds under every rule, whatever the rows."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import rules, sampling
from mdlm_jax.canvas import Canvas, from_rows
from mdlm_jax.predict import Denoiser
from mdlm_jax.schedules import cosine_grid, floor_counts, uniform_grid
from mdlm_jax.vocab import Vocab

PAD, MASK = 0, 1
VOCAB = Vocab(size=9, mask_id=MASK, pad_id=PAD)
LENGTH = 8
GRID = uniform_grid(4)
CAP = rules.sigmas.cap(GRID, 0.3)

MONOTONE = {
  'kernel': rules.kernel(GRID),
  'kernel, cached': rules.kernel(uniform_grid(6), cached=True),
  'first hitting': rules.first_hitting(),
  'first hitting, three at once': rules.first_hitting(per_call=3),
  'confidence': rules.by_confidence(4),
  'confidence, more steps than slots': rules.by_confidence(10),
  'confidence, floor': rules.by_confidence(5, counts=floor_counts()),
  'maskgit': rules.maskgit(4, 4.5),
  'sampled confidence': rules.by_sampled_confidence(4, 0.2),
  'binomial': rules.by_binomial_confidence(cosine_grid(4)),
  'left to right': rules.left_to_right(4),
  'dilated': rules.dilated(),
  'threshold': rules.threshold(0.3),
  'quota threshold': rules.quota_threshold(3, 0.3),
  'factor': rules.factor(1.6),
  'entropy bound': rules.entropy_bound(2.0),
  'klass': rules.klass(0.2, 0.5),
}
CORRECTING = {
  'remasking': rules.remasking(GRID, CAP),
  'remasking, confidence': rules.remasking(GRID, CAP, by_confidence=True),
  'path planning': rules.path_planning(4, eta=1.5),
  'path planning, external': rules.path_planning(
    4, planner=rules.external_planner
  ),
  'editing': rules.editing(rules.threshold(0.3), 0.1, 3),
  'refined': rules.refined(rules.by_confidence(3), 2, 2),
}
EVERY = MONOTONE | CORRECTING
ROWS = [
  [5, None, None, 6, None, None, None, None],
  [None, 4, None, 1, None],  # A prompt may hold the id of MASK,
  [0, 3, None, None, None, None],  # or of PAD.
]


@functools.cache
def network():
  """Counts of the visible tokens and a table of logical positions."""

  def features(params, cache, ids, *, valid, positions, **unused):
    counts = (jax.nn.one_hot(ids, VOCAB.size) * valid[..., None]).sum(1)
    return params[positions] - 0.5 * counts[:, None], ()

  return Denoiser(features, lambda params, hidden: hidden, time_free=True)


def random_planner(params, ids, canvas, slots):
  """Scores of the filled canvas, a function of tokens and positions."""
  at = functools.partial(jnp.take_along_axis, indices=slots, axis=1)
  return -jnp.abs(jnp.sin(1.0 + at(ids) * 3 + at(canvas.positions) * 5))


def run(name, canvas, row_ids=None, **options):
  if name == 'path planning, external':
    options['planner'] = random_planner
  return sampling.sample(
    network(),
    2 * jax.random.normal(jax.random.key(7), (LENGTH, VOCAB.size)),
    jax.random.key(1), canvas, vocab=VOCAB, rule=EVERY[name], trajectory=True,
    row_ids=jnp.arange(3) if row_ids is None else row_ids, **options,
  )  # fmt: skip


@pytest.mark.parametrize('name', EVERY)
def test_what_a_rule_must_never_do(name):
  canvas = from_rows(ROWS, VOCAB, length=LENGTH)
  result = run(name, canvas)
  slots = np.asarray(canvas.generation_slots)
  path = np.concatenate([canvas.ids[None], result.trajectory])
  # Prompt and padding never change, whatever ids they hold.
  assert (path[:, ~slots] == np.asarray(canvas.ids)[~slots]).all()
  # Every slot is filled, with a token that may be drawn.
  np.testing.assert_array_equal(path[-1], result.ids)
  assert VOCAB.drawable[path[-1][slots]].all()
  # Committed tokens stay, unless the rule is there to correct them.
  committed = slots & (path != MASK)
  stays = (path[1:] == path[:-1]) | ~committed[:-1]
  if name in MONOTONE:
    assert stays.all()
    assert not result.changes.any()
  else:
    assert not stays.all()
  np.testing.assert_array_equal(result.changes, replacements(path, slots))
  # Calls are the plan, or at most it.
  rule = EVERY[name]
  most = rule.calls(LENGTH)
  if rule.adaptive:
    assert result.calls == result.calls_per_row.max() <= most
  elif rule.reuses:  # The batch calls when any row needs it.
    assert result.calls_per_row.max() <= result.calls <= most
  else:
    assert result.calls == most
    np.testing.assert_array_equal(result.calls_per_row, [most] * 3)
  open_slots = slots.sum(1)
  if name in MONOTONE and (rule.adaptive or rule.reuses):
    assert (result.calls_per_row <= open_slots).all()


def replacements(path, slots):
  """How often the token of each slot became another one."""
  counts = np.zeros(slots.shape, int)
  last = path[0]
  for ids in path[1:]:
    counts += slots & (ids != MASK) & (last != MASK) & (ids != last)
    last = np.where(ids == MASK, last, ids)
  return counts


@pytest.mark.parametrize('name', EVERY)
def test_a_row_does_not_depend_on_the_rows_beside_it_or_on_padding(name):
  result = run(name, from_rows(ROWS, VOCAB, length=LENGTH))
  others = [[2, None], ROWS[2], ROWS[0]]
  moved = run(
    name, from_rows(others, VOCAB, length=LENGTH), jnp.array([9, 2, 0])
  )
  np.testing.assert_array_equal(moved.ids[1], result.ids[2])
  np.testing.assert_array_equal(moved.ids[2], result.ids[0])
  np.testing.assert_array_equal(
    moved.calls_per_row[1:], np.asarray(result.calls_per_row)[[2, 0]]
  )
  # The second row, of five slots, with its padding on the left.
  right = from_rows(ROWS, VOCAB, length=LENGTH)
  left = Canvas(*(x.at[1].set(jnp.roll(x[1], 3)) for x in right[:4]))
  shifted = run(name, left)
  np.testing.assert_array_equal(shifted.ids[1, 3:], result.ids[1, :5])
  np.testing.assert_array_equal(shifted.ids[0], result.ids[0])


@pytest.mark.parametrize('name', ['dilated', 'first hitting', 'klass'])
def test_a_row_does_not_depend_on_the_length_of_the_canvas(name):
  together = run(name, from_rows(ROWS, VOCAB, length=LENGTH))
  alone = run(name, from_rows([ROWS[2]], VOCAB), jnp.array([2]))
  np.testing.assert_array_equal(alone.ids[0], together.ids[2, :6])
  assert alone.calls == together.calls_per_row[2]


@pytest.mark.parametrize('name', ['kernel', 'threshold', 'remasking'])
def test_eager_execution_gives_the_same(name):
  canvas = from_rows([row[:3] for row in ROWS], VOCAB)
  compiled = run(name, canvas)
  with jax.disable_jit():
    eager = run(name, canvas)
  np.testing.assert_array_equal(eager.trajectory, compiled.trajectory)
  assert eager.calls == compiled.calls


def test_every_public_rule_is_here():
  public = {
    name
    for name in rules.__all__
    if inspect.isfunction(getattr(rules, name))
    and inspect.signature(getattr(rules, name)).return_annotation is rules.Rule
  }
  with open(__file__, encoding='utf-8') as file:
    source = file.read()
  assert public == {name for name in public if f'rules.{name}(' in source}
  assert len(public) > 15
