"""GELU, SwiGLU and GeGLU: the written derivatives are those of the formulas."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.gelu import api, reference

# float32: a handful of elementwise operations, each rounded by 6e-8, of values up to 6.
F32_TOLERANCE = 1e-5
# bfloat16: the sum with the bias, the slope and the product with g round by 2^-9 each.
BF16_TOLERANCE = 2e-2
GATED = ("swiglu", "geglu_tanh")
NAMES = ("gelu", "gelu_tanh", *GATED)


def case(name, module, use_bias, dtype=jnp.float32):
    """Return a function of arrays, its arguments, and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 5)
    x, y, g = (3 * jax.random.normal(k, (2, 50, 8), dtype) for k in keys[:3])
    biases = [jax.random.normal(k, (8,), dtype) for k in keys[3:]]
    if name in GATED:
        args = (x, y, *biases) if use_bias else (x, y)
        gated = getattr(module, name)
        return lambda x, y, b=None, c=None: gated(x, y, b, c), args, g
    function = functools.partial(module.gelu, tanh=name == "gelu_tanh")
    args = (x, biases[0]) if use_bias else (x,)
    return lambda x, b=None: function(x, b), args, g


def run(function, args, g):
    """Return the value and the gradients, as float32."""
    value, pull = jax.vjp(function, *args)
    return [np.asarray(a, np.float32) for a in (value, *pull(g))]


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradients_are_those_of_the_formula(name, use_bias) -> None:
    got = run(*case(name, api, use_bias))
    expected = run(*case(name, reference, use_bias))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=F32_TOLERANCE * np.abs(b).max())


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_differs_by_its_rounding(name) -> None:
    got = run(*case(name, api, True, jnp.bfloat16))
    function, args, g = case(name, reference, True, jnp.bfloat16)
    wide = [a.astype(jnp.float32) for a in args]
    for a, b in zip(got, run(function, wide, g.astype(jnp.float32)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=BF16_TOLERANCE * np.abs(b).max())


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_every_value_is_that_of_float64(tanh, dtype) -> None:
    x = jnp.linspace(-12, 12, 40_001, dtype=jnp.float32).astype(dtype)
    got = np.asarray(api.gelu(x, None, tanh=tanh), np.float64)
    z = np.asarray(x, np.float64)
    if tanh:
        share = 1 / (1 + np.exp(-2 * (2 / np.pi) ** 0.5 * (z + 0.044715 * z**3)))
    else:
        share = np.array([0.5 * math.erfc(-v * 0.5**0.5) for v in z])
    expected = z * share
    # One rounding to the dtype; in float32, of some ten operations. In the tail, where
    # |z| is up to 5.3: 3 units in the last place of erf near -1 (2^-24), times |z| / 2,
    # and half of the smallest number of float16.
    rounding = {jnp.bfloat16: 2**-8, jnp.float16: 2**-11, jnp.float32: 2**-20}[dtype]
    error = np.abs(got - expected) - rounding * np.abs(expected)
    assert error.max() < 3 * 2**-24 * 5.3 / 2 + 2**-25


@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_right_far_from_zero(name) -> None:
    far = jnp.array([-100.0, -20.0, 20.0, 100.0])
    functions = {
        "gelu": functools.partial(api.gelu, bias=None, tanh=False),
        "gelu_tanh": functools.partial(api.gelu, bias=None, tanh=True),
        "swiglu": lambda x: api.swiglu(jnp.ones_like(x), x, None, None),
        "geglu_tanh": lambda x: api.geglu_tanh(jnp.ones_like(x), x, None, None),
    }
    slope = jax.grad(lambda x: functions[name](x).sum())(far)
    # silu'(-20) = -19 exp(-20).
    np.testing.assert_allclose(slope, [0, 0, 1, 1], atol=1e-7)


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_only_the_arguments_are_kept_for_the_backward_pass(name, use_bias) -> None:
    function, args, _ = case(name, api, use_bias)
    kept = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
    sizes = sorted(a.size for a in jax.tree.leaves(kept))
    assert sizes == sorted(a.size for a in args)
