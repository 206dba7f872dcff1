"""What benchmark tasks ask of a model: scores of answers, and continuations.

Requests of any lengths become batches of few shapes. What a request gets does
not depend on the others, the batch size or the number of devices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

from mdlm_jax import (
  bound_estimators,
  canvas,
  draws,
  evaluation,
  rules,
  sampling,
)
from mdlm_jax.checks import check_integer
from mdlm_jax.decoding_flags import Chosen
from mdlm_jax.models.pretrained import Pretrained

_SAMPLING = ('until', 'do_sample', 'temperature')
_FILTERS = ('top_p', 'top_k', 'min_p')
# The names of the harness for the most new tokens, and its default.
_LENGTHS = ('max_gen_toks', 'max_new_tokens', 'max_tokens')
_DEFAULT_TOKENS = 256

OnProgress = Callable[[int, int], object]
Decoding = Callable[[canvas.Canvas], Chosen]


class Answer(NamedTuple):
  """An answer to be scored.

  Attributes:
    ids: the text before it, then the answer.
    num_given: tokens of the text before it.
    noise_id: answers of one id meet the same masks.
  """

  ids: list[int]
  num_given: int
  noise_id: int

  @property
  def size(self) -> int:
    """Tokens of the answer."""
    return len(self.ids) - self.num_given


class AnswerBounds(NamedTuple):
  """Scores of answers.

  Attributes:
    log_prob: lower bounds on log p(answer | text before it). Shape `[N]`.
    standard_error: of each. Shape `[N]`.
    is_greedy: whether greedy decoding writes the answer, see `score_answers`.
      Shape `[N]`.
  """

  log_prob: Float[np.ndarray, 'N']
  standard_error: Float[np.ndarray, 'N']
  is_greedy: Bool[np.ndarray, 'N']


class Prompt(NamedTuple):
  """A text to go on from.

  Attributes:
    ids: of the text.
    noise_id: prompts of one id have the same random numbers.
  """

  ids: list[int]
  noise_id: int


class Generation(NamedTuple):
  """How a task wants its texts.

  Attributes:
    num_tokens: new tokens.
    until: the text ends before the first of these strings.
    temperature: 0 for greedy decoding.
    filters: names of further settings of its sampling.
  """

  num_tokens: int
  until: tuple[str, ...]
  temperature: float
  filters: tuple[str, ...] = ()


def generation(
  settings: Mapping[str, Any], most_tokens: int | None = None
) -> Generation:
  """Reads the `generation_kwargs` of a task of the lm-eval harness.

  Args:
    settings: 'until', 'max_gen_toks' or one of its other names, 'do_sample' and
      'temperature'; filters, which cannot act on greedy decoding.
    most_tokens: in place of what the task says, if that is more.

  Raises:
    ValueError: a setting of another name; a text of less than one token.

  Example:
    >>> generation({'until': '.', 'do_sample': False, 'top_p': 0.9}, 64)
    Generation(num_tokens=64, until=('.',), temperature=0.0, filters=())
  """
  unknown = sorted(settings.keys() - {*_SAMPLING, *_FILTERS, *_LENGTHS})
  if unknown:
    raise ValueError(f'a task asks for {", ".join(unknown)}, not known here')
  until = settings.get('until') or ()
  tokens = [settings[n] for n in _LENGTHS if settings.get(n) is not None]
  num_tokens = tokens[0] if tokens else _DEFAULT_TOKENS
  check_integer('max_gen_toks', num_tokens, 1)
  temperature = float(settings.get('temperature') or 0)
  if not settings.get('do_sample', temperature > 0):
    temperature = 0.0
  filters = [n for n in _FILTERS if settings.get(n) is not None]
  return Generation(
    min(num_tokens, most_tokens or num_tokens),
    (until,) if isinstance(until, str) else tuple(until),
    temperature,
    tuple(filters) if temperature else (),
  )


def encode_answer(
  model: Pretrained, context: str, answer: str, noise_id: int
) -> Answer:
  """An answer in the tokens of the whole text, as it fits the model.

  White space at the end of the context belongs to the answer, because tokens
  begin with it. Where the whole is longer than the model its beginning is left
  out.

  Raises:
    ValueError: an answer without a token of its own, or longer than the model;
      characters that the tokenizer does not know.
  """
  encode, longest = model.tokenizer.encode, model.config.max_length
  whole = np.asarray(encode(context + answer)).tolist()
  size = len(whole) - len(encode(context.rstrip()))
  if not 1 <= size <= longest:
    raise ValueError(
      f'the answer {answer!r} has {size} tokens, must have 1 to {longest}, the '
      'length of the model'
    )
  ids = whole[-longest:]
  return Answer(ids, len(ids) - size, noise_id)


def score_answers(
  model: Pretrained,
  answers: Sequence[Answer],
  *,
  num_replicates: int = 8,
  num_calls: int | None = None,
  batch_size: int = 32,
  seed: int = 0,
  on_progress: OnProgress | None = None,
) -> AnswerBounds:
  """Bounds of answers of many prompts, see `likelihood.log_prob` for one.

  Args:
    model: the network.
    answers: at least one.
    num_replicates: independent estimates of every score, at least 2.
    num_calls: network calls of one estimate by `exact_count`; None: one per
      token of the answer, by `chain_rule`, which has the smallest standard
      error per call.
    batch_size: answers per network call.
    seed: of all noise.
    on_progress: called with the network calls done and planned.

  Returns:
    The scores. `is_greedy` is of one token per call at temperature 0, the most
    confident first, in exactly the slots of the answer.

  Raises:
    ValueError: as `evaluation.row_bounds`.
  """
  groups = _groups(
    (_row_length(len(a.ids), model.config.max_length), _bucket(a.size))
    for a in answers
  )

  def estimator(size):
    if num_calls is None:
      return bound_estimators.chain_rule(size)
    return bound_estimators.exact_count(num_calls)

  calls = [
    len(evaluation.row_batches(len(members), batch_size))
    * (num_replicates * estimator(size).num_calls + size)
    for (_, size), members in groups.items()
  ]
  found = AnswerBounds(
    *np.zeros((2, len(answers))), np.zeros(len(answers), bool)
  )
  for i, ((length, size), members) in enumerate(groups.items()):
    group = [answers[m] for m in members]
    progress = _within(on_progress, sum(calls[:i]), sum(calls))
    rows = jax.device_get(
      canvas.from_rows([a.ids for a in group], model.vocab, length=length)
    )
    given = np.array([[a.num_given] for a in group])
    answer = rows.valid & (rows.positions >= given)
    noise_ids = np.array([a.noise_id for a in group], np.int32)
    bounds = evaluation.row_bounds(
      model.denoiser,
      model.params,
      jax.random.key(seed),
      rows.ids,
      rows.valid,
      answer,
      vocab=model.vocab,
      estimator=estimator(size),
      num_replicates=num_replicates,
      schedule=model.bound_schedule,
      row_ids=noise_ids,
      batch_size=batch_size,
      on_progress=progress,
    )
    written = _greedy(model, rows, answer, size, batch_size)
    found.log_prob[members] = -bounds.nats
    found.standard_error[members] = bounds.standard_error
    found.is_greedy[members] = ((written == rows.ids) | ~answer).all(1)
  if on_progress is not None:
    on_progress(sum(calls), sum(calls))
  return found


def continuations(
  model: Pretrained,
  prompts: Sequence[Prompt],
  *,
  num_tokens: int,
  decoding: Decoding,
  until: Sequence[str] = (),
  batch_size: int = 32,
  seed: int = 0,
  on_progress: OnProgress | None = None,
) -> list[str]:
  """What the model writes after each prompt, up to the first stop.

  Args:
    model: the network and its tokenizer.
    prompts: at least one; of a long one the beginning is left out.
    num_tokens: new tokens after each prompt.
    decoding: `decoding(canvas)` gives the arguments of `sampling.sample`.
    until: the text ends before the first of these strings, or at an EOS.
    batch_size: prompts per network call.
    seed: of all noise.
    on_progress: called with the network calls done and planned.

  Returns:
    The texts.

  Raises:
    ValueError: `num_tokens` is below 1 or leaves no room in the model; as
      `sampling.sample`.
  """
  longest = model.config.max_length
  if not 1 <= num_tokens <= longest:
    raise ValueError(
      f'{num_tokens=} new tokens must be from 1 to the length {longest} of the '
      'model'
    )
  given = [p.ids[max(len(p.ids) + num_tokens - longest, 0) :] for p in prompts]
  rows = canvas.whole_blocks(
    [[*ids, *[None] * num_tokens] for ids in given],
    model.config.attention_block,
    model.config.max_length,
  )
  groups = _groups(_row_length(len(row), longest) for row in rows)
  batches = [
    (length, np.array(members)[batch], len(members) - start)
    for length, members in groups.items()
    for start, batch in _starts(len(members), batch_size)
  ]
  params, key = evaluation.on_every_device((model.params, jax.random.key(seed)))
  texts = [''] * len(prompts)
  for number, (length, members, num_left) in enumerate(batches):
    filled, noise_ids = evaluation.over_devices(
      (
        canvas.from_rows(
          [rows[m] for m in members], model.vocab, length=length
        ),
        np.array([prompts[m].noise_id for m in members], np.int32),
      )
    )
    chosen = decoding(filled)
    if on_progress is not None and number == 0:
      on_progress(0, chosen.num_calls * len(batches))
    result = sampling.sample(
      model.denoiser,
      params,
      key,
      filled,
      row_ids=noise_ids,
      **chosen.static,
      **chosen.arrays,
    )
    # Beyond those left are copies that fill up the batch.
    for m, ids in zip(members[:num_left], np.asarray(result.ids)):
      new = ids[len(given[m]) :][:num_tokens]
      ended = np.isin(new, model.vocab.eos_ids)
      new = new[: np.argmax(ended)] if ended.any() else new
      texts[m] = _before(model.tokenizer.decode(new), until)
    if on_progress is not None:
      on_progress(
        chosen.num_calls * (number + 1), chosen.num_calls * len(batches)
      )
  return texts


def _starts(num_rows, batch_size):
  """The number of the first row of every batch, and those of its rows."""
  batches = evaluation.row_batches(num_rows, batch_size)
  return zip(range(0, batches.size, batches.shape[1]), batches, strict=True)


def _greedy(model, rows, answer, size, batch_size):
  """The rows with their answers written greedily, one token per call."""
  params = evaluation.on_every_device(model.params)
  ids = np.where(answer, np.int32(model.vocab.mask_id), rows.ids)
  rows = rows._replace(ids=ids, generation_slots=answer)
  written = []
  for batch in evaluation.row_batches(len(answer), batch_size):
    filled = canvas.Canvas(*(None if x is None else x[batch] for x in rows))
    result = sampling.sample(
      model.denoiser,
      params,
      jax.random.key(0),  # Nothing is random.
      evaluation.over_devices(filled),
      vocab=model.vocab,
      rule=rules.by_confidence(size),
      draw=draws.categorical(temperature=0.0),
      schedule=model.schedule,
    )
    written.append(np.asarray(result.ids))
  return np.concatenate(written)[: len(answer)]


def _groups(keys):
  """The places of each distinct key, in order of the keys."""
  groups = {}
  for place, key in enumerate(keys):
    groups.setdefault(key, []).append(place)
  return dict(sorted(groups.items()))


def _bucket(size):
  """The next 2^k or 3 * 2^k: few shapes, of which a third is wasted at most."""
  power = 1 << (size - 1).bit_length()
  return power * 3 // 4 if size <= power * 3 // 4 else power


def _row_length(size, longest):
  return min(_bucket(max(size, 16)), longest)


def _within(on_progress, before, planned):
  """Progress of a part among the whole."""
  if on_progress is None:
    return None
  return lambda done, _: on_progress(before + done, planned)


def _before(text, until):
  """A text up to the first of the strings."""
  ends = [text.find(stop) for stop in until if stop and stop in text]
  return text[: min(ends)] if ends else text
