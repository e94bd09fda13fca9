"""Report the phases of starting a process group, for people and for programs.

Input: the phases at all sizes. Output: lines of text or a JSON object, with a model of
many hosts next to MegaScale's figures. Pure, except that it reads the number of cores
of this host.
"""

import dataclasses
import os
import textwrap
from collections.abc import Sequence
from typing import Any

from mjax.health.startup.laws import LEAST_SIZES, Growth, Range
from mjax.health.startup.model import Phase, Starts, add, predict

MEGASCALE = (
    ("Megatron-LM, torch's TCPStore", "2,048 GPUs", "1047 s"),
    ("TCPStore replaced by Redis", "2,048 GPUs", "361 s"),
    ("and fewer global barriers", "2,048 GPUs", "under 5 s"),
    ("and fewer global barriers", "more than 10,000 GPUs", "under 30 s"),
)
"""Time to initialize the communication groups. Source: MegaScale, arXiv:2402.15627,
section 3.5, "Collective Communication Group Initialization"."""


GROWTH_HEADER = (
    *("phase", "slowest process", "CPU of process 0", "CPU of others"),
    "CPU of the coordinator",
)
MODEL_HEADER = ("phase", "own", "coordinator", "wait", "sum", "from", "to")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The case for which the model is evaluated."""

    hosts: int
    """Number of processes, each with its own cores."""
    round_trip_s: float
    """Round trip in seconds of the network between two processes."""


def table(phases: Sequence[Phase], size: Size) -> list[str]:
    """Return the findings as lines of text, for people."""
    parts = [
        (
            "Seconds of the slowest process of a start, in brackets the median process",
            wall_rows(phases),
        ),
        ("CPU milliseconds of the coordinator", coordinator_rows(phases)),
        (
            "Growth with the number of processes on this host, of the coordinator with "
            "the number of clients",
            [GROWTH_HEADER, *growth_rows(phases)],
        ),
        (
            f"Model: seconds with {size.hosts} processes, each on cores of its own",
            [MODEL_HEADER, *model_rows(phases, size)],
        ),
        (
            "MegaScale (arXiv:2402.15627, section 3.5): time to initialize "
            "communication groups",
            MEGASCALE,
        ),
    ]
    lines = []
    for title, rows in parts:
        lines += [title, "", *aligned(rows), ""]
    return [*lines, *textwrap.wrap(notes(phases, size), 88)]


def wall_rows(phases: Sequence[Phase]) -> list[list[str]]:
    """Return a header, and a row for each phase with a column for each size."""
    rows = [["phase", *map(str, phases[0].slowest_s)]]
    for phase in phases:
        cells = [
            f"{phase.slowest_s[n]:.3f} ({phase.median_s[n]:.3f})"
            for n in phase.slowest_s
        ]
        rows.append([phase.name, *cells])
    return rows


def coordinator_rows(phases: Sequence[Phase]) -> list[list[str]]:
    """Return a header, and rows for each phase: of processes, and of light clients."""
    sizes = sorted({n for p in phases for n in (*p.coordinator_s, *p.clients_s)})
    rows = [["phase", "of", *map(str, sizes)]]
    for phase in phases:
        if phase.is_silent:
            continue
        measured = {"processes": phase.coordinator_s, "clients": phase.clients_s}
        for what, seconds in measured.items():
            cells = [f"{1e3 * seconds[n]:.1f}" if n in seconds else "" for n in sizes]
            if seconds:
                rows.append([phase.name, what, *cells])
    return rows


def growth_rows(phases: Sequence[Phase]) -> list[list[str]]:
    """Return a row for each phase with the growth of the measured times."""
    return [
        [
            phase.name,
            phase.wall.describe(),
            phase.first.describe(),
            phase.others.describe(),
            "idle" if phase.is_silent else phase.coordinator.describe(),
        ]
        for phase in phases
    ]


def model_rows(phases: Sequence[Phase], size: Size) -> list[list[str]]:
    """Return a row for each phase, and the sum of those that GPU runs have too."""
    rows = []
    for phase in phases:
        found = predict(phase, size.hosts, size.round_trip_s)
        terms = [_value(found.own), _value(found.coordinator), f"{found.wait_s:.3f}"]
        name = f"({phase.name})" if phase.is_cpu_only else phase.name
        rows.append([name, *terms, *_columns(found.total)])
    return [*rows, ["sum", "", "", "", *_columns(total(phases, size))]]


def total(phases: Sequence[Phase], size: Size) -> Range:
    """Return the duration of all phases that runs on GPUs have too."""
    return add(
        [
            predict(phase, size.hosts, size.round_trip_s).total
            for phase in phases
            if not phase.is_cpu_only
        ]
    )


def notes(phases: Sequence[Phase], size: Size) -> str:
    """Return a text on the inputs of the model, and on its omissions."""
    sizes = phases[0].slowest_s
    text = (
        f"The processes share the {len(os.sched_getaffinity(0))} cores of this host, "
        "so seconds that grow here need not grow on a cluster. The model adds the CPU "
        "seconds of one process (own), those of the coordinator, and the rest at "
        f"{min(sizes)} processes over the loopback interface (wait), with a round trip "
        f"of {1e6 * size.round_trip_s:g} us for each text that process 0 reads. 'from' "
        "and 'to' contain every law that the measured sizes do not exclude (95%); '-': "
        "the law is undetermined. Phases in brackets are gloo's and not in the sum: "
        "GPUs use NCCL, which is not measured. MegaScale's figures are of NCCL groups "
        "made through torch.distributed, whose work differs from that of the model."
    )
    if len(sizes) < LEAST_SIZES:
        text += f" No law can be determined from fewer than {LEAST_SIZES} sizes."
    return text


def as_json(
    phases: Sequence[Phase], size: Size, starts: Starts, clients: Starts
) -> dict[str, Any]:
    """Return the findings and their inputs as a JSON object.

    Returns:
      cores; hosts, round_trip_s (inputs of the model); phases, total (findings);
      megascale; starts, clients (all measured times).
    """
    return {
        "cores": len(os.sched_getaffinity(0)),
        "hosts": size.hosts,
        "round_trip_s": size.round_trip_s,
        "phases": [_phase_json(phase, size) for phase in phases],
        "total": _range_json(total(phases, size)),
        "megascale": [
            {"what": what, "scale": scale, "time": took}
            for what, scale, took in MEGASCALE
        ],
        "starts": _starts_json(starts),
        "clients": _starts_json(clients),
    }


def _starts_json(starts: Starts) -> dict[str, Any]:
    return {
        str(size): [[dataclasses.asdict(p) for p in start] for start in repeats]
        for size, repeats in starts.items()
    }


def _phase_json(phase: Phase, size: Size) -> dict[str, Any]:
    found = predict(phase, size.hosts, size.round_trip_s)
    return {
        "name": phase.name,
        "is_cpu_only": phase.is_cpu_only,
        "slowest_s": {str(n): s for n, s in phase.slowest_s.items()},
        "median_s": {str(n): s for n, s in phase.median_s.items()},
        "growth": {
            "slowest": _growth_json(phase.wall),
            "cpu_of_process_0": _growth_json(phase.first),
            "cpu_of_a_process": _growth_json(phase.others),
            "coordinator": None if phase.is_silent else _growth_json(phase.coordinator),
        },
        "model": {
            "own": _range_json(found.own),
            "coordinator": _range_json(found.coordinator),
            "wait_s": found.wait_s,
            "sum": _range_json(found.total),
        },
    }


def _growth_json(growth: Growth) -> dict[str, Any]:
    return {
        "law": growth.law,
        "candidates": [*growth.candidates],
        "criteria": dict(growth.criteria),
    }


def _range_json(found: Range) -> dict[str, float | None]:
    """Return a range as JSON, which has no infinity: null means no bound."""
    high_s = found.high_s if found.high_s < float("inf") else None
    return {"value_s": found.value_s, "low_s": found.low_s, "high_s": high_s}


def _value(found: Range) -> str:
    return "-" if found.value_s is None else f"{found.value_s:.3f}"


def _columns(found: Range) -> list[str]:
    return [_value(found), f"{found.low_s:.2f}", f"{found.high_s:.2f}"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
