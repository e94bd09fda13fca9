"""The schedule of MegaScale's layer; compiles for H200s without one."""

from collections import Counter

import pytest

from scripts.overlap.tp_overlap import MERGED, Case, compile_case, find_faults


@pytest.mark.plan
def test_chunks_over_tp_hide_behind_products_and_nothing_else_does():
    """Bounds for forward, both, and at once; the control with merged products."""
    assert find_faults() == []
    assert compile_case(MERGED).overlapped < 0.95


@pytest.mark.plan
@pytest.mark.parametrize(("block", "pairs"), [("parallel", 1), ("serial", 2)])
def test_a_parallel_block_crosses_tp_once_and_a_serial_one_twice(block, pairs):
    found = compile_case(Case(block=block, tp_chunks=1))
    kinds = Counter(c.kind for c in found.in_layers)
    assert kinds == {"all-gather": pairs, "reduce-scatter": pairs}
    in_chunks = compile_case(Case(block="parallel")).in_layers
    one_shard = 2048 // 8 * 12_288 * 2
    assert [c.wire_bytes for c in in_chunks] == [one_shard] * 14
