"""What a prepared directory was made of, and whether that is the same."""

import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from mdlm_jax.models.chat_template import ChatTemplate
from mdlm_jax.models.hub_tokenizer import HubTokenizer
from mdlm_jax.tokenizer import Tokenizer

_PACKAGES = 'mdlm_jax', 'tokenizers', 'array_record'


def of_settings(
  settings: dict[str, Any],
  tokenizer: Tokenizer | HubTokenizer | None,
  template: ChatTemplate | None,
) -> dict[str, Any]:
  """All that decides what is written but the files, as JSON holds it.

  Args:
    settings: by name.
    tokenizer: None: one that is learned from the files.
    template: how messages are written.
  """
  told = {
    'settings': settings,
    'tokenizer': tokenizer
    and {
      'sha256': _sha256(tokenizer.to_json()),
      'vocab': dataclasses.asdict(tokenizer.vocab),
    },
    'template_sha256': template
    and _sha256(json.dumps([template.source, template.special])),
    'versions': {name: _version(name) for name in _PACKAGES},
  }
  return json.loads(json.dumps(told))


def of_files(
  files: Sequence[dict[str, Any]], validation_files: Sequence[dict[str, Any]]
) -> dict[str, Any]:
  """The files: of each at least `path`, `bytes` and `sha256`."""
  return {'files': list(files), 'validation_files': list(validation_files)}


def check_same(
  directory: pathlib.Path, before: dict[str, Any] | None, now: dict[str, Any]
) -> None:
  """Refuses to go on in a directory that was made of something else.

  Args:
    directory: that was begun.
    before: what it was made of; None: it is empty.
    now: of `of_settings`, and of `of_files` once they have been read.

  Raises:
    ValueError: the first difference that changes what is written.
  """
  if before is None:
    return
  for name in ('settings', 'versions'):
    for key, value in now[name].items():
      if before[name].get(key) != value:
        raise ValueError(
          f'{directory} was prepared with {key}={before[name].get(key)!r}, not '
          f'{value!r}; other settings need another directory'
        )
  for name in ('tokenizer', 'template_sha256'):
    if before[name] != now[name]:
      raise ValueError(
        f'{directory} was prepared with another {name.split("_")[0]}: '
        f'{before[name]}, not {now[name]}'
      )
  for name in ('files', 'validation_files'):
    if name in now:
      _check_same_files(directory, name, before[name], now[name])


def _check_same_files(directory, name, before, now):
  if len(before) != len(now):
    raise ValueError(
      f'{directory} was prepared from {len(before)} {name}, not {len(now)}; '
      'other files need another directory'
    )
  for old, new in zip(before, now, strict=True):
    if (old['bytes'], old['sha256']) != (new['bytes'], new['sha256']):
      raise ValueError(
        f'{directory} was prepared from another {new["path"]}: {old["path"]} '
        f'of {old["bytes"]} bytes, SHA-256 {old["sha256"][:12]}, not '
        f'{new["bytes"]} bytes, {new["sha256"][:12]}; other files need another '
        'directory, or this one emptied'
      )


def _version(package):
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:  # It runs from a checkout.
    return None


def _sha256(text):
  return hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()
