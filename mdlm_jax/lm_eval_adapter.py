"""A model as the lm-eval harness sees it. Needs the extra `eval`."""

import collections
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from mdlm_jax import bound_estimators, evaluation, tasks
from mdlm_jax.models import chat_template
from mdlm_jax.models.pretrained import Pretrained


class LanguageModel(LM):
  """Answers the three kinds of requests of the harness.

  Attributes:
    record: what the requests leave for a report: SHA-256 of the prompts by
      task, root mean square standard error of the log-likelihoods by kind in
      nats, None where every answer is impossible.
  """

  def __init__(
    self,
    model: Pretrained,
    *,
    writer: Pretrained,
    decoding: Callable[[tasks.Generation], tasks.Decoding],
    num_replicates: int = 8,
    num_calls: int | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    on_progress: tasks.OnProgress | None = None,
    template: chat_template.ChatTemplate | None = None,
  ):
    """Takes the settings.

    Args:
      model: the network and its tokenizer.
      writer: the same as it writes, see `decoding_flags.with_attention_block`.
      decoding: how texts are written, given what their task wants.
      num_replicates: independent estimates of a score, at least 2.
      num_calls: network calls of one, as in `tasks.score_answers`; of a window
        of a rolling score 4 by default.
      max_new_tokens: of a text, where the task says more.
      batch_size: rows per network call.
      seed: of all noise.
      on_progress: called with the network calls done and planned of one kind
        of request.
      template: of a chat model, for prompts that the harness makes chats.
    """
    super().__init__()
    self.record: dict[str, Any] = {'prompts_sha256': {}}
    self._model = model
    self._writer, self._decoding = writer, decoding
    self._num_replicates, self._num_calls = num_replicates, num_calls
    self._max_new_tokens = max_new_tokens
    self._batch_size, self._seed = batch_size, seed
    self._on_progress = on_progress
    self._template = template

  def loglikelihood(
    self, requests: Sequence[Instance]
  ) -> list[tuple[float, bool]]:
    """Bounds on log p(answer | context); all answers of a document meet the
    same masks, so that what they share cancels."""
    self._note_prompts(requests)
    scores = tasks.score_answers(
      self._model,
      [
        tasks.encode_answer(self._model, *r.args, _noise_id(r))
        for r in requests
      ],
      num_replicates=self._num_replicates,
      num_calls=self._num_calls,
      batch_size=self._batch_size,
      seed=self._seed,
      on_progress=self._on_progress,
    )
    self._note_errors('loglikelihood', scores.standard_error)
    return list(
      zip(scores.log_prob.tolist(), scores.is_greedy.tolist(), strict=True)
    )

  def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
    """Bounds on log p(text), every token scored once."""
    self._note_prompts(requests)
    model = self._model
    bounds = evaluation.document_bounds(
      model.denoiser,
      model.params,
      jax.random.key(self._seed),
      [np.asarray(model.tokenizer.encode(r.args[0])) for r in requests],
      vocab=model.vocab,
      estimator=bound_estimators.exact_count(self._num_calls or 4),
      num_replicates=self._num_replicates,
      length=min(model.config.max_length, evaluation.LONGEST_WINDOW),
      schedule=model.bound_schedule,
      batch_size=self._batch_size,
      on_progress=self._on_progress,
    )
    self._note_errors('loglikelihood_rolling', bounds.standard_error)
    return (-bounds.nats).tolist()

  def generate_until(self, requests: Sequence[Instance]) -> list[str]:
    """Texts after each context, up to a string that ends them."""
    self._note_prompts(requests)
    repeats = collections.Counter()
    groups, texts = {}, [''] * len(requests)
    for place, request in enumerate(requests):
      context, settings = request.args
      # The same request again is another sample.
      repeat = repeats[id(request)]
      repeats[id(request)] += 1
      prompt = tasks.Prompt(
        np.asarray(self._model.tokenizer.encode(context)).tolist(),
        _noise_id(request, repeat),
      )
      wanted = tasks.generation(settings, self._max_new_tokens)
      groups.setdefault(wanted, []).append((place, prompt))
    for wanted, members in groups.items():
      places, prompts = zip(*members, strict=True)
      written = tasks.continuations(
        self._writer,
        prompts,
        num_tokens=wanted.num_tokens,
        decoding=self._decoding(wanted),
        until=wanted.until,
        batch_size=self._batch_size,
        seed=self._seed,
        on_progress=self._on_progress,
      )
      for place, text in zip(places, written, strict=True):
        texts[place] = text
    return texts

  def apply_chat_template(
    self,
    chat_history: list[dict[str, str]],
    add_generation_prompt: bool = True,
  ) -> str:
    """The prompt of a chat."""
    return chat_template.render(
      self._template, chat_history, add_generation_prompt=add_generation_prompt
    )

  @property
  def tokenizer_name(self) -> str:
    """For caches of the harness, which are not used."""
    return ''

  def _note_prompts(self, requests):
    by_task = {}
    for request in requests:
      by_task.setdefault(request.task_name, []).append(request.args)
    for name, arguments in by_task.items():
      digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode())
      self.record['prompts_sha256'][name] = digest.hexdigest()

  def _note_errors(self, kind, errors):
    known = errors[np.isfinite(errors)]  # Not of an impossible answer.
    error = float(np.sqrt(np.mean(known**2))) if known.size else None
    self.record[f'{kind}_standard_error'] = error


def _noise_id(request, repeat=0):
  """One number for all choices of a question, another for any other."""
  name = f'{request.task_name}/{request.doc_id}/{repeat}'
  return zlib.crc32(name.encode()) & 0x7FFFFFFF
