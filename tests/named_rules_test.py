"""The names of the rules."""

import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import draws, named_rules, rules, sampling, schedules
from mdlm_jax.canvas import from_rows
from mdlm_jax.predict import Denoiser
from mdlm_jax.rules import sigmas
from mdlm_jax.vocab import Vocab

VOCAB = Vocab(size=6, mask_id=1, pad_id=0)
SOURCE = pathlib.Path(named_rules.__file__).read_text()


def _public_functions(module, returned):
  return {
    name
    for name, function in vars(module).items()
    if inspect.isfunction(function)
    and inspect.signature(function).return_annotation == returned
  }


def test_every_public_rule_has_a_name():
  constructors = _public_functions(rules, rules.Rule)
  assert {'kernel', 'klass', 'remasking', 'editing'} <= constructors
  named = set(re.findall(r'rules\.(\w+)', SOURCE))
  assert constructors <= named
  schedules_of_sigma = set(
    re.findall(r'\ndef ([a-z]\w+)', inspect.getsource(sigmas))
  )
  not_schedules = {'bounds', 'mask_levels', 'check_sigmas'}
  assert schedules_of_sigma - not_schedules <= set(
    re.findall(r'sigmas\.(\w+)', SOURCE)
  )


def test_settings_are_explained_and_read_by_some_rule():
  read = set()
  for rule in [*named_rules.RULES.values(), *named_rules.WRAPPERS.values()]:
    read |= set(rule.settings)
    assert set(rule.scores) <= set(draws.SCORES)
  assert read == set(named_rules.SETTINGS)
  table = named_rules.table()
  for name in [*named_rules.RULES, *named_rules.WRAPPERS]:
    assert table.count(f'\n  {name} ') == 1


def _run(rule):
  """ids and calls of a network that prefers id 2 + the slot, modulo 4."""

  def features(params, cache, ids, **unused):
    wanted = 2 + jnp.arange(ids.shape[1]) % 4
    return jax.nn.one_hot(wanted, VOCAB.size)[None] * params, ()

  denoiser = Denoiser(features, lambda params, hidden: hidden, time_free=True)
  return sampling.sample(
    denoiser,
    jnp.float32(3.0),
    jax.random.key(0),
    from_rows([[5, *[None] * 5]], VOCAB),
    vocab=VOCAB,
    rule=rule,
    draw=draws.categorical(temperature=0.0),
  )


@pytest.mark.parametrize('name', named_rules.RULES)
def test_every_name_composes_with_the_loop(name):
  """Traced only: the rules' own tests run them."""
  rule = named_rules.named_rule(
    name, 3 if named_rules.RULES[name].plans else None
  )
  result = jax.eval_shape(lambda: _run(rule))
  assert result.ids.shape == (1, 6)
  assert result.requested_t.shape == (rule.calls(6), 1)


@pytest.mark.parametrize('name', ['remdm_loop', 'threshold'])
def test_a_named_rule_fills_a_row(name):
  rule = named_rules.named_rule(
    name, 3 if named_rules.RULES[name].plans else None
  )
  np.testing.assert_array_equal(_run(rule).ids, [[5, 3, 4, 5, 2, 3]])


# Each setting beside another value than its default, and the constructor's own
# object for it.
GRID = schedules.cosine_grid(3)
COUNTS = schedules.grid_counts(GRID)


@pytest.mark.parametrize(
  ('name', 'settings', 'expected'),
  [
    ('kernel', {'grid': 'cosine'}, rules.kernel(GRID)),
    ('cached_kernel', {'grid': 'cosine'}, rules.kernel(GRID, cached=True)),
    ('binomial', {'grid': 'cosine'}, rules.by_binomial_confidence(GRID)),
    ('first_hitting', {'per_call': 2}, rules.first_hitting(per_call=2)),
    ('random', {'grid': 'cosine'}, rules.by_confidence(3, counts=COUNTS)),
    (
      'confidence',
      {'grid': 'floor'},
      rules.by_confidence(3, counts=schedules.floor_counts()),
    ),
    (
      'maskgit',
      {'choice_temperature': 2.0},
      rules.maskgit(3, 2.0, counts=COUNTS),
    ),
    (
      'sampled_confidence',
      {'alg_temp': 2.0, 'grid': 'cosine'},
      rules.by_sampled_confidence(3, 2.0, counts=COUNTS),
    ),
    (
      'left_to_right',
      {'grid': 'cosine'},
      rules.left_to_right(3, counts=COUNTS),
    ),
    ('dilated', {'dilation': 3}, rules.dilated(3)),
    ('threshold', {'threshold': 0.5}, rules.threshold(0.5)),
    (
      'quota_threshold',
      {'threshold': 0.5, 'grid': 'cosine'},
      rules.quota_threshold(3, 0.5, counts=COUNTS),
    ),
    ('factor', {'factor': 0.5}, rules.factor(0.5)),
    ('entropy_bound', {'gamma': 0.5}, rules.entropy_bound(0.5)),
    (
      'klass',
      {'threshold': 0.5, 'kl': 0.1, 'history': 3},
      rules.klass(0.5, 0.1, history=3),
    ),
    (
      'remdm_cap',
      {'eta': 0.3, 'grid': 'cosine'},
      rules.remasking(GRID, sigmas.cap(GRID, 0.3)),
    ),
    (
      'remdm_rescale',
      {'eta': 0.3, 'grid': 'cosine'},
      rules.remasking(GRID, sigmas.rescale(GRID, 0.3)),
    ),
    (
      'remdm_conf',
      {'eta': 0.3, 'grid': 'cosine'},
      rules.remasking(GRID, sigmas.rescale(GRID, 0.3), by_confidence=True),
    ),
    (
      'remdm_switch',
      {'eta': 0.3, 't_switch': 0.9, 'grid': 'cosine'},
      rules.remasking(GRID, sigmas.switch(GRID, sigmas.cap(GRID, 0.3), 0.9)),
    ),
    (
      'remdm_loop',
      {
        'eta': 0.3,
        't_on': 0.9,
        't_off': 0.1,
        'alpha_on': 0.5,
        'grid': 'cosine',
      },
      rules.remasking(
        *sigmas.loop(GRID, 0.3, t_on=0.9, t_off=0.1, alpha_on=0.5)
      ),
    ),
    (
      'forward_backward',
      {'grid': 'cosine'},
      rules.remasking(GRID, sigmas.forward_backward(GRID)),
    ),
    (
      'flow_corrector',
      {'beta': 0.2, 'grid': 'cosine'},
      rules.remasking(GRID, sigmas.flow_corrector(GRID, 0.2)),
    ),
    (
      'psi',
      {'kappa': 0.2, 'grid': 'cosine'},
      rules.remasking(GRID, sigmas.psi(GRID, 0.2)),
    ),
    (
      'p2',
      {'eta': 0.2, 'grid': 'cosine'},
      rules.path_planning(3, eta=0.2, counts=COUNTS),
    ),
  ],
)
def test_settings_reach_the_constructor(name, settings, expected):
  num_steps = 3 if named_rules.RULES[name].plans else None
  assert named_rules.named_rule(name, num_steps, **settings) is expected
  assert named_rules.named_rule(name, num_steps) is not expected


def test_the_schedule_reaches_the_kernel():
  cosine = schedules.cosine()
  grid = schedules.uniform_grid(2)
  assert named_rules.named_rule('kernel', 2, cosine) is rules.kernel(
    grid, cosine
  )


@pytest.mark.parametrize(
  ('arguments', 'settings', 'message'),
  [
    (('nothing', 2), {}, "'nothing' must be one of kernel, "),
    (('kernel',), {}, 'must be told its number of calls'),
    (('threshold', 3), {}, 'num_steps=3 cannot act with the rule threshold'),
    (('factor',), {'gamma': 1.0}, 'gamma cannot act with the rule factor'),
    (('kernel', 2), {'grid': 'floor'}, 'grid=floor gives counts'),
    (('factor',), {'factor': -1.0}, 'value=-1.0 must be'),
  ],
)
def test_mistakes_are_named(arguments, settings, message):
  with pytest.raises(ValueError, match=message):
    named_rules.named_rule(*arguments, **settings)
