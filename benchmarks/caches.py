"""Times decoding under each cache policy against decoding without a cache.

  python benchmarks/caches.py
  python benchmarks/caches.py --vocab_size=126464 --model_dim=768 \
    --mlp_dim=2048 --num_layers=12 --num_heads=12 --prompt=256 --new=256 \
    --repeats=1

Random weights in a dense LLaDA layout, once as it is and once with attention by
blocks. Every policy decodes with the same rule and number of calls, one after
another in one process, so that the ratio holds on a busy machine; the median
over the repeats is printed. Random weights say nothing of the quality of an
approximation; `scripts/sample.py --audit_cache` shows a real model's.
"""

import statistics
import time

import jax
import numpy as np
from absl import flags

from mdlm_jax import caches, canvas, command_line, draws, rules, sampling
from mdlm_jax.blocks import blocks_of
from mdlm_jax.models import transformer
from mdlm_jax.models.config import DTYPES
from mdlm_jax.vocab import Vocab

_VOCAB_SIZE = flags.DEFINE_integer('vocab_size', 4096, 'Ids.', 3)
_LAYERS = flags.DEFINE_integer('num_layers', 4, 'Blocks.', 1)
_WIDTH = flags.DEFINE_integer('model_dim', 256, 'Width.', 1)
_MLP = flags.DEFINE_integer('mlp_dim', 768, 'Hidden width of an MLP.', 1)
_HEADS = flags.DEFINE_integer('num_heads', 8, 'Heads.', 1)
_DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', DTYPES, 'Of parameters and products.'
)
_BATCH = flags.DEFINE_integer('batch_size', 1, 'Rows.', 1)
_PROMPT = flags.DEFINE_integer('prompt', 128, 'Tokens given.', 1)
_NEW = flags.DEFINE_integer('new', 128, 'Tokens generated.', 1)
_BLOCK = flags.DEFINE_integer('block_length', 32, 'Tokens of a block.', 1)
_STEPS = flags.DEFINE_integer('steps_per_block', 8, 'Calls of a block.', 1)
_REPEATS = flags.DEFINE_integer('repeats', 3, 'Runs of each.', 1)


def network(attention_block):
  """The network with random parameters."""
  config = transformer.TransformerConfig(
    vocab_size=_VOCAB_SIZE.value,
    num_layers=_LAYERS.value,
    model_dim=_WIDTH.value,
    num_heads=_HEADS.value,
    mlp_dim=_MLP.value,
    max_length=_PROMPT.value + _NEW.value,
    tied_head=False,
    dtype=_DTYPE.value,
    attention_block=attention_block,
  )
  params = jax.jit(
    lambda key: jax.tree.map(
      lambda leaf: leaf.astype(_DTYPE.value), transformer.init(config, key)
    )
  )(jax.random.key(0))
  return transformer.denoiser(config), params


def main(argv):
  del argv
  vocab = Vocab(_VOCAB_SIZE.value, mask_id=_VOCAB_SIZE.value - 1)
  prompts = np.random.default_rng(0).integers(
    0, vocab.size - 1, (_BATCH.value, _PROMPT.value)
  )
  rows = canvas.from_prompts(prompts.tolist(), _NEW.value, vocab)
  options = {
    'vocab': vocab,
    'rule': rules.by_confidence(_STEPS.value),
    'draw': draws.categorical(temperature=0.0),
    'blocks': blocks_of(rows, _BLOCK.value),
  }
  print(
    f'{_BATCH.value} row(s), {_PROMPT.value} tokens given and {_NEW.value} '
    f'new, blocks of {_BLOCK.value} in {_STEPS.value} calls, {_DTYPE.value}'
  )
  full, by_blocks = (
    {'no cache': None, 'prefix': caches.prefix(), 'dual': caches.dual(),
     'delayed(4)': caches.delayed(4)},
    {'no cache': None, 'exact': caches.exact()},
  )  # fmt: skip
  for title, attention_block, policies in (
    ('every slot sees all', None, full),
    (f'attention by blocks of {_BLOCK.value}', _BLOCK.value, by_blocks),
  ):
    denoiser, params = network(attention_block)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f'\n{title}: {size / 1e6:.1f} M parameters')
    print(
      f'{"":12s}{"calls":>6s}{"slots/call":>12s}{"s":>9s}{"tokens/s":>10s}'
      f'{"speed":>8s}{"compile s":>11s}'
    )
    plain = None
    for name, policy in policies.items():

      def run(policy=policy, denoiser=denoiser, params=params):
        start = time.perf_counter()
        result = sampling.sample(
          denoiser, params, jax.random.key(1), rows, cache=policy, **options
        )
        jax.block_until_ready(result.ids)
        return time.perf_counter() - start, result

      first, result = run()
      seconds = statistics.median(run()[0] for _ in range(_REPEATS.value))
      plain = plain or seconds
      computed = rows.ids.shape[1]
      if result.computed is not None:
        computed = float(np.mean(result.computed))
      tokens = _BATCH.value * _NEW.value
      print(
        f'{name:12s}{int(result.calls):6d}{computed:12.1f}{seconds:9.2f}'
        f'{tokens / seconds:10.1f}{plain / seconds:8.2f}'
        f'{first - seconds:11.1f}',
        flush=True,
      )


if __name__ == '__main__':
  command_line.run(main)
