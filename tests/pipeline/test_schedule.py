"""The tables of the schedules against the formulas."""

import dataclasses
import itertools
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mjax.pipeline.config import ScheduleName
from mjax.pipeline.schedule import IDLE, Schedule, build, build_forward, check
from tests.pipeline.schedule_rules import validate
from tests.pipeline.tables import entries, interleaved, one_chunk

stages = st.integers(1, 8)
chunks = st.integers(1, 4)
microbatches = st.integers(1, 24)
groups = st.integers(1, 4)
names: st.SearchStrategy[ScheduleName] = st.sampled_from(
    ["gpipe", "1f1b", "interleaved-1f1b"]
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draw any training schedule; more than one chunk takes whole groups."""
    name = draw(names)
    num_stages = draw(stages)
    num_chunks = draw(chunks) if name == "interleaved-1f1b" else 1
    whole = num_chunks > 1
    return build(
        name,
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_stages * draw(groups) if whole else draw(microbatches),
    )


# ------------------------------------------------------------------------ what holds


@hypothesis.given(schedule=schedules())
def test_every_schedule_that_is_built_is_valid(schedule: Schedule):
    validate(schedule)


@hypothesis.given(schedule=schedules())
def test_each_stage_fills_one_slot_of_each_kind_per_chunk_and_microbatch(
    schedule: Schedule,
):
    wanted = sorted(
        itertools.product(
            range(schedule.num_stages),
            range(schedule.num_chunks),
            range(schedule.num_microbatches),
        )
    )
    for kind in ("forward", "backward"):
        assert sorted(rest for _, *rest in entries(schedule, kind)) == [
            list(names) for names in wanted
        ]


@hypothesis.given(schedule=schedules())
def test_inputs_and_gradients_come_from_the_neighbour_one_tick_before(
    schedule: Schedule,
):
    """Counted apart from validate, which the tests below rely on."""
    tick_of = {
        kind: {
            (chunk * schedule.num_stages + stage, microbatch): tick
            for tick, stage, chunk, microbatch in entries(schedule, kind)
        }
        for kind in ("forward", "backward")
    }
    last = schedule.num_stages * schedule.num_chunks - 1
    for (chunk, microbatch), tick in tick_of["forward"].items():
        if chunk > 0:
            assert tick == tick_of["forward"][chunk - 1, microbatch] + 1
    for (chunk, microbatch), tick in tick_of["backward"].items():
        assert tick >= tick_of["forward"][chunk, microbatch]
        if chunk < last:
            assert tick == tick_of["backward"][chunk + 1, microbatch] + 1


@hypothesis.given(schedule=schedules())
def test_the_bubble_that_is_counted_is_that_of_the_formula(schedule: Schedule):
    work = schedule.num_chunks * schedule.num_microbatches
    assert schedule.bubble_ticks == schedule.num_stages - 1
    # One division and one subtraction in float64, of numbers up to 8.
    assert schedule.bubble == pytest.approx((schedule.num_stages - 1) / work, abs=1e-14)


@hypothesis.given(num_stages=stages, num_chunks=chunks, num_groups=groups)
def test_1f1b_lasts_as_many_ticks_as_its_formula_says(
    num_stages: int, num_chunks: int, num_groups: int
):
    schedule = interleaved(num_stages, num_chunks, num_stages * num_groups)
    work = num_chunks * schedule.num_microbatches
    assert schedule.num_ticks == work + (num_chunks - 1) * num_stages + 2 * (
        num_stages - 1
    )


@hypothesis.given(num_stages=stages, num_microbatches=microbatches)
def test_gpipe_lasts_as_many_ticks_as_its_formula_says(
    num_stages: int, num_microbatches: int
):
    schedule = one_chunk("gpipe", num_stages, num_microbatches)
    assert schedule.num_ticks == 2 * (num_microbatches + num_stages - 1)


@hypothesis.given(num_stages=stages, num_chunks=chunks, num_groups=groups)
def test_1f1b_has_in_flight_what_the_warm_up_lets_in(
    num_stages: int, num_chunks: int, num_groups: int
):
    schedule = interleaved(num_stages, num_chunks, num_stages * num_groups)
    assert schedule.in_flight == tuple(
        min(
            num_chunks * schedule.num_microbatches,
            2 * (num_stages - 1 - stage) + (num_chunks - 1) * num_stages + 1,
        )
        for stage in range(num_stages)
    )


def test_memory_of_1f1b_does_not_grow_with_the_microbatches():
    few, many = interleaved(4, 2, 8), interleaved(4, 2, 64)
    assert few.in_flight == many.in_flight == (11, 9, 7, 5)
    assert few.num_stash_slots == many.num_stash_slots == 11
    assert few.num_gradient_slots == many.num_gradient_slots == 1


@hypothesis.given(num_stages=stages, num_microbatches=microbatches)
def test_gpipe_has_all_microbatches_in_flight(num_stages: int, num_microbatches: int):
    schedule = one_chunk("gpipe", num_stages, num_microbatches)
    assert schedule.in_flight == (num_microbatches,) * num_stages


@hypothesis.given(num_stages=stages, num_microbatches=microbatches)
def test_one_chunk_interleaved_is_1f1b(num_stages: int, num_microbatches: int):
    one = one_chunk("1f1b", num_stages, num_microbatches)
    other = interleaved(num_stages, 1, num_microbatches)
    for field in dataclasses.fields(Schedule):
        if field.name != "name":
            np.testing.assert_array_equal(
                getattr(one, field.name), getattr(other, field.name)
            )


@hypothesis.given(
    num_stages=st.integers(2, 8), num_chunks=chunks, num_groups=st.integers(1, 3)
)
def test_a_stage_sends_as_often_as_it_has_chunks_for_each_send_of_1f1b(
    num_stages: int, num_chunks: int, num_groups: int
):
    num_microbatches = num_stages * num_groups
    schedule = interleaved(num_stages, num_chunks, num_microbatches)
    one = one_chunk("1f1b", num_stages, num_microbatches)
    for sends, sends_of_one in (
        (schedule.forward_sends, one.forward_sends),
        (schedule.backward_sends[::-1], one.backward_sends[::-1]),
    ):
        # The last chunk's output stays: between the ends there is no such chunk.
        assert sends[:-1] == tuple(num_chunks * n for n in sends_of_one[:-1])
        assert sends[-1] == (num_chunks - 1) * num_microbatches
        assert sum(sends) == (num_chunks * num_stages - 1) * num_microbatches


@hypothesis.given(schedule=schedules())
def test_the_phases_cover_the_ticks_and_name_the_slots_in_use(schedule: Schedule):
    phases = schedule.phases
    assert [phase.start for phase in phases] == [0, *(p.stop for p in phases[:-1])]
    assert phases[-1].stop == schedule.num_ticks
    for phase in phases:
        for tick in range(phase.start, phase.stop):
            forward = (schedule.forward_chunk[tick] != IDLE).any()
            backward = (schedule.backward_chunk[tick] != IDLE).any()
            assert (phase.has_forward, phase.has_backward) == (forward, backward)


def test_1f1b_is_warm_up_then_both_then_cool_down():
    used = [
        (phase.start, phase.stop, phase.has_forward, phase.has_backward)
        for phase in interleaved(4, 2, 8).phases
    ]
    assert used == [(0, 7, True, False), (7, 19, True, True), (19, 26, False, True)]


# --------------------------------------------------------------------------- buffers


def most_alive(schedule: Schedule, stage: int, kind: str) -> int:
    """Count, tick by tick, what one stage must hold at once, without naming slots.

    A phase runs one body for all stages and ticks: it writes in all of them, and a
    write that means nothing needs a place for the length of its tick too.
    """
    forward = {(c, i): t for t, s, c, i in entries(schedule, "forward") if s == stage}
    backward = {(c, i): t for t, s, c, i in entries(schedule, "backward") if s == stage}
    alive = np.zeros(schedule.num_ticks, int)
    is_written = np.zeros(schedule.num_ticks, bool)
    for (chunk, microbatch), end in backward.items():
        ends_here = (chunk, stage) == (schedule.num_chunks - 1, schedule.num_stages - 1)
        from_forward = kind == "stash" or ends_here
        start = forward[chunk, microbatch] if from_forward else end
        alive[start : end + 1] += 1
        is_written[start] = True
    for phase in schedule.phases:
        if phase.has_forward or kind == "gradient":
            is_idle = ~is_written[phase.start : phase.stop]
            alive[phase.start : phase.stop] += is_idle
    return int(alive.max())


@hypothesis.given(schedule=schedules())
def test_the_buffers_are_as_small_as_what_is_alive_at_once(schedule: Schedule):
    every_stage = range(schedule.num_stages)
    assert schedule.num_stash_slots == max(
        most_alive(schedule, stage, "stash") for stage in every_stage
    )
    assert schedule.num_gradient_slots == max(
        most_alive(schedule, stage, "gradient") for stage in every_stage
    )


# ------------------------------------------------------------------------ evaluation


@hypothesis.given(num_stages=stages, num_chunks=chunks, num_microbatches=microbatches)
def test_the_schedule_of_an_evaluation_does_each_forward_slot_in_order(
    num_stages: int, num_chunks: int, num_microbatches: int
):
    schedule = build_forward(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
    )
    filled = list(entries(schedule, "forward"))
    tick_of = {
        (chunk * num_stages + stage, microbatch): tick
        for tick, stage, chunk, microbatch in filled
    }
    wanted = set(
        itertools.product(range(num_stages * num_chunks), range(num_microbatches))
    )
    assert tick_of.keys() == wanted
    assert len(filled) == len(wanted)
    for (chunk, microbatch), tick in tick_of.items():
        if chunk > 0:
            assert tick == tick_of[chunk - 1, microbatch] + 1
    assert max(tick_of.values()) == schedule.num_ticks - 1
    assert (schedule.backward_chunk == IDLE).all()


def test_the_schedule_of_an_evaluation_has_no_training_bubble():
    schedule = build_forward(num_stages=2, num_chunks=1, num_microbatches=2)
    with pytest.raises(ValueError, match="forward has no backward half-ticks"):
        _ = schedule.bubble


# -------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changed_counts", "message"),
    [
        ({"num_stages": 0}, "--mesh.pp must be at least 1, got 0"),
        ({"num_chunks": 0}, "--pipeline.chunks must be at least 1, got 0"),
        ({"num_microbatches": -1}, "--batch.microbatches must be at least 1, got -1"),
        (
            {"name": "interleaved-1f1b", "num_chunks": 2, "num_microbatches": 3},
            "with --pipeline.chunks 2, --batch.microbatches must be a multiple of "
            "--mesh.pp 2, got 3",
        ),
        (
            {"name": "gpipe", "num_chunks": 2},
            "with --pipeline.schedule gpipe, --pipeline.chunks must be 1, got 2",
        ),
        (
            {"num_chunks": 2},
            "with --pipeline.schedule 1f1b, --pipeline.chunks must be 1, got 2",
        ),
        (
            {"name": "zigzag"},
            "--pipeline.schedule must be one of gpipe, 1f1b, interleaved-1f1b, "
            "got zigzag",
        ),
    ],
)
def test_counts_and_names_that_mean_nothing_are_refused(changed_counts, message):
    counts = {"name": "1f1b", "num_stages": 2, "num_chunks": 1, "num_microbatches": 2}
    with pytest.raises(ValueError, match=re.escape(message)):
        check(**{**counts, **changed_counts})
