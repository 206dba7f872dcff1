"""As many slots per call as the prediction allows.

Every rule here writes at least one MASK slot per call while there is one (where
quotas are planned, while they are above 0), so a window of K slots needs at
most K calls. Ties go to the lowest position.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mdlm_jax.checks import check_integer
from mdlm_jax.draws import negative_entropy
from mdlm_jax.interning import interned
from mdlm_jax.reverse import top_eligible
from mdlm_jax.rules.contract import Proposal, Row, Rule, Update
from mdlm_jax.schedules import plan_counts


@interned
def threshold(value: float) -> Rule:
  """Every slot of confidence at least `value`, and always the best one.

  Parallel decoding by a confidence threshold (Wu et al. 2025, Fast-dLLM, arXiv
  2505.22618, section 3.3). With an exact denoiser it is exact only where it
  writes one slot at a time, by a score that does not depend on the drawn token.

  Args:
    value: in units of the draw's score, finite; a probability above 1 is never
      reached, and one slot is written per call.

  Returns:
    The rule.

  Raises:
    ValueError: for a `value` that is not finite.

  Example:
    >>> threshold(0.9).calls(num_slots=10)
    10
  """
  _check(value, 'value', minimum=-math.inf)

  def update(noise, step, row, proposal, state):
    del noise, step
    passed = row.masked & (proposal.confidence >= value)
    return Update(passed | _best(row, proposal), state)

  return _until_filled(update)


@interned
def quota_threshold(
  num_steps: int, value: float, *, counts: Callable = plan_counts
) -> Rule:
  """All slots of confidence above `value`, and never fewer than planned.

  Where fewer slots than the quota of the call exceed `value`, the quota's best
  are written (the decoder of LLaDA2, Bie et al. 2025, arXiv 2512.15745, as it
  was published with the weights). Quotas are those of a window without prompt:
  one that is partly filled is done earlier. LLaDA2.1 wants one slot a call at
  least, which is `num_steps` of the window's length, and edits: `editing`
  around this rule.

  With an exact denoiser it is exact only where it writes one slot at a time, by
  a score that does not depend on the drawn token.

  Args:
    num_steps: most network calls of a window, at least 1.
    value: in units of the draw's score, finite; only what is strictly above it
      exceeds it.
    counts: `counts(num_slots, num_steps) -> [num_steps]`: the quotas, whose sum
      is `num_slots`.

  Returns:
    The rule.

  Raises:
    ValueError: for a `value` that is not finite, or as `counts` raises.

  Example:
    >>> quota_threshold(4, 0.95).calls(num_slots=10)
    4
  """
  _check(value, 'value', minimum=-math.inf)
  counts(0, num_steps)  # Raises now and not inside a trace.

  def init(noise, row, num_ids):
    del noise, num_ids
    return counts(row.masked.shape[0], num_steps), None

  def update(noise, step, row, proposal, quotas):
    del noise
    passed = row.masked & (proposal.confidence > value)
    best = top_eligible(proposal.confidence, row.masked, quotas[step])
    return Update(passed | best, quotas)

  return Rule(lambda num_slots: num_steps, update, init=init, adaptive=True)


@interned
def factor(value: float) -> Rule:
  """The more confident the candidates, the more of them at once.

  With the confidences of the MASK slots in descending order, c_1 >= c_2 >= ...,
  slots are written as long as (n + 1) (1 - c_n) < value, the first always (Wu
  et al. 2025, Fast-dLLM, arXiv 2505.22618, section 3.3: n tokens of confidence
  above 1 - 1 / (n + 1) have the mode of the product as the mode of the joint).
  The reference code also writes all slots when only the last one fails; this
  rule does not. The score is a probability: `draws.probability` there.

  With an exact denoiser it is exact only where it writes one slot at a time, by
  a score that does not depend on the drawn token.

  Args:
    value: the factor f, finite and at least 0; at 0 one slot per call.

  Returns:
    The rule.

  Raises:
    ValueError: for a `value` that is negative or not finite.

  Example:
    >>> factor(1.0).calls(num_slots=10)
    10
  """
  _check(value, 'value')

  def update(noise, step, row, proposal, state):
    del noise, step
    best_first = _descending(proposal.confidence, row.masked)
    n = jnp.arange(1, best_first.shape[0] + 1)
    passed = (n + 1) * (1 - best_first) < value
    count = jnp.maximum(_leading(passed), 1)
    return Update(top_eligible(proposal.confidence, row.masked, count), state)

  return _until_filled(update)


@interned
def entropy_bound(gamma: float) -> Rule:
  """As many slots as keep the error of drawing them independently small.

  With the entropies of the MASK slots in ascending order, the largest prefix
  whose sum minus its largest entropy is at most `gamma` (Ben-Hamu et al. 2025,
  EB-Sampler, arXiv 2505.24857). With the exact denoiser that
  difference bounds the KL divergence from the joint law of the slots to the
  product of their marginals, so that at 0 the rule samples exactly: it writes
  what is certain, and one slot more. The entropies are those of the model over
  the ids that may be drawn, in nats, whatever the draw and its score.

  Args:
    gamma: nats per call, finite and at least 0.

  Returns:
    The rule.

  Raises:
    ValueError: for a `gamma` that is negative or not finite.

  Example:
    >>> entropy_bound(0.1).calls(num_slots=10)
    10
  """
  _check(gamma, 'gamma')

  def update(noise, step, row, proposal, state):
    del noise, step
    # Rounding may leave a certain slot a little above 0.
    certainty = jnp.minimum(negative_entropy(proposal, None, None), 0)
    ascending = -_descending(certainty, row.masked)
    # The sum minus the largest: the sum of those before.
    before = jnp.concatenate([jnp.zeros(1), jnp.cumsum(ascending)[:-1]])
    count = _leading(before <= gamma)
    return Update(top_eligible(certainty, row.masked, count), state)

  return _until_filled(update)


@interned
def klass(confidence: float, kl: float, *, history: int = 1) -> Rule:
  """Slots that are confident and whose prediction has settled.

  A slot is written when its confidence exceeds `confidence` and the divergence
  KL(p_now || p_before) between the predictions of successive calls was below
  `kl` at each of the last `history` calls; where there is none, the best one
  (Kim et al. 2025, KLASS, arXiv 2511.05664). The first call of a window has
  nothing to compare with. The state holds the logits, `[K, V]`.

  With an exact denoiser it is exact only where it writes one slot at a time, by
  a score that does not depend on the drawn token.

  Args:
    confidence: bound in units of the draw's score, finite.
    kl: bound in nats, finite and above 0.
    history: at least 1.

  Returns:
    The rule.

  Raises:
    ValueError: for settings out of range.

  Example:
    >>> klass(0.9, 0.01, history=2).calls(num_slots=10)
    10
  """
  _check(confidence, 'confidence', minimum=-math.inf)
  if not (math.isfinite(kl) and kl > 0):
    raise ValueError(f'{kl=} must be finite and above 0')
  check_integer('history', history, 1)

  def init(noise, row, num_ids):
    del noise
    num_slots = row.masked.shape[0]
    logits = jnp.zeros((num_slots, num_ids), jnp.result_type(float))
    return (logits, logits[:, 0], jnp.zeros(num_slots, jnp.int32)), None

  def update(noise, step, row, proposal, state):
    del noise
    *before, settled = state
    now = proposal.logits, proposal.log_z
    close = (divergence(*now, *before) < kl) & (step > 0)
    settled = jnp.where(close, settled + 1, 0)
    ready = (settled >= history) & (proposal.confidence > confidence)
    write = row.masked & ready
    write |= _best(row, proposal) & ~write.any()
    return Update(write, (*now, settled))

  return _until_filled(update, init)


def divergence(
  logits: Float[Array, 'K V'],
  log_z: Float[Array, 'K'],
  other_logits: Float[Array, 'K V'],
  other_log_z: Float[Array, 'K'],
) -> Float[Array, 'K']:
  """KL(p || q) in nats, with 0 log 0 = 0; infinite where p is not below q.

  Either distribution is given as log p(v) = logits[v] - log_z.

  Example:
    >>> p, q = (jnp.log(jnp.array([x])) for x in ([2.0, 2, 0], [1.0, 3, 0]))
    >>> log_z = jnp.log(jnp.array([4.0]))
    >>> print(f'{divergence(p, log_z, q, log_z)[0]:.4f}')
    0.1438
  """
  p = jnp.exp(logits - log_z[:, None])
  # No array of log-probabilities: their difference is that of the logits.
  difference = jnp.where(p > 0, logits - other_logits, 0.0)
  return (p * difference).sum(-1) - (log_z - other_log_z)


def _until_filled(update: Callable, init: Callable | None = None) -> Rule:
  rule = Rule(lambda num_slots: num_slots, update, adaptive=True)
  return rule if init is None else rule._replace(init=init)


def _best(row: Row, proposal: Proposal) -> Bool[Array, 'K']:
  return top_eligible(proposal.confidence, row.masked, 1, max_count=1)


def _descending(scores, masked):
  """Scores of the masked slots from the best on, then -inf."""
  best_first, _ = jax.lax.top_k(
    jnp.where(masked, scores, -jnp.inf), scores.shape[0]
  )
  return best_first


def _leading(passed: Bool[Array, 'K']):
  """How many are true before the first that is false."""
  return jnp.cumprod(passed.astype(jnp.int32)).sum()


def _check(value, name, minimum=0.0):
  if not (math.isfinite(value) and value >= minimum):
    allowed = 'finite' + (' and at least 0' if minimum == 0 else '')
    raise ValueError(f'{name}={value} must be {allowed}')
