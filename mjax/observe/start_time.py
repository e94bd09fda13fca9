"""Where the wall time of a run went, from the spans of one rank of each start.

Enters: the files of spans of a run. Leaves: seconds by part, as in `launch_time`, and
what is wrong. In a start the spans of the host tile the time, by its monotonic clock;
the headers put the starts on the wall clock, so a gap between two starts is what the
wall clocks say. A process that was killed has no span of its last moments: they are a
part of that gap.
"""

import collections
from collections.abc import Iterator, Sequence

from mjax.observe.launch_time import kept_steps
from mjax.observe.spans import Span, SpanFile

BETWEEN = "between starts"
_SAVES = "save"
_PHASE = {"eval": "eval", "sample": "sample", "exit": "exit"}
"""Spans whose name is the part."""


def seconds(files: Sequence[SpanFile]) -> tuple[dict[str, float], list[str]]:
    """Return the seconds of a run by part, and what is wrong.

    Args:
      files: of all ranks, at least one.
    Raises:
      ValueError: no file has a span of the host.
    """
    parts: dict[str, float] = collections.defaultdict(float)
    starts, problems = _starts(files)
    if not starts:
        raise ValueError(
            f"{files[0].path.parent} has no span of a host; the run ended before its "
            "first step, start it again"
        )
    begins = {of.header.generation: _first_step(of) - 1 for of in starts}
    kept = kept_steps({n: at if at >= 0 else -1 for n, at in begins.items()})
    before: SpanFile | None = None
    for of in starts:
        if before is not None:
            gap_s = (_wall_ns(of)[0] - _wall_ns(before)[1]) / 1e9
            if gap_s < 0:
                problems.append(
                    f"{of.path} begins {-gap_s:.1f} s before the end of "
                    f"{before.path.name}: the clocks of their hosts differ, or jumped"
                )
            parts[BETWEEN if gap_s >= 0 else "unexplained"] += gap_s
        _add_start(of, kept[of.header.generation], parts, is_first=before is None)
        before = of
    if before is not None and before.lines[-1].end is None:
        problems.append(
            f"{before.path} has no last line: the process runs, or was killed; the "
            "time after its last span is not counted"
        )
    return dict(parts), problems


def _starts(files: Sequence[SpanFile]) -> tuple[list[SpanFile], list[str]]:
    """Return the file of the lowest rank of each start, in order."""
    by_start: dict[int, SpanFile] = {}
    problems = []
    for of in sorted(files, key=lambda of: (of.header.generation, of.header.rank)):
        number = of.header.generation
        if number in by_start or not any(_host_spans(of)):
            continue
        by_start[number] = of
        if of.header.rank:
            problems.append(
                f"start {number} has no spans of rank 0: rank {of.header.rank} counts"
            )
    missing = {of.header.generation for of in files} - set(by_start)
    problems += [
        f"start {number} has no spans of a host: it counts as time between starts"
        for number in sorted(missing)
    ]
    return [by_start[number] for number in sorted(by_start)], problems


def _host_spans(of: SpanFile) -> Iterator[tuple[int, Span]]:
    """Yield what the host did, with the step that it was for."""
    for line in of.lines:
        for span in line.spans:
            if span.stream == "host":
                yield line.step, span


def _first_step(of: SpanFile) -> int:
    """Return the first step that a start took; 0 if none."""
    return min((step for step, _ in _host_spans(of) if step > 0), default=0)


def _wall_ns(of: SpanFile) -> tuple[int, int]:
    """Return when the host began and ended, by its wall clock."""
    spans = [span for _, span in _host_spans(of)]
    to_wall_ns = of.header.wall_ns - of.header.monotonic_ns
    return (
        min(span.start_ns for span in spans) + to_wall_ns,
        max(span.end_ns for span in spans) + to_wall_ns,
    )


def _add_start(
    of: SpanFile, kept: int, parts: dict[str, float], *, is_first: bool
) -> None:
    """Add the seconds of one start; what the host spent in no span is told apart."""
    kind = "start" if is_first else "restart"
    ordered = sorted(_host_spans(of), key=lambda item: item[1].start_ns)
    cursor_ns, has_stepped = ordered[0][1].start_ns, False
    for step, span in ordered:
        gap_ns = max(0, span.start_ns - cursor_ns)
        # Before the first step: barriers, and the loop is made.
        rest = "unexplained" if has_stepped else f"{kind}: other"
        parts[rest] += gap_ns / 1e9
        has_stepped |= step > 0
        own_ns = max(0, span.end_ns - max(span.start_ns, cursor_ns))
        parts[_part(step, span, kept, kind)] += own_ns / 1e9
        cursor_ns = max(cursor_ns, span.end_ns)


def _part(step: int, span: Span, kept: int, kind: str) -> str:
    if span.kind == "restart":
        return f"{kind}: {span.name}"
    if span.kind == "ckpt":
        return _SAVES
    if span.name in _PHASE:
        return _PHASE[span.name]
    if step < 1:
        return f"{kind}: other"
    return "lost steps" if step > kept else "productive steps"
