"""Put some steps of chosen ranks on one clock, for the page to draw.

Input: span files with the lines of these steps, and the recorded pipeline schedule of
the run. Output: rows, spans, arrows and groups. The spans are stored by column: a list
of names, a list of start times, and so on. Times are microseconds since the first span.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from mjax.observe import merged, slots, timeline_rows
from mjax.observe.events import Event
from mjax.observe.merged import Merged
from mjax.observe.page import groups
from mjax.observe.places import View
from mjax.observe.slots import Slots
from mjax.observe.spans import Span, SpanFile

MOST_SPANS = 60_000
"""Maximum number of spans in an answer. From the page's specification: a canvas draws
them in 100 ms."""


def view(
    work_dir: Path,
    files: Sequence[SpanFile],
    events: Sequence[Event],
    *,
    first: int,
    last: int,
    order: View,
    ranks: Collection[int] | None,
) -> dict[str, Any]:
    """Return steps of a run.

    Args:
      work_dir: work dir of the run, with its pipeline schedule and the windows that
        the profiler recorded.
      files: span files of one start; lines of ranks that are not shown may be absent.
      events: events of the run.
      first: first step.
      last: last step, included.
      order: axis along which ranks are sorted: ranks that differ only in it are
        neighbours.
      ranks: ranks to show; None shows all.
    Raises:
      ValueError: none of these ranks has spans of these steps.
    """
    shown = [of for of in files if ranks is None or of.header.rank in ranks]
    if not any(first <= line.step <= last for of in shown for line in of.lines):
        who = "no rank" if ranks is None else "none of these ranks"
        raise ValueError(f"{who} has spans of steps {first} to {last}; choose others")
    found = merged.merge(files, events, first=first, last=last, view=order, ranks=ranks)
    try:
        known = slots.find(work_dir, found)
    except ValueError as error:
        known = Slots(schedule=None, problems=(str(error),))
    return {
        **_columns(found, order, known),
        "groups": groups.all_groups([of.header for of in files]),
        "problems": [*found.problems, *known.problems],
        "first": first,
        "last": last,
        "view": order,
    }


def empty(problem: str) -> dict[str, Any]:
    """Return the answer if there is nothing to draw."""
    columns = {name: [] for name in ("row", "name", "start_us", "end_us", "step")}
    return {
        "rows": [],
        "spans": {**columns, "kind": []},
        "names": [],
        "kinds": [],
        "arrows": [],
        "marks": [],
        "groups": {},
        "problems": [problem],
        "cut": False,
        "first": None,
        "last": None,
    }


def _columns(found: Merged, order: View, known: Slots) -> dict[str, Any]:
    """Store the spans by column; if there are too many, leave out the latest."""
    rows: list[dict[str, Any]] = []
    at: dict[tuple[int, str], int] = {}
    lanes = timeline_rows.lanes(found.ranks, order, known)
    for rank in found.ranks:
        error_ns, header = rank.error_ns, rank.header
        bound_us = None if math.isinf(error_ns) else error_ns / 1e3
        for stream in lanes[header.rank]:
            at[header.rank, stream] = len(rows)
            rows.append(
                {
                    "rank": header.rank,
                    "host": header.host,
                    "stream": stream,
                    "bound_us": bound_us,
                }
            )
    flat = [
        (at[rank.header.rank, span.stream], step, span, id(span))
        for rank in found.ranks
        for step, span in rank.spans
    ]
    for rank, step, span, key in _of_slots(known):
        flat.append((at[rank, span.stream], step, span, key))
    flat.sort(key=lambda each: each[2].start_ns)
    is_cut = len(flat) > MOST_SPANS
    del flat[MOST_SPANS:]
    names, kinds = (
        _numbered(each[2].name for each in flat),
        _numbered(each[2].kind for each in flat),
    )
    zero_ns = found.start_ns
    spans = {
        "row": [row for row, _, _, _ in flat],
        "name": [names[span.name] for _, _, span, _ in flat],
        "start_us": [(span.start_ns - zero_ns) / 1e3 for _, _, span, _ in flat],
        "end_us": [(span.end_ns - zero_ns) / 1e3 for _, _, span, _ in flat],
        "step": [step for _, step, _, _ in flat],
        "kind": [kinds[span.kind] for _, _, span, _ in flat],
    }
    number = {key: at for at, (_, _, _, key) in enumerate(flat)}
    pairs = (
        (number.get(id(arrow.sent)), number.get(id(arrow.received)))
        for arrow in timeline_rows.arrows(known, found.ranks)
    )
    marks = [
        {
            "time_us": (mark.time_ns - zero_ns) / 1e3,
            "rank": mark.rank,
            "kind": mark.kind,
            "severity": mark.severity,
            "text": mark.text,
        }
        for mark in found.marks
    ]
    return {
        "rows": rows,
        "spans": spans,
        "names": [*names],
        "kinds": [*kinds],
        "arrows": [[a, b] for a, b in pairs if a is not None and b is not None],
        "marks": marks,
        "cut": is_cut,
    }


def _of_slots(known: Slots) -> Iterator[tuple[int, int, Span, int]]:
    """Yield rank, step, span and key of each slot and transfer of a pipeline."""
    for bar in known.bars:
        kind = "idle" if bar.work is None else "compute"
        stream = f"device:{bar.device} {bar.slot.direction}"
        span = Span(bar.name, kind, stream, bar.start_ns, bar.end_ns)
        yield bar.rank, bar.step, span, id(bar)
    for sent in known.transfers:
        stream = f"device:{sent.device} {timeline_rows.TRANSFERS}"
        name = f"{sent.role} {sent.direction}"
        span = Span(name, sent.role, stream, sent.start_ns, sent.end_ns)
        yield sent.rank, sent.step, span, id(sent)


def _numbered(words: Any) -> dict[str, int]:
    """Number words in order of arrival."""
    found: dict[str, int] = {}
    for word in words:
        found.setdefault(word, len(found))
    return found
