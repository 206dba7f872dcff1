"""The optimizers that runs are trained with."""

import jax
import optax

# Of every setting; steps of such a size leave float32 finite.
_LARGEST = 1e30


def make_optimizer(
  *,
  steps: int,
  learning_rate: float,
  warmup_steps: int,
  weight_decay: float,
  clip_norm: float,
  beta1: float = 0.9,
  beta2: float = 0.99,
  muon_learning_rate: float = 0.0,
) -> optax.GradientTransformation:
  """AdamW or Muon with clipping, linear warm-up and cosine decay to zero.

  Muon (Jordan et al. 2024) replaces the update of a matrix inside the blocks
  by the nearest orthogonal one; a small model then learns from fewer steps.
  Everything else is AdamW's (Loshchilov and Hutter 2019), beside Muon with
  Nesterov momentum (Dozat 2016).

  Args:
    steps: length of the run; the learning rate is 0 at its end. It follows the
      updates: a step that is skipped does not count.
    learning_rate: the highest of AdamW, after the warm-up; positive.
    warmup_steps: steps of linear growth from 0, fewer than `steps`.
    weight_decay: at least 0, below 2 over the learning rate. AdamW decays all
      matrices, embeddings included; with Muon only its own are decayed.
    clip_norm: largest global norm of the gradient; positive.
    beta1: decay of the first moment, in [0, 1).
    beta2: decay of the second moment, in [0, 1).
    muon_learning_rate: the highest of Muon; 0: AdamW for everything.

  Raises:
    ValueError: a value outside its range, or above 1e30; a decay that lets
      parameters grow.
  """
  if steps < 1:
    raise ValueError(f'{steps=} must be at least 1')
  if not 0 <= warmup_steps < steps:
    raise ValueError(
      f'optimizer.{warmup_steps=} must be from 0 to below {steps=}'
    )
  for name, value, is_legal, allowed in (
    ('learning_rate', learning_rate, learning_rate > 0, 'positive'),
    ('clip_norm', clip_norm, clip_norm > 0, 'positive'),
    ('weight_decay', weight_decay, weight_decay >= 0, 'at least 0'),
    ('beta1', beta1, 0 <= beta1 < 1, 'at least 0 and below 1'),
    ('beta2', beta2, 0 <= beta2 < 1, 'at least 0 and below 1'),
    (
      'muon_learning_rate',
      muon_learning_rate,
      muon_learning_rate >= 0,
      'at least 0',
    ),
  ):
    if not (is_legal and value <= _LARGEST):
      raise ValueError(
        f'optimizer.{name}={value} must be {allowed}, and at most {_LARGEST}'
      )
  decay = weight_decay * (muon_learning_rate or learning_rate)
  if decay >= 2:
    raise ValueError(
      f'optimizer.weight_decay={weight_decay} times the learning rate is '
      f'{decay}, must be below 2: decayed parameters would grow'
    )

  def rate(peak):
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup_steps, steps)

  if muon_learning_rate:
    update = optax.contrib.muon(
      rate(muon_learning_rate),
      weight_decay=weight_decay,
      adam_b1=beta1,
      adam_b2=beta2,
      adam_learning_rate=rate(learning_rate),
      muon_weight_dimension_numbers=_stacked_matrices,
    )
  else:
    update = optax.adamw(
      rate(learning_rate),
      beta1,
      beta2,
      weight_decay=weight_decay,
      mask=_is_decayed,
    )
  return optax.chain(optax.clip_by_global_norm(clip_norm), update)


def _is_decayed(params):
  """Which leaves are decayed: all but biases and the scales of norms."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key not in ('scale', 'bias'), params
  )


def _stacked_matrices(params):
  """Input and output axis of Muon's leaves, the blocks' `[layers, in, out]`."""
  return jax.tree.map(
    lambda leaf: (
      optax.contrib.MuonDimensionNumbers(1, 2) if leaf.ndim == 3 else None
    ),
    params,
  )
