"""Writes a model in another layout: .safetensors files and a config.json.

  python scripts/convert.py --checkpoint=runs/mine --weights=ema --output=DIR
  python scripts/convert.py --checkpoint=HUB --output=DIR --dtype=bfloat16
  python scripts/convert.py --checkpoint=HUB --output=DIR --to=mdlm_jax

A model trained with this library goes into the closest published layout
(docs/checkpoints.md says which have room for what); a published one is written
in its own layout again, bit for bit, in files of --max_shard_gb, or as a
directory of this library. The output directory must not hold anything yet.

A training run keeps the weights as they are and their moving average: say which
by --weights=raw or --weights=ema. The choice is written into the files.
"""

import json
import pathlib
import shutil

from absl import flags

from mdlm_jax import command_line, schedules
from mdlm_jax.models import (
  conversion,
  directory,
  families,
  hub_tokenizer,
  json_files,
  shards,
)
from mdlm_jax.models.config import DTYPES
from mdlm_jax.models.pretrained import Pretrained

_CHECKPOINT = flags.DEFINE_string(
  'checkpoint',
  None,
  'A model directory, the --workdir of a training run, or a directory '
  'downloaded from a model hub.',
  required=True,
)
_MASK_ID = flags.DEFINE_integer(
  'mask_id',
  None,
  'The id of MASK, of a downloaded directory whose files do not tell it.',
)
_OUTPUT = flags.DEFINE_string(
  'output', None, 'The directory to be written.', required=True
)
_TO = flags.DEFINE_enum(
  'to',
  'published',
  ['published', 'mdlm_jax'],
  'A published layout, or that of this library.',
)
_WEIGHTS = flags.DEFINE_enum(
  'weights',
  None,
  ['raw', 'ema'],
  'Of the latest checkpoint of a training run: the weights, or their moving '
  'average.',
)
_DTYPE = flags.DEFINE_enum(
  'dtype',
  None,
  DTYPES,
  'Of the tensors. Default: that of the files; of a model of this library '
  'float32.',
)
_MAX_SHARD_GB = flags.DEFINE_float(
  'max_shard_gb',
  5.0,
  'Largest file, in 10^9 bytes. Of --to=published.',
  lower_bound=1e-9,
)

# What is written anew. Everything else, such as the tokenizer's files and the
# code that the hub's own library runs, belongs to the model and is copied.
_WEIGHT_FILES = (
  '*.safetensors', '*.safetensors.index.json', '*.bin', '*.bin.index.json',
  '*.pt', '*.pth', '*.ckpt', '*.gguf',
)  # fmt: skip
_TOKENIZER_FILES = (
  'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json',
  'chat_template.jinja',
)  # fmt: skip


def source() -> tuple[pathlib.Path, Pretrained]:
  """The model's directory, and the model with the weights asked for."""
  given = pathlib.Path(_CHECKPOINT.value)
  path = directory.find(given)
  is_run = (given / 'checkpoints').is_dir()
  if is_run and _WEIGHTS.value is None:
    raise ValueError(
      f'{given} is a training run, which holds two sets of weights: choose '
      '--weights=raw or --weights=ema'
    )
  if not is_run and _WEIGHTS.present:
    raise ValueError(
      f'--weights={_WEIGHTS.value} cannot act: {given} holds one set of weights'
    )
  model = directory.load(path, mask_id=_MASK_ID.value)
  if is_run:
    params, step = weights_of_run(given / 'checkpoints', _WEIGHTS.value)
    history = {**model.history, 'step': step, 'weights': _WEIGHTS.value}
    model = model._replace(params=params, history=history)
  return path, model


def weights_of_run(path: pathlib.Path, weights: str):
  """Parameters of the latest checkpoint, and its step."""
  with command_line.extra('train'):
    from mdlm_jax import checkpoints, training
  if checkpoints.latest_step(path) is None:
    raise ValueError(f'{path} holds no checkpoint')
  decay = checkpoints.latest_settings(path)['config']['ema_decay']
  fields = checkpoints.latest_state(path)
  state = training.TrainState(**fields)
  if weights == 'ema':
    return training.averaged_params(state, decay), int(state.step)
  return state.params, int(state.step)


def write_published(path, model, output) -> list[str]:
  """Tensors and config.json in a published layout."""
  content = json_files.read(path / 'config.json')
  metadata = {}
  if 'weights' in model.history:
    metadata['weights'] = model.history['weights']
  if 'architecture' in content:  # Of this library.
    content, params = conversion.as_published(
      model.config, model.params, model.vocab
    )
    dtype = _DTYPE.value or 'float32'
    content['torch_dtype'] = dtype
    tensors = conversion.published_tensors(
      families.layout(content), params, dtype=dtype
    )
    copied = ['tokenizer.json']
    written = (json.dumps(content, indent=2) + '\n').encode()
  else:
    tensors = conversion.published_tensors(
      families.layout(content),
      model.params,
      entries=shards.entries(path),
      dtype=_DTYPE.value,
    )
    copied = [
      entry.name
      for entry in sorted(path.iterdir())
      if entry.is_file() and not any(map(entry.match, _WEIGHT_FILES))
    ]
    written = (path / 'config.json').read_bytes()
    if _DTYPE.value is not None:
      for name in ('torch_dtype', 'dtype'):
        if name in content:
          content[name] = _DTYPE.value
      written = (json.dumps(content, indent=2) + '\n').encode()
  names = conversion.write_tensors(
    output,
    tensors,
    max_bytes=max(round(_MAX_SHARD_GB.value * 1e9), 1),
    metadata=metadata,
  )
  for name in copied:
    if name != 'config.json' and (path / name).exists():
      shutil.copyfile(path / name, output / name)
  (output / 'config.json').write_bytes(written)
  return names


def write_own(path, model, output) -> list[str]:
  """A directory of this library, and the files of a chat template."""
  names = [
    name
    for name in schedules.SCHEDULES
    if schedules.named_schedule(name) == model.schedule
  ]
  dtype = str(model.params['embedding'].dtype)
  directory.save(
    output,
    model.config,
    model.params,
    model.vocab,
    model.tokenizer,
    schedule=names[0],
    dtype=_DTYPE.value or dtype,
    history=model.history,
  )
  for name in _TOKENIZER_FILES:
    if (path / name).exists() and not (output / name).exists():
      shutil.copyfile(path / name, output / name)
  return ['model.safetensors']


def main(argv):
  del argv
  output = pathlib.Path(_OUTPUT.value)
  if output.exists() and (not output.is_dir() or any(output.iterdir())):
    raise ValueError(f'--output={output} exists and is no empty directory')
  if _TO.value == 'mdlm_jax' and _MAX_SHARD_GB.present:
    raise ValueError('--max_shard_gb cannot act with --to=mdlm_jax')
  path, model = source()
  has_tokenizer = not isinstance(model.tokenizer, hub_tokenizer.NoTokenizer)
  if _TO.value == 'mdlm_jax' and not has_tokenizer:
    raise ValueError(f'--to=mdlm_jax needs a tokenizer.json in {path}')
  output.mkdir(parents=True, exist_ok=True)
  write = write_own if _TO.value == 'mdlm_jax' else write_published
  names = write(path, model, output)
  size = sum((output / name).stat().st_size for name in names)
  print(f'{output}: {len(names)} file(s) of weights, {size / 1e9:.3g} GB')


if __name__ == '__main__':
  command_line.run(main)
