"""The supervisor of chaos would notice a difference, and keeps its log."""

import dataclasses
import json
import math
import random

from scripts.faults import chaos
from scripts.faults.chaos_log import Fault, Generation, Settings, read_log

REFERENCE = {step: {"step": step, "loss": 5.0 / step} for step in (1, 2, 3)}


def rows():
    """The same, with what a run adds about its time."""
    return [
        row | {"step_s": 0.1 * row["step"], "ckpt_write_s": 0.5}
        for row in REFERENCE.values()
    ]


def test_rows_that_differ_in_time_only_are_the_same():
    assert chaos.differences(rows(), REFERENCE) == []
    assert chaos.differences(rows()[:2], REFERENCE) == []


def test_the_last_bit_of_a_loss_is_a_difference():
    changed = rows()
    changed[2]["loss"] = math.nextafter(changed[2]["loss"], 0)
    [found] = chaos.differences(changed, REFERENCE)
    assert found.startswith("row 3 differs")


def test_a_row_that_is_missing_or_twice_there_is_a_difference():
    for wrong in (rows()[1:], [*rows()[:2], *rows()[1:]]):
        assert "the rows are of the steps" in chaos.differences(wrong, REFERENCE)[-1]


def test_the_seed_says_what_is_done_and_every_aim_and_process_is_hit():
    faults = chaos.draw_faults(100, 5, random.Random(0))
    assert faults == chaos.draw_faults(100, 5, random.Random(0))
    assert faults != chaos.draw_faults(100, 5, random.Random(1))
    assert sum(fault.signal == 9 for fault in faults) == 100
    assert {fault.aim for fault in faults} == {*chaos.AIMS}
    assert {fault.rank for fault in faults} == {0, 1, 2, 3}


def test_the_log_comes_back_as_it_was_written(tmp_path):
    settings = Settings(kills=1, terms=0, steps=3, seed=0)
    generation = Generation(
        commit="abc",
        run=0,
        fault=Fault(aim="save", signal=9, rank=2, count=1, share=0.5, grace_s=0.0),
        phase="save",
        codes=[-9, -9, -9, -9],
        resumed=2,
        committed=[2],
        unfinished=["4.unfinished-1"],
        first_row=3,
        last_row=3,
        recomputed=0,
        problems=[],
        wall_s=1.5,
        cpu_s=2.5,
    )
    path = tmp_path / "log.jsonl"
    lines = [json.dumps(dataclasses.asdict(one)) for one in (settings, generation)]
    path.write_text("\n".join(lines) + "\n")
    assert read_log(path) == (settings, [generation])
