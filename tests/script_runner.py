"""Runs the programs of scripts/ inside the test process."""

import contextlib
import importlib.util
import pathlib
import types

from absl import flags

from mdlm_jax import command_line  # noqa: F401  Defines absl's own flags.

ROOT = pathlib.Path(__file__).parents[1]
# They read flags of their own.
_LIBRARIES = ('absl', 'array_record', 'grain', 'orbax')


def run(name: str, *arguments: str, **replaced) -> types.ModuleType:
  """What `python scripts/NAME ARGUMENTS` does, without its exit.

  Args:
    name: path of the script inside scripts/.
    *arguments: the command line.
    **replaced: attributes of the module to be replaced before it runs.

  Returns:
    The module. Mistakes of the user leave as the exceptions that
    `command_line.run` turns into one line.
  """
  with _no_other_flags():
    module = _load(name)
    for attribute, value in replaced.items():
      getattr(module, attribute)  # It must exist.
      setattr(module, attribute, value)
    flags.FLAGS([name, *arguments])
    module.main([name])
  return module


def load(name: str) -> types.ModuleType:
  """The script as a module, for its functions that read no flags."""
  with _no_other_flags():
    return _load(name)


@contextlib.contextmanager
def _no_other_flags():
  """Scripts share names of flags, which absl keeps once per process."""
  before = dict(flags.FLAGS.__dict__)
  _only_flags_of_libraries()
  try:
    yield
  finally:
    # A library that was first imported here defines its flags only once.
    of_libraries = _only_flags_of_libraries()
    flags.FLAGS.__dict__.clear()
    flags.FLAGS.__dict__.update(before)
    _define(of_libraries)


def _only_flags_of_libraries():
  """Forgets all others; modules and their flags."""
  kept = {
    module: own
    for module, own in flags.FLAGS.flags_by_module_dict().items()
    if module.split('.')[0] in _LIBRARIES
  }
  flags.FLAGS.__dict__.clear()
  flags.FLAGS.__init__()
  _define(kept)
  return kept


def _define(flags_by_module):
  for module, own in flags_by_module.items():
    for flag in own:
      if flag.name not in flags.FLAGS:
        flags.FLAGS[flag.name] = flag
        flags.FLAGS.register_flag_by_module(module, flag)


def _load(name):
  path = ROOT / 'scripts' / name
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
