"""The network that a run trains: a fresh one, or one that goes on."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Key
from ml_collections import ConfigDict

from mdlm_jax import schedules
from mdlm_jax.models import adapters, directory, int8, placement, transformer
from mdlm_jax.models.pretrained import Pretrained

Params = Any


class RunModel(NamedTuple):
  """A network, and which of its parameters are trained.

  Attributes:
    config: shape of the network.
    init: `init() -> params`, those that are trained before the first step, in
      their places.
    frozen: the others, None where all are trained.
    join: `join(frozen, params)` is what the network is called with; None where
      all are trained.
    whole: `whole(params)` are the parameters of the network, to be saved.
    release: frees what `init` would return, where a checkpoint takes its place.
  """

  config: transformer.TransformerConfig
  init: Callable[[], Params]
  frozen: Params | None = None
  join: Callable | None = None
  whole: Callable[[Params], Params] = lambda params: params
  release: Callable[[], None] = lambda: None


def fresh_model(
  config: transformer.TransformerConfig,
  mesh: jax.sharding.Mesh,
  key: Key[Array, ''],
) -> RunModel:
  """A network of random parameters; `key` is theirs."""
  return RunModel(
    config, _placed_init(functools.partial(transformer.init, config), mesh, key)
  )


def load(config: ConfigDict, mesh: jax.sharding.Mesh) -> Pretrained:
  """The model that a run goes on from, each parameter in its place.

  Where all are trained they are float32; where only adapters are, they are of
  the dtype that is computed in, matrices perhaps of eight bits.

  Raises:
    OSError, ValueError: as `directory.load`; rows longer than its positions; a
      schedule that it was not trained with and reads its time from.
  """
  has_adapters = config.adapters.rank > 0
  model = directory.load(
    directory.find(config.init_from),
    mask_id=config.init_mask_id,
    dtype=config.model.dtype if has_adapters else 'float32',
    sharding=placement.sharding(mesh),
    quantize=int8.quantize if config.adapters.int8 else None,
  )
  length, most = config.data.length, model.config.max_length
  if length > most:
    raise ValueError(
      f'config.data.length={length} is longer than the {most} positions of '
      f'{config.init_from}'
    )
  schedule = config.loss.schedule
  if model.config.time_conditioning and (
    schedules.named_schedule(schedule) is not model.schedule
  ):
    raise ValueError(
      f'{config.init_from} reads the time of another schedule than '
      f'config.loss.{schedule=}'
    )
  return model


def loaded_model(
  config: ConfigDict,
  mesh: jax.sharding.Mesh,
  model: Pretrained,
  key: Key[Array, ''],
) -> RunModel:
  """A loaded network of which all is trained, or adapters beside it.

  Args:
    config: of the run.
    mesh: all devices.
    model: as `load` gave it.
    key: of fresh adapters.
  """
  shape = dataclasses.replace(model.config, dtype=config.model.dtype)
  if not config.adapters.rank:
    return RunModel(
      shape,
      lambda: model.params,
      release=lambda: jax.tree.map(lambda x: x.delete(), model.params),
    )
  init = functools.partial(
    adapters.init,
    jax.eval_shape(lambda: int8.dense(model.params)),
    rank=config.adapters.rank,
    targets=config.adapters.targets or None,
  )
  alpha = config.adapters.alpha
  return RunModel(
    shape,
    _placed_init(init, mesh, key),
    model.params,
    functools.partial(adapters.join, alpha=alpha),
    functools.partial(adapters.merged, model.params, alpha=alpha),
  )


def _placed_init(init, mesh, key):
  """`init(key)`, made where each parameter belongs."""
  places = placement.state_sharding(mesh, jax.eval_shape(init, key))
  return lambda: jax.jit(init, out_shardings=places)(key)
