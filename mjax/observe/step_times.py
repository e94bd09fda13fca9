"""Arrange the spans of a run as seconds of each step, rank and phase.

Input: the span files of a run. Output: `StepTimes`, the input of the detectors of
`mjax.observe.detect`. All values are durations, each by one clock, so offsets between
the clocks of hosts do not matter.

With stamps, a column is a device. Its phases are those of the device and the time it
waited for its host: `data` is the wait for data; `between` is the rest of the time from
the end of the gradient norm to the next forward pass. Without stamps, a column is a
process, and the phases are those of its host.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from mjax.observe.detect.stragglers import MIN_UNITS, Layout, Role
from mjax.observe.spans import Line, SpanFile

STAMPED: dict[str, Role] = {
    "data": "data",
    "between": "host",
    "forward": "compute",
    "backward": "compute",
    "tick": "compute",
    "norm": "sync",
}
"""Phases of a device, in the order of a step."""
UNSTAMPED: dict[str, Role] = {
    "gather": "host",
    "data": "data",
    "dispatch": "host",
    "device": "sync",
    "metrics": "host",
    "agree": "wait",
}
"""Phases of a host. The host that waits least for its device dispatched last."""
_INTERRUPTS = frozenset({"eval", "ckpt"})
"""Kinds of spans: a step that has one is left out, and so is the next step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of the steps of one generation: T steps, R columns, P phases."""

    phases: tuple[str, ...]
    roles: tuple[Role, ...]
    phase_s: Float[np.ndarray, "T R P"]
    """Seconds; NaN marks a missing value."""
    steps: Int[np.ndarray, " T"]
    layout: Layout
    """Layout of the columns; its hosts are indexes of `units`."""
    left_out: Bool[np.ndarray, " T"]
    """Steps with a save or an evaluation, and the steps after them."""
    units: tuple[str, ...]
    """Names of hosts, or of processes if the run has fewer than three hosts."""
    hosts: tuple[str, ...]
    """Host of each unit."""
    ranks: tuple[int, ...]
    """Rank of each column."""
    devices: tuple[int, ...]
    """Mesh number of the device of each column; without stamps, the first device of the
    process."""
    has_stamps: bool
    problems: tuple[str, ...]
    """Descriptions of missing data, for people."""


def step_times(files: Sequence[SpanFile], last: int | None = None) -> StepTimes:
    """Arrange the spans of the newest generation.

    Args:
      files: span files of a run.
      last: number of last steps to use.
    Raises:
      ValueError: there is only one process, or no step has ended.
    """
    generation = max(found.header.generation for found in files)
    files = [found for found in files if found.header.generation == generation]
    if len(files) < 2:
        header = files[0].header
        host = header.host
        if len(header.devices) == math.prod(header.mesh.values()):
            raise ValueError(
                f"generation {generation} has one rank (on {host}), and no other to "
                "compare it with"
            )
        raise ValueError(
            f"generation {generation} has spans of one rank only (on {host}), but "
            "stragglers are found by comparison; if the run had more ranks, copy "
            "their files into spans/ of --work-dir"
        )
    rows = [_steps(found.lines) for found in files]
    known = sorted({step for each in rows for step in each})
    if last is not None:
        known = known[-last:]
    if not known:
        raise ValueError(
            f"generation {generation} has run no step yet; wait for the first steps"
        )
    has_stamps = any(step.stamps for each in rows for step in each.values())
    columns = [
        (number, device)
        for number, found in enumerate(files)
        for device in (found.header.devices if has_stamps else found.header.devices[:1])
    ]
    table = STAMPED if has_stamps else UNSTAMPED
    values = _values(rows, columns, known, has_stamps=has_stamps)
    has = ~np.isnan(values).all(axis=(0, 1))
    if not has.any():
        raise ValueError(
            f"generation {generation} has no time of any of {', '.join(table)}; its "
            "spans were written by another program"
        )
    interrupted = {step for each in rows for step in each if each[step].is_interrupted}
    units, unit_of = _units(files)
    host_of = {u: f.header.host for u, f in zip(unit_of, files, strict=True)}
    return StepTimes(
        phases=tuple(name for name, one in zip(table, has, strict=True) if one),
        roles=tuple(role for role, one in zip(table.values(), has, strict=True) if one),
        phase_s=values[:, :, has],
        steps=np.array(known),
        layout=_layout(files, columns, unit_of),
        left_out=np.array([not {s, s - 1}.isdisjoint(interrupted) for s in known]),
        units=units,
        hosts=tuple(host_of[unit] for unit in range(len(units))),
        ranks=tuple(files[number].header.rank for number, _ in columns),
        devices=tuple(device for _, device in columns),
        has_stamps=has_stamps,
        problems=(
            *_missing(files),
            *_silent(files, columns, values),
            *(_gathered(rows) if has_stamps else ()),
        ),
    )


def _values(
    rows: Sequence[dict[int, "_Step"]],
    columns: Sequence[tuple[int, int]],
    steps: Sequence[int],
    *,
    has_stamps: bool,
) -> np.ndarray:
    """Return the seconds, [T, R, phases]."""
    names = [*(STAMPED if has_stamps else UNSTAMPED)]
    values = np.full((len(steps), len(columns), len(names)), np.nan)
    for column, (number, device) in enumerate(columns):
        own = rows[number]
        for row, step in enumerate(steps):
            if step in own:
                host_s = own[step].host_s
                found = _stamped(own, step, device) if has_stamps else host_s
                values[row, column] = [found.get(name, np.nan) for name in names]
    return values


@dataclasses.dataclass(kw_only=True)
class _Step:
    """Durations in one step of one process."""

    host_s: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    stamps: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Seconds of the phases, by device."""
    bounds_ns: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Start of the first phase and end of the gradient norm, by device."""
    is_interrupted: bool = False


def _steps(lines: Sequence[Line]) -> dict[int, _Step]:
    """Return the durations of each step; a step may have several lines."""
    found: dict[int, _Step] = collections.defaultdict(_Step)
    for line in lines:
        if line.step < 1:
            continue
        step = found[line.step]
        for name, kind, stream, start_ns, end_ns in line.spans:
            step.is_interrupted |= kind in _INTERRUPTS
            if stream == "host":
                step.host_s[name] += (end_ns - start_ns) / 1e9
            elif stream.startswith("device:") and name in STAMPED:
                device = int(stream.removeprefix("device:"))
                phases = step.stamps.setdefault(device, collections.defaultdict(float))
                phases[name] += (end_ns - start_ns) / 1e9
                first_ns, last_ns = step.bounds_ns.get(device, (start_ns, end_ns))
                step.bounds_ns[device] = min(first_ns, start_ns), max(last_ns, end_ns)
    return dict(found)


def _stamped(rows: dict[int, _Step], step: int, device: int) -> dict[str, float]:
    """Return the phases of a device, including waits for its host."""
    own = rows[step]
    found = dict(own.stamps.get(device, {}))
    if step - 1 in rows and device in own.bounds_ns:
        before_ns = rows[step - 1].bounds_ns.get(device)
        if before_ns is not None:
            idle_s = max(own.bounds_ns[device][0] - before_ns[1], 0) / 1e9
            found["data"] = min(own.host_s.get("data", 0.0), idle_s)
            found["between"] = idle_s - found["data"]
    return found


def _units(files: Sequence[SpanFile]) -> tuple[tuple[str, ...], list[int]]:
    """Return the names of the units to compare, and the unit of each file."""
    hosts = sorted({found.header.host for found in files})
    if len(hosts) >= MIN_UNITS:
        return tuple(hosts), [hosts.index(found.header.host) for found in files]
    names = [f"{found.header.host} rank {found.header.rank}" for found in files]
    return tuple(names), list(range(len(files)))


def _layout(
    files: Sequence[SpanFile], columns: Sequence[tuple[int, int]], unit_of: list[int]
) -> Layout:
    """Return the positions of the columns in the mesh of the headers."""
    places = []
    for number, device in columns:
        mesh = files[number].header.mesh
        sizes = tuple(mesh.values())
        if device >= np.prod(sizes):
            raise ValueError(
                f"{files[number].path}: device {device} is outside of the mesh {mesh}"
            )
        place = dict(zip(mesh, np.unravel_index(device, sizes), strict=True))
        pp, tp = int(place.pop("pp", 0)), int(place.pop("tp", 0))
        dp = 0
        for axis, index in place.items():
            dp = dp * mesh[axis] + int(index)
        places.append((unit_of[number], tp, pp, dp))
    host, tp, pp, dp = np.array(places).T
    return Layout(host=host, tp=tp, pp=pp, dp=dp)


def _missing(files: Sequence[SpanFile]) -> tuple[str, ...]:
    """Return a problem if devices of the mesh have no file."""
    sizes = files[0].header.mesh.values()
    devices = {device for found in files for device in found.header.devices}
    absent = sorted(set(range(int(np.prod(list(sizes))))) - devices)
    if not absent:
        return ()
    shown = ", ".join(map(str, absent[:5])) + (", ..." if absent[5:] else "")
    return (
        f"{len(absent)} devices of the mesh have no spans: {shown}; copy the files of "
        "their processes into spans/",
    )


def _silent(
    files: Sequence[SpanFile], columns: Sequence[tuple[int, int]], values: np.ndarray
) -> tuple[str, ...]:
    """Return a problem if processes have a file but no times."""
    is_silent = np.isnan(values).all(axis=(0, 2))
    ranks = sorted(
        {
            files[number].header.rank
            for (number, _), silent in zip(columns, is_silent, strict=True)
            if silent
        }
    )
    if not ranks:
        return ()
    shown = ", ".join(map(str, ranks[:5])) + (", ..." if ranks[5:] else "")
    return (
        f"no times of these steps from rank {shown}: it is not compared; check "
        "whether it has ended, and whether it writes stamps like the others",
    )


def _gathered(rows: Sequence[dict[int, _Step]]) -> tuple[str, ...]:
    """Return a problem if a gather before the step hides which host is late."""
    if not any("gather" in step.host_s for each in rows for step in each.values()):
        return ()
    return (
        "with --mesh.gather-first the first weights of a step arrive when the latest "
        "host has dispatched their gather, so a late host shows as the same time in "
        "`between` on all hosts, and none is named; to find it, run some steps with "
        "--mesh.no-gather-first",
    )
