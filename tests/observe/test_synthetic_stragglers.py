"""The generated ranks wait causally, and a slow host is not found by a simple rule."""

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from tests.observe import synthetic_severity as severity
from tests.observe.straggler_work import NUM_HOSTS, NUM_RANKS, RANKS_PER_HOST
from tests.observe.synthetic_stragglers import (
    HOST_KINDS,
    KINDS,
    NUM_SLOW,
    PHASES,
    Kind,
    Stragglers,
    by_host,
    make,
)

SEEDS = severity.TUNING_SEEDS[:6]
DATA, FORWARD, BACKWARD, PIPELINE, SYNC, OPTIMIZER = range(len(PHASES))


@functools.cache
def made(kind: Kind) -> tuple[Stragglers, ...]:
    return tuple(make(kind, seed) for seed in SEEDS)


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    """Free the memory: 10 MB per run."""
    yield
    made.cache_clear()


def host_medians(run: Stragglers, values: np.ndarray) -> np.ndarray:
    """[T, R] to [hosts]."""
    return np.nanmedian(by_host(run.layout, values), axis=(0, 2))


def found_by(run: Stragglers, score: np.ndarray) -> float:
    """Part of the slow hosts among as many hosts with the highest scores."""
    slow = {each.host for each in run.truth.slow_hosts}
    return len(slow & set(np.argsort(-score)[:NUM_SLOW].tolist())) / NUM_SLOW


def against_peers(run: Stragglers, values: np.ndarray, host: int) -> float:
    """Return the median of a host over the usual one of the hosts of its stage."""
    stage = run.layout.pp[::RANKS_PER_HOST]
    peers = np.flatnonzero(stage == stage[host])
    medians = np.nanmedian(by_host(run.layout, values)[:, peers], axis=(0, 2))
    return float(medians[peers == host][0] / np.median(medians))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_and_seed_give_the_same_run(kind):
    first, again = make(kind, 3), make(kind, 3)
    np.testing.assert_array_equal(first.phase_s, again.phase_s)
    np.testing.assert_array_equal(first.end_s, again.end_s)
    assert first.truth.slow_hosts == again.truth.slow_hosts
    assert first.marks == again.marks


def test_another_seed_or_kind_gives_another_run():
    first = {float(np.nansum(run.phase_s)) for kind in KINDS for run in made(kind)}
    assert len(first) == len(KINDS) * len(SEEDS)


def test_an_unknown_kind_or_seed_is_refused():
    with pytest.raises(ValueError, match="one of clean, slow, got 'fast'"):
        make("fast", 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        make("clean", -1)


def test_every_place_of_the_mesh_has_one_rank_and_a_host_one_group():
    orders = set()
    for run in made("slow"):
        layout = run.layout
        places = set(zip(layout.pp, layout.dp, layout.tp, strict=True))
        assert len(places) == NUM_RANKS
        for column in (layout.pp, layout.dp):
            assert (by_host(layout, column) == column[::RANKS_PER_HOST, None]).all()
        orders.add(bool(layout.pp[RANKS_PER_HOST]))
    assert orders == {True, False}


@pytest.mark.parametrize("kind", KINDS)
def test_the_phases_of_all_ranks_add_up_to_the_same_step(kind):
    for run in made(kind):
        assert np.nanmin(run.phase_s) > 0
        total = run.phase_s.astype(np.float64).sum(axis=2)
        spread = np.nanmax(total, axis=1) - np.nanmin(total, axis=1)
        assert (spread < 1e-5 * np.nanmax(total, axis=1)).all()


def test_a_run_has_enough_slow_hosts_of_each_kind_and_a_clean_one_none():
    for run in made("slow"):
        slow = run.truth.slow_hosts
        assert len({each.host for each in slow}) == NUM_SLOW == 13
        kinds = [each.kind for each in slow]
        assert all(kinds.count(kind) >= 2 for kind in HOST_KINDS)
        for each in slow:
            assert {rank // RANKS_PER_HOST for rank in each.ranks} == {each.host}
            assert each.onset_step < len(run.phase_s) / 2
    assert not any(run.truth.slow_hosts for run in made("clean"))


def test_the_weakest_fault_costs_more_than_the_healthiest_host():
    for run in made("slow"):
        assert min(each.cost for each in run.truth.slow_hosts) > severity.WEAKEST_COST
    for kind in KINDS:
        for run in made(kind):
            assert run.truth.healthy_cost.max() < severity.STRONGEST_HEALTHY_COST


def test_each_kind_of_slow_host_shows_in_its_own_place():
    """Against the hosts of its stage, after the onset; medians of about 16 hosts."""
    ratios: dict[str, list[float]] = {kind: [] for kind in HOST_KINDS}
    for run in made("slow"):
        for each in run.truth.slow_hosts:
            phase_s = run.phase_s[each.onset_step :]
            values = phase_s[:, :, FORWARD] + phase_s[:, :, BACKWARD]
            if each.kind == "loader":
                values = phase_s[:, :, DATA]
            if each.kind == "nic":  # when it leaves the sync: waits do not hide that
                values = phase_s[:, :, :OPTIMIZER].sum(axis=2)
            if each.kind in ("throttled", "hog"):
                values = np.sort(values, axis=0)[-len(values) // 5 :]
            ratios[each.kind].append(against_peers(run, values, each.host))
    for kind in ("compute", "one_gpu", "throttled", "hog"):
        assert np.median(ratios[kind]) > 1.06, kind
    assert np.median(ratios["loader"]) > 5
    assert np.mean(np.array(ratios["nic"]) >= 1) > 0.9


def test_a_slow_host_waits_less_than_the_healthy_ones_of_its_stage():
    shorter, longer = [], []
    for run in made("slow"):
        for each in run.truth.slow_hosts:
            ratio = against_peers(
                run, run.phase_s[each.onset_step :, :, SYNC], each.host
            )
            (longer if each.kind == "nic" else shorter).append(ratio)
    assert np.median(shorter) < 0.95
    assert np.median(longer) > 1


def test_simple_rules_do_not_find_the_slow_hosts():
    """Of 13 slow hosts chance finds 10%; each rule takes the 13 worst hosts."""
    rules = {
        "longest step": lambda phase_s: phase_s.sum(axis=2),
        "longest wait": lambda phase_s: phase_s[:, :, SYNC] + phase_s[:, :, OPTIMIZER],
        "longest sync": lambda phase_s: phase_s[:, :, SYNC],
        "longest compute": lambda phase_s: (
            phase_s[:, :, FORWARD] + phase_s[:, :, BACKWARD]
        ),
    }
    for name, rule in rules.items():
        parts = [
            found_by(run, host_medians(run, rule(run.phase_s))) for run in made("slow")
        ]
        assert np.mean(parts) < 0.4, name


def test_healthy_runs_are_as_rich_as_slow_ones():
    uneven = garbage = heavier = missing = marks = 0
    for run in made("clean"):
        compute_s = run.phase_s[:, :, FORWARD] + run.phase_s[:, :, BACKWARD]
        stage = run.layout.pp
        medians = [
            float(np.nanmedian(compute_s[:, stage == each]))
            for each in range(stage.max() + 1)
        ]
        heavier += medians[-1] > 1.02 * np.median(medians[:-1])
        uneven += run.truth.uneven_lengths
        peaks = np.nanmax(compute_s[10:], axis=1) / np.nanmedian(compute_s[10:], axis=1)
        garbage += bool((peaks > 1.1).any())
        missing += int(np.isnan(run.phase_s[:, :, 0]).sum())
        marks += len({mark.kind for mark in run.marks})
        first_s = np.nanmedian(compute_s[0])
        assert first_s > 1.05 * np.nanmedian(compute_s)  # warm-up
    assert 1 <= uneven < len(SEEDS)
    assert garbage == len(SEEDS)
    assert heavier >= 0.8 * len(SEEDS)
    assert missing > 400
    assert marks == 2 * len(SEEDS)


def test_clocks_differ_by_their_offset_and_drift():
    for run in made("clean")[:3]:
        true_s = (run.end_s - run.truth.offset_s) / (1 + run.truth.drift)
        assert np.nanmax(np.nanmax(true_s, axis=1) - np.nanmin(true_s, axis=1)) < 0.01
        assert np.ptp(run.truth.offset_s) > 1e4
        assert len(np.unique(run.truth.offset_s)) == NUM_HOSTS
