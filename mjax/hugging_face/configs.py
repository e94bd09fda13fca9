"""Configurations of each family: Hugging Face keys to mjax fields, and back.

Input: the keys of a config.json, or a ModelConfig. Output: a ModelConfig, or the keys.
Written keys are not checked here; `families` reads them back and compares.

Source: transformers 5.23, `configuration_*.py` and `modeling_*.py` of each family.
Absent keys have the defaults of these configuration classes.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

from mjax.hugging_face.keys import Keys
from mjax.model.config import ModelConfig

Json = dict[str, Any]

MOST_LAYERS = 100_000  # the tensors of each layer are listed


def pattern(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shortest pattern whose repetition gives these values."""
    return next(
        tuple(values[:n])
        for n in range(1, len(values) + 1)
        if all(value == values[i % n] for i, value in enumerate(values))
    )


def fraction(width: int, head_width: int) -> float:
    """Return a fraction of the head width that rounds down to `width`."""
    share = width / head_width
    return share if int(head_width * share) >= width else math.nextafter(share, 1)


# ------------------------------------------------------------------------------- GPT-J

GELUS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}


def gelu_of(keys: Keys) -> Literal["gelu", "gelu_tanh"]:
    """Read the activation function of GPT-J and GPT-2."""
    activation = keys.text("activation_function", "gelu_new")
    if activation not in GELUS:
        raise ValueError(
            "config.json: activation_function must be one of "
            f"{', '.join(GELUS)}, got {activation}"
        )
    return GELUS[activation]


def read_gptj(keys: Keys) -> ModelConfig:
    """Translate the keys of a GPT-J model."""
    d_model, heads = keys.size("n_embd"), keys.size("n_head")
    activation = gelu_of(keys)
    rotated, head_width = keys.size("rotary_dim"), d_model // max(heads, 1)
    if rotated % 2 or not 2 <= rotated <= head_width:
        raise ValueError(
            f"config.json: rotary_dim must be even and at most {head_width}, the width "
            f"of a head, got {rotated}"
        )
    keys.expect("rotary", True)
    keys.expect("scale_attn_weights", True)
    return ModelConfig(
        layers=keys.size("n_layer", most=MOST_LAYERS),
        d_model=d_model,
        heads=heads,
        d_ff=keys.size("n_inner", None, or_null=True),
        vocab_size=keys.size("vocab_size"),
        block="parallel",
        norm="layernorm",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation=activation,
        rope_fraction=fraction(rotated, head_width),
        rope_interleaved=True,
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        mlp_bias=True,
        norm_bias=True,
        head_bias=True,
    )


def write_gptj(model: ModelConfig, seq_len: int) -> Json:
    """Return the GPT-J keys of a model with sequences of up to `seq_len` tokens."""
    return {
        "n_layer": model.layers,
        "n_embd": model.d_model,
        "n_head": model.heads,
        "n_inner": model.ffn_width,
        "n_positions": seq_len,
        "rotary": True,
        "rotary_dim": model.rope_config.rotated_width,
        "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


# ------------------------------------------- shared by Cohere2, Llama and Mistral


def read_alike(keys: Keys, *, kv_heads: int | None) -> Json:
    """Read the keys of sizes and positions into fields of a ModelConfig.

    `kv_heads` is used if the key num_key_value_heads is absent.
    """
    keys.expect("hidden_act", "silu")
    return {**read_sizes(keys, kv_heads=kv_heads), **keys.rotary()}


def read_sizes(
    keys: Keys, *, kv_heads: int | None, head_dim: int | None = None
) -> Json:
    """Read the sizes as fields of a ModelConfig; the arguments replace absent keys."""
    return {
        "layers": keys.size("num_hidden_layers", most=MOST_LAYERS),
        "d_model": keys.size("hidden_size"),
        "heads": keys.size("num_attention_heads"),
        # Null means as many as query heads, in config.json and in ModelConfig.
        "kv_heads": keys.size("num_key_value_heads", kv_heads, or_null=True),
        "head_dim": keys.size("head_dim", head_dim, or_null=True),
        "d_ff": keys.size("intermediate_size"),
        "vocab_size": keys.size("vocab_size"),
        "activation": "swiglu",
    }


def write_alike(model: ModelConfig, seq_len: int) -> Json:
    """Return the keys of sizes and positions of a model."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "intermediate_size": model.ffn_width,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        # The keys of transformers 4, which 5 reads too. Version 4 would ignore the keys
        # of 5 and rotate with its default.
        "rope_theta": model.rope_base,
        "rope_scaling": _rope_scaling(model),
        "attention_dropout": 0.0,
    }


def _rope_scaling(model: ModelConfig) -> Json | None:
    kind, rope = model.rope_type, model.rope_config
    if kind == "linear" and rope.scaling == 1.0:
        return None
    options = {"rope_type": kind, "type": kind, "factor": rope.scaling}
    if kind == "linear":
        return options
    options["original_max_position_embeddings"] = rope.original_len
    if kind == "llama3":
        turns = {
            "low_freq_factor": rope.slow_turns,
            "high_freq_factor": rope.fast_turns,
        }
        return options | turns
    return options | {
        "beta_slow": rope.slow_turns,
        "beta_fast": rope.fast_turns,
        "truncate": rope.truncate,
        "attention_factor": rope.magnitude,
    }


# ----------------------------------------------------------------------------- Cohere2

SLIDING, FULL = "sliding_attention", "full_attention"


def read_cohere2(keys: Keys) -> ModelConfig:
    """Translate the keys of a Cohere2 model."""
    alike = read_alike(keys, kv_heads=None)
    width = alike["d_model"] // max(alike["heads"], 1)
    if alike["head_dim"] not in (None, width):
        raise ValueError(
            "config.json: head_dim must be hidden_size / num_attention_heads = "
            f"{width} in cohere2, got {alike['head_dim']}"
        )
    kinds = _cohere2_kinds(keys, alike["layers"])
    window = keys.size("sliding_window", 4096)
    tied = keys.flag("tie_word_embeddings", True)
    keys.expect("use_embedding_sharing", tied)
    keys.expect("use_parallel_block", True)
    keys.expect("use_gated_activation", True)
    keys.expect("use_qk_norm", False)
    keys.expect("position_embedding_type", "rope_gptj")
    keys.expect("rotary_pct", 1.0)
    keys.expect("order_of_interleaved_layers", "local_attn_first")
    return ModelConfig(
        **alike,
        block="parallel",
        norm="layernorm",
        norm_eps=keys.number("layer_norm_eps", 1e-5),
        # Layers with full attention have no positions.
        window=pattern([window if kind == SLIDING else None for kind in kinds]),
        rope=pattern([kind == SLIDING for kind in kinds]),
        rope_interleaved=True,
        tie_embeddings=tied,
        attn_bias=keys.flag("attention_bias", False),
        logit_scale=keys.number("logit_scale", 0.0625),
    )


def _cohere2_kinds(keys: Keys, layers: int) -> list[str]:
    """Return each layer's kind: as listed; in older files every n-th layer is full."""
    every = keys.size("sliding_window_pattern", 4)
    switch, kinds = keys.take("layer_switch", every), keys.take("layer_types", None)
    if kinds is None:
        if every < 1 or switch != every:
            raise ValueError(
                "config.json: sliding_window_pattern and layer_switch must be one "
                f"positive number, got {every} and {switch}"
            )
        return [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    return check_kinds(kinds, layers)


def check_kinds(kinds: Any, layers: int) -> list[str]:
    """Return the list of kinds; refuse anything but one kind for each layer."""
    known = isinstance(kinds, list) and all(k in (SLIDING, FULL) for k in kinds)
    if not known or len(kinds) != layers:
        raise ValueError(
            f"config.json: layer_types must have {layers} entries, {SLIDING} or "
            f"{FULL}, got {kinds}"
        )
    return kinds


def write_cohere2(model: ModelConfig, seq_len: int) -> Json:
    """Return the Cohere2 keys of a model with sequences of up to `seq_len` tokens."""
    windows = [kind.window for kind in model.kinds if kind.window is not None]
    return {
        **write_alike(model, seq_len),
        "layer_norm_eps": model.norm_eps,
        "layer_types": [SLIDING if kind.window else FULL for kind in model.kinds],
        # transformers requires a number even if no layer uses it.
        "sliding_window": windows[0] if windows else seq_len,
        "attention_bias": model.attn_bias,
        "logit_scale": model.logit_scale,
    }


# ------------------------------------------------------------------- Llama and Mistral


def read_llama(keys: Keys) -> ModelConfig:
    """Translate the keys of a Llama model."""
    alike = read_alike(keys, kv_heads=None)
    check_multiple(alike, "llama")
    return ModelConfig(
        **alike,
        block="serial",
        norm="rmsnorm",
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        attn_bias=keys.flag("attention_bias", False),
        mlp_bias=keys.flag("mlp_bias", False),
    )


def check_multiple(alike: Json, family: str) -> None:
    """Refuse a width that the number of heads does not divide, as transformers does."""
    if alike["d_model"] % max(alike["heads"], 1):
        raise ValueError(
            "config.json: hidden_size must be a multiple of num_attention_heads "
            f"{alike['heads']} in {family}, got {alike['d_model']}"
        )


def write_llama(model: ModelConfig, seq_len: int) -> Json:
    """Return the Llama keys of a model with sequences of up to `seq_len` tokens."""
    return {
        **write_alike(model, seq_len),
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.attn_bias,
        "mlp_bias": model.mlp_bias,
    }


def read_mistral(keys: Keys) -> ModelConfig:
    """Translate the keys of a Mistral model."""
    keys.expect("attention_bias", False)
    keys.expect("mlp_bias", False)
    window = keys.size("sliding_window", 4096, or_null=True)
    return ModelConfig(
        **read_alike(keys, kv_heads=8),
        block="serial",
        norm="rmsnorm",
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        window=(window,),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
    )


def write_mistral(model: ModelConfig, seq_len: int) -> Json:
    """Return the Mistral keys of a model with sequences of up to `seq_len` tokens."""
    return {
        **write_alike(model, seq_len),
        "rms_norm_eps": model.norm_eps,
        "sliding_window": model.kinds[0].window,
    }
