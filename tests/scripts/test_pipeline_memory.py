"""The memory of a pipelined step: the baseline is right, and ours does not grow."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest
from training import TINY, Layout, make_batch, make_program

from mjax.pipeline import run
from mjax.pipeline.config import PipelineConfig
from scripts import pipeline_memory

# Float32 sums of a few thousand products in another order.
TOLERANCE = 1e-5


@pytest.mark.parametrize("chunks", [1, 2])
def test_gpipe_by_autodiff_computes_what_the_executor_computes(chunks):
    layout = Layout((4, 1, 1, 1), 2, 4, PipelineConfig(chunks=chunks))
    model = dataclasses.replace(TINY, layers=4 * chunks)

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
