"""Lines on the pipeline of a run before it starts, number by number."""

from typing import Any

import pytest

from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.config.train import TrainConfig
from mjax.data.config import DataConfig
from mjax.estimate import memory
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.run.report_pipeline import describe


def lines(
    pipeline: PipelineConfig,
    *,
    layers: int = 16,
    microbatches: int = 8,
    stash: int = 0,
    **sizes: int,
) -> list[str]:
    config = TrainConfig(
        model=ModelConfig(layers=layers, d_model=256),
        batch=BatchConfig(size=4 * microbatches, microbatches=microbatches),
        data=DataConfig(seq_len=512),
        precision=PrecisionConfig(compute="bfloat16"),
        pipeline=pipeline,
    )
    axes = AxisSizes(**({"pp": 4, "dp_replicate": 1, "dp_shard": 1, "tp": 1} | sizes))
    needed = memory.Estimate(
        state=0, compute_copy=0, gradients=0, stash=stash, working_set=0
    )
    return list(describe(config, axes, needed))


def test_every_number_of_an_interleaved_pipeline_is_said():
    # [b, T/tp, D] = [2, 256, 256] bfloat16 are 256 KiB; 2 x 8 forward half-ticks per
    # stage. The outputs of the last virtual stage are not sent.
    said = lines(PipelineConfig(chunks=2), stash=11 * 2**20, dp_shard=2, tp=2)
    assert said == [
        "pipeline: interleaved-1f1b, 4 stages x 2 virtual, 8 microbatches; 26 ticks: 7 "
        "forward only, 12 of both, 7 backward only",
        "bubble: 18.8% of the ideal time, counted from the schedule; (P - 1) / (v M) = "
        "18.8%",
        "layers: 2 per virtual stage",
        "idle half-ticks: skip (auto: devices of a CPU share its cores)",
        "stash: residuals, 11 buffer entries x 1.0 MiB = 11.0 MiB on every stage; in "
        "flight on stages 0 to 3: 11, 9, 7, 5",
        "sent forward, activations of 256.0 KiB: 16, 16, 16, 8 per step from each "
        "device of stages 0 to 3, at most 4.0 MiB; in fact 4.8 MiB from each, because "
        "the whole ring sends in all 19 ticks",
        "sent backward, gradients of 256.0 KiB: 8, 16, 16, 16 per step from each "
        "device of stages 0 to 3, at most 4.0 MiB; in fact 4.8 MiB from each, because "
        "the whole ring sends in all 19 ticks",
        "over dp 2, ZeRO 2: weights are gathered and gradients reduced in pieces while "
        "the stages compute; the first virtual stage gathers in the first tick and "
        "reduces in the last tick",
    ]


@pytest.mark.parametrize(
    ("pipeline", "given", "expected"),
    [
        (
            PipelineConfig(uneven_layers=True),
            {"layers": 14},
            "layers: 4 per virtual stage, but 3 in virtual stage 0, 3",
        ),
        (PipelineConfig(idle="compute"), {}, "idle half-ticks: compute (as requested)"),
        (
            PipelineConfig(),
            {"microbatches": 2},
            "warning: --batch.microbatches 2 is less than --mesh.pp 4: the stages are "
            "never all busy, and idle time is 150% of the ideal time; give more "
            "microbatches or fewer stages",
        ),
        (
            PipelineConfig(chunks=4),
            {"pp": 1},
            "sent between stages: nothing, there is one stage",
        ),
        (
            PipelineConfig(),
            {},
            "over dp: no communication, its size is 1",
        ),
        (
            PipelineConfig(),
            {"dp_replicate": 2},
            "over dp 2, ZeRO 2: gradients are reduced layer by layer in the last tick",
        ),
        (
            PipelineConfig(),
            {"dp_shard": 2},
            "over dp 2, ZeRO 2: weights are gathered layer by layer in the first tick "
            "and gradients are reduced layer by layer in the last tick",
        ),
        (
            PipelineConfig(chunks=2),
            {"dp_replicate": 2},
            "over dp 2, ZeRO 2: gradients are reduced in pieces while the stages "
            "compute; the first virtual stage reduces in the last tick",
        ),
        (
            PipelineConfig(schedule="gpipe", stash="input", uneven_layers=True),
            {"pp": 1},
            "no pipeline, since --mesh.pp and --pipeline.chunks are 1; ignored: "
            "--pipeline.schedule, --pipeline.stash, --pipeline.uneven-layers",
        ),
    ],
)
def test_what_is_special_is_said(
    pipeline: PipelineConfig, given: dict[str, Any], expected: str
):
    assert expected in lines(pipeline, **given)


def test_a_run_without_a_pipeline_says_nothing_of_one():
    assert lines(PipelineConfig(), pp=1) == []
