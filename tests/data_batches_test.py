import numpy as np
import pytest

from mdlm_jax.data.batches import batches, row_numbers
from mdlm_jax.data.windows import every_window


def epoch_windows(num_windows, length=3):
  return every_window(
    [np.arange(num_windows + length - 1)], length=length, pad_id=99
  )


def test_batches_hold_windows_with_global_row_ids():
  batch = next(batches(epoch_windows(64), batch_size=8, seed=0))
  assert batch['ids'].shape == (8, 3) and batch['ids'].dtype == np.int32
  assert batch['valid'].dtype == bool and batch['valid'].all()
  np.testing.assert_array_equal(batch['row_ids'], np.arange(8))
  np.testing.assert_array_equal(np.diff(batch['ids']), 1)


def first_ids(iterator, num_batches):
  return np.concatenate(
    [next(iterator)['ids'][:, 0] for _ in range(num_batches)]
  )


def test_each_epoch_has_every_window_once_in_another_order():
  ids = first_ids(batches(epoch_windows(64), batch_size=8, seed=0), 24)
  epochs = ids.reshape(3, 64)
  np.testing.assert_array_equal(
    np.sort(epochs, 1), np.tile(np.arange(64), (3, 1))
  )
  assert len({tuple(epoch) for epoch in epochs}) == 3


def test_seed_orders_the_data():
  windows = epoch_windows(64)
  a, b, c = (
    first_ids(batches(windows, batch_size=8, seed=seed), 4)
    for seed in (0, 0, 1)
  )
  np.testing.assert_array_equal(a, b)
  assert (a != c).any()


@pytest.mark.parametrize('batch_size', [10, 64])
def test_restored_iterator_goes_on_with_the_next_batch(batch_size):
  # Batches of 10 end inside the epoch of 64 windows.
  windows = epoch_windows(64)
  unbroken = first_ids(batches(windows, batch_size=batch_size, seed=0), 15)
  first = batches(windows, batch_size=batch_size, seed=0)
  before = first_ids(first, 6)
  second = batches(windows, batch_size=batch_size, seed=0)
  second.set_state(first.get_state())
  after = first_ids(second, 9)
  np.testing.assert_array_equal(np.concatenate([before, after]), unbroken)


@pytest.mark.parametrize('num_processes', [2, 4])
def test_the_parts_of_all_processes_are_the_batch(num_processes):
  windows = epoch_windows(30)
  whole = batches(windows, batch_size=8, seed=0)
  parts = [
    batches(windows, batch_size=8, seed=0, local=local)
    for local in np.arange(8).reshape(num_processes, -1)
  ]
  for _ in range(10):  # Beyond two epochs.
    batch, loaded = next(whole), [next(part) for part in parts]
    for name, leaf in batch.items():
      together = np.concatenate([part[name] for part in loaded])
      np.testing.assert_array_equal(together, leaf)


def test_a_run_goes_on_with_another_number_of_processes():
  windows = epoch_windows(30)
  unbroken = first_ids(batches(windows, batch_size=8, seed=0), 9)
  halves = [
    batches(windows, batch_size=8, seed=0, local=local)
    for local in np.arange(8).reshape(2, 4)
  ]
  for half in halves:
    first_ids(half, 4)
  states = [half.get_state() for half in halves]
  assert states[0] == states[1]
  for local in (np.arange(8), *np.arange(8).reshape(4, 2)):
    part = batches(windows, batch_size=8, seed=0, local=local)
    part.set_state(states[0])
    np.testing.assert_array_equal(
      first_ids(part, 5).reshape(5, -1), unbroken.reshape(9, 8)[4:, local]
    )


def test_an_epoch_is_whole_after_a_restart_in_the_one_before():
  windows = epoch_windows(64)
  first = batches(windows, batch_size=4, seed=0)
  before = first_ids(first, 15)
  second = batches(windows, batch_size=4, seed=0)
  second.set_state(first.get_state())
  # Four rows are left of the first epoch, then there are 64 again.
  assert set(first_ids(second, 1)) == set(range(64)) - set(before)
  assert set(first_ids(second, 16)) == set(range(64))


def test_rows_of_a_batch_can_be_asked_for_by_its_number():
  windows = epoch_windows(30)
  iterator = batches(windows, batch_size=7, seed=3)
  for number in range(6):
    np.testing.assert_array_equal(
      row_numbers(30, number, batch_size=7, seed=3), next(iterator)['ids'][:, 0]
    )


def test_rows_can_be_drawn_one_by_one():
  ids = first_ids(batches(epoch_windows(5), batch_size=1, seed=0), 10)
  np.testing.assert_array_equal(
    np.sort(ids.reshape(2, 5), 1), np.tile(np.arange(5), (2, 1))
  )


def test_batch_size_below_one_is_refused():
  with pytest.raises(ValueError, match='batch_size=0'):
    batches(epoch_windows(8), batch_size=0, seed=0)
