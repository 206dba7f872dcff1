"""Fine-tuning of a model on prompts and answers, by adapters.

  python scripts/prepare_data.py --files=examples.jsonl --output=examples \
    --tokenizer=MODEL --dialogues --validation_share=0.02
  python scripts/train.py --config=configs/finetune.py --workdir=runs/tuned \
    --config.init_from=MODEL --config.data.prepared=examples

MODEL is a directory of this library or of a published model (docs/data.md); its
vocabulary must have EOS, and it must take rows of config.data.length.
Prompts stay clean and answers are learned, filled up with EOS to the end of the
row as LLaDA's (arXiv 2502.09992, section 2.3). With config.adapters.rank=0 all
parameters are trained, in ten times the memory. The learning rate is that of
models of billions; small ones take more, 1e-3 whole and 3e-3 by adapters, which
do little for a model that was hardly trained.
"""

from ml_collections import ConfigDict

from mdlm_jax import run_config


def get_config() -> ConfigDict:
  config = run_config.defaults()
  config.steps = 1000
  config.data.rows = 'examples'
  config.data.length = 256
  config.data.answer_multiple = 256
  config.adapters.rank = 16
  config.adapters.alpha = 32.0
  config.optimizer.muon_learning_rate = 0.0
  config.optimizer.learning_rate = 1e-4
  config.optimizer.weight_decay = 0.0
  config.loss.kind = 'answer'
  config.loss.weight_power = 1.0
  return config
