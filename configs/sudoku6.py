"""Sudoku of 6x6 cells with boxes of 2x3, full grids.

  python scripts/experiments/sudoku.py --config=configs/sudoku6.py \
    --workdir=runs/sudoku6

About 4 minutes on 2 CPU cores that have other work beside it. Of puzzles with
12 givens 0.965 +- 0.014 are solved most confident cell first, 0.180 +- 0.027 in
random order. With more steps or blocks both numbers rise, the second one more.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
  config = ConfigDict()
  config.seed = 0  # Of the grids, the parameters, their order and all noise.
  config.steps = 800  # Updates; the learning rate falls to 0 over them.

  config.data = data = ConfigDict()
  data.size = 6  # Cells of a row, and digits.
  data.num_fills = 2000  # Grids filled by backtracking, before the split.
  data.num_grids = 50_000  # Training grids: fills under random symmetries.
  data.batch_size = 64  # Grids per step.

  config.model = model = ConfigDict()
  model.num_layers = 4  # Blocks.
  model.model_dim = 64  # Width of the residual stream.
  model.num_heads = 4  # Attention heads.
  model.num_kv_heads = placeholder(int)  # Key/value heads; None: num_heads.
  model.mlp_dim = 192  # Hidden width of SwiGLU.
  model.time_conditioning = False  # Whether the noise level steers the norms.
  model.tied_head = True  # Whether the head is the transposed embedding.
  model.dtype = 'float32'  # Compute: 'float32' or 'bfloat16'.

  config.optimizer = optimizer = ConfigDict()
  optimizer.muon_learning_rate = 0.04  # On matrices; 0: AdamW on all.
  optimizer.learning_rate = 3e-3  # The highest of AdamW, after the warm-up.
  optimizer.warmup_steps = 50  # Of linear growth from 0.
  optimizer.weight_decay = 0.1  # On matrices only.
  optimizer.clip_norm = 1.0  # Largest global norm of the gradient.
  optimizer.beta1 = 0.9  # Decay of the first moment.
  optimizer.beta2 = 0.99  # Decay of the second moment.
  config.ema_decay = 0.99  # Of the averaged parameters, which are the result.

  config.loss = loss = ConfigDict()
  loss.schedule = 'linear'  # Or 'cosine', 'geometric', 'log_linear'.
  loss.times = 'stratified'  # Or 'systematic', 'iid'.
  loss.t_min = 1e-3  # Smallest noise level.
  loss.weight_power = 0.0  # Of the bound's weights: 1 the bound, 0 unweighted.

  config.saved_dtype = 'bfloat16'  # Of the parameters in model/.
  config.log_every = 50  # Steps per line of metrics.jsonl.
  config.checkpoint_every = 400  # Steps per checkpoint.
  config.keep_checkpoints = 2  # The latest ones that stay.
  return config
