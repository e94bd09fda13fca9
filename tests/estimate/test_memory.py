"""The memory estimate: compared with the compiler's, and its refusals."""

import dataclasses
import re
from typing import Any

import jax
import pytest

from mjax.config.sizes import smaller
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.config.train import TrainConfig
from mjax.estimate import memory
from mjax.mesh.axes import AxisSizes, MeshConfig
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.pipeline.model import STASH
from mjax.step.program import Program, build_program
from tests.training import make_mesh

MODEL = ModelConfig(layers=4, d_model=128, heads=4, vocab_size=512)
ROWS, LENGTH, MICROBATCHES = 32, 128, 4


def program(
    *,
    pp: int = 1,
    dp: int = 1,
    remat: Any = "none",
    microbatches: int = MICROBATCHES,
    pipeline: PipelineConfig,
) -> Program:
    return build_program(
        model=dataclasses.replace(MODEL, remat=remat),
        optimizer=TrainConfig().optim,
        batch=BatchConfig(size=ROWS, microbatches=microbatches),
        precision=PrecisionConfig(compute="float32"),
        seq_len=LENGTH,
        num_steps=9,
        seed=0,
        zero_level=2,
        isolate_documents=False,
        mesh=make_mesh((pp, 1, dp, 1)),
        pipeline=pipeline,
    )


def estimate(
    of: Program, *, accumulates: bool = True, first: Any = None
) -> tuple[jax.stages.Traced, memory.Estimate]:
    step = of.trace()
    return step, memory.estimate(
        step,
        of.abstract_state,
        of.abstract_saved,
        compute="float32",
        reduce="float32",
        stash_name=STASH,
        zero_level=2,
        accumulates=accumulates,
        first=first,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "pipeline": PipelineConfig(chunks=2)},
        pytest.param(
            {
                "pp": 2,
                "dp": 2,
                "remat": "full",
                "pipeline": PipelineConfig(stash="input"),
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"dp": 2, "remat": "dots", "pipeline": PipelineConfig()},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"dp": 4, "remat": "full", "microbatches": 1, "pipeline": PipelineConfig()},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["interleaved", "input", "plain", "at once"],
)
def test_the_estimate_is_near_the_compilers(layout: dict[str, Any]):
    """Memory by the CPU compiler, which copies more and fuses less than for GPUs."""
    accumulates = layout.get("microbatches") != 1
    step, found = estimate(program(**layout), accumulates=accumulates)
    compiled: Any = step.lower().compile().memory_analysis()
    exact = (
        compiled.argument_size_in_bytes
        + compiled.output_size_in_bytes
        - compiled.alias_size_in_bytes
        + compiled.temp_size_in_bytes
    )
    assert 0.7 < found.total / exact < 1.1


def test_the_parts_whose_sizes_are_known_are_exact():
    of = program(pp=2, dp=2, pipeline=PipelineConfig(chunks=2, stash="input"))
    found = estimate(of)[1]
    leaves = jax.tree.leaves(of.abstract_state.params)
    blocks = sum(p.size for p in jax.tree.leaves(of.abstract_state.params["blocks"]))
    ends = sum(p.size for p in leaves) - blocks
    assert found.compute_copy == found.gradients == 4 * (blocks // 2 + ends)
    # Interleaved, P = v = 2: 2 (P - 1) + (v - 1) P + 1 inputs on the first stage.
    assert found.stash == 5 * (ROWS // 2 // MICROBATCHES) * LENGTH * 128 * 4
    assert 2 * found.state == pytest.approx(3 * 4 * (blocks // 2 + ends), rel=0.01)


def test_weights_gathered_before_the_step_are_counted():
    of = program(dp=2, microbatches=1, pipeline=PipelineConfig())
    table = of.abstract_state.params["embed"]["table"]
    found, more = (
        estimate(of, accumulates=False, first=first)[1] for first in (None, [table])
    )
    assert more.total == found.total + table.size // 2 * 4


def test_a_save_that_orders_the_layers_needs_room_for_its_copy(monkeypatch):
    """The step itself needs almost nothing here, so the save determines the peak."""
    of = program(pp=2, pipeline=PipelineConfig(chunks=2, stash="input"))
    monkeypatch.setattr(memory.liveness, "peak_bytes", lambda body, **_: 0)
    found = estimate(of)[1]
    blocks = jax.tree.leaves(of.abstract_state.params["blocks"])
    # Parameters and two moments of the layers of one stage, in float32.
    copy = 3 * 4 * sum(p.size for p in blocks) // 2
    assert found.total == found.state + copy


# --------------------------------------------------------------------- what is refused


def needs(total: int) -> memory.Estimate:
    return memory.Estimate(
        state=total, compute_copy=0, gradients=0, stash=0, working_set=0
    )


GIB = 2**30


def test_a_step_that_fits_is_not_compared_with_others():
    def nobody_asks() -> Any:
        raise AssertionError
        yield

    memory.check_fits(needs(GIB), GIB, nobody_asks())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            [6, 4, 3],
            "a step needs an estimated 8.0 GiB of device memory, and a device has "
            "4.0 GiB; --b fits, with 4.0 GiB",
        ),
        (
            [7, 6, 9],
            "a step needs an estimated 8.0 GiB of device memory, and a device has "
            "4.0 GiB; no --pipeline.stash, --model.remat, --batch.microbatches or "
            "--pipeline.schedule is enough (--b needs 6.0 GiB): split the model over "
            "more devices, by --mesh.pp, --mesh.tp or --mesh.dp-shard",
        ),
        (
            [9, 8, 8],
            "a step needs an estimated 8.0 GiB of device memory, and a device has "
            "4.0 GiB; no --pipeline.stash, --model.remat, --batch.microbatches or "
            "--pipeline.schedule is enough (no flag reduces it): split the model over "
            "more devices, by --mesh.pp, --mesh.tp or --mesh.dp-shard",
        ),
    ],
)
def test_a_step_that_does_not_fit_is_refused_with_the_first_that_does(
    sizes: list[int], message: str
):
    others = [
        (f"--{name}", needs(size * GIB))
        for name, size in zip("abc", sizes, strict=True)
    ]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        memory.check_fits(needs(8 * GIB), 4 * GIB, others)


def test_smaller_runs_are_offered_in_order_and_fit_the_mesh():
    config = TrainConfig(
        mesh=MeshConfig(pp=4),
        model=ModelConfig(layers=8, remat="dots"),
        batch=BatchConfig(size=32, microbatches=4),
        pipeline=PipelineConfig(chunks=2),
    )
    one = AxisSizes(pp=4, dp_replicate=1, dp_shard=2, tp=1)
    assert [words for words, _ in smaller(config, one)] == [
        "--pipeline.stash input",
        "--model.remat full",
        "--batch.microbatches 8",
        "--batch.microbatches 16",
        "--pipeline.stash input --model.remat full",
        "--pipeline.stash input --model.remat full --batch.microbatches 8",
        "--pipeline.stash input --model.remat full --batch.microbatches 16",
    ]


def test_all_changes_are_also_combined_without_the_memory_of_the_host():
    config = TrainConfig(
        model=ModelConfig(layers=8, remat="dots"), batch=BatchConfig(size=4)
    )
    plain = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    assert [words for words, _ in smaller(config, plain)] == [
        "--model.remat full",
        "--model.remat offload",
        "--batch.microbatches 2",
        "--batch.microbatches 4",
        "--model.remat full --batch.microbatches 2",
        "--model.remat full --batch.microbatches 4",
        "--model.remat offload --batch.microbatches 2",
        "--model.remat offload --batch.microbatches 4",
    ]


def test_gpipe_is_offered_1f1b_and_a_plain_run_no_pipeline():
    config = TrainConfig(
        model=ModelConfig(layers=8, remat="full"),
        batch=BatchConfig(size=4, microbatches=4),
        pipeline=PipelineConfig(schedule="gpipe", stash="input"),
    )
    staged = AxisSizes(pp=4, dp_replicate=1, dp_shard=1, tp=1)
    [(words, changed)] = smaller(config, staged)
    assert words == "--pipeline.schedule 1f1b"
    assert changed.pipeline == PipelineConfig(schedule="1f1b", stash="input")
    plain = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    # Without a pipeline only the inputs of layers can leave the device.
    assert [words for words, _ in smaller(config, plain)] == ["--model.remat offload"]


def test_bytes_are_written_in_a_unit_that_suits_them():
    sizes = [0, 1023, 1024, 5 * 2**19, 3 * GIB]
    written = ["0 B", "1023 B", "1.0 KiB", "2.5 MiB", "3.0 GiB"]
    assert [memory.in_units(size) for size in sizes] == written
