"""A step whose projections multiply in 8 bits: on any mesh, and near bfloat16."""

import dataclasses
import functools
from typing import Literal

import numpy as np
import pytest

from mjax.config.step import PrecisionConfig
from mjax.config.train import TrainConfig
from mjax.hardware.described import abstract_mesh
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.step.program import build_program
from mjax.step.traced import ingredients_of
from tests.training import (
    EVERY_OPTION,
    ONE_DEVICE,
    TINY,
    Gradients,
    Layout,
    compile_gradients,
    gradients,
    make_batch,
    make_program,
    partition_of,
)

SERIAL = dataclasses.replace(
    EVERY_OPTION, layers=4, rope=(True,), window=(6,), dropout=0.0
)


@functools.cache
def found(
    model: ModelConfig, layout: Layout, matmul: Literal["compute", "fp8"] = "fp8"
) -> Gradients:
    program = make_program(layout, model, compute="bfloat16", matmul=matmul)
    return gradients(program, compile_gradients(program), partition_of(layout, model))


def error(got: Gradients, want: Gradients) -> float:
    """Norm of the difference of all gradients over their norm."""
    a, b = (
        np.concatenate([leaf.ravel() for _, leaf in sorted(g.leaves.items())])
        for g in (got, want)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_gradients_in_8_bits_are_near_those_in_16():
    eight, sixteen = found(TINY, ONE_DEVICE), found(TINY, ONE_DEVICE, "compute")
    # Two layers of four matmuls in each pass, whose factors are off by 1/8 at most.
    assert 0.01 < error(eight, sixteen) < 0.25
    assert eight.loss == pytest.approx(sixteen.loss, rel=0.01)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(
            TINY, Layout((1, 1, 1, 8), 0, tp_chunks=8), marks=pytest.mark.slow
        ),
        pytest.param(
            SERIAL, Layout((1, 1, 2, 4), 3, microbatches=2), marks=pytest.mark.slow
        ),
        (TINY, Layout((2, 1, 2, 2), 2, 2, tp_chunks=2)),
        pytest.param(
            SERIAL,
            Layout((2, 1, 1, 4), 1, 4, PipelineConfig(chunks=2), tp_chunks=4),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["chunks", "serial-zero3", "pipeline", "interleaved"],
)
def test_gradients_in_8_bits_are_those_of_one_device(
    model: ModelConfig, layout: Layout
):
    got, want = found(model, layout), found(model, ONE_DEVICE)
    # Shards and microbatches round as the whole does, up to sums in another order:
    # where these move a value of 16 bits by one unit, some move to the next one of 8
    # bits, which is a part of what 8 bits differ from 16. A wrong scale is off by 1/2.
    assert error(got, want) < error(found(model, ONE_DEVICE, "compute"), want)
    assert got.loss == pytest.approx(want.loss, rel=2e-3)


def test_an_overflow_in_a_weight_skips_the_step():
    program = make_program(ONE_DEVICE, compute="bfloat16", matmul="fp8")
    state = program.init()
    weights = state.params["blocks"]["mlp"]
    weights["w_in"] = weights["w_in"].at[0, 0, 0].set(3.4e38)  # bfloat16: infinite
    before = np.asarray(weights["w_out"])
    after, metrics = program.train_step(state, make_batch(program, 0))
    assert not np.isfinite(metrics["loss"])
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(after.params["blocks"]["mlp"]["w_out"], before)


def test_a_gpu_without_fp8_is_refused_before_anything_is_traced():
    config = TrainConfig(precision=PrecisionConfig(matmul="fp8"))
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=8, tp=1)
    mesh = abstract_mesh(sizes, gpu="a100-80g")
    with pytest.raises(ValueError, match=r"A100.*8\.0; use --precision.matmul compute"):
        build_program(mesh=mesh, **ingredients_of(config, mesh))


def test_float32_is_refused_beside_8_bits():
    with pytest.raises(ValueError, match="compute bfloat16, got float32"):
        PrecisionConfig(compute="float32", matmul="fp8")
