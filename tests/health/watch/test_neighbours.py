"""A neighbour is reported if congestion, slow bursts and long steps coincide."""

import numpy as np
import pytest

from mjax.health.watch.bursts import Burst, Bursts
from mjax.health.watch.congestion import Congestion
from mjax.health.watch.counters import Increment
from mjax.health.watch.neighbours import Load, Neighbours
from mjax.health.watch.samples import Detection, Port, Sample, Step, Window
from mjax.health.watch.thresholds import CongestionThresholds, Thresholds
from mjax.health.watch.watcher import Watcher

SPAN_S = (600.0, 900.0)
RATE = 0.7
PORT = Port(
    link_layer="InfiniBand",
    rate_gbit_per_s=100.0,
    data_bytes_per_s=12.5e9,
    data_counter_bits=64,
)
ETHERNET = Port(
    link_layer="Ethernet",
    rate_gbit_per_s=100.0,
    data_bytes_per_s=12.5e9,
    data_counter_bits=64,
)


def increment(
    second: int, counts: dict[str, int], *, sent_part: float = 0.5
) -> Increment:
    """One second in which the port uses a fraction of the wire rate."""
    return Increment(
        start_s=second + 0.1,
        end_s=second + 1.0,
        counts=counts,
        data_bytes=int(sent_part * 12.5e9),
        reset=False,
        state=4,
    )


def window(share: float) -> Bursts:
    """Ten bursts at a share of their rate."""
    burst = Burst(rate=RATE * share, length_s=0.1, size_s=0.1 * RATE * share)
    return Bursts(each=(burst,) * 10)


def observe(
    *,
    ratio: float = 1.0,
    longer: float = 1.0,
    share: float = 1.0,
    span_s: tuple[float, float] = SPAN_S,
) -> Neighbours:
    """Half an hour of a run; the given quantities differ within a span."""
    seen, rng = Neighbours(PORT, Thresholds()), np.random.default_rng(0)
    for second in range(1500):
        inside = span_s[0] <= second < span_s[1]
        wait = 10_000 * (ratio if inside else 1.0) * rng.uniform(0.5, 1.5)
        seen.feed(increment(second, {"port_xmit_wait": int(wait)}))
        took_s = (longer if inside else 1.0) * rng.uniform(0.95, 1.05)
        seen.add_step(Step(end_s=float(second), step_s=took_s))
        if second % 30 == 0:
            seen.add_bursts(float(second), window(share if inside else 1.0))
    return seen


def detect(seen: Neighbours) -> Detection | None:
    """Judge what was observed."""
    return seen.detect(seen.explain())


def test_a_neighbour_is_told_with_the_span_of_its_load() -> None:
    found = detect(observe(ratio=10.0, longer=1.15, share=0.6))
    assert found is not None
    assert found.kind == "neighbour"
    assert found.score >= 1
    assert abs(found.onset_s - SPAN_S[0]) <= 40
    assert abs(found.until_s - SPAN_S[1]) <= 40
    assert 1.10 < 1 + found.numbers["slower_part"] < 1.20
    assert 7 < found.numbers["congestion_ratio"] < 13


@pytest.mark.parametrize(
    ("ratio", "longer", "share"),
    [(6.0, 1.15, 1.0), (10.0, 1.0, 0.6), (1.0, 1.15, 0.6)],
    ids=["a load that fits, and a slow host", "no time is lost", "no congestion"],
)
def test_two_of_the_three_signs_are_no_neighbour(
    ratio: float, longer: float, share: float
) -> None:
    assert detect(observe(ratio=ratio, longer=longer, share=share)) is None


def test_a_single_slow_window_does_not_make_a_neighbour_of_a_load_that_fits() -> None:
    seen = observe(ratio=6.0, longer=1.15)
    seen.add_bursts(770.0, window(0.6))
    assert detect(seen) is None


def test_a_load_that_never_ends_has_nothing_to_be_compared_with() -> None:
    assert (
        detect(observe(ratio=9.0, longer=1.2, share=0.6, span_s=(0.0, 1500.0))) is None
    )


def test_without_any_observation_there_is_no_explanation() -> None:
    assert Neighbours(PORT, Thresholds()).explain() is None


def test_waiting_counts_by_the_second_in_which_an_infiniband_port_sends() -> None:
    bins = Congestion(PORT, CongestionThresholds())
    for second in range(40):
        part = 0.8 if second < 20 else 0.2  # a port that has lost lanes
        part = 0.0 if second % 4 == 0 else part
        counts = {"port_xmit_wait": 30_000 if part else 0}
        bins.feed(increment(second, counts, sent_part=part))
    _, events, seconds = bins.bins()
    assert seconds.tolist() == pytest.approx([13.5, 13.5])
    assert (events / seconds).tolist() == pytest.approx([15 * 30_000 / 13.5] * 2)


def test_what_an_ethernet_port_sends_to_slow_others_is_not_its_congestion() -> None:
    bins = Congestion(ETHERNET, CongestionThresholds())
    for second in range(20):
        counts = {"rp_cnp_handled": 3, "np_cnp_sent": 1000 * second}
        bins.feed(increment(second, counts))
    _, events, seconds = bins.bins()
    assert (events / seconds).tolist() == [6.0]


def test_a_bin_without_samples_is_empty_and_keeps_the_time() -> None:
    bins = Congestion(PORT, CongestionThresholds())
    for second in (*range(20), *range(60, 80)):
        bins.feed(increment(second, {"port_xmit_wait": 1}))
    start_s, events, seconds = bins.bins()
    assert start_s == 0.1
    assert events.tolist() == [20, 0, 0, 20]
    assert seconds.tolist() == pytest.approx([18, 0, 0, 18])


def test_congestion_counts_more_against_a_decay_than_against_nothing() -> None:
    load = Load(
        span_s=SPAN_S,
        bursts_gain=5.0,
        congestion_gain=3.0,
        steps_gain=1.0,
        congestion_ratio=8.0,
        slower_part=0.1,
    )
    assert load.gain == 9.0
    assert load.gain_over_decay(2.0) == 12.0


def watch(until_s: int) -> list[Detection]:
    """Run a watcher over the load of a neighbour; return its detections."""
    watcher, found, sent, waited = Watcher(PORT), [], 0, 0
    for second in range(until_s):
        inside = SPAN_S[0] <= second < SPAN_S[1]
        share = 0.5 if inside else 1.0
        sent += int(0.5 * 12.5e9 / 4)
        waited += 200_000 if inside else 10_000
        counters = {"port_xmit_data": sent, "port_xmit_wait": waited}
        found += watcher.feed(Sample(time_s=float(second), counters=counters, state=4))
        found += watcher.feed(Step(end_s=float(second), step_s=1.2 if inside else 1.0))
        if second % 30 == 0:
            gaps = np.tile([0] * 5 + [int(RATE * share * 0.01 * 12.5e9 / 4)] * 20, 6)
            words = np.concatenate(([0], np.cumsum(gaps))).astype(np.uint64)
            time_s = second + 0.01 * np.arange(len(words))
            found += watcher.feed(Window(time_s=time_s, port_xmit_data=words))
    return found + watcher.finish()


def test_a_neighbour_is_told_once_though_it_is_judged_again() -> None:
    assert [each.kind for each in watch(1700)] == ["neighbour"]
    assert [each.kind for each in watch(2200)] == ["neighbour"]
