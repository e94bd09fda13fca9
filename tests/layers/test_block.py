"""The structure of a block, read from what JAX traces."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from tests.training import LENGTH, ONE_DEVICE, ROWS, TINY, make_program


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda v: isinstance(v, (Jaxpr, ClosedJaxpr)),
        ):
            inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            if isinstance(inner, Jaxpr):
                yield from equations(inner)


@pytest.mark.promotion(rank="allow")
@pytest.mark.parametrize(
    ("block", "activation", "num_projections"),
    [("parallel", "gelu", 2), ("parallel", "swiglu", 2), ("serial", "swiglu", 4)],
)
def test_projections_that_share_input_or_output_are_one_product(
    block, activation, num_projections
) -> None:
    """q, k, v and feed-forward in at once, attention and feed-forward out at once."""
    model = dataclasses.replace(
        TINY, block=block, activation=activation, attention="reference"
    )
    program = make_program(ONE_DEVICE, model)
    jaxpr = jax.make_jaxpr(program.eval_step)(
        program.abstract_state.params, program.abstract_batch
    )
    weights = [
        equation
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
        and equation.invars[1].aval.ndim == 2
        and equation.invars[0].aval.ndim == 4  # shards, rows, positions, width
    ]
    # One scan over the layers holds the block once; the head multiplies [BT, D].
    assert len(weights) == num_projections


@pytest.mark.promotion(dtype="standard", rank="allow")
def test_offload_keeps_the_input_of_each_block_in_host_memory_only() -> None:
    """Of the residual stream nothing but the host copies waits for the backward pass.

    XLA:CPU has one memory and drops the transfers, so they are read from the trace.
    """

    def stacked_residuals(remat: str) -> list[str]:
        model = dataclasses.replace(TINY, remat=remat, layers=5)
        program = make_program(ONE_DEVICE, model)
        trace = program.trace()
        shape = rf"\[5,{ROWS},{LENGTH},{TINY.d_model}\]"
        return re.findall(rf"f32(<\w+>)?{shape}", str(trace.jaxpr))

    assert set(stacked_residuals("full")) == {""}
    assert set(stacked_residuals("offload")) == {"<host>"}


@pytest.mark.promotion(dtype="standard", rank="allow")
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_joined_weights_never_wait_for_the_backward_pass(remat) -> None:
    """One stack of them would be a copy of all weights of the model."""
    model = dataclasses.replace(TINY, remat=remat, layers=5)
    program = make_program(ONE_DEVICE, model)
    trace = program.trace()
    width = 3 * TINY.d_model + TINY.ffn_width  # q | k | v | feed-forward in
    text = str(trace.jaxpr)
    assert f"f32[{TINY.d_model},{width}]" in text
    assert f"f32[5,{TINY.d_model},{width}]" not in text
    # The outputs of that product: one stack, or the parts it is split into, or none.
    keeps_product = f"f32[5,1,{ROWS},{LENGTH},{width}]" in text
    assert keeps_product is (remat == "dots")
