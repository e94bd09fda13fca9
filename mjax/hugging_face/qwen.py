"""Qwen2 and Qwen3: keys to fields, and back.

Source: transformers 5.23, `configuration_qwen2.py`, `modeling_qwen2.py`, and the same
files of qwen3. Layers from `max_window_layers` on have a window if `use_sliding_window`
is true; newer files list the kind of each layer.
"""

from mjax.hugging_face.configs import (
    FULL,
    SLIDING,
    Json,
    check_kinds,
    pattern,
    read_alike,
    write_alike,
)
from mjax.hugging_face.keys import Keys
from mjax.model.config import ModelConfig


def read_qwen2(keys: Keys) -> ModelConfig:
    """Translate the keys of a Qwen2 model."""
    shared = _read(keys)
    width = shared["d_model"] // max(shared["heads"], 1)
    if shared["head_dim"] not in (None, width):
        raise ValueError(
            "config.json: head_dim must be hidden_size / num_attention_heads = "
            f"{width} in qwen2, got {shared['head_dim']}"
        )
    return ModelConfig(**shared, qkv_bias=True)


def read_qwen3(keys: Keys) -> ModelConfig:
    """Translate the keys of a Qwen3 model."""
    bias = keys.flag("attention_bias", False)
    shared = _read(keys)
    if shared["head_dim"] is None:
        shared["head_dim"] = 128  # default of an absent key
    return ModelConfig(**shared, qk_norm=True, attn_bias=bias)


def write_qwen2(model: ModelConfig, seq_len: int) -> Json:
    """Return the Qwen2 keys of a model with sequences of up to `seq_len` tokens."""
    theirs = {**write_alike(model, seq_len), **_write(model)}
    if model.head_width * model.heads == model.d_model:
        del theirs["head_dim"]
    return theirs


def write_qwen3(model: ModelConfig, seq_len: int) -> Json:
    """Return the Qwen3 keys of a model with sequences of up to `seq_len` tokens."""
    theirs = {**write_alike(model, seq_len), **_write(model)}
    return theirs | {"attention_bias": model.attn_bias}


def _read(keys: Keys) -> Json:
    alike = read_alike(keys, kv_heads=32)
    layers = alike["layers"]
    is_used = keys.flag("use_sliding_window", False)
    window = keys.size("sliding_window", 4096, or_null=True)
    first = keys.size("max_window_layers", 28)
    kinds = keys.take("layer_types", None)
    keys.expect("use_mrope", False)
    if not is_used:
        window = None
    if kinds is None:
        has_window = window is not None
        kinds = [SLIDING if has_window and i >= first else FULL for i in range(layers)]
    kinds = check_kinds(kinds, layers)
    if window is None and SLIDING in kinds:
        raise ValueError(
            "config.json: layer_types has sliding_attention, but use_sliding_window or "
            "sliding_window gives no window"
        )
    return {
        **alike,
        "block": "serial",
        "norm": "rmsnorm",
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "window": pattern([window if kind == SLIDING else None for kind in kinds]),
        "tie_embeddings": keys.flag("tie_word_embeddings", False),
    }


def _write(model: ModelConfig) -> Json:
    windows = [kind.window for kind in model.kinds if kind.window is not None]
    return {
        "rms_norm_eps": model.norm_eps,
        "use_sliding_window": bool(windows),
        "sliding_window": windows[0] if windows else None,
        "max_window_layers": model.layers,
        "layer_types": [SLIDING if kind.window else FULL for kind in model.kinds],
    }
