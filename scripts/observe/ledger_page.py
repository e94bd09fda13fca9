"""Compare the ledger of a run with outside observations, and write the page.

Input: the work dir of a run with faults, see `ledger_run`, and the observations of
another process. Output: docs/benchmarks/observe_ledger.md, and whether the buckets add
up to the wall time within half a percent.
"""

import dataclasses
import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mjax.observe import events, spans, start_time
from mjax.observe.launch_time import MOST_UNEXPLAINED
from mjax.observe.ledger import BUCKETS, Ledger, ledger
from scripts.evidence import Table, read_metrics, write_page
from scripts.faults.fault_kinds import KINDS, Found

WATCHED = "watched.json"
_STARTS = {
    **dict.fromkeys(("SIGKILL in compile", "SIGKILL in restore", "wrong flags"), 2),
    **{kind.name: 0 for kind in KINDS if not kind.causes},
}
"""Starts of the ranks that a fault causes, if not 1. To hit compiling or restoring, a
first kill causes the start that the second one hits; wrong flags are refused in one
start and corrected in the next.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """Observations of a run from outside, by one monotonic clock."""

    commit: str
    seed: int
    num_asked: int
    drivers: Sequence[tuple[float, float, int]]
    """Start, end and exit code of each driver process."""
    rows: Sequence[tuple[float, int]]
    """Times at which the last row of metrics.jsonl changed its step."""
    found: Sequence[Found]
    """Result of each fault."""

    @property
    def wall_s(self) -> float:
        """Time from the start of the first driver to the end of the last one."""
        return self.drivers[-1][1] - self.drivers[0][0]

    @property
    def num_lost(self) -> int:
        """Rows that were removed because a later start repeated their steps."""
        steps = [step for _, step in self.rows]
        pairs = itertools.pairwise(steps)
        return sum(max(0, before - after) for before, after in pairs)

    @property
    def alone_s(self) -> float:
        """Time between a voluntary end of the driver and its next start."""
        pairs = itertools.pairwise(self.drivers)
        return sum(after[0] - before[1] for before, after in pairs if before[2] >= 0)


def write(work_dir: Path, watched: Watched) -> tuple[Path, bool]:
    """Write the page; return whether the ledger adds up."""
    found = ledger(work_dir)
    error = abs(found.wall_s - watched.wall_s) / watched.wall_s
    unexplained = abs(found.unexplained_s) / watched.wall_s
    is_good = max(error, unexplained) <= MOST_UNEXPLAINED
    tables = [
        _buckets(found, watched),
        _outside(found, watched, work_dir),
        _parts(found),
        _spans(found, work_dir),
        _between(found, work_dir),
        _null(found, watched, work_dir),
        _damaged(found, work_dir),
    ]
    command = (
        f"python -m scripts.observe.ledger_run --faults {watched.num_asked} --seed "
        f"{watched.seed} --work-dir DIR"
    )
    title = "The ledger of a run with faults"
    return write_page("observe_ledger", title, command, tables), is_good


def _buckets(found: Ledger, watched: Watched) -> Table:
    wall_s = watched.wall_s
    kinds = {one.kind for one in watched.found}
    missing = [kind.name for kind in KINDS if kind.name not in kinds]
    rows = [
        [bucket, f"{of_s:.3f}", f"{of_s / wall_s:.2%}"]
        for bucket, of_s in (
            found.buckets | {"unexplained": found.unexplained_s}
        ).items()
    ]
    total_s, error_s = found.wall_s, found.wall_s - wall_s
    rows += [
        ["sum", f"{total_s:.3f}", f"{total_s / wall_s:.2%}"],
        ["wall time, measured outside", f"{wall_s:.3f}", "100.00%"],
        ["difference", f"{error_s:+.3f}", f"{error_s / wall_s:+.3%}"],
    ]
    return Table(
        title="Where the time went",
        text=(
            "The ledger divides the wall time of a run into buckets. "
            f"One launch on the commit {watched.commit}: 2 hosts with a rank each and "
            f"a spare, {len(watched.found)} faults of {len(kinds)} of the {len(KINDS)} "
            f"kinds of scripts/faults/fault_kinds.py"
            f"{', without ' + ', '.join(missing) if missing else ''}. "
            "Another process measures the wall time by its own monotonic clock, from "
            "just before it starts the first driver to the end of the last one. "
            f"Bound: sum and wall time agree within {MOST_UNEXPLAINED:.1%}, and at "
            "most that share is unexplained."
        ),
        header=["bucket", "s", "share"],
        rows=rows,
    )


def _outside(found: Ledger, watched: Watched, work_dir: Path) -> Table:
    """Compare with sources other than the records that the ledger reads."""
    starts = 1 + sum(_STARTS.get(one.kind, 1) for one in watched.found)
    row_s = sum((row["step_s"] for row in read_metrics(work_dir)), 0.0)
    hangs = ("SIGSTOP", "sleep", "hold the lock", "skip a collective")
    hung_s = sum(
        (one.detect_s or 0.0 for one in watched.found if one.kind in hangs), 0.0
    )
    parts = found.parts
    seen_lost = start_time.counted(spans.read_run(work_dir)[0]).num_lost_steps
    rows = [
        (
            *("starts of the ranks", starts, found.num_starts),
            "the first start, and the restarts that the faults caused",
        ),
        (
            *("lost steps", watched.num_lost, found.num_lost_steps),
            "rows removed from metrics.jsonl; the row of a step is written while the "
            "next step runs. The ledger counts dispatched steps. The spans count steps "
            f"that began on the host ({seen_lost})",
        ),
        (
            *("productive, s", row_s, found.buckets["productive"]),
            "the sum of `step_s` over the rows that were kept. The ledger also "
            "includes the time to write the last rows of each start",
        ),
        (
            *("hung, s", hung_s, parts.get("hung", 0.0)),
            "from each hang until its cause is named. The ledger measures from the "
            "last update of the rank's progress word before the fault to the end of "
            "the rank",
        ),
        (
            *("no driver, s", watched.alone_s, parts.get("no driver", 0.0)),
            "from the end of a driver that ended the run to the start of the next "
            "driver. The ledger also includes the exit of the first driver, after its "
            "last event",
        ),
    ]
    return Table(
        title="Compared with outside observations",
        text="Another process measured the column `outside` with its own clock, "
        "without the records that the ledger reads.",
        header=["figure", "outside", "ledger", "outside is"],
        rows=[[what, _number(a), _number(b), how] for what, a, b, how in rows],
    )


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def _parts(found: Ledger) -> Table:
    ordered = sorted(found.parts.items(), key=lambda item: -item[1])
    return Table(
        title="Parts",
        text=(
            "The parts of the buckets. `driver: order on its way` is the time from the "
            "driver's start order to the latest time at which rank 0 should have "
            "started. `driver: news of an end on its way` is the time from the end of "
            "rank 0 until the driver receives the report of that end. Both belong to "
            "the bucket `restart`."
        ),
        header=["part", "s", "share"],
        rows=[
            [part, f"{part_s:.3f}", f"{part_s / found.wall_s:.2%}"]
            for part, part_s in ordered
            if abs(part_s) >= 0.0005
        ],
    )


def _spans(found: Ledger, work_dir: Path) -> Table:
    """Compare the two sources."""
    files, _ = spans.read_run(work_dir)
    counted = start_time.counted(files)
    by_spans = Ledger(
        source="spans",
        parts=counted.parts,
        num_starts=counted.num_starts,
        num_lost_steps=counted.num_lost_steps,
    )
    wall_s = found.wall_s
    rows = []
    for bucket in BUCKETS:
        a, b = found.buckets[bucket], by_spans.buckets[bucket]
        rows.append([bucket, f"{a:.2f}", f"{b:.2f}", f"{(b - a) / wall_s:+.2%}"])
    a, b = found.unexplained_s, by_spans.unexplained_s
    rows.append(["unexplained", f"{a:.2f}", f"{b:.2f}", f"{(b - a) / wall_s:+.2%}"])
    a, b = wall_s, by_spans.wall_s
    rows.append(["sum", f"{a:.2f}", f"{b:.2f}", f"{(b - a) / wall_s:+.2%}"])
    return Table(
        title="Events and spans",
        text=_EXPLAINED,
        header=["bucket", "events, s", "spans, s", "difference / wall time"],
        rows=rows,
    )


_EXPLAINED = (
    "This table compares the ledger with one computed from spans alone, those of the "
    "lowest rank of each start. A run without a launcher has nothing else. Spans "
    "record no driver and no hang, so all time between two starts is idle. The next "
    "table breaks down that time. `compile` and `restart` are smaller too if a process "
    "was killed before it wrote its first line."
)


def _between(found: Ledger, work_dir: Path) -> Table:
    """Break down the idle time of the ledger from spans alone."""
    files, _ = spans.read_run(work_dir)
    idle_s = start_time.counted(files).parts.get(start_time.BETWEEN, 0.0)
    seen = start_time.by_generation(files)
    told = [one for one in events.read(work_dir)[0] if one.kind == "times"]
    silent = [one for one in told if one.generation not in seen]
    before_s = 0.0
    for one in told:
        if one.generation in seen:
            own = seen[one.generation](math.inf)
            import_s = sum(s for part, s in own.items() if part.endswith(": import"))
            before_s += one.data["spent_s"]["import"] - import_s
    lost_s = start_time.counted(files).parts.get("lost steps", 0.0)
    parts = found.parts
    driver = [part for part in parts if part.startswith(("driver: ", "no driver"))]
    rows = {
        "a hang, until it was noticed": parts.get("hung", 0.0),
        "a host was silent": parts.get("host silent", 0.0),
        "no rank ran (parts of the driver)": sum((parts[part] for part in driver), 0.0),
        f"{len(silent)} starts that were killed before they wrote a span": sum(
            (sum(one.data["spent_s"].values()) for one in silent), 0.0
        ),
        "from the start order to the first span of a process": before_s,
        "steps that had not ended": parts.get("lost steps", 0.0) - lost_s,
    }
    rows["other: an exit, a save or an evaluation that was cut off"] = idle_s - sum(
        rows.values()
    )
    return Table(
        title="Idle time of the ledger from spans alone",
        text="The causes are from the events. The last column is the share of the wall "
        "time.",
        header=["cause", "s", "share"],
        rows=[
            [name, f"{of_s:.2f}", f"{of_s / found.wall_s:.2%}"]
            for name, of_s in (rows | {"sum": idle_s}).items()
        ],
    )


def _null(found: Ledger, watched: Watched, work_dir: Path) -> Table:
    """Show the results of simpler ledgers."""
    wall_s, right = watched.wall_s, found.effective
    row_s = sum((row["step_s"] for row in read_metrics(work_dir)), 0.0)
    times_s = [at_s for at_s, _ in watched.rows]
    all_s = _all_steps_s(work_dir)
    running_s = _running_s(work_dir)
    cases = [
        ("this ledger", right * wall_s),
        ("from the first row to the last one", times_s[-1] - times_s[0]),
        ("while the driver was in the state `running`", running_s),
        ("all steps, including lost ones", all_s),
        ("sum of `step_s` in metrics.jsonl", row_s),
    ]
    return Table(
        title="Simpler ledgers",
        text=(
            "Productive time by simpler definitions. None of them says how the rest of "
            "the time was spent."
        ),
        header=["definition", "s", "share of the wall time", "/ this ledger"],
        rows=[
            [
                name,
                f"{of_s:.1f}",
                f"{of_s / wall_s:.1%}",
                f"{of_s / right / wall_s:.2f}",
            ]
            for name, of_s in cases
        ],
    )


def _all_steps_s(work_dir: Path) -> float:
    told = [one for one in events.read(work_dir)[0] if one.kind == "times"]
    return sum((one.data["spent_s"]["step"] for one in told), 0.0)


def _running_s(work_dir: Path) -> float:
    found_s, since_ns = 0.0, None
    for one in events.read(work_dir)[0]:
        if one.kind == "state":
            if since_ns is not None:
                found_s += (one.time_ns - since_ns) / 1e9
            since_ns = one.time_ns if one.text == "running" else None
    return found_s


# ------------------------------------------------------------------- damaged records


def _damaged(found: Ledger, work_dir: Path) -> Table:
    """Show the result of the ledger for damaged records."""
    lines = (work_dir / events.NAME).read_bytes().splitlines(keepends=True)
    rows = []
    for name, damage in _DAMAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder)
            shutil.copytree(work_dir / spans.FOLDER, copy / spans.FOLDER)
            (copy / events.NAME).write_bytes(b"".join(damage(list(lines))))
            try:
                got = ledger(copy)
            except ValueError as error:
                rows.append(
                    [name, "refused", "", "", str(error).replace(folder, "DIR")]
                )
                continue
        new = [text for text in got.problems if text not in found.problems]
        text = "; ".join(new).replace(folder, "DIR") or "none"
        wall_s = got.wall_s - found.wall_s
        own_s = got.buckets["productive"] - found.buckets["productive"]
        rows.append([name, got.source, f"{wall_s:+.2f}", f"{own_s:+.2f}", text])
    return Table(
        title="Damaged records",
        text=(
            "The same run with a damaged events.jsonl: the changes of the wall time "
            "and of the productive time, and the additional messages of the ledger."
        ),
        header=["damage", "source", "wall, s", "productive, s", "messages"],
        rows=rows,
    )


def _jumped(seconds: float, *, has_monotonic: bool) -> Callable[[list[bytes]], Any]:
    """Change the wall clock in the middle of the records."""

    def damage(lines: list[bytes]) -> list[bytes]:
        new = []
        for number, line in enumerate(lines):
            told = json.loads(line)
            if number >= len(lines) // 2:
                told["time_ns"] += round(seconds * 1e9)
            if not has_monotonic:
                del told["monotonic_ns"]
            new.append(json.dumps(told).encode() + b"\n")
        return new

    return damage


def _without(kind: str) -> Callable[[list[bytes]], list[bytes]]:
    """Make the middle event of a kind unreadable."""

    def damage(lines: list[bytes]) -> list[bytes]:
        places = [i for i, line in enumerate(lines) if json.loads(line)["kind"] == kind]
        lines[places[len(places) // 2]] = b'{"time_ns": 1, "ki\x00\xff\n'
        return lines

    return damage


_DAMAGES: dict[str, Callable[[list[bytes]], Any]] = {
    "none": lambda lines: lines,
    "the wall clock is set back by 5 s": _jumped(-5, has_monotonic=True),
    "the wall clock is set forward by 100 s": _jumped(100, has_monotonic=True),
    "set back by 5 s; events in the old format, without a monotonic clock": _jumped(
        -5, has_monotonic=False
    ),
    "set forward by 100 s; events in the old format": _jumped(100, has_monotonic=False),
    "an event of kind state is corrupt": _without("state"),
    "an event of kind times is corrupt": _without("times"),
    "the last 2 lines are missing, the line before is truncated": lambda lines: [
        *lines[:-3],
        lines[-3][:40],
    ],
    "the first 20 lines are missing": lambda lines: lines[20:],
    "all lines occur twice, as if from two journals": lambda lines: lines + lines,
    "there are no events": lambda _: [],
}
