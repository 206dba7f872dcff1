"""The state of the code and the machine that a number was had with."""

import hashlib
import importlib.metadata
import pathlib
import platform

import jax

_CODE = pathlib.Path(__file__).parent


def environment() -> dict:
  """Versions, source digest, device and precision, for a report.

  Returns:
    'versions' by package, None for one that runs from a checkout and is not
    installed; 'source_sha256', see `source_digest`; 'device', 'num_devices'
    and 'matmul_precision'. JSON can hold it.
  """
  versions = {'python': platform.python_version()}
  for package in ('mdlm_jax', 'jax', 'jaxlib', 'flax', 'optax', 'numpy'):
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      versions[package] = None
  return {
    'versions': versions,
    'source_sha256': source_digest(),
    'device': jax.devices()[0].device_kind,
    'num_devices': jax.device_count(),
    'matmul_precision': jax.config.jax_default_matmul_precision,
  }


def source_digest() -> str:
  """SHA-256 of the package's source files and their names.

  Two states of a checkout have one version and two digests.

  Example:
    >>> len(source_digest())
    64
  """
  digest = hashlib.sha256()
  for path in sorted(_CODE.rglob('*.py')):
    content = path.read_bytes()
    digest.update(f'{path.relative_to(_CODE)} {len(content)}\n'.encode())
    digest.update(content)
  return digest.hexdigest()
