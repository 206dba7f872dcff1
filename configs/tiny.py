"""A model of seconds, for tests and for looking around.

  python scripts/train.py --config=configs/tiny.py --workdir=runs/tiny

About 10 seconds on 2 CPU cores, most of them compilation; about 4.5 bits per
character on the held-out text, hardly better than counting characters.
"""

from ml_collections import ConfigDict

from mdlm_jax import run_config


def get_config() -> ConfigDict:
  config = run_config.defaults()
  config.steps = 60
  config.data.length = 32
  config.data.batch_size = 16
  config.model.num_layers = 2
  config.model.model_dim = 32
  config.model.num_heads = 2
  config.model.mlp_dim = 64
  config.optimizer.warmup_steps = 10
  config.ema_decay = 0.9
  config.log_every = 10
  config.checkpoint_every = 30
  return config
