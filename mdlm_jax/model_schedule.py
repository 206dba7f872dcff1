"""Model scheduling: another network at some of the steps."""

import itertools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mdlm_jax.interning import interned
from mdlm_jax.predict import Denoiser, network_logits


@interned
def by_step(denoisers: Sequence[Denoiser], starts: Sequence[int]) -> Denoiser:
  """A denoiser that is another network from each of some steps on.

  A small network at the steps where it costs little quality saves the
  difference of the two at each of them (Sedykh et al. 2026, "Not all denoising
  steps are equal"; there, replacing early and late steps costs less than
  replacing those in the middle). Only the network of the step runs.

  The steps are those of the whole run, counted over all blocks. Its `params`
  are a tuple, one entry a network. Logits are computed in `features`, since
  widths differ, and `head` passes them on. It keeps no cache: every call is a
  full forward pass. It is not `time_free`, even where all of the networks are:
  the next one has another prediction for a canvas that did not change.

  Args:
    denoisers: the networks, all over one vocabulary.
    starts: the first step of each, strictly increasing from 0.

  Returns:
    The denoiser.

  Raises:
    ValueError: for no networks, another number of starts, or starts other than
      these.
  """
  starts = [operator.index(start) for start in starts]
  if not denoisers or len(denoisers) != len(starts):
    raise ValueError(
      f'{len(denoisers)} denoisers for {starts=}; one start each, at least one'
    )
  if starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
    raise ValueError(f'{starts=} must be strictly increasing from 0')

  def features(params, cache, ids, *, step, **inputs):
    del cache

    def branch(denoiser, own_params):
      def logits():
        logits, _ = network_logits(
          denoiser, own_params, None, ids, step=step, **inputs
        )
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

      return logits

    branches = [branch(*pair) for pair in zip(denoisers, params, strict=True)]
    current = (step >= jnp.array(starts)).sum() - 1
    return jax.lax.switch(current, branches), ()

  return Denoiser(features, lambda params, logits: logits)
