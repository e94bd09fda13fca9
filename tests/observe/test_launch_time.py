"""The time of a launched run by its events, against one that was worked out by hand."""

import pytest

from mjax.launch.supervisor import State
from mjax.observe import events, launch_time
from mjax.observe.events import Event
from mjax.observe.launch_time import seconds
from mjax.processes.progress import Phase


def event(second, kind, generation, text="", rank=None, **data):
    return Event(
        time_ns=int(second * 1e9),
        kind=kind,
        generation=generation,
        text=text,
        rank=rank,
        data=data,
    )


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
    first.data["spent_s"]["step"] = 45.0
    second = times(100, 2, start=16, step=30, compile=2.0, exit=1.0, phase="exit")
    second.data["spent_s"]["step"] = 14.0
    told = [
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
    found = {bucket: s for bucket, s in seconds(told).items() if s}
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
    told = [
        event(0, "host", 0),
        state(0, 1, "running"),
        times(9, 1, start=0, step=8, silent=3.5, build=5.0),
        event(9, "end", 1),
    ]
    found = seconds(told)
    assert (found["host silent"], found["unexplained"]) == (3.5, pytest.approx(0.5))


def test_a_generation_that_took_no_step_loses_none():
    told = [
        event(0, "host", 0),
        state(1, 1, "running"),
        times(9, 1, start=0, step=8, compile=2.0, phase="step"),
        state(9, 2, "running"),
        times(11, 2, start=-1, step=0, build=2.0, phase="build"),
        state(11, 3, "running"),
        times(14, 3, start=6, step=8, build=1.0, exit=2.0, phase="exit"),
        event(14, "end", 3),
    ]
    told[2].data["spent_s"]["step"] = 6.0
    found = seconds(told)
    assert found["lost steps"] == pytest.approx(1.5)
    assert found["productive steps"] == pytest.approx(4.5)
    assert found["unexplained"] == pytest.approx(0.0)


def test_a_start_that_goes_far_back_loses_the_steps_of_all_before_it():
    told = [event(0, "host", 0)]
    for number, (begin, start, step) in enumerate([(0, 0, 20), (30, 16, 18)], start=1):
        told += [state(begin, number, "running")]
        spent = times(begin + 10, number, start=start, step=step)
        spent.data["spent_s"]["step"] = 10.0
        told += [spent]
    told += [state(40, 3, "running"), times(50, 3, start=10, step=20)]
    told[-1].data["spent_s"]["step"] = 10.0
    told += [event(50, "end", 3)]
    found = seconds(told)
    assert found["lost steps"] == pytest.approx(5.0 + 10.0)
    assert found["productive steps"] == pytest.approx(5.0 + 10.0)


def test_a_long_exit_is_no_hang_unless_stacks_were_asked_for():
    last = times(14, 1, start=0, step=8, age=4.0, phase="exit", exit=4.0)
    told = [state(1, 1, "running"), last, state(14, 1, "ended")]
    found = seconds(told)
    assert found["exit"] == 4.0
    assert "hung" not in found
    found = seconds([told[0], state(10, 1, "collecting stacks"), *told[1:]])
    assert (found["exit"], found["hung"]) == (0.0, 4.0)


def test_the_states_are_those_of_the_driver():
    names = ("GATHERING", "RUNNING", "STACKS", "STOPPING", "ENDED")
    for name in names:
        assert getattr(launch_time, name) == State[name]


def test_what_others_than_the_driver_say_is_passed_over():
    told = [state(1, 1, "running"), event(3, "end", 1)]
    other = Event(time_ns=2, source="health", kind="state", text="ended")
    assert seconds([told[0], other, told[1]]) == seconds(told)


def test_events_of_two_journals_are_refused():
    told = [state(1, 3, "running"), state(2, 3, "ended"), state(3, 1, "running")]
    with pytest.raises(ValueError, match="goes back from generation 3 to 1"):
        seconds(told)


def test_events_without_a_state_are_refused():
    with pytest.raises(ValueError, match="no launch ran there"):
        seconds([event(0, "host", 0)])


def test_times_that_cannot_be_read_are_refused():
    bad = times(9, 1, start=0, step=8)
    bad.data["spent_s"] = {"step": "much"}
    with pytest.raises(ValueError, match="generation 1: the event times cannot be"):
        seconds([state(1, 1, "running"), bad])


def test_a_line_that_is_no_event_is_reported_and_one_that_is_cut_off_is_not(tmp_path):
    (tmp_path / "events.jsonl").write_text(
        '{"time_ns": 1, "kind": "host"}\n{"kind": "host"}\n{"time_ns": 2, "ki'
    )
    found, problems = events.read(tmp_path)
    assert [one.time_ns for one in found] == [1]
    assert len(problems) == 1
    assert "line 2 is left out" in problems[0]


def test_a_run_without_events_has_none(tmp_path):
    assert events.read(tmp_path) == ([], [])
