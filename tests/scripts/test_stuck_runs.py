"""What is done to real runs, and how the answers are counted."""

import collections

import pytest

from scripts.observe import stuck_runs
from scripts.observe.stuck_runs import CLEAN, KINDS, NUM_OF_KIND, PLACES, Queue, draw


def test_a_seed_draws_the_same_cases_each_kind_as_often():
    cases = draw(3)
    assert cases == draw(3)
    assert cases != draw(4)
    counts = collections.Counter((case.mode, case.kind) for case in cases)
    for mode in stuck_runs.MODES:
        assert [counts[mode, kind] for kind in KINDS] == [NUM_OF_KIND] * 3
        assert sum(counts[mode, kind] for kind in CLEAN) >= 5
    assert len({case.key for case in cases}) == len(cases)


def test_all_ranks_and_phases_are_drawn():
    faults = [case for seed in range(4) for case in draw(seed) if not case.is_clean]
    assert {case.rank for case in faults} == {0, 1, 2, 3}
    assert {case.phase for case in faults} == set(PLACES)
    skips = {case.where for case in faults if case.kind == "skip"}
    assert skips <= {where for places in PLACES.values() for where in places}


def test_a_case_that_does_not_come_about_is_tried_three_times():
    case = draw(0)[0]
    cases = Queue([case], until_s=float("inf"))
    for _ in range(3):
        assert cases.take(stuck_runs.MODES) is case
        cases.give_back(case)
    assert cases.take(stuck_runs.MODES) is None


@pytest.mark.parametrize(
    ("ranks", "counts"),
    [
        ([2], ["1", "1", "0", "0", "0"]),
        ([], ["1", "0", "0", "1", "0"]),
        ([1], ["1", "0", "1", "0", "0"]),
        ([1, 2], ["1", "0", "1", "0", "0"]),
    ],
)
def test_only_the_stopped_rank_alone_is_right(ranks, counts):
    line = {"rank": 2, "ranks": ranks, "without_proc": []}
    assert stuck_runs._counts([line]) == counts
