"""Only a lasting drop of the rate is a decay."""

import dataclasses

import numpy as np
import pytest

from mjax.health.watch.bursts import Burst, Bursts, find_bursts
from mjax.health.watch.decay import RateDecay
from mjax.health.watch.explain import explain
from mjax.health.watch.levels import Levels, find_levels
from mjax.health.watch.samples import Detection, Port, Sample, Step, Window
from mjax.health.watch.thresholds import DecayThresholds, ExplanationThresholds
from mjax.health.watch.watcher import Watcher
from tests.health.watch.test_detectors import NARROW, kept

DECAY, LIMITS = DecayThresholds(), ExplanationThresholds()
SIZES_S = (0.05, 0.11)


def levels(level: list[float]) -> Levels:
    """Levels every 30 s."""
    noise = 0.01 * np.random.default_rng(0).standard_normal(len(level))
    return Levels(
        time_s=30.0 * np.arange(len(level)),
        level=np.array(level) + noise,
        std=np.full(len(level), 0.02),
    )


def bursts(share: float, *, size: int | None = None) -> tuple[Burst, ...]:
    """Bursts of one or two phases, at a fraction of their rate."""
    phases = zip(SIZES_S, (0.8, 0.68), strict=True)
    each = tuple(
        Burst(rate=rate * share, length_s=size_s / rate / share, size_s=size_s)
        for size_s, rate in phases
    )
    return each if size is None else (each[size],) * 3


def test_a_steady_level_is_nothing() -> None:
    assert explain(levels([0.0] * 20), LIMITS).gain < DECAY.over_nothing


@pytest.mark.parametrize("power", [0.7, 1.0, 2.0])
def test_a_level_that_falls_for_good_is_a_decay(power: float) -> None:
    ramp = np.clip(np.linspace(-0.3, 1, 20), 0, 1) ** power
    best = explain(levels(np.log(1 - 0.25 * ramp).tolist()), LIMITS)
    assert best.gain > DECAY.over_nothing
    assert 0.16 <= best.lost_part <= 0.37


@pytest.mark.parametrize("depth", np.linspace(0.3, 1.4, 23).tolist())
def test_no_loss_falls_between_the_losses_that_are_tried(depth: float) -> None:
    best = explain(levels([0.0] * 8 + [-depth] * 8), LIMITS)
    assert best.gain > 25
    assert best.lost_part == pytest.approx(1 - np.exp(-depth), abs=0.05)


def test_two_slow_windows_at_the_end_are_no_decay() -> None:
    assert explain(levels([0.0] * 16 + [-0.4] * 2), LIMITS).gain < DECAY.over_nothing
    assert explain(levels([0.0] * 16 + [-0.4] * 4), LIMITS).gain > DECAY.over_nothing


def test_a_level_that_comes_back_is_no_decay() -> None:
    load = [-0.4, 0.0, -0.7, -0.5, 0.0, -0.3, -0.6, 0.0]
    best = explain(levels([0.0] * 6 + load + [0.0] * 4), LIMITS)
    assert best.gain < DECAY.over_nothing


def test_windows_that_catch_only_the_slow_phase_are_no_loss() -> None:
    windows = [(30.0 * i, bursts(1.0)) for i in range(6)]
    windows += [(30.0 * i, bursts(1.0, size=1)) for i in range(6, 12)]
    found = find_levels(windows, DECAY)
    assert float(np.abs(found.level).max()) < 0.01


def test_windows_that_catch_only_the_fast_phase_do_not_hide_a_loss() -> None:
    windows = [(30.0 * i, bursts(1.0)) for i in range(3)]
    windows += [(30.0 * i, bursts(1.0, size=1)) for i in range(3, 6)]
    windows += [(30.0 * i, bursts(0.85, size=0)) for i in range(6, 12)]
    found = find_levels(windows, DECAY)
    assert found.level[6:].max() < -0.12


def test_a_port_that_lost_lanes_decays_unless_bursts_reach_the_old_rate() -> None:
    def judge(shares: list[float], gain: float = 0.0) -> Detection | None:
        decay = RateDecay(DECAY, LIMITS)
        for index, share in enumerate(shares):
            each = bursts(share)
            decay.feed(30.0 * index, Bursts(each=each))
        return decay.judge(gain)

    found = judge([1.0] * 8 + [0.6] * 8)
    assert found is not None
    assert found.kind == "decay"
    assert found.score >= 1
    assert judge([1.0] * 8 + [0.6] * 8, gain=500.0) is None
    assert judge([1.0] * 8 + [0.6, 0.9, 0.5, 1.0, 0.7, 0.4, 1.0, 1.0]) is None


def test_a_burst_has_a_size_unless_the_window_cuts_it_off() -> None:
    port = Port(
        link_layer="Ethernet",
        rate_gbit_per_s=100.0,
        data_bytes_per_s=4e9,
        data_counter_bits=64,
    )
    busy = np.array([1] * 6 + [0] * 4 + [1] * 10 + [0] * 4 + [1] * 6)
    words = np.concatenate(([0], np.cumsum(busy * 5_000_000)))
    window = Window(time_s=np.arange(31) * 0.01, port_xmit_data=words.astype(np.uint64))
    found = find_bursts(port, window, 0.1)
    assert found is not None
    assert [each.size_s is None for each in found.each] == [True, False, True]
    assert found.each[1].size_s == pytest.approx(0.05)
    assert found.each[1].rate == pytest.approx(0.5)


def test_memory_is_bounded_with_windows_steps_and_errors() -> None:
    limits = dataclasses.replace(DECAY, most_windows=20, most_samples=50)
    watcher = Watcher(NARROW)
    decay = RateDecay(limits, LIMITS)
    sizes = []
    for second in range(7000):
        time_s = float(second)
        names = {"port_xmit_data": second * 10**8 % 2**32, "symbol_error": second}
        watcher.feed(Sample(time_s=time_s, counters=names, state=4))
        watcher.feed(Step(end_s=time_s, step_s=1.0))
        if second % 20 == 0:
            words = np.cumsum([0] + [0] * 3 + [8_000_000] * 10 + [0] * 3)
            data = (words % 2**32).astype(np.uint64)
            window = Window(time_s=time_s + np.arange(17) * 0.01, port_xmit_data=data)
            watcher.feed(window)
            each = bursts(1.0)
            decay.feed(time_s, Bursts(each=each))
        if second in (5000, 6999):
            sizes.append((kept(watcher), kept(decay)))
    assert sizes[0][0] > 100
    assert sizes[1][0] <= sizes[0][0] + 5
    assert sizes[1][1] == sizes[0][1]
