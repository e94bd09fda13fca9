"""Transfers between stages hide behind both slots; compiles for H200s without one."""

import dataclasses
import re
from collections.abc import Callable

import pytest

from mjax.step import Program
from scripts.hlo_schedule import Body, Collective, read_bodies
from scripts.pipeline_overlap import (
    CASES,
    accumulator_shapes,
    compile_gradients,
    find_faults,
    steady_body,
)

SIZES = CASES[0].sizes


@pytest.fixture(scope="module")
def program() -> Program:
    return CASES[0].build()


@pytest.fixture(scope="module")
def bodies(program: Program) -> list[Body]:
    return read_bodies(compile_gradients(program))


@pytest.mark.plan
def test_transfers_stand_beside_every_product_of_the_steady_loop(program, bodies):
    assert find_faults(bodies, program, SIZES) == []


def change_transfers(body: Body, **changes) -> Body:
    changed = tuple(
        dataclasses.replace(c, **changes) if c.pairs else c for c in body.collectives
    )
    return dataclasses.replace(body, collectives=changed)


def add_dp_collective(body: Body) -> Body:
    gather = Collective(
        kind="all-gather",
        axes=("dp_shard",),
        pairs=(),
        is_async=True,
        products=2,
        kernels=0,
    )
    return dataclasses.replace(body, collectives=(*body.collectives, gather))


@pytest.mark.plan
@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda body: change_transfers(body, products=0), "transfer is exposed"),
        (lambda body: change_transfers(body, is_async=False), "transfer is exposed"),
        (lambda body: change_transfers(body, products=1), "beside 2 of the"),
        (add_dp_collective, "in the steady loop: .*dp_shard"),
    ],
)
def test_a_schedule_that_is_worse_is_found(
    spoil: Callable[[Body], Body], fault: str, program, bodies
):
    steady = steady_body(bodies, SIZES)
    spoilt = [spoil(body) if body is steady else body for body in bodies]
    assert any(re.search(fault, text) for text in find_faults(spoilt, program, SIZES))


@pytest.mark.plan
def test_a_copied_accumulator_is_found(program, bodies):
    shape = sorted(accumulator_shapes(program))[0]
    spoilt = [dataclasses.replace(body, copies=(shape,)) for body in bodies]
    faults = find_faults(spoilt, program, SIZES)
    assert any("copies a gradient accumulator" in fault for fault in faults)
