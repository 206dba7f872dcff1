"""Mixtures of experts: of many SwiGLU networks each token passes a few.

Two ways to compute one are here, of equal results. On CPU the pairs of token
and expert, sorted by expert, are cut into blocks of one expert each, and a loop
multiplies block after block. Elsewhere `jax.lax.ragged_dot` does that, which on
TPU is an instruction of the compiler; on CPU it multiplies every pair with
every expert.

Milliseconds on two CPU cores, width 512, float32:

                                 64 experts of 256, 8 a token   256 of 128
  tokens                              8     64    256   1024      32    256
  in blocks                           5      8     26     90      17     36
  all experts on all tokens          22     32    117    535     169    724
  `ragged_dot`                       39    109    662   3280       -      -
  weights gathered for each token    40    311      -      -       -      -
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mdlm_jax import mesh_context
from mdlm_jax.models.config import ExpertsConfig, TransformerConfig

# Rows of a block: half of what an expert has on average, within these.
_FEWEST_ROWS, _MOST_ROWS = 8, 32
_STACKS = 'gate', 'up', 'out'
# Tokens of an expert from which on a copy of its matrices costs nothing.
_MANY_PAIRS = 32


class Experts(nnx.Module):
  """A mixture of experts in place of an MLP; float32 where it chooses."""

  def __init__(
    self, config: TransformerConfig, *, rngs: nnx.Rngs, scale: float
  ):
    """Outputs have about variance `scale` for inputs of unit variance."""
    self.config = config
    experts, dim = config.experts, config.model_dim

    def matrices(*shape, scale=1.0):
      std = (scale / shape[-2]) ** 0.5
      draw = nnx.initializers.normal(std, jnp.float32)
      return nnx.Param(draw(rngs.params(), shape))

    self.router = matrices(dim, experts.num_experts)
    if experts.selection_bias:
      self.selection_bias = nnx.Param(
        jnp.zeros(experts.num_experts, jnp.float32)
      )
    num, width = experts.num_experts, experts.width
    self.gate = matrices(num, dim, width)
    self.up = matrices(num, dim, width)
    self.out = matrices(num, width, dim, scale=scale)
    if experts.shared_width is not None:
      self.shared_gate = matrices(dim, experts.shared_width)
      self.shared_up = matrices(dim, experts.shared_width)
      self.shared_out = matrices(experts.shared_width, dim, scale=scale)

  def __call__(
    self, x: Float[Array, 'B L d'], layer: Int[Array, ''] | int
  ) -> Float[Array, 'B L d']:
    """The mixture of a layer, whose experts stand at `layer` of a stack."""
    experts = self.config.experts
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = mesh_context.by_rows(
      lambda bias, logits: route(logits, bias, experts),
      self.selection_bias[...] if experts.selection_bias else None,
      router_logits(tokens, self.router[...]),
    )
    matrices = [matrix[...] for matrix in (self.gate, self.up, self.out)]
    if matrices[0].ndim == 3:  # Of this layer only.
      layer, matrices = 0, [matrix[None] for matrix in matrices]
    mixed = mix(tokens, weights, chosen, layer, *matrices)
    if experts.shared_width is not None:
      shared = self.shared_gate, self.shared_up, self.shared_out
      mixed += swiglu(tokens, *(m[...].astype(x.dtype) for m in shared))
    return mixed.reshape(x.shape)


def without_stacks(
  params: dict, config: ExpertsConfig | None, num_tokens: int
) -> tuple[dict, dict]:
  """Parameters of blocks, and the matrices of their experts apart, if few.

  A loop over layers would copy its layer's part of them, which takes longer
  than a call that reads a few experts of it. With many tokens it does not; and
  the gradient of what is apart would be added up in as many copies of the whole
  stack as there are layers.
  """
  if (
    config is None
    or num_tokens * config.num_chosen >= _MANY_PAIRS * config.num_experts
  ):
    return params, {}
  experts = params['experts']
  stacks = {name: experts[name] for name in _STACKS}
  rest = {k: leaf for k, leaf in experts.items() if k not in _STACKS}
  return params | {'experts': rest}, stacks


def with_stacks(params: dict, stacks: dict) -> dict:
  """The parameters of one block with the matrices of all."""
  if not stacks:
    return params
  return params | {'experts': params['experts'] | stacks}


def router_logits(
  tokens: Float[Array, 'T d'], router: Float[Array, 'd E']
) -> Float[Array, 'T E']:
  """What each token says of each expert, float32."""
  return tokens.astype(jnp.float32) @ router.astype(jnp.float32)


def route(
  logits: Float[Array, 'T E'],
  selection_bias: Float[Array, 'E'] | None,
  experts: ExpertsConfig,
) -> tuple[Float[Array, 'T k'], Int[Array, 'T k']]:
  """The experts of each token and their weights.

  Scores s are the softmax or the sigmoid of the logits. Those with the largest
  s + bias are chosen; with groups, among the groups whose two best have the
  largest sum (Wang et al., 2024, arXiv 2408.15664; DeepSeek-V3, arXiv
  2412.19437, section 2.1.2). Their weights are s without the bias, divided by
  their sum where `normalized`, times the scale.

  Args:
    logits: float32. Shape `[T, E]`.
    selection_bias: shape `[E]`, or None.
    experts: the rest.

  Returns:
    Weights and numbers of the chosen experts, the best first. Shape `[T, k]`.

  Example:
    >>> experts = ExpertsConfig(num_experts=3, num_chosen=2, width=1)
    >>> logits = jnp.log(jnp.array([[1.0, 3, 4]]))
    >>> weights, chosen = route(logits, None, experts)
    >>> weights.tolist(), chosen.tolist()
    ([[0.5, 0.375]], [[2, 1]])
  """
  squashed = {'softmax': jax.nn.softmax, 'sigmoid': jax.nn.sigmoid}
  scores = squashed[experts.score](logits)
  ranked = scores if selection_bias is None else scores + selection_bias
  if experts.num_groups > 1:
    ranked = _of_best_groups(ranked, experts)
  chosen = jax.lax.top_k(ranked, experts.num_chosen)[1]
  weights = jnp.take_along_axis(scores, chosen, 1)
  if experts.normalized:
    weights /= weights.sum(1, keepdims=True) + 1e-20  # Theirs.
  return weights * experts.scale, chosen


def _of_best_groups(ranked, experts):
  """The scores, -inf outside the best groups of experts."""
  num_tokens, num_experts = ranked.shape
  groups = ranked.reshape(num_tokens, experts.num_groups, -1)
  best_two = jax.lax.top_k(groups, 2)[0].sum(-1)
  best = jax.lax.top_k(best_two, experts.num_chosen_groups)[1]
  is_best = jax.nn.one_hot(best, experts.num_groups, dtype=bool).any(1)
  groups = jnp.where(is_best[:, :, None], groups, -jnp.inf)
  return groups.reshape(num_tokens, num_experts)


def swiglu(x, gate, up, out):
  """(silu(x gate) * (x up)) out (Shazeer, 2020)."""
  return (jax.nn.silu(x @ gate) * (x @ up)) @ out


def mix(
  tokens: Float[Array, 'T d'],
  weights: Float[Array, 'T k'],
  chosen: Int[Array, 'T k'],
  layer: Int[Array, ''] | int,
  gate: Float[Array, 'N E d f'],
  up: Float[Array, 'N E d f'],
  out: Float[Array, 'N E f d'],
) -> Float[Array, 'T d']:
  """The weighted sum of each token's experts, as the devices do it best.

  On a mesh each device has its tokens, and of every expert its part of the
  hidden units: no token goes to another device, none is dropped. Arguments are
  those of `mix_in_blocks`.
  """
  on_device = functools.partial(
    jax.lax.platform_dependent, cpu=mix_in_blocks, default=mix_by_ragged_dot
  )
  context = mesh_context.context_axes()
  if not context:
    return on_device(tokens, weights, chosen, layer, gate, up, out)

  def split(size, axes):
    names = tuple(name for name in axes if name in context)
    return names if mesh_context.fits(size, names) else ()

  rows = jax.P(split(len(tokens), mesh_context.ROWS))
  hidden = split(gate.shape[-1], mesh_context.TENSOR)

  def part(tokens, weights, chosen, *matrices):
    matrices = (matrix[None] for matrix in matrices)
    mixed = on_device(tokens, weights, chosen, 0, *matrices)
    return jax.lax.psum(mixed, hidden) if hidden else mixed

  opening, closing = jax.P(None, None, hidden), jax.P(None, hidden, None)
  return jax.shard_map(
    part,
    in_specs=(rows, rows, rows, opening, opening, closing),
    out_specs=rows,
    axis_names=set(context),
    check_vma=False,
  )(tokens, weights, chosen, *(matrix[layer] for matrix in (gate, up, out)))


def mix_in_blocks(
  tokens: Float[Array, 'T d'],
  weights: Float[Array, 'T k'],
  chosen: Int[Array, 'T k'],
  layer: Int[Array, ''] | int,
  gate: Float[Array, 'N E d f'],
  up: Float[Array, 'N E d f'],
  out: Float[Array, 'N E f d'],
) -> Float[Array, 'T d']:
  """The weighted sum of each token's experts, by blocks of one expert each.

  Args:
    tokens: shape `[T, d]`.
    weights: of the chosen experts. Shape `[T, k]`.
    chosen: their numbers, all different for a token. Shape `[T, k]`.
    layer: which layer of the stacks.
    gate: matrices of N layers of E experts. Shape `[N, E, d, f]`.
    up: the same.
    out: shape `[N, E, f, d]`.

  Returns:
    Shape and dtype of `tokens`.
  """
  num_tokens, num_chosen = chosen.shape
  num_experts, num_pairs = gate.shape[1], chosen.size
  rows = num_pairs // (2 * num_experts)
  # No expert has a token twice.
  rows = min(max(_FEWEST_ROWS, min(rows, _MOST_ROWS)), num_tokens)
  sizes = jnp.bincount(chosen.reshape(-1), length=num_experts)
  blocks = -(-sizes // rows)
  # The last block of each expert may be almost empty.
  most = (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows
  expert_of_block = jnp.repeat(
    jnp.arange(num_experts), blocks, total_repeat_length=most
  )
  order = jnp.argsort(chosen.reshape(-1))
  expert = chosen.reshape(-1)[order]
  nth = jnp.arange(num_pairs) - (jnp.cumsum(sizes) - sizes)[expert]
  row = (jnp.cumsum(blocks) - blocks)[expert] * rows + nth
  # Rows that no pair fills hold token 0; nobody reads what becomes of them.
  token_of_row = jnp.zeros(most * rows, jnp.int32)
  token_of_row = token_of_row.at[row].set(order // num_chosen)

  def one_block(block):
    numbers, expert = block
    matrices = (m[layer, expert].astype(tokens.dtype) for m in (gate, up, out))
    return swiglu(tokens[numbers], *matrices)

  mixed = jax.lax.map(
    one_block, (token_of_row.reshape(most, rows), expert_of_block)
  )
  row_of_pair = jnp.zeros(num_pairs, jnp.int32).at[order].set(row)
  parts = mixed.reshape(most * rows, -1)[row_of_pair.reshape(chosen.shape)]
  return _weighted(weights, parts)


def mix_by_ragged_dot(
  tokens: Float[Array, 'T d'],
  weights: Float[Array, 'T k'],
  chosen: Int[Array, 'T k'],
  layer: Int[Array, ''] | int,
  gate: Float[Array, 'N E d f'],
  up: Float[Array, 'N E d f'],
  out: Float[Array, 'N E f d'],
) -> Float[Array, 'T d']:
  """The same, by products of the sorted pairs with ragged groups of rows."""
  order = jnp.argsort(chosen.reshape(-1))
  sizes = jnp.bincount(chosen.reshape(-1), length=gate.shape[1])
  gate, up, out = (m[layer].astype(tokens.dtype) for m in (gate, up, out))
  product = functools.partial(
    jax.lax.ragged_dot, group_sizes=sizes.astype(jnp.int32)
  )
  rows = tokens[order // chosen.shape[1]]
  hidden = jax.nn.silu(product(rows, gate)) * product(rows, up)
  parts = product(hidden, out)[jnp.argsort(order).reshape(chosen.shape)]
  return _weighted(weights, parts)


def _weighted(weights, parts):
  mixed = jnp.einsum(
    'tk,tkd->td', weights, parts, preferred_element_type=jnp.float32
  )
  return mixed.astype(parts.dtype)
