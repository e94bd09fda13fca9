"""The architecture of a model: its flags and the sizes derived from them."""

import dataclasses
import math
from typing import Any, Literal

from mjax.layers.config import (
    GATED,
    Activation,
    AttentionConfig,
    BlockConfig,
    LayerKind,
    NormConfig,
    Remat,
    RopeConfig,
    RopeType,
)

_SIZES = (
    *("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff"),
    *("vocab_size", "vocab_multiple", "learned_positions", "rope_original_len"),
)
_POSITIVE = (
    *("norm_eps", "rope_base", "rope_scaling", "init_std", "rope_windowed_base"),
    *("rope_slow_turns", "rope_fast_turns", "rope_magnitude", "attn_scale_width"),
    *("attn_soft_cap", "logit_soft_cap", "embed_scale"),
)
_TURNS = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}
"""RoPE type -> default (slow, fast) turns, from Llama 3.1 and the YaRN paper."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of the model; letters as in docs/vocabulary.md."""

    layers: int = 4
    """L, number of blocks."""
    d_model: int = 128
    """D, model width."""
    heads: int = 4
    """N, query heads."""
    kv_heads: int | None = None
    """K, key/value heads; None uses as many as query heads."""
    head_dim: int | None = None
    """H, head width; None uses d_model / heads."""
    d_ff: int | None = None
    """F, feed-forward width; None uses 4 x d_model."""
    vocab_size: int = 257
    """V, vocabulary size. Unless --data.vocab is model, the size of the tokenizer's
    vocabulary replaces it."""
    vocab_multiple: int = 128
    """Pad the vocabulary to a multiple of this; padded logits are masked."""
    block: Literal["parallel", "serial"] = "parallel"
    """parallel: x + Attn(LN(x)) + MLP(LN(x)); serial: attention, then feed-forward."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of norm."""
    norm_eps: float = 1e-5
    """Added to the variance or mean square."""
    norm_zero_centred: bool = False
    """Store the scale of norms minus 1 (Gemma)."""
    post_norms: bool = False
    """Also normalise the output of each branch (Gemma 2 and 3); serial block only."""
    qk_norm: bool = False
    """RMSNorm of each query and key head, before the rotation."""
    activation: Activation = "gelu"
    """Activation. gelu: exact; gelu_tanh: tanh form; swiglu: silu(gate) x in;
    geglu_tanh: gelu_tanh(gate) x in."""
    window: tuple[int | None, ...] = (None,)
    """Number of keys that a query sees, its own included, for each layer of a repeating
    pattern; None means all."""
    rope: tuple[bool, ...] = (True,)
    """Whether queries and keys are rotated, for each layer of a repeating pattern."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: float = 1.0
    """Number by which positions are divided; --model.rope-type selects the pairs."""
    rope_type: RopeType = "linear"
    """Pairs of entries whose positions are scaled. linear: all; llama3 and yarn: those
    that rotate slowly."""
    rope_original_len: int | None = None
    """Sequence length before the scaling of positions (llama3, yarn)."""
    rope_slow_turns: float | None = None
    """Scale pairs that make fewer turns than this over --model.rope-original-len
    positions (llama3, yarn); None uses 1."""
    rope_fast_turns: float | None = None
    """Do not scale pairs that make more turns than this over --model.rope-original-len
    positions; None uses 4 (llama3) or 32 (yarn)."""
    rope_truncate: bool = True
    """Round the limits between scaled and unscaled pairs to integer indices (yarn)."""
    rope_magnitude: float | None = None
    """Factor on cosine and sine (yarn); None uses
    0.1 * ln(--model.rope-scaling) + 1."""
    rope_windowed_base: float | None = None
    """Rotary base in layers with a window, whose positions are then not scaled (Gemma
    3); None rotates them like all other layers."""
    rope_fraction: float = 1.0
    """Fraction of each head that is rotated (partial rotary)."""
    rope_interleaved: bool = False
    """Rotate pairs of neighbouring entries (GPT-J) instead of the two halves (NeoX)."""
    learned_positions: int | None = None
    """Number of learned position vectors to add (GPT-2); None adds none."""
    embed_scale: float = 1.0
    """Factor on token embeddings (Gemma: sqrt(d_model))."""
    tie_embeddings: bool = False
    """Use the embedding as the output projection."""
    attn_bias: bool = False
    """Biases on the attention projections."""
    qkv_bias: bool = False
    """Biases on only the query, key and value projections (Qwen2)."""
    attn_scale_width: float | None = None
    """Divide attention scores by the square root of this; None uses the head width."""
    attn_soft_cap: float | None = None
    """Soft cap of attention scores: cap x tanh(score / cap) (Gemma 2); None: no cap."""
    mlp_bias: bool = False
    """Biases on the feed-forward projections."""
    norm_bias: bool = False
    """Biases in LayerNorm."""
    head_bias: bool = False
    """Bias on the output projection."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    logit_soft_cap: float | None = None
    """Replace logits by cap x tanh(logit / cap) (Gemma 2); None uses no cap."""
    dropout: float = 0.0
    """Dropout probability of the embedding and of each branch."""
    init: Literal["depth-scaled", "uniform-depth"] = "depth-scaled"
    """Initialisation. depth-scaled: projections into the residual stream have standard
    deviation init_std / sqrt(2 L) (GPT-2); uniform-depth: all have init_std."""
    init_std: float | None = None
    """Standard deviation of initial weights; None uses sqrt(2 / (5 D)) (small init)."""
    attention: Literal["auto", "reference", "blocked", "cudnn", "mosaic_gpu"] = "auto"
    """Attention backend; auto uses the fastest that supports the run."""
    attention_backward: Literal["deterministic", "fused"] = "deterministic"
    """Backward pass of attention. fused: predicted to be faster (not measured on a
    GPU), but not deterministic: query gradients are summed in no fixed order, so
    neither repeated nor resumed runs agree bit by bit. It needs a Hopper GPU, the
    mosaic_gpu backend and head width 128. See docs/kernels.md."""
    remat: Remat = "full"
    """What the backward pass recomputes; see docs/parallelism.md."""
    offload_horizon: int | None = None
    """With --model.remat offload, how many layers ahead the backward pass loads inputs;
    None uses 1."""

    def __post_init__(self) -> None:
        """Refuse invalid sizes and options."""
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {size}")
        if self.d_model % self.heads and self.head_dim is None:
            above = -(-self.d_model // self.heads) * self.heads
            raise ValueError(
                f"--model.d-model must be a multiple of --model.heads {self.heads}, "
                f"got {self.d_model}; use --model.d-model {above}, or set "
                "--model.head-dim"
            )
        if self.heads % self.num_kv_heads:
            kv_heads = range(self.num_kv_heads, 0, -1)
            below = next(n for n in kv_heads if self.heads % n == 0)
            raise ValueError(
                f"--model.kv-heads must divide --model.heads {self.heads}, got "
                f"{self.num_kv_heads}; use --model.kv-heads {below}"
            )
        for name in _POSITIVE:
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
                    f"layers), got {length}; give one value for all layers, one per "
                    "layer, or a pattern that repeats"
                )
        for window in self.window:
            if window is not None and window < 1:
                raise ValueError(
                    "--model.window must be at least 1 (a query sees itself), got "
                    f"{window}; None means full causal attention"
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
                f"{self.head_width}, got {self.rope_fraction}; use a larger fraction, "
                "or --model.rope False for layers without positions"
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
        if self.post_norms and self.block != "serial":
            raise ValueError(
                f"--model.post-norms needs --model.block serial, got --model.block "
                f"{self.block}; use --model.no-post-norms"
            )
        if self.qkv_bias and self.attn_bias:
            raise ValueError(
                "--model.qkv-bias and --model.attn-bias exclude each other: the "
                "latter also adds a bias to the output projection; give only one of "
                "them"
            )
        self._check_rope_type()
        self._check_offload()

    def _check_offload(self) -> None:
        """Refuse a loading horizon that is out of range, or given without offload."""
        asked = self.offload_horizon
        if asked is not None and asked < 1:
            raise ValueError(
                f"--model.offload-horizon must be at least 1, got {asked}; 1 loads the "
                "input of a layer while the layer after it computes"
            )
        if self.remat != "offload":
            if asked is not None:
                raise ValueError(
                    f"--model.offload-horizon {asked} needs --model.remat offload, got "
                    f"--model.remat {self.remat}; leave --model.offload-horizon out, "
                    "or set it to None if a resumed run sets it"
                )
            return
        if self.layers == 1:
            raise ValueError(
                "--model.remat offload needs --model.layers of at least 2, got 1: the "
                "input of one layer is loaded while another layer computes; use "
                "--model.remat full"
            )
        if asked is not None and asked >= self.layers:
            raise ValueError(
                f"--model.offload-horizon must be below --model.layers {self.layers}, "
                f"got {asked}: it counts the layer inputs on the device at once; use "
                f"--model.offload-horizon {self.layers - 1} or less, or --model.remat "
                "full"
            )

    @property
    def loading_horizon(self) -> int | None:
        """How many layers ahead inputs are loaded; None if they stay on the device."""
        return (self.offload_horizon or 1) if self.remat == "offload" else None

    def _check_rope_type(self) -> None:
        """Refuse options that the type of rotary scaling does not use."""
        options = {
            "rope_original_len": self.rope_original_len,
            "rope_slow_turns": self.rope_slow_turns,
            "rope_fast_turns": self.rope_fast_turns,
            "rope_magnitude": self.rope_magnitude,
            "rope_truncate": None if self.rope_truncate else False,
        }
        reads = {"linear": 0, "llama3": 3, "yarn": 5}[self.rope_type]
        for name in list(options)[reads:]:
            if options[name] is not None:
                types = "llama3 or yarn" if name in list(options)[:3] else "yarn"
                raise ValueError(
                    f"{_flag(name)} needs --model.rope-type {types}, got --model."
                    f"rope-type {self.rope_type}; leave {_flag(name)} at its default"
                )
        if self.rope_type == "linear":
            return
        if self.rope_original_len is None:
            raise ValueError(
                f"--model.rope-type {self.rope_type} needs --model.rope-original-len, "
                "the sequence length before the scaling of positions"
            )
        if not self.rope_config.slow_turns < self.rope_config.fast_turns:
            raise ValueError(
                "--model.rope-fast-turns must be above --model.rope-slow-turns "
                f"{self.rope_config.slow_turns}, got {self.rope_config.fast_turns}"
            )
        if self.rope_type == "yarn" and self.rope_base <= 1:
            raise ValueError(
                f"--model.rope-base must be above 1 with --model.rope-type yarn, got "
                f"{self.rope_base}"
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
    def is_gated(self) -> bool:
        """Whether the feed-forward layer has a gate: three matrices instead of two."""
        return self.activation in GATED

    @property
    def padded_vocab(self) -> int:
        """V rounded up to a multiple of `vocab_multiple`."""
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
        """Length of the shortest repeating pattern of layer kinds."""
        kinds = self.kinds
        return next(
            n
            for n in range(1, self.layers + 1)
            if all(kinds[i] == kinds[i % n] for i in range(self.layers))
        )

    @property
    def rope_config(self) -> RopeConfig:
        """Configuration of the rotation of queries and keys."""
        return RopeConfig(
            head_width=self.head_width,
            base=self.rope_base,
            scaling=self.rope_scaling,
            fraction=self.rope_fraction,
            interleaved=self.rope_interleaved,
            type=self.rope_type,
            **self._scaled_rope,
        )

    @property
    def _scaled_rope(self) -> dict[str, Any]:
        """Return the options that only llama3 and yarn have."""
        if self.rope_type == "linear":
            return {}
        slow, fast = _TURNS[self.rope_type]
        magnitude = self.rope_magnitude
        if self.rope_type == "yarn" and magnitude is None:
            magnitude = yarn_magnitude(self.rope_scaling)
        return {
            "original_len": self.rope_original_len or 1,
            "slow_turns": _or_else(self.rope_slow_turns, slow),
            "fast_turns": _or_else(self.rope_fast_turns, fast),
            "truncate": self.rope_truncate,
            "magnitude": _or_else(magnitude, 1.0),
        }

    @property
    def windowed_rope_config(self) -> RopeConfig | None:
        """Rotation in layers with a window; None: the same as in all other layers."""
        if self.rope_windowed_base is None:
            return None
        return RopeConfig(
            head_width=self.head_width,
            base=self.rope_windowed_base,
            scaling=1.0,
            fraction=self.rope_fraction,
            interleaved=self.rope_interleaved,
        )

    @property
    def attention_scale(self) -> float | None:
        """Factor on the scores; None uses 1 / sqrt(H)."""
        width = self.attn_scale_width
        return None if width is None else width**-0.5

    @property
    def norm_config(self) -> NormConfig:
        """Configuration of the norms."""
        return NormConfig(
            kind=self.norm,
            eps=self.norm_eps,
            use_bias=self.norm_bias,
            zero_centred=self.norm_zero_centred,
        )

    @property
    def block_config(self) -> BlockConfig:
        """Configuration that all blocks share."""
        std = (
            (2 / (5 * self.d_model)) ** 0.5 if self.init_std is None else self.init_std
        )
        depth = (2 * self.layers) ** 0.5 if self.init == "depth-scaled" else 1.0
        head_norm = dataclasses.replace(
            self.norm_config, kind="rmsnorm", use_bias=False
        )
        attention = AttentionConfig(
            d_model=self.d_model,
            num_heads=self.heads,
            num_kv_heads=self.num_kv_heads,
            head_width=self.head_width,
            use_bias=self.attn_bias or self.qkv_bias,
            use_out_bias=self.attn_bias,
            rope=self.rope_config,
            backend=self.attention,
            backward=self.attention_backward,
            recompute=self.remat == "attention",
            scale=self.attention_scale,
            soft_cap=self.attn_soft_cap,
            qk_norm=head_norm if self.qk_norm else None,
        )
        return BlockConfig(
            attention=attention,
            d_ff=self.ffn_width,
            activation=self.activation,
            mlp_bias=self.mlp_bias,
            norm=self.norm_config,
            post_norms=self.post_norms,
            dropout=self.dropout,
            std=std,
            out_std=std / depth,
        )


def yarn_magnitude(scaling: float, factor: float = 1.0) -> float:
    """Return 0.1 * factor * ln(scaling) + 1, or 1 if scaling is at most 1.

    Args:
      scaling: number by which positions are divided.
      factor: weight of the logarithm.

    Source: Peng et al. 2023, arXiv:2309.00071, eq. 22; factor: DeepSeek-AI 2024,
    arXiv:2405.04434, section 3.1.4.
    """
    return 1.0 if scaling <= 1 else 0.1 * factor * math.log(scaling) + 1.0


def _or_else(value: float | None, default: float) -> float:
    return default if value is None else value


def _flag(name: str) -> str:
    return f"--model.{name.replace('_', '-')}"
