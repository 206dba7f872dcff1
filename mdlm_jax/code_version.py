"""Which state of this code made a number."""

import hashlib
import pathlib

_PACKAGE = pathlib.Path(__file__).parent


def source_digest() -> str:
  """SHA-256 of the package's source files and their names.

  Two states of a checkout have one version and two digests.

  Example:
    >>> len(source_digest())
    64
  """
  digest = hashlib.sha256()
  for path in sorted(_PACKAGE.rglob('*.py')):
    content = path.read_bytes()
    digest.update(f'{path.relative_to(_PACKAGE)} {len(content)}\n'.encode())
    digest.update(content)
  return digest.hexdigest()
