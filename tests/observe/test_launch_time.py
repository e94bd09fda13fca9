"""The time of a launched run from its events, against times computed by hand."""

import msgspec
import pytest

from mjax.launch.supervisor import State
from mjax.observe import events, launch_time
from mjax.observe.events import Event
from mjax.observe.launch_time import counted
from mjax.processes.progress import Phase


def seconds(told):
    return counted(told).parts


def event(second, kind, generation, text="", rank=None, mono=None, **data):
    return Event(
        time_ns=int(second * 1e9),
        monotonic_ns=None if mono is None else int(mono * 1e9),
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
    second = times(94, 2, start=16, step=30, compile=2.0, exit=1.0, phase="exit")
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


def test_events_without_a_state_or_a_generation_are_refused():
    with pytest.raises(ValueError, match="no launch ran there"):
        seconds([event(0, "host", 0)])
    with pytest.raises(ValueError, match="a driver's event needs a generation"):
        seconds([state(1, 1, "running"), event(3, "host", None)])


def test_events_of_other_sources_are_not_counted():
    told = [state(1, 1, "running"), state(5, 1, "ended")]
    other = Event(time_ns=3, kind="port_flap", source="health.ports", generation=None)
    assert counted([told[0], other, told[1]]) == counted(told)


def test_times_that_cannot_be_read_are_refused():
    bad = times(9, 1, start=0, step=8)
    bad.data["spent_s"] = {"step": "much"}
    with pytest.raises(ValueError, match="generation 1: the event times cannot be"):
        seconds([state(1, 1, "running"), bad])


def test_a_line_that_is_no_event_and_one_that_is_cut_off_are_reported(tmp_path):
    (tmp_path / "events.jsonl").write_text(
        '{"time_ns": 1, "kind": "host"}\n{"kind": "host"}\n{"time_ns": 2, "ki'
    )
    found, problems = events.read(tmp_path)
    assert [one.time_ns for one in found] == [1]
    assert len(problems) == 2
    assert "line 2 is left out" in problems[0]
    assert "line 3 is left out: it has no end" in problems[1]


def test_a_run_without_events_has_none(tmp_path):
    assert events.read(tmp_path) == ([], [])


BOOT = "b00t"


def one_start(*, jump_s=0.0, jump_at_s=30.0, ahead_s=1000.0):
    """Return the events of a launch of 52 s, whose wall clock jumps once."""

    def at(second, kind, generation, text="", **data):
        jumped_s = jump_s if second >= jump_at_s else 0.0
        wall_s = 10_000 + second + jumped_s
        mono_s = second + ahead_s
        return event(wall_s, kind, generation, text, mono=mono_s, **data)

    spent = {phase.name.lower(): 0.0 for phase in Phase} | {"step": 40.0, "build": 5.0}
    facts = {"start_step": 0, "step": 20, "age_s": 0.1, "phase": "exit"}
    facts |= {"silent_s": 0.0, "asked_s": 4.25 + ahead_s}
    told = [
        at(1, "launch", 0, pid=1, age_s=1.0, boot=BOOT),
        at(2, "host", 0),
        at(3, "state", 1, "looking for ports"),
        at(4, "state", 1, "running"),
        at(20, "save", 1),
        at(49.5, "rank_end", 1, rank=0),
        at(50, "times", 1, spent_s=spent, **facts),
        at(50, "state", 1, "ended"),
        at(50, "end", 1),
        at(51, "closed", 1, pid=1, age_s=51.0, boot=BOOT),
    ]
    numbered = enumerate(told, start=1)
    return [msgspec.structs.replace(one, number=number) for number, one in numbered]


WHOLE = {
    "driver: starting": 1.0,
    "driver: waiting for hosts": 2.0,
    "driver: looking for ports": 1.0,
    "driver: order on its way": 0.25,
    "start: build": 5.0,
    "productive steps": 40.0,
    "driver: news of an end on its way": 0.25,
    "driver: ending the ranks": 0.5,
    "driver: leaving": 1.0,
}


def told_parts(found):
    return {part: part_s for part, part_s in found.parts.items() if abs(part_s) > 1e-6}


def test_orders_and_news_on_their_way_and_the_life_of_the_driver_are_parts():
    found = counted(one_start())
    assert told_parts(found) == pytest.approx(WHOLE)
    assert sum(found.parts.values()) == pytest.approx(51.0)
    assert (found.num_starts, found.num_lost_steps, found.problems) == (1, 0, ())


@pytest.mark.parametrize("jump_s", [-5.0, 100.0])
@pytest.mark.parametrize("jump_at_s", [3.5, 30.0, 50.5])
def test_a_wall_clock_that_jumps_changes_nothing_and_is_said(jump_s, jump_at_s):
    found = counted(one_start(jump_s=jump_s, jump_at_s=jump_at_s))
    assert told_parts(found) == pytest.approx(WHOLE)
    (problem,) = found.problems
    assert f"jumped by {jump_s:+.1f} s before event" in problem


@pytest.mark.parametrize("jump_s", [-5.0, 100.0])
def test_a_jump_is_not_hidden_where_there_is_no_second_clock(jump_s):
    told = [
        msgspec.structs.replace(one, monotonic_ns=None)
        for one in one_start(jump_s=jump_s)
    ]
    found = counted(told)
    # Without the monotonic clock orders cannot be placed: 0.5 s.
    assert found.parts["unexplained"] == pytest.approx(0.5 + jump_s)
    assert "s of generation 1 are not explained" in found.problems[-1]


def test_a_wall_clock_that_goes_back_between_two_events_is_said():
    told = [state(10, 1, "running"), state(5, 1, "ended")]
    found = counted(told)
    assert found.problems == (
        "the wall clock of the driver went back by 5.0 s before the event state of "
        "generation 1: the time between is unknown and counts as 0",
    )
    assert sum(found.parts.values()) == 0.0


@pytest.mark.parametrize("kind", ["state", "rank_end", "times", "save"])
def test_an_event_that_is_missing_is_said(kind):
    told = one_start()
    at = next(index for index, one in enumerate(told) if one.kind == kind)
    number = told[at].number
    found = counted(told[:at] + told[at + 1 :])
    assert any(f"no event {number}:" in problem for problem in found.problems)
    assert sum(found.parts.values()) == pytest.approx(51.0)


def test_a_start_without_its_event_is_said_where_events_have_no_number():
    told = [one for one in one_start() if one.text != "running"]
    found = counted([msgspec.structs.replace(one, number=None) for one in told])
    said = "generation 1 has no event of its start: its steps are not counted"
    assert found.problems == (said,)
    assert sum(found.parts.values()) == pytest.approx(51.0)


def test_small_times_that_are_not_explained_add_up():
    told = []
    for number in range(1, 11):
        told += [state(10 * number, number, "running")]
        told += [times(10 * number + 10, number, start=0, step=1, build=9.98)]
    found = counted([*told, state(110, 10, "ended")])
    assert found.parts["unexplained"] == pytest.approx(0.2)
    assert found.problems == ()
    told[-1].data["spent_s"]["build"] = 9.5
    found = counted([*told, state(110, 10, "ended")])
    assert "0.5 s of generation 10 are not explained" in found.problems[0]


def test_events_without_their_begin_are_said():
    found = counted(one_start()[2:])
    said = "events.jsonl begins with event 3: earlier time is not counted"
    assert found.problems == (said,)


def test_a_lost_event_of_the_times_leaves_its_generation_unexplained():
    told = [one for one in one_start() if one.kind != "times"]
    found = counted(told)
    assert found.parts["unexplained"] == pytest.approx(45.5)
    assert "45.5 s of generation 1 are not explained" in found.problems[-1]


def test_time_that_no_message_takes_is_unexplained():
    told = one_start()
    times = next(one for one in told if one.kind == "times")
    times.data["spent_s"]["step"] = 30.0
    found = counted(told)
    assert found.parts["unexplained"] == pytest.approx(10.25)
    assert found.parts["driver: order on its way"] == pytest.approx(0.25)


def again(told, second, **more):
    """Return the event with which a driver begins at a time of the monotonic clock."""
    facts = {"pid": 2, "age_s": 1.0, "boot": BOOT} | more
    last = told[-1]
    return event(
        *(second + 10_000, "launch", last.generation),
        mono=second + 1000.0,
        **facts,
    )


def test_time_between_two_launches_is_that_of_no_driver():
    told = one_start()
    told += [again(told, 81.0)]
    told += [event(10_083, "state", 2, "ended", mono=1083)]
    found = told_parts(counted(told))
    more = {"no driver": 29.0, "driver: starting": 2.0, "driver: ended": 2.0}
    assert found == pytest.approx(WHOLE | more)


@pytest.mark.parametrize("mono_s", [3.0, 5e6])
def test_a_run_on_another_machine_goes_on_by_the_wall_clock(mono_s):
    told = one_start()
    new = again(told, 81.0, boot="another")
    told += [msgspec.structs.replace(new, monotonic_ns=int(mono_s * 1e9))]
    told += [event(10_083, "state", 2, "ended", mono=mono_s + 2)]
    found = counted(told)
    more = {"no driver": 29.0, "driver: starting": 2.0, "driver: ended": 2.0}
    assert told_parts(found) == pytest.approx(WHOLE | more)
    assert found.problems == ()


def test_a_driver_is_not_older_than_the_end_of_the_one_before():
    told = one_start()
    told += [again(told, 81.0, age_s=500.0)]
    told += [event(10_083, "state", 2, "ended", mono=1083)]
    more = {"driver: starting": 1.0 + 30.0, "driver: ended": 2.0}
    assert told_parts(counted(told)) == pytest.approx(WHOLE | more)


def test_ranks_go_on_without_a_driver_and_the_time_after_their_end_is_its_own():
    """The driver is killed at 20 s; the rank ends at 49.25 s, a driver begins at 60."""
    told = one_start()[:5]
    told += [again(told, 61.0)]
    later = [
        event(10_061, "state", 1, "running", mono=1061),
        event(10_061.5, "rank_end", 1, rank=0, mono=1061.5),
        event(10_062, "times", 1, mono=1062, **one_start()[6].data),
        event(10_062, "state", 1, "ended", mono=1062),
    ]
    found = told_parts(counted(told + later))
    assert found["no driver"] == pytest.approx(60 - 49.25)
    assert found["driver: starting"] == pytest.approx(1.0 + 1.0)
    assert found["driver: news of an end on its way"] == pytest.approx(0.5)
    assert "unexplained" not in found
    assert found["productive steps"] == 40.0
    assert found["driver: ending the ranks"] == pytest.approx(0.5)


def test_a_rank_whose_end_was_seen_counts_where_rank_0_vanished():
    """Its agent was killed too, and another one knew nothing of rank 0."""
    last = times(40, 1, start=0, step=8)
    last.data["spent_s"]["step"] = 30.0
    told = [
        state(1, 1, "running"),
        event(31, "rank_end", 1, rank=1),
        state(31, 1, "ending the ranks"),
        msgspec.structs.replace(last, rank=1),
        state(40, 1, "ended"),
    ]
    found = seconds(told)
    assert found["driver: ending the ranks"] == pytest.approx(9.0)
    assert found["unexplained"] == pytest.approx(0.0)


def test_a_launch_that_has_begun_again_has_not_ended():
    told = one_start()
    assert launch_time.has_ended(told)
    assert not launch_time.has_ended([*told, again(told, 81.0)])


def test_lost_steps_are_counted():
    told = [state(0, 1, "running"), times(10, 1, start=0, step=20)]
    told += [state(10, 2, "running"), times(20, 2, start=16, step=18)]
    told += [state(20, 3, "running"), times(30, 3, start=10, step=30)]
    found = counted([*told, event(30, "end", 3)])
    assert (found.num_starts, found.num_lost_steps) == (3, 10 + 2)


def test_a_driver_that_is_killed_between_starts_leaves_time_without_a_driver():
    told = one_start()[:3]
    told += [event(10_003.5, "host", 1, mono=1003.5)]
    told += [again(told, 81.0), event(10_082, "state", 1, "ended", mono=1082)]
    assert told_parts(counted(told)) == pytest.approx(
        {
            "driver: starting": 1.0 + 1.0,
            "driver: waiting for hosts": 2.0,
            "driver: looking for ports": 0.5 + 1.0,
            "no driver": 80.0 - 3.5,
        }
    )


def two_generations(**first):
    """The first takes 20 steps in 10 s, the second begins at step 16."""
    told = [state(0, 1, "running"), times(15, 1, start=0, step=20, **first)]
    told[1].data["spent_s"]["step"] = 10.0
    last = times(30, 2, start=16, step=30, build=15.0)
    return [*told, state(15, 2, "running"), last, event(30, "end", 2)]


def test_spans_know_how_long_the_steps_took_that_were_kept():
    def seen(limit_s):
        return {"restart: build": 2.0, "productive steps": 6.0, "lost steps": 1.0}

    found = counted(two_generations(build=5.0), {1: seen}).parts
    # The last 3 s are in no span: a step that did not end.
    assert (found["productive steps"], found["lost steps"]) == (6.0, 4.0)
    assert found["start: build"] == 5.0
    assert sum(found.values()) == pytest.approx(30.0)


def test_spans_cannot_say_more_than_the_rank_counted():
    found = counted(
        two_generations(build=5.0), {1: lambda _: {"productive steps": 12.0}}
    )
    parts = found.parts
    assert (parts["productive steps"], parts["lost steps"]) == (10.0, 0.0)


def test_without_a_span_of_a_kept_step_lost_steps_have_their_share():
    found = counted(two_generations(build=5.0), {1: lambda limit_s: {}}).parts
    assert (found["productive steps"], found["lost steps"]) == (8.0, 2.0)


@pytest.mark.parametrize(("lived_s", "silent_s"), [(9.0, 1.875), (12.0, 0.125)])
def test_spans_tell_what_a_rank_did_while_its_host_was_silent(lived_s, silent_s):
    """It was heard for 5 s, then not for 6 s; it lived for `lived_s` of these 11."""

    def seen(limit_s):
        end_s = min(limit_s, lived_s)
        own = {"start: import": 0.25, "start: build": 4.5, "productive steps": 2.0}
        own |= {"unexplained": 0.125}
        return own | {"lost steps": end_s - sum(own.values())}

    told = [
        state(0, 1, "running"),
        times(11, 1, start=0, step=1, silent=6.0, build=4.5),
        event(11, "end", 1),
    ]
    told[1].data["spent_s"] |= {"import": 0.5}
    found = counted(told, {1: seen}).parts
    assert found["host silent"] == pytest.approx(silent_s)
    assert found["start: import"] == 0.5  # the process has no span of its begin
    assert found["productive steps"] == 2.0
    assert found["lost steps"] == pytest.approx(11 - 0.5 - 4.5 - 2 - silent_s)
    assert found["unexplained"] == pytest.approx(0.0)
    assert sum(found.values()) == pytest.approx(11.0)


def test_spans_that_end_before_the_silence_change_nothing():
    told = [
        state(0, 1, "running"),
        times(11, 1, start=0, step=8, silent=6.0, build=5.0),
        event(11, "end", 1),
    ]
    found = counted(told, {1: lambda limit_s: {"start: build": 3.0}}).parts
    assert (found["host silent"], found["start: build"]) == (6.0, 5.0)
