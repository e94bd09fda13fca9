"""Traffic that stops repeating with the steps, made from a healthy series.

Input: a clean series of `tests.health.series`, a seed. Output: the same series with
other sent bytes from an onset on; steps, other counters and the bytes of each
second's increment stay. The detector and these faults have one author, so they are as
simple as can be:

- shuffle: the bytes sent in each second in which a step ran are put in random order. In
  windows of milliseconds, the bytes of each gap are.
- other job: the port sends what the port of another clean run does, at its own rate.
"""

import dataclasses
from typing import Literal

import numpy as np

from tests.health.series import Series, Window

type Fault = Literal["shuffle", "other job"]
ONSET_PART = (0.3, 0.5)
"""Onset as a fraction of the series. Chosen: a period before it, and time to miss
it."""


def spoil(
    series: Series, fault: Fault, seed: int, other: Series
) -> tuple[Series, float]:
    """Return a series whose traffic has lost its steps, and the onset.

    Args:
      series: a clean series.
      fault: kind, see the module.
      seed: seed of the onset and the order.
      other: a clean series of another run; used by `other job`.
    """
    rng = np.random.default_rng([seed, 28])
    time_s = series.readings.time_s
    onset_s = float(rng.uniform(*ONSET_PART) * time_s[-1])
    bits = series.port.data_counter_bits
    words = _increments(series.readings.counters["port_xmit_data"], bits)
    middle_s = (time_s[1:] + time_s[:-1]) / 2
    if fault == "shuffle":
        step = np.searchsorted(series.step_end_s, middle_s)
        starts_s = np.append(series.step_end_s - series.step_s, np.inf)
        moved = np.flatnonzero((middle_s > onset_s) & (middle_s > starts_s[step]))
        words[moved] = words[rng.permutation(moved)]
    else:
        moved = middle_s > onset_s
        words[moved] = _words_of(other, time_s, series.port.data_bytes_per_s)[moved]
    first = series.readings.counters["port_xmit_data"][0]
    sums = np.concatenate(([0], np.cumsum(words))).astype(np.uint64)
    data = (first + sums) & np.uint64(2**bits - 1)
    counters = {**series.readings.counters, "port_xmit_data": data}
    windows = tuple(
        _shuffled(one, bits, rng) if one.time_s[0] > onset_s else one
        for one in series.readings.windows
    )
    readings = dataclasses.replace(series.readings, counters=counters, windows=windows)
    return dataclasses.replace(series, readings=readings), onset_s


def _increments(data: np.ndarray, bits: int) -> np.ndarray:
    """Return the words of each gap; 0 where the counter was reset."""
    change = np.diff(data.astype(np.int64))
    return change % 2**32 if bits == 32 else np.maximum(change, 0)


def _words_of(other: Series, time_s: np.ndarray, data_bytes_per_s: float) -> np.ndarray:
    """Return the traffic of another run's port between times, at this wire's rate."""
    bits = other.port.data_counter_bits
    words = _increments(other.readings.counters["port_xmit_data"], bits)
    sums = np.concatenate(([0], np.cumsum(words))).astype(float)
    length_s = other.readings.time_s[-1] - other.readings.time_s[0]
    turns, rest_s = np.divmod(time_s - time_s[0], length_s)
    sent = np.interp(rest_s + other.readings.time_s[0], other.readings.time_s, sums)
    sent = (sent + turns * sums[-1]) * data_bytes_per_s / other.port.data_bytes_per_s
    return np.diff(sent).astype(np.int64)


def _shuffled(window: Window, bits: int, rng: np.random.Generator) -> Window:
    """Return a window whose gaps have changed places."""
    words = rng.permutation(_increments(window.port_xmit_data, bits))
    sums = np.concatenate(([0], np.cumsum(words))).astype(np.uint64)
    data = (window.port_xmit_data[0] + sums) & np.uint64(2**bits - 1)
    return dataclasses.replace(window, port_xmit_data=data)


type HostFault = Literal["none", "shuffle", "other job", "late"]
NOISE = 0.03
"""Noise of each second of a port. Chosen: as `BURST_NOISE` of the series."""
LATE_PART = 0.25
"""Fraction of a step by which a late port is late. Chosen."""


def host(
    series: Series, fault: HostFault, seed: int, other: Series, num_ports: int
) -> list[Series]:
    """Return the ports of a host; the last one has the fault, if there is one.

    Each port sends what the series does, at 0.8 to 1 times its rate and with noise in
    each second.
    """
    rng = np.random.default_rng([seed, 29])
    time_s = series.readings.time_s
    bits = series.port.data_counter_bits
    words = _increments(series.readings.counters["port_xmit_data"], bits)
    ports = []
    for number in range(num_ports):
        port, sent = series, words
        if number == num_ports - 1 and fault in ("shuffle", "other job"):
            port, _ = spoil(series, fault, seed, other)
            sent = _increments(port.readings.counters["port_xmit_data"], bits)
        elif number == num_ports - 1 and fault == "late":
            sums = np.concatenate(([0], np.cumsum(words))).astype(float)
            late_s = LATE_PART * float(np.median(series.step_s))
            sent = np.diff(np.interp(time_s - late_s, time_s, sums))
        factor = rng.uniform(0.8, 1.0) * np.exp(
            NOISE * rng.standard_normal(len(words)) - 2 * NOISE
        )
        sums = np.concatenate(([0.0], np.cumsum(sent * factor))).astype(np.uint64)
        counters = {"port_xmit_data": sums & np.uint64(2**bits - 1)}
        readings = dataclasses.replace(port.readings, counters=counters)
        ports.append(dataclasses.replace(port, readings=readings))
    return ports
