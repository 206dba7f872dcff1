import errno
import os
import signal
import subprocess
import sys

import pytest

from mdlm_jax import directory_lock


def test_a_directory_belongs_to_one_process_until_it_ends(tmp_path):
  place = tmp_path / 'a' / 'b'
  holder = subprocess.Popen(
    [
      sys.executable,
      '-c',
      'import sys, time\n'
      'from mdlm_jax.directory_lock import alone\n'
      f'with alone({str(place)!r}):\n'
      '  print("held", flush=True)\n'
      '  time.sleep(60)\n',
    ],
    env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
    stdout=subprocess.PIPE,
    text=True,
  )
  with holder:
    assert holder.stdout.readline() == 'held\n'
    with (
      pytest.raises(ValueError, match='another process works in'),
      directory_lock.alone(place),
    ):
      pass
    holder.send_signal(signal.SIGKILL)
  for _ in range(2):
    with directory_lock.alone(place) as directory:
      assert directory == place and place.is_dir()


def test_a_file_is_no_directory(tmp_path):
  (tmp_path / 'file').touch()
  with (
    pytest.raises(NotADirectoryError, match='file is no directory'),
    directory_lock.alone(tmp_path / 'file'),
  ):
    pass


def test_a_file_system_without_locks_has_none(tmp_path, monkeypatch):
  fcntl = pytest.importorskip('fcntl')

  def flock(handle, operation):
    raise OSError(errno.EBADF, 'Bad file descriptor')  # As NFS does.

  monkeypatch.setattr(fcntl, 'flock', flock)
  with directory_lock.alone(tmp_path / 'a') as directory:
    assert directory.is_dir()
