"""Prometheus gauges for the runs in a store.

Input: a store, reports of collectors, and the time. Output: gauges in Prometheus' text
format. `render` is pure; `read` queries the store, in a few statements on small tables.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from mjax.observe.store.base import Store

_LATEST = ("step", "loss", "tokens_per_s", "mfu")
_HELP = {
    "step": "Optimizer steps taken.",
    "loss": "Loss of the newest step, nats per token.",
    "tokens_per_s": "Tokens of the newest step per second.",
    "mfu": "Model FLOPs utilization of the newest step, a fraction.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankAge:
    """Age of the newest span of a process of the newest generation."""

    run: str
    host: str
    rank: int
    age_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Values of the gauges."""

    latest: Mapping[str, Mapping[str, float]]
    """Values of the newest row, by run."""
    ages: Sequence[RankAge] = ()
    behind: Mapping[str, tuple[int, float]] = dataclasses.field(default_factory=dict)
    """Unsent bytes and seconds since the last report, by collector."""
    bad_lines: int = 0


def read(
    store: Store, behind: Mapping[str, tuple[int, float]], now_ns: int
) -> Snapshot:
    """Read a snapshot.

    Args:
      store: store of the runs.
      behind: result of `Ingester.behind`.
      now_ns: wall-clock time.
    """
    rows = store.query(
        f"select m.run, {', '.join(f'm.{name}' for name in _LATEST)} from metrics m "
        "join (select run, max(step) as step from metrics group by run) last "
        "on m.run = last.run and m.step = last.step"
    )
    latest = {}
    for run, *values in rows:
        named = zip(_LATEST, values, strict=True)
        latest[run] = {name: float(v) for name, v in named if v is not None}
    # The silence of an ended process is not a fault.
    ages = store.query(
        "select n.run, n.host, n.rank, n.end_wall_ns from newest_spans n join runs r "
        "on n.run = r.run and n.generation = r.generation "
        "where n.exit_code is null and n.end_wall_ns is not null"
    )
    bad = store.query("select count(*) from bad_lines")
    return Snapshot(
        latest=latest,
        ages=[
            RankAge(run=run, host=host, rank=rank, age_s=max(0, now_ns - end) / 1e9)
            for run, host, rank, end in ages
        ],
        behind=behind,
        bad_lines=bad[0][0],
    )


def render(snapshot: Snapshot) -> bytes:
    """Write gauges in Prometheus' text format."""
    registry = CollectorRegistry()
    for name in _LATEST:
        gauge = Gauge(f"mjax_{name}", _HELP[name], ["run"], registry=registry)
        for run, values in snapshot.latest.items():
            if name in values:
                gauge.labels(run).set(values[name])
    age = Gauge(
        "mjax_newest_span_age_seconds",
        "Time since the newest span of a process that has not ended.",
        ["run", "host", "rank"],
        registry=registry,
    )
    for found in snapshot.ages:
        age.labels(found.run, found.host, str(found.rank)).set(found.age_s)
    behind = Gauge(
        "mjax_stream_behind_bytes",
        "Bytes that a collector had not sent at its last report.",
        ["collector"],
        registry=registry,
    )
    silent = Gauge(
        "mjax_stream_silent_seconds",
        "Time since the last report of a collector.",
        ["collector"],
        registry=registry,
    )
    for name, (num_bytes, seconds) in snapshot.behind.items():
        behind.labels(name).set(num_bytes)
        silent.labels(name).set(seconds)
    bad = Gauge("mjax_bad_lines", "Lines that were left out.", registry=registry)
    bad.set(snapshot.bad_lines)
    return generate_latest(registry)
