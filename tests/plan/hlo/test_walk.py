"""What runs is walked once, in order, with the loops around it."""

import pytest

from mjax.mesh.axes import AxisSizes
from mjax.plan.hlo.collectives import executed, list_collectives
from mjax.plan.hlo.counts import count_dot_flops
from mjax.plan.hlo.parse import Instruction, Module, parse
from mjax.plan.hlo.walk import walk

SIZES = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=2)
SUM = "f32[4] all-reduce(%x), replica_groups={{0,1}}"
DOT = "f32[] dot(%x, %x), lhs_contracting_dims={0}"
# A loop of five turns, in which a loop of three, a choice and a call follow.
MODULE = """HloModule walked, is_scheduled=true, num_partitions=2

%until (x: f32[4]) -> pred[] {
  %x = f32[4] parameter(0)
  CONDITION
  ROOT %out = pred[] constant(true)
}

%inner (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %dot = DOT
  ROOT %out = f32[4] bitcast(%x)
}

%plain (x: f32[4]) -> f32[4] {
  ROOT %x = f32[4] parameter(0)
}

%sums (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  ROOT %sum = SUM
}

%product (x: f32[4]) -> f32[] {
  %x = f32[4] parameter(0)
  ROOT %fused = DOT
}

%called (x: f32[4]) -> f32[] {
  %x = f32[4] parameter(0)
  ROOT %fusion = f32[] fusion(%x), kind=kLoop, calls=%product
}

%outer (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %again = f32[4] while(%x), condition=%until, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %choice = f32[4] conditional(%x, %x, %x), branch_computations={%plain, %sums}
  %call = f32[] call(%x), to_apply=%called
  ROOT %out = f32[4] bitcast(%x)
}

%scatter (x: f32[4]) -> f32[2] {
  %x = f32[4] parameter(0)
  ROOT %scattered = f32[2] reduce-scatter(%x), replica_groups={{0,1}}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %loop = f32[4] while(%x), condition=%until, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %start = ((f32[4]), f32[2]) async-start(%x), calls=%scatter
  %done = f32[2] async-done(%start)
  ROOT %out = f32[4] bitcast(%x)
}
"""  # noqa: E501


def text(condition: str = "%three = f32[] constant(3)") -> str:
    """Write the module, with an instruction for the conditions of its loops."""
    whole = MODULE.replace("CONDITION", condition)
    return whole.replace("SUM", SUM).replace("DOT", DOT)


def runs(module: Module) -> dict[str, int]:
    def follow(x: Instruction) -> tuple[str, ...]:
        return executed(x, module)

    return {
        site.instruction.name: site.runs()
        for site in walk(module, follow)
        if site.instruction.name not in ("x", "out")
    }


def test_the_order_is_that_of_execution_and_nested_loops_multiply():
    assert list(runs(parse(text())).items()) == [
        *(("loop", 1), ("again", 5), ("dot", 15)),
        *(("choice", 5), ("sum", 5), ("call", 5), ("fusion", 5)),
        *(("start", 1), ("done", 1)),
    ]


def test_a_walk_may_begin_inside_and_follow_less():
    module = parse(text())
    sites = walk(module, lambda x: (), start="outer")
    names = [site.instruction.name for site in sites]
    assert names == ["x", "again", "choice", "call", "out"]


def test_a_loop_of_unknown_length_is_refused_unless_the_caller_knows_it():
    module = parse(text().replace('{"n":"3"}', '{"m":"3"}'))
    (site,) = (
        site
        for site in walk(module, lambda x: executed(x, module))
        if site.instruction.name == "dot"
    )
    assert [loop.name for loop in site.loops] == ["loop", "again"]
    assert site.runs(unknown_trip_count=7) == 35
    with pytest.raises(ValueError, match="trip count of loop again is unknown"):
        site.runs()


def test_collectives_are_listed_once_with_every_branch_and_condition():
    """A wrapped one where it starts, and not again inside the computation it wraps."""
    found = list(list_collectives(parse(text(condition=f"%vote = {SUM}")), SIZES))
    placed = [(c.site.instruction.name, c.kind, c.num_loops) for c in found]
    assert sorted(set(placed)) == [
        ("start", "reduce-scatter", 0),
        ("sum", "all-reduce", 1),
        ("vote", "all-reduce", 1),
        ("vote", "all-reduce", 2),
    ]
    assert len(placed) == 4
    assert {c.axes for c in found} == {("tp",)}


def test_products_count_in_fusions_and_in_conditions_of_loops():
    one = 2 * 4
    assert count_dot_flops(text()) == (15 + 5) * one
    in_condition = text(condition=f"%test = {DOT}")
    assert count_dot_flops(in_condition) == (15 + 15 + 5 + 5) * one
