"""Slow hosts are named with their cause, and healthy differences are not."""

import numpy as np
import pytest

from mjax.observe.detect.stragglers import Layout, Report, Role, find
from tests.observe.detect.generated_runs import CAUSES, detect
from tests.observe.synthetic_severity import TUNING_SEEDS
from tests.observe.synthetic_stragglers import make

ROLES: tuple[Role, ...] = ("data", "host", "compute", "compute", "sync")
DATA, HOST, FORWARD, BACKWARD, SYNC = range(5)
STEPS = 80


def layout_of(pp: int, dp: int, ranks_per_host: int = 1) -> Layout:
    """Place pp x dp hosts, stages outermost; the ranks of a host are of its group."""
    host = np.repeat(np.arange(pp * dp), ranks_per_host)
    return Layout(
        host=host,
        tp=np.tile(np.arange(ranks_per_host), pp * dp),
        pp=host // dp,
        dp=host % dp,
    )


def own_work(num_ranks: int, seed: int = 0) -> np.ndarray:
    """[T, R, phases] of healthy ranks, without waits."""
    rng = np.random.default_rng(seed)
    usual_s = np.array([0.002, 0.005, 0.3, 0.7, 0.0])
    return usual_s * np.exp(rng.normal(0, 0.005, (STEPS, num_ranks, 5)))


def with_waits(work_s: np.ndarray) -> np.ndarray:
    """Let all ranks wait in the sync for the last one."""
    found = work_s.copy()
    ready_s = work_s.sum(axis=2)
    found[:, :, SYNC] = ready_s.max(axis=1, keepdims=True) - ready_s + 0.02
    return found


def named(report: Report) -> dict[int, str]:
    return {each.host: each.cause for each in report.outliers}


def test_the_slow_hosts_of_a_generated_run_are_named_with_their_causes():
    run = make("slow", TUNING_SEEDS[1])
    found = named(detect(run))
    slow = {each.host: each.kind for each in run.truth.slow_hosts}
    assert found.keys() == slow.keys()
    right = [found[host] in CAUSES[kind] for host, kind in slow.items()]
    assert sum(right) >= 12


def test_nobody_is_named_in_a_generated_run_without_slow_hosts():
    assert detect(make("clean", TUNING_SEEDS[2])).outliers == ()


def test_times_that_are_dealt_out_anew_in_each_step_name_nobody():
    """The same times, but no host is slow repeatedly: the null case of the detector."""
    work_s = own_work(16)
    work_s[:, 5, FORWARD:SYNC] *= 1.2
    assert named(find(work_s, ROLES, layout_of(1, 16))) == {5: "compute"}
    rng = np.random.default_rng(3)
    dealt = np.stack([step[rng.permutation(16)] for step in work_s])
    assert find(dealt, ROLES, layout_of(1, 16)).outliers == ()


def test_a_slow_host_is_named_with_its_ratio_and_since_when():
    work_s = own_work(12)
    work_s[30:, 7, FORWARD:SYNC] *= 1.12
    (found,) = find(with_waits(work_s), ROLES, layout_of(1, 12)).outliers
    assert (found.host, found.cause, found.pattern) == (7, "compute", "lasting")
    assert found.ratio == pytest.approx(1.12, abs=0.015)  # noise 0.5%, upper quantile
    assert found.cost == pytest.approx(0.12, abs=0.015)
    assert abs(found.since_step - 30) <= 1
    assert found.confidence > 0.99
    assert found.ranks == (7,)


def test_the_excess_of_a_slow_host_is_in_its_phase():
    work_s = own_work(12)
    work_s[:, 7, BACKWARD] *= 1.2
    report = find(with_waits(work_s), ROLES, layout_of(1, 12))
    assert report.usual_s == pytest.approx(1.0, abs=0.01)
    assert report.excess[7, BACKWARD] == pytest.approx(0.14, abs=0.01)
    assert report.excess[7, SYNC] < -0.1
    others = np.delete(report.excess, 7, axis=0)
    assert np.abs(others).max() < 0.02
    np.testing.assert_allclose(np.median(report.excess, axis=0), 0.0, atol=1e-6)


def test_a_stage_with_more_layers_and_a_replica_with_longer_documents_are_healthy():
    work_s, layout = own_work(16), layout_of(4, 4)
    work_s[:, layout.pp == 3, FORWARD:SYNC] *= 1.4
    work_s[:, layout.dp == 1, FORWARD:SYNC] *= 1.2
    assert find(work_s, ROLES, layout).outliers == ()
    work_s[:, 6, FORWARD:SYNC] *= 1.1
    assert named(find(work_s, ROLES, layout)) == {6: "compute"}


def test_two_slow_hosts_of_a_replica_of_four_are_both_named():
    work_s, layout = own_work(32), layout_of(4, 8)
    work_s[:, [5, 13], FORWARD:SYNC] *= 1.12
    assert set(named(find(work_s, ROLES, layout))) == {5, 13}


def test_a_blip_of_three_steps_is_healthy():
    work_s = own_work(8)
    work_s[40:43, 2, FORWARD:SYNC] *= 1.5
    assert find(with_waits(work_s), ROLES, layout_of(1, 8)).outliers == ()


def test_episodes_are_told_from_irregular_lateness():
    work_s = own_work(16)
    rng = np.random.default_rng(1)
    for first in (10, 40, 65):
        work_s[first : first + 12, 3, FORWARD:SYNC] *= 1.3
    late = rng.random(STEPS) < 0.5
    work_s[late, 9, FORWARD:SYNC] *= 1.3
    assert named(find(work_s, ROLES, layout_of(1, 16))) == {3: "throttled", 9: "host"}


@pytest.mark.parametrize(("phase", "cause"), [(DATA, "data"), (HOST, "host")])
def test_a_host_that_begins_late_is_named_with_what_it_waits_for(phase, cause):
    work_s = own_work(8)
    work_s[:, 4, phase] += 0.15
    (found,) = find(with_waits(work_s), ROLES, layout_of(1, 8)).outliers
    assert (found.host, found.cause) == (4, cause)
    assert found.cost == pytest.approx(0.15, abs=0.01)


def test_who_waits_least_is_named_if_nothing_else_explains_it():
    """The cause of its lateness was not measured, but it still came last."""
    phase_s = with_waits(own_work(8))
    phase_s[:, :, SYNC] += 0.2
    phase_s[:, 3, SYNC] -= 0.2
    assert named(find(phase_s, ROLES, layout_of(1, 8))) == {3: "unknown"}


def test_a_slow_network_card_ends_its_sync_later_and_a_late_host_does_not():
    rng = np.random.default_rng(2)
    work_s = own_work(8)
    work_s[:, 1, FORWARD:SYNC] *= 1.1  # others wait for it: no network is slow
    ready_s = work_s.sum(axis=2)
    move_s = 0.05 * np.exp(rng.normal(0, 0.1, ready_s.shape))
    move_s[:, 6] *= 2
    left_s = ready_s.max(axis=1, keepdims=True) + move_s
    work_s[:, :, SYNC] = left_s - ready_s
    report = find(work_s, ROLES, layout_of(1, 8), left_s=left_s)
    assert named(report) == {1: "compute", 6: "network"}
    assert report.outliers[1].ratio > 1.5


def test_one_slow_gpu_of_a_host_is_told_from_a_slow_host():
    work_s, layout = own_work(16), layout_of(1, 4, ranks_per_host=4)
    work_s[:, 9, FORWARD:SYNC] *= 1.15
    (found,) = find(work_s, ROLES, layout).outliers
    assert (found.host, found.cause, found.ranks) == (2, "one GPU", (9,))


def test_steps_that_are_left_out_do_not_count():
    work_s = own_work(8)
    is_save = np.arange(STEPS) % 4 == 0
    work_s[is_save, 2, DATA] += 3.0
    assert named(find(work_s, ROLES, layout_of(1, 8))) == {2: "data"}
    report = find(work_s, ROLES, layout_of(1, 8), left_out=is_save)
    assert report.outliers == ()


def test_a_rank_without_times_hides_nobody_else():
    work_s = own_work(8)
    work_s[:, 0] = np.nan
    work_s[:, :, HOST] = np.nan
    work_s[:, 5, FORWARD:SYNC] *= 1.2
    report = find(work_s, ROLES, layout_of(1, 8))
    assert named(report) == {5: "compute"}
    assert np.isnan(report.excess[0]).all()
    assert np.isnan(report.excess[:, HOST]).all()


def test_of_two_hosts_nobody_is_named():
    work_s = own_work(2)
    work_s[:, 1, FORWARD:SYNC] *= 1.5
    assert find(work_s, ROLES, layout_of(1, 2)).outliers == ()


@pytest.mark.parametrize(
    ("steps", "ranks", "roles", "says"),
    [
        (STEPS, 1, ROLES, "all times are of one rank or host"),
        (9, 8, ROLES, "9 steps are too few .* has 10"),
        (STEPS, 8, ROLES[1:], "5 phases need as many roles, got 4"),
    ],
)
def test_what_cannot_be_judged_is_refused(steps, ranks, roles, says):
    with pytest.raises(ValueError, match=says):
        find(own_work(ranks)[:steps], roles, layout_of(1, ranks))


def test_a_layout_of_other_ranks_and_times_that_are_all_missing_are_refused():
    with pytest.raises(ValueError, match="the layout has 4 ranks, not 8"):
        find(own_work(8), ROLES, layout_of(1, 4))
    nothing = np.full((STEPS, 8, 5), np.nan)
    with pytest.raises(ValueError, match="no step has usable times"):
        find(nothing, ROLES, layout_of(1, 8))
