"""Parameters by one key each, as files hold them."""

import jax

from mdlm_jax.models import transformer


def flat(tree: dict) -> dict:
  """A nested dict as one with keys such as 'blocks/query/kernel'.

  Example:
    >>> flat({'norm': {'scale': 1}, 'head': 2})
    {'head': 2, 'norm/scale': 1}
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in leaves
  }


def nested(leaves: dict) -> dict:
  """The inverse of `flat`.

  Example:
    >>> nested({'head': 2, 'norm/scale': 1})
    {'head': 2, 'norm': {'scale': 1}}
  """
  tree = {}
  for key, leaf in leaves.items():
    *outer, last = key.split('/')
    node = tree
    for name in outer:
      node = node.setdefault(name, {})
    node[last] = leaf
  return tree


def shapes(
  config: transformer.TransformerConfig,
) -> dict[str, jax.ShapeDtypeStruct]:
  """Shape of every parameter of a network by its key."""
  return flat(
    jax.eval_shape(lambda key: transformer.init(config, key), jax.random.key(0))
  )
