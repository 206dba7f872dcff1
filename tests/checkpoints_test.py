import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mdlm_jax import checkpoints, training
from mdlm_jax.data.batches import batches
from mdlm_jax.data.windows import every_window

SETTINGS = {'config': {'steps': 3, 'nested': {'a': 1.5}}, 'tokenizer': 'é' * 9}


def make_state(num_layers=3, width=4, fill=1.0):
  params = {
    'embedding': jnp.full((5, width), fill),
    'blocks': {'kernel': jnp.full((num_layers, width, width), fill)},
  }
  return training.init_state(params, optax.adam(1e-3))


def make_iterator():
  windows = every_window([np.arange(66)], length=3, pad_id=99)
  return batches(windows, batch_size=8, seed=0)


def save(directory, state, iterator=None, keep=2):
  with checkpoints.open_directory(directory, keep=keep) as store:
    checkpoints.save(store, state, iterator or make_iterator(), SETTINGS)


def assert_trees_equal(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_everything_comes_back(tmp_path):
  state = make_state(fill=0.1)._replace(step=jnp.int32(7))
  unbroken, iterator = make_iterator(), make_iterator()
  batches = [next(unbroken)['ids'] for _ in range(8)]
  for _ in range(3):
    next(iterator)
  save(tmp_path / 'a', state, iterator)

  with checkpoints.open_directory(tmp_path / 'a') as store:
    assert checkpoints.latest_step(store) == 7
    assert checkpoints.latest_settings(store) == SETTINGS
    restarted = make_iterator()
    restored = checkpoints.restore(store, make_state(fill=0.0), restarted)
  assert_trees_equal(restored, state)
  rest = [next(restarted)['ids'] for _ in range(5)]
  np.testing.assert_array_equal(rest, batches[3:])


def test_no_checkpoint_yet(tmp_path):
  with checkpoints.open_directory(tmp_path) as store:
    assert checkpoints.latest_step(store) is None


def test_latest_ones_are_kept(tmp_path):
  with checkpoints.open_directory(tmp_path, keep=2) as store:
    for step in (1, 2, 2, 5):
      state = make_state(fill=step)._replace(step=jnp.int32(step))
      checkpoints.save(store, state, make_iterator(), SETTINGS)
    restored = checkpoints.restore(store, make_state(), make_iterator())
  assert restored.params['embedding'][0, 0] == 5
  assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == [
    '2',
    '5',
  ]


@pytest.mark.parametrize(
  'other',
  [
    make_state(num_layers=2),
    make_state(num_layers=4),
    make_state(width=6),
    make_state()._replace(ema={}),
    make_state()._replace(opt_state=()),
  ],
  ids=['fewer layers', 'more layers', 'other shape', 'no EMA', 'no optimizer'],
)
def test_another_structure_is_refused(tmp_path, other):
  save(tmp_path, make_state())
  with (
    checkpoints.open_directory(tmp_path) as store,
    pytest.raises(ValueError, match='is damaged, or holds a state of another'),
  ):
    checkpoints.restore(store, other, make_iterator())


def test_what_is_missing_in_the_file_is_refused(tmp_path):
  save(tmp_path, make_state()._replace(ema={}))
  with (
    checkpoints.open_directory(tmp_path) as store,
    pytest.raises(ValueError, match='is damaged, or holds a state of another'),
  ):
    checkpoints.restore(store, make_state(), make_iterator())


def test_keep_below_one_is_refused(tmp_path):
  with pytest.raises(ValueError, match='keep=0'):
    checkpoints.open_directory(tmp_path, keep=0)
