"""JSON files that hold one object."""

import json
import pathlib
from typing import Any


def read(path: pathlib.Path) -> dict[str, Any]:
  """The object that a file holds.

  Raises:
    OSError: no such file.
    ValueError: the file is not JSON, or holds no object.
  """
  try:
    content = json.loads(path.read_text('utf-8'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON: {error}') from None
  if not isinstance(content, dict):
    raise ValueError(f'{path} must hold an object, not {content!r}')
  return content


def read_if_any(path: pathlib.Path) -> dict[str, Any]:
  """The object that a file holds, {} where there is no such file."""
  return read(path) if path.exists() else {}
