"""Measure the start of a process group, and model it for 10,000 processes.

    python -m scripts.health.init_scale

Takes the flags of `python -m mjax.health init`. Writes docs/benchmarks/init_scale.md,
and the measurements as init_scale.json beside it. The host must be idle: time of
other programs would count as waiting, and they would evict the coordinator's caches.
"""

import json
import os
import sys

from mjax.health.startup.command import measure, parse
from mjax.health.startup.model import Phase, read_phases
from mjax.health.startup.report import (
    GROWTH_HEADER,
    MEGASCALE,
    MODEL_HEADER,
    Size,
    as_json,
    coordinator_rows,
    growth_rows,
    model_rows,
    notes,
    wall_rows,
)
from scripts.evidence import BENCHMARKS_DIR, Table, commit, write_page

MOST_LOAD = 3.0
"""One-minute load average above which nothing is measured."""


def tables(phases: tuple[Phase, ...], size: Size, how: str) -> list[Table]:
    """Return the tables of the page."""
    wall, coordinator = wall_rows(phases), coordinator_rows(phases)
    return [
        Table(
            title="Phases",
            text=f"{how} Seconds of the slowest process, in brackets of the median "
            "process. A phase begins when all processes have ended the one before.",
            header=wall[0],
            rows=wall[1:],
        ),
        Table(
            title="The coordinator",
            text="CPU milliseconds of the coordinator in the phases in which it is "
            "asked. Clients are light: one process runs many, each with its own "
            "connection and the requests of a process. At sizes with both, they "
            "should cost the same.",
            header=coordinator[0],
            rows=coordinator[1:],
        ),
        Table(
            title="Growth",
            text="Law of growth, chosen by AICc among constant, logarithmic, linear "
            "and quadratic, each with a fixed part; named if it leads by 4. For the "
            "coordinator, growth with the number of clients, if there are any.",
            header=GROWTH_HEADER,
            rows=growth_rows(phases),
        ),
        Table(
            title=f"Model of {size.hosts:,} processes",
            text=f"Seconds. {notes(phases, size)}",
            header=MODEL_HEADER,
            rows=model_rows(phases, size),
        ),
        Table(
            title="MegaScale",
            text="Time to initialize the communication groups, from arXiv:2402.15627, "
            "section 3.5. The barriers there ask one server for every group; here "
            "there is one group, and one coordinator.",
            header=("what", "scale", "time"),
            rows=MEGASCALE,
        ),
    ]


def main(argv: list[str]) -> int:
    """Measure, and write the page."""
    asked = parse(argv, "python -m scripts.health.init_scale")
    load = os.getloadavg()[0]
    if load > MOST_LOAD:
        print(f"error: the load average is {load:.1f}; wait until below {MOST_LOAD:g}")
        return 1
    starts, clients = measure(asked)
    phases = read_phases(starts, clients)
    size = Size(hosts=asked.hosts, round_trip_s=asked.round_trip_us / 1e6)
    how = (
        f"Commit {commit()}. Medians of {asked.repeats} starts of each size; the load "
        f"average before was {load:.2f}."
    )
    command = " ".join(["python -m scripts.health.init_scale", *argv])
    title = "Starting a process group"
    print(write_page("init_scale", title, command, tables(phases, size, how)))
    raw = as_json(phases, size, starts, clients)
    (BENCHMARKS_DIR / "init_scale.json").write_text(json.dumps(raw) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
