"""`python -m mjax.observe ledger`: how much of its time a run spent on training.

    python -m mjax.observe ledger --work-dir DIR [--json] [--out FILE]

Input: the work dir of a run. Output: its wall time by bucket, and the effective
training time, which is the productive part. There are two sources. The events of a
launch show what its driver did between the starts (`launch_time`). The spans of the
lowest rank describe each start (`start_time`). If both exist, the events are used; the
spans check them and give the duration of steps. Exit codes: 0 done, 2 bad input.

Buckets: `productive` is the time of steps whose work was kept; `lost` is the time of
steps that a later start repeated, and the time until a hang was noticed; `compile` is
compilation; `restart` is all other time for starting and ending processes, including
the first start; `save` is the time that saves block the run; `eval` is the time of
evaluations and samples; `idle` is time without processes. Time that no record explains
is `unexplained` and in no bucket. If it exceeds half a percent of the wall time, it is
reported as a problem.

Source: the effective training time is a figure of MegaScale (arXiv:2402.15627).
Differs: compilation, saves and evaluations do not count as effective.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mjax.cli.flags.standard import ArgumentParser
from mjax.observe import events, launch_time, output, spans, start_time
from mjax.observe.launch_time import UNEXPLAINED, Counted

BUCKETS: tuple[str, ...] = (
    "productive",
    "compile",
    "restart",
    "lost",
    "save",
    "eval",
    "idle",
)
_BUCKET = {
    "productive steps": "productive",
    "lost steps": "lost",
    "hung": "lost",
    "host silent": "lost",
    "start: compile": "compile",
    "restart: compile": "compile",
    "save": "save",
    "eval": "eval",
    "sample": "eval",
    f"driver: {launch_time.GATHERING}": "idle",
    f"driver: {launch_time.ENDED}": "idle",
    launch_time.ALONE: "idle",
    start_time.BETWEEN: "idle",
}
"""Bucket of each part. All other parts belong to starting or ending processes and
count as `restart`."""
_MOST_DIFFERENCE = 0.01
"""Largest accepted difference between events and spans, as a fraction of the wall time.
The events include the time of a killed step, but no span does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """Wall time of a run by part."""

    source: Literal["events", "spans"]
    parts: Mapping[str, float]
    """Seconds of each part; they add up to the wall time."""
    num_starts: int
    num_lost_steps: int
    """Steps that a later start repeated; a step that was lost twice counts twice."""
    problems: tuple[str, ...] = ()
    """Records that were left out or disagree, for people."""
    check: Mapping[str, float] | None = None
    """By bucket: seconds from the spans minus those from the events."""

    @property
    def wall_s(self) -> float:
        """Time from the beginning of the first start to the end of the last one."""
        return sum(self.parts.values(), 0.0)

    @property
    def unexplained_s(self) -> float:
        """Time that no record explains; negative if records contradict each other."""
        return self.parts.get(UNEXPLAINED, 0.0)

    @property
    def buckets(self) -> dict[str, float]:
        """Seconds by bucket; with the unexplained ones they add up to the wall time."""
        found = dict.fromkeys(BUCKETS, 0.0)
        for part, part_s in self.parts.items():
            if part != UNEXPLAINED:
                found[_BUCKET.get(part, "restart")] += part_s
        return found

    @property
    def effective(self) -> float:
        """Productive fraction of the wall time."""
        return self.buckets["productive"] / self.wall_s if self.wall_s > 0 else 0.0


def ledger(work_dir: Path, files: Sequence[spans.SpanFile] | None = None) -> Ledger:
    """Read the records of a run and account for its wall time.

    Args:
      work_dir: work dir of the run.
      files: span files of the lowest rank of each start, if already read.
    Raises:
      ValueError: neither the events nor the spans suffice.
    """
    output.check_folder(work_dir)
    found, problems = events.read(work_dir)
    if files is None:
        files = []
        try:
            files, span_problems = spans.read_run(work_dir)
            problems += span_problems
        except ValueError as error:
            if not found:
                raise
            problems.append(f"no check by spans: {error}")
    why = _why_not_events(found, files)
    if why and not files:
        raise ValueError(
            f"{work_dir}: {why}, and it has no spans; read it again after its end, or "
            "start its driver again if it was killed"
        )
    by_spans = _by_spans(files) if files else None
    if why:
        assert by_spans is not None
        if found or any(of.header.launch is not None for of in files):
            problems.append(f"{why}: the spans are used")
        problems += by_spans.problems
        return dataclasses.replace(by_spans, problems=tuple(problems))
    seen = start_time.by_generation(files)
    by_events = _of("events", launch_time.counted(found, seen))
    if by_spans is not None:
        by_events = _checked(by_events, by_spans)
    problems += by_events.problems
    return dataclasses.replace(by_events, problems=tuple(problems))


def _why_not_events(
    found: Sequence[events.Event], files: Sequence[spans.SpanFile]
) -> str:
    """Return why the events do not cover the whole run; "" if they do."""
    if not any(event.kind == "state" for event in found):
        return f"{events.NAME} has no events of a launch"
    if not launch_time.has_ended(found):
        return "the launch has not ended"
    apart = {of.header.generation for of in files if of.header.launch is None}
    if apart:
        return f"start {min(apart)} was not made by the launch"
    return ""


def _by_spans(files: Sequence[spans.SpanFile]) -> Ledger:
    return _of("spans", start_time.counted(files))


def _of(source: Literal["events", "spans"], counted: Counted) -> Ledger:
    return Ledger(
        source=source,
        parts=counted.parts,
        num_starts=counted.num_starts,
        num_lost_steps=counted.num_lost_steps,
        problems=counted.problems,
    )


def _checked(by_events: Ledger, by_spans: Ledger) -> Ledger:
    """Compare the spans with the events."""
    check = {
        bucket: by_spans.buckets[bucket] - of_events
        for bucket, of_events in by_events.buckets.items()
    }
    problems = [*by_events.problems, *by_spans.problems]
    for bucket in ("productive", "compile", "save", "eval"):
        if abs(check[bucket]) > _MOST_DIFFERENCE * by_events.wall_s:
            of_events_s = by_events.buckets[bucket]
            problems.append(
                f"{bucket}: {of_events_s:.1f} s by the events, but "
                f"{of_events_s + check[bucket]:.1f} s by the spans"
            )
    return dataclasses.replace(by_events, check=check, problems=tuple(problems))


# ------------------------------------------------------------------------------ output


def as_json(found: Ledger) -> dict[str, Any]:
    """Return the object that --json prints."""
    return {
        "format": "mjax-ledger",
        "version": 1,
        "source": found.source,
        "wall_s": found.wall_s,
        "buckets": found.buckets,
        "unexplained_s": found.unexplained_s,
        "effective": found.effective,
        "starts": found.num_starts,
        "lost_steps": found.num_lost_steps,
        "parts": dict(found.parts),
        "check": None if found.check is None else dict(found.check),
        "problems": [*found.problems],
    }


def page(found: Ledger) -> str:
    """Return the tables for people."""
    lines = [
        f"{found.wall_s:.1f} s of wall time by the {found.source}, "
        f"{found.effective:.1%} effective; starts: {found.num_starts}, steps lost: "
        f"{found.num_lost_steps}",
        "",
    ]
    wall_s = found.wall_s or 1.0
    shown = {**found.buckets, UNEXPLAINED: found.unexplained_s}
    rows = [["bucket", "s", "share"]]
    if found.check is not None:
        rows[0].append("spans say")
    for bucket, of_s in shown.items():
        rows.append([bucket, f"{of_s:.2f}", f"{of_s / wall_s:.2%}"])
        if found.check is not None:
            check_s = found.check.get(bucket)
            rows[-1].append("" if check_s is None else f"{check_s:+.2f}")
    lines += [*output.aligned(rows, left=1), ""]
    parts = sorted(found.parts.items(), key=lambda item: -item[1])
    rows = [["part", "s", "bucket"]]
    for part, of_s in parts:
        bucket = UNEXPLAINED if part == UNEXPLAINED else _BUCKET.get(part, "restart")
        if of_s:
            rows.append([part, f"{of_s:.2f}", bucket])
    lines += output.aligned(rows, left=1)
    if found.check is not None:
        lines += [
            "",
            "Spans do not cover the time between starts, so it counts as idle.",
        ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = ArgumentParser(
        prog="python -m mjax.observe ledger",
        description="Show how much of its time a run spent on training.",
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="work dir of the run")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="also write the JSON object to this file")
    args = parser.parse_args(argv)
    try:
        found = ledger(args.work_dir)
        text = json.dumps(as_json(found), indent=1) + "\n"
        if args.out is not None:
            output.write(args.out, text)
    except ValueError as error:
        return output.refuse(error)
    output.warn(found.problems)
    print(text if args.json else page(found), end="")
    return 0
