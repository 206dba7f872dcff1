"""The axes of decoding as flags of a program.

`define` makes the flags, `check` refuses what could not act, `decoding_of`
turns them into the arguments of `sampling.sample` for one model and canvas.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags

from mdlm_jax import blocks, caches, draws, guidance, named_rules
from mdlm_jax.canvas import Canvas
from mdlm_jax.models import transformer
from mdlm_jax.models.pretrained import Pretrained
from mdlm_jax.rules import Rule
from mdlm_jax.rules.contract import no_noise
from mdlm_jax.schedules import linear

# Flags belong to the program that asks for them, in its --help too.
flags.disclaim_key_flags()

Flags = Mapping[str, flags.FlagHolder]

_KINDS = {float: flags.DEFINE_float, int: flags.DEFINE_integer}
_DISTRIBUTIONS = ('untempered', 'tempered')
_NEIGHBOURHOOD = 16
_REFRESH_INTERVAL = 4
_CACHES = ('none', 'exact', 'prefix', 'dual', 'delayed')


class Chosen(NamedTuple):
  """What the flags say about one model and canvas.

  Attributes:
    static: arguments of `sampling.sample` that are compiled in.
    arrays: its other arguments, which hold arrays.
    num_calls: steps over all blocks; of an adaptive rule the most.
    settings: everything that was chosen, defaults included, for a record.
  """

  static: dict[str, Any]
  arrays: dict[str, Any]
  num_calls: int
  settings: dict[str, Any]


def define() -> Flags:
  """Defines the flags of every axis; returns their holders, by name."""
  holders = [
    flags.DEFINE_enum(
      'rule',
      'confidence',
      list(named_rules.RULES),
      'Which positions a call writes, and which it takes back. All rules are '
      'listed above, with the settings that each reads and their defaults.',
    ),
    flags.DEFINE_integer(
      'steps',
      None,
      'Network calls of a rule that is told, shared equally by the blocks. '
      'Default: one per new token.',
    ),
    flags.DEFINE_enum(
      'score',
      None,
      sorted(draws.SCORES),
      'What counts as confident. Default: row_maximum.',
    ),
    flags.DEFINE_enum(
      'score_distribution',
      None,
      _DISTRIBUTIONS,
      "Whether the score is of the model's distribution (the default), or of "
      'that after penalty, temperature and filters.',
    ),
    flags.DEFINE_float(
      'temperature',
      0.7,
      'Below 1 the likelier tokens gain; 1 is the model itself, 0 takes the '
      'likeliest.',
    ),
    flags.DEFINE_integer('top_k', None, 'Draws from the k likeliest only.'),
    flags.DEFINE_float(
      'top_p',
      None,
      'Draws from the likeliest that hold this probability only.',
    ),
    flags.DEFINE_float(
      'min_p',
      None,
      'Draws from tokens of at least this share of the best probability only.',
    ),
    flags.DEFINE_float(
      'repetition_penalty',
      1.0,
      'Raises the probability of tokens that stand near a slot to this power.',
    ),
    flags.DEFINE_integer(
      'neighbourhood',
      None,
      'How near: tokens to the left and to the right. Default: '
      f'{_NEIGHBOURHOOD}.',
    ),
    flags.DEFINE_float(
      'cfg_scale',
      0.0,
      'Guidance w, away from what the model says without the prompt: logits '
      '(1 + w) cond - w null, two network calls a step. 0 is none.',
    ),
    flags.DEFINE_integer(
      'block_length',
      None,
      'Fills the new tokens block after block, of this many each. Default: all '
      'at once, or --attention_block in a network that attends by blocks.',
    ),
    flags.DEFINE_integer(
      'attention_block',
      None,
      'In a network that attends by blocks, how many tokens see one another '
      'and nothing later. Default: --block_length, else as it was trained.',
    ),
    flags.DEFINE_enum(
      'cache',
      None,
      _CACHES,
      'What a call computes; of the rest it reads stored keys and values. '
      'exact: the open block, for a network that attends by blocks (there the '
      'default). Approximate, for any other: prefix (from the open block on), '
      'dual (the open block), delayed (what is MASK or has just been written).',
    ),
    flags.DEFINE_integer(
      'refresh_interval',
      None,
      'Every so many calls of a block, --cache=delayed computes everything. '
      f'Default: {_REFRESH_INTERVAL}.',
    ),
    flags.DEFINE_bool(
      'audit_cache',
      False,
      'Makes every call without the cache too and shows the largest difference '
      'of a logit.',
    ),
    flags.DEFINE_enum(
      'eos',
      'off',
      ['off', 'forbid', 'last'],
      'The end of a text: written like any token, never, or only where nothing '
      'else is proposed.',
    ),
    flags.DEFINE_bool(
      'stop_at_eos',
      False,
      'A sample takes no further call once its end is written.',
    ),
  ]
  for name, setting in named_rules.SETTINGS.items():
    who = named_rules.readers(name)
    text = setting.help + (f' Of {", ".join(who)}.' if who else '')
    if setting.kind is str:
      holders.append(flags.DEFINE_enum(name, None, setting.choices, text))
    else:
      holders.append(_KINDS[setting.kind](name, None, text))
  return {holder.name: holder for holder in holders}


def check(holders: Flags) -> None:
  """Refuses what could not act, before a model is loaded.

  Raises:
    ValueError: names the flag, what it was and what is allowed.
  """
  name = holders['rule'].value
  rule, wrappers = named_rules.RULES[name], _wrappers(holders)
  readable = {*rule.settings, *(s for w in wrappers for s in w.settings)}
  for setting in named_rules.SETTINGS:
    if not holders[setting].present or setting in readable:
      continue
    for wrapper in named_rules.WRAPPERS.values():
      if setting in wrapper.settings:
        raise ValueError(f'--{setting} needs --{next(iter(wrapper.settings))}')
    raise ValueError(
      f'--{setting} cannot act with --rule={name}; it acts with --rule='
      f'{", ".join(named_rules.readers(setting))}'
    )
  if rule.takes_back and holders['edit_threshold'].present:
    raise ValueError(
      f'--edit_threshold cannot act with --rule={name}, which takes tokens back'
    )
  _check_steps(holders, rule)
  _check_score(holders, rule)
  for flag in ('steps', 'block_length', 'attention_block'):
    value = holders[flag].value
    if value is not None and value < 1:
      raise ValueError(f'--{flag}={value} must be at least 1')
  scale = holders['cfg_scale'].value
  if not (math.isfinite(scale) and scale >= -1):
    raise ValueError(f'--cfg_scale={scale} must be finite and at least -1')
  if holders['refresh_interval'].present:
    if holders['cache'].value != 'delayed':
      raise ValueError('--refresh_interval needs --cache=delayed')
    _cache('delayed', holders['refresh_interval'].value)
  if holders['cache'].value == 'none' and holders['audit_cache'].value:
    raise ValueError('--audit_cache cannot act with --cache=none')
  if holders['stop_at_eos'].value and holders['eos'].value == 'forbid':
    raise ValueError('--stop_at_eos cannot act with --eos=forbid')
  _rule(holders, 1 if rule.plans else None, linear())
  _draw(holders)


def with_attention_block(holders: Flags, model: Pretrained) -> Pretrained:
  """The model, attending by blocks as long as the flags ask.

  `--block_length` new tokens are open at a time; in a network that attends by
  blocks, `--attention_block` tokens see one another and nothing later. Either
  is the other where it is not given, as in published decoders, which have one
  length for both; the first must divide the second, and that the network's own.

  Raises:
    ValueError: an attention block that does not divide that of the network, or
      for a network in which every token sees all others.
  """
  own, asked = model.config.attention_block, holders['attention_block'].value
  if own is None:
    if asked is not None:
      raise ValueError(
        f'--attention_block={asked} cannot act: in this network every token '
        'sees all others; --block_length opens new tokens block after block'
      )
    return model
  flag = 'attention_block' if asked is not None else 'block_length'
  length = holders[flag].value
  if length is None or length == own:
    return model
  if own % length:
    raise ValueError(
      f'--{flag}={length} must divide {own}: this network attends by blocks of '
      'so many tokens'
    )
  config = dataclasses.replace(model.config, attention_block=length)
  return model._replace(config=config, denoiser=transformer.denoiser(config))


def decoding_of(
  holders: Flags,
  model: Pretrained,
  canvas: Canvas,
  *,
  num_equal_rows: int = 1,
) -> Chosen:
  """The arguments of `sampling.sample` that the flags ask for.

  Args:
    holders: from `define`, after `check`.
    model: from `with_attention_block`; gives the vocabulary, the schedule, and
      who sees whom.
    canvas: what is to be filled in; concrete.
    num_equal_rows: how many rows are alike but for their noise.

  Returns:
    What was chosen.

  Raises:
    ValueError: steps that the blocks cannot share, EOS options without an EOS,
      guidance without a prompt, several rows with nothing random, blocks or a
      cache that do not fit who sees whom in the network.
  """
  vocab, attention_block = model.vocab, model.denoiser.attention_block
  value = {name: holder.value for name, holder in holders.items()}
  has_eos_option = value['eos'] != 'off' or value['stop_at_eos']
  if has_eos_option and not vocab.eos_ids:
    option = (
      f'--eos={value["eos"]}' if value['eos'] != 'off' else '--stop_at_eos'
    )
    raise ValueError(f'{option} cannot act: the model has no end of text (EOS)')
  windows = _windows(canvas, value['block_length'], attention_block)
  cache, interval = _chosen_cache(value, model.denoiser)
  num_blocks = 1 if windows is None else windows.count
  num_steps = None
  if named_rules.RULES[value['rule']].plans:
    num_steps = value['steps']
    if num_steps is None and windows is None:
      num_steps = int(canvas.generation_slots.sum(1).max())
    elif num_steps is None:
      num_steps = windows.count * windows.length
  rule = _rule(holders, _steps_of_block(num_steps, windows), model.schedule)
  if (
    num_equal_rows > 1
    and value['temperature'] == 0
    and _score_name(holders) != 'random'
    and rule.noise is no_noise
  ):
    raise ValueError(
      f'--num_samples={num_equal_rows} would be equal samples: nothing is '
      f'random with --temperature=0 and --rule={value["rule"]}'
    )
  arrays = {} if windows is None else {'blocks': windows}
  if value['cfg_scale'] != 0:
    arrays['guidance'] = guidance.guide(canvas, vocab, value['cfg_scale'])
  if value['eos'] == 'forbid':
    vocab = vocab.forbidding(vocab.eos_ids)
  window = canvas.ids.shape[1] if windows is None else windows.length
  return Chosen(
    {
      'vocab': vocab,
      'rule': rule,
      'draw': _draw(holders),
      'schedule': model.schedule,
      'eos_last': value['eos'] == 'last',
      'stop_at_eos': value['stop_at_eos'],
      'cache': _cache(cache, interval),
      'audit_cache': value['audit_cache'],
    },
    arrays,
    num_blocks * rule.calls(window),
    {
      **_settings(holders, num_steps),
      'block_length': None if windows is None else windows.length,
      'attention_block': attention_block,
      'cache': cache,
      'refresh_interval': interval,
    },
  )


def _windows(canvas, length, attention_block) -> blocks.Blocks | None:
  """The blocks that are opened one after another."""
  if attention_block is None:
    return None if length is None else blocks.blocks_of(canvas, length)
  if length is not None and attention_block % length:
    raise ValueError(
      f'--block_length={length} must divide {attention_block}: this network '
      'attends by blocks of so many tokens'
    )
  return blocks.blocks_of(canvas, length or attention_block, aligned=True)


def _chosen_cache(value, denoiser) -> tuple[str, int | None]:
  """The name of the cache policy and its interval, defaults included."""
  is_exact = denoiser.attention_block is not None and denoiser.time_free
  name = value['cache'] or ('exact' if is_exact else 'none')
  if name == 'exact' and denoiser.attention_block is None:
    raise ValueError(
      '--cache=exact cannot act: in this network every token sees all others; '
      'approximate caches are prefix, dual and delayed'
    )
  if name == 'none' and value['audit_cache']:
    raise ValueError('--audit_cache needs --cache')
  if name != 'delayed':
    return name, None
  return name, value['refresh_interval'] or _REFRESH_INTERVAL


def _cache(name, interval=None) -> caches.CachePolicy | None:
  match name:
    case 'none':
      return None
    case 'exact':
      return caches.exact()
    case 'prefix':
      return caches.prefix()
    case 'dual':
      return caches.dual()
    case 'delayed':
      try:
        return caches.delayed(interval)
      except ValueError as error:
        raise ValueError(f'--refresh_{error}') from None


def _steps_of_block(num_steps, windows):
  if num_steps is None or windows is None:
    return num_steps
  try:
    return blocks.steps_per_block(num_steps, windows.count)
  except ValueError as error:
    raise ValueError(
      f'--steps={num_steps} in blocks of {windows.length}: {error}'
    ) from None


def _wrappers(holders) -> list[named_rules.NamedRule]:
  """The wrappers that are asked for."""
  return [
    wrapper
    for wrapper in named_rules.WRAPPERS.values()
    if holders[next(iter(wrapper.settings))].present
  ]


def _rule(holders, num_steps, schedule) -> Rule:
  """The rule with its wrappers."""
  name = holders['rule'].value
  given = _given(holders, named_rules.RULES[name].settings)
  shown = [f'--rule={name}', *(f'--{k}={v}' for k, v in given.items())]
  try:
    rule = named_rules.named_rule(name, num_steps, schedule, **given)
    for wrapper in _wrappers(holders):
      given = _given(holders, wrapper.settings)
      shown += [f'--{k}={v}' for k, v in given.items()]
      rule = wrapper.build(rule, **{**wrapper.settings, **given})
    return rule
  except ValueError as error:
    raise ValueError(f'{" ".join(shown)}: {error}') from None


def _given(holders, settings) -> dict[str, Any]:
  return {s: holders[s].value for s in settings if holders[s].present}


def _draw(holders) -> draws.Draw:
  value = {name: holder.value for name, holder in holders.items()}
  score = _score_name(holders)
  return draws.categorical(
    temperature=value['temperature'],
    top_k=value['top_k'],
    top_p=value['top_p'],
    min_p=value['min_p'],
    repetition_penalty=value['repetition_penalty'],
    neighbourhood=_neighbourhood(holders),
    score=draws.SCORES[score or 'row_maximum'],
    tempered=value['score_distribution'] == 'tempered',
  )


def _neighbourhood(holders) -> int | None:
  if holders['neighbourhood'].present:
    return holders['neighbourhood'].value
  return None if holders['repetition_penalty'].value == 1 else _NEIGHBOURHOOD


def _score_name(holders) -> str | None:
  """The score by which the rule ranks, None where it does not."""
  scores = named_rules.RULES[holders['rule'].value].scores
  if holders['score'].present:
    return holders['score'].value
  return scores[0] if scores else None


def _check_steps(holders, rule):
  if not rule.plans and holders['steps'].present:
    raise ValueError(
      f'--steps={holders["steps"].value} cannot act with --rule='
      f'{holders["rule"].value}, which finds its number of calls by itself'
    )


def _check_score(holders, rule):
  name = holders['rule'].value
  for flag in ('score', 'score_distribution'):
    if holders[flag].present and not rule.scores:
      raise ValueError(
        f'--{flag} cannot act with --rule={name}, which does not rank by it'
      )
  score = holders['score'].value
  if score is not None and score not in rule.scores:
    raise ValueError(
      f'--score={score} cannot act with --rule={name}, which ranks by '
      f'{", ".join(rule.scores)}'
    )


def _settings(holders, num_steps) -> dict[str, Any]:
  """Everything that was chosen; None where nothing reads it."""
  value = {name: holder.value for name, holder in holders.items()}
  score = _score_name(holders)
  read = [named_rules.RULES[value['rule']], *_wrappers(holders)]
  defaults = {k: v for rule in read for k, v in rule.settings.items()}
  return {
    **value,
    **{k: value[k] if holders[k].present else v for k, v in defaults.items()},
    'steps': num_steps,
    'score': score,
    'score_distribution': score
    and (value['score_distribution'] or _DISTRIBUTIONS[0]),
    'neighbourhood': _neighbourhood(holders),
  }
