"""LayerNorm and RMSNorm over the model width."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mjax.kernels.layer_norm.api import norm, skip_and_norm
from mjax.layers.config import NormConfig
from mjax.layers.initialise import zeros


class Norm(nnx.Module):
    """Normalise each position by its own statistics, then scale.

    layernorm: y = (x - mean) * scale / sqrt(var + eps) + bias; rmsnorm: y = x * scale /
    sqrt(mean(x^2) + eps). Statistics in float32. A zero-centred norm stores scale - 1,
    so its parameters start at 0 (Gemma).

    Source: Ba et al. 2016, arXiv:1607.06450, eq. 4; Zhang and Sennrich 2019,
    arXiv:1910.07467, eq. 4. Differs: eps, absent in the second.
    """

    def __init__(self, width: int, config: NormConfig, *, logical: str = "embed"):
        """Create the scale [width] and, if used, a bias of zeros.

        Args:
          width: width of the normalised dim; D, or H for heads.
          config: kind and options of the norm.
          logical: name of the dim that is normalised.
        """
        self.config = config
        start = jnp.zeros(width) if config.zero_centred else jnp.ones(width)
        self.scale = nnx.Param(start, logical=(logical,), decay=False)
        self.bias = zeros((width,), (logical,)) if config.use_bias else None

    def __call__(self, x: Float[Array, "*dims D"]) -> Float[Array, "*dims D"]:
        """Normalise x over D; return the dtype of x."""
        return norm(x, *self._params(), **self._options())

    def branch(
        self, x: Float[Array, "B t D"]
    ) -> tuple[Float[Array, "B t D"], Float[Array, "B t D"]]:
        """Return x for the residual stream, and the normalised x for the branch."""
        return skip_and_norm(x, *self._params(), **self._options())

    def _params(self) -> tuple[Any, Any]:
        scale = self.scale[...]
        if self.config.zero_centred:
            # In float32: in bfloat16, adding 1 would round small stored values away.
            scale = 1.0 + scale.astype(jnp.float32)
        return scale, None if self.bias is None else self.bias[...]

    def _options(self) -> dict[str, Any]:
        return {"centred": self.config.kind == "layernorm", "eps": self.config.eps}
