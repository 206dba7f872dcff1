"""Pretraining on prepared data, in three sizes; for GPUs and TPUs.

  python scripts/train.py --config=configs/prepared.py:8B --workdir=runs/8b \
    --config.data.prepared=DIR --config.mesh.fsdp=8 --config.remat=none \
    --config.accumulation=80

DIR is what scripts/prepare_data.py wrote. The sizes are those of MDLM (Sahoo et
al. 2024), of SMDM's largest (Nie et al. 2024, arXiv 2410.18514) and of LLaDA
(Nie et al. 2025, arXiv 2502.09992), about; none was trained here.
docs/scaling.md says what they take in memory and time, and which mesh to
choose.
"""

from ml_collections import ConfigDict

from mdlm_jax import run_config

# Layers, width, heads, MLP, tokens of a row, rows, tied head, learning rate.
_SIZES = {
  '125M': (12, 768, 12, 2048, 1024, 512, True, 3e-4),
  '1B': (20, 2048, 16, 5632, 2048, 256, False, 2e-4),
  '8B': (32, 4096, 32, 12_288, 4096, 1280, False, 4e-4),
}


def get_config(size: str = '125M') -> ConfigDict:
  if size not in _SIZES:
    raise ValueError(f'{size=} must be one of {", ".join(_SIZES)}')
  layers, dim, heads, mlp, length, rows, tied, rate = _SIZES[size]
  config = run_config.defaults()
  config.steps = 500_000
  config.data.prepared = 'prepared'
  config.data.rows = 'packed'
  config.data.length = length
  config.data.batch_size = rows
  config.model.num_layers = layers
  config.model.model_dim = dim
  config.model.num_heads = heads
  config.model.mlp_dim = mlp
  config.model.tied_head = tied
  config.model.dtype = 'bfloat16'
  config.optimizer.muon_learning_rate = 0.0
  config.optimizer.learning_rate = rate
  config.optimizer.warmup_steps = 2000
  config.optimizer.beta2 = 0.95
  config.ema_decay = 0.9999
  # By the first process alone, each device with a whole model and the scores of
  # attention of its rows: hours for 8B, where it fits.
  config.evaluation.batch_size = 8192 // length
  config.evaluation.most_rows = 0 if size == '8B' else 512
  config.loss.weight_power = 1.0
  config.log_every = 100
  config.checkpoint_every = 2000
  return config
