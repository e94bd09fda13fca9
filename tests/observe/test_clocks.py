"""Clock offsets: what barriers prove about them, and no more."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.observe.clocks import MOST_DRIFT, clocks, of_generation
from mjax.observe.spans import Header, Line, Span, SpanFile


def barriers(offsets, num=8, *, seed=0, gap_ns=10**9, drift=None):
    """Times of barriers on clocks that are offset and drift; jitter up to 2 ms."""
    rng = np.random.default_rng(seed)
    drift = np.zeros(len(offsets)) if drift is None else drift
    found = {rank: {} for rank in range(len(offsets))}
    for k in range(num):
        enter = k * gap_ns + rng.exponential(5e5, len(offsets)) + 10**15
        leave = enter.max() + rng.exponential(5e5, len(offsets))
        for rank, offset in enumerate(offsets):
            own = [
                int(t + offset + drift[rank] * t) for t in (enter[rank], leave[rank])
            ]
            found[rank][k] = (own[0], own[1])
    return found


@settings(max_examples=50)
@given(
    offsets=st.lists(st.integers(-(10**15), 10**15), min_size=1, max_size=6),
    seed=st.integers(0, 100),
)
def test_the_true_offset_is_within_the_stated_error(offsets, seed):
    found = clocks(barriers([0, *offsets], seed=seed))
    for rank, offset in enumerate([0, *offsets]):
        at = found[rank].at(10**15 + offset)
        assert abs(at.ns - offset) <= at.error_ns + 1


def test_more_barriers_give_a_smaller_error():
    few, many = (clocks(barriers([0, 10**9], num, gap_ns=10**7))[1] for num in (1, 16))
    assert many.at(10**15).error_ns < few.at(10**15).error_ns < 5e6


def test_the_clock_of_rank_0_is_its_own():
    offset = clocks(barriers([0, 5]))[0].at(10**15)
    assert (offset.ns, offset.error_ns) == (0, 0)


def test_between_barriers_the_error_grows_with_the_allowed_drift():
    clock = clocks(barriers([0, 10**6], num=1))[1]
    last_ns = int(clock.time_ns[-1])
    near, far = clock.at(last_ns), clock.at(last_ns + 10**10)
    assert far.error_ns - near.error_ns == pytest.approx(MOST_DRIFT * 10**10)


def test_a_clock_that_drifts_is_followed_within_the_error():
    drift = np.array([0.0, 0.9 * MOST_DRIFT])
    clock = clocks(barriers([0, 0], drift=drift))[1]
    for k in range(8):
        true_ns = drift[1] * (10**15 + k * 10**9)
        at = clock.at(int(10**15 + k * 10**9 + true_ns))
        assert abs(at.ns - true_ns) <= at.error_ns + 1


def test_a_clock_that_jumps_has_no_offset():
    found = barriers([0, 0], num=4)
    jump = 10**9
    found[1] |= {k: (e + jump, v + jump) for k, (e, v) in found[1].items() if k > 1}
    clock = clocks(found)[1]
    assert clock.at(int(clock.time_ns[-1])).error_ns == np.inf


def test_a_rank_without_a_shared_barrier_has_no_offset():
    found = clocks({0: {0: (1, 2)}, 1: {1: (5, 6)}})
    assert found[1].at(5).error_ns == np.inf


def test_barriers_are_read_from_lines():
    def file(rank, enter, leave):
        header = Header(
            run="a",
            host="h",
            rank=rank,
            generation=1,
            pid=1,
            wall_ns=0,
            monotonic_ns=0,
            devices=(rank,),
            mesh={},
        )
        span = Span("barrier", "idle", "barrier", enter, leave)
        other = Line(n=1, step=1, spans=(Span("data", "data", "host", 0, 1),))
        return SpanFile(
            path=Path("a"),
            header=header,
            lines=(Line(n=0, spans=(span,), barrier=0), other),
            problems=(),
        )

    found = of_generation([file(0, 100, 110), file(1, 1105, 1112)])
    assert found[1].at(1112).ns == pytest.approx((1105 - 110 + 1112 - 100) / 2)
