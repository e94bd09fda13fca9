"""GELU, SwiGLU and GeGLU in plain JAX; only their arguments are kept for backward.

Without recomputation, automatic differentiation keeps the slopes (GELU) or the
intermediates (gated), each as large as an argument. Here the backward pass recomputes
them from the arguments, in the one kernel that uses them.

The derivatives are explicit because the derivative of erf in jax 0.12.0 fails inside
shard_map: it uses polynomial coefficients that it does not cast from invariant to
varying over the mesh axes.

The formulas take the fewest instructions, because arithmetic limits these kernels more
than memory does (docs/benchmarks/memory_kernels.md). They use erf instead of erfc,
because erfc computes two branches. They compute (1 + tanh u) / 2 as
1 / (1 + exp(-2u)).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from mjax.kernels.gelu import reference

_F32 = jnp.float32
_ROOT = (2.0 / math.pi) ** 0.5


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gelu(tanh: bool, x: Any, bias: Any) -> Any:
    """Return GELU(x + bias); arguments as in `api.gelu`."""
    z = reference.add_bias(x, bias)
    if tanh:
        return (z * _tanh_distribution(z)).astype(x.dtype)
    if x.dtype == _F32:
        # For negative z, 1 + erf loses digits to cancellation. A float32 result needs
        # these digits; a 16-bit result does not have them.
        return reference.gelu(x, bias, tanh=False)
    return (z * _distribution(z)).astype(x.dtype)


def _gelu_forward(tanh: bool, x: Any, bias: Any) -> tuple[Any, Any]:
    return gelu(tanh, x, bias), (x, bias)


def _gelu_backward(tanh: bool, saved: Any, g: Any) -> tuple[Any, Any]:
    x, bias = saved
    z = reference.add_bias(x, bias)
    slope = _tanh_slope(z) if tanh else _slope(z)
    return _gradients(slope, g, x, bias)


gelu.defvjp(_gelu_forward, _gelu_backward)


def _distribution(z: jax.Array) -> jax.Array:
    """Return Phi(z) with an error below 6e-8, the precision of 1 + erf."""
    return 0.5 * (1.0 + jax.lax.erf(z * 0.5**0.5))


def _slope(z: jax.Array) -> jax.Array:
    """Return the derivative of z Phi(z), which is Phi(z) + z phi(z)."""
    return _distribution(z) + z * jnp.exp(-0.5 * z * z) * (2.0 * jnp.pi) ** -0.5


def _tanh_distribution(z: jax.Array) -> jax.Array:
    """Return (1 + tanh u) / 2 with u = sqrt(2/pi) (z + 0.044715 z^3).

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    return jax.nn.sigmoid(2.0 * _ROOT * z * (1.0 + 0.044715 * z * z))


def _tanh_slope(z: jax.Array) -> jax.Array:
    """Return the derivative of z s(2u), where s is logistic and s' = s (1 - s)."""
    s = _tanh_distribution(z)
    return s + z * s * (1.0 - s) * 2.0 * _ROOT * (1.0 + 3 * 0.044715 * z * z)


@jax.custom_vjp
def swiglu(up: Any, gate: Any, up_bias: Any, gate_bias: Any) -> Any:
    """Return silu(gate + gate_bias) (up + up_bias); arguments as in `api.swiglu`."""
    return reference.swiglu(up, gate, up_bias, gate_bias)


def _swiglu_forward(*args: Any) -> tuple[Any, Any]:
    return swiglu(*args), args


def _swiglu_backward(saved: Any, g: Any) -> tuple[Any, Any, Any, Any]:
    up, gate, up_bias, gate_bias = saved
    y, z = reference.add_bias(up, up_bias), reference.add_bias(gate, gate_bias)
    s = jax.nn.sigmoid(z)
    d_up, d_up_bias = _gradients(z * s, g, up, up_bias)
    slope = s * (1.0 + z * (1.0 - s))
    d_gate, d_gate_bias = _gradients(y * slope, g, gate, gate_bias)
    return d_up, d_gate, d_up_bias, d_gate_bias


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@jax.custom_vjp
def geglu_tanh(up: Any, gate: Any, up_bias: Any, gate_bias: Any) -> Any:
    """Return gelu(gate + gate_bias) (up + up_bias); see `api.geglu_tanh`."""
    y, z = reference.add_bias(up, up_bias), reference.add_bias(gate, gate_bias)
    return (z * _tanh_distribution(z) * y).astype(up.dtype)


def _geglu_tanh_forward(*args: Any) -> tuple[Any, Any]:
    return geglu_tanh(*args), args


def _geglu_tanh_backward(saved: Any, g: Any) -> tuple[Any, Any, Any, Any]:
    up, gate, up_bias, gate_bias = saved
    y, z = reference.add_bias(up, up_bias), reference.add_bias(gate, gate_bias)
    opened = z * _tanh_distribution(z)
    d_up, d_up_bias = _gradients(opened, g, up, up_bias)
    d_gate, d_gate_bias = _gradients(y * _tanh_slope(z), g, gate, gate_bias)
    return d_up, d_gate, d_up_bias, d_gate_bias


geglu_tanh.defvjp(_geglu_tanh_forward, _geglu_tanh_backward)


def _gradients(slope: jax.Array, g: Any, x: Any, bias: Any) -> tuple[Any, Any]:
    """Return the gradients of x and bias; slope is the derivative at x + bias."""
    # Round the slope before multiplying. Otherwise XLA would store the product in
    # memory in float32, for the sum below.
    dx = g * slope.astype(x.dtype)
    if bias is None:
        return dx, None
    d_bias = dx.reshape(-1, dx.shape[-1]).sum(0, dtype=_F32)
    return dx, d_bias.astype(bias.dtype)
