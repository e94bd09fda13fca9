"""Which end of a rank came first, from events alone."""

import pytest

from mjax.launch.first_error import describe, first_error


def end(rank, second, code, generation=1):
    return {
        "kind": "rank_end",
        "generation": generation,
        "time_ns": 10**9 * 60,
        "rank": rank,
        "host": f"host-{rank}",
        "data": {"code": code, "step": 7, "ended_ns": int(second * 1e9)},
    }


def failure(generation, rank):
    return {
        "kind": "failure",
        "generation": generation,
        "time_ns": 0,
        "text": f"crashed: rank {rank}",
        "data": {"cause": "crashed", "ranks": [rank], "hosts": [f"host-{rank}"]},
    }


EVENTS = [
    *(end(0, 5.25, -6), end(2, 5.5, 1), end(1, 5.0, -11), failure(1, 1)),
    *(end(0, 9.0, -9, 2), failure(2, 0)),
]


def test_the_ends_are_told_in_their_order_with_what_follows():
    found = first_error(EVENTS, 1)
    assert [end["rank"] for end in found["ends"]] == [1, 0, 2]
    assert describe(found).splitlines() == [
        "generation 1: crashed: rank 1",
        "  +0.000 s  rank 1 on host-1 ended with SIGSEGV after step 7",
        "  +0.250 s  rank 0 on host-0 ended with SIGABRT after step 7, which may "
        "follow from another end",
        "  +0.500 s  rank 2 on host-2 ended with code 1 after step 7, which may "
        "follow from another end",
    ]


def test_a_rank_that_the_launch_killed_is_told_apart_from_one_that_was_killed():
    events = [end(0, 5.0, -9), failure(1, 0), end(1, 5.25, -9), end(2, 5.5, 1)]
    found = first_error(events)
    assert [one["is_by_launch"] for one in found["ends"]] == [False, True, False]
    assert describe(found).splitlines()[1:] == [
        "  +0.000 s  rank 0 on host-0 ended with SIGKILL after step 7",
        "  +0.250 s  rank 1 on host-1 ended with SIGKILL after step 7: the launch "
        "killed it after the failure",
        "  +0.500 s  rank 2 on host-2 ended with code 1 after step 7, which may "
        "follow from another end",
    ]


def test_the_last_generation_that_failed_is_told_unless_one_is_named():
    assert first_error(EVENTS)["generation"] == 2
    with pytest.raises(
        ValueError, match="generation 3 has not failed; these have: 1, 2"
    ):
        first_error(EVENTS, 3)
    with pytest.raises(ValueError, match="no generation of this run has failed"):
        first_error(EVENTS[:2])
