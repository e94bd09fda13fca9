"""Self-attention with heads split over tensor parallelism."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from mjax.kernels.attention.api import attention, keep_core
from mjax.layers import rope
from mjax.layers.adapters import Weight, adapted, make_adapters
from mjax.layers.config import AdapterConfig, AttentionConfig
from mjax.layers.initialise import normal, zeros
from mjax.layers.linear import add_bias
from mjax.layers.norm import Norm
from mjax.mesh import collectives

Core = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(rotated q [B, T, N, H], rotated k, v [B, T, K, H]) -> attended values, like q."""

CachedCore = Callable[[Core, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(training core, q, k, v) -> (attended values, updated cache); replaces the core."""


class Attention(nnx.Module):
    """Query, key, value and output projections, and the mixing of positions.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; shared key/value heads,
    Ainslie et al. 2023, arXiv:2305.13245; window, Beltagy et al. 2020,
    arXiv:2004.05150, section 3.1; normalised queries and keys, Henry et al. 2020,
    arXiv:2010.04245, but with the RMSNorm of Qwen3 and Gemma 3; soft cap, Gemma 2,
    arXiv:2408.00118, section 2.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        std: float,
        out_std: float,
        rngs: nnx.Rngs,
        adapters: AdapterConfig | None = None,
    ):
        """Create wq [D, N, H], wk and wv [D, K, H], wo [N, H, D]. Optional parameters
        are biases, norms of queries and keys, and adapters.
        """
        self.config = config
        d, h = config.d_model, config.head_width
        n, k = config.num_heads, config.num_kv_heads
        q_dims = ("embed", "heads", "head_width")
        kv_dims = ("embed", "kv_heads", "head_width")
        self.wq = normal((d, n, h), q_dims, std, rngs)
        self.wk = normal((d, k, h), kv_dims, std, rngs)
        self.wv = normal((d, k, h), kv_dims, std, rngs)
        self.wo = normal((n, h, d), ("heads", "head_width", "embed"), out_std, rngs)
        bias = config.use_bias
        self.bq = zeros((n, h), q_dims[1:]) if bias else None
        self.bk = zeros((k, h), kv_dims[1:]) if bias else None
        self.bv = zeros((k, h), kv_dims[1:]) if bias else None
        self.bo = zeros((d,), ("embed",)) if config.use_out_bias else None
        norm = config.qk_norm
        # All heads share one scale. tp does not split it, so its gradients are summed.
        self.q_norm = None if norm is None else Norm(h, norm, logical="head_width")
        self.k_norm = None if norm is None else Norm(h, norm, logical="head_width")
        self.adapters = make_adapters(adapters, "attention", self, rngs)

    WEIGHTS = frozenset({"wq", "wk", "wv", "wo"})
    """Names of the weights that a block may join with others."""

    def _local_kv(self, w: jax.Array) -> jax.Array:
        """Select this device's key/value heads if tp exceeds their number."""
        return collectives.local_kv_heads(w, self.config.num_kv_heads)

    def in_weights(self) -> list[Weight]:
        """Return the local query, key and value matrices, [D, heads, H] each."""
        return [
            adapted(self.adapters, "wq", self.wq[...]),
            adapted(self.adapters, "wk", self.wk[...], self._local_kv),
            adapted(self.adapters, "wv", self.wv[...], self._local_kv),
        ]

    def out_weight(self) -> Weight:
        """Return the local output matrix [N, H, D]."""
        return adapted(self.adapters, "wo", self.wo[...])

    def in_matrices(self, weights: dict[str, Array]) -> list[Float[Array, "*lead D F"]]:
        """Return the matrices that multiply this device's input, made from `weights`.

        Args:
          weights: this device's part of wq, wk and wv, [..., D, heads, H] each; D may
            be a part of the model's width.
        Returns:
          the local wq, wk and wv as matrices: linear functions of the weights.
        """
        local = weights["wq"], *(self._local_kv(weights[n]) for n in ("wk", "wv"))
        return [w.reshape(*w.shape[:-2], -1) for w in local]

    def in_widths(self) -> list[int]:
        """Return the number of columns of each matrix that `in_matrices` returns."""
        c = self.config
        q = collectives.local_size(c.num_heads)
        kv = collectives.num_local_kv_heads(c.num_kv_heads)
        return [heads * c.head_width for heads in (q, kv, kv)]

    def out_matrix(self, weights: dict[str, Array]) -> Float[Array, "*lead F D"]:
        """Return the local wo [..., N, H, D] as a matrix; see `in_matrices`."""
        w = weights["wo"]
        return w.reshape(*w.shape[:-3], -1, w.shape[-1])

    def out_bias(self) -> Float[Array, " D"] | None:
        """Return the output bias, which is added once, after the sum over tp."""
        return None if self.bo is None else self.bo[...]

    def mix(
        self,
        q: Float[Array, "B T NH"],
        k: Float[Array, "B T KH"],
        v: Float[Array, "B T KH"],
        *,
        window: int | None,
        cos_sin: rope.Angles | None,
        segments: Int[Array, "B T"] | None,
        cached: CachedCore | None = None,
    ) -> tuple[Float[Array, "B T NH"], Any]:
        """Apply attention of this device's heads over the whole sequence.

        Args:
          q: projected queries of the local heads.
          k: projected keys of the local key/value heads.
          v: projected values, as k.
          window: keys that a query sees, itself included; None means all.
          cos_sin: rotary angles; None rotates nothing.
          segments: document of each position; attention stays inside each document.
            None means one document per sequence.
          cached: function to call instead of the core, if keys and values are cached.
        Returns:
          the attended values, and the cache that `cached` returns (None without
          `cached`).
        """

        def heads(x: jax.Array, bias: nnx.Param | None, local: bool) -> jax.Array:
            x = x.reshape(*x.shape[:2], -1, self.config.head_width)
            if bias is None:
                return x
            return add_bias(x, self._local_kv(bias[...]) if local else bias[...])

        def core(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attention(
                q,
                k,
                v,
                window=window,
                segment_ids=segments,
                scale=self.config.scale,
                soft_cap=self.config.soft_cap,
                backend=self.config.backend,
                backward=self.config.backward,
            )

        q, k, v = (
            heads(q, self.bq, False),
            heads(k, self.bk, True),
            heads(v, self.bv, True),
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q = rope.rotate(q, cos_sin, self.config.rope)
            k = rope.rotate(k, cos_sin, self.config.rope)
        if self.config.recompute:
            core = jax.checkpoint(core, policy=keep_core)
        out, kept = (core(q, k, v), None) if cached is None else cached(core, q, k, v)
        return out.reshape(*out.shape[:2], -1), kept
