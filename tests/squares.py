"""A task that other processes import."""

import os
import signal


def squared(item, advance):
  """Its square; 7 fails and 8 kills its process."""
  advance(item)
  if item == 7:
    raise ValueError('seven')
  if item == 8:
    os.kill(os.getpid(), signal.SIGKILL)
  return item * item
