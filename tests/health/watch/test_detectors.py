"""The detectors find the faults of a port, and report nothing on a healthy one."""

import numpy as np
import pytest

from mjax.health.watch.counters import Counters
from mjax.health.watch.samples import Port, Sample
from mjax.health.watch.watcher import Watcher, detect
from tests.health.series import Kind, make
from tests.health.watch.observations import observe, port_of

NARROW = Port(
    link_layer="InfiniBand",
    rate_gbit_per_s=40.0,
    data_bytes_per_s=4e9,
    data_counter_bits=32,
)


@pytest.mark.parametrize("kind", ["flap", "decay", "neighbour"])
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_a_fault_is_named_and_its_interval_meets_the_truth(
    kind: Kind, seed: int
) -> None:
    series = make(kind, seed)
    truth = series.truth
    assert truth.onset_s is not None
    assert truth.offset_s is not None
    found = detect(port_of(series), observe(series))
    assert any(
        each.kind == kind
        and each.onset_s <= truth.offset_s
        and each.until_s >= truth.onset_s
        and each.score >= 1
        for each in found
    )


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_found_on_a_healthy_port(seed: int) -> None:
    series = make("clean", seed)
    assert detect(port_of(series), observe(series)) == []


def test_one_observation_at_a_time_finds_what_the_whole_series_does() -> None:
    series = make("flap", 1)
    watcher = Watcher(port_of(series))
    one_by_one = [each for seen in observe(series) for each in watcher.feed(seen)]
    assert one_by_one
    assert one_by_one == detect(port_of(series), reversed(observe(series)))


def test_a_byte_counter_that_wraps_has_not_been_reset() -> None:
    counters = Counters(NARROW, 10.0)
    names = {"port_xmit_data": 2**32 - 100, "symbol_error": 5}
    counters.feed(Sample(time_s=0.0, counters=names))
    names = {"port_xmit_data": 50, "symbol_error": 5}
    increment = counters.feed(Sample(time_s=1.0, counters=names))
    assert increment is not None
    assert increment.data_bytes == 600
    assert not increment.reset


@pytest.mark.parametrize(("gap_s", "counted"), [(1.0, 2), (60.0, 0)])
def test_a_reset_counts_what_came_after_it_unless_the_host_booted(
    gap_s: float, counted: int
) -> None:
    counters = Counters(NARROW, 10.0)
    counters.feed(Sample(time_s=0.0, counters={"link_downed": 9}))
    sample = Sample(time_s=gap_s, counters={"link_downed": 2})
    increment = counters.feed(sample)
    assert increment is not None
    assert increment.reset
    assert increment.counts["link_downed"] == counted


def test_a_reboot_and_a_gap_in_the_samples_are_no_fault() -> None:
    watcher = Watcher(NARROW)
    found = []
    for second in [*range(60), *range(180, 240)]:
        base = 7 if second < 100 else 0
        names = {"link_downed": base, "local_ack_timeout_err": 50 * base}
        names["port_xmit_data"] = second * 10**8 % 2**32
        sample = Sample(time_s=float(second), counters=names, state=4)
        found += watcher.feed(sample)
    assert found == []


def test_a_sample_from_the_past_is_refused() -> None:
    watcher = Watcher(NARROW)
    watcher.feed(Sample(time_s=5.0, counters={}))
    with pytest.raises(ValueError, match=r"got 4\.0 s after 5\.0 s: sort them"):
        watcher.feed(Sample(time_s=4.0, counters={}))


def kept(thing: object, depth: int = 0) -> int:
    """Count the entries of all containers that an object holds."""
    if depth > 4 or isinstance(thing, (str, bytes, np.ndarray)):
        return 1
    if hasattr(thing, "__dict__"):
        return sum(kept(each, depth + 1) for each in vars(thing).values())
    try:
        return 1 + len(thing)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return 1


def test_memory_does_not_grow_with_the_length_of_the_run() -> None:
    watcher = Watcher(NARROW)
    sizes = []
    for second in range(6000):
        names = {"port_xmit_data": second * 10**8 % 2**32, "port_xmit_wait": second}
        watcher.feed(Sample(time_s=float(second), counters=names, state=4))
        if second in (3999, 5999):
            sizes.append(kept(watcher))
    assert sizes[0] > 100
    assert sizes[1] <= sizes[0] + 5
