"""The line of a run on a model without a Hugging Face family, and its truth."""

import dataclasses

import pytest

from mjax.config.command_line import parse
from mjax.config.train import TrainConfig
from mjax.hugging_face.families import hf_config
from mjax.hugging_face.nearest import describe, nearest
from mjax.model.config import ModelConfig
from mjax.recipes import RECIPES
from tests.hugging_face.small import CONFIGS, small_model

MODELS = {
    "megascale": RECIPES["megascale-175b"]().model,
    "plain": ModelConfig(),
    "windows": ModelConfig(window=(64, 64, 64, None)),
    "llama, gelu": ModelConfig(block="serial", norm="rmsnorm"),
    "llama, window twice": ModelConfig(
        block="serial", norm="rmsnorm", activation="swiglu", window=(8, None)
    ),
    "gptj, no head bias": dataclasses.replace(small_model("gptj"), head_bias=False),
    "cohere2, scaled": dataclasses.replace(small_model("cohere2"), rope_fraction=0.5),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_flags_that_are_named_give_the_family(name: str):
    config = TrainConfig(model=MODELS[name])
    found = nearest(config.model, 64)
    assert found is not None
    words = [word for flag in found.instead for word in flag.split()]
    changed, _ = parse(words, {"demo": TrainConfig}, "test", base=config)
    family, _ = hf_config(changed.model, seq_len=64, family=found.family)
    assert family.name == found.family
    # The lacking flags are flags of this model, so giving them changes nothing.
    words = [word for flag in found.lacks for word in flag.split()]
    again, _ = parse(words, {"demo": TrainConfig}, "test", base=config)
    assert again == config


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "megascale",
            "export: this model has no Hugging Face form: cohere2 lacks "
            "--model.activation gelu, --model.no-rope-interleaved; --model.activation "
            "swiglu --model.rope-interleaved would make it cohere2",
        ),
        (
            "gptj, no head bias",
            "export: this model has no Hugging Face form: gptj lacks "
            "--model.no-head-bias; --model.head-bias would make it gptj",
        ),
    ],
)
def test_one_line_names_what_is_lacking_and_what_to_give(name: str, says: str):
    assert describe(MODELS[name], 64) == says


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_of_a_family_has_nothing_to_say(family: str):
    assert describe(small_model(family), 64) is None


def test_no_family_is_near_that_would_take_all_positions_away():
    """Cohere2, two flags away, has no positions in layers without a window."""
    model = ModelConfig(rope_interleaved=True, activation="gelu")
    found = nearest(model, 64)
    assert found is not None
    assert found.family != "cohere2"
    assert not any("--model.rope False" in flag for flag in found.instead)
