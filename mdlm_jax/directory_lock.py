"""One program at a time in a directory."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def alone(directory: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Makes a directory, which is this process's as long as the context is.

  However the process ends, the directory is free then. Nothing is locked on
  systems without `fcntl`, which is Windows, nor where the file system does not
  lock directories, as NFS.

  Yields:
    The directory.

  Raises:
    ValueError: another process has it.
    NotADirectoryError: it is a file.
  """
  directory = pathlib.Path(directory)
  if directory.exists() and not directory.is_dir():
    raise NotADirectoryError(f'{directory} is no directory')
  directory.mkdir(parents=True, exist_ok=True)
  try:
    import fcntl
  except ImportError:
    yield directory
    return
  handle = os.open(directory, os.O_RDONLY)
  try:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(f'another process works in {directory}') from None
    except OSError:
      pass
    yield directory
  finally:
    os.close(handle)
