"""What the flags of adapters mean, and what they refuse."""

import dataclasses

import pytest

from mjax.config.lora import LoraConfig, adapters, linears
from mjax.config.train import TrainConfig, from_json, to_json
from mjax.mesh.axes import MeshConfig
from mjax.model.config import ModelConfig

GATED = ModelConfig(activation="swiglu")


def targets(*patterns: str, model: ModelConfig = GATED) -> tuple[str, ...]:
    found = adapters(LoraConfig(rank=4, targets=patterns), model)
    assert found is not None
    return found.targets


def test_a_pattern_takes_our_names_and_those_of_transformers():
    assert targets("*") == linears(GATED)
    assert targets("q_proj", "attention.wv") == ("attention.wq", "attention.wv")
    assert targets("mlp.*") == ("mlp.w_in", "mlp.w_gate", "mlp.w_out")
    assert targets("wo") == targets("o_proj") == ("attention.wo",)
    assert "mlp.w_gate" not in targets("*", model=ModelConfig())


def test_a_pattern_that_matches_nothing_is_refused_with_near_and_all_names():
    with pytest.raises(ValueError, match=r"qproj matches no linear.*mean q_proj") as e:
        targets("*_proj", "qproj")
    assert all(name in str(e.value) for name in linears(GATED))
    with pytest.raises(ValueError, match=r"gate_proj matches no linear layer"):
        targets("gate_proj", model=ModelConfig())


def test_the_scale_is_alpha_over_the_rank_and_no_rank_is_no_adapter():
    found = adapters(LoraConfig(rank=4, alpha=6.0), GATED)
    assert found is not None
    assert found.scale == 1.5
    assert adapters(LoraConfig(), GATED) is None


def test_a_rank_above_that_of_a_weight_is_refused_with_the_largest():
    model = ModelConfig(d_model=64, heads=4, kv_heads=1, d_ff=32, activation="swiglu")
    with pytest.raises(
        ValueError, match=r"at most 16, got 17: attention.w[kv] has sides"
    ):
        adapters(LoraConfig(rank=17), model)
    with pytest.raises(
        ValueError, match=r"at most 32, got 33: mlp.w_in has sides 64 and 32,"
    ):
        adapters(LoraConfig(rank=33, targets=("mlp.*", "wq")), model)
    assert adapters(LoraConfig(rank=64, targets=("wq",)), model) is not None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rank": 0}, "--lora.rank must be at least 1, got 0"),
        ({"rank": 1, "alpha": 0.0}, "--lora.alpha must be positive"),
        ({"rank": 1, "targets": ()}, "--lora.targets must name"),
        ({"rank": 1, "init_from": ""}, "--lora.init-from is empty"),
        ({"alpha": 8.0}, "--lora.alpha needs --lora.rank"),
        ({"init_from": "x"}, "--lora.init-from needs --lora.rank"),
    ],
)
def test_values_that_mean_nothing_are_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        LoraConfig(**fields)


def test_adapters_need_a_base_and_one_stage():
    lora = LoraConfig(rank=2)
    with pytest.raises(ValueError, match=r"but --init-from is absent"):
        TrainConfig(lora=lora)
    with pytest.raises(ValueError, match=r"needs --mesh.pp 1"):
        TrainConfig(lora=lora, init_from="x", mesh=MeshConfig(pp=2))
    config = TrainConfig(lora=lora, init_from="x")
    assert from_json(to_json(config)) == config
    assert dataclasses.replace(config, lora=LoraConfig()).adapters is None
