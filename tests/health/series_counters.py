"""Samples of a port: all counters each second, bytes every 5 or 10 ms.

Input: a `Run` laid out in time, `Conditions`. Output: `Readings`, as the files of
/sys/class/infiniband/DEVICE/ports/PORT and /sys/class/net/INTERFACE would give them.

    work(t) = t - total delay of outages until t port_xmit_data(t) = (start +
    bytes(work(t)) // 4) mod 2^bits - value at last reset increment of an event counter
    ~ Poisson(gamma noise * expected increment)

Units and widths:

- port_xmit_data, port_rcv_data: 4 bytes; 64 bits, or 32 bits and a wrap to 0.
- port_xmit_wait: ticks in which data waited for credits. The length of a tick depends
  on the device; 1 us is chosen. 32 bits.
- symbol_error and port_xmit_discards 16 bits, link_error_recovery and link_downed
  8 bits; these and port_xmit_wait stop at all ones instead of wrapping.
- All others 64 bits. A reboot sets every counter to 0, `perfquery -R` those of
  `CLEARED`. Missing samples are missing rows.

Ranges are chosen unless a line names a source. Sources: Linux,
Documentation/ABI/stable/sysfs-class-infiniband (meaning, units),
drivers/infiniband/core/sysfs.c (widths), drivers/infiniband/hw/qib/qib_mad.c (where
counters stop); commits 0ad17a8f7fa0 and e1f24a79f424 (counters of mlx5),
2d3b479df41a (carrier_changes).
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from tests.health.series_conditions import Conditions, Incident
from tests.health.series_run import GRID_S, Array, Run, Timeline, at, log_uniform

type Resets = list[tuple[float, set[str]]]
type DataCounters = Callable[[Array], tuple[Array, Array]]

STATE_DOWN, STATE_INIT, STATE_ACTIVE = 1, 2, 4
"""The number in the file `state`. Source: Linux, include/rdma/ib_verbs.h."""

INIT_PART = 0.3  # part of the down time in INIT, until the subnet manager has swept

LAST_VALUE = {
    "symbol_error": 2**16 - 1,
    "port_xmit_discards": 2**16 - 1,
    "link_error_recovery": 2**8 - 1,
    "link_downed": 2**8 - 1,
    "port_xmit_wait": 2**32 - 1,
}
CLEARED = ("port_xmit_data", "port_rcv_data", *LAST_VALUE)

JITTER_S = 0.004  # deviation of a sample's time; cut at 4 times this
LATE_PROBABILITY = 0.01  # probability that a sample is late
LATE_S = (0.05, 0.9)
LAG_S = (0.0002, 0.002)  # from the time stamp to the read; one draw per sample
MISSING_PROBABILITY = (0.0, 0.01)
GAP_PROBABILITY = 0.15  # probability that the sampler stops once
GAP_S = (3.0, 20.0)
FULL_PROBABILITY = 0.02  # probability that symbol_error saturated long ago
WINDOW_LAG_S = 0.0002  # mean delay from time stamp to read, exponential
READ_S = 0.0001  # minimum duration of a read
WINDOW_S = 2.0
WINDOW_EVERY_S = (20.0, 90.0)
WINDOW_RATES_HZ = (100, 200)

CNP_PER_GB = (0.01, 30.0)  # log-uniform: a healthy fabric marks a little
CNP_FLOOR_PER_S = 20.0  # while the port sends and others load the link
CONTENTION = (5.0, 33.0)  # log-uniform factor on healthy rate; 33: CASSINI, abstract
MARKS_PER_CNP = (1.0, 50.0)  # log-uniform: CNPs are limited per flow and time
STORAGE_INCAST = (0.0, 20.0)  # factor on the healthy rate while a save is written
DECAY_MARKS = (0.0, 3.0)  # factor on the healthy rate: queues before a slow port
WAIT_PART = (1e-3, 0.05)  # part of a burst without credits, log-uniform
CONTENDED_WAIT = (0.4, 0.9)  # part of the time taken by others that counts as waiting
CLUMPING = 3.0  # shape of the gamma noise: congestion comes in clumps
LOST_PER_SYMBOL_ERROR = (
    0.5  # Ethernet drops the frame, and the receiver requests it again
)
RARE_PER_S = {
    "local_ack_timeout_err": 1 / 1200,
    "packet_seq_err": 1 / 600,
    "port_xmit_discards": 1 / 2000,
    "out_of_buffer": 1 / 300,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Byte counters at 100 or 200 Hz for two seconds. S samples."""

    time_s: Array
    """[S], float64, since the start of the series, when the read began."""
    port_xmit_data: Array
    """[S], uint64, units of 4 bytes."""
    port_rcv_data: Array
    """[S], uint64, units of 4 bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Readings:
    """The M samples read by the sampler, about one a second."""

    time_s: Array
    """[M], float64, since the start of the series, when the read began."""
    counters: Mapping[str, Array]
    """[M], uint64, by file name; counters of the other link layer are absent."""
    state: Array
    """[M], uint8: 1 DOWN, 2 INIT, 4 ACTIVE."""
    windows: tuple[Window, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """An incident in the time of the sampler's clock."""

    incident: Incident
    start_s: float
    up_s: float
    """Time at which the port is up again; the start if it was not down."""
    stall_s: float
    """Duration for which it delayed traffic."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clock:
    """Conversion between the sampler's time and the run's work, for K outages."""

    work_s: Array
    """[K], work at which an outage stops it."""
    delay_s: Array
    """[K + 1], all delay before the first, between, and after the last outage."""

    def real(self, work_s: Array) -> Array:
        """Return when an amount of work is done; work at a stop is done before the
        stop."""
        return work_s + self.delay_s[np.searchsorted(self.work_s, work_s)]

    def work(self, real_s: Array) -> Array:
        """Return the work that is done at a time."""
        stop, go = self.work_s + self.delay_s[:-1], self.work_s + self.delay_s[1:]
        edges = np.stack([stop, go], axis=1).ravel()
        return _interpolate(
            real_s, edges, np.repeat(self.work_s, 2), slope_outside=True
        )


def place(
    timeline: Timeline, incidents: tuple[Incident, ...], end_s: float
) -> tuple[tuple[Placed, ...], Clock]:
    """Convert incidents to the sampler's time, and drop overlapping or late ones.

    An outage costs nothing while the port has nothing to send:
    stall = outage - time until the next burst, at least 0.
    """
    sends = timeline.burst_s.ravel() > 0
    begin = timeline.start_s.ravel()[sends]
    last = begin + timeline.burst_s.ravel()[sends]
    placed, works, delays = [], [], [0.0]
    free_s = 0.0
    for incident in sorted(incidents, key=lambda incident: incident.start_s):
        start_s = incident.start_s + delays[-1]
        if start_s < free_s or start_s + incident.down_s > end_s - 3:
            continue
        index = int(np.searchsorted(last, incident.start_s))
        wait = begin[index] - incident.start_s if index < len(begin) else end_s
        quiet_s = min(max(0.0, float(wait)), incident.outage_s)
        stall_s = incident.outage_s - quiet_s
        up_s = start_s + incident.down_s
        placed.append(
            Placed(incident=incident, start_s=start_s, up_s=up_s, stall_s=stall_s)
        )
        free_s = start_s + incident.outage_s + 0.5
        if stall_s + incident.run_lost_s > 0:
            works.append(incident.start_s + quiet_s)
            delays.append(delays[-1] + stall_s + incident.run_lost_s)
    return tuple(placed), Clock(work_s=np.array(works), delay_s=np.array(delays))


def read(
    rng: np.random.Generator,
    run: Run,
    conditions: Conditions,
    timeline: Timeline,
    placed: tuple[Placed, ...],
    clock: Clock,
) -> Readings:
    """Sample the port every second, and in windows of milliseconds at intervals."""
    absent = _draw_absences(rng, run, timeline, placed, clock)
    time_s = _draw_seconds(rng, run.duration_s, absent)
    read_s = time_s + rng.uniform(*LAG_S, len(time_s))
    work_s = clock.work(read_s)
    expected = _expect(rng, run, conditions, timeline, work_s)
    counters = _count(rng, run, expected, placed, read_s)
    if conditions.variant != "errors" and rng.random() < FULL_PROBABILITY:
        counters["symbol_error"] += np.uint64(LAST_VALUE["symbol_error"])
    resets = _resets(run, conditions, timeline, clock)
    for start_s, names in resets:
        later = read_s >= start_s
        for name in names & counters.keys():
            counters[name][later] -= counters[name][~later][-1] if ~later[0] else 0
    data = _data_counters(rng, run, timeline, clock, resets)
    counters["port_xmit_data"], counters["port_rcv_data"] = data(read_s)
    for name, most in LAST_VALUE.items():
        if name in counters:
            np.minimum(counters[name], np.uint64(most), out=counters[name])
    state = np.full(len(time_s), STATE_ACTIVE, np.uint8)
    for each in placed:
        down_s = each.up_s - each.start_s
        init_s = down_s * INIT_PART * (run.port.link_layer == "InfiniBand")
        state[(read_s >= each.start_s) & (read_s < each.up_s)] = STATE_INIT
        state[(read_s >= each.start_s) & (read_s < each.up_s - init_s)] = STATE_DOWN
    windows = _draw_windows(rng, run.duration_s, absent, data)
    return Readings(time_s=time_s, counters=counters, state=state, windows=windows)


def _draw_absences(
    rng: np.random.Generator,
    run: Run,
    timeline: Timeline,
    placed: tuple[Placed, ...],
    clock: Clock,
) -> list[tuple[float, float]]:
    """Draw the times without samples: a stopped sampler, a booting host."""
    absent = []
    if rng.random() < GAP_PROBABILITY:
        length_s = float(rng.uniform(*GAP_S))
        start_s = float(rng.uniform(0.05, 0.9) * run.duration_s)
        # Not over a flap: without samples, it would leave no trace.
        if not any(
            start_s - 5 < each.start_s + each.incident.outage_s
            and each.start_s - 5 < start_s + length_s
            for each in placed
        ):
            absent.append((start_s, start_s + length_s))
    for pause in run.pauses:
        if pause.name == "reboot":
            stop_s = timeline.start_s[pause.after_step, -1]
            go_s = timeline.end_s[pause.after_step, -1]
            edges = clock.real(np.array([stop_s, go_s - 0.2 * (go_s - stop_s)]))
            absent.append((float(edges[0]), float(edges[1])))
    return absent


def _draw_seconds(
    rng: np.random.Generator, duration_s: float, absent: list[tuple[float, float]]
) -> Array:
    """Draw the times of the samples, about one a second."""
    num = int(duration_s)
    time_s = np.arange(num) + rng.uniform(0.05, 0.1)
    time_s += JITTER_S * np.clip(rng.standard_normal(num), -4, 4)
    late = rng.random(num) < LATE_PROBABILITY
    time_s += late * rng.uniform(*LATE_S, num)
    kept = rng.random(num) >= rng.uniform(*MISSING_PROBABILITY)
    for start_s, end_s in absent:
        kept &= (time_s < start_s) | (time_s >= end_s)
    return time_s[kept]


def _interpolate(
    x: Array, xs: Array, ys: Array, *, slope_outside: bool = False
) -> Array:
    """Interpolate linearly; outside, continue with slope 1 or stay constant."""
    if not len(xs):
        return x
    out = np.interp(x, xs, ys)
    if slope_outside:
        out = out + np.minimum(x - xs[0], 0) + np.maximum(x - xs[-1], 0)
    return out


def _expect(
    rng: np.random.Generator,
    run: Run,
    conditions: Conditions,
    timeline: Timeline,
    work_s: Array,
) -> dict[str, Array]:
    """Expected value of each event counter at each sample, from any start."""
    burst = timeline.burst_s
    contended = at(conditions.contended, timeline.start_s)
    contended[:, -1] = 0.0  # a save is not slowed by them
    ends = timeline.end_s.ravel()

    def total(per_bucket: Array) -> Array:
        return np.interp(work_s, ends, np.cumsum(per_bucket.ravel()))

    rates = conditions.errors_per_s
    symbol = np.interp(
        work_s, np.arange(1, len(rates) + 1) * GRID_S, np.cumsum(rates) * GRID_S
    )
    expected = {name: rate * work_s for name, rate in RARE_PER_S.items()}
    expected["symbol_error"] = symbol
    if run.port.link_layer == "InfiniBand":
        usual, taken = log_uniform(rng, WAIT_PART), rng.uniform(*CONTENDED_WAIT)
        part = usual * at(conditions.marked, timeline.start_s) + taken * contended
        expected["port_xmit_wait"] = 1e6 * total(burst * part)
        return expected
    expected["packet_seq_err"] += LOST_PER_SYMBOL_ERROR * symbol
    usual = log_uniform(rng, CNP_PER_GB) * run.bytes / 1e9
    incast = np.zeros(burst.shape[1])
    incast[-1] = rng.uniform(*STORAGE_INCAST)
    per_s = np.median(usual[:, 0] / run.burst_s[:, 0]) + CNP_FLOOR_PER_S
    loaded = (contended > 0) * (0.5 + contended) * burst * per_s
    usual = usual * at(conditions.marked, timeline.start_s)
    congested = usual * (1 + incast) + log_uniform(rng, CONTENTION) * loaded
    queued = (
        rng.uniform(*DECAY_MARKS) * usual * (1 - at(conditions.own, timeline.start_s))
    )
    cnp = rng.uniform(0.3, 1.0) * total(congested + queued)
    expected["rp_cnp_handled"] = total(congested)
    expected["np_cnp_sent"] = cnp
    expected["np_ecn_marked_roce_packets"] = cnp * log_uniform(rng, MARKS_PER_CNP)
    return expected


def _count(
    rng: np.random.Generator,
    run: Run,
    expected: Mapping[str, Array],
    placed: tuple[Placed, ...],
    read_s: Array,
) -> dict[str, Array]:
    """Draw the event counters, including the counts from before the series."""
    ethernet = run.port.link_layer == "Ethernet"
    counters = {}
    names = [*expected, "link_downed", "link_error_recovery"]
    for name in names + ["carrier_changes"] * ethernet:
        means = np.diff(expected.get(name, np.zeros(len(read_s))), prepend=np.nan)
        means[0] = 0.0
        if name.startswith(("rp_", "np_", "port_xmit_wait")):
            means = means * rng.gamma(CLUMPING, 1 / CLUMPING, len(means))
        counts = rng.poisson(means)
        for each in placed:
            more = each.incident.counts.get(name, 0)
            more += each.incident.sent_counts.get(name, 0) * (each.stall_s > 0)
            index = int(np.searchsorted(read_s, each.start_s))
            if more and index < len(counts):
                counts[index] += more
        counters[name] = np.cumsum(counts).astype(np.uint64) + _draw_past(rng, name)
    return counters


def _draw_past(rng: np.random.Generator, name: str) -> np.uint64:
    """Draw the value of a counter before the series."""
    if name in ("link_downed", "link_error_recovery"):
        return np.uint64(rng.choice((0, 1, 2, 3, 7), p=(0.6, 0.2, 0.1, 0.06, 0.04)))
    if name == "carrier_changes":
        return np.uint64(2 * rng.integers(1, 4))
    if rng.random() < 0.5:
        return np.uint64(0)
    most = {"symbol_error": 2e3, "port_xmit_discards": 2e3}.get(name, 1e6)
    return np.uint64(log_uniform(rng, (1, most)))


def _resets(
    run: Run, conditions: Conditions, timeline: Timeline, clock: Clock
) -> Resets:
    """Moments at which counters are set to 0, with their names."""
    out = [(clear_s, set(CLEARED)) for clear_s in conditions.cleared_s]
    for pause in run.pauses:
        if pause.name == "reboot":
            middle = timeline.start_s[pause.after_step, -1] + 1.0
            boot_s = float(clock.real(np.array([middle]))[0])
            names = {*CLEARED, *RARE_PER_S, "carrier_changes", "rp_cnp_handled"}
            names |= {"np_cnp_sent", "np_ecn_marked_roce_packets"}
            out.append((boot_s, names))
    return sorted(out, key=lambda reset: reset[0])


def _data_counters(
    rng: np.random.Generator,
    run: Run,
    timeline: Timeline,
    clock: Clock,
    resets: Resets,
) -> DataCounters:
    """Return the function from times to the two byte counters."""
    edges = np.stack([timeline.start_s, timeline.start_s + timeline.burst_s], axis=2)
    before = np.cumsum(run.bytes.ravel()).reshape(run.bytes.shape)
    amounts = np.stack([before - run.bytes, before], axis=2).ravel()
    edges = edges.ravel()
    modulus = 2**run.port.data_counter_bits
    past = [int(part * min(modulus, 2**52)) for part in rng.random(2)]

    def words(real_s: Array) -> tuple[Array, Array]:
        work_s = clock.work(real_s)
        trained = np.interp(work_s, edges, amounts)
        trickle = run.trickle_bytes_per_s * np.maximum(work_s + run.lead_s, 0)
        sent = trained + trickle
        for start_s, length_s, rate in run.uploads:
            sent = sent + rate * np.clip(work_s - start_s, 0, length_s)
        received = run.reverse * trained + 2 * trickle
        return (sent / 4).astype(np.uint64), (received / 4).astype(np.uint64)

    def counters(real_s: Array) -> tuple[Array, Array]:
        values = [np.uint64(p) + v for p, v in zip(past, words(real_s), strict=True)]
        for start_s, _ in resets:
            at_reset = words(np.array([start_s]))
            later = real_s >= start_s
            for index in range(2):
                held = at_reset[index][0]
                values[index][later] = words(real_s[later])[index] - held
        mask = np.uint64(modulus - 1)
        return values[0] & mask, values[1] & mask

    return counters


def _draw_windows(
    rng: np.random.Generator,
    duration_s: float,
    absent: list[tuple[float, float]],
    data: DataCounters,
) -> tuple[Window, ...]:
    """Read the byte counters at a high rate, at intervals."""
    rate_hz = int(rng.choice(WINDOW_RATES_HZ))
    every_s = rng.uniform(*WINDOW_EVERY_S)
    num = int(duration_s / every_s)
    starts = (np.arange(num) + rng.uniform(0.1, 0.9, num)) * every_s
    starts = starts[starts + WINDOW_S < duration_s - 1]
    for start_s, end_s in absent:
        starts = starts[(starts + WINDOW_S + 1 < start_s) | (starts > end_s + 1)]
    samples = int(WINDOW_S * rate_hz)
    ticks = np.arange(samples) / rate_hz + rng.uniform(0, 0.2 / rate_hz, samples)
    time_s = starts[:, None] + ticks
    # A read that waits delays itself and those after it; the sampler then catches up.
    late = rng.random(time_s.shape) < 0.002
    time_s = time_s + late * rng.uniform(0, 5 / rate_hz, time_s.shape)
    busy_s = READ_S * np.arange(samples)
    time_s = np.maximum.accumulate(time_s - busy_s, axis=1) + busy_s
    # The lag stays below the time to the next sample: reads never change places.
    room = np.diff(time_s, axis=1, append=time_s[:, -1:] + 1 / rate_hz)
    lag = np.minimum(rng.exponential(WINDOW_LAG_S, time_s.shape), room)
    xmit, rcv = data((time_s + lag).ravel())
    xmit, rcv = xmit.reshape(time_s.shape), rcv.reshape(time_s.shape)
    return tuple(
        Window(time_s=time, port_xmit_data=sent, port_rcv_data=received)
        for time, sent, received in zip(time_s, xmit, rcv, strict=True)
    )
