"""Published models are read: their sizes, options and numbers of parameters."""

import dataclasses
from typing import Any

import pytest

from mjax.hugging_face import families
from mjax.hugging_face.families import hf_config, model_config
from mjax.model.counts import num_params
from tests.hugging_face.published import CONFIGS, NUM_PARAMS

by_name = pytest.mark.parametrize("name", CONFIGS)

GEMMA_3 = (512,) * 5 + (None,)


def test_there_is_a_published_model_of_each_family() -> None:
    named = {config["model_type"] for config in CONFIGS.values()}
    assert named == {family.name for family in families.FAMILIES}


@by_name
def test_a_published_model_has_as_many_parameters_as_its_weights(name: str) -> None:
    model = dataclasses.replace(model_config(CONFIGS[name]), vocab_multiple=1)
    assert num_params(model) == NUM_PARAMS[name]


@by_name
def test_a_published_model_can_be_written_in_its_family(name: str) -> None:
    model = model_config(CONFIGS[name])
    family = CONFIGS[name]["model_type"]
    _, written = hf_config(model, seq_len=1024, family=family)
    assert families.differences(model, model_config(written)) == {}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt-j-6b", {"rope_fraction": 0.25, "rope_interleaved": True}),
        ("command-r7b", {"logit_scale": 0.25, "rope": (True, True, True, False)}),
        ("llama-2-7b", {"rope_base": 10_000.0, "rope_scaling": 1.0}),
        (
            "llama-3.1-8b",
            {
                "rope_base": 500_000.0,
                "rope_type": "llama3",
                "rope_scaling": 8.0,
                "rope_slow_turns": 1.0,
                "rope_fast_turns": 4.0,
                "rope_original_len": 8192,
            },
        ),
        ("llama-3.2-1b", {"rope_scaling": 32.0, "head_dim": 64, "kv_heads": 8}),
        ("mistral-7b-v0.1", {"window": (4096,), "rope_base": 10_000.0}),
        ("mistral-7b-v0.3", {"window": (None,), "rope_base": 1_000_000.0}),
        ("qwen2.5-7b", {"qkv_bias": True, "window": (None,), "rope_base": 1e6}),
        ("qwen2.5-7b, long", {"rope_type": "yarn", "rope_original_len": 32768}),
        ("qwen3-0.6b", {"qk_norm": True, "head_dim": 128, "tie_embeddings": True}),
        (
            "gemma-2-27b",
            {
                "attn_scale_width": 144.0,
                "attn_soft_cap": 50.0,
                "logit_soft_cap": 30.0,
                "window": (4096, None),
                "post_norms": True,
                "embed_scale": 4608**0.5,
            },
        ),
        ("gemma-3-1b", {"rope_windowed_base": 10_000.0, "rope_base": 1_000_000.0}),
        ("gemma-3-270m", {"window": GEMMA_3, "logit_soft_cap": None}),
        ("gpt2", {"learned_positions": 1024, "rope": (False,), "d_ff": None}),
    ],
)
def test_options_of_a_published_model_are_those_that_it_says(
    name: str, fields: dict[str, Any]
) -> None:
    model = model_config(CONFIGS[name])
    assert {field: getattr(model, field) for field in fields} == fields
