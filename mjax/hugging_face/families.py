"""The families of models that both sides can express: configurations, both ways.

Enters: the contents of a config.json, or a ModelConfig. Leaves: the other one. Whatever
one side cannot express is refused by name. For ours that is no list kept by hand: a
config is written in their form, read back, and compared.

Source: transformers 5.23, `configuration_*.py` and `modeling_*.py` of each family;
defaults of absent keys are those of its configuration classes.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mjax.hugging_face.keys import Keys
from mjax.hugging_face.tensors import COHERE2, GPTJ, LLAMA, Tensors
from mjax.model import ModelConfig

Json = dict[str, Any]

_FREE = ("vocab_multiple", "dropout", "init", "init_std", "attention", "remat")
"""Fields that change neither the parameters that count nor what is computed of them."""

_ROPE = ("rope_base", "rope_scaling", "rope_fraction", "rope_interleaved")


@dataclasses.dataclass(frozen=True)
class Family:
    """One of their architectures."""

    name: str
    """As config.json says: model_type."""
    architecture: str
    """The class of transformers that loads it."""
    tensors: Tensors
    read: Callable[[Keys], ModelConfig]
    """Their configuration to ours."""
    write: Callable[[ModelConfig, int], Json]
    """Ours to theirs, of a length of sequences; what does not fit is left out."""


def model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Translate the contents of a config.json.

    Raises:
      ValueError: it is of another family, or has an option that mjax has not.
    """
    keys = Keys(hf_config)
    model = family_of(hf_config).read(keys)
    keys.check_empty()
    return model


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Find the family that a config.json names.

    Raises:
      ValueError: there is none.
    """
    kind, classes = hf_config.get("model_type"), hf_config.get("architectures") or []
    for family in FAMILIES:
        if kind == family.name and classes in ([], [family.architecture]):
            return family
    known = ", ".join(f"{f.name} ({f.architecture})" for f in FAMILIES)
    raise ValueError(
        f"config.json: mjax has no model_type {kind!r} with architectures {classes}; it "
        f"reads {known}"
    )


def hf_config(
    model: ModelConfig, *, seq_len: int, family: str | None = None
) -> tuple[Family, Json]:
    """Express an architecture in the form of a family.

    Args:
      model: the architecture.
      seq_len: longest sequence that the model is meant for.
      family: its name; None is the first that can.
    Returns:
      the family, and what goes into config.json of the architecture.
    Raises:
      ValueError: the family cannot express an option, or none can; each is named.
    """
    if family is not None:
        named = [f for f in FAMILIES if f.name == family]
        if not named:
            known = ", ".join(f.name for f in FAMILIES)
            raise ValueError(f"no family {family!r}; there are {known}")
        return named[0], _express(named[0], model, seq_len)
    refusals = []
    for candidate in FAMILIES:
        try:
            return candidate, _express(candidate, model, seq_len)
        except ValueError as error:
            refusals.append(str(error))
    raise ValueError(
        "no family of Hugging Face can express this model:\n" + "\n".join(refusals)
    )


def _express(family: Family, model: ModelConfig, seq_len: int) -> Json:
    """Write in the form of a family what it can hold, and see what comes back."""
    theirs: Json = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        **family.write(model, seq_len),
    }
    try:
        back = model_config(theirs)
    except ValueError as error:
        raise ValueError(f"{family.name} cannot express this model: {error}") from error
    lost = [
        f"  {flag(name, ours)}; {family.name} would have {flag(name, theirs)}"
        for name, (ours, theirs) in differences(model, back).items()
    ]
    if lost:
        raise ValueError(
            f"{family.name} cannot express this model:\n" + "\n".join(lost)
        )
    return theirs


def essence(model: ModelConfig) -> Json:
    """Return the fields that decide parameters and maths, each in its only form.

    Those of positions are left out where no layer has any.
    """
    fields = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.name not in _FREE
    }
    fields |= {
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "d_ff": model.ffn_width,
        "window": _pattern([kind.window for kind in model.kinds]),
        "rope": _pattern([kind.rotate for kind in model.kinds]),
        "rope_fraction": _fraction(model.rope_config.rotated_width, model.head_width),
    }
    return {k: v for k, v in fields.items() if any(model.rope) or k not in _ROPE}


def differences(a: ModelConfig, b: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two models differ, with the values of both."""
    first, second = essence(a), essence(b)
    return {
        name: (first[name], second[name])
        for name in first
        if name in second and first[name] != second[name]
    }


def flag(name: str, value: Any) -> str:
    """Write a field of a model as a flag of the command line."""
    word = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--model.{'' if value else 'no-'}{word}"
    values = value if isinstance(value, tuple) else (value,)
    return f"--model.{word} " + " ".join(map(str, values))


def _pattern(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shortest pattern that repeats to these values."""
    return next(
        tuple(values[:n])
        for n in range(1, len(values) + 1)
        if all(value == values[i % n] for i, value in enumerate(values))
    )


def _fraction(width: int, head_width: int) -> float:
    """Return a share of the head that is `width`, after it is rounded down."""
    share = width / head_width
    return share if int(head_width * share) >= width else math.nextafter(share, 1)


# ------------------------------------------------------------------------------- GPT-J

_GPTJ_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}


def _read_gptj(keys: Keys) -> ModelConfig:
    d_model, heads = keys.size("n_embd"), keys.size("n_head")
    activation = keys.take("activation_function", "gelu_new")
    if activation not in _GPTJ_ACTIVATIONS:
        raise ValueError(
            f"config.json: activation_function={activation!r} is not one of "
            f"{', '.join(_GPTJ_ACTIVATIONS)}"
        )
    rotated, head_width = keys.size("rotary_dim"), d_model // max(heads, 1)
    if rotated % 2 or not 2 <= rotated <= head_width:
        raise ValueError(
            f"config.json: rotary_dim={rotated} must be even and at most the width of a "
            f"head, {head_width}"
        )
    keys.expect("rotary", True)
    keys.expect("scale_attn_weights", True)
    return ModelConfig(
        layers=keys.size("n_layer"),
        d_model=d_model,
        heads=heads,
        d_ff=keys.size("n_inner", None, or_null=True),
        vocab_size=keys.size("vocab_size"),
        block="parallel",
        norm="layernorm",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        activation=_GPTJ_ACTIVATIONS[activation],
        rope_fraction=_fraction(rotated, head_width),
        rope_interleaved=True,
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        mlp_bias=True,
        norm_bias=True,
        head_bias=True,
    )


def _write_gptj(model: ModelConfig, seq_len: int) -> Json:
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


# ------------------------------------------- what Cohere2, Llama and Mistral have alike


def _read_alike(keys: Keys, *, kv_heads: int | None) -> Json:
    """Take the keys of sizes and positions; kv_heads is what an absent key means."""
    keys.expect("hidden_act", "silu")
    return {
        "layers": keys.size("num_hidden_layers"),
        "d_model": keys.size("hidden_size"),
        "heads": keys.size("num_attention_heads"),
        # Null is as many as query heads, for both of us.
        "kv_heads": keys.size("num_key_value_heads", kv_heads, or_null=True),
        "head_dim": keys.size("head_dim", None, or_null=True),
        "d_ff": keys.size("intermediate_size"),
        "vocab_size": keys.size("vocab_size"),
        "activation": "swiglu",
        **keys.rotary(),
    }


def _write_alike(model: ModelConfig, seq_len: int) -> Json:
    linear = {"rope_type": "linear", "type": "linear", "factor": model.rope_scaling}
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "intermediate_size": model.ffn_width,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        # In the form of transformers 4, which 5 reads too. The reverse is not so: 4
        # would overlook the keys of 5 and rotate with its default.
        "rope_theta": model.rope_base,
        "rope_scaling": None if model.rope_scaling == 1.0 else linear,
        "attention_dropout": 0.0,
    }


# ----------------------------------------------------------------------------- Cohere2

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _read_cohere2(keys: Keys) -> ModelConfig:
    alike = _read_alike(keys, kv_heads=None)
    width = alike["d_model"] // max(alike["heads"], 1)
    if alike["head_dim"] not in (None, width):
        raise ValueError(
            f"config.json: head_dim={alike['head_dim']} must be hidden_size / "
            f"num_attention_heads = {width} in cohere2"
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
        # Layers that see all keys have no positions.
        window=_pattern([window if kind == _SLIDING else None for kind in kinds]),
        rope=_pattern([kind == _SLIDING for kind in kinds]),
        rope_interleaved=True,
        tie_embeddings=tied,
        attn_bias=keys.flag("attention_bias", False),
        logit_scale=keys.number("logit_scale", 0.0625),
    )


def _cohere2_kinds(keys: Keys, layers: int) -> list[str]:
    """Take the kind of each layer: a list, or in older files every n-th is full."""
    every = keys.size("sliding_window_pattern", 4)
    switch, kinds = keys.take("layer_switch", every), keys.take("layer_types", None)
    if kinds is None:
        if every < 1 or switch != every:
            raise ValueError(
                f"config.json: sliding_window_pattern={every} and layer_switch={switch} "
                "must be one positive number"
            )
        return [_SLIDING if (i + 1) % every else _FULL for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {_SLIDING, _FULL}:
        raise ValueError(
            f"config.json: layer_types must have {layers} entries, {_SLIDING} or "
            f"{_FULL}, got {kinds}"
        )
    return list(kinds)


def _write_cohere2(model: ModelConfig, seq_len: int) -> Json:
    windows = [kind.window for kind in model.kinds if kind.window is not None]
    return {
        **_write_alike(model, seq_len),
        "layer_norm_eps": model.norm_eps,
        "layer_types": [_SLIDING if kind.window else _FULL for kind in model.kinds],
        # transformers wants a number even where no layer uses it.
        "sliding_window": windows[0] if windows else seq_len,
        "attention_bias": model.attn_bias,
        "logit_scale": model.logit_scale,
    }


# ------------------------------------------------------------------- Llama and Mistral


def _read_llama(keys: Keys) -> ModelConfig:
    alike = _read_alike(keys, kv_heads=None)
    if alike["d_model"] % max(alike["heads"], 1):
        raise ValueError(
            f"config.json: hidden_size={alike['d_model']} must be a multiple of "
            f"num_attention_heads={alike['heads']} in llama"
        )
    return ModelConfig(
        **alike,
        block="serial",
        norm="rmsnorm",
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        attn_bias=keys.flag("attention_bias", False),
        mlp_bias=keys.flag("mlp_bias", False),
    )


def _write_llama(model: ModelConfig, seq_len: int) -> Json:
    return {
        **_write_alike(model, seq_len),
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.attn_bias,
        "mlp_bias": model.mlp_bias,
    }


def _read_mistral(keys: Keys) -> ModelConfig:
    keys.expect("attention_bias", False)
    keys.expect("mlp_bias", False)
    window = keys.size("sliding_window", 4096, or_null=True)
    return ModelConfig(
        **_read_alike(keys, kv_heads=8),
        block="serial",
        norm="rmsnorm",
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        window=(window,),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
    )


def _write_mistral(model: ModelConfig, seq_len: int) -> Json:
    return {
        **_write_alike(model, seq_len),
        "rms_norm_eps": model.norm_eps,
        "sliding_window": model.kinds[0].window,
    }


FAMILIES = (
    Family("gptj", "GPTJForCausalLM", GPTJ, _read_gptj, _write_gptj),
    Family("cohere2", "Cohere2ForCausalLM", COHERE2, _read_cohere2, _write_cohere2),
    Family("llama", "LlamaForCausalLM", LLAMA, _read_llama, _write_llama),
    Family("mistral", "MistralForCausalLM", LLAMA, _read_mistral, _write_mistral),
)
"""In the order in which they are tried on a model."""
