"""JAX settings under which every test runs."""

import jax

# A key used twice and a silent broadcast over ranks are errors.
jax.config.update('jax_debug_key_reuse', True)
jax.config.update('jax_numpy_rank_promotion', 'raise')
