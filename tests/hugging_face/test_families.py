"""Configurations of both sides: conversions, and refusals by name."""

import dataclasses
import math

import pytest

from mjax.hugging_face import families
from mjax.hugging_face.configs import fraction
from mjax.hugging_face.families import hf_config, model_config
from mjax.model.config import ModelConfig
from tests.hugging_face.small import CONFIGS, small_model

by_family = pytest.mark.parametrize("family", CONFIGS)


@by_family
def test_a_model_comes_back_from_the_form_of_its_family(family: str) -> None:
    model = small_model(family)
    chosen, config = hf_config(model, seq_len=64)
    assert chosen.name == family
    assert families.differences(model, model_config(config)) == {}


def test_every_field_of_a_model_is_compared_or_known_to_be_free() -> None:
    """New fields are compared until they are listed as irrelevant."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert set(families.essence(ModelConfig())) | set(families._FREE) == fields


# The publishers' config.json, without keys that have no effect.
def test_the_published_gpt_j_is_read() -> None:
    model = model_config(
        {
            "activation_function": "gelu_new",
            "architectures": ["GPTJForCausalLM"],
            "gradient_checkpointing": False,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gptj",
            "n_embd": 4096,
            "n_head": 16,
            "n_inner": None,
            "n_layer": 28,
            "n_positions": 2048,
            "rotary": True,
            "rotary_dim": 64,
            "scale_attn_weights": True,
            "summary_first_dropout": 0.1,
            "task_specific_params": {"text-generation": {"do_sample": True}},
            "tie_word_embeddings": False,
            "vocab_size": 50400,
        }
    )
    assert model == ModelConfig(
        layers=28,
        d_model=4096,
        heads=16,
        vocab_size=50400,
        activation="gelu_tanh",
        rope_fraction=0.25,
        rope_interleaved=True,
        mlp_bias=True,
        norm_bias=True,
        head_bias=True,
    )


def test_the_older_form_of_cohere2_is_read() -> None:
    model = model_config(
        {
            "architectures": ["Cohere2ForCausalLM"],
            "cache_implementation": "hybrid",
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "layer_switch": 4,
            "logit_scale": 0.25,
            "model_type": "cohere2",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rope_scaling": None,
            "rope_theta": 50000,
            "rotary_pct": 1.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": False,
            "vocab_size": 256000,
        }
    )
    assert model == ModelConfig(
        layers=32,
        d_model=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        d_ff=14336,
        vocab_size=256000,
        activation="swiglu",
        window=(4096, 4096, 4096, None),
        rope=(True, True, True, False),
        rope_base=50_000.0,
        rope_interleaved=True,
        tie_embeddings=True,
        logit_scale=0.25,
    )


ALIKE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-05,
}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"model_type": "llama"}, {"num_kv_heads": 32, "window": (None,)}),
        ({"model_type": "llama", "rope_theta": 5e5}, {"rope_base": 5e5}),
        (
            {
                "model_type": "llama",
                "rope_theta": 1.0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            },
            {"rope_base": 5e5, "rope_scaling": 1.0},
        ),
        (
            {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_base": 1e4, "rope_scaling": 4.0},
        ),
        ({"model_type": "mistral"}, {"num_kv_heads": 8, "window": (4096,)}),
        ({"model_type": "mistral", "sliding_window": None}, {"window": (None,)}),
    ],
)
def test_absent_keys_mean_what_they_mean_to_transformers(config, fields) -> None:
    model = model_config(ALIKE | config)
    assert {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gptj", {"activation_function": "relu"}, "must be one of gelu.*, got relu"),
        ("gptj", {"rotary_dim": 5}, "rotary_dim must be even .*, got 5"),
        ("gptj", {"rotary_dim": None}, "rotary_dim must be a whole number"),
        ("gptj", {"rotary_dim": 16}, "at most 8, the width of a head, got 16"),
        ("gptj", {"scale_attn_weights": False}, "scale_attn_weights=False"),
        ("gptj", {"n_layer": None}, "n_layer must be a whole number, got None"),
        ("gptj", {"n_head": 0}, "--model.heads must be at least 1"),
        ("gptj", {"activation_function": ["gelu"]}, "function must be text, got"),
        ("gptj", {"n_embd": 10**400}, "n_embd must be at most 2147483647"),
        ("gptj", {"n_layer": 10**9}, "n_layer must be at most 100000"),
        ("gptj", {"layer_norm_epsilon": 10**400}, "epsilon must be a number that a"),
        ("gptj", {"layer_norm_epsilon": float("nan")}, "must be finite, got nan"),
        ("llama", {"rope_scaling": {"type": ["linear"]}}, "type must be text, got"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ("llama", {"some_new_option": 1}, "some_new_option=1 is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "type 'longrope'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "no factor"),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            "original_max_position_embeddings must be a whole number, got None",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "no factor"),
        ("llama", {"rope_scaling": {"full": {"factor": 2}}}, "full="),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"hidden_size": 30}, "hidden_size must be a multiple .*, got 30"),
        ("llama", {"mlp_bias": None}, "mlp_bias must be true or false"),
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("mistral", {"layer_types": ["full_attention"]}, "layer_types"),
        ("mistral", {"model_type": "qwen9"}, "no model_type 'qwen9'.*mistral"),
        ("mistral", {"architectures": ["MistralModel"]}, "MistralModel"),
        ("qwen2", {"head_dim": 12}, "head_dim must be hidden_size .*, got 12"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("qwen2", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "gives no window"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "bidirectional_attention=T"),
        ("gemma2", {"sliding_window": None}, "sliding_window must be a whole number"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn-soft-cap must be positive"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "rope_type='linear'",
        ),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2", {"n_positions": 0}, "--model.learned-positions must be at least 1"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("cohere2", {"position_embedding_type": "rope_neox"}, "rope_neox"),
        ("cohere2", {"use_embedding_sharing": False}, "use_embedding_sharing"),
        ("cohere2", {"head_dim": 16}, "head_dim must be hidden_size .*, got 16"),
        ("cohere2", {"sliding_window": None}, "sliding_window must be a whole"),
        (
            "cohere2",
            {"layer_switch": 3},
            "layer_switch must be one positive number, got 4 and 3",
        ),
        ("cohere2", {"layer_types": ["full_attention"]}, "must have 5 entries"),
        ("cohere2", {"layer_types": ["linear_attention"] * 5}, "linear_attention"),
    ],
)
def test_what_mjax_cannot_compute_is_refused_by_its_key(family, changes, says) -> None:
    with pytest.raises(ValueError, match=says):
        model_config(CONFIGS[family] | changes)


def test_a_size_that_is_absent_is_refused() -> None:
    config = {k: v for k, v in CONFIGS["llama"].items() if k != "hidden_size"}
    with pytest.raises(ValueError, match="no hidden_size"):
        model_config(config)


@pytest.mark.parametrize(
    ("family", "changes", "names"),
    [
        ("gptj", {"attn_bias": True}, ["attn-bias"]),
        ("gptj", {"mlp_bias": False}, ["no-mlp-bias"]),
        ("gptj", {"norm_bias": False}, ["no-norm-bias"]),
        ("gptj", {"head_bias": False}, ["no-head-bias"]),
        ("gptj", {"kv_heads": 2}, ["kv-heads 2"]),
        ("gptj", {"head_dim": 16}, ["head-dim 16", "rope-fraction 0.5"]),
        ("gptj", {"window": (8,)}, ["window 8"]),
        ("gptj", {"rope": (True, False, True)}, ["rope True False"]),
        ("gptj", {"rope_base": 500.0}, ["rope-base 500.0"]),
        ("gptj", {"rope_scaling": 2.0}, ["rope-scaling 2.0"]),
        ("gptj", {"rope_interleaved": False}, ["no-rope-interleaved"]),
        ("gptj", {"activation": "swiglu"}, ["activation swiglu"]),
        ("gptj", {"logit_scale": 0.5}, ["logit-scale 0.5"]),
        ("gptj", {"block": "serial"}, ["block serial"]),
        (
            "gptj",
            {"norm": "rmsnorm", "norm_bias": False},
            ["norm rmsnorm", "no-norm-bias"],
        ),
        ("cohere2", {"window": (5, 6, 5, None)}, ["window 5 6 5 None"]),
        ("cohere2", {"rope": (True,)}, ["rope True"]),
        ("cohere2", {"window": (5,)}, ["rope True True True False"]),
        ("cohere2", {"mlp_bias": True}, ["mlp-bias"]),
        ("cohere2", {"norm_bias": True}, ["norm-bias"]),
        ("cohere2", {"head_bias": True}, ["head-bias"]),
        ("cohere2", {"rope_fraction": 0.5}, ["rope-fraction 0.5"]),
        ("cohere2", {"activation": "gelu"}, ["activation gelu"]),
        ("llama", {"window": (5,)}, ["window 5"]),
        ("llama", {"norm": "layernorm"}, ["norm layernorm"]),
        ("llama", {"logit_scale": 2.0}, ["logit-scale 2.0"]),
        ("llama", {"rope_interleaved": True}, ["rope-interleaved"]),
        (
            "llama",
            {"head_bias": True, "rope_fraction": 0.5},
            ["head-bias", "rope-fraction 0.5"],
        ),
        ("llama", {"qk_norm": True}, ["qk-norm"]),
        ("llama", {"norm_zero_centred": True}, ["norm-zero-centred"]),
        ("llama", {"logit_soft_cap": 2.0}, ["logit-soft-cap 2.0"]),
        ("llama", {"embed_scale": 2.0}, ["embed-scale 2.0"]),
        ("llama", {"learned_positions": 9}, ["learned-positions 9"]),
        ("qwen2", {"qkv_bias": False}, ["no-qkv-bias"]),
        ("qwen3", {"attn_scale_width": 9.0}, ["attn-scale-width 9.0"]),
        ("gemma2", {"post_norms": False}, ["no-post-norms"]),
        ("gemma2", {"rope_windowed_base": 5.0}, ["rope-windowed-base 5.0"]),
        ("gemma3_text", {"attn_soft_cap": 5.0}, ["attn-soft-cap 5.0"]),
        ("gemma3_text", {"rope_windowed_base": None}, ["rope-windowed-base None"]),
        ("gpt2", {"rope": (True,)}, ["rope True"]),
        ("gpt2", {"attn_soft_cap": 5.0}, ["attn-soft-cap 5.0"]),
        ("mistral", {"window": (5, None)}, ["window 5 None"]),
        ("mistral", {"mlp_bias": True}, ["mlp-bias"]),
        ("mistral", {"attn_bias": True}, ["attn-bias"]),
    ],
)
def test_what_a_family_cannot_express_is_refused_by_its_flag(
    family, changes, names
) -> None:
    model = dataclasses.replace(small_model(family), **changes)
    with pytest.raises(ValueError, match=f"^{family} cannot express") as refused:
        hf_config(model, seq_len=64, family=family)
    message = str(refused.value)
    assert message.count("--model.") == 2 * len(names)
    assert all(f"\n  --model.{name};" in message for name in names)


def test_a_size_that_a_family_refuses_is_named() -> None:
    model = dataclasses.replace(small_model("llama"), d_model=30, head_dim=8)
    with pytest.raises(
        ValueError, match=r"llama cannot express.*hidden_size .*, got 30"
    ):
        hf_config(model, seq_len=64, family="llama")


def test_a_model_that_no_family_has_is_refused_with_the_reasons_of_each() -> None:
    with pytest.raises(ValueError, match="no family of Hugging Face") as refused:
        hf_config(ModelConfig(window=(64, None)), seq_len=64)
    for family in CONFIGS:
        assert f"{family} cannot express this model" in str(refused.value)
    assert "--model.window 64 None; llama would have --model.window None" in str(
        refused.value
    )


def test_a_family_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no family 'gpt9'; there are gptj, cohere2"):
        hf_config(ModelConfig(), seq_len=64, family="gpt9")


def test_a_model_without_windows_may_be_written_as_mistral_too() -> None:
    model = dataclasses.replace(small_model("mistral"), window=(None,))
    assert hf_config(model, seq_len=64)[0].name == "llama"
    _, config = hf_config(model, seq_len=64, family="mistral")
    assert config["sliding_window"] is None


def test_positions_do_not_matter_where_no_layer_has_any() -> None:
    model = dataclasses.replace(
        small_model("cohere2"), window=(None,), rope=(False,), rope_base=3.0
    )
    _, config = hf_config(model, seq_len=64, family="cohere2")
    assert set(config["layer_types"]) == {"full_attention"}
    assert config["sliding_window"] == 64


def test_a_share_of_a_head_gives_its_width_for_every_pair_of_widths() -> None:
    """98 x (2 / 98) is below 2 in floating point."""
    assert 98 * (2 / 98) < 2
    for head_width in range(2, 260):
        for rotated in range(2, head_width + 1, 2):
            share = fraction(rotated, head_width)
            assert int(head_width * share) // 2 * 2 == rotated
            assert share <= 1.0 + math.ulp(0.5)
