"""program_cost against programs counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from mdlm_jax import program_cost

LAYERS, ROWS, WIDTH = 5, 4, 8


def descend(weights, x):
  """Gradient descent on layers of a scan that are computed twice."""

  def layer(x, kernel):
    return jnp.tanh(x @ kernel), None

  def loss(weights):
    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0])

  return weights - jax.grad(loss)(weights)


@pytest.fixture(scope='module')
def programs():
  traced = jax.jit(descend, donate_argnums=0).trace(
    jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
  )
  return traced, traced.lower().compile()


def test_bytes_and_operations_of_a_program(programs):
  cost = program_cost.program_cost(*programs)
  weights = 4 * LAYERS * WIDTH * WIDTH
  inputs = 4 * ROWS * WIDTH
  assert cost.num_devices == 1
  assert cost.argument_bytes == weights + inputs
  assert cost.output_bytes == cost.aliased_bytes == weights
  assert cost.resident_bytes == weights + inputs
  # The inputs of every layer, and the gradient.
  assert cost.temporary_bytes >= LAYERS * inputs + weights
  assert cost.device_bytes == cost.resident_bytes + cost.temporary_bytes
  # Forward, forward again, gradients of inputs and of weights.
  assert cost.flops == 4 * LAYERS * 2 * ROWS * WIDTH * WIDTH
  assert cost.collectives == ()


def test_the_compiled_products_are_those_of_the_trace(programs):
  # XLA's own count has one layer and other arithmetic besides.
  products = [
    times * 2 * ROWS * WIDTH * WIDTH
    for times, instruction in program_cost.executed(programs[1].as_text())
    if instruction.opcode == 'dot'
  ]
  assert sum(products) == program_cost.matmul_flops(programs[0].jaxpr.jaxpr)


def test_alternatives_groups_and_shards_of_products():
  def choose(x):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x @ x @ x)

  def grouped(x, experts):
    return jax.lax.ragged_dot(x, experts, jnp.array([1, 2]))

  auto = (jax.sharding.AxisType.Auto,) * 2

  def split(x, y):
    return jax.shard_map(
      lambda x, y: x @ y,
      mesh=jax.sharding.AbstractMesh((2, 4), ('a', 'b'), auto),
      in_specs=(jax.P('b'), jax.P()),
      out_specs=jax.P('b'),
      axis_names={'b'},
    )(x, y)

  def flops(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return program_cost.matmul_flops(jax.make_jaxpr(function)(*arguments).jaxpr)

  assert flops(choose, (3, 3)) == 2 * 2 * 27
  assert flops(grouped, (3, 4), (2, 4, 5)) == 2 * 3 * 4 * 5
  assert flops(split, (8, 3), (3, 5)) == 2 * 8 * 3 * 5
  assert flops(lambda x, y: x @ y, (7, 2, 3), (7, 3, 5)) == 7 * 2 * 2 * 3 * 5


# As XLA prints them for CPU, GPU and TPU; of eight devices.
EXCHANGES = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%body (p: (s32[], bf16[4,6])) -> (s32[], bf16[4,6]) {
  %p = (s32[], /*index=1*/bf16[4,6]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[4,6]{1,0} get-tuple-element(%p), index=1
  %start = (bf16[4,6]{1,0}, bf16[8,6]{1,0}) all-gather-start(%x), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
  %all = bf16[8,6]{1,0} all-gather-done(%start)
  %sum = bf16[4,6]{1,0} reduce-scatter(%all), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}, to_apply=%add
  ROOT %t = (s32[], bf16[4,6]{1,0}) tuple(%i, %sum)
}

ENTRY %main (x: bf16[4,6], y: f32[10]) -> (bf16[4,6], f32[10]) {
  %x = bf16[4,6]{1,0} parameter(0)
  %y = f32[10]{0} parameter(1)
  %zero = s32[] constant(0)
  %t = (s32[], bf16[4,6]{1,0}) tuple(%zero, %x)
  %w = (s32[], bf16[4,6]{1,0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %g = bf16[4,6]{1,0} get-tuple-element(%w), index=1
  %r = (f32[10]{0}, bf16[4,6]{1,0}) all-reduce(%y, %g), channel_id=3, replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(1)2}, to_apply=%add
  %s = f32[10]{0} all-reduce(%y), channel_id=4, replica_groups={}, to_apply=%add
  ROOT %out = (bf16[4,6]{1,0}, f32[10]{0}) tuple(%g, %s)
}

%cond (p.1: (s32[], bf16[4,6])) -> pred[] {
  %p.1 = (s32[], bf16[4,6]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %c = f32[] add(%a, %a)
}
"""  # noqa: E501


def test_exchanges_count_as_often_as_their_loop_runs():
  Collective = program_cost.Collective
  shard, vector = 2 * 24, 4 * 10
  assert set(program_cost.collectives(EXCHANGES)) == {
    Collective('all-gather', 2, 3, 3 * shard),
    Collective('reduce-scatter', 2, 3, 3 * 2 * shard / 2),
    Collective('all-reduce', 4, 1, 2 * (vector + shard) * 3 / 4),
    Collective('all-reduce', 8, 1, 2 * vector * 7 / 8),
  }


def test_what_does_not_fit_says_so_with_numbers():
  cost = program_cost.ProgramCost(
    num_devices=8,
    argument_bytes=16_100_000_000,
    output_bytes=16_000_000_000,
    aliased_bytes=16_000_000_000,
    temporary_bytes=18_000_000_000,
    flops=10**15,
    collectives=(program_cost.Collective('all-gather', 8, 64, 2.5e9),),
  )
  program_cost.check_fits(cost, 34_100_000_000)
  with pytest.raises(
    ValueError,
    match=r'needs 34\.1 GB on each device \(16\.1 GB of state and batch, 18 GB '
    r'of temporaries\), it has 34 GB; raise accumulation',
  ):
    program_cost.check_fits(cost, 34_000_000_000)
  with pytest.raises(ValueError, match='it has 16 GB; split the state'):
    program_cost.check_fits(cost, 16_000_000_000)
  text = program_cost.summary(
    cost, num_parameters=10**9, num_tokens=4096, capacity=80 * 10**9
  )
  assert text.splitlines() == [
    '1,000,000,000 parameters on 8 device(s); a step of 4,096 tokens takes '
    '1e+15 FLOPs',
    'a device holds 16.1 GB of state and batch and 18 GB of temporaries, of '
    '80 GB',
    'it sends 2.5 GB in 64 collectives a step',
  ]


def test_devices_of_a_host_share_its_memory():
  # Of the machine, and between a gigabyte and a petabyte.
  capacity = program_cost.device_capacity(jax.devices()[0])
  assert 1e9 < capacity * jax.local_device_count() < 1e15
