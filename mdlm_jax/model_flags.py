"""Which model a program loads, and how, as flags."""

import dataclasses
import pathlib
from collections.abc import Mapping

from absl import flags

from mdlm_jax import command_line
from mdlm_jax.models import directory, int8
from mdlm_jax.models.config import DTYPES
from mdlm_jax.models.pretrained import Pretrained
from mdlm_jax.vocab import Vocab

# Flags belong to the program that asks for them, in its --help too.
flags.disclaim_key_flags()

Flags = Mapping[str, flags.FlagHolder]


def define(*, stop_ids: bool = False) -> Flags:
  """Defines the flags; returns their holders, by name.

  Args:
    stop_ids: whether the program ends texts, so that it matters what ends one.
  """
  holders = [
    flags.DEFINE_string(
      'checkpoint',
      None,
      'A model directory, the --workdir of a training run, or a directory '
      'downloaded from a model hub (docs/checkpoints.md). Default: the model '
      'that comes with the package.',
    ),
    flags.DEFINE_enum(
      'dtype',
      None,
      DTYPES,
      'Of the parameters and of the network. Default: as the model was saved.',
    ),
    flags.DEFINE_integer(
      'mask_id',
      None,
      'The id of MASK, of a downloaded directory whose files do not tell it.',
    ),
    flags.DEFINE_bool(
      'int8',
      False,
      'Keeps the matrices of the layers in eight bits: half the memory of '
      'bfloat16, other logits (docs/checkpoints.md).',
    ),
  ]
  if stop_ids:
    holders.append(
      flags.DEFINE_list(
        'stop_ids',
        [],
        'Ids that end a text beside those that the checkpoint names, such as '
        '126348, the end of turn of LLaDA.',
      )
    )
  return {holder.name: holder for holder in holders}


def load(holders: Flags) -> tuple[pathlib.Path, Pretrained]:
  """The directory and the model that the flags name.

  Raises:
    OSError, ValueError: as `directory.find` and `directory.load`; a stop id
      that is no id of the model.
  """
  path = directory.find(holders['checkpoint'].value)
  quantize = None
  if holders['int8'].value:
    with command_line.extra('int8'):
      import qwix  # noqa: F401
    quantize = int8.quantize
  model = directory.load(
    path,
    mask_id=holders['mask_id'].value,
    dtype=holders['dtype'].value,
    quantize=quantize,
  )
  if 'stop_ids' not in holders or not holders['stop_ids'].value:
    return path, model
  words = holders['stop_ids'].value
  try:
    ids = [int(word) for word in words]
  except ValueError:
    raise ValueError(
      f'--stop_ids={",".join(words)} must be ids, written 5,6,7'
    ) from None
  return path, model._replace(vocab=with_ends(model.vocab, ids))


def with_ends(vocab: Vocab, ids: list[int]) -> Vocab:
  """The same roles, with more ids that end a text.

  Example:
    >>> with_ends(Vocab(8, mask_id=1, eos_ids=[2]), [2, 3]).eos_ids
    (2, 3)
  """
  eos_ids = tuple(dict.fromkeys([*vocab.eos_ids, *ids]))
  return dataclasses.replace(
    vocab, eos_ids=eos_ids, pad_is_eos=vocab.pad_id in eos_ids
  )
