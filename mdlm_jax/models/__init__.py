"""Flax denoisers and their directories."""
