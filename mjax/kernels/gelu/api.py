"""GELU, SwiGLU and GeGLU with their biases.

Input: outputs of the input projections, and biases. Output: the input of the output
projection, computed in float32 and returned in the dtype of the arguments. Only the
arguments are kept for the backward pass. The functions can be differentiated once.
Inside shard_map all arguments must vary over the same mesh axes.
"""

from jaxtyping import Array, Float

from mjax.kernels.gelu import xla


def gelu(
    x: Float[Array, "*dims F"], bias: Float[Array, " F"] | None, *, tanh: bool
) -> Float[Array, "*dims F"]:
    """Return z Phi(z) with z = x + bias; Phi is the normal distribution function.

    Args:
      x: activations, any float dtype.
      bias: added to x; None adds nothing.
      tanh: whether to replace Phi by its approximation with a hyperbolic tangent.
    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    return xla.gelu(tanh, x, bias)


def swiglu(
    up: Float[Array, "*dims F"],
    gate: Float[Array, "*dims F"],
    up_bias: Float[Array, " F"] | None,
    gate_bias: Float[Array, " F"] | None,
) -> Float[Array, "*dims F"]:
    """Return silu(gate + gate_bias) (up + up_bias) with silu(z) = z / (1 + exp(-z)).

    Args:
      up: activations, any float dtype.
      gate: activations, dtype of up.
      up_bias: added to up; None adds nothing.
      gate_bias: added to gate; None adds nothing.
    Source: Shazeer 2020, arXiv:2002.05202, eq. 6, without its projections.
    """
    return xla.swiglu(up, gate, up_bias, gate_bias)


def geglu_tanh(
    up: Float[Array, "*dims F"],
    gate: Float[Array, "*dims F"],
    up_bias: Float[Array, " F"] | None,
    gate_bias: Float[Array, " F"] | None,
) -> Float[Array, "*dims F"]:
    """Return gelu(gate + gate_bias) (up + up_bias) with the tanh form of gelu.

    Args:
      up: activations, any float dtype.
      gate: activations, dtype of up.
      up_bias: added to up; None adds nothing.
      gate_bias: added to gate; None adds nothing.
    Source: Shazeer 2020, arXiv:2002.05202, eq. 6, without its projections.
    """
    return xla.geglu_tanh(up, gate, up_bias, gate_bias)
