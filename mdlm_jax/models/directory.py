"""A model as a directory, the same for every model trained with this library.

config.json         shape of the network, roles of the ids, masking schedule
model.safetensors   parameters, keys such as 'blocks/query/kernel'
tokenizer.json      in the layout of the tokenizers library
training.json       how it was trained, {} where unknown

`load` also reads the directories of `published` models.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable

import jax
import numpy as np
import safetensors
import safetensors.flax

from mdlm_jax import schedules
from mdlm_jax.models import (
  hub_tokenizer,
  json_files,
  param_tree,
  published,
  transformer,
)
from mdlm_jax.models.config import DTYPES, ExpertsConfig
from mdlm_jax.models.pretrained import Pretrained
from mdlm_jax.tokenizer import Tokenizer
from mdlm_jax.vocab import Vocab

_CONFIG, _WEIGHTS, _TOKENIZER, _HISTORY = (
  'config.json',
  'model.safetensors',
  'tokenizer.json',
  'training.json',
)
_FORMAT = 1
# Fields of a network that every directory has. All others may be left out and
# then have their defaults: directories stay readable when there are new ones.
_FIELDS = {
  'vocab_size',
  'num_layers',
  'model_dim',
  'num_heads',
  'mlp_dim',
  'max_length',
  'num_kv_heads',
  'time_conditioning',
  'tied_head',
  'rope_base',
  'norm_eps',
  'dtype',
}
_ARCHITECTURE = 'mdlm_jax'
# In config.json: that the tokenizer came with a published model.
_OF_HUB = 'hub_tokenizer'
_PACKAGED = pathlib.Path(__file__).parents[1] / 'pretrained' / 'sotu'

Path = str | os.PathLike


def save(
  directory: Path,
  config: transformer.TransformerConfig,
  params: transformer.Params,
  vocab: Vocab,
  tokenizer: Tokenizer | hub_tokenizer.HubTokenizer,
  *,
  schedule: str = 'linear',
  dtype: str = 'float32',
  history: dict | None = None,
) -> None:
  """Writes a model; each file is replaced only once it is written whole.

  Args:
    directory: made if missing.
    config: shape of the network.
    params: its parameters, as `transformer.init` nests them.
    vocab: roles of the ids.
    tokenizer: text to ids and back.
    schedule: 'linear', 'cosine', 'geometric' or 'log_linear', with the default
      constants.
    dtype: of the stored parameters, 'float32' or 'bfloat16'.
    history: how it was trained, what JSON can hold.

  Raises:
    ValueError: parts that do not belong together, or an unknown name. Nothing
      is written then.
    OSError: a file could not be written; the one before it stays.
  """
  _check_names(schedule, dtype)
  _check_roles(config, vocab, tokenizer)
  weights = param_tree.flat(params)
  _check_weights(config, {key: leaf.shape for key, leaf in weights.items()})
  content = {
    'format': _FORMAT,
    'architecture': _ARCHITECTURE,
    'model': _config_fields(config),
    'vocab': dataclasses.asdict(vocab),
    'schedule': schedule,
  }
  if isinstance(tokenizer, hub_tokenizer.HubTokenizer):
    content[_OF_HUB] = True
  weights = {
    key: np.asarray(leaf).astype(dtype) for key, leaf in weights.items()
  }
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  for name, data in (
    (_WEIGHTS, safetensors.flax.save(weights)),
    (_TOKENIZER, tokenizer.to_json().encode()),
    (_HISTORY, _json(history or {})),
    (_CONFIG, _json(content)),
  ):
    unfinished = directory / f'{name}.tmp'
    try:
      unfinished.write_bytes(data)
    except OSError as error:
      unfinished.unlink(missing_ok=True)  # Such as half of it, on a full disk.
      raise OSError(
        f'{directory / name} could not be written: {error.strerror}'
      ) from error
    unfinished.replace(directory / name)


def load(
  directory: Path,
  *,
  mask_id: int | None = None,
  dtype: str | None = None,
  sharding: Callable | None = None,
  quantize: Callable | None = None,
) -> Pretrained:
  """Reads what `save` wrote, or a published model.

  Args:
    directory: what `find` found.
    mask_id: the id of MASK of a published model that does not tell it.
    dtype: of the parameters and of the network, 'float32' or 'bfloat16'. None:
      float32 parameters, and the network as it was trained; of a published
      model as `published.load` says.
    sharding: where parameters are placed, see `published.load`.
    quantize: what is kept of a parameter, such as `int8.quantize`.

  Raises:
    OSError: a file is missing or cannot be read.
    ValueError: a file is not of this layout, or the files do not belong
      together; names what is missing, unknown or of the wrong shape.
  """
  directory = pathlib.Path(directory)
  content = json_files.read(directory / _CONFIG)
  if 'architecture' not in content:
    return published.load(
      directory,
      mask_id=mask_id,
      dtype=dtype,
      sharding=sharding,
      quantize=quantize,
    )
  config, vocab, schedule = _read_config(content, directory / _CONFIG)
  tokenizer = load_tokenizer(directory, mask_id=mask_id)
  _check_roles(config, vocab, tokenizer)
  if dtype is not None:
    config = dataclasses.replace(config, dtype=dtype)
  return Pretrained(
    config,
    transformer.denoiser(config),
    _read_weights(
      directory / _WEIGHTS, config, dtype or 'float32', sharding, quantize
    ),
    vocab,
    tokenizer,
    schedules.named_schedule(schedule),
    read_history(directory),
  )


def load_tokenizer(
  directory: Path, *, mask_id: int | None = None
) -> Tokenizer | hub_tokenizer.HubTokenizer | hub_tokenizer.NoTokenizer:
  """The tokenizer of a model; its `vocab` has the roles of the ids.

  Args:
    directory: what `find` found; weights need not be there.
    mask_id: see `load`.

  Raises:
    OSError, ValueError: as of `load`, but for weights.
  """
  directory = pathlib.Path(directory)
  content = json_files.read(directory / _CONFIG)
  if 'architecture' not in content:
    return published.load_tokenizer(directory, mask_id=mask_id)
  _, vocab, _ = _read_config(content, directory / _CONFIG)
  if mask_id not in (None, vocab.mask_id):
    raise ValueError(f'{mask_id=}, but the directory says {vocab.mask_id}')
  if not content.get(_OF_HUB, False):
    return Tokenizer.load(directory / _TOKENIZER)
  files = hub_tokenizer.read_files(directory)
  if files.backend is None:
    raise FileNotFoundError(f'no such file: {directory / _TOKENIZER}')
  return hub_tokenizer.HubTokenizer(files.backend, vocab)


def named_tokenizer(
  path: Path, *, mask_id: int | None = None
) -> Tokenizer | hub_tokenizer.HubTokenizer:
  """The tokenizer that a user names.

  Args:
    path: a model directory of this library or of a hub, the work directory of
      a training run, a directory with a tokenizer.json, or such a file.
    mask_id: of MASK, where no file tells it; may be the first id after those
      of a tokenizer.json alone.

  Raises:
    OSError: no such file.
    ValueError: no tokenizer, or MASK is not known.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    with contextlib.suppress(FileNotFoundError):  # It may hold no model.
      found = find(path)
      tokenizer = load_tokenizer(found, mask_id=mask_id)
      if isinstance(tokenizer, hub_tokenizer.NoTokenizer):
        raise ValueError(f'{found} has no {_TOKENIZER}')
      return tokenizer
    path = path / _TOKENIZER
  if not path.is_file():
    raise FileNotFoundError(f'no tokenizer: no such file: {path}')
  try:
    tokenizer = Tokenizer.load(path)
  except ValueError:  # Perhaps it is one of a hub.
    return hub_tokenizer.load(path, mask_id=mask_id)
  if mask_id not in (None, tokenizer.vocab.mask_id):
    raise ValueError(f'{mask_id=}, but in {path} it is 1')
  return tokenizer


def read_history(directory: Path) -> dict:
  """How the model of a directory was trained, {} where that is not known."""
  return json_files.read_if_any(pathlib.Path(directory) / _HISTORY)


def find(checkpoint: Path | None = None) -> pathlib.Path:
  """The model directory that a user means.

  Args:
    checkpoint: a model directory, or the work directory of a training run,
      which holds one named `model`; None: the model that comes with the
      package.

  Raises:
    FileNotFoundError: neither holds a `config.json`.
  """
  if checkpoint is None:
    return _PACKAGED
  for directory in (
    pathlib.Path(checkpoint),
    pathlib.Path(checkpoint, 'model'),
  ):
    if (directory / _CONFIG).is_file():
      return directory
  raise FileNotFoundError(
    f'no model in {checkpoint}: it has neither {_CONFIG} nor model/{_CONFIG}'
  )


def _json(content: dict) -> bytes:
  return (json.dumps(content, indent=2) + '\n').encode()


def _config_fields(config):
  """The fields of a config, of those not in `_FIELDS` what is no default."""
  values = dataclasses.asdict(config)
  return {
    field.name: values[field.name]
    for field in dataclasses.fields(config)
    if field.name in _FIELDS or values[field.name] != field.default
  }


def _read_config(content, path):
  parts = {'format': int, 'architecture': str, 'model': dict, 'vocab': dict}
  for name, kind in (parts | {'schedule': str}).items():
    if not isinstance(content.get(name), kind):
      raise ValueError(
        f'{path} does not describe a model: {name} is {content.get(name)!r}'
      )
  kind = content['format'], content['architecture']
  if kind != (_FORMAT, _ARCHITECTURE):
    raise ValueError(
      f'{path} has format and architecture {kind}, must be '
      f'{(_FORMAT, _ARCHITECTURE)}'
    )
  _check_names(content['schedule'], 'float32')
  fields = dict(content['model'])
  if fields.get('experts') is not None:
    fields['experts'] = _build(ExpertsConfig, fields['experts'], path)
  config = _build(transformer.TransformerConfig, fields, path, needed=_FIELDS)
  return config, _build(Vocab, content['vocab'], path), content['schedule']


def _build(kind, values, path, *, needed=None):
  """An instance of a dataclass from its fields: all, or those that it needs."""
  names = {field.name for field in dataclasses.fields(kind)}
  lacking, unknown = (needed or names) - set(values), set(values) - names
  if lacking or unknown:
    raise ValueError(
      f'{path}: {kind.__name__} lacks {sorted(lacking)} and does not know '
      f'{sorted(unknown)}'
    )
  try:
    return kind(**values)
  except Exception as error:  # JSON may hold values of any kind.
    raise ValueError(f'{path}: {error}') from None


def _read_weights(path, config, dtype, sharding, quantize):
  if not path.is_file():
    raise FileNotFoundError(f'no such file: {path}')
  try:
    with safetensors.safe_open(path, framework='np') as file:
      weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
  except safetensors.SafetensorError as error:
    raise ValueError(f'{path} is not a safetensors file: {error}') from None
  _check_weights(config, {key: leaf.shape for key, leaf in weights.items()})

  def placed(key, leaf):
    place = sharding and sharding(key, leaf.shape)
    array = jax.device_put(leaf.astype(dtype), place)
    return array if quantize is None else quantize(key, array)

  return param_tree.nested(
    {key: placed(key, leaf) for key, leaf in weights.items()}
  )


def _check_names(schedule, dtype):
  schedules.named_schedule(schedule)
  if dtype not in DTYPES:
    raise ValueError(f'dtype={dtype!r} must be one of {", ".join(DTYPES)}')


def _check_roles(config, vocab, tokenizer):
  if config.vocab_size != vocab.size:
    raise ValueError(
      f'a network with vocab_size={config.vocab_size} does not fit a '
      f'vocabulary of {vocab.size} ids'
    )
  if tokenizer.vocab != vocab:
    raise ValueError(
      f'the tokenizer has {tokenizer.vocab}, the model has {vocab}'
    )


def _check_weights(config, shapes):
  """ValueError with every key that is missing, unknown or misshapen."""
  expected = {
    key: leaf.shape for key, leaf in param_tree.shapes(config).items()
  }
  problems = [f'missing {key}' for key in expected.keys() - shapes.keys()]
  problems += [f'unknown {key}' for key in shapes.keys() - expected.keys()]
  problems += [
    f'{key} is {list(shapes[key])}, must be {list(expected[key])}'
    for key in expected.keys() & shapes.keys()
    if tuple(shapes[key]) != expected[key]
  ]
  if problems:
    raise ValueError(
      f'the parameters do not fit the config: {"; ".join(sorted(problems))}'
    )
