"""LayerNorm and RMSNorm over the model width."""

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from mjax.layers.initialise import zeros


class Norm(nnx.Module):
    """Normalise every position by its own statistics, then scale.

    layernorm: y = (x - mean) * scale / sqrt(var + eps) + bias; rmsnorm: y = x * scale /
    sqrt(mean(x^2) + eps). Statistics in float32.

    Source: Ba et al. 2016, arXiv:1607.06450, eq. 4; Zhang and Sennrich 2019,
    arXiv:1910.07467, eq. 4. Differs: eps, absent in the latter.
    """

    def __init__(
        self,
        d_model: int,
        *,
        kind: Literal["layernorm", "rmsnorm"],
        eps: float,
        use_bias: bool,
    ):
        """Create scale [D] of ones and, if used, bias [D] of zeros."""
        self.kind = kind
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(d_model), logical=("embed",), decay=False)
        self.bias = zeros((d_model,), ("embed",)) if use_bias else None

    def __call__(self, x: Float[Array, "B t D"]) -> Float[Array, "B t D"]:
        """Normalise x over D; returns the dtype of x."""
        y = x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        y = y * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
