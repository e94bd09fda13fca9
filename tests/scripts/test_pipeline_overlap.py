"""Both half-ticks overlap the transfers between stages, compiled for H200s."""

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
    transfers,
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
def test_transfers_overlap_every_matmul_of_the_steady_loop(module, analysis, program):
    assert find_faults(module, analysis, program) == []
    steady = steady_body(analysis)
    overlapping = [x.products for x in transfers(analysis, steady).values()]
    # The first stage alone runs the other two, of the embedding's gradient.
    assert sum(overlapping) == analysis.work[steady].products - 2


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
        (lambda a: change_transfers(a, flops=0), "transfer is exposed"),
        (lambda a: change_transfers(a, is_async=False), "transfer is exposed"),
        (lambda a: change_transfers(a, wire_bytes=10**12), "transfer is exposed"),
        (add_dp_collective, "in the steady loop: .*dp_shard"),
    ],
)
def test_a_schedule_that_is_worse_is_found(
    spoil: Callable[[Analysis], Analysis], fault: str, module, analysis, program
):
    faults = find_faults(module, spoil(analysis), program)
    assert any(re.search(fault, text) for text in faults)


@pytest.mark.plan
def test_a_transfer_that_is_awaited_at_once_is_found(module, analysis, program):
    steady = steady_body(analysis)
    computation = module.computations[steady]
    starts = {x.name for x in inside(analysis, steady) if x.is_async}
    ends = {computation.done_of[name] for name in starts}
    moved = []
    for x in computation.instructions:
        if x.name not in ends:
            moved.append(x)
        if x.name in starts:
            end = computation.places[computation.done_of[x.name]]
            moved.append(computation.instructions[end])
    spoilt = dataclasses.replace(computation, instructions=tuple(moved))
    changed = dataclasses.replace(
        module, computations={**module.computations, steady: spoilt}
    )
    faults = find_faults(changed, analyse(changed, CASES[0].sizes), program)
    assert sum("transfer is exposed" in fault for fault in faults) == 2
    assert any("10 of the 12 matmuls" in fault for fault in faults)


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
