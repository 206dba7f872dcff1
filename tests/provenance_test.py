"""What reports say of the code and the machine."""

import jax

from mdlm_jax import provenance


def test_environment_names_versions_source_device_and_precision():
  environment = provenance.environment()
  assert environment['versions']['jax'] == jax.__version__
  assert environment['source_sha256'] == provenance.source_digest()
  assert environment['device'] == jax.devices()[0].device_kind
  with jax.default_matmul_precision('highest'):
    precise = provenance.environment()
  assert precise['matmul_precision'] == 'highest'
  assert environment['matmul_precision'] != 'highest'


def test_another_state_of_the_code_has_another_digest(tmp_path, monkeypatch):
  monkeypatch.setattr(provenance, '_CODE', tmp_path)
  digests = {provenance.source_digest()}
  for name, content in (('a.py', '1'), ('a.py', '2'), ('b.py', '2')):
    (tmp_path / name).write_text(content)
    digests.add(provenance.source_digest())
  assert len(digests) == 4
