"""Gemma 2 and the text models of Gemma 3: keys to fields, and back.

Source: transformers 5.23, `configuration_gemma2.py`, `modeling_gemma2.py`, and the same
files of gemma3. Both scale the embedding by the square root of the width. Gemma 3
normalises queries and keys, and its windowed layers have their own rotary base.
"""

from typing import Any

from mjax.hugging_face.configs import (
    FULL,
    SLIDING,
    Json,
    check_kinds,
    check_multiple,
    pattern,
    read_sizes,
    write_alike,
)
from mjax.hugging_face.keys import Keys
from mjax.model.config import ModelConfig

_GELU = "gelu_pytorch_tanh"


def read_gemma2(keys: Keys) -> ModelConfig:
    """Translate the keys of a Gemma 2 model."""
    return ModelConfig(
        **_read(keys, "gemma2", every=2),
        **keys.rotary(),
        attn_soft_cap=keys.optional("attn_logit_softcapping", 50.0),
        logit_soft_cap=keys.optional("final_logit_softcapping", 30.0),
    )


def read_gemma3(keys: Keys) -> ModelConfig:
    """Translate the keys of the text model of Gemma 3.

    transformers reads a soft cap of scores but does not pass it to the attention, so
    the key has no effect there. Any value but null is therefore refused.
    """
    keys.expect("attn_logit_softcapping", None)
    every = keys.size("sliding_window_pattern", 6)
    every = keys.size("_sliding_window_pattern", every)
    local = keys.number("rope_local_base_freq", 10_000.0)
    nested = keys.take("rope_parameters", None) or {}
    inner = nested if isinstance(nested, dict) else {"rope_parameters": nested}
    local, inner = _windowed_base(inner, local)
    base = keys.number("rope_theta", 1_000_000.0)
    options = keys.take("rope_scaling", None) or inner
    if not isinstance(options, dict):
        raise ValueError(
            f"config.json: rotary options must be a mapping, got {options!r}"
        )
    return ModelConfig(
        **_read(keys, "gemma3_text", every=every),
        **keys.scaled(options, base),
        rope_windowed_base=local,
        qk_norm=True,
        logit_soft_cap=keys.optional("final_logit_softcapping"),
    )


def _windowed_base(nested: dict[str, Any], base: float) -> tuple[float, dict[str, Any]]:
    """Return the rotary base of windowed layers, and the options of other layers."""
    if not {FULL, SLIDING} & set(nested):
        return base, nested
    sliding = Keys(nested.get(SLIDING) or {})
    base = sliding.number("rope_theta", base)
    sliding.expect("rope_type", "default")
    sliding.check_empty()
    rest = Keys({k: v for k, v in nested.items() if k not in (FULL, SLIDING)})
    rest.check_empty()
    return base, nested.get(FULL) or {}


def _read(keys: Keys, family: str, *, every: int) -> Json:
    """Read the common keys into fields of a ModelConfig.

    Without the key layer_types, every `every`-th layer has full attention.
    """
    for key in ("hidden_act", "hidden_activation"):
        keys.expect(key, _GELU)
    keys.expect("use_bidirectional_attention", False)
    sizes = read_sizes(keys, kv_heads=4, head_dim=256)
    check_multiple(sizes, family)
    layers, window = sizes["layers"], keys.size("sliding_window", 4096, or_null=True)
    kinds = keys.take("layer_types", None)
    if kinds is None:
        if every < 1:
            raise ValueError(
                f"config.json: sliding_window_pattern must be at least 1, got {every}"
            )
        kinds = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    kinds = check_kinds(kinds, layers)
    if window is None and SLIDING in kinds:
        raise ValueError("config.json: sliding_window must be a whole number, got None")
    return sizes | {
        "activation": "geglu_tanh",
        "block": "serial",
        "norm": "rmsnorm",
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "norm_zero_centred": True,
        "post_norms": True,
        "embed_scale": sizes["d_model"] ** 0.5,
        "attn_scale_width": keys.number("query_pre_attn_scalar", 256.0),
        "attn_bias": keys.flag("attention_bias", False),
        "window": pattern([window if kind == SLIDING else None for kind in kinds]),
        "tie_embeddings": keys.flag("tie_word_embeddings", True),
    }


def write_gemma2(model: ModelConfig, seq_len: int) -> Json:
    """Return the Gemma 2 keys of a model with sequences of up to `seq_len` tokens."""
    return _write(model, seq_len) | {
        "attn_logit_softcapping": model.attn_soft_cap,
        "final_logit_softcapping": model.logit_soft_cap,
    }


def write_gemma3(model: ModelConfig, seq_len: int) -> Json:
    """Return the Gemma 3 keys of a model with sequences of up to `seq_len` tokens."""
    local = model.rope_windowed_base
    return _write(model, seq_len) | {
        "rope_local_base_freq": model.rope_base if local is None else local,
        "final_logit_softcapping": model.logit_soft_cap,
    }


def _write(model: ModelConfig, seq_len: int) -> Json:
    theirs = write_alike(model, seq_len)
    del theirs["hidden_act"]
    windows = [kind.window for kind in model.kinds if kind.window is not None]
    width = model.attn_scale_width or float(model.head_width)
    if not width.is_integer():
        raise ValueError(
            "query_pre_attn_scalar must be a whole number in transformers, got "
            f"--model.attn-scale-width {width}"
        )
    return theirs | {
        "hidden_activation": _GELU,
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.attn_bias,
        "query_pre_attn_scalar": int(width),
        "sliding_window": windows[0] if windows else seq_len,
        "layer_types": [SLIDING if kind.window else FULL for kind in model.kinds],
    }
