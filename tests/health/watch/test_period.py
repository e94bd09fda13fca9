"""Periodic traffic is found, noise is not; a lost period is reported."""

import dataclasses
import json
import math

import numpy as np
import pytest

from mjax.health.watch import command
from mjax.health.watch.compare_ports import compare
from mjax.health.watch.counters import Counters
from mjax.health.watch.period import (
    Steps,
    Traffic,
    find_period,
    find_step,
    fold,
    log10_chance,
)
from mjax.health.watch.samples import Port, Sample, Step, Window
from mjax.health.watch.sampling import SampledPort
from mjax.health.watch.step_traffic import StepTraffic
from mjax.health.watch.thresholds import PeriodThresholds
from mjax.health.watch.watcher import Watcher, detect
from tests.health.series import make
from tests.health.watch.observations import observe, port_of
from tests.health.watch.traffic_faults import host, spoil

LIMITS = PeriodThresholds()
PORT = Port(
    link_layer="InfiniBand",
    rate_gbit_per_s=400.0,
    data_bytes_per_s=5e10,
    data_counter_bits=64,
)


def bursts(step_s, seconds=240, seed=0, noise=0.05, sample_s=1.0, wander=0.0):
    """Return traffic that is on for 30% of each step, read at uneven times."""
    rng = np.random.default_rng(seed)
    time_s = np.arange(0, seconds, sample_s)
    time_s = time_s + 0.004 * sample_s * rng.standard_normal(len(time_s))
    time_s = np.sort(time_s[rng.random(len(time_s)) > 0.02])
    length_s = step_s * (1 + wander * rng.standard_normal(int(2 * seconds / step_s)))
    starts_s = np.concatenate(([0.0], np.cumsum(length_s)))
    edges_s = np.stack([starts_s[:-1], starts_s[:-1] + 0.3 * length_s], 1).ravel()
    sums = np.repeat(np.arange(len(length_s)), 2) + np.tile([0.0, 1.0], len(length_s))
    rate = np.diff(np.interp(time_s, edges_s, sums)) / np.diff(time_s)
    rate = rate * (1 + noise * rng.standard_normal(len(rate)))
    return Traffic(start_s=time_s[:-1], end_s=time_s[1:], rate=rate), steps(
        step_s, seconds
    )


def steps(step_s, seconds=240):
    """Return steps of one length."""
    end_s = np.arange(step_s, seconds, step_s)
    return Steps(end_s=end_s, step_s=np.full(len(end_s), step_s))


def red(phi, seed, num=240):
    """Return noise that changes slowly."""
    noise = np.random.default_rng(seed).standard_normal(num + 100)
    for index in range(1, len(noise)):
        noise[index] += phi * noise[index - 1]
    time_s = np.arange(num + 1.0)
    return Traffic(start_s=time_s[:-1], end_s=time_s[1:], rate=noise[100:])


@pytest.mark.parametrize("step_s", [2.7, 5.3, 11.0, 19.0])
def test_the_period_of_bursts_is_the_step_with_and_without_steps(step_s):
    traffic, reported = bursts(step_s)
    known = find_step([traffic], reported)
    assert known is not None
    assert known.period_s == pytest.approx(step_s, rel=0.01)
    assert known.log10_false_alarm < -20
    assert known.strength > 0.5
    assert not known.aliased
    blind = find_period([traffic])
    assert blind is not None
    assert blind.period_s == pytest.approx(step_s, rel=0.02)


def test_steps_that_vary_keep_their_period():
    traffic, reported = bursts(5.0, wander=0.05)
    found = find_step([traffic], reported)
    assert found is not None
    assert found.log10_false_alarm < -10


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_red_noise_has_a_period_no_more_often_than_is_said(phi):
    reported = steps(6.0)
    blind, known = [], []
    for seed in range(60):
        traffic = red(phi, seed)
        one, two = find_period([traffic]), find_step([traffic], reported)
        assert one is not None
        assert two is not None
        blind.append(one.log10_false_alarm)
        known.append(two.log10_false_alarm)
    assert min(*blind, *known) > -4
    # 3 of 60 are expected at 5%; 9 would come once in 300 times.
    assert sum(each < math.log10(0.05) for each in blind) < 9
    assert sum(each < math.log10(0.05) for each in known) < 9


def test_shuffled_seconds_have_no_period():
    traffic, reported = bursts(5.3)
    rate = np.random.default_rng(1).permutation(traffic.rate)
    shuffled = dataclasses.replace(traffic, rate=rate)
    found = find_step([shuffled], reported)
    assert found is not None
    assert found.log10_false_alarm > -3
    assert found.strength < 0.1


@pytest.mark.parametrize(
    ("part", "sines", "free", "chance"),
    # One sine: p = (1 - part) ** free. Two: that times 1 + free * part.
    [(0.3, 1, 10.0, 0.7**10), (0.3, 2, 10.0, 0.7**10 * 4), (0.0, 3, 5.0, 1.0)],
)
def test_chance_is_the_tail_of_the_beta_distribution(part, sines, free, chance):
    assert 10 ** log10_chance(part, sines, free) == pytest.approx(chance)


def test_a_frequency_above_half_the_rate_folds_back():
    assert fold(np.array([0.3, 0.7, 1.2, 1.9]), 1.0) == pytest.approx(
        [0.3, 0.3, 0.2, 0.1]
    )


def test_a_short_step_is_told_as_an_alias_and_never_as_a_period_of_its_own():
    traffic, reported = bursts(0.8)
    found = find_step([traffic], reported)
    assert found is not None
    assert found.aliased
    assert found.period_s == pytest.approx(0.8, rel=0.01)
    blind = find_period([traffic])
    assert blind is not None
    assert blind.period_s == pytest.approx(4.0, rel=0.02)
    assert any(each == pytest.approx(0.8, rel=0.01) for each in blind.aliases_s)


def test_a_step_as_long_as_a_sample_cannot_be_resolved():
    traffic, reported = bursts(1.0)
    assert find_step([traffic], reported) is None


def test_the_step_of_another_run_is_not_the_period():
    traffic, _ = bursts(5.0)
    found = find_step([traffic], steps(6.1))
    assert found is not None
    assert found.log10_false_alarm > -4


def test_steps_that_become_longer_are_followed():
    first, one = bursts(4.0, seconds=120)
    second, two = bursts(4.8, seconds=120)
    moved = dataclasses.replace(
        second, start_s=second.start_s + 120, end_s=second.end_s + 120
    )
    both = Steps(
        end_s=np.concatenate([one.end_s, two.end_s + 120]),
        step_s=np.concatenate([one.step_s, two.step_s]),
    )
    wrong = Steps(end_s=both.end_s, step_s=np.full(len(both.end_s), 4.4))
    followed = find_step([first, moved], both)
    unfollowed = find_step([first, moved], wrong)
    assert followed is not None
    assert unfollowed is not None
    assert followed.strength > 0.5
    assert followed.strength > 2 * unfollowed.strength


def test_too_little_or_constant_traffic_has_no_period():
    traffic, reported = bursts(5.0)
    assert find_step([traffic.cut(np.arange(5))], reported) is None
    assert find_period([traffic.cut(np.arange(5))]) is None
    flat = dataclasses.replace(traffic, rate=np.ones(len(traffic)))
    found = find_step([flat], reported)
    assert found is not None
    assert (found.strength, found.log10_false_alarm) == (0.0, 0.0)


def feed(watcher, traffic, reported):
    """Feed a watcher; return what it finds."""
    sent = np.cumsum(traffic.rate * (traffic.end_s - traffic.start_s)) * 1e9
    seen = [
        Sample(time_s=float(time_s), counters={"port_xmit_data": int(words)}, state=4)
        for time_s, words in zip(traffic.end_s, sent, strict=True)
    ]
    seen += [
        Step(end_s=float(end_s), step_s=float(step_s))
        for end_s, step_s in zip(reported.end_s, reported.step_s, strict=True)
    ]
    seen.sort(key=lambda one: one.time_s if isinstance(one, Sample) else one.end_s)
    return [each for one in seen for each in watcher.feed(one)]


@pytest.mark.parametrize("seed", [600, 601, 609])
def test_traffic_whose_seconds_change_places_has_lost_its_period(seed):
    series = make("clean", seed)
    bad, onset_s = spoil(series, "shuffle", seed, series)
    kinds = [each.kind for each in detect(port_of(series), observe(series))]
    assert kinds == []
    found = detect(port_of(bad), observe(bad))
    (loss,) = [each for each in found if each.kind == "aperiodic"]
    assert loss.until_s > onset_s
    assert loss.numbers["strength"] < 0.25 * loss.numbers["usual_strength"]
    assert loss.score > 1


def test_traffic_with_another_period_than_the_step_is_told():
    traffic, _ = bursts(12.0, seconds=600)
    found = feed(Watcher(PORT), traffic, steps(4.3, 600))
    (other,) = [each for each in found if each.kind == "other_period"]
    assert other.numbers["period_s"] == pytest.approx(12.0, rel=0.02)
    assert other.numbers["step_s"] == 4.3


def test_lost_traffic_of_steps_below_two_samples_is_never_accused():
    traffic, reported = bursts(0.8, seconds=900)
    late = traffic.start_s > 450
    rate = traffic.rate.copy()
    rate[late] = np.random.default_rng(2).permutation(rate[late])
    watcher = Watcher(PORT)
    assert feed(watcher, dataclasses.replace(traffic, rate=rate), reported) == []


def test_what_a_pause_of_the_run_sends_is_no_loss():
    traffic, reported = bursts(5.0, seconds=1200)
    paused = (traffic.start_s > 500) & (traffic.end_s < 800)
    save = 10 * np.random.default_rng(3).random(len(traffic))
    rate = np.where(paused, save, traffic.rate)
    kept = (reported.end_s < 500) | (reported.end_s > 801)
    reported = Steps(end_s=reported.end_s[kept], step_s=reported.step_s[kept])
    watcher = Watcher(PORT)
    assert feed(watcher, dataclasses.replace(traffic, rate=rate), reported) == []
    assert watcher.step_traffic.summary().verdict == "with the step"


def test_a_pause_is_cut_out_and_separates_what_came_before_and_after():
    traffic, reported = bursts(5.0, seconds=240)
    kept = (reported.end_s < 100) | (reported.end_s > 161)
    watcher = Watcher(PORT)
    feed(
        watcher,
        traffic,
        Steps(end_s=reported.end_s[kept], step_s=reported.step_s[kept]),
    )
    block = watcher.step_traffic.traffic()
    assert block is not None
    before, after = block[0]
    assert 90 < before.end_s[-1] < 97
    assert 163 < after.start_s[0] < 170


def window(start_s, step_s, seed):
    """Return three seconds of reads at 100 Hz of bursts that repeat with a step."""
    traffic, _ = bursts(step_s, seconds=3, seed=seed, sample_s=0.01, noise=0.1)
    sums = np.cumsum(traffic.rate * (traffic.end_s - traffic.start_s)) * 1e9
    return Window(time_s=traffic.end_s + start_s, port_xmit_data=sums.astype(np.uint64))


def test_a_step_as_long_as_a_sample_is_seen_in_windows():
    traffic, reported = bursts(1.0)
    watcher = Watcher(PORT)
    feed(watcher, traffic, reported)
    assert watcher.step_traffic.summary().verdict == "not resolvable"
    for number in range(6):
        watcher.feed(window(240.0 + 30 * number, 1.0, number))
    known = watcher.step_traffic.summary()
    assert known.verdict == "with the step, in windows"
    assert "1 s, with the step, in windows" in known.text


def test_without_steps_a_period_comes_with_its_aliases():
    traffic, _ = bursts(5.0)
    follower = StepTraffic(PORT, LIMITS)
    counters = Counters(PORT, 10.0)
    sent = np.cumsum(traffic.rate * (traffic.end_s - traffic.start_s)) * 1e9
    for time_s, words in zip(traffic.end_s, sent, strict=True):
        sample = Sample(time_s=float(time_s), counters={"port_xmit_data": int(words)})
        increment = counters.feed(sample)
        if increment is not None:
            follower.feed(increment)
    known = follower.summary()
    assert known.verdict == "unknown step"
    assert "5 s or its aliases (1.25, 0.833, 0.556, 0.455 s)" in known.text


def followers(fault):
    """Follow the ports of a host; return them and the time."""
    series, other = make("clean", 609), make("clean", 612)
    out = {}
    for number, port in enumerate(host(series, fault, 3, other, 4)):
        watcher = Watcher(port_of(port))
        for seen in observe(port):
            watcher.feed(seen)
        out[str(number)] = watcher.step_traffic
    return out, float(series.readings.time_s[-1])


@pytest.mark.parametrize(
    ("fault", "words"), [("shuffle", "no period"), ("late", "traffic comes +")]
)
def test_the_port_that_is_unlike_the_others_is_named(fault, words):
    traffic, now_s = followers(fault)
    compared = compare(traffic, now_s, LIMITS)
    assert set(compared.unlike) == {"3"}
    assert words in compared.unlike["3"].evidence


def test_the_port_with_another_period_is_named():
    traffic = {}
    for number, period_s in enumerate((4.3, 4.3, 4.3, 12.0)):
        watcher = Watcher(PORT)
        sent, _ = bursts(period_s, seed=number)
        feed(watcher, sent, steps(4.3))
        traffic[str(number)] = watcher.step_traffic
    compared = compare(traffic, 240.0, LIMITS)
    assert set(compared.unlike) == {"3"}
    assert compared.unlike["3"].numbers["period_s"] == pytest.approx(12.0, rel=0.02)
    assert compared.unlike["3"].numbers["others_period_s"] == pytest.approx(
        4.3, rel=0.02
    )


def test_ports_that_are_alike_are_not_named_and_two_cannot_say_which_is_wrong():
    traffic, now_s = followers("none")
    assert compare(traffic, now_s, LIMITS).unlike == {}
    traffic, now_s = followers("shuffle")
    two = {name: traffic[name] for name in ("0", "3")}
    assert compare(two, now_s, LIMITS).unlike == {}


def test_the_command_tells_the_period_of_each_port_and_who_is_unlike(tmp_path, capsys):
    series, other = make("clean", 609), make("clean", 612)
    ports, seen = [], []
    for number, each in enumerate(host(series, "shuffle", 3, other, 4)):
        port = SampledPort(f"mlx5_{number}/1", tmp_path, port_of(each))
        ports.append(port)
        seen += [(port, one) for one in observe(each)]
    seen.sort(
        key=lambda pair: (
            pair[1].end_s
            if isinstance(pair[1], Step)
            else float(np.max(pair[1].time_s))
        )
    )
    assert command._tell(ports, seen, True, None) == 1
    captured = capsys.readouterr()
    said = [json.loads(line) for line in captured.out.splitlines()]
    kinds = {(one["kind"], one["data"]["port"]) for one in said}
    assert {port for _, port in kinds} == {"mlx5_3/1"}
    assert {kind for kind, _ in kinds} >= {"port_aperiodic", "port_unlike_others"}
    lines = [line for line in captured.err.splitlines() if ": period: " in line]
    assert [line.split(":")[0] for line in lines] == [port.name for port in ports]
    assert "with the step" in lines[0]
    assert "no period" in lines[3]
