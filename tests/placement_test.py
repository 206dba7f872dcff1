import jax
import numpy as np
import pytest

from mdlm_jax import mesh_context, optimizers, training
from mdlm_jax.models import placement, transformer
from mdlm_jax.models.config import ExpertsConfig, TransformerConfig

ONE = placement.mesh(1, 1, 1, devices=jax.devices()[:1])
SIZES = {
  'vocab_size': 10,
  'num_layers': 2,
  'model_dim': 16,
  'num_heads': 4,
  'num_kv_heads': 2,
  'mlp_dim': 24,
  'max_length': 8,
}
EXPERTS = ExpertsConfig(num_experts=4, num_chosen=2, width=6, shared_width=4)


def abstract(data, fsdp, tensor):
  """Axes without devices, for what asks for their sizes only."""
  return jax.sharding.AbstractMesh((data, fsdp, tensor), mesh_context.AXES)


def specs(config, mesh, muon=0.0):
  """How the leaves of a train state lie, by the keys of its tree."""
  optimizer = optimizers.make_optimizer(
    steps=9, learning_rate=0.1, warmup_steps=0, weight_decay=0.1, clip_norm=1.0,
    muon_learning_rate=muon,
  )  # fmt: skip
  state = jax.eval_shape(
    lambda key: training.init_state(transformer.init(config, key), optimizer),
    jax.random.key(0),
  )
  places = placement.state_sharding(mesh, state)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): tuple(place.spec)
    for path, place in jax.tree_util.tree_leaves_with_path(places)
  }


def test_every_matrix_is_split_over_both_axes():
  config = TransformerConfig(
    **SIZES, experts=EXPERTS, num_dense_layers=1, conditioning_dim=8,
    tied_head=False,
  )  # fmt: skip
  found = specs(config, abstract(1, 2, 2))
  opening, closing = (None, 'fsdp', 'tensor'), (None, 'tensor', 'fsdp')
  expected = {
    'embedding': ('tensor', 'fsdp'),
    'head': ('tensor', 'fsdp'),
    'time_in/kernel': opening[1:],
    'time_out/kernel': closing[1:],
    'dense_blocks/query/kernel': opening,
    'dense_blocks/key/kernel': opening,
    'dense_blocks/value/kernel': opening,
    'dense_blocks/attention_out/kernel': closing,
    'dense_blocks/gate/kernel': opening,
    'dense_blocks/up/kernel': opening,
    'dense_blocks/mlp_out/kernel': closing,
    'blocks/modulation/kernel': opening,
    'blocks/experts/gate': (None, *opening),
    'blocks/experts/up': (None, *opening),
    'blocks/experts/out': (None, *closing),
    'blocks/experts/shared_gate': opening,
    'blocks/experts/shared_up': opening,
    'blocks/experts/shared_out': closing,
    'blocks/experts/router': (None,) * 3,
    'norm/scale': (None,),
  }
  for key, spec in expected.items():
    assert found[f'params/{key}'] == found[f'ema/{key}'] == spec
    moments = [
      found[x] for x in found if x.endswith((f'/mu/{key}', f'/nu/{key}'))
    ]
    assert moments == [spec, spec]
  assert found['step'] == found['skipped'] == ()


def test_moments_of_muon_lie_as_their_parameters():
  found = specs(TransformerConfig(**SIZES), abstract(1, 2, 2), muon=0.1)
  moments = [
    spec for key, spec in found.items() if key.endswith('/mu/blocks/up/kernel')
  ]
  assert moments == [(None, 'fsdp', 'tensor')]


def test_what_an_axis_does_not_divide_is_whole():
  place = placement.sharding(abstract(1, 2, 4))
  assert tuple(place('embedding', (10, 16)).spec) == (None, 'fsdp')
  assert tuple(place('blocks/up/kernel', (2, 15, 24)).spec) == (
    None, None, 'tensor',
  )  # fmt: skip


@pytest.mark.parametrize(
  ('sizes', 'mesh', 'rows', 'message'),
  [
    ({}, (2, 2, 2), 6, r'6 rows at once .*mesh.data \* mesh.fsdp=4'),
    ({}, (1, 3, 1), 3, 'model.model_dim=16 .*mesh.fsdp=3'),
    ({}, (1, 1, 8), 1, 'model.num_heads=4 .*mesh.tensor=8'),
    ({}, (1, 1, 4), 1, 'model.num_kv_heads=2 .*mesh.tensor=4'),
    ({'mlp_dim': 25}, (1, 1, 2), 1, 'model.mlp_dim=25 .*mesh.tensor=2'),
    (
      {'experts': EXPERTS, 'num_kv_heads': 4}, (1, 1, 4), 1,
      'model.experts.width=6 .*mesh.tensor=4',
    ),
  ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(sizes, mesh, rows, message):
  config = TransformerConfig(**SIZES | sizes)
  with pytest.raises(ValueError, match=message):
    placement.check(abstract(*mesh), config, rows)


def test_what_can_be_split_is_not():
  # Ten ids over four devices; with experts only, the MLP has no width.
  config = TransformerConfig(**SIZES | {'num_kv_heads': 4})
  placement.check(abstract(2, 2, 4), config, 8)
  only = TransformerConfig(**SIZES | {'mlp_dim': 25, 'experts': EXPERTS})
  placement.check(abstract(1, 1, 2), only, 1)


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    ((-1, 2, 1), 'data=-1, fsdp=2, tensor=1 does not fit 1 device'),
    ((3, 1, 1), 'data=3, fsdp=1, tensor=1 does not fit 1 device'),
    ((1, 0, 1), 'mesh.fsdp=0 must be at least 1'),
    ((-2, 1, 1), 'mesh.data=-2 must be at least 1'),
  ],
)
def test_meshes_of_other_sizes_are_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    placement.mesh(*sizes, devices=jax.devices()[:1])


def test_missing_rows_are_refused():
  assert placement.local_rows(ONE, 3).tolist() == [0, 1, 2]
  with pytest.raises(
    ValueError, match=r'ids has 2 row\(s\).* holds 3 of the 3'
  ):
    placement.global_batch(ONE, {'ids': np.zeros((2, 4), np.int32)}, 3)
