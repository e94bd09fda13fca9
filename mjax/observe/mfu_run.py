"""Read the MFU series of a run, with marks, from its files.

Input: a work dir. Output: time, duration and rate of each step on one clock, and marks
of saves, evaluations and restarts. Nothing here changes a file.

`metrics.jsonl` has the rate and duration of each step, but not when it ran. The spans
of the lowest rank have the times of steps, saves, evaluations and restarts. Without
spans, a step ends at the sum of the durations so far, and marks come from the fields
`eval_*` and `ckpt_*` of the rows and from `starts/`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mjax import checked_json
from mjax.observe import events, records, spans
from mjax.observe.detect.mfu_series import Array, Mark

type Rows = list[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Happened:
    """An event of the driver or of a process."""

    time_s: float
    kind: str
    severity: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSeries:
    """The series of a run. T steps."""

    step: Array
    """[T], int64: number of the optimizer step."""
    step_end_s: Array
    """[T], float64, ascending: seconds after the first step began."""
    step_s: Array
    """[T], float64: duration of the step."""
    rate: Array
    """[T], float64: MFU, or tokens/s; NaN where unknown."""
    has_mfu: bool
    data_wait_s: Array
    """[T], float64: wait for data, a part of step_s; NaN where unknown."""
    marks: tuple[Mark, ...]
    events: tuple[Happened, ...]
    """Warnings and errors, on the clock of step_end_s; empty without spans."""
    problems: tuple[str, ...]
    """Problems of the files, for people."""
    expected_mfu: float | None
    """MFU of the plan, if there is one."""
    num_hosts: int | None
    """Largest number of hosts of a start; None if no start recorded its hosts."""
    num_devices: int | None
    """Largest number of devices of a start; None if no start recorded its mesh."""
    is_on_cpus: bool
    """Whether the devices of all recorded starts are CPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Start:
    """The spans of one start of a run, on the wall clock of its host, in seconds."""

    steps: dict[int, tuple[float, float]]
    """Start and end of each step, by step."""
    marks: tuple[Mark, ...]


def read_series(
    work_dir: Path,
    plan_path: Path | None = None,
    files: Sequence[spans.SpanFile] | None = None,
) -> RunSeries:
    """Read a run.

    Args:
      work_dir: work dir of the run.
      plan_path: output of `python -m mjax.plan --json`; None takes plan.json of the
        work dir, if present.
      files: span files of the lowest rank of each start, if already read.
    Raises:
      ValueError: there are no rows, or a file cannot be read.
    """
    problems: list[str] = []
    rows = _read_rows(work_dir / "metrics.jsonl", problems)
    step_s = _column(rows, "step_s")
    rate = _column(rows, "mfu")
    has_mfu = bool(np.isfinite(rate).any())
    starts = _read_starts(work_dir, files, problems)
    steps = [row["step"] for row in rows]
    if any(step in start.steps for start in starts for step in steps):
        end_s, marks = _lay_spans(steps, step_s, starts, problems)
        told, more = events.read(work_dir)
        problems += more
    else:
        end_s, marks = _lay_rows(rows, step_s, work_dir)
        told = []
    first_s = float(end_s[0] - np.nan_to_num(step_s[0]))
    marks = sorted(marks, key=lambda mark: mark.start_s)
    meshes = _read_records(work_dir / "starts", "mesh", dict[str, int])
    return RunSeries(
        step=np.array(steps, int),
        step_end_s=end_s - first_s,
        step_s=step_s,
        rate=rate if has_mfu else _column(rows, "tokens_per_s"),
        has_mfu=has_mfu,
        data_wait_s=_column(rows, "data_wait_s"),
        marks=tuple(_shifted(mark, -first_s) for mark in marks),
        events=tuple(
            Happened(
                time_s=event.time_ns / 1e9 - first_s,
                kind=event.kind,
                severity=event.severity,
                text=event.text,
            )
            for event in told
            if event.severity in ("warning", "error")
        ),
        problems=tuple(problems),
        expected_mfu=_read_plan(work_dir, plan_path),
        num_hosts=_read_hosts(work_dir / "starts"),
        num_devices=max(map(_num_devices, meshes), default=None),
        is_on_cpus={*_read_records(work_dir / "starts", "device", str)} == {"cpu"},
    )


def _column(rows: Rows, name: str) -> Array:
    """Return a field of all rows; NaN where it is not a number."""
    return np.array([_number(row.get(name)) for row in rows])


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) else math.nan


def _shifted(mark: Mark, by_s: float) -> Mark:
    return dataclasses.replace(
        mark, start_s=mark.start_s + by_s, end_s=mark.end_s + by_s
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _read_rows(path: Path, problems: list[str]) -> Rows:
    """Read the rows, ascending by step; the last of several rows of a step is used."""
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; name the work dir of a run with --work-dir"
        )
    try:
        found = records.rows_of(path.read_bytes(), problems)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; move it away, or check its "
            "permissions"
        ) from error
    if not found:
        raise ValueError(f"{path} has no rows; the run has not ended its first step")
    return [found[step] for step in sorted(found)]


def _read_starts(
    work_dir: Path, files: Sequence[spans.SpanFile] | None, problems: list[str]
) -> list[_Start]:
    """Read the spans of the lowest rank of each start, oldest first."""
    if files is None:
        files = []
        if spans.paths(work_dir / spans.FOLDER):
            files, found = spans.read_run(work_dir)
            problems += found
    first = {file.header.generation: file for file in reversed(files)}
    return [_read_start(first[generation]) for generation in sorted(first)]


def _read_start(file: spans.SpanFile) -> _Start:
    zero_ns = file.header.wall_ns - file.header.monotonic_ns
    steps: dict[int, tuple[float, float]] = {}
    marks = []
    for line in file.lines:
        for span in line.spans:
            start_s = (span.start_ns + zero_ns) / 1e9
            end_s = (span.end_ns + zero_ns) / 1e9
            if span.stream == "step":
                steps[line.step] = start_s, end_s
            elif span.stream == "host" and span.kind in ("eval", "ckpt"):
                kind = "eval" if span.kind == "eval" else "save"
                marks.append(Mark(kind=kind, start_s=start_s, end_s=end_s))
    return _Start(steps=steps, marks=tuple(marks))


def _lay_spans(
    steps: list[int], step_s: Array, starts: list[_Start], problems: list[str]
) -> tuple[Array, list[Mark]]:
    """Return the ends of steps, and the marks; shift starts so that none overlap."""
    of = {step: i for i, start in enumerate(starts) for step in start.steps}
    shift_s = [0.0] * len(starts)
    ends: list[float] = []
    marks: list[Mark] = []
    last = None
    for step, took_s in zip(steps, np.nan_to_num(step_s), strict=True):
        i = of.get(step)
        if i is None:  # its span is lost
            ends.append(ends[-1] + took_s if ends else 0.0)
            continue
        start_s, end_s = starts[i].steps[step]
        if not ends:
            last = i
        elif last is None:  # the spans of the earlier steps are lost
            lost_s = start_s - ends[-1]
            ends, last = [each + lost_s for each in ends], i
        elif i != last:
            behind_s = ends[-1] - start_s
            if behind_s > 0:
                shift_s[i] = behind_s
                problems.append(
                    f"the start that took step {step} has a clock {behind_s:.1f} s "
                    "behind that of the previous start; its steps are placed after "
                    "those of the previous start"
                )
            restarted_s = start_s + shift_s[i]
            marks.append(Mark(kind="restart", start_s=ends[-1], end_s=restarted_s))
            last = i
        ends.append(max(end_s + shift_s[i], ends[-1] if ends else end_s))
    for start, by_s in zip(starts, shift_s, strict=True):
        marks += [_shifted(mark, by_s) for mark in start.marks]
    return np.array(ends), marks


def _lay_rows(rows: Rows, step_s: Array, work_dir: Path) -> tuple[Array, list[Mark]]:
    """Return the end of each step, and the marks.

    Rows do not record the time between steps, so it counts as 0, apart from saves.
    """
    restarts = _read_restarts(work_dir / "starts")
    marks: list[Mark] = []
    ends: list[float] = []
    now_s = 0.0
    for row, took_s in zip(rows, np.nan_to_num(step_s), strict=True):
        if row["step"] - 1 in restarts and ends:
            marks.append(Mark(kind="restart", start_s=now_s, end_s=now_s))
        copy_s = _number(row.get("ckpt_copy_s"))
        if copy_s > 0:  # before this step
            marks.append(Mark(kind="save", start_s=now_s, end_s=now_s + copy_s))
            now_s += copy_s
        now_s += took_s
        ends.append(now_s)
        if "eval_loss" in row:  # its duration is unknown, and not part of a step
            marks.append(Mark(kind="eval", start_s=now_s, end_s=now_s))
    return np.array(ends), marks


def _read_restarts(folder: Path) -> set[int]:
    """Return the steps from whose state a start of the run began."""
    return {*_read_records(folder, "start_step", int)}


def _read_hosts(folder: Path) -> int | None:
    """Return the largest number of hosts of a start; None without a record."""
    records = _read_records(folder, "processes", list[dict[str, Any]])
    return max(
        (len({one.get("host") for one in each}) for each in records), default=None
    )


def _num_devices(mesh: dict[str, int]) -> int:
    return math.prod(mesh.values())


def _read_records(folder: Path, name: str, kind: Any) -> Iterator[Any]:
    """Yield a field of the record of each start that has it."""
    for path in sorted(folder.glob("*.json")):
        try:
            start = checked_json.read(_read_text(path), dict[str, Any])
            yield checked_json.check(start.get(name), kind, name)
        except ValueError:  # a run writes it at its start, which may be in progress
            continue


def _read_plan(work_dir: Path, plan_path: Path | None) -> float | None:
    """Return the modelled MFU of the plan; None without a plan."""
    path = plan_path or work_dir / "plan.json"
    if plan_path is None and not path.exists():
        return None
    try:
        plan = checked_json.read(_read_text(path), dict[str, Any])
        modelled = checked_json.check(plan.get("modelled"), dict[str, Any], "modelled")
        mfu = checked_json.check(modelled.get("mfu"), float, "modelled.mfu")
        if not 0 < mfu < 1:
            raise ValueError(f"modelled.mfu must be between 0 and 1, got {mfu}")
        return mfu
    except ValueError as error:
        raise ValueError(
            f"{path} is not a plan: {error}; write it with python -m mjax.plan --json"
        ) from error
