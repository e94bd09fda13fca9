"""Model families that both mjax and transformers can express.

Input: the contents of a config.json, or a ModelConfig. Output: a ModelConfig, or the
contents. An option that one side cannot express is refused by name. There is no
hand-written list of mjax options: a config is written as config.json, read back, and
compared.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mjax.hugging_face import configs, gemma, gpt2, qwen
from mjax.hugging_face.configs import Json
from mjax.hugging_face.keys import Keys
from mjax.hugging_face.tensors import COHERE2, GEMMA, GPT2, GPTJ, LLAMA, QWEN3, Tensors
from mjax.model.config import ModelConfig

_FREE = (
    "vocab_multiple",
    "dropout",
    "init",
    "init_std",
    "attention",
    "remat",
    "offload_horizon",
)
"""Fields that change neither the stored parameters nor the computation."""

_TURNS = ("rope_slow_turns", "rope_fast_turns", "rope_magnitude", "rope_truncate")
_ROPE = (
    *("rope_base", "rope_scaling", "rope_fraction", "rope_interleaved", "rope_type"),
    *("rope_original_len", "rope_windowed_base", *_TURNS),
)


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture of transformers."""

    name: str
    """model_type of config.json."""
    architecture: str
    """Class of transformers that loads it."""
    tensors: Tensors
    read: Callable[[Keys], ModelConfig]
    """Converts keys of config.json to a ModelConfig."""
    write: Callable[[ModelConfig, int], Json]
    """Converts a ModelConfig and a sequence length to keys; omits fields that the
    family cannot express."""


def model_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Translate the contents of a config.json.

    Raises:
      ValueError: the family is unknown, or mjax lacks an option.
    """
    keys = Keys(hf_config)
    model = family_of(hf_config).read(keys)
    keys.check_empty()
    return model


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Find the family named by a config.json.

    Raises:
      ValueError: the family is unknown.
    """
    kind, classes = hf_config.get("model_type"), hf_config.get("architectures") or []
    for family in FAMILIES:
        if kind == family.name and classes in ([], [family.architecture]):
            return family
    known = ", ".join(f"{f.name} ({f.architecture})" for f in FAMILIES)
    raise ValueError(
        f"config.json: mjax has no model_type {kind!r} with architectures {classes}; "
        f"it reads {known}"
    )


def hf_config(
    model: ModelConfig, *, seq_len: int, family: str | None = None
) -> tuple[Family, Json]:
    """Convert an architecture to the keys of a family.

    Args:
      model: the architecture.
      seq_len: longest sequence of the model in tokens.
      family: name of the family; None for the first that can express the model.
    Returns:
      the family, and the keys of the architecture for config.json.
    Raises:
      ValueError: the family is unknown or lacks an option; without `family`, every
        family lacks one. The message names the options.
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
    """Convert a model to the keys of a family, and read them back."""
    try:
        theirs: Json = {
            "architectures": [family.architecture],
            "model_type": family.name,
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.tie_embeddings,
            **family.write(model, seq_len),
        }
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
    """Return the fields that determine parameters and maths, in normal form.

    Fields of rotary positions are omitted if no layer rotates.
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
        "window": configs.pattern([kind.window for kind in model.kinds]),
        "rope": configs.pattern([kind.rotate for kind in model.kinds]),
        "rope_fraction": configs.fraction(
            model.rope_config.rotated_width, model.head_width
        ),
    }
    rope, has_window = model.rope_config, any(kind.window for kind in model.kinds)
    if model.attn_scale_width == model.head_width:
        fields["attn_scale_width"] = None
    if model.rope_type != "linear":
        fields["rope_slow_turns"] = rope.slow_turns
        fields["rope_fast_turns"] = rope.fast_turns
    if model.rope_type == "yarn":
        fields["rope_magnitude"] = rope.magnitude
    if not has_window or model.windowed_rope_config == rope:
        fields["rope_windowed_base"] = None
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
    """Return a field of a model as a command-line flag with its value."""
    word = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--model.{'' if value else 'no-'}{word}"
    values = value if isinstance(value, tuple) else (value,)
    return f"--model.{word} " + " ".join(map(str, values))


FAMILIES = (
    Family("gptj", "GPTJForCausalLM", GPTJ, configs.read_gptj, configs.write_gptj),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        COHERE2,
        configs.read_cohere2,
        configs.write_cohere2,
    ),
    Family("llama", "LlamaForCausalLM", LLAMA, configs.read_llama, configs.write_llama),
    Family(
        "mistral",
        "MistralForCausalLM",
        LLAMA,
        configs.read_mistral,
        configs.write_mistral,
    ),
    Family("qwen2", "Qwen2ForCausalLM", LLAMA, qwen.read_qwen2, qwen.write_qwen2),
    Family("qwen3", "Qwen3ForCausalLM", QWEN3, qwen.read_qwen3, qwen.write_qwen3),
    Family("gemma2", "Gemma2ForCausalLM", GEMMA, gemma.read_gemma2, gemma.write_gemma2),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        GEMMA,
        gemma.read_gemma3,
        gemma.write_gemma3,
    ),
    Family("gpt2", "GPT2LMHeadModel", GPT2, gpt2.read_gpt2, gpt2.write_gpt2),
)
"""All families, in the order in which they are tried."""
