"""Masked diffusion language models in JAX and Flax."""
