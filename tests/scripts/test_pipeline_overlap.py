"""Transfers between stages hide behind both slots; compiles for H200s without one."""

import dataclasses
import re
from collections.abc import Callable

import pytest

from mjax.plan.hlo.analysis import Analysis, analyse
from mjax.plan.hlo.parse import Instruction, Module, parse
from mjax.step.program import Program
from scripts.pipeline.pipeline_overlap import (
    CASES,
    accumulator_shapes,
    compile_gradients,
    find_faults,
    inside,
    steady_body,
)


@pytest.fixture(scope="module")
def program() -> Program:
    return CASES[0].build()


@pytest.fixture(scope="module")
def module(program: Program) -> Module:
    return parse(compile_gradients(program))


@pytest.fixture(scope="module")
def analysis(module: Module) -> Analysis:
    return analyse(module, CASES[0].sizes)


@pytest.mark.plan
def test_transfers_stand_beside_every_product_of_the_steady_loop(
    module, analysis, program
):
    assert find_faults(module, analysis, program) == []


def change_transfers(analysis: Analysis, **changes) -> Analysis:
    steady = steady_body(analysis)
    changed = tuple(
        dataclasses.replace(c, **changes)
        if c.computation == steady and c.role == "pp"
        else c
        for c in analysis.collectives
    )
    return dataclasses.replace(analysis, collectives=changed)


def add_dp_collective(analysis: Analysis) -> Analysis:
    one = inside(analysis, steady_body(analysis))[0]
    gather = dataclasses.replace(one, kind="all-gather", axes=("dp_shard",))
    collectives = (*analysis.collectives, gather)
    return dataclasses.replace(analysis, collectives=collectives)


@pytest.mark.plan
@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda a: change_transfers(a, products=0), "transfer is exposed"),
        (lambda a: change_transfers(a, is_async=False), "transfer is exposed"),
        (lambda a: change_transfers(a, products=1), "overlap 2 of the"),
        (add_dp_collective, "in the steady loop: .*dp_shard"),
    ],
)
def test_a_schedule_that_is_worse_is_found(
    spoil: Callable[[Analysis], Analysis], fault: str, module, analysis, program
):
    faults = find_faults(module, spoil(analysis), program)
    assert any(re.search(fault, text) for text in faults)


@pytest.mark.plan
def test_a_copied_accumulator_is_found(module, analysis, program):
    copy = Instruction(
        name="planted",
        opcode="copy",
        shape=next(iter(accumulator_shapes(program))),
        operands=(),
        literal="",
        attributes={},
        is_root=False,
    )
    entry = module.computations[module.entry]
    spoilt = dataclasses.replace(entry, instructions=(*entry.instructions, copy))
    computations = {**module.computations, module.entry: spoilt}
    changed = dataclasses.replace(module, computations=computations)
    faults = find_faults(changed, analysis, program)
    assert any("copies a gradient accumulator" in fault for fault in faults)
