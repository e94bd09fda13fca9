"""Events of a healthy port, and the common form of all events.

Input: a random generator, a `Run`. Output: `Conditions`, in seconds of work (the clock
of the run, which stands still while no traffic passes).

    share(t) = own(t) * (1 - contended(t))

own is 1 except for decay and drift, contended is 0 except for other jobs. Symbol errors
are a Poisson process of errors_per_s(t). An `Incident` stops the traffic and counts.

Ranges are chosen, except for the bit error rate, see `SPECIFIED_BIT_ERROR_RATE`.
Together they stay below `STRONGEST_CLEAN`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from tests.health.series_run import (
    GRID_S,
    Array,
    Run,
    grid_times,
    lay,
    log_uniform,
)
from tests.health.series_severity import STRONGEST_CLEAN, step_cost

DIP_S = (0.05, 0.3)  # duration of a switch pause or of a lost burst
DRIFT = (0.005, 0.03)  # lost part of the rate: temperature, routes, imbalance
PULSE_S = (0.2, 3.0)  # length of a contention pulse in a healthy series
PULSE_DEPTH = (0.1, 0.4)
PULSE_COST = 0.06  # part of a step; a bound, as if no burst were overlapped
FITTING_LOAD = (2.0, 10.0)  # factor on the marks while a small other job runs
LOST_PEERS = (1, 100)  # log-uniform; timeouts at a restart of RESTART_S
BIT_ERROR_RATE = (1e-17, 0.9e-12)  # log-uniform; 0 with a probability of 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Incident:
    """A moment at which traffic stops, or events are counted, or both."""

    name: str
    start_s: float
    outage_s: float
    """Time without traffic; 0 if events are only counted."""
    down_s: float
    """Time during which the port is down; 0 if it stays up."""
    counts: Mapping[str, int]
    """Added to the counters at the start."""
    sent_counts: Mapping[str, int]
    """Added to the counters if there was traffic to stop."""
    run_lost_s: float
    """Time until the run restarts, if this ends it; 0 if the run survives."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """All events of a port in a series. G cells of a grid, see `grid_times`."""

    variant: str
    """Variant of the fault; "" for clean."""
    span_s: tuple[float, float] | None
    """Onset and offset of decay and load; None: given by the incidents."""
    own: Array
    """[G], fraction of its rate that the port still reaches."""
    contended: Array
    """[G], fraction of that rate taken by other jobs."""
    marked: Array
    """[G], marks and waits of this port's own traffic, times the usual ones."""
    errors_per_s: Array
    """[G], expected symbol errors."""
    incidents: tuple[Incident, ...]
    cleared_s: tuple[float, ...]
    """An operator sets the counters of the port to 0 (perfquery -R)."""
    weak: tuple[tuple[str, float, float], ...]
    """Name, start and end of the weak disturbances that are not incidents."""

    @property
    def share(self) -> Array:
        """[G], fraction of the rate that a burst gets."""
        return self.own * (1 - self.contended)


def draw_weak(rng: np.random.Generator, run: Run, *, drifts: bool) -> Conditions:
    """Draw the events of a healthy port."""
    times, end_s = grid_times(run.duration_s), run.duration_s
    own, contended = np.ones(len(times)), np.zeros(len(times))
    marked, weak = np.ones(len(times)), []
    if drifts and rng.random() < 0.4:
        own -= _draw_drift(rng, times, end_s)
        weak.append(("drift", 0.0, end_s))
    if rng.random() < 0.3:
        depth = rng.uniform(*PULSE_DEPTH)
        part = PULSE_COST * (1 - depth) / depth * rng.uniform(0.2, 1.0)
        num = int(part * end_s / np.mean(PULSE_S))
        start_s = rng.uniform(0, end_s, num)
        pulse(contended, start_s, rng.uniform(*PULSE_S, num), np.full(num, depth))
        healthy, most = lay(run), 0.9 * STRONGEST_CLEAN.step_cost
        while (
            step_cost(run, healthy, lay(run, own * (1 - contended)), (0.0, end_s))
            > most
        ):
            contended *= 0.7
        weak.append(("contention", 0.0, end_s))
    if rng.random() < 0.2:
        first_s = float(rng.uniform(0, 0.8) * end_s)
        last_s = min(end_s, float(first_s + rng.uniform(0.1, 0.8) * end_s))
        marked[(times > first_s) & (times < last_s)] = log_uniform(rng, FITTING_LOAD)
        weak.append(("load that fits", first_s, last_s))
    rate = run.port.rate_gbit_per_s * 1e9 * log_uniform(rng, BIT_ERROR_RATE)
    return Conditions(
        variant="",
        span_s=None,
        own=own,
        contended=contended,
        marked=marked,
        errors_per_s=np.full(len(times), 0.0 if rng.random() < 0.3 else rate),
        incidents=_draw_weak_incidents(rng, run),
        cleared_s=(rng.uniform(0.1, 0.9) * end_s,) if rng.random() < 0.04 else (),
        weak=tuple(weak),
    )


def _draw_drift(rng: np.random.Generator, times: Array, end_s: float) -> Array:
    """Draw the fraction of the rate lost to temperature and routes, at each time."""
    drift = rng.uniform(*DRIFT)
    if rng.random() < 0.5:
        return drift * times / end_s
    phase = 2 * np.pi * (times / rng.uniform(300, 1800) + rng.random())
    return drift * (0.5 + 0.5 * np.sin(phase))


def _draw_weak_incidents(rng: np.random.Generator, run: Run) -> tuple[Incident, ...]:
    """Draw dips and single bursts of symbol errors."""
    incidents = []
    if rng.random() < 0.25:
        incidents += [_dip(rng, run) for _ in range(int(rng.integers(1, 4)))]
    if rng.random() < 0.1:
        counts = {"symbol_error": int(rng.integers(1, 11))}
        start_s = rng.uniform(0, run.duration_s)
        incidents.append(make_incident("symbol errors", start_s, counts))
    return tuple(incidents)


def make_incident(
    name: str,
    start_s: float,
    counts: Mapping[str, int],
    *,
    outage_s: float = 0.0,
    down_s: float = 0.0,
    sent_counts: Mapping[str, int] | None = None,
    run_lost_s: float = 0.0,
) -> Incident:
    """Make an incident; omitted effects are 0."""
    return Incident(
        name=name,
        start_s=float(start_s),
        outage_s=float(outage_s),
        down_s=float(down_s),
        counts=counts,
        sent_counts=sent_counts or {},
        run_lost_s=float(run_lost_s),
    )


def _dip(rng: np.random.Generator, run: Run) -> Incident:
    """Draw a stop that is too short to be a flap."""
    recovered = int(run.port.link_layer == "InfiniBand" and rng.random() < 0.3)
    return make_incident(
        "dip",
        rng.uniform(0.02, 0.98) * run.duration_s,
        {"link_error_recovery": recovered},
        outage_s=rng.uniform(*DIP_S),
        sent_counts={"packet_seq_err": int(rng.integers(0, 4))},
    )


def add_lost_peers(
    rng: np.random.Generator, run: Run, conditions: Conditions
) -> Conditions:
    """Let queue pairs time out after a restart ended their peers; this is not a
    flap."""
    steps = [pause.after_step for pause in run.pauses if pause.name == "restart"]
    if not steps or rng.random() < 0.5:
        return conditions
    stop_s = float(lay(run, conditions.share).start_s[steps[0], -1])
    counts = {"local_ack_timeout_err": int(log_uniform(rng, LOST_PEERS))}
    lost = make_incident("lost peers", stop_s + 0.2, counts)
    return dataclasses.replace(conditions, incidents=(*conditions.incidents, lost))


def pulse(grid: Array, start_s: Array, length_s: Array, depth: Array) -> None:
    """Raise a grid to a depth in each of some intervals."""
    first = np.clip(start_s / GRID_S, 0, len(grid)).astype(int)
    num = np.clip((start_s + length_s) / GRID_S, 0, len(grid)).astype(int) - first
    begins = np.cumsum(num) - num
    cells = np.arange(num.sum()) + np.repeat(first - begins, num)
    grid[cells] = np.maximum(grid[cells], np.repeat(depth, num))
