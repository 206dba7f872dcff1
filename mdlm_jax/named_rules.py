"""Names of the rules, for command lines and tables of results.

The library takes functions; a name is looked up here, once. A builder gets the
calls of a window and the masking schedule, and the settings of its rule.
"""

import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mdlm_jax import draws, rules, schedules
from mdlm_jax.rules import sigmas
from mdlm_jax.rules.contract import Rule
from mdlm_jax.schedules import Schedule


class Setting(NamedTuple):
  """A number or a name that some rules read.

  Attributes:
    kind: float, int or str.
    help: what it says, one sentence.
    choices: what a name may be.
  """

  kind: type
  help: str
  choices: tuple[str, ...] = ()


class NamedRule(NamedTuple):
  """A named rule.

  Attributes:
    summary: what it does, one line.
    build: `build(num_steps, schedule, **settings) -> Rule`; of a wrapper
      `build(rule, **settings) -> Rule`.
    settings: the settings that it reads, with their defaults.
    plans: whether the user says how many calls a window takes.
    scores: names of the scores that it can rank by, the default first; none
      where positions do not depend on the draw's score.
    takes_back: whether committed tokens may become MASK again.
  """

  summary: str
  build: Callable[..., Rule]
  settings: Mapping[str, Any]
  plans: bool = True
  scores: tuple[str, ...] = ()
  takes_back: bool = False


GRIDS: dict[str, Callable] = {
  'uniform': schedules.uniform_grid,
  'cosine': schedules.cosine_grid,
}
# How many slots each of n calls writes.
COUNTS: dict[str, Callable] = {
  'uniform': lambda n: schedules.plan_counts,
  'cosine': lambda n: schedules.grid_counts(schedules.cosine_grid(n)),
  'floor': lambda n: schedules.floor_counts(),
}

SETTINGS: dict[str, Setting] = {
  'grid': Setting(
    str,
    'How much each call reveals: equally much, little at first (cosine), or '
    "Dream's rounding down (floor, of counts only).",
    tuple(COUNTS),
  ),
  'per_call': Setting(int, 'Events of the reverse process per call.'),
  'choice_temperature': Setting(
    float, 'Gumbel noise on the log confidence of the first call; it fades.'
  ),
  'alg_temp': Setting(
    float, 'Temperature at which positions are drawn by confidence.'
  ),
  'dilation': Setting(int, 'Ratio of successive strides.'),
  'threshold': Setting(float, 'Confidence from which a slot is written.'),
  'factor': Setting(
    float, 'The n best are written while (n + 1) (1 - confidence) is below it.'
  ),
  'gamma': Setting(
    float, 'Bound in nats on the error of drawing slots independently.'
  ),
  'kl': Setting(
    float, 'Nats by which the prediction of a settled slot may have moved.'
  ),
  'history': Setting(int, 'Calls for which a slot must have been settled.'),
  'eta': Setting(
    float,
    'How strongly tokens are taken back: the largest sigma (cap, switch, '
    'loop), a share of the feasible sigma (rescale, conf), or the factor on '
    'the log-probability of committed tokens (p2).',
  ),
  't_switch': Setting(float, 'Noise level at which remasking begins.'),
  't_on': Setting(float, 'Time at which the loop begins.'),
  't_off': Setting(float, 'Time at which the loop ends.'),
  'alpha_on': Setting(float, 'Share of visible tokens in the loop.'),
  'beta': Setting(float, 'Weight of the backward rate.'),
  'kappa': Setting(float, 'Share of the reverse posterior.'),
  'edit_threshold': Setting(
    float,
    'Replaces a committed token when another one is drawn with a probability '
    'above this, beside any rule that takes nothing back.',
  ),
  'edit_rounds': Setting(int, 'Most calls for edits after the last MASK.'),
  'refine_rounds': Setting(
    int, 'Calls after the rule that rewrite the weakest tokens.'
  ),
  'refine_count': Setting(int, 'Tokens that each of them takes back.'),
}

_ANY_SCORE = (
  'row_maximum',
  *(name for name in draws.SCORES if name != 'row_maximum'),
)
_SHARES = ('row_maximum', 'probability', 'margin')  # In [0, 1].


def _by_grid(constructor, **options):
  """A builder of a rule on a grid of noise levels."""
  return lambda n, schedule, grid: constructor(
    _levels(grid, n), schedule, **options
  )


def _by_counts(constructor):
  """A builder of a rule with planned counts."""
  return lambda n, schedule, grid: constructor(n, counts=COUNTS[grid](n))


def _remasking(sigma, **options):
  """A builder of the remasking kernel; `sigma` is a function of `sigmas`."""

  def build(n, schedule, grid, **settings):
    levels = _levels(grid, n)
    sigma_of_step = sigma(levels, schedule=schedule, **settings)
    return rules.remasking(levels, sigma_of_step, schedule, **options)

  return build


def _loop(n, schedule, grid, **settings):
  times = _levels(grid, n)
  levels, sigma_of_step = sigmas.loop(times, schedule=schedule, **settings)
  return rules.remasking(levels, sigma_of_step, schedule)


def _switched_cap(grid, eta, t_switch, schedule):
  return sigmas.switch(grid, sigmas.cap(grid, eta, schedule), t_switch)


def _levels(grid, n):
  if grid not in GRIDS:
    raise ValueError(
      f'grid={grid} gives counts, not noise levels; it must be one of '
      f'{", ".join(GRIDS)}'
    )
  return GRIDS[grid](n)


_UNIFORM = {'grid': 'uniform'}

RULES: dict[str, NamedRule] = {
  'kernel': NamedRule(
    'the exact reverse process on a grid', _by_grid(rules.kernel), _UNIFORM
  ),
  'cached_kernel': NamedRule(
    'the same law, without the calls that change nothing',
    _by_grid(rules.kernel, cached=True),
    _UNIFORM,
  ),
  'first_hitting': NamedRule(
    'the exact reverse process, from event to event',
    lambda n, schedule, per_call: rules.first_hitting(
      schedule, per_call=per_call
    ),
    {'per_call': 1},
    plans=False,
  ),
  'confidence': NamedRule(
    'the most confident candidates first',
    _by_counts(rules.by_confidence),
    _UNIFORM,
    scores=_ANY_SCORE,
  ),
  'random': NamedRule(
    'positions in random order',
    _by_counts(rules.by_confidence),
    _UNIFORM,
    scores=('random',),
  ),
  'maskgit': NamedRule(
    'by confidence with noise that fades',
    lambda n, schedule, choice_temperature, grid: rules.maskgit(
      n, choice_temperature, counts=COUNTS[grid](n)
    ),
    {'choice_temperature': 4.5, 'grid': 'cosine'},
    scores=_SHARES,
  ),
  'sampled_confidence': NamedRule(
    'positions drawn by confidence',
    lambda n, schedule, alg_temp, grid: rules.by_sampled_confidence(
      n, alg_temp, counts=COUNTS[grid](n)
    ),
    {'alg_temp': 0.1, 'grid': 'uniform'},
    scores=_ANY_SCORE,
  ),
  'binomial': NamedRule(
    'as many as the kernel reveals, the most confident ones',
    _by_grid(rules.by_binomial_confidence),
    _UNIFORM,
    scores=_ANY_SCORE,
  ),
  'left_to_right': NamedRule(
    'in reading order', _by_counts(rules.left_to_right), _UNIFORM
  ),
  'dilated': NamedRule(
    'groups of distant positions, coarse to fine',
    lambda n, schedule, dilation: rules.dilated(dilation),
    {'dilation': 2},
    plans=False,
  ),
  'threshold': NamedRule(
    'every candidate of some confidence, at least one',
    lambda n, schedule, threshold: rules.threshold(threshold),
    {'threshold': 0.9},
    plans=False,
    scores=_ANY_SCORE,
  ),
  'quota_threshold': NamedRule(
    'every candidate above some confidence, at least as many as planned',
    lambda n, schedule, threshold, grid: rules.quota_threshold(
      n, threshold, counts=COUNTS[grid](n)
    ),
    {'threshold': 0.95, 'grid': 'uniform'},
    scores=_ANY_SCORE,
  ),
  'factor': NamedRule(
    'the more confident the candidates, the more of them',
    lambda n, schedule, factor: rules.factor(factor),
    {'factor': 1.0},
    plans=False,
    scores=_SHARES,
  ),
  'entropy_bound': NamedRule(
    'as many as may be drawn independently',
    lambda n, schedule, gamma: rules.entropy_bound(gamma),
    {'gamma': 0.1},
    plans=False,
  ),
  'klass': NamedRule(
    'confident candidates whose prediction has settled',
    lambda n, schedule, threshold, kl, history: rules.klass(
      threshold, kl, history=history
    ),
    {'threshold': 0.9, 'kl': 0.01, 'history': 2},
    plans=False,
    scores=_ANY_SCORE,
  ),
  'remdm_cap': NamedRule(
    'remasking kernel, sigma at most eta',
    _remasking(sigmas.cap),
    {'eta': 0.02, 'grid': 'uniform'},
    takes_back=True,
  ),
  'remdm_rescale': NamedRule(
    'remasking kernel, eta times the largest sigma',
    _remasking(sigmas.rescale),
    {'eta': 0.02, 'grid': 'uniform'},
    takes_back=True,
  ),
  'remdm_conf': NamedRule(
    'remasking kernel, the unlikely tokens first',
    _remasking(sigmas.rescale, by_confidence=True),
    {'eta': 1.0, 'grid': 'uniform'},
    takes_back=True,
  ),
  'remdm_switch': NamedRule(
    'remdm_cap from some noise level on',
    _remasking(_switched_cap),
    {'eta': 0.02, 't_switch': 0.55, 'grid': 'uniform'},
    takes_back=True,
  ),
  'remdm_loop': NamedRule(
    'unmask, remask at a constant level, finish',
    _loop,
    {
      'eta': 0.02,
      't_on': 0.55,
      't_off': 0.05,
      'alpha_on': 0.9,
      'grid': 'uniform',
    },
    takes_back=True,
  ),
  'forward_backward': NamedRule(
    'a step forward in noise after each step back',
    _remasking(sigmas.forward_backward),
    _UNIFORM,
    takes_back=True,
  ),
  'flow_corrector': NamedRule(
    'the corrector of discrete flow matching',
    _remasking(sigmas.flow_corrector),
    {'beta': 0.5, 'grid': 'uniform'},
    takes_back=True,
  ),
  'psi': NamedRule(
    'the reverse posterior mixed with fresh noise',
    _remasking(sigmas.psi),
    {'kappa': 0.95, 'grid': 'uniform'},
    takes_back=True,
  ),
  'p2': NamedRule(
    'candidates and committed tokens compete (path planning)',
    lambda n, schedule, eta, grid: rules.path_planning(
      n, eta=eta, counts=COUNTS[grid](n)
    ),
    {'eta': 1.0, 'grid': 'uniform'},
    takes_back=True,
  ),
}

# They wrap another rule. The first setting of each asks for it.
WRAPPERS: dict[str, NamedRule] = {
  'edit': NamedRule(
    'replaces committed tokens when the model prefers others',
    lambda rule, edit_threshold, edit_rounds: rules.editing(
      rule, edit_threshold, edit_rounds
    ),
    {'edit_threshold': None, 'edit_rounds': 8},
  ),
  'refine': NamedRule(
    'rewrites the weakest tokens at the end',
    lambda rule, refine_rounds, refine_count: rules.refined(
      rule, refine_rounds, refine_count
    ),
    {'refine_rounds': None, 'refine_count': 1},
    takes_back=True,
  ),
}


def named_rule(
  name: str,
  num_steps: int | None = None,
  schedule: Schedule = schedules.linear(),
  **settings,
) -> Rule:
  """The rule of a name.

  Args:
    name: a key of `RULES`.
    num_steps: network calls of a window, for the rules that are told.
    schedule: the masking schedule.
    **settings: in place of the defaults of the rule.

  Returns:
    The rule.

  Raises:
    ValueError: for an unknown name, settings that the rule does not read, calls
      for a rule that finds out by itself or none for another, or as the
      constructor raises.

  Example:
    >>> named_rule('confidence', 4, grid='cosine').calls(num_slots=10)
    4
    >>> named_rule('threshold', threshold=0.8).calls(num_slots=10)
    10
  """
  if name not in RULES:
    raise ValueError(f'rule {name!r} must be one of {", ".join(RULES)}')
  rule = RULES[name]
  for setting in settings:
    if setting not in rule.settings:
      raise ValueError(
        f'{setting} cannot act with the rule {name}, which reads '
        f'{", ".join(rule.settings)}'
      )
  if rule.plans and num_steps is None:
    raise ValueError(f'the rule {name} must be told its number of calls')
  if not rule.plans and num_steps is not None:
    raise ValueError(
      f'{num_steps=} cannot act with the rule {name}, which finds its number '
      'of calls by itself'
    )
  return rule.build(num_steps, schedule, **{**rule.settings, **settings})


def readers(setting: str) -> list[str]:
  """Names of the rules that read a setting.

  Example:
    >>> readers('threshold')
    ['threshold', 'quota_threshold', 'klass']
  """
  return [name for name, rule in RULES.items() if setting in rule.settings]


def table() -> str:
  """The rules in groups, with the defaults of their settings, as text."""
  rules_of = {
    'Calls as --steps says': lambda r: r.plans and not r.takes_back,
    'Calls found by the rule itself': lambda r: not r.plans,
    'Tokens may be taken back': lambda r: r.plans and r.takes_back,
  }
  groups = {
    title: {name: rule for name, rule in RULES.items() if belongs(rule)}
    for title, belongs in rules_of.items()
  }
  lines = []
  for title, group in {**groups, 'Beside another rule': WRAPPERS}.items():
    lines += ['', f'{title}:']
    for name, rule in group.items():
      values = (
        f'{setting}={"..." if default is None else default}'
        for setting, default in rule.settings.items()
      )
      lines += textwrap.wrap(
        f'{rule.summary} ({", ".join(values)})',
        80,
        initial_indent=f'  {name:20s}',
        subsequent_indent=' ' * 22,
      )
  return '\n'.join(lines[1:])
