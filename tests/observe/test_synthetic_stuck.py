"""The generated records are consistent, and simple rules name the wrong rank."""

import functools

import numpy as np
import pytest

from tests.observe import synthetic_severity as severity
from tests.observe.synthetic_stuck import (
    KINDS,
    STUCK_FOR_STEPS,
    Kind,
    StuckCase,
    make,
)

SEEDS = severity.TUNING_SEEDS[:14]


@functools.cache
def made(kind: Kind) -> tuple[StuckCase, ...]:
    return tuple(make(kind, seed) for seed in SEEDS)


def pending(case: StuckCase) -> np.ndarray:
    """[R]: the rank has entered an operation and not left it."""
    return (case.progress.entered > case.progress.left).any(axis=1)


def unread(case: StuckCase) -> np.ndarray:
    return (case.progress.entered < 0).all(axis=1)


def last_s(case: StuckCase) -> np.ndarray:
    """[R], last record; infinite where none can be read."""
    times_s = np.stack([case.progress.entered_s, case.progress.left_s])
    return np.where(np.isnan(times_s), -np.inf, times_s).max(axis=(0, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_and_seed_give_the_same_case(kind):
    first, again = make(kind, 5), make(kind, 5)
    assert first.truth == again.truth
    np.testing.assert_array_equal(first.progress.entered, again.progress.entered)
    np.testing.assert_array_equal(first.progress.left_s, again.progress.left_s)
    np.testing.assert_array_equal(first.host_log_s, again.host_log_s)


def test_another_seed_or_kind_gives_another_case():
    first = {case.now_s for kind in KINDS for case in made(kind)}
    assert len(first) == len(KINDS) * len(SEEDS)


def test_an_unknown_kind_or_seed_is_refused():
    with pytest.raises(ValueError, match=r"one of sleep, lock, skip, .* got 'fire'"):
        make("fire", 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        make("sleep", -1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_is_in_one_operation_at_most(kind):
    for case in made(kind):
        behind = case.progress.entered - case.progress.left
        assert set(np.unique(behind)) <= {0, 1}
        assert (behind.sum(axis=1) <= 1).all()
        assert len(np.unique(case.mesh.host)) >= 2
        np.testing.assert_array_equal(
            [each == "" for each in case.activity], unread(case)
        )


@pytest.mark.parametrize("kind", ["sleep", "lock", "skip", "dead_host"])
def test_everybody_else_waits_and_has_waited_for_long(kind):
    for case in made(kind):
        guilty = np.isin(np.arange(len(case.mesh.tp)), case.truth.guilty)
        assert case.truth.stuck
        stale = np.isin(np.arange(len(case.mesh.tp)), case.truth.stale)
        known = ~unread(case) & ~guilty & ~stale
        if kind != "lock":  # the records of its host end early
            assert pending(case)[known].all()
        assert pending(case)[known].any()
        slack_s = 3.0  # the clocks of hosts are wrong by some tenths
        idle_s = case.now_s - last_s(case)[known].max()
        assert idle_s > STUCK_FOR_STEPS * case.usual_step_s - slack_s


def test_who_sleeps_waits_for_nobody():
    for kind in ("sleep", "lock"):
        for case in made(kind):
            (guilty,) = case.truth.guilty
            assert not pending(case)[guilty]
            assert not unread(case)[guilty]


def test_the_log_of_a_host_whose_lock_is_held_ends():
    for case in made("lock"):
        host = case.mesh.host[case.truth.guilty[0]]
        assert case.host_log_s[host] < np.delete(case.host_log_s, host).min()
    for case in made("sleep"):
        assert (case.host_log_s > case.now_s - 9).all()


def test_who_skips_a_collective_goes_on_to_another():
    other = 0
    for case in made("skip"):
        (guilty,) = case.truth.guilty
        assert pending(case)[guilty]
        axis = int(
            np.argmax(case.progress.entered[guilty] > case.progress.left[guilty])
        )
        own = [getattr(case.mesh, name) for name in ("tp", "pp", "dp")]
        peers = np.ones(len(own[0]), bool)
        for index, column in enumerate(own):
            if index != axis:
                peers &= column == column[guilty]
        peers[guilty] = False
        names = case.progress.entered_name[peers, axis]
        other += case.progress.entered_name[guilty, axis] not in names
    assert other > 0.7 * len(SEEDS)


def test_a_dead_host_has_no_records_and_no_log():
    for case in made("dead_host"):
        host = case.mesh.host[list(case.truth.guilty)]
        assert len(set(host.tolist())) == 1
        assert set(np.flatnonzero(case.mesh.host == host[0])) == set(case.truth.guilty)
        assert unread(case)[list(case.truth.guilty)].all()
        assert np.flatnonzero(np.isnan(case.host_log_s)).tolist() == [host[0]]


def test_every_time_of_a_case_is_finite():
    """A host of several stages may stop while one of them is in its first step."""
    for seed in range(301):
        case = make("dead_host", seed)
        assert np.isfinite([case.now_s, case.usual_step_s, case.usual_save_s]).all()
        assert 0 < case.usual_step_s < case.now_s
        times_s = np.stack([case.progress.entered_s, case.progress.left_s])
        assert not np.isinf(times_s).any()
    for kind in KINDS:
        assert all(np.isfinite(case.now_s) for case in made(kind))


def test_a_slow_run_moves_or_saves():
    saving = 0
    for case in made("slow"):
        assert not case.truth.stuck
        assert not case.truth.guilty
        if "save" in case.activity:
            saving += 1
            assert not pending(case).any()
            assert case.truth.slow_rank is None
        else:
            idle_s = case.now_s - last_s(case).max()
            assert idle_s < 0.6 * STUCK_FOR_STEPS * case.usual_step_s + 3
    assert 1 < saving < 10


def test_records_of_healthy_ranks_are_missing_in_every_kind():
    for kind in KINDS:
        assert sum(bool(case.truth.missing) for case in made(kind)) >= 2
        for case in made(kind):
            assert unread(case)[list(case.truth.missing)].all()
            assert not set(case.truth.missing) & set(case.truth.guilty)


def test_simple_rules_name_the_wrong_rank():
    earliest = missing = idle = 0
    for case in made("sleep"):
        (guilty,) = case.truth.guilty
        times_s = np.where(unread(case), np.inf, last_s(case))
        earliest += int(np.argmin(times_s)) == guilty
        missing += bool(unread(case).any())
        idle += int((~pending(case) & ~unread(case)).sum()) > 1
    assert earliest < 0.5 * len(SEEDS)
    assert missing >= 2  # a rule that blames ranks without records blames a healthy one
    assert idle >= 2  # and so does a rule that blames ranks that do not wait
