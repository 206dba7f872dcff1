"""How a published layout is described: tensors of files, parameters here."""

import functools
import types
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mdlm_jax import schedules
from mdlm_jax.models.config import TransformerConfig

_VOCAB_MULTIPLE = 64


class Mapping(NamedTuple):
  """How one tensor of a file becomes parameters, and back.

  Attributes:
    leaves: keys of the parameters, such as 'blocks/query/kernel'.
    from_file: the file's tensor to a tuple of arrays, one for each leaf.
    to_file: those arrays to the file's tensor.
    index: where these arrays stand in the parameters: () for all of them,
      (layer,) or (layer, expert) in a stack.
  """

  leaves: tuple[str, ...]
  from_file: Callable
  to_file: Callable
  index: tuple[int, ...] = ()


class Buffer(NamedTuple):
  """A tensor of the files that is no parameter; a file may lack it.

  Attributes:
    value: as config.json tells it, and as it is written.
    read: whether the network reads it, so that another value is an error.
  """

  value: np.ndarray
  read: bool = False


class Layout(NamedTuple):
  """A published model, before its files are opened.

  Attributes:
    config: shape of the network, dtype float32.
    tensors: mapping of every tensor of the files, by its key.
    num_tokens: ids from this one on are rows of the table without a token.
    mask_id: None where only the tokenizer's files tell.
    copies: keys that a file may hold beside the key of which they are copies,
      such as the head of a model whose head is its embedding table.
    buffers: tensors that are no parameters, by their keys.
    schedule: the masking schedule that it was trained with.
  """

  config: TransformerConfig
  tensors: dict[str, Mapping]
  num_tokens: int
  mask_id: int | None
  copies: dict[str, str]
  buffers: dict[str, Buffer] = types.MappingProxyType({})
  schedule: schedules.Schedule = schedules.linear()


class Fields(dict):
  """The fields of a config.json; a missing one is the user's error."""

  def __missing__(self, name):
    raise ValueError(f'config.json lacks {name}')

  def require(self, **allowed: tuple) -> None:
    """Refuses a field with another value; absent is the first one."""
    for name, values in allowed.items():
      if self.get(name, values[0]) not in values:
        raise ValueError(
          f'config.json: {name}={self[name]!r} is not supported, must be one '
          f'of {values}'
        )


def numbered(
  pattern: str, mappings: dict[str, Mapping], count: int, *, first: int = 0
) -> dict[str, Mapping]:
  """The tensors of equal parts: layers, or the experts of a layer.

  Args:
    pattern: with which their keys begin; `{}` is the number of the part.
    mappings: those of one part, by the rest of the key.
    count: number of parts, which is the new first axis of the parameters.
    first: number of the first part in the keys.

  Example:
    >>> part = numbered('layers.{}.', {'norm': whole('norm')}, 2, first=1)
    >>> {key: mapping.index for key, mapping in part.items()}
    {'layers.1.norm': (0,), 'layers.2.norm': (1,)}
  """
  return {
    pattern.format(first + i) + name: mapping._replace(
      index=(i, *mapping.index)
    )
    for i in range(count)
    for name, mapping in mappings.items()
  }


def inside(node: str, mappings: dict[str, Mapping]) -> dict[str, Mapping]:
  """The same, their parameters under `node`."""
  return {
    name: mapping._replace(
      leaves=tuple(f'{node}/{leaf}' for leaf in mapping.leaves)
    )
    for name, mapping in mappings.items()
  }


def whole(leaf: str) -> Mapping:
  """A tensor that is a parameter as it is."""
  return Mapping((leaf,), _identity, _only)


def transposed(leaf: str) -> Mapping:
  """A matrix, stored [out, in] in files and [in, out] here."""
  return Mapping((leaf,), _transposed, _only_transposed)


def matrix(name: str) -> Mapping:
  """The matrix of a linear map."""
  return transposed(f'{name}/kernel')


def biases(pattern: str) -> dict[str, Mapping]:
  """The biases of queries, keys and values; `{}` is q, k or v in their keys."""
  return {
    pattern.format(short): whole(f'{leaf}/bias')
    for short, leaf in (('q', 'query'), ('k', 'key'), ('v', 'value'))
  }


def padded_size(rows: int) -> int:
  """Rows of a table whose logits are reduced in blocks of one size."""
  return -(-rows // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def table(leaf: str, rows: int, size: int) -> Mapping:
  """A table that has `rows` rows in files, and zeros up to `size` here."""
  return Mapping(
    (leaf,),
    functools.partial(_padded, size),
    functools.partial(_first, rows),
  )


def _identity(x):
  return (x,)


def _only(x):
  return x


def _transposed(x):
  return (x.T,)


def _only_transposed(x):
  return x.T


def _padded(size, x):
  return (jnp.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1)),)


def _first(rows, x):
  return x[:rows]


def ends(
  embedding: str, norm: str, head: str, *, tied: bool
) -> dict[str, Mapping]:
  """What lies around the layers; a tied head is the embedding table.

  Args:
    embedding: key of the table of ids.
    norm: key of the last norm.
    head: key of the head.
    tied: whether the head has no tensor of its own.
  """
  own_head = {} if tied else {head: whole('head')}
  return {embedding: whole('embedding'), norm: whole('norm/scale')} | own_head
