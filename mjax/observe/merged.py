"""Merge some steps of all ranks onto one clock, with error bounds.

Input: the span files of a run, its events, and a range of steps. Output: the spans of
each rank on the clock of the lowest rank, with their error bound; and the events in the
time of these steps.

Each rank gets one clock offset for all its spans, so that they stay in order. It is the
offset at the middle of the steps, and the bound includes the drift to both ends. Ranks
of one host share a clock. The bound is infinite if there are no barriers or they
contradict each other. In these cases the offset comes from the nearest barrier or, if
there are none, from the wall clocks.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from mjax.observe.clocks import Clock, clocks
from mjax.observe.events import Event
from mjax.observe.places import View, device_place
from mjax.observe.spans import Header, Line, Span, SpanFile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """One process, with times on the clock of the lowest rank."""

    header: Header
    error_ns: float
    """Bound of the error of all times in these steps; infinite if unknown."""
    offset_ns: int
    """Offset that was subtracted from the times of the process's own clock."""
    spans: tuple[tuple[int, Span], ...]
    """Spans with their steps, sorted by time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """An event, with its time on the clock of the lowest rank."""

    time_ns: int
    rank: int | None
    """Rank of the event; None: it belongs to the whole run."""
    kind: str
    text: str
    severity: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merged:
    """Some steps of one start of a run."""

    run: str
    generation: int
    ranks: tuple[Rank, ...]
    """Ranks in the order of the view."""
    marks: tuple[Mark, ...]
    problems: tuple[str, ...]

    steps: tuple[int, int]
    """First and last step. Spans of other steps that overlap these in time are
    included.
    """

    @functools.cached_property
    def start_ns(self) -> int:
        """Start of the first span of the steps."""
        return min(span.start_ns for span in self._of_steps)

    @functools.cached_property
    def end_ns(self) -> int:
        """End of the last span of the steps."""
        return max(span.end_ns for span in self._of_steps)

    @property
    def _of_steps(self) -> Iterator[Span]:
        first, last = self.steps
        for rank in self.ranks:
            yield from (span for step, span in rank.spans if first <= step <= last)


def merge(
    files: Sequence[SpanFile],
    events: Sequence[Event],
    *,
    first: int,
    last: int,
    generation: int | None = None,
    view: View = "dp",
    ranks: Collection[int] | None = None,
) -> Merged:
    """Merge some steps of all ranks onto one clock.

    Args:
      files: span files of a run.
      events: events of the same run.
      first: first step.
      last: last step, included.
      generation: start of the run; None takes the newest that ran one of the steps.
      view: axis along which ranks are sorted: ranks that differ only in it are
        neighbours.
      ranks: ranks to show; None shows all. For the other ranks, headers suffice; the
        lowest rank also needs its barriers.
    Raises:
      ValueError: no rank has spans of these steps.
    """
    of_start = _start(files, first, last, generation)
    number = of_start[0].header.generation
    problems: list[str] = []
    lowest = of_start[0].header
    of_rank = _clocks(of_start)
    shown, offsets_ns = [], {}
    for of in of_start:
        if ranks is not None and of.header.rank not in ranks:
            continue
        window = _window(of.lines, first, last)
        if window is None:
            problems.append(f"rank {of.header.rank} has no spans of these steps")
            continue
        clock = of_rank[of.header.rank - lowest.rank]
        offset_ns, error_ns, problem = _offset(of.header, lowest, clock, window)
        problems += [problem] * bool(problem)
        offsets_ns[of.header.rank] = offset_ns
        spans = _moved(of.lines, first, last, window, offset_ns)
        shown.append(
            Rank(header=of.header, error_ns=error_ns, offset_ns=offset_ns, spans=spans)
        )
    problems += _missing(of_start)
    found = Merged(
        run=lowest.run,
        generation=number,
        ranks=tuple(sorted(shown, key=lambda rank: _place(rank.header, view))),
        marks=(),
        problems=tuple(problems),
        steps=(first, last),
    )
    start_ns, end_ns = found.start_ns, found.end_ns
    inside = [
        mark
        for mark in _marks(of_start, events, offsets_ns)
        if start_ns <= mark.time_ns <= end_ns
    ]
    return dataclasses.replace(found, marks=tuple(inside))


def _start(
    files: Sequence[SpanFile], first: int, last: int, generation: int | None
) -> list[SpanFile]:
    """Return the files of the chosen start, sorted by rank."""
    taken = {
        of.header.generation
        for of in files
        for line in of.lines
        if first <= line.step <= last
    }
    if generation is not None:
        taken &= {generation}
    if not taken:
        steps = [line.step for of in files for line in of.lines if line.step > 0]
        there = f"{min(steps)} to {max(steps)}" if steps else "none"
        where = "" if generation is None else f" in start {generation}"
        raise ValueError(
            f"no spans of --steps {first}:{last + 1}{where}; steps with spans: {there}"
        )
    chosen = [of for of in files if of.header.generation == max(taken)]
    return sorted(chosen, key=lambda of: of.header.rank)


def _clocks(files: Sequence[SpanFile]) -> dict[int, Clock]:
    """Return the clocks by rank; the lowest rank is the reference."""
    lowest = files[0].header.rank
    return clocks(
        {
            of.header.rank - lowest: {
                line.barrier: (line.spans[0].start_ns, line.spans[0].end_ns)
                for line in of.lines
                if line.barrier is not None and line.spans
            }
            for of in files
        }
    )


def _window(lines: Sequence[Line], first: int, last: int) -> tuple[int, int] | None:
    """Return the start of the first span of the steps and the end of the last one."""
    spans = [s for line in lines if first <= line.step <= last for s in line.spans]
    if not spans:
        return None
    return min(s.start_ns for s in spans), max(s.end_ns for s in spans)


def _offset(
    header: Header, lowest: Header, clock: Clock, window: tuple[int, int]
) -> tuple[int, float, str]:
    """Return the offset of a rank in ns, its error bound, and a problem or ""."""
    if header.rank == lowest.rank:
        return 0, 0.0, ""
    middle_ns = (window[0] + window[1]) // 2
    found = clock.at(middle_ns)
    # Two machines with the same host name have different boot times.
    if header.host == lowest.host and abs(found.ns) <= found.error_ns < math.inf:
        return 0, 0.0, ""
    if math.isfinite(found.error_ns):
        drift_ns = clock.drift * (window[1] - window[0]) / 2
        # Add half a nanosecond, because the offset is rounded.
        return round(found.ns), found.error_ns + drift_ns + 0.5, ""
    who = f"rank {header.rank} on {header.host}"
    if len(clock.time_ns):
        nearest = int(np.argmin(np.abs(clock.time_ns - middle_ns)))
        bounds = int(clock.least_ns[nearest]), int(clock.most_ns[nearest])
        return (
            sum(bounds) // 2,
            math.inf,
            (
                f"{who}: its clock has jumped, its barriers contradict each other; the "
                "error of its times is not bounded, the nearest barrier places them"
            ),
        )
    own, other = (of.monotonic_ns - of.wall_ns for of in (header, lowest))
    return (
        own - other,
        math.inf,
        (
            f"{who}: it shares no barrier with rank {lowest.rank}; the error of its "
            "times is not bounded, the wall clocks place them"
        ),
    )


def _moved(
    lines: Sequence[Line],
    first: int,
    last: int,
    window: tuple[int, int],
    offset_ns: int,
) -> tuple[tuple[int, Span], ...]:
    """Return the spans of the steps, and the spans of other steps that overlap them.

    Each is a pair of step and span, with times on the clock of the lowest rank.
    """
    found = []
    for line in lines:
        for span in line.spans:
            is_meanwhile = span.end_ns > window[0] and span.start_ns < window[1]
            if first <= line.step <= last or is_meanwhile:
                start_ns, end_ns = span.start_ns - offset_ns, span.end_ns - offset_ns
                moved = span._replace(start_ns=start_ns, end_ns=end_ns)
                found.append((line.step, moved))
    return tuple(sorted(found, key=lambda item: item[1].start_ns))


def _missing(files: Sequence[SpanFile]) -> list[str]:
    """Describe the devices of the mesh that are in no span file."""
    num = math.prod(files[0].header.mesh.values())
    there = {device for of in files for device in of.header.devices}
    absent = [str(device) for device in range(num) if device not in there]
    if not absent:
        return []
    shown = ", ".join(absent[:8]) + (" ..." if len(absent) > 8 else "")
    return [f"{len(absent)} of {num} devices have no file of spans: {shown}"]


def _marks(
    files: Sequence[SpanFile],
    events: Sequence[Event],
    offsets_ns: Mapping[int, int],
) -> Iterator[Mark]:
    """Yield the events, with times on the clock of the lowest rank."""
    for of in files:
        header = of.header
        to_lowest_ns = header.monotonic_ns - header.wall_ns
        to_lowest_ns -= offsets_ns.get(header.rank, 0)
        for line in of.lines:
            if line.event is not None and header.rank in offsets_ns:
                yield Mark(
                    time_ns=line.event.time_ns + to_lowest_ns,
                    rank=header.rank,
                    kind=line.event.kind,
                    text=line.event.text,
                    severity=line.event.severity,
                )
    lowest = files[0].header
    for event in events:
        if event.severity != "debug":
            yield Mark(
                time_ns=event.time_ns - lowest.wall_ns + lowest.monotonic_ns,
                rank=event.rank if event.rank in offsets_ns else None,
                kind=event.kind,
                text=event.text,
                severity=event.severity,
            )


def _place(header: Header, view: View) -> tuple[int, ...]:
    first = min(header.devices, default=0)
    return (*device_place(first, header.mesh, view), header.rank)
