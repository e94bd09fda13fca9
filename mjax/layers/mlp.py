"""Feed-forward layer with its width split over tensor parallelism."""

from collections.abc import Sequence

from flax import nnx
from jaxtyping import Array, Float

from mjax.kernels.gelu.api import geglu_tanh, gelu, swiglu
from mjax.layers.adapters import Weight, adapted, make_adapters
from mjax.layers.config import GATED, Activation, AdapterConfig
from mjax.layers.initialise import normal, zeros
from mjax.mesh import collectives


class Mlp(nnx.Module):
    """Two projections (three with a gate) around a non-linearity.

    gelu: out(gelu(in(x))); swiglu: out(silu(gate(x)) * in(x)); geglu: as swiglu, with
    gelu in place of silu.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415; Shazeer 2020,
    arXiv:2002.05202, eq. 6.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Activation,
        use_bias: bool,
        std: float,
        out_std: float,
        rngs: nnx.Rngs,
        adapters: AdapterConfig | None = None,
    ):
        """Create w_in and, if gated, w_gate [D, F]; w_out [F, D]; biases; adapters."""
        self.activation, self.width = activation, d_ff
        dims = ("embed", "mlp")
        self.w_in = normal((d_model, d_ff), dims, std, rngs)
        gated = activation in GATED
        self.w_gate = normal((d_model, d_ff), dims, std, rngs) if gated else None
        self.w_out = normal((d_ff, d_model), ("mlp", "embed"), out_std, rngs)
        self.b_in = zeros((d_ff,), ("mlp",)) if use_bias else None
        self.b_gate = zeros((d_ff,), ("mlp",)) if use_bias and gated else None
        self.b_out = zeros((d_model,), ("embed",)) if use_bias else None
        self.adapters = make_adapters(adapters, "mlp", self, rngs)

    WEIGHTS = frozenset({"w_in", "w_gate", "w_out"})
    """Names of the weights that a block may join with others."""

    def in_weights(self) -> list[Weight]:
        """Return the local input matrices [D, F]: w_in, then w_gate if there is one."""
        named = (("w_in", self.w_in), ("w_gate", self.w_gate))
        return [adapted(self.adapters, n, w[...]) for n, w in named if w is not None]

    def out_weight(self) -> Weight:
        """Return the local output matrix [F, D]."""
        return adapted(self.adapters, "w_out", self.w_out[...])

    def in_matrices(self, weights: dict[str, Array]) -> list[Float[Array, "*lead D F"]]:
        """Return w_in, and w_gate if there is one, from `weights`: [..., D, F] each."""
        return [weights[name] for name in ("w_in", "w_gate") if name in weights]

    def in_widths(self) -> list[int]:
        """Return the number of columns of each matrix that `in_matrices` returns."""
        num = 2 if self.activation in GATED else 1
        return [collectives.local_size(self.width)] * num

    def out_matrix(self, weights: dict[str, Array]) -> Float[Array, "*lead F D"]:
        """Return w_out from `weights`, [..., F, D]."""
        return weights["w_out"]

    def out_bias(self) -> Float[Array, " D"] | None:
        """Return the output bias, which is added once, after the sum over tp."""
        return None if self.b_out is None else self.b_out[...]

    def activate(
        self, parts: Sequence[Float[Array, "*dims F"]]
    ) -> Float[Array, "*dims F"]:
        """Apply biases and the non-linearity to the outputs of `in_weights`."""
        b_in, b_gate = (None if b is None else b[...] for b in (self.b_in, self.b_gate))
        if self.activation in GATED:
            up, gate = parts
            gated = swiglu if self.activation == "swiglu" else geglu_tanh
            return gated(up, gate, b_in, b_gate)
        return gelu(parts[0], b_in, tanh=self.activation == "gelu_tanh")
