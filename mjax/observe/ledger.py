"""`python -m mjax.observe ledger`: how much of its time a run has spent on training.

    python -m mjax.observe ledger --work-dir DIR [--json] [--out FILE]

Enters: the work dir of a run. Leaves: its wall time by bucket, and the effective
training time, which is the productive part. There are two sources. The events of a
launch tell what its driver did between the starts (`launch_time`). The spans of the
lowest rank describe each start (`start_time`). Where both exist the events count; the
spans check them, and give the duration of steps. Exit codes: 0 done, 2 bad input.

Buckets: `productive` are steps whose work was kept; `lost` are steps that a later start
repeated, and the time until a hang was noticed; `compile`; `restart` is any other time
for starting and ending processes, including the first start; `save` is the time that
saves block; `eval` includes samples; `idle` is time without processes. Time that no
record explains is `unexplained`, in no bucket. More than half a percent of it is a
problem.

Source: the effective training time is a figure of MegaScale (arXiv:2402.15627).
Differs: compilation, saves and evaluations do not count as effective.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mjax.flags.standard import ArgumentParser
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
"""Bucket of each part; all other parts belong to starting or ending processes."""
_MOST_DIFFERENCE = 0.01
"""Difference of two sources, as part of the wall time. Chosen: the events include the
time of a step that was killed, and no span does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """Where the wall time of a run went."""

    source: Literal["events", "spans"]
    parts: Mapping[str, float]
    """Seconds; they add up to the wall time."""
    num_starts: int
    num_lost_steps: int
    """Steps that a later start repeated; a step that was lost twice counts twice."""
    problems: tuple[str, ...] = ()
    """What was left out or does not fit, for people."""
    check: Mapping[str, float] | None = None
    """By bucket: seconds by the spans, minus those by the events."""

    @property
    def wall_s(self) -> float:
        """From the begin of the first start to the end of the last one."""
        return sum(self.parts.values(), 0.0)

    @property
    def unexplained_s(self) -> float:
        """Time that no record explains; below 0 if records contradict each other."""
        return self.parts.get(UNEXPLAINED, 0.0)

    @property
    def buckets(self) -> dict[str, float]:
        """Seconds; they and the unexplained seconds add up to the wall time."""
        found = dict.fromkeys(BUCKETS, 0.0)
        for part, part_s in self.parts.items():
            if part != UNEXPLAINED:
                found[_BUCKET.get(part, "restart")] += part_s
        return found

    @property
    def effective(self) -> float:
        """Part of the wall time that was productive."""
        return self.buckets["productive"] / self.wall_s if self.wall_s > 0 else 0.0


def ledger(work_dir: Path, files: Sequence[spans.SpanFile] | None = None) -> Ledger:
    """Read where the time of a run went.

    Args:
      work_dir: of the run.
      files: of the spans of the lowest rank of each start, if they have been read.
    Raises:
      ValueError: neither the events nor the spans are enough.
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
            problems.append(f"{why}: the spans count")
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
    """Say why the events do not cover the whole run; "" if they do."""
    if not any(event.kind == "state" for event in found):
        return f"{events.NAME} has no state of a launch"
    if not launch_time.has_ended(found):
        return "its launch has not ended"
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
    """Compare the two sources."""
    check = {
        bucket: by_spans.buckets[bucket] - of_events
        for bucket, of_events in by_events.buckets.items()
    }
    problems = [*by_events.problems, *by_spans.problems]
    for bucket in ("productive", "compile", "save", "eval"):
        if abs(check[bucket]) > _MOST_DIFFERENCE * by_events.wall_s:
            problems.append(
                f"{bucket}: the spans say {check[bucket]:+.1f} s beside the "
                f"{by_events.buckets[bucket]:.1f} s of the events"
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
            "Spans know nothing of the time between starts: it is idle there.",
        ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = ArgumentParser(
        prog="python -m mjax.observe ledger",
        description="How much of its time a run has spent on training.",
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="of the run")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="write the JSON object there too")
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
