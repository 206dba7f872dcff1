"""A model directory that scripts load and run in no time."""

import jax

from mdlm_jax.models import directory, transformer
from mdlm_jax.tokenizer import character_tokenizer


def write(path, text, max_length):
  """A fresh model of the characters of a text; returns its directory."""
  tokenizer = character_tokenizer(text)
  config = transformer.TransformerConfig(
    vocab_size=tokenizer.vocab.size,
    num_layers=1,
    model_dim=16,
    num_heads=1,
    mlp_dim=16,
    max_length=max_length,
  )
  params = transformer.init(config, jax.random.key(0))
  directory.save(path, config, params, tokenizer.vocab, tokenizer)
  return path
