"""What training takes in memory, arithmetic and time, from shapes alone.

Everything here is a prediction. Bytes and operations are counted; seconds are
those at the published peak of a device, below which no run stays.
"""

import functools
import math
from typing import NamedTuple

import jax

from mdlm_jax import mesh_context
from mdlm_jax.models import param_tree, placement
from mdlm_jax.models.config import TransformerConfig


class Device(NamedTuple):
  """Speeds of a device as its maker publishes them.

  Attributes:
    tera_operations: of bfloat16, a second, without sparsity.
    memory_gb: what it holds, in 10^9 bytes.
    memory_gb_per_second: what it reads and writes of that.
    group: how many devices are near one another.
    near_gb_per_second: what it sends within the group.
    far_gb_per_second: what it sends beyond.
  """

  tera_operations: float
  memory_gb: float
  memory_gb_per_second: float
  group: int
  near_gb_per_second: float
  far_gb_per_second: float


# GPUs: NVIDIA's data sheets of A100 80 GB, H100 and H200 (SXM), NVLink in one
# direction, and InfiniBand of DGX servers, eight ports of 200 or 400 Gb/s.
# TPUs: Google Cloud's pages of v5e, v5p and v6e; a ring sends through two links
# of jax-ml.github.io/scaling-book/tpus; beyond a slice the data center's.
DEVICES = {
  'A100': Device(312, 80, 2039, 8, 300, 25),
  'H100': Device(989, 80, 3350, 8, 450, 50),
  'H200': Device(989, 141, 4800, 8, 450, 50),
  'v5e': Device(197, 16, 819, 256, 90, 3.1),
  'v5p': Device(459, 95, 2765, 8960, 180, 6.25),
  'v6e': Device(918, 32, 1600, 256, 180, 12.5),
}


class Plan(NamedTuple):
  """How a step of training is laid out.

  Attributes:
    rows: of a batch, on all devices.
    length: tokens of a row.
    data: devices along the axis of this name, as the next two.
    fsdp: see `placement`.
    tensor: see `placement`.
    accumulation: parts in which a batch is computed.
    remat: what a gradient keeps, 'all', 'dots' or 'none'.
  """

  rows: int
  length: int
  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  accumulation: int = 1
  remat: str = 'dots'

  @property
  def devices(self) -> int:
    return self.data * self.fsdp * self.tensor

  @property
  def tokens(self) -> int:
    return self.rows * self.length

  @property
  def local_tokens(self) -> int:
    """Of one part, on the devices of one 'tensor' axis."""
    return self.tokens // (self.data * self.fsdp * self.accumulation)


# Asked for many times of one network.
_shapes = functools.cache(param_tree.shapes)


def parameters(config: TransformerConfig) -> int:
  return sum(leaf.size for leaf in _shapes(config).values())


def local_parameters(
  config: TransformerConfig, plan: Plan, axes=('fsdp', 'tensor')
) -> int:
  """Those that one device holds; or would, were they split over `axes` only."""
  sizes = [getattr(plan, a) if a in axes else 1 for a in mesh_context.AXES]
  place = placement.sharding(
    jax.sharding.AbstractMesh(tuple(sizes), mesh_context.AXES)
  )
  return sum(
    math.prod(place(key, leaf.shape).shard_shape(leaf.shape))
    for key, leaf in _shapes(config).items()
  )


def multiplied(config: TransformerConfig) -> int:
  """Weights of the layers with which one token is multiplied."""
  return sum(
    _multiplied(config, key, leaf) for key, leaf in _shapes(config).items()
  )


def _multiplied(config, key, leaf):
  if 'experts/' in key and leaf.ndim == 4:  # [layers, experts, in, out]
    return leaf.size * config.experts.num_chosen // config.experts.num_experts
  is_matrix = key.endswith('/kernel') or ('experts/' in key and leaf.ndim == 3)
  return leaf.size if is_matrix else 0


def forward_operations(
  config: TransformerConfig, computed: int, seen: int, predicted: int
) -> int:
  """Multiplications and additions of a call.

  Two for each weight of a matrix and token, and two for each channel of a head
  in the score of a query and a key, and again in their mixing.

  Args:
    config: of the network.
    computed: slots whose stream is computed.
    seen: slots that each of them attends to.
    predicted: slots whose logits are computed.
  """
  head = config.vocab_size * config.model_dim
  products = computed * multiplied(config) + predicted * head
  return 2 * products + _attention_operations(config, computed, seen)


def _attention_operations(config, computed, seen):
  width = config.num_heads * config.head_dim
  return 4 * config.num_layers * width * computed * seen


def step_operations(config: TransformerConfig, plan: Plan) -> int:
  """Multiplications and additions of a step, on all devices.

  Three times those of a forward pass (Kaplan et al. 2020, arXiv 2001.08361,
  section 2.1, where 6 N a token leaves out attention), and what is computed
  again for the gradient: attention where products are kept; where nothing is,
  layers whole, but for their last product, which no gradient needs; logits
  where there are many.
  """
  tokens, length = plan.tokens, plan.length
  again = 0
  if loss_chunks(config, plan) > 1:
    again += 2 * tokens * config.vocab_size * config.model_dim
  if plan.remat != 'all':
    again += _attention_operations(config, tokens, length)
  if plan.remat == 'none':
    last = config.num_layers * config.mlp_dim * config.model_dim
    again += 2 * tokens * (multiplied(config) - last)
  return 3 * forward_operations(config, tokens, length, tokens) + again


def loss_chunks(config: TransformerConfig, plan: Plan) -> int:
  """In how many chunks of slots the loss of a part is computed.

  As few as leave a device 2^26 logits, see `predict.target_log_probs`.
  """
  local = plan.local_tokens * config.vocab_size / plan.tensor
  divisors = (n for n in range(1, plan.length) if plan.length % n == 0)
  return next((n for n in divisors if n >= local / 2**26), plan.length)


def state_bytes(config: TransformerConfig, plan: Plan) -> int:
  """Of one device, in float32: parameters, their average and two moments."""
  return 4 * 4 * local_parameters(config, plan)


def kept_bytes(config: TransformerConfig, plan: Plan) -> int:
  """What one device keeps of the layers for the gradient of a part.

  Of each layer and token: with 'none' the stream; with 'dots' also queries,
  keys, values, what attention adds to the stream, and the products inside the
  MLP (the table of Korthikanti et al. 2022, arXiv 2205.05198, section 4.1,
  without scores); with 'all' everything, of which the scores of every head and
  their softmax, in float32, are most.
  """
  dim, mlp = config.model_dim, config.mlp_dim
  heads = (config.num_heads + 2 * config.kv_heads) * config.head_dim
  inner = (2 if config.mlp == 'swiglu' else 1) * mlp
  scores = 2 * 4 * config.num_heads * plan.length
  width = compute_bytes(config)
  kept = {
    'none': width * dim,
    'dots': width * (2 * dim + heads + inner),
    # The numbers of arrays were counted in compiled programs.
    'all': width * (12 * dim + heads + 5 * mlp) + scores,
  }[plan.remat]
  return config.num_layers * plan.local_tokens * kept // plan.tensor


def gradient_bytes(config: TransformerConfig, plan: Plan) -> int:
  """Of one device, in float32; with several parts also their sum."""
  copies = 1 if plan.accumulation == 1 else 2
  return 4 * copies * local_parameters(config, plan)


def working_bytes(config: TransformerConfig, plan: Plan) -> int:
  """What one device holds at once beside that, in the larger of two phases.

  The loss has logits, their exponentials, their gradient and a mask; in chunks
  it has them once more, and tables of ids whole along 'fsdp' with their
  gradient. The gradient of a layer has scores and their gradient in float32,
  the softmax and its gradient as values are computed, and a mask; inner values
  of the MLP, streams that are whole along the row, and the matrices of the
  layer, whole along 'fsdp'. The numbers of arrays were counted in compiled
  programs.
  """
  tokens, width = plan.local_tokens, compute_bytes(config)
  chunks = loss_chunks(config, plan)
  copies, tables = (13, 1) if chunks == 1 else (20, 3)
  logits = copies * tokens * config.vocab_size // chunks
  scores = tokens * plan.length * config.num_heads * (2 * 4 + 2 * width + 1)
  inner = 4 * width * tokens * config.mlp_dim
  matrices = 4 * width * multiplied(config) // config.num_layers
  layer = (scores + inner + matrices) // plan.tensor
  streams = 8 * width * tokens * config.model_dim
  ids = tables * 4 * config.vocab_size * config.model_dim // plan.tensor
  return ids + max(logits // plan.tensor, layer + streams)


def temporary_bytes(config: TransformerConfig, plan: Plan) -> int:
  """Of one device: what is kept, gradients, and what is worked on."""
  return (
    kept_bytes(config, plan)
    + gradient_bytes(config, plan)
    + working_bytes(config, plan)
  )


def compute_bytes(config: TransformerConfig) -> int:
  """Size of a value that is computed."""
  return {'float32': 4, 'bfloat16': 2}[config.dtype]


def fsdp_traffic(
  config: TransformerConfig, plan: Plan, *, sums: int = 1
) -> float:
  """Bytes that one device sends in a step along 'fsdp'.

  Of each part, with rings: every matrix is gathered for the forward and again
  for the backward pass, and its gradient summed and scattered (Rajbhandari et
  al. 2020, arXiv 1910.02054, section 7.2.2). Tables are gathered in float32,
  and so are their gradients summed, that of the embedding and that of the head.

  Args:
    config: of the network.
    plan: of the step.
    sums: 1 where a sum is scattered at once; 2 where it is made everywhere
      first, as XLA's CPU back end does.
  """
  tables = 1 if config.tied_head else 2
  gathered = 2 * compute_bytes(config) * multiplied(config)
  gathered += tables * 4 * config.vocab_size * config.model_dim
  sent = gathered + sums * _summed_bytes(config)
  return plan.accumulation * _ring(plan.fsdp) * sent / plan.tensor


def data_traffic(config: TransformerConfig, plan: Plan) -> float:
  """Bytes that one device sends in a step along 'data': gradients, summed.

  The gradient of each part is summed before it is added to that of the others.
  """
  local = _summed_bytes(config) / (plan.fsdp * plan.tensor)
  return plan.accumulation * 2 * _ring(plan.data) * local


def _summed_bytes(config):
  """Gradients of matrices as values are computed, of tables in float32."""
  tables = 2 * 4 * config.vocab_size * config.model_dim
  return compute_bytes(config) * multiplied(config) + tables


def activation_traffic(
  config: TransformerConfig, plan: Plan, *, sums: int = 1
) -> float:
  """Bytes that one device sends in a step along 'tensor'.

  Between branches each device has some slots (Korthikanti et al. 2022, section
  4.2.2), so a branch gathers the stream and scatters what it adds; so does its
  gradient, which is summed for each matrix that opens the branch, and what is
  computed again.

  Args:
    config: of the network.
    plan: of the step.
    sums: as in `fsdp_traffic`.
  """
  opening = 3 + (2 if config.mlp == 'swiglu' else 1)
  gathers, scatters = 2 + 2, 2 + opening
  if plan.remat != 'all':
    gathers += 2
  if plan.remat == 'none':
    scatters += 1
  streams = config.num_layers * (gathers + sums * scatters) + 3 + 2 * sums
  stream = compute_bytes(config) * plan.local_tokens * config.model_dim
  return plan.accumulation * _ring(plan.tensor) * streams * stream


def _ring(devices):
  return (devices - 1) / devices


class Seconds(NamedTuple):
  """What a step takes at least, if nothing else were done.

  Attributes:
    arithmetic: at the peak of all devices.
    memory: to read and write what a device holds.
    exchanges: to send what a device sends.
  """

  arithmetic: float
  memory: float
  exchanges: float


def step_seconds(
  config: TransformerConfig, plan: Plan, device: Device
) -> Seconds:
  """Lower bounds of the time of a step; all three together where none overlap.

  Memory: the state is read and written and gradients are written and read, so
  are the matrices for each of three passes and what is kept; scores and softmax
  count 12 bytes a pass, twice as much in the gradient, and logits 24.
  """
  width = compute_bytes(config)
  parts, local = plan.accumulation, local_parameters(config, plan)
  passes = 3 if plan.remat == 'all' else 4
  matrices = passes * width * multiplied(config) // plan.tensor
  scores = plan.local_tokens * plan.length * config.num_heads * 12 * passes
  logits = 24 * plan.local_tokens * config.vocab_size
  moved = (
    2 * state_bytes(config, plan)
    + 2 * 4 * local
    + parts
    * (
      matrices
      + 2 * kept_bytes(config, plan)
      + config.num_layers * scores // plan.tensor
      + logits // plan.tensor
    )
  )

  sent = {
    'tensor': activation_traffic(config, plan),
    'fsdp': fsdp_traffic(config, plan),
    'data': data_traffic(config, plan),
  }
  exchanges, inner = 0.0, 1
  for axis in reversed(mesh_context.AXES):  # Neighbours first.
    size = getattr(plan, axis)
    exchanges += sent[axis] / (1e9 * _speed(device, inner, size))
    inner *= size
  return Seconds(
    step_operations(config, plan)
    / (plan.devices * device.tera_operations * 1e12),
    moved / (device.memory_gb_per_second * 1e9),
    exchanges,
  )


def _speed(device, inner, size):
  """10^9 bytes a second of a device along an axis, `inner` devices apart.

  What all devices of a group exchange with other groups enters each group once,
  through the links of all its devices.
  """
  if inner * size <= device.group:
    return device.near_gb_per_second
  links = max(1, device.group // inner)
  return min(device.near_gb_per_second, links * device.far_gb_per_second)
