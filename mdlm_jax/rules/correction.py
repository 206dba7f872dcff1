"""Rules that rank committed tokens anew: path planning, edits, refinement.

They read what the network says of tokens that it sees. One that copies its
visible input, such as the exact denoiser, is certain of all of them: it edits
none, and takes back by position only.
"""

from collections.abc import Callable

import jax.numpy as jnp

from mdlm_jax.checks import check_integer
from mdlm_jax.interning import interned
from mdlm_jax.reverse import top_eligible
from mdlm_jax.rules.contract import Proposal, Row, Rule, Update
from mdlm_jax.rules.log_probs import log_probs_of
from mdlm_jax.schedules import plan_counts


def self_planner(row: Row, proposal: Proposal):
  """Self-planning: the denoiser's own log-probability of each slot's token.

  That is the candidate at a masked slot, and the token that stands at a
  committed one, both untempered.
  """
  return jnp.where(
    row.masked,
    log_probs_of(proposal.candidate_ids, proposal),
    log_probs_of(row.ids, proposal),
  )


def external_planner(row: Row, proposal: Proposal):
  """Trained planning: the scores of the sampler's `planner` at every slot.

  Raises:
    ValueError: the sampler has no planner.
  """
  del row
  if proposal.planner is None:
    raise ValueError('the rule reads a planner, and the sampler has none')
  return proposal.planner


def bert_planner(row: Row, proposal: Proposal):
  """BERT-planning: `external_planner` at committed slots, own at masked ones.

  The external scores must be log-probabilities, to compare with the denoiser's.

  Raises:
    ValueError: the sampler has no planner.
  """
  return jnp.where(
    row.masked,
    log_probs_of(proposal.candidate_ids, proposal),
    external_planner(row, proposal),
  )


@interned
def path_planning(
  num_steps: int,
  *,
  eta: float = 1.0,
  counts: Callable = plan_counts,
  planner: Callable = self_planner,
) -> Rule:
  """P2: at each call all open slots compete for the places that are planned.

  Candidates of masked slots and committed tokens are ranked together by the
  planner's score, that of committed tokens times eta. The best stay or are
  written, as many as the plan has reached; the rest is MASK (Peng et al. 2025,
  arXiv 2502.03540, algorithm 1 with its top-k update). Scores are
  log-probabilities, at most 0, so a larger eta takes back more: with 0
  committed tokens stay, with 1 they are ranked like candidates.

  The published code scores a fresh sample at committed slots; here it is the
  token that stands there, as the paper defines it.

  Args:
    num_steps: network calls, at least 1.
    eta: stochasticity strength, at least 0.
    counts: `counts(num_open, num_steps) -> [num_steps]`: by how many the number
      of committed slots grows at each call.
    planner: `planner(row, proposal) -> [K]`: `self_planner`, `bert_planner`,
      `external_planner`.

  Returns:
    The rule.

  Raises:
    ValueError: for `eta` that is negative or not finite, `num_steps` below 1,
      or as `counts` raises.

  Example:
    >>> path_planning(4, eta=2.0).calls(num_slots=10)
    4
  """
  if not 0 <= eta < float('inf'):
    raise ValueError(f'{eta=} must be finite and at least 0')
  counts(0, num_steps)  # Raises now and not inside a trace.

  def init(noise, row, num_ids):
    del noise, num_ids
    return jnp.cumsum(counts(row.open.sum(), num_steps)), None

  def update(noise, step, row, proposal, state):
    del noise
    scores = planner(row, proposal)
    # 0 times -inf is NaN, and at 0 a committed token wins every tie.
    scaled = eta * scores if eta else jnp.inf
    keep = top_eligible(
      jnp.where(row.masked, scores, scaled), row.open, state[step]
    )
    return Update(
      row.masked & keep, state, remask=row.open & ~row.masked & ~keep
    )

  return Rule(lambda num_slots: num_steps, update, init=init)


@interned
def editing(rule: Rule, threshold: float, max_rounds: int) -> Rule:
  """Replaces committed tokens when the model has come to prefer another one.

  At each call the wrapped rule writes masked slots, and every committed token
  whose candidate differs and has a probability above `threshold` is replaced by
  it at once. When no slot is masked any more the edits go on, until a call
  changes nothing or `max_rounds` calls found no MASK (the token-to-token edits
  of LLaDA2.1, with its limit on mask-free calls).

  Args:
    rule: how masked slots are filled; it must not take tokens back.
    threshold: probability of the candidate, untempered, in [0, 1); strictly
      above it replaces.
    max_rounds: most calls after the window is full, at least 0.

  Returns:
    The rule; adaptive, with at most max_rounds calls more than `rule`.

  Raises:
    ValueError: for numbers out of range, or a rule whose proposals have no
      logits; at the first call for a rule that takes tokens back.

  Example:
    >>> from mdlm_jax.rules.planned import by_confidence
    >>> editing(by_confidence(4), 0.9, max_rounds=2).calls(num_slots=10)
    6
  """
  if not 0 <= threshold < 1:
    raise ValueError(f'{threshold=} must be in [0, 1)')
  check_integer('max_rounds', max_rounds, 0)
  _check_logits(rule)

  def init(noise, row, num_ids):
    state, t = rule.init(noise, row, num_ids)
    return (state, jnp.int32(0)), t

  def update(noise, step, row, proposal, state):
    inner_state, rounds = state
    fill, is_over = _fill(rule, noise, step, row, proposal, inner_state)
    if fill.remask is not None:
      raise ValueError('editing wraps rules that take nothing back')
    write = row.masked & (fill.write | is_over)
    edit = (
      row.open
      & ~row.masked
      & (proposal.candidate_ids != row.ids)
      & (jnp.exp(log_probs_of(proposal.candidate_ids, proposal)) > threshold)
    )
    was_full = ~row.masked.any()
    is_full = ~(row.masked & ~write).any()
    rounds += was_full
    settled = was_full & ~edit.any()
    return Update(
      write | edit,
      (fill.state, rounds),
      fill.t,
      done=is_full & (settled | (rounds >= max_rounds)),
    )

  def cells(step, row, proposal, state):
    last = rule.calls(row.masked.shape[0]) - 1
    return rule.cells(min(step, last), row, proposal, state[0])

  return Rule(
    lambda num_slots: rule.calls(num_slots) + max_rounds,
    update,
    noise=rule.noise,
    init=init,
    cells=cells,
    adaptive=True,
    edits=True,
  )


@interned
def refined(rule: Rule, rounds: int, count: int) -> Rule:
  """Takes back and rewrites the weakest tokens, `rounds` times, after a rule.

  From the last call of the wrapped rule on, every MASK is written, and the
  `count` committed tokens to which the current prediction gives the lowest
  probability become MASK in the same call, to be written in the next one.
  Nothing is taken back on the very last call. The network is fed the level of
  the share of MASK at every call, whatever levels the wrapped rule asks for.

  Args:
    rule: what fills the window first.
    rounds: number of extra calls, at least 1.
    count: how many tokens each takes back, at least 1.

  Returns:
    The rule, with exactly `rounds` calls more than `rule` (of an adaptive rule
    exactly `rounds` after the call that finished the window).

  Raises:
    ValueError: for numbers out of range, or a rule whose proposals have no
      logits.

  Example:
    >>> from mdlm_jax.rules.planned import by_confidence
    >>> refined(by_confidence(4), rounds=2, count=1).calls(num_slots=10)
    6
  """
  check_integer('rounds', rounds, 1)
  check_integer('count', count, 1)
  _check_logits(rule)

  def init(noise, row, num_ids):
    state, _ = rule.init(noise, row, num_ids)
    return (state, jnp.int32(0)), None

  def update(noise, step, row, proposal, state):
    inner_state, finished = state
    fill, is_over = _fill(rule, noise, step, row, proposal, inner_state)
    finishing = is_over | (finished > 0)
    if rule.adaptive:
      left = row.masked & ~fill.write
      finishing |= ~left.any() if fill.done is None else fill.done
    weakest = top_eligible(
      -log_probs_of(row.ids, proposal),
      row.open & ~row.masked,
      count,
      max_count=count,
    )
    remask = finishing & (finished < rounds) & weakest
    if fill.remask is not None:
      remask |= ~finishing & fill.remask
    return Update(
      jnp.where(finishing, row.masked, fill.write),
      (fill.state, finished + finishing),
      remask=remask,
      done=finished >= rounds,
    )

  def cells(step, row, proposal, state):
    inner_state, finished = state
    last = rule.calls(row.masked.shape[0]) - 1
    inner = rule.cells(min(step, last), row, proposal, inner_state)
    if finished == 0 and (step < last or rule.adaptive):
      return inner
    # The rule's noise decides nothing any more: one case of it will do.
    _, noise = next(iter(inner))
    return [(1.0, noise)]

  return rule._replace(
    calls=lambda num_slots: rule.calls(num_slots) + rounds,
    update=update,
    init=init,
    cells=cells,
  )


def _fill(rule, noise, step, row, proposal, state):
  """What the wrapped rule decides, and whether its last call is now or past."""
  last = rule.calls(row.masked.shape[0]) - 1
  fill = rule.update(noise, jnp.minimum(step, last), row, proposal, state)
  return fill, step >= last


def _check_logits(rule):
  if rule.reuses:
    raise ValueError(
      'a rule that reuses proposals has no logits to compare tokens by'
    )
