"""The rank that the others wait for is named, even if records are missing."""

import dataclasses

import numpy as np
import pytest

from mjax.observe.detect.stuck import Places, Records, Usual, judge
from tests.observe.detector_inputs import verdict
from tests.observe.synthetic_severity import TUNING_SEEDS
from tests.observe.synthetic_stuck import KINDS, Kind, make

NOW_S = 1000.0
USUAL = Usual(step_s=0.5, save_s=20.0)
ALL = np.arange(8)
PLACES = Places(tp=ALL % 2, pp=0 * ALL, dp=ALL // 2, host=ALL // 4)
LOGS_S = np.array([NOW_S - 1, NOW_S - 2])


def blocked(guilty: int = 5) -> Records:
    """All ranks are in the tp or dp operation that `guilty` has not entered."""
    entered = np.tile([10, 2, 3], (8, 1))
    left = entered.copy()
    names = np.tile(["all-gather", "all-reduce", "all-reduce"], (8, 1)).astype("U16")
    for rank in range(8):
        if rank == guilty:
            continue
        # Its tp peer waits in tp, the others have done that and wait in dp.
        axis = 0 if rank // 2 == guilty // 2 else 2
        entered[rank] = [11, 2, 3] if axis == 0 else [12, 2, 4]
        left[rank] = entered[rank]
        left[rank, axis] -= 1
        names[rank, axis] = "reduce-scatter"
    times_s = np.full((8, 3), NOW_S - 100)
    return Records(
        entered=entered, left=left, entered_s=times_s, left_s=times_s, names=names
    )


def without(records: Records, *ranks: int) -> Records:
    """Nothing can be read of some ranks."""
    entered, left = records.entered.copy(), records.left.copy()
    times_s, names = records.entered_s.copy(), records.names.copy()
    for rank in ranks:
        entered[rank] = left[rank] = -1
        times_s[rank], names[rank] = np.nan, ""
    return Records(
        entered=entered, left=left, entered_s=times_s, left_s=times_s, names=names
    )


def named(records: Records, logs_s: np.ndarray = LOGS_S, now_s: float = NOW_S):
    return judge(PLACES, records, logs_s, ["step"] * 8, now_s, USUAL)


@pytest.mark.parametrize("guilty", range(8))
def test_the_rank_that_has_not_come_is_named_wherever_it_is(guilty):
    found = named(blocked(guilty))
    assert found.is_stuck
    assert found.ranks == (guilty,)


def test_it_is_said_who_waits_for_whom():
    waits = {wait.rank: wait for wait in named(blocked(5)).waits}
    assert 5 not in waits
    assert (waits[4].axis, waits[4].number, waits[4].others) == ("tp", 11, (5,))
    assert (waits[1].axis, waits[1].name) == ("dp", "reduce-scatter")
    assert waits[1].others == (5,)
    assert waits[0].others == (4,)


def test_a_missing_healthy_rank_is_not_blamed():
    assert named(without(blocked(5), 2)).ranks == (5,)


def test_the_rank_without_a_record_is_named_if_the_others_wait_for_it():
    found = named(without(blocked(5), 5))
    assert found.ranks == (5,)
    assert "it has no readable record" in found.reason


def test_all_ranks_of_a_host_without_log_and_records_are_named():
    logs_s = np.array([NOW_S - 1, np.nan])
    assert named(without(blocked(5), 4, 5, 6, 7), logs_s).ranks == (4, 5, 6, 7)


def test_a_host_without_a_log_is_not_blamed_if_its_records_arrive():
    assert named(blocked(5), np.array([np.nan, NOW_S - 1])).ranks == (5,)


def test_clocks_that_are_wrong_by_half_a_second_change_nothing():
    records = blocked(5)
    shift_s = np.where(PLACES.host == 0, 0.5, -0.5)[:, None]
    wrong = dataclasses.replace(
        records,
        entered_s=records.entered_s + shift_s,
        left_s=records.left_s - shift_s,
    )
    assert named(wrong).ranks == (5,)


def test_a_rank_whose_old_record_others_have_passed_is_not_blamed():
    records = blocked(5)
    records.entered[2, :] = records.left[2, :] = [11, 2, 3]
    found = named(records)
    assert found.ranks == (5,)


def test_a_rank_that_went_on_without_a_collective_is_named():
    records = blocked(5)
    # 5 left out operation 11 of tp, and is in dp where its peers are.
    records.entered[5] = [10, 2, 4]
    records.left[5] = [10, 2, 3]
    records.names[5, 2] = "reduce-scatter"
    found = named(records)
    assert found.ranks == (5,)
    assert "it skipped" in found.reason


def test_the_rank_in_another_collective_than_its_group_is_named():
    records = blocked(5)
    records.entered[:] = [12, 2, 4]
    records.left[:] = [12, 2, 3]
    records.names[:, 2] = "reduce-scatter"
    records.names[3, 2] = "all-gather"
    assert named(records).ranks == (3,)


def test_nobody_is_blamed_while_records_are_new():
    found = named(blocked(5), now_s=NOW_S - 95)
    assert not found.is_stuck
    assert found.ranks == ()


@pytest.mark.parametrize(("now_s", "is_stuck"), [(NOW_S - 70, False), (NOW_S, True)])
def test_a_save_may_take_twice_the_usual(now_s, is_stuck):
    found = judge(PLACES, blocked(), LOGS_S, ["save"] * 8, now_s, USUAL)
    assert found.is_stuck == is_stuck


def test_no_record_at_all_is_stuck_and_nobody_is_told_apart():
    found = named(without(blocked(5), *range(8)))
    assert found.is_stuck
    assert found.ranks == ()


@pytest.mark.parametrize("kind", KINDS)
def test_most_generated_cases_are_right(kind: Kind):
    right = 0
    for seed in TUNING_SEEDS[6000:6010]:
        case = make(kind, seed)
        found = verdict(case)
        assert found.is_stuck == case.truth.stuck
        right += found.ranks == case.truth.guilty
    assert right >= 9


def test_the_answer_does_not_depend_on_the_order_of_ranks():
    case = make("sleep", 3)
    order = np.random.default_rng(0).permutation(len(case.mesh.tp))
    mesh, progress = case.mesh, case.progress
    found = judge(
        Places(
            tp=mesh.tp[order],
            pp=mesh.pp[order],
            dp=mesh.dp[order],
            host=mesh.host[order],
        ),
        Records(
            entered=progress.entered[order],
            left=progress.left[order],
            entered_s=progress.entered_s[order],
            left_s=progress.left_s[order],
            names=progress.entered_name[order],
        ),
        case.host_log_s,
        [case.activity[rank] for rank in order],
        case.now_s,
        Usual(step_s=case.usual_step_s, save_s=case.usual_save_s),
    )
    assert tuple(order[list(found.ranks)].tolist()) == case.truth.guilty
