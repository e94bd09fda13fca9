"""Lines on the attention of a run before it starts."""

import pytest

from mjax.config.step import PrecisionConfig
from mjax.config.train import TrainConfig
from mjax.kernels.target import Target
from mjax.model.config import ModelConfig
from mjax.run.report import describe_attention

HOPPER = Target(platform="gpu", device_kind="NVIDIA H200")


def lines(device: Target, head_dim: int, backward: str) -> list[str]:
    model = ModelConfig(
        layers=2,
        d_model=256,
        heads=2,
        head_dim=head_dim,
        window=(64, None),
        attention_backward=backward,  # pyright: ignore[reportArgumentType]
    )
    precision = PrecisionConfig(compute="bfloat16")
    return describe_attention(TrainConfig(model=model, precision=precision), device)


def test_a_backward_pass_that_is_not_deterministic_is_named_so():
    plain, fused = (
        lines(HOPPER, 128, backward) for backward in ("deterministic", "fused")
    )
    assert [line.partition(":")[0] for line in plain] == [
        "attention, window 64",
        "attention, window full",
    ]
    assert [line.partition(" (the fastest")[0] for line in fused] == [
        "attention, window 64, fused backward (not deterministic): mosaic_gpu",
        "attention, window full, fused backward (not deterministic): mosaic_gpu",
    ]


def test_a_fused_backward_pass_is_refused_before_the_run_begins():
    with pytest.raises(ValueError, match="head width 128 alone, got 64"):
        lines(HOPPER, 64, "fused")
    with pytest.raises(ValueError, match="the platform must be gpu, got cpu"):
        lines(Target(platform="cpu", device_kind="cpu"), 128, "fused")
