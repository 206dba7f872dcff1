"""Low-rank adapters of the layers: fine-tuning with most parameters frozen.

A matrix W of a layer becomes W + (alpha / r) A B, of which only A `[in, r]` and
B `[r, out]` are trained (LoRA, Hu et al. 2021, arXiv 2106.09685, section 4.1).
W may be of any float dtype or of eight or four bits (QLoRA, Dettmers et al.
2023, arXiv 2305.14314, section 3):

  adapters = init(frozen, key, rank=8)
  params = join(frozen, adapters, alpha=16.0)  # For any `transformer.denoiser`.
  weights = merged(frozen, adapters, alpha=16.0)  # Arrays only, to be saved.

A layer adds x A B to x W. At width 512 and rank 8 that takes 0.7 of the
arithmetic of a gradient of all parameters, and 8 % more memory than it; with
W + A B made first it would take all of it, for that needs dL/dW.

The adapters of the library qwix become part of an NNX module, which gets a new
class and other parameters and has to be called once to get them: the network
would no longer be a function of its config alone. In bfloat16 with float32
parameters its layers return float32, and nothing there merges.
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from mdlm_jax.checks import check_integer
from mdlm_jax.models import int8

Params = dict


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['matrix', 'a', 'b'],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Adapted:
  """matrix + a b, where a network has a matrix.

  Attributes:
    matrix: the frozen matrix, an array or a `qwix.QArray`. Shape
      `[..., in, out]`.
    a: shape `[..., in, r]`.
    b: shape `[..., r, out]`, scaled.
  """

  matrix: Any
  a: Float[Array, '... in r']
  b: Float[Array, '... r out']

  def __getitem__(self, index):
    """Itself: a layer reads its matrix as `kernel[...]`."""
    return self


def init(
  params: Params,
  key: Key[Array, ''],
  *,
  rank: int,
  targets: Collection[str] | None = None,
) -> Params:
  """Fresh adapters: A is normal of variance 1 / in, B is 0.

  So x A has the variance of x, and nothing changes before the first step.

  Args:
    params: what is to be frozen, as `transformer.init` nests it; only shapes
      are read.
    key: consumed.
    rank: r, from 1 to the smallest side of the chosen matrices.
    targets: names of matrices of the layers, such as 'query' and 'value'. None:
      all of them, without which fine-tuning of all parameters is not matched
      (Dettmers et al. 2023, section 4). The experts of a mixture have none.

  Returns:
    float32 `blocks/query/a` `[N, in, r]` and `blocks/query/b` `[N, r, out]` of
    N layers, and so on, in a nested dict: rank (in + out) numbers for a matrix.

  Raises:
    ValueError: `rank` outside its range, unknown names.

  Example:
    >>> params = {'blocks': {'up': {'kernel': jnp.zeros((4, 16, 64))}}}
    >>> adapters = init(params, jax.random.key(0), rank=2)
    >>> jax.tree.map(jnp.shape, adapters)
    {'blocks': {'up': {'a': (4, 16, 2), 'b': (4, 2, 64)}}}
  """
  shapes = {
    (stack, name): layer['kernel'].shape
    for stack, layers in params.items()
    if stack.endswith('blocks')
    for name, layer in layers.items()
    if 'kernel' in layer
  }
  names = sorted({name for _, name in shapes})
  targets = names if targets is None else targets
  if not targets or not set(targets) <= set(names):
    raise ValueError(
      f'targets={sorted(targets)} must be among {", ".join(names)}'
    )
  shapes = {place: s for place, s in shapes.items() if place[1] in targets}
  check_integer('rank', rank, 1)
  most = min(min(shape[-2:]) for shape in shapes.values())
  if rank > most:
    raise ValueError(f'{rank=} must be at most {most}, the smallest side')
  adapters = {}
  keys = jax.random.split(key, len(shapes))
  for ((stack, name), shape), a_key in zip(shapes.items(), keys, strict=True):
    *layers, fan_in, fan_out = shape
    adapters.setdefault(stack, {})[name] = {
      'a': jax.random.normal(a_key, (*layers, fan_in, rank), jnp.float32)
      / fan_in**0.5,
      'b': jnp.zeros((*layers, rank, fan_out), jnp.float32),
    }
  return adapters


def join(frozen: Params, adapters: Params, *, alpha: float) -> Params:
  """The parameters of the adapted network; gradients go to what is asked for.

  Args:
    frozen: parameters, of which matrices may be quantized, as `int8.quantize`
      and `qwix.quantize` do.
    adapters: what `init` returned, or trained from it.
    alpha: the adapters are scaled by alpha / rank.

  Returns:
    `frozen` with an `Adapted` in place of each adapted matrix.
  """
  params = dict(frozen)
  for stack, layers in adapters.items():
    params[stack] = dict(frozen[stack])
    for name, pair in layers.items():
      layer = frozen[stack][name]
      scale = alpha / pair['a'].shape[-1]
      adapted = Adapted(layer['kernel'], pair['a'], pair['b'] * scale)
      params[stack][name] = layer | {'kernel': adapted}
  return params


def merged(frozen: Params, adapters: Params, *, alpha: float) -> Params:
  """The same network without adapters: W + (alpha / rank) A B.

  Args:
    frozen: as in `join`.
    adapters: the same.
    alpha: the same.

  Returns:
    Arrays, those of the adapted or quantized matrices in float32.
  """
  params = int8.dense(join(frozen, adapters, alpha=alpha))
  return jax.tree.map(_sum, params, is_leaf=_is_adapted)


def _is_adapted(leaf):
  return isinstance(leaf, Adapted)


def _sum(leaf):
  if not _is_adapted(leaf):
    return leaf
  product = jnp.matmul(leaf.a, leaf.b, precision='highest')
  return leaf.matrix.astype(jnp.float32) + product


def cast(arrays: tuple, *, dtype: str) -> tuple:
  """Input, matrix and bias of a layer, adapter included, in one dtype."""
  return jax.tree.map(lambda x: x.astype(dtype), arrays)


def dot_general(x, kernel, dimension_numbers, **options):
  """`jax.lax.dot_general` of inputs with a matrix, which may be `Adapted`."""
  if not _is_adapted(kernel):
    return jax.lax.dot_general(x, kernel, dimension_numbers, **options)
  product = jax.lax.dot_general(x, kernel.matrix, dimension_numbers, **options)
  return product + _thin(_thin(x, kernel.a), kernel.b)


def _thin(x, matrix):
  """x matrix, with a batch axis of one.

  The gradient keeps products without a batch axis, and these two are cheaper to
  make again than to keep.
  """
  dimensions = (((x.ndim,), (1,)), ((0,), (0,)))
  return jax.lax.dot_general(x[None], matrix[None], dimensions)[0]
