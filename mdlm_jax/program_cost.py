"""What a compiled program takes: memory, arithmetic, traffic between devices.

All of it is read from the program; nothing is run:

  traced = step.trace(state, batch, key)
  cost = program_cost(traced, traced.lower().compile())

`jax.eval_shape` makes arguments for `trace` that hold nothing. Calling `step`
afterwards compiles nothing anew.
"""

import math
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.extend import core


class Collective(NamedTuple):
  """Exchanges of one kind, within groups of one size.

  Attributes:
    kind: the operation of XLA, such as 'all-gather'.
    group_size: how many devices take part in one.
    times: how often it happens in a run of the program.
    sent_bytes: what a device sends in all of them; see `collectives`.
  """

  kind: str
  group_size: int
  times: int
  sent_bytes: float


class ProgramCost(NamedTuple):
  """What a run of a compiled program takes.

  Attributes:
    num_devices: how many run it together.
    argument_bytes: arguments on one device.
    output_bytes: results on one device.
    aliased_bytes: results that take the place of donated arguments.
    temporary_bytes: everything between, on one device, at its highest.
    flops: of all devices together; see `matmul_flops`.
    collectives: exchanges between the devices.
  """

  num_devices: int
  argument_bytes: int
  output_bytes: int
  aliased_bytes: int
  temporary_bytes: int
  flops: int
  collectives: tuple[Collective, ...]

  @property
  def resident_bytes(self) -> int:
    """What one device holds before and after a run: state and batch."""
    return self.argument_bytes + self.output_bytes - self.aliased_bytes

  @property
  def device_bytes(self) -> int:
    """What one device needs for a run."""
    return self.resident_bytes + self.temporary_bytes


def program_cost(
  traced: jax.stages.Traced, compiled: jax.stages.Compiled
) -> ProgramCost:
  """The cost of a program, from its trace and its compiled form.

  Memory is that of the compiler's own plan. XLA's CPU back end computes
  bfloat16 in float32 and holds copies for it, which other devices do not.

  Args:
    traced: `jit(function).trace(arguments)`.
    compiled: `traced.lower().compile()`.
  """
  memory = compiled.memory_analysis()
  text = compiled.as_text()
  return ProgramCost(
    _number_of_devices(text),
    memory.argument_size_in_bytes,
    memory.output_size_in_bytes,
    memory.alias_size_in_bytes,
    memory.temp_size_in_bytes,
    matmul_flops(traced.jaxpr.jaxpr),
    collectives(text),
  )


def matmul_flops(jaxpr: core.Jaxpr) -> int:
  """Multiplications and additions of the matrix products of a program.

  A product of [m, k] and [k, n] has 2 m k n. Loops count as often as they run,
  what is recomputed for a gradient counts again, and of alternatives the
  longest. XLA's own analysis counts the body of a loop once, so that a scan
  over layers would be one layer. A loop of unknown length is one pass here too.

  Args:
    jaxpr: of a trace, so the same on every kind and number of devices.

  Example:
    >>> ones = jax.numpy.ones
    >>> product = jax.jit(jax.numpy.matmul).trace(ones((2, 3)), ones(3))
    >>> matmul_flops(product.jaxpr.jaxpr)
    12
  """
  return sum(_flops(equation) for equation in jaxpr.eqns)


def _flops(equation) -> int:
  name, params = equation.primitive.name, equation.params
  if name in ('dot_general', 'ragged_dot_general'):
    left = equation.invars[0].aval.shape
    numbers = params.get('dimension_numbers')
    if numbers is None:  # Each row of the left is multiplied with one group.
      numbers = params['ragged_dot_dimension_numbers'].dot_dimension_numbers
    summed = math.prod(left[axis] for axis in numbers[0][0])
    return 2 * summed * math.prod(equation.outvars[0].aval.shape)
  inner = [matmul_flops(jaxpr) for jaxpr in _inner_programs(params)]
  if name == 'cond':
    return max(inner)
  return sum(inner) * _times(name, params)


def _times(name, params):
  """How often the inner program of an operation is run."""
  if name == 'scan':
    return params['length']
  if name == 'shard_map':  # By every device of these axes.
    axes = params['newly_manual_axes']
    return math.prod(params['mesh'].shape[axis] for axis in axes)
  return 1


def _inner_programs(params) -> list[core.Jaxpr]:
  leaves = jax.tree.leaves(
    list(params.values()),
    is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr),
  )
  return [
    leaf.jaxpr if isinstance(leaf, core.ClosedJaxpr) else leaf
    for leaf in leaves
    if isinstance(leaf, core.Jaxpr | core.ClosedJaxpr)
  ]


def collectives(hlo_text: str) -> tuple[Collective, ...]:
  """Exchanges between devices in a compiled program, most traffic first.

  Of an operand of S bytes and a group of n devices, by the ring algorithms
  (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69), a device sends
  (n - 1) S to gather it, S (n - 1) / n to sum and scatter it or to transpose
  it, and 2 S (n - 1) / n to sum it everywhere. XLA's CPU back end sums
  everywhere where others sum and scatter.

  Args:
    hlo_text: `compiled.as_text()`. Loops count as often as they run.
  """
  found = {}
  for times, instruction in executed(hlo_text):
    kind = instruction.opcode.removesuffix('-start')
    if kind not in _SENT:
      continue
    size = _group_size(instruction.attributes, _number_of_devices(hlo_text))
    operand = sum(num_bytes(operand) for operand in instruction.operands)
    so_far, sent = found.get((kind, size), (0, 0))
    sent += times * _SENT[kind](operand, size)
    found[kind, size] = so_far + times, sent
  total = [Collective(*key, *value) for key, value in found.items()]
  return tuple(sorted(total, key=lambda x: -x.sent_bytes))


_SENT = {
  'all-gather': lambda size, n: size * (n - 1),
  'all-reduce': lambda size, n: 2 * size * (n - 1) / n,
  'reduce-scatter': lambda size, n: size * (n - 1) / n,
  'all-to-all': lambda size, n: size * (n - 1) / n,
  'ragged-all-to-all': lambda size, n: size * (n - 1) / n,
  'collective-permute': lambda size, n: size,
  'collective-broadcast': lambda size, n: size,
}


class Instruction(NamedTuple):
  """A line of a compiled program.

  Attributes:
    opcode: what it does.
    shape: type of the result, as text such as 'f32[8,16]{1,0}'.
    operands: types of the operands.
    attributes: all that follows them.
  """

  opcode: str
  shape: str
  operands: tuple[str, ...]
  attributes: str


def executed(hlo_text: str) -> Iterator[tuple[int, Instruction]]:
  """How often each instruction of a compiled program is run, and which.

  Those of all branches are, and those of a loop whose length XLA does not know
  once.
  """
  computations, entry = _computations(hlo_text)

  def visit(name, times):
    for instruction in computations[name]:
      yield times, instruction
      for kind, names in _CALLED.findall(instruction.attributes):
        trips = 1
        if kind == 'body':
          known = _TRIPS.search(instruction.attributes)
          trips = int(known[1]) if known else 1
        for called in _NAME.findall(names):
          yield from visit(called, times * trips)

  yield from visit(entry, 1)


_NAME = re.compile(r'%([^\s,(){}=]+)')
_INSTRUCTION = re.compile(r'\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z\d-]*)\((.*)')
_CALLED = re.compile(
  r'\b(body|calls|to_apply|branch_computations|true_computation|'
  r'false_computation)=(\{[^}]*\}|%[^\s,]+)'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,]*)\]')


def _computations(hlo_text):
  """Instructions by name of the computation, and the name of the first."""
  computations, entry = {}, None
  for line in hlo_text.splitlines():
    if line.endswith('{') and ' -> ' in line and not line.startswith(' '):
      name = _NAME.search(line)[1]
      types, computations[name] = {}, []
      entry = name if line.startswith('ENTRY') else entry
    elif computations and (match := _INSTRUCTION.match(line)):
      result, shape, opcode, rest = match.groups()
      operands, _, attributes = rest.partition(')')
      types[result] = shape
      known = [types[x] for x in _NAME.findall(operands) if x in types]
      computations[name].append(
        Instruction(opcode, shape, tuple(known), attributes)
      )
  return computations, entry


def num_bytes(shape: str) -> int:
  """Size of a type of XLA, or of all arrays of a tuple.

  Example:
    >>> num_bytes('(bf16[2,3]{1,0}, pred[])')
    13
  """
  return sum(
    _bits(dtype) * math.prod(_numbers(size)) // 8
    for dtype, size in _ARRAY.findall(shape)
  )


def dimensions(shape: str) -> tuple[int, ...]:
  """Of a type of XLA that is one array.

  Example:
    >>> dimensions('f32[8,16]{1,0}')
    (8, 16)
  """
  return _numbers(_ARRAY.search(shape)[2])


def _numbers(text):
  return tuple(map(int, filter(None, text.split(','))))


def _bits(dtype):
  width = re.search(r'\d+', dtype)
  return int(width[0]) if width else {'pred': 8}.get(dtype, 0)


def _group_size(attributes, num_devices):
  """Devices that exchange with one another, in XLA's three notations."""
  # {{0,1},{2,3}}
  if match := re.search(r'replica_groups=\{\{([\d,]+)\}', attributes):
    return len(_numbers(match[1]))
  # [groups,size]<=[...]
  if match := re.search(r'replica_groups=\[\d+,(\d+)\]<=', attributes):
    return int(match[1])
  # mesh['x'=2,'y'=4] {'x','y':(1)2}: axes, or a part of one.
  if match := re.search(
    r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', attributes
  ):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
    axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
  return num_devices


def _number_of_devices(hlo_text):
  header = hlo_text.partition('\n')[0]
  return math.prod(
    int(number)
    for number in re.findall(r'(?:num_partitions|replica_count)=(\d+)', header)
  )


def device_capacity(device: jax.Device) -> int:
  """Bytes that a program may use on a device.

  A GPU or TPU says so itself; of a GPU it is the share that JAX reserves.
  Devices without memory of their own share that of the host; what other
  processes take of it is not known.
  """
  limit = (device.memory_stats() or {}).get('bytes_limit')
  if limit is None:
    host = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    limit = host // jax.local_device_count()
  return limit


def check_fits(cost: ProgramCost, capacity: int) -> None:
  """Refuses a program that a device cannot hold.

  Args:
    cost: of the program.
    capacity: bytes of one device, see `device_capacity`.

  Raises:
    ValueError: what is needed, what there is, and what takes less.
  """
  if cost.device_bytes <= capacity:
    return
  if cost.resident_bytes > capacity:
    advice = 'split the state over more devices with mesh.fsdp or mesh.tensor'
  else:
    advice = (
      'raise accumulation, keep less for the gradient with remat, or split '
      'more with mesh.fsdp or mesh.tensor'
    )
  raise ValueError(
    f'a step needs {_size(cost.device_bytes)} on each device '
    f'({_size(cost.resident_bytes)} of state and batch, '
    f'{_size(cost.temporary_bytes)} of temporaries), it has {_size(capacity)}; '
    f'{advice}'
  )


def summary(
  cost: ProgramCost, *, num_parameters: int, num_tokens: int, capacity: int
) -> str:
  """What a step takes, in three lines.

  Args:
    cost: of the step.
    num_parameters: of the network.
    num_tokens: of a batch.
    capacity: bytes of one device, see `device_capacity`.
  """
  traffic = sum(x.sent_bytes for x in cost.collectives)
  times = sum(x.times for x in cost.collectives)
  return (
    f'{num_parameters:,} parameters on {cost.num_devices} device(s); a step of '
    f'{num_tokens:,} tokens takes {cost.flops:.3g} FLOPs\n'
    f'a device holds {_size(cost.resident_bytes)} of state and batch and '
    f'{_size(cost.temporary_bytes)} of temporaries, of {_size(capacity)}\n'
    f'it sends {_size(traffic)} in {times:,} collectives a step'
  )


def _size(num_bytes):
  unit, scale = ('GB', 1e9) if num_bytes >= 1e8 else ('MB', 1e6)
  return f'{num_bytes / scale:.3g} {unit}'
