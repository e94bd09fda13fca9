"""LayerNorm and RMSNorm over the model width."""

from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mjax.kernels.layer_norm.api import norm, skip_and_norm
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
        return norm(x, *self._params(), **self._options())

    def branch(
        self, x: Float[Array, "B t D"]
    ) -> tuple[Float[Array, "B t D"], Float[Array, "B t D"]]:
        """Return x, to go on in the residual stream, and its norm, for the branch."""
        return skip_and_norm(x, *self._params(), **self._options())

    def _params(self) -> tuple[Any, Any]:
        return self.scale[...], None if self.bias is None else self.bias[...]

    def _options(self) -> dict[str, Any]:
        return {"centred": self.kind == "layernorm", "eps": self.eps}
