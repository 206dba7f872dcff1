"""Sudoku of 9x9 cells, for a GPU.

  python scripts/experiments/sudoku.py --config=configs/sudoku9.py \
    --workdir=runs/sudoku9

A network of 7 million parameters, sized for one GPU and not trained to its end
here; the first steps were run on a CPU to see that it works.
"""

from ml_collections import ConfigDict

from mdlm_jax import run_config


def get_config() -> ConfigDict:
  config = run_config.defaults()
  # Grids are made, not read, and puzzles are what they are evaluated by.
  del config.init_from, config.adapters, config.evaluation
  config.steps = 50_000
  config.data = data = ConfigDict()
  data.size = 9  # Cells of a row, and digits.
  data.num_fills = 20_000  # Grids filled by backtracking, before the split.
  data.num_grids = 1_000_000  # Training grids: fills under random symmetries.
  data.batch_size = 512  # Grids per step.
  config.model.num_layers = 8
  config.model.model_dim = 256
  config.model.num_heads = 8
  config.model.mlp_dim = 768
  config.model.dtype = 'bfloat16'
  config.optimizer.muon_learning_rate = 0.02
  config.optimizer.learning_rate = 1e-3
  config.optimizer.warmup_steps = 500
  config.ema_decay = 0.999
  config.loss.weight_power = 0.0
  config.saved_dtype = 'bfloat16'
  config.log_every = 100
  config.checkpoint_every = 5000
  return config
