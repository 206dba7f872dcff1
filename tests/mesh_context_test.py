"""Several devices are in mesh_test.py."""

import jax

from mdlm_jax import mesh_context
from mdlm_jax.models import placement


def test_without_several_devices_nothing_is_said():
  x = jax.numpy.ones((2, 2))
  with jax.set_mesh(placement.mesh(1, 1, 1, devices=jax.devices()[:1])):
    assert mesh_context.sharded(x, mesh_context.ROWS, None) is x
    assert mesh_context.by_rows(lambda params, x: x, None, x) is x
    assert mesh_context.fits(3, mesh_context.TENSOR)
