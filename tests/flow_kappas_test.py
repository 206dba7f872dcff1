import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mdlm_jax import flow, schedules

KAPPAS = {
  'linear': (flow.linear(), lambda s: s),
  'square': (flow.polynomial(2.0), lambda s: s**2),
  'root': (flow.polynomial(0.5), np.sqrt),
  'cosine': (flow.cosine(), lambda s: 1 - np.cos(np.pi / 2 * s)),
  'cubic': (flow.cubic(), lambda s: 3 * s**2 - 2 * s**3),
  'slopes': (
    flow.cubic(2.0, 0.5),
    lambda s: (
      3 * s**2 - 2 * s**3 + 2 * (s**3 - 2 * s**2 + s) + 0.5 * (s**3 - s**2)
    ),
  ),
}
each_kappa = pytest.mark.parametrize(
  ('kappa', 'formula'), KAPPAS.values(), ids=KAPPAS.keys()
)
INNER = np.linspace(0.01, 0.99, 33)


@each_kappa
def test_kappa_and_its_derivative_are_the_formula(kappa, formula):
  with jax.enable_x64(True):
    values, complement, derivative = (np.asarray(f(INNER)) for f in kappa)
    ends = [np.asarray(f(np.array([0.0, 1.0]))) for f in kappa[:2]]
  np.testing.assert_allclose(values, formula(INNER), rtol=1e-12)
  np.testing.assert_allclose(complement, 1 - formula(INNER), rtol=1e-12)
  step = 1e-6
  slope = (formula(INNER + step) - formula(INNER - step)) / (2 * step)
  np.testing.assert_allclose(derivative, slope, rtol=1e-7)
  np.testing.assert_allclose(ends, [[0, 1], [1, 0]], atol=1e-15)


@each_kappa
def test_what_is_left_keeps_its_digits_near_the_end(kappa, formula):
  tau = np.float32(1) - np.float32(2.0**-12)
  got = kappa.complement(jnp.array(tau))
  np.testing.assert_allclose(got, 1 - formula(np.float64(tau)), rtol=1e-5)


def test_the_cubic_contains_the_line_and_the_square():
  with jax.enable_x64(True):
    np.testing.assert_allclose(flow.cubic(1.0, 1.0).kappa(INNER), INNER)
    np.testing.assert_allclose(flow.cubic(0.0, 2.0).kappa(INNER), INNER**2)


@pytest.mark.parametrize(
  ('kappa', 'schedule'),
  [
    (flow.linear(), schedules.linear()),
    (flow.cosine(), schedules.cosine()),
  ],
)
def test_a_schedule_is_kappa_backwards(kappa, schedule):
  with jax.enable_x64(True):
    t = jnp.asarray(INNER)
    for name in schedule._fields:
      got, expected = (
        getattr(s, name)(t) for s in (flow.as_schedule(kappa), schedule)
      )
      np.testing.assert_allclose(got, expected, rtol=1e-12, err_msg=name)


@each_kappa
def test_the_inverse_of_a_schedule_finds_the_time(kappa, formula):
  del formula
  schedule = flow.as_schedule(kappa)
  with jax.enable_x64(True):
    np.testing.assert_allclose(
      schedule.inverse(schedule.alpha(INNER)), INNER, rtol=1e-9
    )
  np.testing.assert_array_equal(schedule.inverse(jnp.array([1.0, 0])), [0, 1])


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: flow.polynomial(0.0), r'exponent=0\.0 must be above 0'),
    (lambda: flow.cubic(start_slope=3.5), r'start_slope=3\.5 must lie in'),
    (lambda: flow.cubic(end_slope=-1.0), r'end_slope=-1\.0 must lie in'),
  ],
)
def test_kappas_that_fall_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
