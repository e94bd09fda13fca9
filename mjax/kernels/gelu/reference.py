"""GELU, SwiGLU and GeGLU by their formulas, in float32.

Input: outputs of the input projections, and biases. Output: the input of the output
projection.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gelu(
    x: Float[Array, "*dims F"], bias: Float[Array, " F"] | None, *, tanh: bool
) -> Float[Array, "*dims F"]:
    """Return GELU(x + bias); arguments as in `api.gelu`."""
    return jax.nn.gelu(add_bias(x, bias), approximate=tanh).astype(x.dtype)


def swiglu(
    up: Float[Array, "*dims F"],
    gate: Float[Array, "*dims F"],
    up_bias: Float[Array, " F"] | None,
    gate_bias: Float[Array, " F"] | None,
) -> Float[Array, "*dims F"]:
    """Return silu(gate + gate_bias) (up + up_bias); arguments as in `api.swiglu`."""
    gated = jax.nn.silu(add_bias(gate, gate_bias)) * add_bias(up, up_bias)
    return gated.astype(up.dtype)


def geglu_tanh(
    up: Float[Array, "*dims F"],
    gate: Float[Array, "*dims F"],
    up_bias: Float[Array, " F"] | None,
    gate_bias: Float[Array, " F"] | None,
) -> Float[Array, "*dims F"]:
    """Return gelu(gate + gate_bias) (up + up_bias), as `api.geglu_tanh`."""
    opened = jax.nn.gelu(add_bias(gate, gate_bias), approximate=True)
    return (opened * add_bias(up, up_bias)).astype(up.dtype)


def add_bias(
    x: Float[Array, "*dims F"], bias: Float[Array, " F"] | None
) -> Float[Array, "*dims F"]:
    """Add a bias, if there is one, in the dtype of x; return float32.

    If the sum were float32, XLA would store intermediates of the backward pass instead
    of fusing them.
    """
    if bias is not None:
        x = x + bias.astype(x.dtype).reshape((1,) * (x.ndim - 1) + bias.shape)
    return x.astype(jnp.float32)
