"""The generated series are deterministic, well formed, and as sick as they say."""

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from tests.health.series import (
    KINDS,
    REPORT_SEEDS,
    STRONGEST_CLEAN,
    TUNING_SEEDS,
    WEAKEST,
    Kind,
    Series,
    make,
)
from tests.health.series_counters import LAST_VALUE

DATA = ("port_xmit_data", "port_rcv_data")
SEEDS = TUNING_SEEDS[:200]
"""Enough that each variant and each disturbance occurs in each kind."""


@functools.cache
def made(kind: Kind) -> tuple[Series, ...]:
    return tuple(make(kind, seed) for seed in SEEDS)


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    """Give the memory back: 0.3 MB a series."""
    yield
    made.cache_clear()


def of_variant(kind: Kind, variant: str) -> list[Series]:
    found = [series for series in made(kind) if series.truth.variant == variant]
    assert len(found) >= 10
    return found


def reset_times(series: Series) -> list[tuple[float, float]]:
    names = ("reboot", "counters cleared")
    return [
        (each.start_s, each.end_s)
        for each in series.truth.disturbances
        if each.name in names
    ]


def increments(series: Series, name: str) -> np.ndarray:
    """What was counted between samples; wraps undone, 0 where the counter was reset."""
    change = np.diff(series.readings.counters[name].astype(np.int64))
    if name in DATA and series.port.data_counter_bits == 32:
        change %= 2**32
    time_s = series.readings.time_s
    for start_s, end_s in reset_times(series):
        change[(time_s[1:] >= start_s) & (time_s[:-1] <= end_s)] = 0
    return change


def burst_rate(series: Series, start_s: float, end_s: float) -> float | None:
    """Rate that one read of 5 or 10 ms in five exceeds, of those with traffic."""
    rates = []
    for window in series.readings.windows:
        if window.time_s[0] >= start_s and window.time_s[-1] <= end_s:
            words = np.diff(window.port_xmit_data.astype(np.int64))
            # The time is that of the stamp; a later read makes a gap of 5 or 10 ms
            # look like less, so gaps below half of the usual one are left out.
            gap_s = np.diff(window.time_s)
            usual = gap_s > 0.5 * np.median(gap_s)
            if series.port.data_counter_bits == 32:
                words %= 2**32
            rates.append((words * 4 / gap_s)[usual])
    if not rates:
        return None
    all_rates = np.concatenate(rates)
    busy = all_rates[all_rates > 0.1 * series.port.data_bytes_per_s]
    return float(np.quantile(busy, 0.8)) if len(busy) > 50 else None


def test_tuning_and_report_never_share_a_seed():
    assert not set(TUNING_SEEDS) & set(REPORT_SEEDS)
    assert len(REPORT_SEEDS) == 500


def flat(series: Series) -> list[np.ndarray]:
    windows = series.readings.windows
    return [
        series.readings.time_s,
        series.readings.state,
        *(series.readings.counters[name] for name in sorted(series.readings.counters)),
        series.step_end_s,
        series.step_s,
        *(window.time_s for window in windows),
        *(window.port_xmit_data for window in windows),
        *(window.port_rcv_data for window in windows),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_and_seed_give_the_same_series(kind):
    first, again = make(kind, 5), make(kind, 5)
    assert (first.truth, first.port) == (again.truth, again.port)
    assert list(first.readings.counters) == list(again.readings.counters)
    for left, right in zip(flat(first), flat(again), strict=True):
        np.testing.assert_array_equal(left, right)


def test_another_seed_or_kind_gives_another_series():
    starts = {make(kind, seed).step_s[0] for kind in KINDS for seed in range(4)}
    assert len(starts) == 4 * len(KINDS)


def test_an_unknown_kind_or_seed_is_refused():
    with pytest.raises(ValueError, match=r"one of clean, flap, decay, .* got 'slow'"):
        make("slow", 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        make("clean", -1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_series_is_ten_to_thirty_minutes_at_two_rates(kind):
    for series in made(kind):
        time_s = series.readings.time_s
        assert 590 <= time_s[-1] <= 1800
        assert (np.diff(time_s) > 0).all()
        assert 0.99 < np.median(np.diff(time_s)) < 1.01
        assert len(series.readings.windows) >= 3
        for window in series.readings.windows:
            assert (np.diff(window.time_s) > 0).all()
            assert 1.9 < window.time_s[-1] - window.time_s[0] < 2.1
            assert len(window.time_s) in (200, 400)
        for name, values in series.readings.counters.items():
            assert values.dtype == np.uint64, name
            assert values.shape == time_s.shape, name
        assert (np.diff(series.step_end_s) > 0).all()
        assert 0.3 < np.median(series.step_s) < 80
        assert len(series.step_s) == len(series.step_end_s) >= 10


@pytest.mark.parametrize("kind", KINDS)
def test_counters_fall_only_where_they_are_reset_or_wrap(kind):
    falls = wraps = 0
    for series in made(kind):
        readings, resets = series.readings, reset_times(series)
        wrapping = series.port.data_counter_bits == 32
        for name, values in readings.counters.items():
            if name in LAST_VALUE:
                assert values.max() <= LAST_VALUE[name]
            if wrapping and name in DATA:
                assert values.max() < 2**32
            for index in np.flatnonzero(np.diff(values.astype(np.int64)) < 0):
                before_s, after_s = readings.time_s[index : index + 2]
                reset = any(s <= after_s and e >= before_s for s, e in resets)
                assert reset or (wrapping and name in DATA), (name, before_s)
                falls += reset
                wraps += not reset
    assert falls > 20
    assert wraps > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_no_port_is_faster_than_its_wire(kind):
    for series in made(kind):
        gap_s = np.diff(series.readings.time_s)
        # A read comes up to 2 ms after its stamp.
        most = series.port.data_bytes_per_s * (gap_s + 0.002) * 1.05
        if series.port.data_counter_bits == 32:
            most[gap_s > 3] = np.inf  # may have wrapped twice: ambiguous
        for name in DATA:
            assert (4 * increments(series, name) <= most).all()
            assert 4 * increments(series, name).sum() > 0.02 * most[most < np.inf].sum()


def test_a_count_is_four_bytes():
    parts = []
    for series in made("clean"):
        rate = burst_rate(series, 0, series.readings.time_s[-1])
        if rate is not None:
            parts.append(rate / series.port.data_bytes_per_s)
    assert len(parts) > 100
    # Drawn: 0.60 to 0.88 of the wire, and 0.85 to 1 of that in each phase.
    assert 0.6 < np.median(parts) < 0.85
    assert np.quantile(parts, 0.05) > 0.45
    assert max(parts) < 1


def test_a_reboot_sets_every_counter_to_zero():
    num_reboots = 0
    for series in made("clean"):
        for each in series.truth.disturbances:
            after = series.readings.time_s > each.start_s + 1.01
            if each.name != "reboot" or not after.any():
                continue
            num_reboots += 1
            for name in ("link_downed", "link_error_recovery", "carrier_changes"):
                if name in series.readings.counters:
                    assert series.readings.counters[name][after][0] <= 1
            words = series.readings.counters["port_xmit_data"][after][0]
            assert 4 * words < 30 * series.port.data_bytes_per_s
    assert num_reboots >= 5


def test_a_flap_lengthens_the_step_that_it_meets():
    checked = 0
    for series in made("flap"):
        begin_s = series.step_end_s - series.step_s
        assert (begin_s[1:] >= series.step_end_s[:-1] - 1e-6).all()
        stall_s = series.truth.severity.longest_stall_s
        if len(series.truth.events) == 1 and stall_s >= 2:
            event = series.truth.events[0]
            hit = (begin_s < event.start_s) & (series.step_end_s > event.start_s)
            if hit.any():  # not cut off with its run
                assert series.step_s[hit][0] > stall_s
                assert series.step_end_s[hit][0] > event.end_s
                checked += 1
    assert checked >= 20


@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_seconds_read_the_same_counter(kind):
    for series in made(kind)[:40]:
        if series.port.data_counter_bits == 32:
            continue
        counts = series.readings.counters["port_xmit_data"]
        for window in series.readings.windows:
            index = int(np.searchsorted(series.readings.time_s, window.time_s[0]))
            if 2 < index < len(counts) - 4 and not reset_times(series):
                assert counts[index - 2] <= window.port_xmit_data[0]
                assert window.port_xmit_data[-1] <= counts[index + 4]


def test_a_clean_series_stays_below_the_strongest_disturbance():
    for series in made("clean"):
        severity = vars(series.truth.severity)
        for name, most in vars(STRONGEST_CLEAN).items():
            assert severity[name] <= most, (name, severity)
        assert series.truth.onset_s is None
        assert not series.truth.events
        assert increments(series, "link_downed").sum() == 0
        assert (series.readings.state == 4).all()


def test_no_fault_is_weaker_than_the_weakest():
    for series in made("flap"):
        severity = series.truth.severity
        stalled = severity.longest_stall_s >= WEAKEST.longest_stall_s
        resent = severity.most_retransmissions >= WEAKEST.most_retransmissions
        assert severity.links_downed >= WEAKEST.links_downed or (stalled and resent)
    for series in made("decay"):
        severity = series.truth.severity
        if series.truth.variant == "errors":
            assert severity.errors >= WEAKEST.errors
        else:
            assert severity.rate_loss >= WEAKEST.rate_loss
    for series in made("neighbour"):
        assert series.truth.severity.step_cost >= WEAKEST.step_cost
        start_s, end_s = series.truth.onset_s, series.truth.offset_s
        assert start_s is not None
        assert end_s is not None
        assert end_s - start_s >= 149


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_life_of_a_healthy_run(kind):
    names = {each.name for series in made(kind) for each in series.truth.disturbances}
    usual = {"save", "restart", "reboot", "batch size", "slow host", "contention"}
    usual |= {"dip", "load that fits", "symbol errors", "counters cleared"}
    assert usual <= names
    layers = {series.port.link_layer for series in made(kind)}
    assert layers == {"InfiniBand", "Ethernet"}


def test_bytes_per_step_are_alike_while_the_load_is():
    spreads = []
    for series in made("clean"):
        names = {each.name for each in series.truth.disturbances}
        if np.median(series.step_s) < 6 or names & {"batch size", "save", "restart"}:
            continue
        sent = np.cumsum(increments(series, "port_xmit_data"))
        at_end = np.interp(series.step_end_s, series.readings.time_s[1:], sent)
        # Nothing lies between two reports that are one step apart.
        next_to = np.diff(series.step_end_s) < 1.02 * series.step_s[1:]
        per_step = np.diff(at_end)[next_to]
        if len(per_step) > 10:
            spreads.append(np.std(per_step) / np.mean(per_step))
    assert len(spreads) >= 8
    # A step ends within a second that is only known in full.
    assert np.median(spreads) < 0.1


def test_a_port_that_went_down_counts_it_and_shows_it():
    seen_down = 0
    for series in of_variant("flap", "down"):
        if reset_times(series):
            continue
        downed = increments(series, "link_downed").sum()
        assert downed == series.truth.severity.links_downed >= 1
        if series.port.link_layer == "Ethernet":
            assert increments(series, "carrier_changes").sum() == 2 * downed
        down_s = series.readings.time_s[series.readings.state != 4]
        for time_s in down_s:
            # The read comes up to 2 ms after the time stamp.
            assert any(
                e.start_s - 0.002 <= time_s <= e.end_s for e in series.truth.events
            )
        seen_down += len(down_s) > 0
    assert seen_down >= 10


@pytest.mark.parametrize("variant", ["recovery", "remote"])
def test_a_flap_may_leave_the_port_up(variant):
    for series in of_variant("flap", variant):
        if reset_times(series):
            continue
        assert increments(series, "link_downed").sum() == 0
        assert (series.readings.state == 4).all()
        recovered = increments(series, "link_error_recovery")
        events = series.truth.events
        time_s = series.readings.time_s
        near = [(time_s[1:] >= e.start_s) & (time_s[:-1] <= e.start_s) for e in events]
        at_flap = np.logical_or.reduce(near)
        assert (recovered[at_flap] > 0).all() == (variant == "recovery")
        assert increments(series, "local_ack_timeout_err")[at_flap].max() >= 8


def test_no_training_traffic_passes_during_an_outage():
    checked = 0
    for series in made("flap"):
        time_s, sent = series.readings.time_s, increments(series, "port_xmit_data")
        usual = np.median((sent / np.diff(time_s))[sent > 0])
        for each in series.truth.events:
            inside = (time_s[:-1] > each.start_s + 0.01) & (time_s[1:] < each.end_s)
            if inside.any() and not reset_times(series):
                rate = sent[inside] / np.diff(time_s)[inside]
                assert (rate < 0.05 * usual).all()
                checked += 1
    assert checked >= 30


@pytest.mark.parametrize("variant", ["ramp", "lanes"])
def test_the_rate_of_bursts_falls_by_what_the_truth_says(variant):
    errors = []
    for series in of_variant("decay", variant):
        end_s, onset_s = series.readings.time_s[-1], series.truth.onset_s
        assert onset_s is not None
        before = burst_rate(series, 0, max(onset_s, 0.2 * end_s))
        after = burst_rate(series, 0.9 * end_s, end_s)
        if before and after:
            errors.append(1 - after / before - series.truth.severity.rate_loss)
    assert len(errors) >= 5
    # Phases differ by up to 15% in their rate, and a window sees some of them.
    assert abs(np.median(errors)) < 0.05


def test_symbol_errors_double_while_the_rate_holds():
    for series in of_variant("decay", "errors"):
        assert series.truth.severity.rate_loss <= STRONGEST_CLEAN.rate_loss
        if reset_times(series):
            continue
        counted, time_s = increments(series, "symbol_error"), series.readings.time_s[1:]
        late = counted[time_s > 0.8 * time_s[-1]].sum()
        early = counted[time_s < 0.5 * time_s[-1]].sum()
        specified = series.port.specified_errors_per_s * 0.2 * time_s[-1]
        assert late > 2 * specified
        assert late > early


def test_symbol_errors_of_a_healthy_port_are_within_the_specification():
    for kind in ("clean", "neighbour"):
        for series in made(kind):
            counted = increments(series, "symbol_error").sum()
            specified = series.port.specified_errors_per_s * series.readings.time_s[-1]
            # Ten more for a single burst; four deviations of a Poisson process.
            assert counted <= specified + 10 + 4 * np.sqrt(specified + 1)


def test_a_neighbour_lengthens_steps_and_marks_traffic_but_leaves_the_link_alone():
    steps, marks = [], []
    for series in made("neighbour"):
        start_s, end_s = series.truth.onset_s, series.truth.offset_s
        assert start_s is not None
        assert end_s is not None
        assert increments(series, "link_downed").sum() == 0
        assert (series.readings.state == 4).all()
        loaded = (series.step_end_s > start_s) & (series.step_end_s < end_s)
        if loaded.sum() > 5 and (~loaded).sum() > 5:
            other_s = np.median(series.step_s[~loaded])
            steps.append(np.median(series.step_s[loaded]) / other_s)
        roce = series.port.link_layer == "Ethernet"
        name = "rp_cnp_handled" if roce else "port_xmit_wait"
        counted, time_s = increments(series, name), series.readings.time_s[1:]
        inside = (time_s > start_s) & (time_s < end_s)
        marks.append(counted[inside].mean() / (counted[~inside].mean() + 0.1))
    # The truth says at least 1.1 in the mean; the median step may meet less load.
    assert np.median(steps) > 1.1
    assert np.quantile(steps, 0.1) > 1.0
    assert np.median(marks) > 3
    assert np.quantile(marks, 0.1) > 1.0
