"""Sizes and options of layers."""

import dataclasses
from typing import Literal

RopeType = Literal["linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotation of queries and keys."""

    head_width: int
    """H."""
    base: float
    """Wavelengths range from 2 pi to 2 pi base."""
    scaling: float
    """Factor that divides positions: at all frequencies, or as `type` says."""
    fraction: float
    """Fraction of the head that is rotated, from its start."""
    interleaved: bool
    """Rotate neighbouring pairs (2i, 2i+1) instead of (i, i + half)."""
    type: RopeType = "linear"
    """Scaling method; see `rope.frequencies`."""
    original_len: int = 1
    """Sequence length before the scaling (llama3, yarn)."""
    slow_turns: float = 1.0
    """A pair that makes fewer turns in `original_len` is scaled (llama3, yarn)."""
    fast_turns: float = 1.0
    """A pair that makes more turns in `original_len` is not scaled (llama3, yarn)."""
    truncate: bool = True
    """Round the limits between scaled and unscaled pairs to whole numbers (yarn)."""
    magnitude: float = 1.0
    """Factor on cosine and sine (yarn)."""

    @property
    def rotated_width(self) -> int:
        """Entries of a head that are rotated; even."""
        return int(self.head_width * self.fraction) // 2 * 2


Activation = Literal["gelu", "gelu_tanh", "swiglu", "geglu_tanh"]

GATED: tuple[Activation, ...] = ("swiglu", "geglu_tanh")
"""Activations with a gate: the feed-forward layer has three matrices, not two."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """The norm of each position."""

    kind: Literal["layernorm", "rmsnorm"]
    eps: float
    use_bias: bool
    zero_centred: bool = False
    """Store the scale minus 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes and options of one attention layer."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    use_bias: bool
    """Biases on the query, key and value projections."""
    use_out_bias: bool
    rope: RopeConfig
    backend: Literal["auto", "reference", "blocked", "cudnn", "mosaic_gpu"]
    backward: Literal["deterministic", "fused"]
    """deterministic sums gradients of queries in a fixed order, fused in any order."""
    recompute: bool
    """Recompute the attention core in the backward pass (remat policy attention). A
    backend may still keep its output and log-sum-exp."""
    scale: float | None = None
    """Factor on the scores; None means 1 / sqrt(H)."""
    soft_cap: float | None = None
    """Soft bound on the magnitude of the scores; None means no bound."""
    qk_norm: NormConfig | None = None
    """Normalise each query and key head before the rotation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Which weights of a block have a low-rank adapter, and its size."""

    rank: int
    """r."""
    scale: float
    """Factor on (x A) B."""
    targets: tuple[str, ...]
    """Names of the weights, such as "attention.wq"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Options that may differ between layers; constants in the kernels."""

    window: int | None
    """Keys that a query sees, itself included; None means all."""
    rotate: bool
    """Whether positions rotate queries and keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes and options shared by all blocks of a model."""

    attention: AttentionConfig
    d_ff: int
    activation: Activation
    mlp_bias: bool
    norm: NormConfig
    post_norms: bool
    """Also normalise the output of each branch (serial block)."""
    dropout: float
    std: float
    """Standard deviation of projections that read the residual stream."""
    out_std: float
    """Standard deviation of projections that add to the residual stream."""


Remat = Literal["none", "attention", "core", "dots", "full", "offload"]
