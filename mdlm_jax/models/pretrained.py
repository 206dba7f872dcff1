"""What a model directory of any layout is read into."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Int
from numpy import ndarray

from mdlm_jax import predict, schedules
from mdlm_jax.models import transformer
from mdlm_jax.vocab import Vocab


@runtime_checkable
class TextCodec(Protocol):
  """Text to ids and back, see `mdlm_jax.tokenizer.Tokenizer`."""

  def encode(self, text: str) -> Int[ndarray, 'n']: ...

  def decode(self, ids, *, mask: str = '') -> str: ...


class Pretrained(NamedTuple):
  """A model read from its directory.

  Attributes:
    config: shape of the network.
    denoiser: the network as two pure functions.
    params: nested dict of arrays: float32, or of the dtype that the model was
      loaded in; matrices of eight bits are what `int8.quantize` made of them.
    vocab: roles of the ids.
    tokenizer: text to ids and back.
    schedule: the masking schedule that it was trained with.
    history: how it was trained, see `runs`; empty where unknown.
  """

  config: transformer.TransformerConfig
  denoiser: predict.Denoiser
  params: transformer.Params
  vocab: Vocab
  tokenizer: TextCodec
  schedule: schedules.Schedule
  history: dict

  @property
  def bound_schedule(self) -> schedules.Schedule:
    """A schedule under which the bound of this network is complete, if any.

    A network that does not read the noise level has the same bound under every
    complete schedule, whichever it was trained with.
    """
    if self.config.time_conditioning:
      return self.schedule
    return schedules.linear()
