"""How often tracing a step traces the backward pass of a layer."""

from typing import Any
from unittest import mock

import jax
import pytest

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.model.config import ModelConfig
from mjax.step.program import Program, build_program
from mjax.trace.vjp import SplitVJP


def count_traces() -> Any:
    """Patch `SplitVJP`, which traces a layer when it is made, to count its objects."""
    make = SplitVJP.__init__
    return mock.patch.object(SplitVJP, "__init__", autospec=True, side_effect=make)


@pytest.fixture(scope="module")
def program() -> Program:
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=2, tp=1)
    mesh = build_mesh(sizes, devices=jax.devices()[:2])
    return build_program(
        model=ModelConfig(layers=4, d_model=32, heads=2, vocab_size=64),
        optimizer=OptimConfig(),
        batch=BatchConfig(size=2),
        precision=PrecisionConfig(compute="float32"),
        seq_len=8,
        num_steps=10,
        seed=0,
        zero_level=2,
        isolate_documents=True,
        mesh=mesh,
    )


def test_forward_and_backward_pass_share_the_traces_of_a_layer(program: Program):
    """One for the layers in the loop, one for the last, which is outside of it."""
    with count_traces() as traced:
        program.trace()
    assert traced.call_count == 2


def test_evaluation_traces_no_backward_pass(program: Program):
    state = program.abstract_state
    with count_traces() as traced:
        program.eval_step.lower(state.params, program.abstract_batch)
    assert traced.call_count == 0
