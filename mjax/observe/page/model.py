"""The state of a run in memory: processes, rows of metrics, events.

Input: shares of data from a feed. Output: records for the answers. Memory is bounded:
for each process it holds the newest lines, the barriers, and sums by step in grids.
"""

import array
import bisect
import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mjax.observe.events import Event
from mjax.observe.page.grids import Grids
from mjax.observe.page.rows import Rows
from mjax.observe.spans import Header, Line, Span

MOST_EVENTS = 20_000
"""Number of events to keep; the oldest are dropped first. A person cannot filter
more."""
MOST_PROBLEMS = 40
"""Number of problems to show. The first ones show the cause."""
_NEWEST_LINES = 4
"""Number of newest lines to keep of each process. They include its newest step."""


class Key(NamedTuple):
    """Identifies a process of a run."""

    generation: int
    rank: int


@dataclasses.dataclass(kw_only=True)
class Process:
    """A process, with the data read so far."""

    header: Header
    where: str
    """Source of the spans, for people: a path, or a table."""
    newest_step: int = 0
    code: int | None = None
    """Exit code, if the process ended by itself."""
    span: Span | None = None
    """The span that ended last in the newest line with spans: of the host's spans, or
    of all spans if the line has none of the host."""
    lines: collections.deque[Line] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_NEWEST_LINES)
    )
    barriers: list[Line] = dataclasses.field(default_factory=list)
    first_step: int | None = None

    @property
    def key(self) -> Key:
        """The key of the process in its run."""
        return Key(self.header.generation, self.header.rank)

    def wall_ns(self, monotonic_ns: int) -> int:
        """Convert a time of the process's clock to the wall clock of its host."""
        return self.header.wall_ns + monotonic_ns - self.header.monotonic_ns

    @property
    def progress_ns(self) -> int:
        """Wall-clock end of the newest span, or start of the process without spans."""
        if self.span is None:
            return self.header.wall_ns
        return self.wall_ns(self.span.end_ns)


class Told(NamedTuple):
    """An event, with the start of the process that wrote it; None: events.jsonl."""

    generation: int | None
    event: Event


@dataclasses.dataclass(kw_only=True)
class Share:
    """The result of one poll of a feed."""

    started: list[Process] = dataclasses.field(default_factory=list)
    lines: list[tuple[Key, Sequence[Line]]] = dataclasses.field(default_factory=list)
    rows: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    are_rows_new: bool = False
    """Whether the file of rows was rewritten, which voids all earlier rows."""
    events: list[Event] = dataclasses.field(default_factory=list)
    are_events_new: bool = False
    problems: list[str] = dataclasses.field(default_factory=list)
    is_behind: bool = False
    """Whether there is more to read now."""


class Mark(NamedTuple):
    """A mark at a step in the charts of a run."""

    step: int
    kind: str
    """`save`, `eval`, `restart`, `warning`, `error`."""
    text: str


class Model:
    """A run in memory. The caller must hold a lock during each call."""

    def __init__(self) -> None:
        self.processes: dict[Key, Process] = {}
        self.grids = Grids()
        self.rows = Rows()
        self.events: collections.deque[Told] = collections.deque(maxlen=MOST_EVENTS)
        self.num_events = 0
        """Number of events so far; the last one has number num_events - 1."""
        self.problems: list[str] = []
        self.num_problems = 0
        self.version = 0
        """Number of changes so far."""
        self.is_complete = False
        """Whether all data that existed at the start has been read."""
        self._held: list[Told] = []
        self._saves: dict[int, list[Mark]] = {}
        self._ends: dict[int, tuple[array.array, array.array]] = {}
        self._marks: tuple[int, list[Mark]] = (-1, [])
        """The marks, and the version of the data that they show."""

    @property
    def generation(self) -> int:
        """Number of the newest start; 0 if there is none."""
        return max((key.generation for key in self.processes), default=0)

    def newest(self) -> list[Process]:
        """Return the processes of the newest start, by rank."""
        newest = self.generation
        found = [of for key, of in self.processes.items() if key.generation == newest]
        return sorted(found, key=lambda of: of.header.rank)

    def latest(self, rank: int) -> Process | None:
        """Return the newest process of a rank."""
        found = [of for key, of in self.processes.items() if key.rank == rank]
        return max(found, key=lambda of: of.header.generation, default=None)

    def lowest(self) -> list[Process]:
        """Return the process of the lowest rank of each start, oldest first."""
        found: dict[int, Process] = {}
        for key in sorted(self.processes, reverse=True):
            found[key.generation] = self.processes[key]
        return [found[generation] for generation in sorted(found)]

    def take(self, share: Share) -> None:
        """Add a share."""
        for process in share.started:
            self.processes[process.key] = process
        lowest = {of.key for of in self.lowest()} if share.lines else set()
        for key, lines in share.lines:
            self._take_lines(self.processes[key], lines, is_lowest=key in lowest)
        if share.are_rows_new:
            self.rows.clear()
        for row in share.rows:
            self.rows.add(row)
        if share.are_events_new:
            self._held = [told for told in self._held if told.generation is not None]
            kept = [told for told in self.events if told.generation is not None]
            self.events.clear()
            self.events.extend(kept)
        self._held += [Told(None, event) for event in share.events]
        self.num_problems += len(share.problems)
        self.problems = (self.problems + share.problems)[:MOST_PROBLEMS]
        if not share.is_behind:
            self.is_complete = True
            self._tell()
        started = share.started or share.lines or share.rows or share.events
        if started or share.problems or share.are_rows_new or share.are_events_new:
            self.version += 1

    def marks(self) -> list[Mark]:
        """Return the marks of the charts, by step; the caller must not change them."""
        if self._marks[0] != self.version:
            self._marks = self.version, self._find_marks()
        return self._marks[1]

    def _find_marks(self) -> list[Mark]:
        found = [mark for marks in self._saves.values() for mark in marks]
        starts = self.lowest()
        for process in starts[1:]:
            if process.first_step is not None:
                text = f"start {process.header.generation} on {process.header.host}"
                found.append(Mark(process.first_step, "restart", text))
        for step, text in self.rows.nonfinite.items():
            found.append(Mark(step, "error", text))
        for told in self.events:
            event = told.event
            if event.severity in ("warning", "error"):
                step = self._step_at(event.time_ns)
                text = f"{event.kind}: {event.text}"
                found.append(Mark(step, event.severity, text))
        return sorted(found)

    def _tell(self) -> None:
        """Number the new events in order of time."""
        self._held.sort(key=lambda told: told.event.time_ns)
        self.events.extend(self._held)
        self.num_events += len(self._held)
        self._held = []

    def _take_lines(
        self, process: Process, lines: Sequence[Line], *, is_lowest: bool
    ) -> None:
        header = process.header
        for line in lines:
            if line.barrier is not None and line.spans:
                process.barriers.append(line)
            if line.step > 0 and process.first_step is None:
                process.first_step = line.step
            process.newest_step = max(process.newest_step, line.step)
            if line.end is not None:
                process.code = line.end
            if line.event is not None:
                self._held.append(Told(header.generation, _event(line, header)))
            if is_lowest:
                self._note(process, line)
        process.lines.extend(lines)
        for line in reversed(lines):
            if line.spans:
                own = [span for span in line.spans if span.stream == "host"]
                process.span = max(own or line.spans, key=lambda span: span.end_ns)
                break
        self.grids.add(header, lines)

    def _note(self, process: Process, line: Line) -> None:
        """Record the marks of the lowest rank, and the ends of its steps."""
        generation = process.header.generation
        for span in line.spans:
            if span.stream == "host" and span.kind in ("ckpt", "eval"):
                kind = "save" if span.kind == "ckpt" else "eval"
                took_s = (span.end_ns - span.start_ns) / 1e9
                marks = self._saves.setdefault(generation, [])
                step = max(line.step, process.newest_step)
                if marks and marks[-1][:2] == (step, kind):
                    continue
                marks.append(Mark(step, kind, f"{span.name}, {took_s:.2f} s"))
        if line.step > 0 and line.spans:
            times, steps = self._ends.setdefault(
                generation, (array.array("q"), array.array("q"))
            )
            end_ns = process.wall_ns(max(span.end_ns for span in line.spans))
            if not times or end_ns > times[-1]:
                times.append(end_ns)
                steps.append(line.step)

    def _step_at(self, time_ns: int) -> int:
        """Return the step that was running at a wall-clock time."""
        found = 0
        for generation in sorted(self._ends):
            times, steps = self._ends[generation]
            at = bisect.bisect_right(times, time_ns)
            if at:
                found = steps[at - 1] + (1 if at < len(times) else 0)
        return found


def missing(processes: Sequence[Process]) -> list[str]:
    """Describe devices of the mesh that belong to no process."""
    if not processes:
        return []
    num = math.prod(processes[0].header.mesh.values())
    there = {device for of in processes for device in of.header.devices}
    absent = num - len(there)
    if absent < 1:
        return []
    first = []
    for device in range(num):
        if device not in there:
            first.append(str(device))
        if len(first) == 8:
            break
    shown = ", ".join(first) + (" ..." if absent > len(first) else "")
    return [
        f"{absent} of {num} devices have no file of spans: {shown}; their processes "
        "have not started, or write their spans elsewhere"
    ]


def _event(line: Line, header: Header) -> Event:
    """Convert an event of a process to the form of the driver's events."""
    told = line.event
    assert told is not None
    return Event(
        time_ns=told.time_ns,
        kind=told.kind,
        source="process",
        generation=header.generation,
        severity=told.severity,
        host=header.host,
        rank=header.rank,
        text=told.text,
        data=told.data,
    )
