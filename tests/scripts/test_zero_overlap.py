"""ZeRO and HSDP hide behind compute on two nodes; compiles for H200s without one."""

import dataclasses
import re

import pytest

from mjax.plan.hlo.analysis import Analysis, Collective
from scripts.overlap.zero_overlap import TWO_NODES, Case, find_faults, read

pytestmark = pytest.mark.plan

LEVEL_2, LEVEL_3 = (
    next(c for c in TWO_NODES if c.level == level and c.microbatches == 1)
    for level in (2, 3)
)


@pytest.fixture(scope="module")
def level_2() -> Analysis:
    return read(LEVEL_2)


def in_loops(found: Analysis) -> list[Collective]:
    return [c for c in found.collectives if c.runs > 1]


def test_all_but_the_first_gathers_and_the_last_reductions_are_hidden(level_2):
    """And what crosses nodes is 1/8 of the gradients, once."""
    assert list(find_faults(LEVEL_2, level_2)) == []
    assert all(c.is_overlapped for c in in_loops(level_2))
    kinds = {(c.kind, c.tier) for c in in_loops(level_2)}
    assert kinds == {
        ("all-gather", "node"),
        ("reduce-scatter", "node"),
        ("all-reduce", "network"),
    }


@pytest.mark.slow
def test_zero_3_hides_its_gathers_in_both_passes():
    found = read(LEVEL_3)
    assert list(find_faults(LEVEL_3, found)) == []
    gathers = [c for c in in_loops(found) if c.kind == "all-gather"]
    assert len({c.computation for c in gathers}) == 2
    assert all(c.is_overlapped for c in in_loops(found))


def change(found: Analysis, kind: str, **changes) -> Analysis:
    changed = tuple(
        dataclasses.replace(c, **changes) if c.kind == kind else c
        for c in found.collectives
    )
    return dataclasses.replace(found, collectives=changed)


@pytest.mark.parametrize(
    ("kind", "changes", "fault"),
    [
        ("reduce-scatter", {"products": 0, "kernels": 0}, "are overlapped, less than"),
        ("reduce-scatter", {"tier": "network"}, "leaves the node"),
        ("all-gather", {"dtype": "f32"}, "a gather of f32"),
        ("all-reduce", {"tier": "node"}, "whole gradients"),
        ("all-reduce", {"runs": 24}, "bytes cross nodes"),
        ("all-reduce", {"axes": ("dp_replicate", "dp_shard")}, "crosses nodes over"),
    ],
)
def test_what_would_be_wrong_is_found(kind, changes, fault, level_2):
    case: Case = LEVEL_2
    faults = list(find_faults(case, change(level_2, kind, **changes)))
    assert any(re.search(fault, text) for text in faults), faults
