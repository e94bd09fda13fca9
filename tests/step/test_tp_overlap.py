"""A step whose activations cross tp in chunks is the step of one device."""

import dataclasses

import pytest

from mjax.config.sizes import check_sizes
from mjax.config.train import TrainConfig
from mjax.mesh.axes import AxisSizes, MeshConfig
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.plan.hlo.collectives import list_collectives
from mjax.plan.hlo.parse import parse
from mjax.step.program import Program
from tests.training import (
    EVERY_OPTION,
    ONE_DEVICE,
    TINY,
    Gradients,
    Layout,
    compile_gradients,
    gradients,
    largest_error,
    make_program,
    partition_of,
)

TOLERANCE = 1e-5

FOUR_LAYERS = dataclasses.replace(EVERY_OPTION, layers=4, rope=(True,), window=(6,))


def find_gradients(model: ModelConfig, layout: Layout) -> Gradients:
    program = make_program(layout, model)
    partition = partition_of(layout, model)
    return gradients(program, compile_gradients(program), partition)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (TINY, Layout((1, 1, 1, 8), 0, tp_chunks=8)),
        pytest.param(
            EVERY_OPTION,
            Layout((1, 1, 2, 4), 3, microbatches=2, tp_chunks=3),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            FOUR_LAYERS,
            Layout((2, 1, 1, 4), 1, 4, PipelineConfig(chunks=2), tp_chunks=4),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["parallel", "serial-zero3", "pipeline"],
)
def test_chunks_have_the_gradients_of_one_device(model: ModelConfig, layout: Layout):
    want = find_gradients(model, ONE_DEVICE)
    got = find_gradients(model, layout)
    error, leaf = largest_error(got, want)
    assert error < TOLERANCE, leaf
    assert got.loss == pytest.approx(want.loss, rel=TOLERANCE)


def kinds_of(text: str, program: Program) -> list[str]:
    found = list_collectives(parse(text), AxisSizes(**program.mesh.shape))
    return [c.kind for c in found]


def test_a_layer_sends_shards_and_gathers_nothing_at_once():
    """What is left over tp at once is the embedding and the head."""
    layout = Layout((1, 1, 1, 8), 0, tp_chunks=8)
    program = make_program(layout, TINY)
    text = compile_gradients(program).as_text()
    kinds = kinds_of(text, program)
    at_once = Layout((1, 1, 1, 8), 0)
    plain = compile_gradients(make_program(at_once, TINY)).as_text()
    plain_kinds = kinds_of(plain, program)
    assert "collective-permute" not in plain_kinds
    assert "collective-permute" in kinds
    for kind in ("all-gather", "reduce-scatter"):
        assert kinds.count(kind) < plain_kinds.count(kind)


def test_an_idle_stage_that_skips_would_leave_the_others_waiting():
    config = TrainConfig(
        mesh=MeshConfig(pp=2, tp=4, tp_overlap="chunks"),
        pipeline=PipelineConfig(idle="skip"),
    )
    sizes = AxisSizes(pp=2, dp_replicate=1, dp_shard=1, tp=4)
    with pytest.raises(ValueError, match=r"idle skip .*the other stages would wait"):
        check_sizes(config, sizes)
