"""The transformer: configuration, parameters, forward pass, counts."""

import dataclasses
from typing import Literal


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
    vocab_size: int = 256
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
    """gelu: exact; gelu_tanh: tanh form; swiglu: silu(gate) x up."""
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
    init_std: float = 0.02
    """Standard deviation of the embedding and of D-wide projections; see docs."""
    attention: Literal["auto", "reference", "blocked", "cudnn"] = "auto"
    """Attention backend; auto takes the fastest that can do the job."""
    remat: Literal["none", "full", "dots", "attention", "offload"] = "full"
    """What is recomputed in the backward pass; see docs/parallelism.md."""

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
