"""Guidance against the formula, and its law against a sum done by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_joints

from mdlm_jax import canvas as canvas_lib
from mdlm_jax import oracle, rules
from mdlm_jax.guidance import Guidance, combine, guide
from mdlm_jax.predict import Denoiser, predict
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=5, mask_id=1, pad_id=0)
# Rows of different length: a prompt and answers, a hole in between.
CANVAS = canvas_lib.from_rows([[2, 3, None, None], [4, None, 2]], VOCAB)


def ask(denoiser, params, canvas, guidance, cache=None, **options):
  return predict(
    denoiser, params, cache, canvas.ids, vocab=VOCAB,
    t=jnp.ones(canvas.ids.shape[0]), valid=canvas.valid,
    positions=canvas.positions, guidance=guidance, **options,
  )  # fmt: skip


def recording_denoiser(seen):
  """Logits `params[0]` for a canvas without MASK at slot 0, else `params[1]`.

  The canvas of every call that runs is appended to `seen`; the cache counts
  the calls that it was handed to.
  """

  def features(params, cache, ids, **unused):
    jax.debug.callback(lambda ids: seen.append(np.asarray(ids)), ids)
    null = (ids[:, :1] == VOCAB.mask_id)[..., None]
    logits = jnp.where(null, params[1], params[0])
    hidden = jnp.broadcast_to(logits, ids.shape + logits.shape[-1:])
    return hidden, (0 if cache is None else cache) + 1

  return Denoiser(features, lambda params, hidden: hidden)


@pytest.mark.parametrize(
  ('scale', 'expected', 'calls'),
  [
    (0, [2, 0, 0], 1),
    (1, [4, 0, 0], 2),
    (-1, [0, 0, 0], 1),
    (0.5, [3, 0, 0], 2),
  ],
)
def test_scale_0_is_the_condition_and_minus_1_the_null(scale, expected, calls):
  cond, null = jnp.array([0.0, 0, 2, 0, 0]), jnp.zeros(5)
  seen = []
  guidance = guide(CANVAS, VOCAB, scale)
  prediction, _ = ask(recording_denoiser(seen), (cond, null), CANVAS, guidance)
  jax.effects_barrier()
  assert len(seen) == guidance.calls_per_step == calls
  log_p = prediction.logits - prediction.log_z[..., None]
  exact = np.asarray(expected) - np.log(np.exp(expected).sum())
  np.testing.assert_allclose(log_p[0, 2, 2:], exact, atol=1e-6)


def test_formula_in_both_writings():
  cond, null = np.random.default_rng(0).normal(size=(2, 3, 7)).astype('f4')
  got = combine(jnp.array(cond), jnp.array(null), 1.5)
  np.testing.assert_allclose(got, 2.5 * cond - 1.5 * null, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
    got, null + 2.5 * (cond - null), rtol=1e-5, atol=1e-6
  )
  assert combine(jnp.array([1.0], 'bfloat16'), jnp.zeros(1), 1).dtype == 'f4'


@pytest.mark.parametrize('scale', [-0.5, 0.5, 3.0])
def test_impossible_under_the_condition_stays_impossible(scale):
  inf = np.inf
  cond = jnp.array([-inf, -inf, 0.0, 1.0])
  null = jnp.array([-inf, 5.0, 2.0, -inf])
  got = combine(cond, null, scale)
  assert (got[:2] == -inf).all()
  # What the null condition alone excludes has ratio infinity, or weight zero.
  np.testing.assert_array_equal(got[3], inf if scale > 0 else -inf)
  np.testing.assert_allclose(got[2], -2 * scale)


def test_a_shared_constant_is_not_magnified():
  cond = jnp.array([2.0**20 + 0.5, 2.0**20])
  got = combine(cond, jnp.full(2, 2.0**20), 9.0)
  np.testing.assert_array_equal(got - 2.0**20, [5.0, 0.0])


def test_the_null_pass_masks_the_condition_only():
  """Never padding, never the answer, however far it is written."""
  seen = []
  ids = CANVAS.ids.at[0, 2].set(4)
  canvas = CANVAS._replace(ids=ids)
  params = (jnp.zeros(5), jnp.ones(5))
  ask(recording_denoiser(seen), params, canvas, guide(CANVAS, VOCAB, 1.0))
  jax.effects_barrier()
  by_sum = sorted(seen, key=np.sum)
  np.testing.assert_array_equal(by_sum[1], ids)
  np.testing.assert_array_equal(by_sum[0], [[1, 1, 4, 1], [1, 1, 1, 0]])


def test_a_null_condition_of_the_callers_own():
  null_ids = jnp.full((2, 4), 3)
  guidance = guide(CANVAS, VOCAB, 1.0, null_ids=null_ids)
  got = guidance.null_canvas(CANVAS.ids)
  np.testing.assert_array_equal(got, [[3, 3, 1, 1], [3, 1, 3, 0]])


def test_caches_are_a_pair():
  denoiser = recording_denoiser([])
  params = (jnp.zeros(5), jnp.ones(5))
  guidance = guide(CANVAS, VOCAB, 1.0)
  _, cache = ask(denoiser, params, CANVAS, guidance)
  assert cache == (1, 1)
  _, cache = ask(denoiser, params, CANVAS, guidance, cache=(4, 8))
  assert cache == (5, 9)
  _, cache = ask(denoiser, params, CANVAS, guide(CANVAS, VOCAB, 0), cache=4)
  assert cache == 5


@pytest.mark.parametrize('scale', [-1, -0.5, 0, 1, 3])
def test_guided_law_is_p_cond_over_p_null_to_the_scale(scale):
  """p(x | c)^(1 + w) p(x)^-w, normalised, for a joint of two symbols."""
  p = {(2, 2): 0.3, (2, 3): 0.1, (2, 4): 0.1, (3, 2): 0.1, (3, 3): 0.4}
  joint = oracle.joint(list(p), list(p.values()))
  canvas = canvas_lib.from_rows([[2, None]], VOCAB)
  prediction, _ = ask(
    oracle.exact_denoiser(VOCAB), joint, canvas, guide(canvas, VOCAB, scale)
  )
  got = jnp.exp(prediction.logits - prediction.log_z[..., None])[0, 1, 2:]
  cond = np.array([0.3, 0.1, 0.1]) / 0.5
  null = np.array([0.4, 0.5, 0.1])
  by_hand = cond ** (1 + scale) * null**-scale
  np.testing.assert_allclose(got, by_hand / by_hand.sum(), rtol=2e-5)


@pytest.mark.parametrize('scale', [-1.0, 2.0])
def test_guided_sampler_has_the_guided_law(scale):
  """Left to right after one given token; the null pass sees the answer only."""
  joint = small_joints.random_joint(5)
  row = [small_joints.B, None, None]
  canvas = canvas_lib.from_rows([row], VOCAB)
  law = small_joints.law_of(
    joint, rules.left_to_right(2), row, guidance=guide(canvas, VOCAB, scale)
  ).probabilities
  p = joint.probabilities.reshape(3, 3, 3)

  def guided(cond, null):
    q = (cond / cond.sum()) ** (1 + scale) * (null / null.sum()) ** -scale
    return q / q.sum()

  first = guided(p[1].sum(-1), p.sum((0, 2)))
  for b, c in np.ndindex(3, 3):
    by_hand = first[b] * guided(p[1, b], p[:, b].sum(0))[c]
    got = law.get((3, b + 2, c + 2), 0.0)
    assert got == pytest.approx(by_hand, abs=1e-9)


def test_what_only_the_null_condition_excludes_is_refused_downstream():
  joint = oracle.joint([(2, 2), (2, 3), (3, 3)])
  canvas = canvas_lib.from_rows([[2, None]], VOCAB)
  guidance = guide(canvas, VOCAB, 1.0, null_ids=jnp.array([[3, 0]]))
  prediction, _ = ask(oracle.exact_denoiser(VOCAB), joint, canvas, guidance)
  assert not jnp.isfinite(prediction.log_z[0, 1])


def test_guidance_works_in_a_window():
  params = jax.random.normal(jax.random.key(0), (2, 4, 5))

  def features(params, cache, ids, *, at, **unused):
    context = jax.nn.one_hot(ids, 5).sum(1, keepdims=True)
    hidden = jnp.sin(params + context)
    return hidden if at is None else jnp.take_along_axis(
      hidden, at[..., None], 1
    ), ()

  denoiser = Denoiser(features, lambda params, hidden: hidden)
  guidance = guide(CANVAS, VOCAB, 2.0)
  whole, _ = ask(denoiser, params, CANVAS, guidance)
  plain, _ = ask(denoiser, params, CANVAS, None)
  at = jnp.array([[2, 3], [1, 2]])
  part, _ = ask(denoiser, params, CANVAS, guidance, at=at)
  taken = jnp.take_along_axis(whole.logits, at[..., None], 1)
  np.testing.assert_allclose(part.logits, taken, rtol=1e-6)
  assert not np.allclose(whole.logits[..., 2:], plain.logits[..., 2:])


def test_scale_is_static_and_the_arrays_are_traced():
  guidance = guide(CANVAS, VOCAB, 2)
  assert isinstance(guidance, Guidance)
  assert len(jax.tree.leaves(guidance)) == 2
  traces = []

  @jax.jit
  def run(guidance):
    traces.append(guidance.scale)
    return guidance.null_canvas(CANVAS.ids)

  run(guidance)
  run(guide(CANVAS, VOCAB, 2.0, null_ids=CANVAS.ids))
  run(guide(CANVAS, VOCAB, 3.0))
  assert traces == [2.0, 3.0]


@pytest.mark.parametrize(
  ('scale', 'options', 'message'),
  [
    (-1.5, {}, 'scale=-1.5 must be finite and at least -1'),
    (float('nan'), {}, 'scale=nan must be'),
    (1.0, {'null_ids': jnp.zeros((1, 4), int)}, r'null_ids has shape \(1, 4\)'),
    (1.0, {'null_ids': jnp.full((2, 4), 5)}, r'null_ids holds 5; .* \[0, 5\)'),
  ],
)
def test_wrong_guidance_is_refused(scale, options, message):
  with pytest.raises(ValueError, match=message):
    guide(CANVAS, VOCAB, scale, **options)


def test_guidance_without_a_condition_is_refused():
  with pytest.raises(ValueError, match='needs a condition'):
    guide(canvas_lib.from_prompts([[]], 3, VOCAB), VOCAB, 1.0)
