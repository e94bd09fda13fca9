"""The architecture of a model: what its flags say, and what follows from them."""

import dataclasses
import math
from typing import Literal

from mjax.layers.config import (
    AttentionConfig,
    BlockConfig,
    LayerKind,
    Remat,
    RopeConfig,
)

_SIZES = (
    *("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff"),
    *("vocab_size", "vocab_multiple"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture; letters as in docs/vocabulary.md."""

    layers: int = 4
    """L, number of blocks."""
    d_model: int = 128
    """D, model width."""
    heads: int = 4
    """N, query heads."""
    kv_heads: int | None = None
    """K, key/value heads; None is as many as query heads."""
    head_dim: int | None = None
    """H, head width; None is d_model / heads."""
    d_ff: int | None = None
    """F, feed-forward width; None is 4 x d_model."""
    vocab_size: int = 257
    """V, tokens; the tokenizer's size replaces it unless --data.vocab model."""
    vocab_multiple: int = 128
    """The embedding is padded to a multiple of this; padded logits are masked."""
    block: Literal["parallel", "serial"] = "parallel"
    """parallel: x + Attn(LN(x)) + MLP(LN(x)); serial: one after the other."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation."""
    norm_eps: float = 1e-5
    """Added to the variance or mean square."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """gelu: exact; gelu_tanh: tanh form; swiglu: silu(gate) x in."""
    window: tuple[int | None, ...] = (None,)
    """Keys a query sees, itself included; None is all; repeats over the layers."""
    rope: tuple[bool, ...] = (True,)
    """Which layers rotate queries and keys; repeats over the layers."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: float = 1.0
    """Positions are divided by this (linear scaling)."""
    rope_fraction: float = 1.0
    """Share of each head that is rotated (partial rotary)."""
    rope_interleaved: bool = False
    """Rotate neighbouring pairs (GPT-J) instead of the two halves (NeoX)."""
    tie_embeddings: bool = False
    """Use the embedding as output projection."""
    attn_bias: bool = False
    """Biases on the attention projections."""
    mlp_bias: bool = False
    """Biases on the feed-forward projections."""
    norm_bias: bool = False
    """Biases in LayerNorm."""
    head_bias: bool = False
    """Bias on the output projection."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    dropout: float = 0.0
    """Probability of dropping an entry of the embedding and of each branch."""
    init: Literal["depth-scaled", "uniform-depth"] = "depth-scaled"
    """depth-scaled: projections that add to the residual stream are drawn with
    init_std / sqrt(2 L) (GPT-2); uniform-depth: all with init_std."""
    init_std: float | None = None
    """Standard deviation of weights; None is sqrt(2 / (5 D)) (small init)."""
    attention: Literal["auto", "reference", "blocked", "cudnn", "mosaic_gpu"] = "auto"
    """Attention backend; auto takes the fastest that can do the job."""
    remat: Remat = "full"
    """What the backward pass computes again; see docs/parallelism.md."""

    def __post_init__(self) -> None:
        """Refuse sizes that no mesh can carry."""
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {size}")
        if self.d_model % self.heads and self.head_dim is None:
            above = -(-self.d_model // self.heads) * self.heads
            raise ValueError(
                f"--model.d-model must be a multiple of --model.heads {self.heads}, "
                f"got {self.d_model}; use --model.d-model {above}, or give the width "
                "of a head as --model.head-dim"
            )
        if self.heads % self.num_kv_heads:
            kv_heads = range(self.num_kv_heads, 0, -1)
            below = next(n for n in kv_heads if self.heads % n == 0)
            raise ValueError(
                f"--model.kv-heads must divide --model.heads {self.heads}, got "
                f"{self.num_kv_heads}; use --model.kv-heads {below}"
            )
        for name in ("norm_eps", "rope_base", "rope_scaling", "init_std"):
            number = getattr(self, name)
            if number is not None and not 0 < number < math.inf:
                raise ValueError(
                    f"{_flag(name)} must be positive and finite, got {number}"
                )
        for name in ("window", "rope"):
            length = len(getattr(self, name))
            if not 1 <= length <= self.layers:
                raise ValueError(
                    f"{_flag(name)} must have from 1 to {self.layers} values (the "
                    f"layers), got {length}; give one for all layers, one for each, or "
                    "a pattern that repeats"
                )
        for window in self.window:
            if window is not None and window < 1:
                raise ValueError(
                    f"--model.window must be at least 1 (a query sees itself), got "
                    f"{window}; None is full causal attention"
                )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"--model.dropout must be at least 0 and below 1, got {self.dropout}"
            )
        if not 0.0 < self.rope_fraction <= 1.0:
            raise ValueError(
                "--model.rope-fraction must be above 0 and at most 1, got "
                f"{self.rope_fraction}"
            )
        if any(self.rope) and self.rope_config.rotated_width < 2:
            raise ValueError(
                "--model.rope-fraction must leave a pair to rotate in a head of "
                f"{self.head_width}, got {self.rope_fraction}; give a larger share, or "
                "--model.rope False for layers without positions"
            )
        if not math.isfinite(self.logit_scale):
            raise ValueError(
                f"--model.logit-scale must be finite, got {self.logit_scale}"
            )
        if self.norm == "rmsnorm" and self.norm_bias:
            raise ValueError(
                "--model.norm-bias needs --model.norm layernorm, got --model.norm "
                "rmsnorm; use --model.no-norm-bias"
            )

    @property
    def num_kv_heads(self) -> int:
        """K, key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """H, head width."""
        return self.d_model // self.heads if self.head_dim is None else self.head_dim

    @property
    def ffn_width(self) -> int:
        """F, feed-forward width."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def padded_vocab(self) -> int:
        """V rounded up to the multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, in order."""
        return tuple(
            LayerKind(
                window=self.window[i % len(self.window)],
                rotate=self.rope[i % len(self.rope)],
            )
            for i in range(self.layers)
        )

    @property
    def pattern_length(self) -> int:
        """Length of the smallest pattern of layer kinds that repeats."""
        kinds = self.kinds
        return next(
            n
            for n in range(1, self.layers + 1)
            if all(kinds[i] == kinds[i % n] for i in range(self.layers))
        )

    @property
    def rope_config(self) -> RopeConfig:
        """How queries and keys are rotated."""
        return RopeConfig(
            head_width=self.head_width,
            base=self.rope_base,
            scaling=self.rope_scaling,
            fraction=self.rope_fraction,
            interleaved=self.rope_interleaved,
        )

    @property
    def block_config(self) -> BlockConfig:
        """Sizes and options of every block."""
        std = (
            (2 / (5 * self.d_model)) ** 0.5 if self.init_std is None else self.init_std
        )
        depth = (2 * self.layers) ** 0.5 if self.init == "depth-scaled" else 1.0
        attention = AttentionConfig(
            d_model=self.d_model,
            num_heads=self.heads,
            num_kv_heads=self.num_kv_heads,
            head_width=self.head_width,
            use_bias=self.attn_bias,
            rope=self.rope_config,
            backend=self.attention,
            recompute=self.remat == "attention",
        )
        return BlockConfig(
            attention=attention,
            d_ff=self.ffn_width,
            activation=self.activation,
            mlp_bias=self.mlp_bias,
            norm=self.norm,
            norm_eps=self.norm_eps,
            norm_bias=self.norm_bias,
            dropout=self.dropout,
            std=std,
            out_std=std / depth,
        )


def _flag(name: str) -> str:
    return f"--model.{name.replace('_', '-')}"
