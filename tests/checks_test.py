import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from mdlm_jax.checks import check_values


def _half(x):
  check_values(x > 0, 'x must be above 0')
  return x / 2


def test_concrete_values_raise_where_any_is_wrong():
  with pytest.raises(ValueError, match='x must be above 0'):
    _half(jnp.array([1.0, -1.0]))
  assert _half(jnp.array(2.0)) == 1.0


def test_traced_values_are_silent_under_jit_and_found_by_checkify():
  assert jax.jit(_half)(jnp.array(-2.0)) == -1.0
  checked = jax.jit(checkify.checkify(_half))
  assert 'x must be above 0' in checked(jnp.array([1.0, -1.0]))[0].get()
  assert checked(jnp.array([1.0, 2.0]))[0].get() is None
