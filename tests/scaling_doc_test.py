"""The tables of docs/scaling.md are what the model of the cost says now."""

import dataclasses
import operator
import re
import runpy
import sys

import pytest
import script_runner

from mdlm_jax import run_config
from mdlm_jax.models.config import TransformerConfig

EXPERIMENTS = script_runner.ROOT / 'scripts' / 'experiments'
sys.path.insert(0, str(EXPERIMENTS))

import cost_model  # noqa: E402

PATH = script_runner.ROOT / 'docs' / 'scaling.md'
MEASURED, PREDICTED = PATH.read_text().split('\n## Predicted\n')
IDS = {'125M': 50_304, '1B': 32_000, '8B': 126_464}


def cells(line):
  return [cell.strip() for cell in line.strip('|').split('|')]


def model_of(size, dtype):
  path = script_runner.ROOT / 'configs' / 'prepared.py'
  config = runpy.run_path(str(path))['get_config'](size)
  shape = TransformerConfig(
    vocab_size=IDS[size], max_length=config.data.length, **config.model
  )
  return dataclasses.replace(shape, dtype=dtype), config.data


def plan_of(data, axes, parts, remat, rows=None):
  sizes = [int(size) for size in axes.split('x')]
  rows = rows or data.batch_size
  return cost_model.Plan(rows, data.length, *sizes, int(parts), remat)


def assert_rounds_to(text, value):
  """The number is printed as it is, to its last digit."""
  text = text.replace(',', '')
  decimals = len(text.partition('.')[2])
  assert abs(float(text) - value) <= 0.501 * 10**-decimals, (text, value)


def predicted_rows():
  for line in PREDICTED.splitlines():
    if heading := re.match(r'\*\*(\w+)\*\*, [\d,]+ tokens, ([\d,]+) ids', line):
      size = heading[1]
      assert int(heading[2].replace(',', '')) == IDS[size]
    elif re.match(r'\| \d', line):
      yield size, *cells(line)


@pytest.mark.parametrize('row', list(predicted_rows()), ids='-'.join)
def test_what_is_predicted(row):
  size, devices, axes, parts, remat, state, temporaries, memory, *rest = row
  model, data = model_of(size, 'bfloat16')
  plan = plan_of(data, axes, parts, remat)
  count, device = devices.split()
  assert plan.devices == int(count)
  device = cost_model.DEVICES[device]
  held = [
    f(model, plan) / 1e9
    for f in (cost_model.state_bytes, cost_model.temporary_bytes)
  ]
  for text, value in zip((state, temporaries), held, strict=True):
    assert_rounds_to(text, value)
  needed, there = re.match(r'(\d+) of (\d+)', memory).groups()
  assert_rounds_to(needed, sum(held))
  assert int(there) == device.memory_gb
  assert ('(no)' in memory) == (sum(held) > device.memory_gb)
  seconds = cost_model.step_seconds(model, plan, device)
  *times, speeds = rest
  for text, value in zip(times, seconds, strict=True):
    assert_rounds_to(text, value)
  for text, longest in zip(
    speeds.split(' to '), (sum(seconds), max(seconds)), strict=True
  ):
    assert_rounds_to(text, plan.tokens / longest / 1000)


def measured_rows():
  name = ''
  for line in MEASURED.splitlines():
    row = cells(line)
    if len(row) == 8 and row[1][:1].isdigit():
      name = row[0] or name
      yield name, *row[1:]


@pytest.mark.parametrize('row', list(measured_rows()), ids='-'.join)
def test_what_is_beside_the_measured(row):
  name, axes, parts, remat, _, temporaries, _, sent = row
  size, rows = re.match(r'(\w+), (\d+) rows', name).groups()
  model, data = model_of(size, 'float32')
  axes = axes if 'x' in axes else '1 x 1 x 1'
  plan = plan_of(data, axes, parts, remat, int(rows))
  assert_rounds_to(temporaries, cost_model.temporary_bytes(model, plan) / 1e9)
  # XLA's CPU back end sums everywhere before it scatters.
  total = (
    cost_model.activation_traffic(model, plan, sums=2)
    + cost_model.fsdp_traffic(model, plan, sums=2)
    + cost_model.data_traffic(model, plan)
  )
  assert_rounds_to(sent, total / 1e9)


def test_fields_and_files_exist():
  fields = run_config.defaults()
  for name in ('scaling.md', 'data.md'):
    text = (PATH.parent / name).read_text()
    for field in set(re.findall(r'\bconfig((?:\.[a-z]\w*)+)', text)):
      operator.attrgetter(field[1:])(fields)
    for path in re.findall(r'\]\((?!http)([^)#]+)\)', text):
      assert (PATH.parent / path).exists(), path
