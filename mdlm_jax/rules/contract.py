"""What a rule sees, what it decides, and what it is made of."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Row(NamedTuple):
  """What a rule sees of one row: the window, K slots. Shapes are `[K]`.

  The window is the whole canvas, or the block that is being decoded.

  Attributes:
    ids: the canvas.
    open: slots of the window that generation owns.
    masked: open slots whose token is still MASK.
    positions: logical positions.
  """

  ids: Int[Array, 'K']
  open: Bool[Array, 'K']
  masked: Bool[Array, 'K']
  positions: Int[Array, 'K']


class Proposal(NamedTuple):
  """What is proposed for one row; unused fields cost nothing under jit.

  Attributes:
    candidate_ids: the token that would be written. Shape `[K]`.
    confidence: its score. Shape `[K]`.
    logits: float32, -inf at ids that may not be drawn. Shape `[K, V]`. None for
      a rule that `reuses` proposals.
    log_z: log p(v) = logits[v] - log_z. Shape `[K]`, or None as above.
    planner: scores by an external planner, `[K]`, or None without one.
  """

  candidate_ids: Int[Array, 'K']
  confidence: Float[Array, 'K']
  logits: Float[Array, 'K V'] | None
  log_z: Float[Array, 'K'] | None
  planner: Float[Array, 'K'] | None = None


class Update(NamedTuple):
  """What a rule decides for one row.

  Attributes:
    write: slots that receive their candidate. Shape `[K]`. Only masked slots
      are written unless the rule `edits`.
    state: the rule's own state, passed to the next call.
    t: noise level that the next call feeds the network, `[]`; None is the level
      at which the schedule masks the share of the open slots that is MASK.
    remask: committed open slots that become MASK again, `[K]`, or None.
    done: whether the window is finished, `[]`, read of `adaptive` rules; None
      is when no open slot is MASK.
  """

  write: Bool[Array, 'K']
  state: Any = ()
  t: Float[Array, ''] | None = None
  remask: Bool[Array, 'K'] | None = None
  done: Bool[Array, ''] | None = None


def no_noise(row_key, positions):
  """The noise of a rule in which nothing is random."""
  del row_key, positions
  return ()


def _no_state(noise, row, num_ids):
  del noise, row, num_ids
  return (), None


def _one_cell(step, row, proposal, state):
  del step, row, proposal, state
  return [(1.0, ())]


class Rule(NamedTuple):
  """A way to choose positions.

  The prompt, padding and slots outside the window are never touched, whatever a
  rule decides. On the last call the sampler writes every slot that is still
  MASK and takes nothing back, so no MASK is left under any rule.

  Attributes:
    calls: `calls(num_slots) -> int`: network calls for a window of so many
      slots, static; of an adaptive rule the most.
    update: `update(noise, step, row, proposal, state) -> Update`, a
      deterministic function of the noise. `step` counts the calls of the
      window.
    noise: `noise(row_key, positions) -> noise`: the noise of one step.
    init: `init(noise, row, num_ids) -> state, t`: the state and the noise level
      of the first call (None as in `Update`). The noise may decide
      times only.
    cells: `cells(step, row, proposal, state) -> iterable of (probability,
      noise)`: the law of the noise as finitely many cases, for exact
      enumeration on a small row. It sees what `update` sees, in numpy.
    adaptive: whether a row may be done before the last call.
    reuses: whether a row that did not change keeps its proposal in place of a
      network call. It needs a denoiser that is `time_free`; the proposal has no
      logits then.
    edits: whether committed slots may be written.
  """

  calls: Callable
  update: Callable
  noise: Callable = no_noise
  init: Callable = _no_state
  cells: Callable = _one_cell
  adaptive: bool = False
  reuses: bool = False
  edits: bool = False
