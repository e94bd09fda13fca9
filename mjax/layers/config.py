"""Sizes and options of layers; nothing is computed here."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How queries and keys are rotated."""

    head_width: int
    """H."""
    base: float
    """Wavelengths go from 2 pi to 2 pi base."""
    scaling: float
    """Positions are divided by this."""
    fraction: float
    """Share of the head that is rotated, from its start."""
    interleaved: bool
    """Pairs are neighbours (2i, 2i+1) instead of (i, i + half)."""

    @property
    def rotated_width(self) -> int:
        """Entries of a head that are rotated; even."""
        return int(self.head_width * self.fraction) // 2 * 2


Activation = Literal["gelu", "gelu_tanh", "swiglu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes and options of one attention layer."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    use_bias: bool
    rope: RopeConfig
    backend: Literal["auto", "reference", "blocked", "cudnn", "mosaic_gpu"]
    recompute: bool
    """Recompute the attention core in the backward pass (remat policy attention),
    all but the output and log-sum-exp of a backend that names them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Which weights of a block have a low-rank adapter, and its size."""

    rank: int
    """r."""
    scale: float
    """Factor on (x A) B."""
    targets: tuple[str, ...]
    """Weights, as "attention.wq"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What may differ from layer to layer; static, so that kernels can use it."""

    window: int | None
    """Keys a query sees, itself included; None is all."""
    rotate: bool
    """Whether positions rotate queries and keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes and options shared by all blocks of a model."""

    attention: AttentionConfig
    d_ff: int
    activation: Activation
    mlp_bias: bool
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float
    norm_bias: bool
    dropout: float
    std: float
    """Standard deviation of projections that read the residual stream."""
    out_std: float
    """Standard deviation of projections that add to it."""


Remat = Literal["none", "full", "dots", "attention", "offload"]
