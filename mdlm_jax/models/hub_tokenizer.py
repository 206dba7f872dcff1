"""The tokenizer of a published model, without its code."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers
from jaxtyping import ArrayLike, Int

from mdlm_jax.models import json_files
from mdlm_jax.vocab import Vocab


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizerFiles:
  """What the tokenizer's files of a directory say; each of them may be missing.

  Attributes:
    backend: from tokenizer.json, None without it.
    special: role to text, such as 'mask_token' to '<|mask|>'.
    added: text to id of the tokens that tokenizer_config.json lists.
  """

  backend: tokenizers.Tokenizer | None
  special: dict[str, str]
  added: dict[str, int]

  def special_id(self, role: str) -> int | None:
    """The id of a role such as 'mask_token'; None where no file tells."""
    text = self.special.get(role)
    if text is None:
      return None
    known = None if self.backend is None else self.backend.token_to_id(text)
    return self.added.get(text) if known is None else known

  @property
  def ids(self) -> set[int] | None:
    """The ids that have a token; None where they are not known."""
    if self.backend is None:
      return None
    return set(self.backend.get_vocab(with_added_tokens=True).values())


def read_files(directory: str | os.PathLike) -> TokenizerFiles:
  """Reads tokenizer.json, tokenizer_config.json and special_tokens_map.json.

  Raises:
    OSError: a file cannot be read.
    ValueError: a file is damaged.
  """
  directory = pathlib.Path(directory)
  settings = json_files.read_if_any(directory / 'tokenizer_config.json')
  roles = json_files.read_if_any(directory / 'special_tokens_map.json')
  named = {
    role: token.get('content') if isinstance(token, dict) else token
    for role, token in (roles | settings).items()
    if role.endswith('_token')
  }
  special = {r: text for r, text in named.items() if isinstance(text, str)}
  listed = settings.get('added_tokens_decoder', {})
  try:
    added = {token['content']: int(i) for i, token in listed.items()}
  except (AttributeError, KeyError, TypeError, ValueError):
    raise ValueError(
      f'{directory}: tokenizer_config.json must have an added_tokens_decoder '
      'from ids to tokens with a content'
    ) from None
  path, backend = directory / 'tokenizer.json', None
  if path.exists():
    backend = _read_backend(path)
    _add_tokens(backend, listed, added)
  return TokenizerFiles(backend, special, added)


def _read_backend(path):
  try:
    return tokenizers.Tokenizer.from_str(path.read_text('utf-8'))
  except Exception as error:  # The library raises nothing more specific.
    raise ValueError(f'{path} is no tokenizer: {error}') from None


def _add_tokens(backend, listed, added):
  """Adds tokens that only tokenizer_config.json lists."""
  flags = 'special', 'normalized', 'lstrip', 'rstrip', 'single_word'
  for text, i in sorted(added.items(), key=lambda item: item[1]):
    if backend.token_to_id(text) is not None:
      continue
    settings = {k: v for k, v in listed[str(i)].items() if k in flags}
    backend.add_tokens([tokenizers.AddedToken(text, **settings)])
    found = backend.token_to_id(text)
    if found != i:
      raise ValueError(
        f'tokenizer_config.json gives {text} the id {i}; as the next token '
        f'after those of tokenizer.json it would be {found}'
      )


@dataclasses.dataclass(frozen=True, eq=False)
class HubTokenizer:
  """Text to ids and back by a tokenizer.json.

  Attributes:
    backend: the tokenizer.
    vocab: roles of the ids.
  """

  backend: tokenizers.Tokenizer
  vocab: Vocab

  def encode(self, text: str) -> Int[np.ndarray, 'n']:
    """Ids of a text, int32, without the tokens that begin or end a sequence.

    A special token that is written out in the text becomes its id.

    Raises:
      ValueError: the text holds bytes that are not UTF-8.
    """
    try:
      # Without the places in the text, which take a quarter of the time.
      (encoding,) = self.backend.encode_batch_fast(
        [text], add_special_tokens=False
      )
    except TypeError:  # Of surrogates, which stand for such bytes.
      raise ValueError('the text holds bytes that are not UTF-8') from None
    return np.array(encoding.ids, np.int32)

  def decode(
    self, ids: Sequence[int] | Int[ArrayLike, 'n'], *, mask: str = ''
  ) -> str:
    """Text of ids without special tokens; MASK is written as `mask`."""
    runs = itertools.groupby(
      np.asarray(ids).tolist(), self.vocab.mask_id.__eq__
    )
    return ''.join(
      mask * len(list(run)) if masked else self.backend.decode(list(run))
      for masked, run in runs
    )

  def to_json(self) -> str:
    """The content of `tokenizer.json`."""
    return self.backend.to_str()


def load(
  path: str | os.PathLike, *, mask_id: int | None = None
) -> HubTokenizer:
  """The tokenizer of a tokenizer.json that no model is known of.

  Args:
    path: the file. One named tokenizer.json has the roles that the files beside
      it tell of, see `read_files`.
    mask_id: of MASK, where they tell of none; may be the first id after those
      of the file.

  Raises:
    OSError: a file cannot be read.
    ValueError: a file is damaged, or MASK is not known.
  """
  path = pathlib.Path(path)
  if path.name == 'tokenizer.json':
    files = read_files(path.parent)
  else:
    files = TokenizerFiles(_read_backend(path), {}, {})
  mask, pad, bos, eos = (
    files.special_id(f'{role}_token') for role in ('mask', 'pad', 'bos', 'eos')
  )
  if mask is not None and mask_id not in (None, mask):
    raise ValueError(f'{mask_id=}, but the files beside {path} say {mask}')
  mask = mask_id if mask is None else mask
  if mask is None:
    raise ValueError(
      f'no MASK: no tokenizer_config.json beside {path} has a mask_token; '
      '--mask_id tells it (in Python, `mask_id`)'
    )
  size = max(*files.ids, mask) + 1
  vocab = Vocab(
    size=size,
    mask_id=mask,
    pad_id=pad,
    bos_id=bos,
    eos_ids=() if eos is None else (eos,),
    forbidden_ids=sorted(set(range(size)) - files.ids - {mask}),
    pad_is_eos=pad is not None and pad == eos,
  )
  return HubTokenizer(files.backend, vocab)


@dataclasses.dataclass(frozen=True, eq=False)
class NoTokenizer:
  """Ids in place of text, for a directory without tokenizer.json.

  Attributes:
    directory: named where text was asked for.
    vocab: roles of the ids.
  """

  directory: pathlib.Path
  vocab: Vocab

  def encode(self, text: str) -> Int[np.ndarray, 'n']:
    """No ids of no text.

    Raises:
      ValueError: for any text.
    """
    if text:
      raise ValueError(
        f'{self.directory} has no tokenizer.json to encode text with; scripts '
        'that sample take ids, as --prompt_ids=5,6,7'
      )
    return np.zeros(0, np.int32)

  def decode(
    self, ids: Sequence[int] | Int[ArrayLike, 'n'], *, mask: str = ''
  ) -> str:
    """The ids as numbers; MASK is written as `mask`."""
    words = [
      mask if i == self.vocab.mask_id else str(i)
      for i in np.asarray(ids).tolist()
    ]
    return ' '.join(filter(None, words))
