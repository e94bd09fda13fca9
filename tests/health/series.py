"""Generated series of network counters: healthy ones, and three kinds of faulty ones.

Input: a kind and a seed. Output: a `Series`, the samples of one network port of one
host over 10 to 30 minutes of a training run, and the truth about them. The same kind
and seed give the same series.

    from tests.health.series import REPORT_SEEDS, TUNING_SEEDS, make
    series = make("flap", TUNING_SEEDS[0])

Thresholds of a detector are tuned on `TUNING_SEEDS`; those of `mjax.health.watch` on
600 to 799, and checked on 800 to 999. `REPORT_SEEDS` are only for reported figures, 500
of each kind. The generator was fixed before any detector existed, and not by the author
of the detectors.

Every kind has the same healthy events: evaluations, saves, restarts, reboots, changes
of the batch size, other hosts that delay the step, drift, dips, pulses of contention,
symbol errors within the specification, late or missing samples, counters that wrap,
saturate or are reset. A kind other than clean has one fault in addition.

- flap: the link goes down or retrains, or a farther link fails. link_downed increases
  by at least 1, or at least 1 s of delayed traffic with 8 retransmissions.
- decay: the rate of bursts falls slowly or to fewer lanes, or symbol errors double
  repeatedly. At least 10% of the rate is lost in the last tenth, or errors reach 10
  times the specified rate.
- neighbour: other jobs share a link. Steps take at least 10% longer, for 150 s.

`STRONGEST_CLEAN` bounds the events of clean series; nothing is between it and
`WEAKEST`. The formulas are in the module of each part: `series_run` (the run),
`series_conditions` (disturbances), `series_faults` (faults), `series_counters` (what is
read), `series_severity` (how strong it was).
"""

import dataclasses
from typing import get_args

import numpy as np

from tests.health.series_conditions import Conditions
from tests.health.series_counters import Clock, Placed, Readings, Window, place, read
from tests.health.series_faults import Kind, draw_conditions
from tests.health.series_run import Array, Port, Run, Timeline, draw_run, lay
from tests.health.series_severity import (
    STRONGEST_CLEAN,
    WEAKEST,
    Severity,
    rate_loss,
    step_cost,
)

__all__ = [
    "KINDS",
    "REPORT_SEEDS",
    "STRONGEST_CLEAN",
    "TUNING_SEEDS",
    "WEAKEST",
    "Kind",
    "Port",
    "Series",
    "Severity",
    "Truth",
    "Window",
    "make",
]

TUNING_SEEDS = range(0, 10_000)
REPORT_SEEDS = range(50_000, 50_500)
KINDS: tuple[Kind, ...] = get_args(Kind.__value__)
RESTART_PROBABILITY = 0.15
"""Chosen; the same for every kind, so that a restart gives no hint of the kind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """An event in a series, weak or strong."""

    name: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """The events put into a series, which a detector does not see."""

    kind: Kind
    variant: str
    """Variant of the fault: down, recovery, remote; ramp, lanes, errors; neighbour; ""
    for clean."""
    onset_s: float | None
    """Start of the first fault; None for clean."""
    offset_s: float | None
    """End of the last fault; the end of the series if it does not heal."""
    severity: Severity
    events: tuple[Event, ...]
    """The faults: one for each flap, otherwise one from onset to offset."""
    disturbances: tuple[Event, ...]
    """All other events, except evaluations and random stalls of single steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One port of one host of a run. M seconds, T steps."""

    port: Port
    readings: Readings
    step_end_s: Array
    """[T], float64: when a training step ended, on the sampler's clock."""
    step_s: Array
    """[T], float64: its duration as reported by the trainer. Steps cut off by an outage
    or a restart are missing."""
    truth: Truth


def make(kind: Kind, seed: int) -> Series:
    """Make the series of a kind and a seed.

    Raises:
      ValueError: the kind is unknown, or the seed is negative.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    run = draw_run(rng, RESTART_PROBABILITY)
    conditions = draw_conditions(kind, rng, run)
    timeline = lay(run, conditions.share)
    placed, clock = place(timeline, conditions.incidents, run.duration_s)
    readings = read(rng, run, conditions, timeline, placed, clock)
    step_end_s, step_s = _steps(run, timeline, placed, clock)
    return Series(
        port=run.port,
        readings=readings,
        step_end_s=step_end_s,
        step_s=step_s,
        truth=_truth(kind, run, conditions, timeline, placed, clock),
    )


def _steps(
    run: Run, timeline: Timeline, placed: tuple[Placed, ...], clock: Clock
) -> tuple[Array, Array]:
    """Return the end and the time of each step that the trainer reports."""
    start_s, end_s = timeline.start_s[:, 0], timeline.end_s[:, -2].copy()
    if run.pause_in_step:
        saves = [each.after_step for each in run.pauses if each.name == "save"]
        stops = {each.after_step for each in run.pauses if each.name != "save"}
        rows = [step for step in saves if step not in stops]
        end_s[rows] = timeline.end_s[rows, -1]
    kept = run.trained & (start_s >= 0)
    for each in placed:
        if each.incident.run_lost_s:
            at_s = each.incident.start_s
            kept &= (start_s > at_s) | (end_s < at_s)
    start_s, end_s = clock.real(start_s[kept]), clock.real(end_s[kept])
    inside = end_s < run.duration_s
    return end_s[inside], (end_s - start_s)[inside]


def _truth(
    kind: Kind,
    run: Run,
    conditions: Conditions,
    timeline: Timeline,
    placed: tuple[Placed, ...],
    clock: Clock,
) -> Truth:
    """Collect the drawn events, and measure their effects."""

    def event(name: str, start_s: float, end_s: float) -> Event:
        edges = clock.real(np.array([start_s, end_s]))
        end_s = min(float(edges[1]), run.duration_s)
        return Event(name=name, start_s=float(edges[0]), end_s=end_s)

    faults, others = [], []
    for each in placed:
        flap = each.incident.name == "flap"
        end_s = each.start_s + each.incident.outage_s
        (faults if flap else others).append(
            Event(name=each.incident.name, start_s=each.start_s, end_s=end_s)
        )
    if conditions.span_s is not None:
        faults.append(event(kind, *conditions.span_s))
    others += [event(*each) for each in (*conditions.weak, *run.changes)]
    others += [
        Event(name="counters cleared", start_s=cleared_s, end_s=cleared_s)
        for cleared_s in conditions.cleared_s
    ]
    for pause in run.pauses:
        row = pause.after_step
        start_s, end_s = timeline.start_s[row, -1], timeline.end_s[row, -1]
        others.append(event(pause.name, start_s, end_s))
    return Truth(
        kind=kind,
        variant=conditions.variant,
        onset_s=min((each.start_s for each in faults), default=None),
        offset_s=max((each.end_s for each in faults), default=None),
        severity=_severity(run, conditions, timeline, placed),
        events=tuple(faults),
        disturbances=tuple(each for each in others if each.start_s < run.duration_s),
    )


def _severity(
    run: Run, conditions: Conditions, timeline: Timeline, placed: tuple[Placed, ...]
) -> Severity:
    """Measure how strong the events are."""
    span_s = conditions.span_s or (0.0, run.duration_s)
    last_s = conditions.errors_per_s[-1]
    stalled = [each for each in placed if each.stall_s > 0]
    retransmissions = [
        sum(
            each.incident.sent_counts.get(name, 0)
            for name in ("local_ack_timeout_err", "packet_seq_err")
        )
        for each in stalled
    ]
    return Severity(
        links_downed=sum(each.incident.counts.get("link_downed", 0) for each in placed),
        longest_stall_s=max((each.stall_s for each in stalled), default=0.0),
        most_retransmissions=max(retransmissions, default=0),
        rate_loss=rate_loss(run, conditions.own, timeline),
        errors=float(last_s / run.port.specified_errors_per_s),
        step_cost=step_cost(run, lay(run), timeline, span_s),
    )
