"""The ledger of a launched run, against one that was worked out by hand."""

import pytest

from mjax.processes.progress import Phase
from scripts.faults.wall_time import ledger


def event(second, kind, generation, text="", rank=None, **data):
    return {
        "time_ns": int(second * 1e9),
        "kind": kind,
        "generation": generation,
        "text": text,
        "rank": rank,
        "data": data,
    }


def state(second, generation, text):
    return event(second, "state", generation, text)


def times(
    second, generation, *, start, step, age=0.0, phase="step", silent=0.0, **seconds
):
    spent = {phase.name.lower(): 0.0 for phase in Phase} | seconds
    facts = {"start_step": start, "step": step, "age_s": age, "phase": phase}
    facts["silent_s"] = silent
    return event(second, "times", generation, spent_s=spent, **facts)


def test_every_second_is_in_one_bucket():
    first = times(74, 1, start=0, step=20, age=5.0, compile=11.0, save=5.0)
    first["data"]["spent_s"]["step"] = 45.0
    second = times(100, 2, start=16, step=30, compile=2.0, exit=1.0, phase="exit")
    second["data"]["spent_s"]["step"] = 14.0
    events = [
        event(10, "host", 0),
        state(11, 1, "looking for ports"),
        state(12, 1, "running"),
        state(72, 1, "collecting stacks"),
        state(73, 1, "ending the ranks"),
        event(73.5, "rank_end", 1, rank=0),
        event(73.75, "rank_end", 1, rank=1),
        first,
        state(74, 1, "pausing before a restart"),
        state(75, 1, "waiting for hosts"),
        state(75, 2, "looking for ports"),
        state(76, 2, "running"),
        second,
        state(94, 2, "ended"),
        event(94, "end", 2),
    ]
    found = {bucket: s for bucket, s in ledger(events).items() if s}
    assert found == pytest.approx(
        {
            "driver: waiting for hosts": 1.0,
            "driver: looking for ports": 2.0,
            "driver: pausing before a restart": 1.0,
            "driver: ending the ranks": 0.5,
            "start: compile": 11.0,
            "restart: compile": 2.0,
            "hung": 5.0,
            "save": 5.0,
            "exit": 1.0,
            # 40 s of 20 steps, of which the second generation took the last 4 again.
            "lost steps": 8.0,
            "productive steps": 32.0 + 14.0,
            # 61.5 s from running to the end of rank 0, 61 s by its clock; 18 and 17.
            "unexplained": 1.5,
        }
    )
    assert sum(found.values()) == pytest.approx(84.0)


def test_the_silence_of_the_host_of_rank_0_is_told_apart():
    events = [
        event(0, "host", 0),
        state(0, 1, "running"),
        times(9, 1, start=0, step=8, silent=3.5, build=5.0),
        event(9, "end", 1),
    ]
    found = ledger(events)
    assert (found["host silent"], found["unexplained"]) == (3.5, pytest.approx(0.5))


def test_a_generation_that_took_no_step_loses_none():
    events = [
        event(0, "host", 0),
        state(1, 1, "running"),
        times(9, 1, start=0, step=8, compile=2.0, phase="step"),
        state(9, 2, "running"),
        times(11, 2, start=-1, step=0, build=2.0, phase="build"),
        state(11, 3, "running"),
        times(14, 3, start=6, step=8, build=1.0, exit=2.0, phase="exit"),
        event(14, "end", 3),
    ]
    events[2]["data"]["spent_s"]["step"] = 6.0
    found = ledger(events)
    assert found["lost steps"] == pytest.approx(1.5)
    assert found["productive steps"] == pytest.approx(4.5)
    assert found["unexplained"] == pytest.approx(0.0)
