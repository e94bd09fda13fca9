"""Stamps on the clock of the host: names, wraps, and how exact the offset is."""

import numpy as np
import pytest

from mjax.observe.stamps import INTERVALS, UNIT_NS, DeviceClock
from mjax.step.stamps import Place

MS = 10**6


def log_of(times_ns, tags=(0, 1, 2, 4), *, room=6):
    """Return a log with a row at each time of the clock of the device."""
    log = np.full((room + 1, 2), 77, np.int32)
    log[0, 0] = len(times_ns)
    for row, (time_ns, tag) in enumerate(zip(times_ns, tags, strict=True), start=1):
        if row <= room:
            log[row] = tag, np.uint32(time_ns // UNIT_NS % 2**32).astype(np.int32)
    return log


def test_every_place_of_a_step_ends_a_named_interval():
    ends = {int(place) for place in Place} - {Place.BEGIN}
    assert set(INTERVALS) == ends


@pytest.mark.parametrize("begin_ns", [0, 10**15, 2**40 - 3 * MS, 5 * 2**40 - 3 * MS])
def test_a_clock_of_the_host_is_taken_as_it_is(begin_ns):
    begin_ns += 10**16
    times = [begin_ns, begin_ns + 2 * MS, begin_ns + 6 * MS, begin_ns + 7 * MS]
    clock = DeviceClock(is_host_clock=True)
    spans = clock.spans(
        log_of(times), 3, dispatched_ns=begin_ns - MS, ready_ns=begin_ns + 9 * MS
    )
    assert [span.name for span in spans] == ["forward", "backward", "norm", "optimizer"]
    assert {span.stream for span in spans} == {"device:3"}
    starts = [span.start_ns for span in spans]
    assert starts == pytest.approx(times, abs=UNIT_NS)
    assert spans[-1].end_ns == begin_ns + 9 * MS


def test_the_offset_of_a_device_lies_between_dispatch_and_metrics():
    """The device was idle in the first step, and never since: its bounds hold on."""
    zero_ns, clock = 123_456_789_012_345, DeviceClock(is_host_clock=False)
    for step in range(50):
        begin_ns = 10**15 + step * 10 * MS
        times = [begin_ns, begin_ns + 4 * MS, begin_ns + 9 * MS, begin_ns + 10 * MS]
        lead_ns = 20_000 if step == 0 else 9 * MS
        spans = clock.spans(
            log_of([time + zero_ns for time in times]),
            0,
            dispatched_ns=begin_ns - lead_ns,
            ready_ns=times[-1] + 30_000,
        )
        # Half of 20 us + 30 us, and the drift that is allowed for.
        assert spans[0].start_ns == pytest.approx(begin_ns, abs=30_000 + step * 1000)


def test_an_hour_without_a_step_does_not_lose_the_wraps_of_the_clock():
    clock = DeviceClock(is_host_clock=False)
    for begin_ns in (10**15, 10**15 + 3_600 * 10**9):
        times = [begin_ns, begin_ns + MS]
        spans = clock.spans(
            log_of(times, (0, 1)),
            0,
            dispatched_ns=begin_ns - 1000,
            ready_ns=begin_ns + MS + 1000,
        )
        assert spans[0].start_ns == pytest.approx(begin_ns, abs=10_000)


def test_rows_that_had_no_room_are_left_out():
    times = [10**15 + i * MS for i in range(5)]
    spans = DeviceClock(is_host_clock=True).spans(
        log_of(times, (0, 1, 2, 1, 2), room=3),
        0,
        dispatched_ns=times[0],
        ready_ns=times[-1] + MS,
    )
    assert [span.name for span in spans] == ["forward", "backward", "optimizer"]


def test_an_empty_log_has_no_spans():
    clock = DeviceClock(is_host_clock=True)
    assert clock.spans(log_of([], ()), 0, dispatched_ns=0, ready_ns=1) == []


def test_the_spans_of_a_pipeline_are_its_ticks_and_what_is_around_them():
    """A row is written when a tick begins: the last tick ends with the next row."""
    times = [10**16 + MS * number for number in range(6)]
    spans = DeviceClock(is_host_clock=True).spans(
        log_of(times, (0, 3, 3, 3, 2, 4)), 0, dispatched_ns=0, ready_ns=times[-1] + MS
    )
    names = ["forward", "tick", "tick", "tick", "norm", "optimizer"]
    assert [span.name for span in spans] == names
    ticks = [span.start_ns for span in spans if span.name == "tick"]
    assert ticks == pytest.approx(times[1:4], abs=UNIT_NS)
