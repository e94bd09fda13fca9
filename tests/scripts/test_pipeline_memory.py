"""The memory of a pipelined step: the baseline is right, and ours does not grow."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from mjax.hardware.described import described_mesh
from mjax.mesh.axes import AxisSizes
from mjax.pipeline import run
from mjax.pipeline.config import PipelineConfig
from scripts.pipeline import pipeline_memory
from tests.training import TINY, Layout, make_batch, make_program

# Float32 sums of a few thousand products in another order.
TOLERANCE = 1e-5


@pytest.mark.slow
def test_gpipe_by_autodiff_computes_what_the_executor_computes():
    layout = Layout((4, 1, 1, 1), 2, 4, PipelineConfig(chunks=2))
    model = dataclasses.replace(TINY, layers=8)

    def gradients() -> tuple:
        program = make_program(layout, model)
        state = program.init()
        return program.gradients(
            state.params, state.rng, state.step, make_batch(program, 0)
        )

    want = gradients()
    executor = mock.Mock(side_effect=pipeline_memory.gradients_by_autodiff)
    with mock.patch.object(run, "gradients", executor):
        got = gradients()
    executor.assert_called_once()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.plan
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_memory_of_interleaved_1f1b_does_not_grow_with_the_microbatches():
    mesh = described_mesh(AxisSizes(pp=4, dp_replicate=1, dp_shard=1, tp=1))
    few, many = (
        pipeline_memory.compile_step(pipeline_memory.OURS, m, mesh).temp_bytes
        for m in pipeline_memory.ENDS
    )
    assert many <= (1 + pipeline_memory.MAX_GROWTH) * few
