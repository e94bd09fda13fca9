"""`python -m mjax.observe timeline`: show what all ranks did in some steps.

    python -m mjax.observe timeline --work-dir DIR --steps A:B --out FILE.json

Input: the work dir of a run. Output: steps A to B - 1 of all ranks on one clock, as a
trace for https://ui.perfetto.dev or chrome://tracing; with `--out FILE.html` a
self-contained picture of a few steps. In the trace a process is a rank and a thread is
a stream. Exit codes: 0 done, 2 bad input.

Source: Trace Event Format, Google
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU);
names of colours: catapult-project/catapult, tracing/tracing/base/color_scheme.html.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from mjax.cli.flags.standard import ArgumentParser
from mjax.observe import (
    events,
    merged,
    output,
    spans,
    timeline_picture,
    timeline_rows,
)
from mjax.observe.merged import Merged
from mjax.observe.places import View
from mjax.observe.slots import PIPELINE, Bar, Slots, find
from mjax.observe.spans import Span

_COLOURS: dict[spans.Kind, str] = {
    "compute": "thread_state_running",
    "tp": "rail_response",
    "pp": "thread_state_runnable",
    "dp": "thread_state_uninterruptible",
    "optimizer": "olive",
    "data": "rail_idle",
    "host": "generic_work",
    "ckpt": "cq_build_failed",
    "eval": "background_memory_dump",
    "restart": "terrible",
    "idle": "grey",
}
"""Colour names of catapult; Perfetto uses its own."""
_STEPS = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")


def steps(text: str) -> tuple[int, int]:
    """Read `A:B`; return the first and the last step.

    Raises:
      ValueError: the text is not a range, or has no step.
    """
    found = _STEPS.fullmatch(text)
    if found is None or not 1 <= int(found[1]) < int(found[2]):
        raise ValueError(
            f"--steps A:B is steps A to B - 1, so A must be at least 1 and below B, "
            f"got {text}; write --steps 100:103"
        )
    return int(found[1]), int(found[2]) - 1


def trace(found: Merged, view: View, slots: Slots | None = None) -> dict[str, Any]:
    """Return the trace; its time 0 is the start of its first span.

    Args:
      found: merged steps.
      view: order of the ranks.
      slots: slots of a pipeline; None without a pipeline.
    """
    slots = slots or Slots(schedule=None)
    return {
        "traceEvents": [
            *_names(found, view, slots),
            *_spans(found, view, slots),
            *_slots(found, view, slots),
            *_marks(found),
        ],
        "displayTimeUnit": "ms",
        "metadata": {
            "format": "mjax-timeline",
            "version": 1,
            "run": found.run,
            "generation": found.generation,
            "view": view,
            "start_monotonic_ns": _zero_ns(found),
            "clock": f"monotonic clock of rank {_lowest(found)}",
            "ranks": [
                {
                    "rank": rank.header.rank,
                    "host": rank.header.host,
                    "error_ns": None if math.isinf(rank.error_ns) else rank.error_ns,
                }
                for rank in found.ranks
            ],
            "problems": [*found.problems, *slots.problems],
        },
    }


def _zero_ns(found: Merged) -> int:
    return min(span.start_ns for rank in found.ranks for _, span in rank.spans)


def _lowest(found: Merged) -> int:
    return min(rank.header.rank for rank in found.ranks)


def _threads(found: Merged, view: View, slots: Slots) -> dict[tuple[int, str], int]:
    """Number the streams of each rank, with slots and transfers below their device."""
    return {
        (number, name): at
        for number, names in timeline_rows.lanes(found.ranks, view, slots).items()
        for at, name in enumerate(names, start=1)
    }


def _names(found: Merged, view: View, slots: Slots) -> Iterator[dict[str, Any]]:
    """Yield the names and the order of processes and threads."""
    for place, rank in enumerate(found.ranks):
        of = {"ph": "M", "pid": rank.header.rank}
        yield of | {"name": "process_name", "args": {"name": timeline_rows.title(rank)}}
        yield of | {
            "name": "process_labels",
            "args": {"labels": timeline_rows.bound(rank)},
        }
        yield of | {"name": "process_sort_index", "args": {"sort_index": place}}
    for (number, stream), thread in _threads(found, view, slots).items():
        of = {"ph": "M", "pid": number, "tid": thread}
        yield of | {"name": "thread_name", "args": {"name": stream}}
        yield of | {"name": "thread_sort_index", "args": {"sort_index": thread}}


def _spans(found: Merged, view: View, slots: Slots) -> Iterator[dict[str, Any]]:
    threads, zero_ns = _threads(found, view, slots), _zero_ns(found)
    for rank in found.ranks:
        number = rank.header.rank
        for step, span in rank.spans:
            one = _bar(number, threads[number, span.stream], span, zero_ns)
            yield one | ({"args": {"step": step}} if step > 0 else {})


def _bar(rank: int, thread: int, span: Span, zero_ns: int) -> dict[str, Any]:
    """Return the event of a span."""
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "cname": _COLOURS[span.kind],
        "pid": rank,
        "tid": thread,
        "ts": (span.start_ns - zero_ns) / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
    }


def _slots(found: Merged, view: View, slots: Slots) -> Iterator[dict[str, Any]]:
    """Yield slots, transfers, and arrows from each sending slot to its receiver."""
    threads, zero_ns = _threads(found, view, slots), _zero_ns(found)

    def thread(bar: Bar) -> tuple[int, int]:
        return bar.rank, threads[bar.rank, f"device:{bar.device} {bar.slot.direction}"]

    for bar in slots.bars:
        kind = "idle" if bar.work is None else "compute"
        span = Span(bar.name, kind, "", bar.start_ns, bar.end_ns)
        work = {} if bar.work is None else bar.work._asdict()
        args = {"step": bar.step, **bar.slot._asdict(), **work}
        args["measured"] = bar.is_measured
        yield _bar(*thread(bar), span, zero_ns) | {"args": args}
    for sent in slots.transfers:
        name = f"{sent.role} {sent.direction}"
        span = Span(name, sent.role, "", sent.start_ns, sent.end_ns)
        where = threads[sent.rank, f"device:{sent.device} {timeline_rows.TRANSFERS}"]
        args = {"step": sent.step, "tick": sent.tick}
        yield _bar(sent.rank, where, span, zero_ns) | {"args": args}
    for number, arrow in enumerate(timeline_rows.arrows(slots, found.ranks), start=1):
        of = {"cat": PIPELINE, "name": "send", "id": number}
        pid, tid = thread(arrow.sent)
        # An arrow attaches to the slice at its time, so it must start before the slice
        # ends.
        ts = (max(arrow.sent.start_ns, arrow.sent.end_ns - 1) - zero_ns) / 1e3
        yield of | {"ph": "s", "pid": pid, "tid": tid, "ts": ts}
        pid, tid = thread(arrow.received)
        ts = (arrow.received_ns - zero_ns) / 1e3
        yield of | {"ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": ts}


def _marks(found: Merged) -> Iterator[dict[str, Any]]:
    zero_ns = _zero_ns(found)
    for mark in found.marks:
        yield {
            "ph": "i",
            "s": "g" if mark.rank is None else "p",
            "name": mark.kind,
            "cat": mark.severity,
            "pid": _lowest(found) if mark.rank is None else mark.rank,
            "tid": 1,
            "ts": (mark.time_ns - zero_ns) / 1e3,
            "args": {"text": mark.text},
        }


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = ArgumentParser(
        prog="python -m mjax.observe timeline",
        description="Show what all ranks did in some steps, on one clock.",
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="work dir of the run")
    add("--steps", required=True, metavar="A:B", help="show steps A to B - 1")
    add(
        "--out", type=Path, help="FILE.json: a trace for Perfetto; FILE.html: a picture"
    )
    add("--json", action="store_true", help="print the trace")
    add("--generation", type=int, help="start of the run; default: the newest")
    add("--only-slots", action="store_true", help="draw only the slots of a pipeline")
    add("--view", choices=get_args(View.__value__), default="dp", help="order of ranks")
    args = parser.parse_args(argv)
    try:
        found = _read(args.work_dir, args.steps, args.generation, args.view)
        slots = find(args.work_dir, found)
        if args.out is None and not args.json:
            raise ValueError("--out is missing; give --out FILE.json or FILE.html")
        if args.out is not None:
            _write(args.out, found, args.view, slots, only_slots=args.only_slots)
    except ValueError as error:
        return output.refuse(error)
    output.warn([*found.problems, *slots.problems])
    if args.json:
        print(json.dumps(trace(found, args.view, slots)))
        return 0
    num = sum(len(rank.spans) for rank in found.ranks)
    print(f"{args.out}: {num} spans of {len(found.ranks)} ranks")
    for rank in found.ranks:
        print(
            output.printable(
                f"  {timeline_rows.title(rank)}: {timeline_rows.bound(rank)}"
            )
        )
    return 0


def _read(work_dir: Path, text: str, generation: int | None, view: View) -> Merged:
    first, last = steps(text)
    output.check_folder(work_dir)
    files, problems = spans.read_run(work_dir)
    if not files:
        raise ValueError(f"no file of spans can be read: {problems[0]}")
    told, more = events.read(work_dir)
    found = merged.merge(
        files, told, first=first, last=last, generation=generation, view=view
    )
    problems += [*more, *found.problems]
    return dataclasses.replace(found, problems=tuple(problems))


def _write(
    path: Path, found: Merged, view: View, slots: Slots, *, only_slots: bool
) -> None:
    if path.suffix == ".html":
        output.write(
            path, timeline_picture.page(found, view, slots, only_slots=only_slots)
        )
    elif path.suffix == ".json" and only_slots:
        raise ValueError(f"--only-slots is for a picture, --out FILE.html, got {path}")
    elif path.suffix == ".json":
        output.write(path, json.dumps(trace(found, view, slots)) + "\n")
    else:
        raise ValueError(f"--out must end in .json or .html, got {path}")
