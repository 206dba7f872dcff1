"""Every field of a training run's config, and what it must be.

A file in configs/ takes `defaults()` and says what is different. Needs the
extra `train`.
"""

import dataclasses
import math
import operator

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from mdlm_jax import losses
from mdlm_jax.models.config import DTYPES, TransformerConfig


def defaults() -> ConfigDict:
  """A small model of the default text; every field that a config can have."""
  config = ConfigDict()
  config.seed = 0  # Of the parameters, the order of the data and all noise.
  config.steps = 1000  # Updates; the learning rate falls to 0 over them.
  config.init_from = ''  # Directory of a model to go on from; '': a fresh one.
  config.init_mask_id = placeholder(int)  # Its MASK, where its files name none.

  config.data = data = ConfigDict()
  data.prepared = ''  # Directory of scripts/prepare_data.py; '': text files.
  # The next five are of text files, read and tokenized at the start.
  data.files = ''  # Paths or globs, by commas; '': the default corpus.
  data.validation_files = ''  # Held-out text of its own; '': split files.
  data.split = 'tail'  # Last 5 %; 'tails'; 'document': every 20th document.
  data.text8 = False  # Whether texts are spelled in 27 symbols.
  data.bpe_vocab_size = 0  # Byte-pair tokens; 0: one token per character.
  # What a row is. 'windows': any part of a text; of prepared documents
  # 'packed': several documents; 'documents': one, or a piece of one;
  # 'examples': a prompt and its answer.
  data.rows = 'windows'
  data.length = 64  # Tokens per row.
  data.batch_size = 32  # Rows per step, of all devices together.
  # Of examples: answers are filled up with EOS, which is learned like a token,
  # to a multiple of so many tokens; 0: none but what ends them.
  data.answer_multiple = 0
  data.random_length_share = 0.0  # Of rows cut at a random length.

  config.model = model = ConfigDict()  # Of a fresh model; see init_from.
  model.num_layers = 4  # Transformer blocks.
  model.model_dim = 128  # Width of the residual stream.
  model.num_heads = 4  # Attention heads.
  model.num_kv_heads = placeholder(int)  # Key/value heads; None: num_heads.
  model.mlp_dim = 384  # Hidden width of SwiGLU.
  model.time_conditioning = False  # Whether the noise level steers the norms.
  model.tied_head = True  # Whether the head is the transposed embedding.
  # Block diffusion: blocks of so many tokens are denoised one after another.
  model.attention_block = placeholder(int)  # None: all tokens together.
  model.dtype = 'float32'  # Compute: 'float32' or 'bfloat16'.

  config.adapters = adapters = ConfigDict()  # LoRA, of a model of init_from.
  adapters.rank = 0  # Of every adapter; 0: all parameters are trained.
  adapters.alpha = 16.0  # They are scaled by alpha / rank.
  adapters.targets = ()  # Names of matrices such as 'query'; (): all of them.
  adapters.int8 = False  # Whether the matrices beside them have eight bits.

  config.optimizer = optimizer = ConfigDict()
  optimizer.muon_learning_rate = 0.04  # On matrices; 0: AdamW on all.
  optimizer.learning_rate = 3e-3  # The highest of AdamW, after the warm-up.
  optimizer.warmup_steps = 50  # Of linear growth from 0.
  optimizer.weight_decay = 0.1  # On matrices only.
  optimizer.clip_norm = 1.0  # Largest global norm of the gradient.
  optimizer.beta1 = 0.9  # Decay of the first moment.
  optimizer.beta2 = 0.99  # Decay of the second moment.
  config.ema_decay = 0.99  # Of the averaged parameters, which are the result.
  # A gradient that is not finite updates nothing; so many in a row end the run.
  config.most_skipped = 10

  config.loss = loss = ConfigDict()
  loss.kind = 'bound'  # Per token; 'answer': per token of each row's answer.
  loss.schedule = 'linear'  # Or 'cosine', 'geometric', 'log_linear'.
  loss.times = 'stratified'  # Or 'systematic', 'iid'.
  loss.t_min = 1e-3  # Smallest noise level.
  loss.t_max = 1.0  # Largest noise level.
  loss.weight_power = 0.5  # Of the bound's weights: 1 the bound, 0 unweighted.

  config.mesh = mesh = ConfigDict()  # Devices by axis, see docs/scaling.md.
  mesh.data = -1  # Rows are split over these; -1: all that are left.
  mesh.fsdp = 1  # Rows and parameters.
  mesh.tensor = 1  # Heads, hidden units and ids.
  config.accumulation = 1  # Parts of a batch, computed one after another.
  config.remat = 'dots'  # What a gradient keeps: products, 'all' or 'none'.

  config.evaluation = evaluation = ConfigDict()
  evaluation.num_replicates = 2  # Estimates per window, of 4 network calls.
  evaluation.batch_size = 64  # Windows per network call.
  # Of prepared data, the first ones; 0: it is not evaluated.
  evaluation.most_rows = 4096

  config.saved_dtype = 'float32'  # Of the parameters in model/.
  config.log_every = 50  # Steps per line of metrics.jsonl.
  config.checkpoint_every = 500  # Steps per checkpoint.
  config.keep_checkpoints = 2  # The latest ones that stay.
  return config


# What loss.kind names.
LOSSES = {'bound': losses.continuous_bound, 'answer': losses.answer_loss}
# What rows can be made of prepared documents.
PREPARED_ROWS = ('packed', 'documents', 'examples')
# What a resumed run may change; everything else must be as it was.
MAY_CHANGE = (
  # Where something lies; what is read there is compared.
  'init_from',
  'data.files',
  'data.validation_files',
  'data.prepared',
  'steps',
  'mesh',
  'accumulation',
  'remat',
  'most_skipped',
  'saved_dtype',
  'evaluation',
  'log_every',
  'checkpoint_every',
  'keep_checkpoints',
)


_TEXT_FIELDS = tuple(
  f'data.{name}'
  for name in ('files', 'validation_files', 'split', 'text8', 'bpe_vocab_size')
)
_SHAPE_FIELDS = tuple(
  f'model.{field.name}'
  for field in dataclasses.fields(TransformerConfig)
  if field.name in defaults().model and field.name != 'dtype'
)


def check(config: ConfigDict) -> None:
  """Raises ValueError at the first value that no run can have."""
  _check_fields(config, defaults(), 'config')
  for name, value, least in (
    ('data.length', config.data.length, 1),
    ('data.batch_size', config.data.batch_size, 1),
    ('data.answer_multiple', config.data.answer_multiple, 0),
    ('log_every', config.log_every, 1),
    ('checkpoint_every', config.checkpoint_every, 1),
    ('keep_checkpoints', config.keep_checkpoints, 1),
    ('most_skipped', config.most_skipped, 1),
    ('adapters.rank', config.adapters.rank, 0),
    ('evaluation.batch_size', config.evaluation.batch_size, 1),
    ('evaluation.num_replicates', config.evaluation.num_replicates, 2),
    ('evaluation.most_rows', config.evaluation.most_rows, 0),
  ):
    if value < least:
      raise ValueError(f'config.{name}={value} must be at least {least}')
  if not 0 <= config.seed < 2**32:
    raise ValueError(f'config.seed={config.seed} must lie in [0, 2**32)')
  alpha, length = config.adapters.alpha, config.data.length
  if not 0 < alpha < math.inf:
    raise ValueError(
      f'config.adapters.alpha={alpha} must be positive and finite'
    )
  for name, part in (('data', config.data), ('evaluation', config.evaluation)):
    if part.batch_size * length >= 2**31:
      raise ValueError(
        f'config.{name}.batch_size={part.batch_size} rows of {length} tokens '
        'must have fewer than 2^31'
      )
  for name, value, choices in (
    ('saved_dtype', config.saved_dtype, DTYPES),
    ('model.dtype', config.model.dtype, DTYPES),
    ('loss.kind', config.loss.kind, LOSSES),
    ('data.rows', config.data.rows, ('windows', *PREPARED_ROWS)),
  ):
    if value not in choices:
      raise ValueError(
        f'config.{name}={value!r} must be one of {", ".join(choices)}'
      )
  _check_together(config)


def _check_fields(config, fresh, path):
  """A file may set what a ConfigDict lets pass, such as None, or True for 1."""
  for field in sorted(set(config) ^ set(fresh)):
    told = 'lacks' if field in fresh else 'has an unknown field'
    raise ValueError(f'{path} {told} {field!r}')
  for field, usual in fresh.items():
    name, value = f'{path}.{field}', config[field]
    if usual is not None and not _is_of_type(value, type(usual)):
      raise ValueError(f'{name}={value} must be of type {type(usual).__name__}')
    if isinstance(usual, ConfigDict):
      _check_fields(value, usual, name)


def _is_of_type(value, kind):
  if kind is float:
    kind = float | int
  return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _check_together(config):
  """Raises ValueError where a field is set that could not act."""
  data, prepared = config.data, bool(config.data.prepared)
  if prepared != (data.rows in PREPARED_ROWS):
    raise ValueError(
      f'config.data.rows={data.rows!r} cannot be made of '
      f'{"a prepared directory" if prepared else "text files"}; '
      f'{", ".join(PREPARED_ROWS)} are made of config.data.prepared, windows '
      'of text files'
    )
  if data.random_length_share and data.rows == 'examples':
    raise ValueError(
      f'config.data.random_length_share={data.random_length_share} would cut '
      "the ends of answers off; it is not of config.data.rows='examples'"
    )
  starts, fresh = config.init_from, defaults()
  for names, acts, needed in (
    (_TEXT_FIELDS, not prepared, 'text files'),
    (('evaluation.most_rows',), prepared, 'config.data.prepared'),
    (
      ('data.answer_multiple',),
      data.rows == 'examples',
      "config.data.rows='examples'",
    ),
    (_SHAPE_FIELDS, not starts, 'a fresh model'),
    (('init_mask_id', 'adapters.rank'), starts, 'config.init_from'),
    (
      ('adapters.int8', 'adapters.targets'),
      config.adapters.rank,
      'config.adapters.rank',
    ),
  ):
    for name in names:
      value, usual = map(operator.attrgetter(name), (config, fresh))
      if value != usual and not acts:
        raise ValueError(f'config.{name}={value!r} needs {needed}')
