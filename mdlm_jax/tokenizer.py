"""Text to ids and back, with the `tokenizers` library."""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers
from jaxtyping import ArrayLike, Int

from mdlm_jax.vocab import Vocab

_PAD, _MASK, _EOS = '[PAD]', '[MASK]', '[EOS]'
_EOS_ID = 2  # Where there is one.
# Byte pairs; the library sets memory aside for as many, and aborts without.
_MOST_IDS = 2**22


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """Text to ids and back; `decode(encode(text)) == text` exactly.

  Id 0 is [PAD], 1 is [MASK] and 2 may be [EOS], the end of a document. They are
  entries of the vocabulary and no added tokens, so that no text encodes to
  them, '[MASK]' included.

  Attributes:
    backend: a `tokenizers.Tokenizer` made by `character_tokenizer` or
      `train_bpe`.
  """

  backend: tokenizers.Tokenizer

  def __post_init__(self):
    special = self.backend.decode([0]), self.backend.decode([1])
    if special != (_PAD, _MASK):
      raise ValueError(f'ids 0, 1 must be {_PAD}, {_MASK}, are {special}')

  @functools.cached_property
  def vocab(self) -> Vocab:
    """The vocabulary's size and roles."""
    size = self.backend.get_vocab_size()
    has_eos = self.backend.id_to_token(_EOS_ID) == _EOS
    eos_ids = (_EOS_ID,) if has_eos else ()
    return Vocab(size=size, mask_id=1, pad_id=0, eos_ids=eos_ids)

  @functools.cached_property
  def alphabet(self) -> frozenset[str] | None:
    """The known characters; None where every text can be encoded."""
    if isinstance(self.backend.model, tokenizers.models.BPE):
      return None
    return frozenset(self.backend.get_vocab()) - {_PAD, _MASK, _EOS}

  def encode(self, text: str) -> Int[np.ndarray, 'n']:
    """Ids of a text, int32.

    Raises:
      ValueError: characters that the vocabulary does not have; lists them.
    """
    unknown = set(text) - self.alphabet if self.alphabet is not None else ()
    if unknown:
      names = ' '.join(repr(character) for character in sorted(unknown))
      raise ValueError(
        f'unknown characters {names}; the vocabulary has '
        f'{len(self.alphabet)} characters'
      )
    try:
      text.encode('utf-8')
    except UnicodeEncodeError:  # Surrogates stand for such bytes.
      raise ValueError('the text holds bytes that are not UTF-8') from None
    if self.alphabet is not None:
      points, ids = self._ids_of_points
      return ids[np.searchsorted(points, _code_points(text))]
    # Without the places in the text, which take a quarter of the time.
    (encoding,) = self.backend.encode_batch_fast(
      [text], add_special_tokens=False
    )
    return np.array(encoding.ids, np.int32)

  @functools.cached_property
  def _ids_of_points(self):
    """Sorted code points of the known characters, and their ids."""
    characters = sorted(self.alphabet)
    ids = [self.backend.token_to_id(character) for character in characters]
    return _code_points(''.join(characters)), np.array(ids, np.int32)

  def decode(
    self, ids: Sequence[int] | Int[ArrayLike, 'n'], *, mask: str = ''
  ) -> str:
    """Text of ids; PAD and EOS are left out, MASK is written as `mask`.

    Bytes that are not UTF-8, which a model may generate, become U+FFFD.
    """
    mask_id = self.vocab.mask_id
    left_out = {self.vocab.pad_id, *self.vocab.eos_ids}
    kept = (i for i in np.asarray(ids).tolist() if i not in left_out)
    return ''.join(
      mask * len(list(run)) if masked else self.backend.decode(list(run))
      for masked, run in itertools.groupby(kept, mask_id.__eq__)
    )

  def save(self, path: str | os.PathLike) -> None:
    """Writes a `tokenizer.json` in the layout of the tokenizers library."""
    self.backend.save(str(path))

  @classmethod
  def load(cls, path: str | os.PathLike) -> 'Tokenizer':
    """Reads what `save` wrote.

    Raises:
      FileNotFoundError: no such file. ValueError: not a tokenizer of ours.
    """
    return cls.from_json(pathlib.Path(path).read_text('utf-8'))

  def to_json(self) -> str:
    """The content of `tokenizer.json`."""
    return self.backend.to_str()

  @classmethod
  def from_json(cls, content: str) -> 'Tokenizer':
    """The inverse of `to_json`."""
    try:
      backend = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # The library raises nothing more specific.
      raise ValueError(f'not a tokenizer: {error}') from error
    return cls(backend)


def _roles(eos):
  return [_PAD, _MASK, _EOS] if eos else [_PAD, _MASK]


def _code_points(text):
  return np.frombuffer(text.encode('utf-32-le'), np.uint32)


def character_tokenizer(text: str, *, eos: bool = False) -> Tokenizer:
  """One token per character of `text`, in code-point order after the roles.

  Args:
    text: holds every character.
    eos: whether there is an [EOS].
  """
  symbols = [*_roles(eos), *sorted(set(text))]
  model = tokenizers.models.WordLevel({s: i for i, s in enumerate(symbols)})
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(r'[\s\S]'), 'isolated'
  )
  backend.decoder = tokenizers.decoders.Fuse()
  return Tokenizer(backend)


def train_bpe(
  texts: Sequence[str], vocab_size: int, *, eos: bool = False
) -> Tokenizer:
  """Byte-level byte-pair encoding, learned from `texts`.

  Args:
    texts: the training texts.
    vocab_size: all ids: [PAD], [MASK], perhaps [EOS], 256 bytes and the merges.
    eos: whether there is an [EOS].

  Raises:
    ValueError: no room for the bytes, more than 2^22 ids, or texts too small
      for so many merges.
  """
  roles = _roles(eos)
  least = len(roles) + 256
  if vocab_size < least:
    raise ValueError(
      f'{vocab_size=} must be at least {least}: {", ".join(roles)}, 256 bytes'
    )
  if vocab_size > _MOST_IDS:
    raise ValueError(f'{vocab_size=} must be at most {_MOST_IDS}')
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.pre_tokenizer = byte_level
  backend.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=roles,
    initial_alphabet=byte_level.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(texts, trainer)
  if backend.get_vocab_size() != vocab_size:
    raise ValueError(
      f'the text gives {backend.get_vocab_size()} byte-pair tokens at most, '
      f'fewer than {vocab_size=}; choose fewer, or single characters'
    )
  # The trainer made the roles added tokens, which text can contain.
  content = json.loads(backend.to_str())
  return Tokenizer.from_json(json.dumps({**content, 'added_tokens': []}))
