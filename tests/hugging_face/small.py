"""Small models of every family: config.json, and random mjax parameters."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mjax.hugging_face.families import model_config
from mjax.hugging_face.source import Index
from mjax.hugging_face.tensors import our_shapes
from mjax.model.config import ModelConfig

VOCAB, WINDOW = 61, 5

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

# Every option of a family differs from its default.
CONFIGS: dict[str, dict[str, Any]] = {
    "gptj": {
        "model_type": "gptj",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 48,
        "n_positions": 64,
        "rotary_dim": 4,
        "layer_norm_epsilon": 0.01,
    },
    "cohere2": {
        **_SIZES,
        "model_type": "cohere2",
        "num_hidden_layers": 5,
        "sliding_window": WINDOW,
        "attention_bias": True,
        "logit_scale": 0.5,
        "layer_norm_eps": 0.01,
        "rope_theta": 50_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "llama": {
        **_SIZES,
        "model_type": "llama",
        "num_hidden_layers": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rms_norm_eps": 0.01,
        "rope_theta": 500_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "mistral": {
        **_SIZES,
        "model_type": "mistral",
        "num_hidden_layers": 4,
        "head_dim": 12,
        "rms_norm_eps": 0.02,
        "sliding_window": WINDOW,
    },
    # With 16 positions, each pair of a head of width 8 is scaled differently.
    "qwen2": {
        **_SIZES,
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "rms_norm_eps": 0.02,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
        "rope_theta": 10.0,
        "max_position_embeddings": 64,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 1.0,
            "beta_slow": 0.25,
        },
    },
    "qwen3": {
        **_SIZES,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": 12,
        "attention_bias": True,
        "rms_norm_eps": 0.02,
        "rope_theta": 1e6,
    },
    "gemma2": {
        **_SIZES,
        "model_type": "gemma2",
        "num_hidden_layers": 3,
        "head_dim": 12,
        "attention_bias": True,
        "rms_norm_eps": 0.02,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 0.7,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        **_SIZES,
        "model_type": "gemma3_text",
        "num_hidden_layers": 5,
        "head_dim": 12,
        "rms_norm_eps": 0.02,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 9,
        "final_logit_softcapping": 2.0,
        "rope_theta": 1000.0,
        "rope_local_base_freq": 10.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 48,
        "n_positions": 64,
        "layer_norm_epsilon": 0.01,
    },
}

LLAMA3: dict[str, Any] = CONFIGS["llama"] | {
    "rope_theta": 10.0,
    "max_position_embeddings": 64,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 0.25,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8,
    },
}
"""A Llama 3.1 with fully scaled, partly scaled and unscaled pairs."""


def small_model(family: str) -> ModelConfig:
    return model_config(CONFIGS[family])


class Arrays:
    """A source of tensors over arrays in memory."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def names(self) -> Iterator[str]:
        return iter(self.arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.arrays[name].dtype

    def read(self, name: str, index: Index = ...) -> np.ndarray:
        return self.arrays[name][index]


def random_params(model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random parameters without zeros or ones, except the zero padding."""
    rng = np.random.default_rng(seed)
    params = {}
    for path, shape in our_shapes(model).items():
        is_table = path in ("embed.table", "head.table", "head.bias")
        # Keeps sums over the inputs of a projection at the scale of one input.
        inputs = model.d_model if path.endswith(("table", "wq", "wk", "wv")) else 40
        leaf = rng.normal(0, inputs**-0.5, shape).astype(np.float32)
        if path.endswith("scale") and not model.norm_zero_centred:
            leaf += 1
        if is_table:
            leaf[model.vocab_size :] = 0
        params[f"params.{path}"] = leaf
    return params
