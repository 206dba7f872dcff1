"""A training run in its work directory, from the config to the evaluation.

Needs the extra `train`. The work directory receives

checkpoints/      everything that is needed to go on, see `checkpoints`
metrics.jsonl     one line per `log_every` steps; TensorBoard events beside it
model/            averaged weights, tokenizer, and how they were trained
evaluation.json   the bound on held-out text, at the end
"""

import collections
import contextlib
import json
import math
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax
import tensorboardX
import tqdm
from ml_collections import ConfigDict

from mdlm_jax import (
  checkpoints,
  command_line,
  evaluation,
  ngrams,
  optimizers,
  provenance,
  schedules,
  time_draws,
  training,
)
from mdlm_jax.data.batches import batches
from mdlm_jax.data.corpus import (
  Corpus,
  corpus_digest,
  corpus_of,
  corpus_tokenizer,
)
from mdlm_jax.data.windows import Windows, training_windows
from mdlm_jax.models import directory, transformer
from mdlm_jax.models.config import DTYPES
from mdlm_jax.tokenizer import Tokenizer

# What a resumed run may change; everything else must be as it was.
_MAY_CHANGE = (
  'steps',
  'saved_dtype',
  'evaluation',
  'log_every',
  'checkpoint_every',
  'keep_checkpoints',
)


class Run(NamedTuple):
  """What the config stands for.

  Attributes:
    corpus: the texts by use.
    tokenizer: text to ids, made from the corpus.
    windows: what batches are drawn from.
    model: shape of the network.
    optimizer: an optax transformation.
    step: the compiled update, see `training.train_step`.
    init_key: key of the initial parameters.
    train_key: key of all noise of training.
  """

  corpus: Corpus
  tokenizer: Tokenizer
  windows: Windows
  model: transformer.TransformerConfig
  optimizer: optax.GradientTransformation
  step: Callable
  init_key: jax.Array
  train_key: jax.Array


def prepare(config: ConfigDict) -> Run:
  """Reads and checks everything; writes nothing.

  Args:
    config: as the files in configs/ have it.

  Raises:
    ValueError, OSError: the first mistake in the config or in its texts.
  """
  try:
    return _prepare(config)
  except (AttributeError, TypeError) as error:
    raise ValueError(f'a field of the config is wrong: {error}') from error


def _prepare(config: ConfigDict) -> Run:
  for name, value, least in (
    ('data.length', config.data.length, 1),
    ('log_every', config.log_every, 1),
    ('checkpoint_every', config.checkpoint_every, 1),
    ('keep_checkpoints', config.keep_checkpoints, 1),
    ('data.batch_size', config.data.batch_size, 1),
    ('evaluation.batch_size', config.evaluation.batch_size, 1),
    ('evaluation.num_replicates', config.evaluation.num_replicates, 2),
  ):
    if value < least:
      raise ValueError(f'config.{name}={value} must be at least {least}')
  if not 0 <= config.seed < 2**32:
    raise ValueError(f'config.seed={config.seed} must lie in [0, 2**32)')
  if config.saved_dtype not in DTYPES:
    raise ValueError(
      f'saved_dtype={config.saved_dtype!r} must be one of {DTYPES}'
    )
  corpus = corpus_of(config.data.to_dict())
  if not corpus.validation:
    raise ValueError('the text is too short to hold a part of it out')
  tokenizer = corpus_tokenizer(corpus, config.data.bpe_vocab_size)
  windows = training_windows(corpus.training, tokenizer, config.data.length)
  model = transformer.TransformerConfig(
    vocab_size=tokenizer.vocab.size,
    max_length=config.data.length,
    **config.model,
  )
  if model.time_conditioning and model.attention_block is not None:
    # One pass tells the clean blocks level 0, a sampler all of them one level.
    raise ValueError('attention_block cannot be used with time_conditioning')
  optimizer = optimizers.make_optimizer(steps=config.steps, **config.optimizer)
  step = training.train_step(
    transformer.denoiser(model),
    optimizer,
    vocab=tokenizer.vocab,
    ema_decay=config.ema_decay,
    schedule=schedules.named_schedule(config.loss.schedule),
    times=time_draws.named_times(config.loss.times),
    t_min=config.loss.t_min,
    t_max=config.loss.get('t_max', 1.0),
    weight_power=config.loss.weight_power,
  )
  init_key, train_key = jax.random.split(jax.random.key(config.seed))
  return Run(
    corpus, tokenizer, windows, model, optimizer, step, init_key, train_key
  )


def run_settings(config: ConfigDict, run: Run) -> dict:
  """What is saved with each checkpoint and compared on resuming."""
  texts = [document.text for part in run.corpus for document in part]
  return {
    'config': json.loads(config.to_json()),
    'tokenizer': run.tokenizer.to_json(),
    'corpus_sha256': corpus_digest(run.corpus),
    'corpus_entropies_bits_per_character': ngrams.entropies('\n\n'.join(texts)),
    'train_seconds': 0.0,
    'interval': [],
  }


def check_same_run(saved: dict, settings: dict, workdir: pathlib.Path) -> None:
  """Raises ValueError where a resumed run would not be the same run."""
  before, now = _flatten(saved['config']), _flatten(settings['config'])
  for name in sorted(before.keys() | now.keys()):
    old, new = before.get(name), now.get(name)
    if old != new and name.split('.')[0] not in _MAY_CHANGE:
      raise ValueError(
        f'{workdir} holds a run with config.{name}={old!r}, not {new!r}; '
        'choose another --workdir'
      )
  for name in ('corpus_sha256', 'tokenizer'):
    if saved[name] != settings[name]:
      raise ValueError(
        f'{workdir} holds a run on another text ({name} differs); choose '
        'another --workdir'
      )


def _flatten(tree, prefix=''):
  """{'a': {'b': 1}} -> {'a.b': 1}."""
  leaves = {}
  for name, value in tree.items():
    if isinstance(value, dict):
      leaves |= _flatten(value, f'{prefix}{name}.')
    else:
      leaves[prefix + name] = value
  return leaves


@contextlib.contextmanager
def recorder(
  workdir: pathlib.Path,
  start: int,
  config: ConfigDict,
  interval: list[list[float]],
):
  """Yields `record(step, metrics)`: bar, metrics.jsonl and TensorBoard.

  What an earlier session wrote after its last checkpoint is dropped.

  Args:
    workdir: made if missing.
    start: the last step that is done.
    config: of the run.
    interval: the metrics of the steps since the last line of the log, flat;
      kept up to date, so that a checkpoint can hold them and the line that
      spans a restart is the same as without one.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / 'metrics.jsonl'
  lines = path.read_text(errors='replace').splitlines() if path.exists() else []
  unfinished = workdir / 'metrics.jsonl.tmp'
  unfinished.write_text(
    ''.join(f'{x}\n' for x in lines if _line_step(x) <= start)
  )
  unfinished.replace(path)
  begin = time.monotonic()

  def record(step, metrics):
    nonlocal begin
    metrics = jax.device_get(metrics)
    training.check_finite(metrics, step)
    leaves, structure = jax.tree.flatten(metrics)
    interval.append([float(leaf) for leaf in leaves])
    bar.update()
    if step % config.log_every and step != config.steps:
      return
    sums = np.sum(interval, axis=0)
    total = jax.tree.unflatten(structure, sums)
    row = {name: float(x.mean) for name, x in total._asdict().items()}
    now = time.monotonic()
    row['tokens_per_second'] = float(total.bound.count) / (now - begin)
    begin = now
    interval.clear()
    stream.write(json.dumps({'step': step, **row}) + '\n')
    for name, value in row.items():
      board.add_scalar(name, value, step)
    bar.set_postfix_str(
      f'{row["bound"]:.3f} nats/token, '
      f'{row["tokens_per_second"]:,.0f} tokens/s',
      refresh=False,
    )

  with (
    path.open('a', buffering=1) as stream,
    tensorboardX.SummaryWriter(str(workdir), purge_step=start + 1) as board,
    tqdm.tqdm(
      total=config.steps,
      initial=start,
      unit='step',
      dynamic_ncols=True,
      # A line per half minute where no terminal draws it over the last.
      mininterval=0.2 if sys.stderr.isatty() else 30,
    ) as bar,
  ):
    yield record


def _line_step(line: str) -> int | float:
  """Step of a line of metrics.jsonl, infinite for one that is damaged."""
  try:
    return json.loads(line)['step']
  except (ValueError, KeyError, TypeError):
    return math.inf


def train_steps(config, run, store, settings, workdir, state, iterator):
  """Makes the steps that are left, with a checkpoint every so often.

  Returns:
    The state and the signal that ended the run early, or None.
  """
  begin = time.monotonic() - settings['train_seconds']
  start = int(state.step)
  pending = collections.deque()
  with (
    recorder(workdir, start, config, settings['interval']) as record,
    command_line.caught_signals() as caught,
  ):
    for number in range(start + 1, config.steps + 1):
      state, metrics = run.step(state, next(iterator), run.train_key)
      pending.append((number, metrics))
      last = number == config.steps or bool(caught)
      save = last or number % config.checkpoint_every == 0
      # Read one step late, so that the device never waits for the log; all
      # before a checkpoint, so that none is saved after a divergence.
      while len(pending) > (0 if save else 1):
        record(*pending.popleft())
      if save:
        settings['train_seconds'] = time.monotonic() - begin
        checkpoints.save(store, state, iterator, settings)
        export(config, run, settings, state, workdir)
      if last:
        break
  return state, caught[0] if caught else None


def train(
  config: ConfigDict, workdir: pathlib.Path, *, resume: bool = True
) -> int:
  """Trains, evaluates and writes.

  Args:
    config: as the files in configs/ have it.
    workdir: made if missing; a run that it holds goes on.
    resume: whether it may; False refuses a directory that holds a run.

  Returns:
    The exit code: 0, and 130 where Ctrl-C ended the run early.

  Raises:
    ValueError, OSError: a mistake of `prepare`, or `workdir` holds another run.
    FloatingPointError: training diverged.
  """
  run = prepare(config)
  settings = run_settings(config, run)
  stopped_by = train_model(config, run, settings, workdir, resume=resume)
  if stopped_by is not None:
    return 130 if stopped_by == signal.SIGINT else 0
  evaluate(config, run, workdir)
  return 0


def train_model(
  config: ConfigDict,
  run: Run,
  settings: dict,
  workdir: pathlib.Path,
  *,
  resume: bool = True,
) -> int | None:
  """Trains, or goes on, and writes the model.

  Args:
    config: of the run.
    run: what it stands for.
    settings: as `run_settings` makes them.
    workdir: made if missing; a run that it holds goes on.
    resume: whether it may.

  Returns:
    The signal that ended the run early, or None.

  Raises:
    ValueError, OSError: `workdir` holds another run.
    FloatingPointError: training diverged.
  """
  iterator = batches(
    run.windows, batch_size=config.data.batch_size, seed=config.seed
  )
  params = transformer.init(run.model, run.init_key)
  state = training.init_state(params, run.optimizer)
  with checkpoints.open_directory(
    workdir / 'checkpoints', keep=config.keep_checkpoints
  ) as store:
    if checkpoints.latest_step(store) is not None:
      if not resume:
        raise ValueError(
          f'{workdir} holds a run at step {checkpoints.latest_step(store)}; '
          'resume it or choose another --workdir'
        )
      saved = checkpoints.latest_settings(store)
      check_same_run(saved, settings, workdir)
      state = checkpoints.restore(store, state, iterator)
      for name in ('train_seconds', 'interval'):
        settings[name] = saved[name]
      print(f'resuming {workdir} at step {int(state.step)}', flush=True)
    if int(state.step) > config.steps:
      raise ValueError(
        f'{workdir} is at step {int(state.step)}, beyond steps={config.steps}'
      )
    state, stopped_by = train_steps(
      config, run, store, settings, workdir, state, iterator
    )
  export(config, run, settings, state, workdir)
  if stopped_by is not None:
    print(f'stopped at step {int(state.step)}; the same command resumes')
  return stopped_by


def export(config, run, settings, state, workdir):
  """Writes the model directory, and beside the model how it was trained."""
  directory.save(
    workdir / 'model',
    run.model,
    training.averaged_params(state, config.ema_decay),
    run.tokenizer.vocab,
    run.tokenizer,
    schedule=config.loss.schedule,
    dtype=config.saved_dtype,
    history={'step': int(state.step)}
    | {
      name: value
      for name, value in settings.items()
      if name not in ('tokenizer', 'interval')
    },
  )


def evaluate(config, run, workdir):
  """Prints and writes the bound of the model as saved on held-out text."""
  model = directory.load(workdir / 'model')
  report = evaluation.evaluate_documents(
    model,
    run.corpus.validation,
    length=config.data.length,
    **config.evaluation,
  )
  seconds = model.history['train_seconds']
  tokens = config.steps * config.data.batch_size * config.data.length
  speed = {'train_tokens_per_second': tokens / seconds}
  report = {**report, **model.history, **speed, **provenance.environment()}
  report_path = workdir / 'evaluation.json'
  report_path.write_text(json.dumps(report, indent=2) + '\n')
  print(evaluation.summary(report))
  print(
    f'trained {config.steps} steps in {seconds:.0f} s, '
    f'{tokens / seconds:,.0f} tokens/s; the model is in {workdir / "model"}'
  )
