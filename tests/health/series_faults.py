"""The three faults of a port: flap, decay, load of a neighbour.

Input: a kind, a random generator, a `Run`. Output: `Conditions`: weak disturbances as
in every series, and the fault of the kind on top, at least as strong as `WEAKEST`.

Ranges are chosen unless a line names a source. Sources of the faults:

- flap: an interface goes down and comes up after several seconds, and what is sent in
  between is lost; MegaScale, arXiv:2402.15627, on network interface flapping. A link
  that is downed while error recovery fails, and one that recovers: Linux,
  Documentation/ABI/stable/sysfs-class-infiniband.
- decay: a damaged cable can come up at a lower speed or with one lane of four; NVIDIA,
  "Cabling Data Centers", section Mixing Widths and Rates. Symbol errors at 5 times the
  normal rate are a warning, at 10 times an error; NVIDIA, "InfiniBand Cluster Bring-up
  Procedure", UFM Telemetry.
- neighbour: bursts of jobs that share a link collide, and ECN marks rise by up to 33
  times; CASSINI, arXiv:2308.00852.
"""

import dataclasses
import math
from typing import Literal

import numpy as np

from tests.health.series_conditions import (
    DIP_S,
    Conditions,
    Incident,
    add_lost_peers,
    draw_weak,
    make_incident,
    pulse,
)
from tests.health.series_run import (
    Array,
    Run,
    Timeline,
    grid_times,
    lay,
    log_uniform,
)
from tests.health.series_severity import WEAKEST, step_cost

type Kind = Literal["clean", "flap", "decay", "neighbour"]

FLAP_VARIANTS = {"down": 0.6, "recovery": 0.15, "remote": 0.25}
"""Down: the port goes down. Recovery: it retrains and stays up. Remote: a farther link
flaps, and this port counts only the retransmissions."""
DOWN_S = (0.05, 20.0)  # log-uniform
DOWN_IN_BURST_S = (0.05, 3.0)  # log-uniform, for a host that flaps many times
STALL_S = (1.0, 8.0)  # if the port stays up
RESUME_S = (0.0, 1.0)  # from port up until the sender's timer lets it send
RETRANSMISSIONS = (8, 400)  # log-uniform; all queue pairs time out together
TRANSPORT_TIMEOUT_S = 7.0
"""If a port is down for longer, a run with NCCL's defaults loses its connections.

Source: sysdesign-wiki.pages.dev/concepts/nccl-ib-timeout, after Databricks, 2026.
"""
RUN_LOST_S = (30.0, 150.0)  # time until such a run trains again

DECAY_VARIANTS = {"ramp": 0.45, "lanes": 0.25, "errors": 0.30}
RATE_LOSS = (0.125, 0.60)  # part of the rate lost at the end of a ramp
RAMP_POWER = (0.7, 2.0)
WIDTHS = (0.5, 0.25)  # part of the rate: two lanes or one of four, or a lower speed
WIRE_EFFICIENCY = 0.95  # part of the wire's rate, for a link that limits the run
ERRORS = (10.0, 300.0)  # factor on the specified rate, log-uniform
DOUBLINGS = (4.0, 10.0)  # number of doublings of the error rate, onset to end
ERRORS_RATE_LOSS = 0.02  # part of the rate lost at the end, by retransmissions

NEIGHBOUR_S = 150.0  # minimum duration of the load
NEIGHBOUR_PART = (0.25, 0.8)  # duration of the load as a part of the series
NEIGHBOUR_PERIOD_S = (0.7, 40.0)  # log-uniform; step time of the other job
NEIGHBOUR_DUTY = (0.3, 0.9)  # part of its step in which the other job sends
NEIGHBOUR_STEPS = 4  # minimum number of this run's steps under the load
NEIGHBOUR_JITTER = (0.1, 0.4)  # relative deviation of its period
NEIGHBOUR_DEPTH = (0.3, 0.8)  # part of this port's rate that it loses while both send
DEEPEST = 0.88  # maximum load: congestion control leaves each flow some rate


def draw_conditions(kind: Kind, rng: np.random.Generator, run: Run) -> Conditions:
    """Draw weak disturbances for every kind, then the fault on top."""
    conditions = draw_weak(rng, run, drifts=kind != "decay")
    if kind == "flap":
        conditions = _add_flap(rng, run, conditions)
    elif kind == "decay":
        conditions = _add_decay(rng, run, conditions)
    elif kind == "neighbour":
        conditions = _add_neighbour(rng, run, conditions)
    return add_lost_peers(rng, run, conditions)


def _in_burst(
    rng: np.random.Generator, run: Run, timeline: Timeline, start_s: float, end_s: float
) -> float:
    """Draw a moment at which the port sends for training, between two times."""
    inside = (timeline.start_s >= start_s) & (timeline.end_s <= end_s)
    inside &= run.trained[:, None] & (run.bytes > 0)
    inside[:, -1] = False
    rows, columns = np.nonzero(inside)
    weights = timeline.burst_s[rows, columns]
    pick = rng.choice(len(rows), p=weights / weights.sum())
    chosen = rows[pick], columns[pick]
    return float(timeline.start_s[chosen] + rng.random() * timeline.burst_s[chosen])


def _add_flap(rng: np.random.Generator, run: Run, weak: Conditions) -> Conditions:
    """Add one flap, a few, or many within minutes."""
    end_s, timeline = run.duration_s, lay(run, weak.share)
    variant = str(rng.choice(list(FLAP_VARIANTS), p=list(FLAP_VARIANTS.values())))
    if variant == "recovery" and run.port.link_layer == "Ethernet":
        variant = "remote"  # Ethernet ports have no such state
    low, high = 0.05 * end_s, 0.9 * end_s
    # The first is in a burst: a link fails under load, and traffic is there to be lost.
    starts, down = [_in_burst(rng, run, timeline, low, high)], DOWN_S
    form = rng.choice(3, p=(0.4, 0.3, 0.3))
    if form == 1:
        num = int(rng.integers(1, 4))
        starts += [_in_burst(rng, run, timeline, low, high) for _ in range(num)]
    elif form == 2 and variant != "remote":
        gaps = rng.uniform(3.0, 20.0, int(rng.integers(4, 15)))
        starts += [t for t in starts[0] + np.cumsum(gaps) if t < high]
        down = DOWN_IN_BURST_S
    make = {"down": _flap_down, "recovery": _flap_recovery, "remote": _flap_remote}
    flaps = tuple(make[variant](rng, run, start, down) for start in starts)
    # A dip next to a flap would count as part of the flap.
    others = tuple(
        each
        for each in weak.incidents
        if all(abs(each.start_s - start_s) > 30 for start_s in starts)
    )
    return dataclasses.replace(weak, variant=variant, incidents=others + flaps)


def _retransmissions(rng: np.random.Generator) -> dict[str, int]:
    """Draw the counts of a port's queue pairs after an outage."""
    timeouts = int(log_uniform(rng, RETRANSMISSIONS))
    sequence = int(timeouts * rng.uniform(0, 1))
    return {"local_ack_timeout_err": timeouts, "packet_seq_err": sequence}


def _flap_down(
    rng: np.random.Generator, run: Run, start_s: float, down: tuple[float, float]
) -> Incident:
    """Draw a port that goes down and comes up."""
    down_s = log_uniform(rng, down)
    counts = {
        "link_downed": 1,
        "link_error_recovery": int(rng.integers(0, 3)),
        "symbol_error": int(log_uniform(rng, (1, 200))),
    }
    if run.port.link_layer == "Ethernet":
        counts |= {"carrier_changes": 2, "link_error_recovery": 0}
    discards = {"port_xmit_discards": int(log_uniform(rng, (1, 1000)))}
    lost = down_s > TRANSPORT_TIMEOUT_S and rng.random() < 0.4
    return make_incident(
        "flap",
        start_s,
        counts,
        outage_s=down_s + rng.uniform(*RESUME_S),
        down_s=down_s,
        sent_counts=_retransmissions(rng) | discards,
        run_lost_s=rng.uniform(*RUN_LOST_S) if lost else 0.0,
    )


def _flap_recovery(
    rng: np.random.Generator, run: Run, start_s: float, down: tuple[float, float]
) -> Incident:
    """Draw a port that retrains without going down."""
    del run, down
    counts = {
        "link_error_recovery": int(rng.integers(1, 4)),
        "symbol_error": int(log_uniform(rng, (1, 50))),
    }
    outage_s = rng.uniform(*STALL_S)
    return make_incident(
        "flap", start_s, counts, outage_s=outage_s, sent_counts=_retransmissions(rng)
    )


def _flap_remote(
    rng: np.random.Generator, run: Run, start_s: float, down: tuple[float, float]
) -> Incident:
    """Draw a flap of a farther link."""
    del run, down
    outage_s = rng.uniform(*STALL_S)
    return make_incident(
        "flap", start_s, {}, outage_s=outage_s, sent_counts=_retransmissions(rng)
    )


def _away_from_restart(
    rng: np.random.Generator, run: Run, length_s: float, low_s: float, high_s: float
) -> float:
    """Draw the start of a span without a restart; give up after 30 draws."""
    steps = [pause.after_step for pause in run.pauses if pause.name != "save"]
    start_s = float(rng.uniform(low_s, high_s))
    if not steps:
        return start_s
    healthy = lay(run)
    stop_s, go_s = healthy.start_s[steps[0], -1], healthy.end_s[steps[0], -1]
    for _ in range(30):
        if start_s + length_s < stop_s - 60 or start_s > go_s + 60:
            break
        start_s = float(rng.uniform(low_s, high_s))
    return start_s


def _add_decay(rng: np.random.Generator, run: Run, weak: Conditions) -> Conditions:
    """Add a rate that drops slowly or at once, or growing errors."""
    end_s, times = run.duration_s, grid_times(run.duration_s)
    variant = str(rng.choice(list(DECAY_VARIANTS), p=list(DECAY_VARIANTS.values())))
    own, errors, incidents = weak.own.copy(), weak.errors_per_s, weak.incidents
    if variant == "lanes":
        start_s = _away_from_restart(rng, run, 0.0, 0.2 * end_s, 0.75 * end_s)
        width = rng.choice(WIDTHS)
        own[times >= start_s] *= min(1.0, width * WIRE_EFFICIENCY / run.efficiency)
        counts = {"link_error_recovery": int(run.port.link_layer == "InfiniBand")}
        dip = make_incident("retrain", start_s, counts, outage_s=rng.uniform(*DIP_S))
        incidents = (*incidents, dip)
    else:
        start_s = float(rng.uniform(0.05, 0.35) * end_s)
        reached = np.clip((times - start_s) / (end_s - start_s), 0, 1)
        if variant == "ramp":
            own *= 1 - rng.uniform(*RATE_LOSS) * reached ** rng.uniform(*RAMP_POWER)
        else:
            final = log_uniform(rng, ERRORS)
            doublings = max(rng.uniform(*DOUBLINGS), math.log2(final))
            errors = final * 2.0 ** (doublings * (reached - 1))
            own *= 1 - ERRORS_RATE_LOSS * errors / final
            errors = errors * run.port.specified_errors_per_s
    return dataclasses.replace(
        weak,
        variant=variant,
        span_s=(start_s, end_s),
        own=own,
        errors_per_s=errors,
        incidents=incidents,
    )


def _add_neighbour(rng: np.random.Generator, run: Run, weak: Conditions) -> Conditions:
    """Add one to three jobs whose bursts collide with those of this port."""
    end_s = run.duration_s
    length_s = max(NEIGHBOUR_S, rng.uniform(*NEIGHBOUR_PART) * end_s)
    start_s = _away_from_restart(
        rng, run, length_s, 0.1 * end_s, max(0.15 * end_s, end_s - length_s)
    )
    span_s = (start_s, min(end_s, start_s + length_s))
    load = np.zeros(len(weak.own))
    for _ in range(int(rng.choice((1, 2, 3), p=(0.6, 0.3, 0.1)))):
        pulse(load, *_draw_job(rng, run, span_s))
    healthy = lay(run)
    while load[load > 0].min() < DEEPEST:
        contended = np.maximum(weak.contended, load)
        conditions = dataclasses.replace(
            weak, variant="neighbour", span_s=span_s, contended=contended
        )
        timeline = lay(run, conditions.share)
        begin_s = timeline.start_s[run.trained, 0]
        num_steps = ((begin_s >= span_s[0]) & (begin_s < span_s[1])).sum()
        if num_steps < NEIGHBOUR_STEPS:
            break
        if step_cost(run, healthy, timeline, span_s) > 1.1 * WEAKEST.step_cost:
            return conditions
        # Increase the other job's share until this run is affected enough.
        load = np.where(load > 0, np.minimum(DEEPEST, 1 - 0.7 * (1 - load)), 0.0)
    return _add_neighbour(rng, run, weak)  # a pause was in the way


def _draw_job(
    rng: np.random.Generator, run: Run, span_s: tuple[float, float]
) -> tuple[Array, Array, Array]:
    """Draw start, length and depth of each burst of another job."""
    period_s = log_uniform(rng, NEIGHBOUR_PERIOD_S)
    while any(abs(period_s / run.step_s / r - 1) < 0.07 for r in (0.5, 1.0, 2.0)):
        period_s = log_uniform(rng, NEIGHBOUR_PERIOD_S)
    num = int((span_s[1] - span_s[0]) / period_s) + 1
    spread = rng.uniform(*NEIGHBOUR_JITTER)
    cycle_s = period_s * np.clip(1 + spread * rng.standard_normal(num), 0.3, 2.0)
    start_s = span_s[0] + np.cumsum(cycle_s) - cycle_s
    kept = start_s < span_s[1]
    length_s = cycle_s * rng.uniform(*NEIGHBOUR_DUTY)
    depth = rng.uniform(*NEIGHBOUR_DEPTH) * rng.uniform(0.5, 1.0, num)
    length_s = np.minimum(length_s, span_s[1] - start_s)
    return start_s[kept], length_s[kept], depth[kept]
