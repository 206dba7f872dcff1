"""The shape of a transformer; `families` says which model has what."""

import dataclasses

DTYPES = ('float32', 'bfloat16')
_CHOICES = {
  'dtype': DTYPES,
  'rope_dtype': DTYPES,
  'qk_norm': (None, 'head', 'projection'),
  'norm': ('rms', 'layer'),
  'mlp': ('swiglu', 'gelu'),
  'time_input': ('t', 'sigma'),
}
# Of one array; the compiler counts bytes in 64 bits, and not always with care.
_MOST_ELEMENTS = 2**48
_EXPERT_SCORES = ('softmax', 'sigmoid')


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
  """A mixture of SwiGLU experts; `experts.route` says how they are chosen.

  Attributes:
    num_experts: how many there are.
    num_chosen: how many a token passes.
    width: hidden width of an expert.
    shared_width: hidden width of one that every token passes; None: none.
    score: 'softmax' over all experts, or 'sigmoid' of each.
    selection_bias: whether a stored bias takes part in the choice.
    num_groups: groups of equal size, neighbours.
    num_chosen_groups: groups from which a token's experts are taken.
    normalized: whether the weights of a token's experts sum to 1.
    scale: factor of the weights.

  Raises:
    ValueError: for numbers that do not fit together.
  """

  num_experts: int
  num_chosen: int
  width: int
  shared_width: int | None = None
  score: str = 'softmax'
  selection_bias: bool = False
  num_groups: int = 1
  num_chosen_groups: int = 1
  normalized: bool = False
  scale: float = 1.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int or (field.type == int | None and value is not None):
        _require_positive_int(field.name, value)
    if self.score not in _EXPERT_SCORES:
      raise ValueError(f'score={self.score!r} must be one of {_EXPERT_SCORES}')
    if not 0 < self.scale < float('inf'):
      raise ValueError(f'scale={self.scale} must be positive and finite')
    if self.num_experts % self.num_groups:
      raise ValueError(
        f'num_groups={self.num_groups} must divide '
        f'num_experts={self.num_experts}'
      )
    size = self.num_experts // self.num_groups
    if self.num_groups > 1 and size < 2:
      raise ValueError(
        f'num_groups={self.num_groups} must leave groups of two experts or more'
      )
    if self.num_chosen_groups > self.num_groups:
      raise ValueError(
        f'num_chosen_groups={self.num_chosen_groups} must be at most '
        f'num_groups={self.num_groups}'
      )
    if self.num_chosen > self.num_chosen_groups * size:
      raise ValueError(
        f'num_chosen={self.num_chosen} must be at most '
        f'{self.num_chosen_groups * size}, the experts of the chosen groups'
      )


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Shape of the network; static and hashable.

  Six numbers are its size. Everything else has a default, which is what a model
  trained here has, and is a switch in which published models differ.

  Attributes:
    vocab_size: rows of the embedding table, special ids included.
    num_layers: number of blocks.
    model_dim: width of the residual stream.
    num_heads: query heads; without `head_width` they must divide `model_dim`
      into heads of even width.
    mlp_dim: hidden width of the MLP.
    max_length: longest sequence accepted, the trained length.

    num_kv_heads: key/value heads, a divisor of `num_heads`; None: one each.
    head_width: width of a head, even; None: `model_dim / num_heads`.
    qkv_bias: whether queries, keys and values have a bias.
    qk_norm: norm of queries and keys before the rotation: of each 'head' (Henry
      et al., 2020), or of the whole 'projection' at once.
    rotary_width: how many channels of each head are rotated, the first, even;
      None: all.
    rope_base: base of the rotary wavelengths.
    rope_dtype: to which the rotary cosines and sines are rounded.
    attention_block: slots see those of their own and of earlier blocks of so
      many logical positions; 1 is a causal network. None: every slot sees all.

    norm: 'rms' (Zhang and Sennrich, 2019) or 'layer', which also takes away the
      mean; both have weights and no bias.
    norm_eps: added under the root.
    mlp: 'swiglu' without biases (Shazeer, 2020), or 'gelu' in its tanh form
      between two matrices with biases.
    experts: a mixture of experts in place of the MLP; None: none.
    num_dense_layers: how many layers, the first, have an MLP nevertheless.

    time_conditioning: whether the noise level `t` steers the norms.
    time_input: what is embedded of the noise level: 't', or 'sigma' = -log
      alpha(t) of the log-linear schedule; the latter needs `time_conditioning`.
    conditioning_dim: width of the vector that modulates every norm and branch
      (Peebles and Xie, 2023); None: `model_dim` with `time_conditioning`, else
      nothing is modulated. Given without `time_conditioning`, the vector is
      that of level 0 always.

    embedding_scale: factor of the embedded ids; None: the inverse of the spread
      of a fresh table, so that the stream begins with unit variance.
    tied_head: whether the head is the transposed embedding table.
    head_bias: whether the logits have a bias.
    logit_scale: factor of the logits.
    shifted: whether the logits at a slot are those of the token after it, as in
      a network that began as an autoregressive one (`Denoiser.shifted`).

    dtype: compute dtype, 'float32' or 'bfloat16'. Norms, softmax and logits are
      computed in float32 either way.

  Raises:
    ValueError: for a value outside these ranges.
  """

  vocab_size: int
  num_layers: int
  model_dim: int
  num_heads: int
  mlp_dim: int
  max_length: int
  # Attention.
  num_kv_heads: int | None = None
  head_width: int | None = None
  qkv_bias: bool = False
  qk_norm: str | None = None
  rotary_width: int | None = None
  rope_base: float = 10_000.0
  rope_dtype: str = 'float32'
  attention_block: int | None = None
  # Norms and MLP.
  norm: str = 'rms'
  norm_eps: float = 1e-6
  mlp: str = 'swiglu'
  experts: ExpertsConfig | None = None
  num_dense_layers: int = 0
  # Noise level.
  time_conditioning: bool = False
  time_input: str = 't'
  conditioning_dim: int | None = None
  # Embedding and logits.
  embedding_scale: float | None = None
  tied_head: bool = True
  head_bias: bool = False
  logit_scale: float = 1.0
  shifted: bool = False
  # All of it.
  dtype: str = 'float32'

  def __post_init__(self):
    for name in (
      'vocab_size',
      'num_layers',
      'model_dim',
      'num_heads',
      'mlp_dim',
      'max_length',
    ):
      _require_positive_int(name, getattr(self, name))
    for name in ('attention_block', 'conditioning_dim'):
      if getattr(self, name) is not None:
        _require_positive_int(name, getattr(self, name))
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is bool and not isinstance(value, bool):
        raise ValueError(f'{field.name}={value!r} must be True or False')
    if self.head_width is not None:
      _require_positive_int('head_width', self.head_width)
      if self.head_width % 2:
        raise ValueError(
          f'head_width={self.head_width} must be even for rotary positions'
        )
    elif self.model_dim % (2 * self.num_heads):
      raise ValueError(
        f'model_dim={self.model_dim} must be a multiple of 2 * num_heads='
        f'{2 * self.num_heads}: rotary positions need heads of even width'
      )
    if self.num_kv_heads is not None:
      _require_positive_int('num_kv_heads', self.num_kv_heads)
      if self.num_heads % self.num_kv_heads:
        raise ValueError(
          f'num_kv_heads={self.num_kv_heads} must divide '
          f'num_heads={self.num_heads}'
        )
    _require_a_size_that_fits(self)
    for name in ('rope_base', 'norm_eps', 'embedding_scale', 'logit_scale'):
      value = getattr(self, name)
      if name == 'embedding_scale' and value is None:
        continue
      if not 0 < value < float('inf'):
        raise ValueError(f'{name}={value} must be positive and finite')
    for name, choices in _CHOICES.items():
      if getattr(self, name) not in choices:
        raise ValueError(
          f'{name}={getattr(self, name)!r} must be one of {choices}'
        )
    if self.rotary_width is not None:
      _require_positive_int('rotary_width', self.rotary_width)
      if self.rotary_width % 2 or self.rotary_width > self.head_dim:
        raise ValueError(
          f'rotary_width={self.rotary_width} must be even and at most '
          f'{self.head_dim}, the width of a head'
        )
    if self.experts is not None and self.mlp != 'swiglu':
      raise ValueError(f'experts are networks of SwiGLU, not mlp={self.mlp!r}')
    most_dense = 0 if self.experts is None else self.num_layers - 1
    if not 0 <= self.num_dense_layers <= most_dense:
      raise ValueError(
        f'num_dense_layers={self.num_dense_layers} must lie in '
        f'[0, {most_dense}]: some layers before those with experts'
      )
    if self.time_input != 't' and not self.time_conditioning:
      raise ValueError(
        f'time_input={self.time_input!r} needs time_conditioning'
      )

  @property
  def head_dim(self) -> int:
    return self.head_width or self.model_dim // self.num_heads

  @property
  def kv_heads(self) -> int:
    return self.num_kv_heads or self.num_heads

  @property
  def modulation_width(self) -> int:
    """Width of the vector that modulates the norms; 0 where nothing does."""
    if self.conditioning_dim is not None:
      return self.conditioning_dim
    return self.model_dim if self.time_conditioning else 0


def _require_a_size_that_fits(config):
  """No array may have more elements than XLA can count the bytes of."""
  width = config.num_heads * config.head_dim
  largest = config.model_dim * max(
    config.vocab_size, config.num_layers * max(config.mlp_dim, width)
  )
  if largest >= _MOST_ELEMENTS:
    raise ValueError(
      f'num_layers={config.num_layers}, model_dim={config.model_dim}, '
      f'mlp_dim={config.mlp_dim}, vocab_size={config.vocab_size}: one matrix '
      f'of all layers would have {largest:.1e} elements'
    )


def _require_positive_int(name, value):
  if not isinstance(value, int) or isinstance(value, bool) or value < 1:
    raise ValueError(f'{name}={value!r} must be an integer of at least 1')
  if value >= 2**31:
    raise ValueError(f'{name}={value} must be below 2^31')
