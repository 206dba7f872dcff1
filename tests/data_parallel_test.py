import pytest
import squares

from mdlm_jax.data import parallel


@pytest.mark.parametrize('workers', [1, 2])
def test_processes_return_in_order_and_tell_of_all_work(workers):
  told = []
  items = [3, 1, 5, 2]
  found = parallel.mapped(
    squares.squared, items, workers=workers, advance=told.append
  )
  assert found == [9, 1, 25, 4] and sum(told) == sum(items)


@pytest.mark.parametrize(
  'item, error, said',
  [
    (7, ValueError, 'seven'),
    (8, ChildProcessError, r'killed \(exit code -9\)'),
  ],
)
def test_a_failing_or_killed_process_ends_all(item, error, said):
  with pytest.raises(error, match=said):
    parallel.mapped(
      squares.squared, [1, item, 2], workers=2, advance=lambda amount: None
    )
