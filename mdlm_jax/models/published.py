"""Models as they are downloaded from a hub; `families` says which are known.

config.json            shape of the network, roles of the ids
*.safetensors          parameters, in one file or in many with an index
tokenizer.json         optional; without it prompts are ids
tokenizer_config.json, special_tokens_map.json, generation_config.json
                       optional; roles of ids that config.json does not tell

Nothing in a directory is run or unpickled.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mdlm_jax.models import (
  families,
  hub_tokenizer,
  json_files,
  param_tree,
  shards,
  transformer,
)
from mdlm_jax.models.config import DTYPES
from mdlm_jax.models.pretrained import Pretrained
from mdlm_jax.vocab import Vocab


def load(
  directory: str | os.PathLike,
  *,
  mask_id: int | None = None,
  dtype: str | None = None,
  sharding: Callable | None = None,
  quantize: Callable | None = None,
) -> Pretrained:
  """Reads a directory of a published model.

  Tensors go one by one from their file to their place in `dtype`, so that the
  host holds the model (or nothing of it, where the default device is another)
  and the largest tensor.

  Args:
    directory: as it was downloaded.
    mask_id: the id of MASK where no file of the directory tells it.
    dtype: of the parameters and of the network, 'float32' or 'bfloat16'; None:
      that of the files, float32 where they hold anything wider than bfloat16.
    sharding: `sharding(key, shape)` of a parameter, such as
      ('blocks/query/kernel', (32, 4096, 4096)), as JAX places arrays; None: all
      on the default device.
    quantize: `quantize(key, values)` is what is kept of a parameter, such as
      `int8.quantize`; values of a layer come alone.

  Returns:
    The model. Its history is empty, its schedule that of its family.

  Raises:
    OSError: a file is missing or cannot be read.
    ValueError: an architecture or a setting that is not known; tensors that are
      missing, unused or misshapen, all of them listed; a damaged file; weights
      only as a pickle; no id for MASK.
  """
  if dtype not in (None, *DTYPES):
    raise ValueError(f'{dtype=} must be None or one of {", ".join(DTYPES)}')
  directory = pathlib.Path(directory)
  layout = families.layout(json_files.read(directory / 'config.json'))
  tokenizer = load_tokenizer(directory, mask_id=mask_id)
  entries = shards.entries(directory)
  if dtype is None:
    dtype = shards.dtype_of(
      entry for key, entry in entries.items() if key in layout.tensors
    )
  config = dataclasses.replace(layout.config, dtype=dtype)
  return Pretrained(
    config,
    transformer.denoiser(config),
    load_params(layout, entries, dtype, sharding=sharding, quantize=quantize),
    tokenizer.vocab,
    tokenizer,
    layout.schedule,
    {},
  )


def load_tokenizer(
  directory: str | os.PathLike, *, mask_id: int | None = None
) -> hub_tokenizer.HubTokenizer | hub_tokenizer.NoTokenizer:
  """The tokenizer of a published model, with the roles of its ids.

  Args:
    directory: as it was downloaded; weights need not be there.
    mask_id: see `load`.

  Raises:
    OSError: a file is missing or cannot be read.
    ValueError: as of `load`, but for tensors.
  """
  directory = pathlib.Path(directory)
  content = json_files.read(directory / 'config.json')
  generation = json_files.read_if_any(directory / 'generation_config.json')
  files = hub_tokenizer.read_files(directory)
  layout = families.layout(content)
  vocab = _vocab(layout, (content, generation), files, mask_id)
  if files.backend is None:
    return hub_tokenizer.NoTokenizer(directory, vocab)
  return hub_tokenizer.HubTokenizer(files.backend, vocab)


def load_params(
  layout: families.Layout,
  entries: dict[str, shards.Entry],
  dtype: str,
  *,
  tensors: Callable = shards.tensors,
  sharding: Callable | None = None,
  quantize: Callable | None = None,
) -> transformer.Params:
  """The parameters of a layout, streamed from files.

  Args:
    layout: which tensor becomes which parameters.
    entries: the tensors of the files.
    dtype: of the parameters.
    tensors: entries to keys and arrays, one after another.
    sharding: see `load`.
    quantize: see `load`.

  Returns:
    Nested dict, as `transformer.init` gives it.

  Raises:
    ValueError: tensors that are missing, unused or misshapen; a copy that
      differs from its original.
  """
  leaves = param_tree.shapes(layout.config)
  _check_entries(layout, leaves, entries)
  _check_copies(layout, entries)
  _check_buffers(layout, entries)
  arrays = {}
  used = {key: x for key, x in entries.items() if key in layout.tensors}
  for key, tensor in tensors(used):
    mapping = layout.tensors[key]
    parts = _parts(tensor, from_file=mapping.from_file, dtype=dtype)
    for name, part in zip(mapping.leaves, parts, strict=True):
      place = sharding and sharding(name, leaves[name].shape)
      if quantize is not None:
        part = quantize(name, part)
      if mapping.index:
        outer = leaves[name].shape[: len(mapping.index)]
        part = _stacked(
          arrays.pop(name, None), part, outer, mapping.index, place
        )
      else:
        part = jax.tree.map(lambda x, place=place: _placed(x, place), part)
      # Or the host would read ahead of what is done with the tensors.
      arrays[name] = jax.block_until_ready(part)
  return param_tree.nested(arrays)


@functools.partial(jax.jit, static_argnames=('from_file', 'dtype'))
def _parts(tensor, *, from_file, dtype):
  """What a tensor of a file holds, one array a parameter."""
  return tuple(part.astype(dtype) for part in from_file(tensor))


def _stacked(stack, part, outer, index, place):
  """A stack, a new one if None, with `part` at `index` of its first axes."""
  if stack is None:
    stack = jax.tree.map(
      lambda x: jnp.zeros(
        (*outer, *x.shape), x.dtype, device=_fitting(place, (*outer, *x.shape))
      ),
      part,
    )
  return jax.tree.map(
    lambda whole, x: _with_part(
      whole,
      _placed(x, place, len(outer)),
      index,
      place=_fitting(place, whole.shape),
    ),
    stack,
    part,
  )


def _fitting(place, shape):
  """A sharding for an array of which some axes have length 1."""
  if not isinstance(place, jax.sharding.NamedSharding):
    return place
  axes = [*place.spec, *[None] * (len(shape) - len(place.spec))]
  axes = [None if n == 1 else axis for axis, n in zip(axes, shape, strict=True)]
  return place.update(spec=jax.P(*axes))


def _placed(part, place, num_outer=0):
  """An array where it belongs, as a part of one with more axes."""
  place = _fitting(place, (2,) * num_outer + part.shape)
  if isinstance(place, jax.sharding.NamedSharding):
    place = place.update(spec=jax.P(*place.spec[num_outer:]))
  return part if place is None else jax.device_put(part, place)


@functools.partial(jax.jit, donate_argnames='stack', static_argnames='place')
def _with_part(stack, part, index, *, place=None):
  """A stack with `part` at `index` of its first axes, in place."""
  # `at[index].set` of bfloat16 would copy the stack on CPU.
  stack = jax.lax.dynamic_update_slice(
    stack,
    part.reshape(*[1] * len(index), *part.shape),
    (*index, *[0] * part.ndim),
  )
  if place is None:
    return stack
  return jax.lax.with_sharding_constraint(stack, place)


def _check_entries(layout, leaves, entries):
  """ValueError with every key that is missing, unused or misshapen."""

  @functools.cache  # Of thousands of experts one is asked.
  def shape_in_file(mapping):
    parts = [
      jax.ShapeDtypeStruct(leaf.shape[len(mapping.index) :], leaf.dtype)
      for leaf in (leaves[name] for name in mapping.leaves)
    ]
    return jax.eval_shape(mapping.to_file, *parts).shape

  expected = {
    key: shape_in_file(mapping._replace(index=(0,) * len(mapping.index)))
    for key, mapping in layout.tensors.items()
  }
  expected |= {
    key: buffer.value.shape
    for key, buffer in layout.buffers.items()
    if key in entries
  }
  known = expected.keys() | layout.copies.keys()
  problems = [f'missing {key}' for key in expected.keys() - entries.keys()]
  problems += [f'unused {key}' for key in entries.keys() - known]
  problems += [
    f'{key} is {list(entries[key].shape)}, must be {list(shape)}'
    for key, shape in expected.items()
    if key in entries and entries[key].shape != shape
  ]
  if problems:
    raise ValueError(
      'the tensors of the files do not fit config.json: '
      f'{"; ".join(sorted(problems))}'
    )


def _check_copies(layout, entries):
  for copy, original in layout.copies.items():
    if copy not in entries:
      continue
    both = {key: entries[key] for key in (copy, original)}
    first, second = (tensor for _, tensor in shards.tensors(both))
    if not np.array_equal(first, second):
      raise ValueError(
        f'{copy} differs from {original}, but config.json ties the two'
      )


def _check_buffers(layout, entries):
  present = {
    key: entries[key]
    for key, buffer in layout.buffers.items()
    if buffer.read and key in entries
  }
  for key, tensor in shards.tensors(present):
    value = layout.buffers[key].value
    if not np.allclose(tensor.astype(value.dtype), value, rtol=1e-2):
      raise ValueError(f'{key} has values other than config.json says')


def _vocab(layout, configs, files, mask_id):
  """Roles of the ids, from whichever file tells them."""

  def role(name):
    """Ids that the files give a role, in order and without repetition."""
    ids = []
    for config in configs:
      value = config.get(f'{name}_token_id')
      values = value if isinstance(value, list) else [value]
      if not all(isinstance(i, int | None) for i in values):
        raise ValueError(f'{name}_token_id={value!r} must be an id or ids')
      ids += values
    ids.append(files.special_id(f'{name}_token'))
    return list(dict.fromkeys(i for i in ids if i is not None))

  mask_ids = role('mask') if layout.mask_id is None else [layout.mask_id]
  if not mask_ids and mask_id is None:
    raise ValueError(
      'no MASK: config.json has no mask_token_id and tokenizer_config.json no '
      'mask_token with an id; --mask_id tells it (in Python, `mask_id`)'
    )
  if mask_ids and mask_id not in (None, mask_ids[0]):
    raise ValueError(f'{mask_id=}, but the directory says {mask_ids[0]}')
  mask_ids = mask_ids or [mask_id]
  size, pads = layout.config.vocab_size, role('pad')
  # Some name the end of a text only as what fills it up.
  eos_ids = role('eos') or pads
  pad_id, bos_id = ((role(name) or [None])[0] for name in ('pad', 'bos'))
  forbidden = set(range(layout.num_tokens, size))
  if files.ids is not None:
    forbidden |= set(range(size)) - files.ids
  return Vocab(
    size=size,
    mask_id=mask_ids[0],
    pad_id=pad_id,
    bos_id=bos_id,
    eos_ids=eos_ids,
    forbidden_ids=sorted(forbidden - {mask_ids[0]}),
    pad_is_eos=pad_id is not None and pad_id in eos_ids,
  )
