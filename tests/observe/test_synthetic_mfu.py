"""The generated MFU series have the signatures of their kinds and healthy noise."""

import functools

import numpy as np
import pytest

from tests.observe import synthetic_severity as severity
from tests.observe.synthetic_mfu import KINDS, LEVELS, Kind, Series, make

SEEDS = severity.TUNING_SEEDS[:50]


@functools.cache
def made(kind: Kind) -> tuple[Series, ...]:
    return tuple(make(kind, seed) for seed in SEEDS)


def near_mark(series: Series, time_s: float, before_s: float = 1.0) -> bool:
    return any(
        mark.start_s - before_s <= time_s <= mark.end_s + 1.0 for mark in series.marks
    )


def relative(series: Series) -> np.ndarray:
    return series.mfu / series.expected_mfu


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_and_seed_give_the_same_series(kind):
    first, again = make(kind, 5), make(kind, 5)
    assert (first.truth, first.marks) == (again.truth, again.marks)
    np.testing.assert_array_equal(first.mfu, again.mfu)
    np.testing.assert_array_equal(first.step_end_s, again.step_end_s)


def test_another_seed_or_kind_gives_another_series():
    first = {series.mfu[0] for kind in KINDS for series in made(kind)}
    assert len(first) == len(KINDS) * len(SEEDS)


def test_an_unknown_kind_or_seed_is_refused():
    with pytest.raises(ValueError, match=r"one of clean, dead_link, .* got 'slow'"):
        make("slow", 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        make("clean", -1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_series_is_well_formed(kind):
    for series in made(kind):
        assert len(series.mfu) == len(series.step_s) == len(series.step_end_s) > 20
        assert (np.diff(series.step_end_s) > 0).all()
        # A step is no longer than the time since the one before it ended.
        gaps_s = np.diff(series.step_end_s)
        assert (series.step_s[1:] <= gaps_s + 1e-6).all()
        assert 3000 < series.step_end_s[-1] < 25_000
        assert series.mfu.min() > 0.0005
        assert series.mfu.max() < 0.65
        assert all(mark.start_s <= mark.end_s for mark in series.marks)


@pytest.mark.parametrize("kind", LEVELS)
def test_a_lasting_fault_holds_its_level_from_its_onset(kind):
    late = 0
    for series in made(kind):
        onset_s = series.truth.onset_s
        assert onset_s is not None
        after = series.step_end_s > onset_s + 60
        low, high = LEVELS[kind]
        assert 0.93 * low < np.median(relative(series)[after]) < 1.07 * high
        if onset_s > 0:
            late += 1
            before = series.step_end_s < onset_s
            assert np.median(relative(series)[before]) > 0.93
    assert 10 <= late <= 40


def test_a_clean_run_dips_only_at_marks_starts_and_stalls():
    alarms = 0
    for series in made("clean"):
        assert {"save", "eval"} <= {mark.kind for mark in series.marks}
        deep = np.flatnonzero(relative(series) < 0.3)
        for step in deep:
            end_s, step_s = series.step_end_s[step], series.step_s[step]
            begin_s = end_s - step_s
            starts = [0.0, *(m.end_s for m in series.marks if m.kind == "restart")]
            started = any(begin_s - 60 < start < end_s + 1 for start in starts)
            lone = any(abs(end_s - each) < 1e-6 for each in series.truth.lone_dip_s)
            assert started or lone or near_mark(series, end_s, step_s), end_s
        alarms += len(deep) >= 3
        assert series.truth.ragged < severity.STRONGEST_HEALTHY_RAGGED
        assert series.truth.onset_s is None
        assert not series.truth.dip_s
    # A rule that knows no marks raises an alarm on many of them, but not on all:
    # some trainers do not count a save as part of a step.
    assert 15 < alarms < 45


def test_regular_dips_have_one_interval_and_no_mark():
    for series in made("regular_dips"):
        dips_s = np.array(series.truth.dip_s)
        at = np.searchsorted(series.step_end_s, dips_s)
        first = at[np.insert(np.diff(at) > 3, 0, True)]  # a dip is up to three steps
        assert len(first) >= 5
        assert len(set(np.diff(first).tolist())) == 1
        unmarked = [not near_mark(series, time_s) for time_s in dips_s]
        assert np.mean(unmarked) > 0.4
        assert (relative(series)[at] < 0.25).all()


def test_rare_dips_come_about_every_fifteen_minutes():
    gaps_s, varied = [], 0
    for series in made("rare_dips"):
        dips_s = np.array(series.truth.dip_s)
        first = dips_s[np.insert(np.diff(dips_s) > 120, 0, True)]
        gaps = np.diff(first)
        gaps_s += gaps.tolist()
        varied += len(gaps) >= 2 and gaps.std() > 0.1 * gaps.mean()
    assert 600 < np.mean(gaps_s) < 1200
    assert varied > 40


def test_a_decay_is_reset_by_each_restart():
    for series in made("slow_decay"):
        restart = next(mark for mark in series.marks if mark.kind == "restart")
        value, time_s = relative(series), series.step_end_s
        length_s = 0.1 * restart.start_s

        def level(start_s: float, end_s: float, value=value, time_s=time_s) -> float:
            return float(np.median(value[(time_s > start_s) & (time_s < end_s)]))

        before = level(restart.start_s - length_s, restart.start_s)
        after = level(restart.end_s, restart.end_s + length_s)
        assert after > before * (1 + 0.5 * series.truth.lost)
        assert series.truth.lost >= severity.DECAY[0]


def test_a_hot_gpu_is_fast_for_some_seconds_after_each_start():
    for series in made("thermal"):
        value, time_s = relative(series), series.step_end_s
        # The first steps compile; the rest of the first 12 s is fast.
        early = value[(time_s < time_s[3] + 8) & (np.arange(len(value)) >= 4)]
        assert len(early) >= 1
        assert np.median(early) > 0.9
        low, high = severity.THERMAL_LEVEL
        assert 0.93 * low < np.median(value) < 1.07 * high
        for mark in series.marks:
            if mark.kind == "restart":
                soon = np.flatnonzero(time_s > mark.end_s)[:6]
                assert value[soon].max() > 0.9


def test_a_ragged_series_wanders_between_ninety_percent_and_all():
    for series in made("ragged"):
        assert series.truth.ragged > severity.WEAKEST_RAGGED
        low, high = np.quantile(relative(series), [0.2, 0.8])
        assert 0.84 < low < high < 1.05


def test_healthy_disturbances_are_in_every_kind():
    for kind in KINDS:
        restarts = sum(any(m.kind == "restart" for m in s.marks) for s in made(kind))
        assert restarts >= 10, kind
        assert {series.truth.pause_in_step for series in made(kind)} == {True, False}
        assert sum(len(series.truth.lone_dip_s) for series in made(kind)) >= 2, kind
        errors = [series.mfu.max() / series.expected_mfu for series in made(kind)]
        assert np.std(errors) > 0.005, kind
