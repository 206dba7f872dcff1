"""The one adapter between a network and everything that uses it."""

from collections.abc import Callable
from typing import NamedTuple


class Denoiser(NamedTuple):
  """A network as two pure functions; `params` pass through untouched.

  Attributes:
    features: `features(params, cache, ids, *, at, step, t, valid, positions,
      segments) -> (hidden, cache)`. `ids`, `valid`, `positions`, `segments`
      (or None) have shape `[B, L]`, `t` `[B]` is the noise level, `step` the
      number of the call. `at` `[B, W]` holds the slots whose hidden states are
      wanted (contiguous, distinct, in range, per row), None all of them.
      `hidden` is `[B, W, d]`. `cache=None` asks for a full forward pass; a
      network without a cache returns `()`.
    head: `head(params, hidden) -> logits`, `[B, W, d]` to `[B, W, V]`.
  """

  features: Callable
  head: Callable
