"""Stamps add no wait for collectives: schedules by hand, and one from XLA."""

import re

import pytest

from mjax.mesh.axes import AxisSizes
from scripts.observe.stamp_cost import (
    CASES,
    compare,
    compile_case,
    find_faults,
    read,
)

BIG, NUMBER = "f32[4096,4096]{1,0}", "s32[]"
LINES = {
    "start": f"%start = ({BIG}, {BIG}) collective-permute-start(%x), PAIRS",
    "done": f"%done = {BIG} collective-permute-done(%start)",
    "blocking": f"%blocking = {BIG} collective-permute(%x), PAIRS",
    "work": f"%work = {BIG} copy(%x)",
    "number": f"%number = {NUMBER} copy(%n)",
    "stamp": f"%stamp = {NUMBER} custom-call(%n), "
    'custom_call_target="mosaic_gpu_v2", metadata={op_name="step/stamp/call"}',
}
TP_2 = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=2)


def schedule(words: str):
    """Return a step of these instructions, in this order."""
    lines = "\n".join(f"  {LINES[word]}" for word in words.split())
    text = f"""HloModule written, is_scheduled=true, num_partitions=2

ENTRY %main (x: {BIG}, n: {NUMBER}) -> {BIG} {{
  %x = {BIG} parameter(0)
  %n = {NUMBER} parameter(1)
{lines}
  ROOT %out = {BIG} bitcast(%x)
}}
"""
    return read(text.replace("PAIRS", "source_target_pairs={{0,1},{1,0}}"), TP_2)


@pytest.mark.parametrize(
    ("plain", "stamped"),
    [
        ("start work done", "start work stamp done"),
        ("start work done", "stamp start work done"),
        ("start number done", "stamp number blocking"),
        ("blocking work", "start stamp done work"),
    ],
)
def test_a_stamp_or_the_copy_of_a_number_overlaps_nothing(plain, stamped):
    assert compare(schedule(plain), schedule(stamped)) == []


@pytest.mark.parametrize(
    "stamped", ["stamp blocking work", "start done stamp work", "start stamp done work"]
)
def test_a_longer_wait_for_a_collective_is_a_fault(stamped):
    (fault,) = compare(schedule("start work done"), schedule(stamped))
    assert re.match(r"compute waits 32\.\d us more for tp", fault)


@pytest.mark.plan
@pytest.mark.slow
def test_stamps_between_microbatches_add_no_wait():
    """A stamp that waited for reduced gradients took 16 us of overlap from them."""
    case = next(case for case in CASES if case.zero == 3)
    assert compile_case(case, stamps=True).launches["stamp"] == 8
    assert find_faults(case) == []
