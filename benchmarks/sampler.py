"""Times the sampler against the same number of bare network calls.

  python benchmarks/sampler.py
  python benchmarks/sampler.py --vocab_size=32000 --length=256 --model_dim=512 \
    --num_layers=8 --num_steps=4 --repeats=3 --only='kernel|confidence'

A bare call is the network and the maximum of its logits, scanned as often as
the sampler calls it. Both run in turn in one process, so that the ratio holds
on a busy machine; the median over the repeats is printed.
"""

import functools
import re
import statistics
import time

import jax
import jax.numpy as jnp
from absl import flags

from mdlm_jax import canvas, command_line, draws, rules, sampling, schedules
from mdlm_jax.models import transformer
from mdlm_jax.vocab import Vocab

_VOCAB_SIZE = flags.DEFINE_integer('vocab_size', 1024, 'Ids.', 3)
_LENGTH = flags.DEFINE_integer('length', 128, 'Slots per row.', 1)
_BATCH = flags.DEFINE_integer('batch_size', 8, 'Rows.', 1)
_LAYERS = flags.DEFINE_integer('num_layers', 4, 'Blocks.', 1)
_WIDTH = flags.DEFINE_integer('model_dim', 256, 'Width.', 1)
_STEPS = flags.DEFINE_integer('num_steps', 32, 'Network calls.', 1)
_ONLY = flags.DEFINE_string('only', '', 'Lines whose name has this pattern.')
_REPEATS = flags.DEFINE_integer('repeats', 7, 'Runs of each.', 1)


@functools.partial(jax.jit, static_argnames=('denoiser', 'num_calls'))
def bare_calls(denoiser, params, batch, num_calls):
  """`num_calls` network calls, each fed what the one before gave."""

  def call(ids, step):
    hidden, _ = denoiser.features(
      params,
      None,
      ids,
      at=None,
      step=step,
      t=jnp.ones(ids.shape[0]),
      valid=batch.valid,
      positions=batch.positions,
      segments=None,
    )
    # The cheapest use of all logits: one pass that keeps a number a slot.
    largest = denoiser.head(params, hidden).max(-1)
    return ids + (largest > 1e9).astype(ids.dtype), None

  return jax.lax.scan(call, batch.ids, jnp.arange(num_calls))[0]


def seconds(function) -> float:
  """Wall time of one run, the result awaited."""
  start = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - start


def samplers(num_steps: int) -> dict:
  """Rule, draw and further arguments of `sample`, by the name in the table."""
  grid = schedules.uniform_grid(num_steps)
  bounds = rules.sigmas.cap(grid, 0.1)
  confidence = rules.by_confidence(num_steps)
  kernel = rules.kernel(grid)
  greedy = draws.categorical(temperature=0.0)
  drawn = draws.categorical()
  by_rule = {
    'kernel': kernel,
    'kernel, cached': rules.kernel(grid, cached=True),
    'first hitting': rules.first_hitting(),
    'confidence': confidence,
    'confidence, cosine': rules.by_confidence(
      num_steps,
      counts=schedules.grid_counts(schedules.cosine_grid(num_steps)),
    ),
    'maskgit': rules.maskgit(num_steps, 4.5),
    'sampled confidence': rules.by_sampled_confidence(num_steps, 0.2),
    'binomial': rules.by_binomial_confidence(grid),
    'left to right': rules.left_to_right(num_steps),
    'dilated': rules.dilated(),
    'threshold': rules.threshold(2.0),
    'factor': rules.factor(0.0),
    'entropy bound': rules.entropy_bound(0.0),
    'klass': rules.klass(2.0, 0.01),
    'remasking, cap': rules.remasking(grid, bounds),
    'remasking, conf': rules.remasking(grid, bounds, by_confidence=True),
    'path planning': rules.path_planning(num_steps),
    'editing': rules.editing(confidence, 0.9, 0),
    'refined': rules.refined(rules.by_confidence(num_steps - 1), 1, 8),
  }
  # Adaptive rules are held to the same number of calls.
  cut = {
    name: rule._replace(calls=lambda num_slots: num_steps)
    for name, rule in by_rule.items()
  }
  table = {
    f'{name}, {kind}': (rule, draw)
    for name, rule in cut.items()
    for kind, draw in (('greedy', greedy), ('T = 1', drawn))
  }
  return table | {
    'score margin': (confidence, draws.categorical(score=draws.margin)),
    'score entropy': (
      confidence,
      draws.categorical(score=draws.negative_entropy),
    ),
    'temperature 0.8': (kernel, draws.categorical(temperature=0.8)),
    'top-k 50': (kernel, draws.categorical(top_k=min(50, _VOCAB_SIZE.value))),
    'top-p 0.9': (kernel, draws.categorical(top_p=0.9)),
    'min-p 0.1': (kernel, draws.categorical(min_p=0.1)),
    'repetition penalty': (
      kernel,
      draws.categorical(repetition_penalty=1.2, neighbourhood=8),
    ),
  }


def main(argv):
  del argv
  vocab = Vocab(_VOCAB_SIZE.value, mask_id=1, pad_id=0)
  config = transformer.TransformerConfig(
    vocab_size=vocab.size,
    num_layers=_LAYERS.value,
    model_dim=_WIDTH.value,
    num_heads=max(_WIDTH.value // 64, 1),
    mlp_dim=2 * _WIDTH.value,
    max_length=_LENGTH.value,
  )
  denoiser = transformer.denoiser(config)
  params = transformer.init(config, jax.random.key(0))
  batch = canvas.from_prompts([[]] * _BATCH.value, _LENGTH.value, vocab)
  num_steps = _STEPS.value

  def bare():
    return bare_calls(denoiser, params, batch, num_steps)

  bare_compile = seconds(bare)
  print(
    f'{config}\nbatch {_BATCH.value}, {num_steps} calls, '
    f'{jax.devices()[0].device_kind}, jax {jax.__version__}\n'
    f'bare calls: {seconds(bare):.3f} s, first run {bare_compile:.2f} s'
  )
  for name, (rule, draw) in samplers(num_steps).items():
    if not re.search(_ONLY.value, name):
      continue

    def sampler(rule=rule, draw=draw):
      return sampling.sample(
        denoiser,
        params,
        jax.random.key(1),
        batch,
        vocab=vocab,
        rule=rule,
        draw=draw,
      ).ids

    first = seconds(sampler)
    ratios = [seconds(sampler) / seconds(bare) for _ in range(_REPEATS.value)]
    print(
      f'{name:27s} {statistics.median(ratios):.2f} times bare calls '
      f'({min(ratios):.2f} to {max(ratios):.2f}), first run {first:.2f} s'
    )


if __name__ == '__main__':
  command_line.run(main)
