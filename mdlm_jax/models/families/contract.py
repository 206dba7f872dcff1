"""How a published layout is described: tensors of files, parameters here."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from mdlm_jax.models.config import TransformerConfig


class Mapping(NamedTuple):
  """How one tensor of a file becomes parameters of one layer, and back.

  Attributes:
    leaves: keys of the parameters, such as 'blocks/query/kernel'.
    from_file: the file's tensor to a tuple of arrays, one for each leaf.
    to_file: those arrays to the file's tensor.
  """

  leaves: tuple[str, ...]
  from_file: Callable
  to_file: Callable


class Layout(NamedTuple):
  """A published model, before its files are opened.

  Attributes:
    config: shape of the network, dtype float32.
    outer: mappings by key, for the tensors outside the layers.
    layer: mappings by key for the tensors of layer `{}`.
    num_tokens: ids from this one on are rows of the table without a token.
    mask_id: None where only the tokenizer's files tell.
    copies: keys that a file may hold beside the key of which they are copies,
      such as the head of a model whose head is its embedding table.
  """

  config: TransformerConfig
  outer: dict[str, Mapping]
  layer: dict[str, Mapping]
  num_tokens: int
  mask_id: int | None
  copies: dict[str, str]


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


def whole(leaf: str) -> Mapping:
  return Mapping((leaf,), _identity, _only)


def matrix(name: str) -> Mapping:
  """A linear map, stored [out, in] in files and [in, out] here."""
  return Mapping((f'{name}/kernel',), _transposed, _only_transposed)


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
  return (jnp.pad(x, ((0, size - len(x)), (0, 0))),)


def _first(rows, x):
  return x[:rows]


def biases(name):
  return {
    name.format(short): whole(f'blocks/{leaf}/bias')
    for short, leaf in (('q', 'query'), ('k', 'key'), ('v', 'value'))
  }
