"""JAX settings under which every test runs."""

import jax

# A key used twice is an error.
jax.config.update('jax_debug_key_reuse', True)
