"""A run killed fifty times, one of two processes, and one on a full disk.

Ten to fifteen minutes on two cores; the last test needs `unshare` of util-linux
and a kernel that lets a user mount a tmpfs:

  python -m pytest -q -s tests/slow/survival_slow_test.py -o addopts=
"""

import json
import random
import signal
import statistics
import subprocess
import sys
import time

import pytest
import survival_run
from checkpoints_test import free_port
from survival_test import (
  ROOT,
  Session,
  assert_equal_runs,
  assert_steps_are_those_of,
  environment,
  lines,
  write_text,
)

STEPS = 1500


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  path = tmp_path_factory.mktemp('survival')
  write_text(path)
  for workdir, steps in ((path / 'unbroken', STEPS), (path / 'short', 60)):
    code, output = Session(path, workdir, f'--steps={steps}').result(900)
    assert code == 0, output
  return path


def planned_kills(rng):
  """(point or None, passes or seconds after the first step or the start)."""
  kills = [(point, rng.randrange(4)) for point in survival_run.POINTS] * 2
  kills = [
    (point, 0 if point == 'at the start' else passes) for point, passes in kills
  ]
  kills += [('loading', rng.uniform(0, 4)) for _ in range(6)]
  kills += [('training', rng.uniform(0, 1.5)) for _ in range(30)]
  rng.shuffle(kills)
  return kills


def test_fifty_kills_leave_no_trace(base):
  rng = random.Random(0)
  workdir, unbroken = base / 'killed', base / 'unbroken'
  kills = planned_kills(rng)
  held, recoveries, progress = 0, [], [0]
  for point, amount in kills:
    # Slowed down, or a fast machine is done before it was killed fifty times.
    options = [f'--steps={STEPS}', '--step_seconds=0.05']
    if point in survival_run.POINTS:
      options += [f'--hold={point}', f'--passes={amount}']
    begin = time.monotonic()
    session = Session(base, workdir, *options)
    if point in survival_run.POINTS:
      assert session.wait_until(session.marker.exists), session.output()
      held += 1
    else:
      if point == 'training':
        assert session.wait_until(session.steps), session.output()
        recoveries.append(time.monotonic() - begin)
      time.sleep(amount)
    assert session.kill() == -signal.SIGKILL, session.output()
    assert_steps_are_those_of(session, unbroken)
    if session.steps():
      progress.append(session.first_step())
  assert held >= 10 and len(kills) == 50
  assert progress == sorted(progress) and progress[-1] > STEPS / 10
  code, output = Session(base, workdir, f'--steps={STEPS}').result(900)
  assert code == 0, output
  assert_equal_runs(workdir, unbroken)
  print(
    f'\n{len(kills)} kills, {held} of them held; from the start of a process '
    f'to its first step {statistics.median(recoveries):.1f} s (median), '
    f'{max(recoveries):.1f} s at most; went on from steps {progress}'
  )


def start_two(base, workdir, *options, hold=()):
  port = free_port()
  return [
    Session(
      base,
      workdir,
      f'--processes={index},2,{port}',
      *options,
      *(hold if index == 0 else ()),
      index=index,
    )
    for index in range(2)
  ]


def test_when_one_of_two_processes_is_killed_both_can_start_again(base):
  rng = random.Random(1)
  workdir, unbroken = base / 'two_killed', base / 'two_unbroken'
  for session in start_two(base, unbroken):
    assert session.result(300)[0] == 0, session.output()
  waits = []
  for victim, point in (
    (0, 'between files'),
    (1, None),
    (0, 'before the commit'),
    (0, None),
    (1, None),
    (0, 'during the removal'),
  ):
    hold = ('--passes=1', f'--hold={point}') if point else ()
    pair = start_two(base, workdir, '--step_seconds=0.05', hold=hold)
    if point:
      assert pair[0].wait_until(pair[0].marker.exists), pair[0].output()
    else:
      assert pair[1].wait_until(pair[1].steps), pair[1].output()
      time.sleep(rng.uniform(0, 0.5))
    assert pair[victim].kill() == -signal.SIGKILL
    begin = time.monotonic()
    # The other does not wait for ever.
    assert pair[1 - victim].result(200)[0] != 0
    waits.append(time.monotonic() - begin)
    for session in pair:
      seen, first = session.steps(), pair[0].first_step()
      assert seen == lines(unbroken / session.record_ids)[first:][: len(seen)]
  for session in start_two(base, workdir):
    assert session.result(300)[0] == 0, session.output()
  assert_equal_runs(workdir, unbroken)
  print(f'\nthe other process ended after {max(waits):.1f} s at most')


# Runs in a namespace of its own, with a disk of 3 MB: fills it but for LEFT kB
# once two checkpoints are whole, makes room when the run has ended, and starts
# the same command again.
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=3000k none "$BASE/disk" || exit 99
RUN="$PYTHON $ROOT/tests/survival_run.py --workdir=$BASE/disk/run"
RUN="$RUN --text=$TEXT --steps=60"
$RUN --step_seconds=0.05 > "$BASE/first" 2>&1 & PID=$!
while [ ! -d "$BASE/disk/run/checkpoints/12" ]; do sleep 0.01; done
FREE=$(df -k --output=avail "$BASE/disk" | tail -1)
head -c $(( (FREE - LEFT) * 1024 )) /dev/zero > "$BASE/disk/ballast"
wait $PID; echo $? > "$BASE/first_code"
cp -r "$BASE/disk/run/checkpoints" "$BASE/between"
rm "$BASE/disk/ballast"
$RUN > "$BASE/second" 2>&1; echo $? > "$BASE/second_code"
cp -r "$BASE/disk/run" "$BASE/after"
"""


@pytest.mark.parametrize('left', [0, 16, 48, 80, 112])
def test_a_full_disk_ends_the_run_and_loses_nothing(base, tmp_path, left):
  (tmp_path / 'disk').mkdir()
  result = subprocess.run(
    ['unshare', '-rm', 'sh', '-c', ON_A_SMALL_DISK],
    env=environment(base)
    | {
      'BASE': str(tmp_path),
      'PYTHON': sys.executable,
      'ROOT': str(ROOT),
      'TEXT': str(base / 'text.txt'),
      'LEFT': str(left),
    },
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  if not (tmp_path / 'first_code').exists():
    pytest.skip(f'no disk can be mounted here: {result.stderr.strip()}')
  first, second = (
    (int((tmp_path / f'{x}_code').read_text()), (tmp_path / x).read_text())
    for x in ('first', 'second')
  )
  assert first[0] == 2, first[1]
  error = first[1].splitlines()[-1]
  assert error.startswith('error: ') and 'No space left on device' in error
  assert str(tmp_path / 'disk') in error and 'Traceback' not in first[1]
  whole = [x for x in (tmp_path / 'between').iterdir() if x.name.isdecimal()]
  assert max(int(x.name) for x in whole) >= 12
  for path in whole:
    json.loads((path / 'run' / 'data.json').read_text())
  assert second[0] == 0, second[1]
  assert_equal_runs(tmp_path / 'after', base / 'short')
  print(f'\n{left} kB left: {error}')
