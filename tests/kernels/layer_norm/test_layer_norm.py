"""Norms: the backward pass is the derivative of the formula, at any mean and scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.layer_norm import api, reference

# float32: means of 64 terms of order 1 in another order, 6e-8 each; relative to the
# largest entry.
F32_TOLERANCE = 1e-5
# bfloat16: inputs are the same, only results round, by 2^-9.
BF16_TOLERANCE = 5e-3
EPS = 1e-5


# A formula is read more easily without reshapes.
pytestmark = pytest.mark.promotion(rank="allow")


def make_inputs(dtype=jnp.float32, mean=0.5, std=2.0):
    """Return x [2, 5, 64], scale, bias, and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, g = (jax.random.normal(k, (2, 5, 64)) for k in keys[:2])
    scale, bias = (jax.random.normal(k, (64,)) for k in keys[2:])
    return tuple(a.astype(dtype) for a in (mean + std * x, scale, bias, g))


def run(module, centred, x, scale, bias, g):
    """Return value and gradients, as float32."""

    def norm(x, scale, bias):
        return module.norm(x, scale, bias, centred=centred, eps=EPS)

    value, pull = jax.vjp(norm, x, scale, bias)
    grads = [a for a in pull(g) if a is not None]
    return [np.asarray(a, np.float32) for a in (value, *grads)]


def assert_close(got, expected, tolerance):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_value_and_gradients_are_those_of_the_formula(centred, use_bias, dtype) -> None:
    x, scale, bias, g = make_inputs(dtype)
    bias = bias if use_bias else None
    got = run(api, centred, x, scale, bias, g)
    wide = [None if a is None else a.astype(jnp.float32) for a in (x, scale, bias, g)]
    tolerance = F32_TOLERANCE if dtype == jnp.float32 else BF16_TOLERANCE
    assert_close(got, run(reference, centred, *wide), tolerance)


def gradients_in_float64(centred, x, scale, g):
    """Return dx and d_scale by NumPy, from the derivative of the formula."""
    x, scale, g = (np.asarray(a, np.float64) for a in (x, scale, g))
    y = x - x.mean(-1, keepdims=True) if centred else x
    rstd = 1 / np.sqrt((y * y).mean(-1, keepdims=True) + EPS)
    y, gs = y * rstd, g * scale
    dx = gs - y * (gs * y).mean(-1, keepdims=True)
    dx = rstd * (dx - gs.mean(-1, keepdims=True) if centred else dx)
    return dx, (g * y).sum((0, 1))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("mean", "std"), [(0, 1), (1000, 1), (-30, 0.01), (1, 1e4)])
def test_gradients_are_exact_at_any_mean_and_scale(centred, mean, std) -> None:
    x, scale, _, g = make_inputs(mean=mean, std=std)
    got = run(api, centred, x, scale, None, g)[1:]
    assert_close(got, gradients_in_float64(centred, x, scale, g), F32_TOLERANCE)


@pytest.mark.parametrize("use_bias", [False, True])
def test_the_residual_stream_passes_and_its_gradient_is_added(use_bias) -> None:
    x, scale, bias, g = make_inputs()
    params = (scale, bias) if use_bias else (scale, None)
    options = {"centred": True, "eps": EPS}
    (same, y), pull = jax.vjp(
        lambda x, *p: api.skip_and_norm(x, *p, **options), x, *params
    )
    expected = run(api, True, x, *params, g)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(y, expected[0])
    dx, *rest = (a for a in pull((7 * g, g)) if a is not None)
    assert_close([dx, *rest], [expected[1] + 7 * g, *expected[2:]], F32_TOLERANCE)


def test_a_constant_position_has_finite_gradients() -> None:
    x, scale, bias, g = make_inputs()
    x = x.at[0, 0].set(3.0).at[0, 1].set(0.0)
    for centred in (False, True):
        assert all(np.isfinite(a).all() for a in run(api, centred, x, scale, bias, g))


def test_only_x_and_the_parameters_are_kept_for_the_backward_pass() -> None:
    x, scale, bias, _ = make_inputs()

    def pull(*args):
        return jax.vjp(lambda *a: api.norm(*a, centred=True, eps=EPS), *args)[1]

    kept = jax.tree.leaves(jax.eval_shape(pull, x, scale, bias))
    assert sorted(a.size for a in kept) == sorted(a.size for a in (x, scale, bias))
