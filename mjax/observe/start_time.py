"""Account for the wall time of a run from the spans of one rank of each start.

Input: the span files of a run. Output: seconds by part, as in `launch_time`, and
problems. The spans of the host cover the time of a start; their times are of the host's
monotonic clock. If two starts ran in the same boot of one host, this clock also
measures the gap between them. Otherwise the wall clocks in the headers measure it. A
killed process has no span for its last moments, so they belong to the gap.

For a launched run, `launch_time` uses the events of the driver. They say more about the
time between starts, but less about steps. So `by_generation` gives `launch_time` the
seconds of each start.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from mjax.observe.launch_time import (
    MOST_UNEXPLAINED,
    UNEXPLAINED,
    Counted,
    Seen,
    kept_steps,
)
from mjax.observe.spans import Span, SpanFile

BETWEEN = "between starts"
_SAVES = "save"
_JUMP_S = 1.0
"""Smallest reported difference between the wall clock and the monotonic clock, as in
`event_clock`."""
_PHASE = {"eval": "eval", "sample": "sample", "exit": "exit"}
"""Names of spans that are also the names of parts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The process that is counted in one start."""

    file: SpanFile
    begin_ns: int
    end_ns: int
    """End of the counted time, by its host's monotonic clock. On a host that the driver
    had lost, the process may have run beyond the beginning of the next start; that time
    is not counted."""
    kept: int
    """The last step whose work was kept."""
    kind: str
    """`start`, or `restart` if it is not the first."""

    def until(self, limit_s: float) -> dict[str, float]:
        """Return the seconds by part, up to `limit_s` seconds after the first span."""
        end_ns = self.end_ns
        if self.begin_ns + limit_s * 1e9 < end_ns:
            end_ns = self.begin_ns + round(limit_s * 1e9)
        return _parts(self.file, self.kept, end_ns, self.kind)

    @property
    def num_lost(self) -> int:
        """Number of steps that a later start repeated."""
        return len({step for step, _ in _host_spans(self.file) if step > self.kept})


def counted(files: Sequence[SpanFile]) -> Counted:
    """Return the wall time of a run by part.

    Args:
      files: span files of all ranks, at least one.
    Raises:
      ValueError: no file has a span of the host.
    """
    found, problems = starts(files)
    if not found:
        raise ValueError(
            f"{files[0].path.parent} has no span of a host; the run ended before its "
            "first step, start it again"
        )
    parts: dict[str, float] = collections.defaultdict(float)
    for before, start in itertools.pairwise([None, *found]):
        assert start is not None
        if before is not None:
            gap_s = _gap_s(before, start, problems)
            parts[BETWEEN if gap_s >= 0 else UNEXPLAINED] += gap_s
        for part, part_s in start.until(math.inf).items():
            parts[part] += part_s
    last = found[-1].file
    if last.lines[-1].end is None:
        problems.append(
            f"{last.path.name} has no last line: the process is running or was killed; "
            "the time after its last span is not counted"
        )
    unexplained_s = parts.get(UNEXPLAINED, 0.0)
    if abs(unexplained_s) > MOST_UNEXPLAINED * sum(parts.values()):
        problems.append(
            f"{unexplained_s:.1f} s are not explained: lines are missing, or the clock "
            "jumped"
        )
    return Counted(
        parts=dict(parts),
        num_starts=len(found),
        num_lost_steps=sum(start.num_lost for start in found),
        problems=tuple(problems),
    )


def starts(files: Sequence[SpanFile]) -> tuple[list[Start], list[str]]:
    """Return the lowest rank's process in each start, oldest first, and problems."""
    chosen, problems = _chosen(files)
    begins = {of.header.generation: _first_step(of) - 1 for of in chosen}
    kept = kept_steps({n: at if at >= 0 else -1 for n, at in begins.items()})
    found = []
    for of, after in itertools.pairwise([*chosen, None]):
        assert of is not None
        begin_ns, end_ns = _own_ns(of)
        if after is not None and _is_one_clock(of, after):
            end_ns = min(end_ns, _own_ns(after)[0])
        found.append(
            Start(
                file=of,
                begin_ns=begin_ns,
                end_ns=end_ns,
                kept=kept[of.header.generation],
                kind="restart" if found else "start",
            )
        )
    return found, problems


def by_generation(files: Sequence[SpanFile]) -> dict[int, Seen]:
    """Return, by generation of the newest launch, the method `until` of its `Start`."""
    found = [one for one in starts(files)[0] if one.file.header.launch is not None]
    names = [one.file.header.launch.name for one in found if one.file.header.launch]
    return {
        one.file.header.launch.generation: one.until
        for one in found
        if one.file.header.launch and one.file.header.launch.name == names[-1]
    }


def _is_one_clock(one: SpanFile, other: SpanFile) -> bool:
    return one.header.boot is not None and one.header.boot == other.header.boot


def _gap_s(before: Start, start: Start, problems: list[str]) -> float:
    """Return the seconds between two starts; negative if their clocks disagree."""
    of = start.file
    gap_s = (
        start.begin_ns + _to_wall_ns(of) - before.end_ns - _to_wall_ns(before.file)
    ) / 1e9
    if _is_one_clock(before.file, of):
        same_s = (start.begin_ns - before.end_ns) / 1e9
        if abs(gap_s - same_s) > _JUMP_S:
            problems.append(
                f"the wall clock of {of.header.host} jumped by {gap_s - same_s:+.1f} s "
                f"before {of.path.name}: its monotonic clock is used"
            )
        gap_s = same_s
    if gap_s < 0:
        problems.append(
            f"{of.path} begins {-gap_s:.1f} s before the end of "
            f"{before.file.path.name}: the clocks of their hosts differ, or jumped"
        )
    return gap_s


def _chosen(files: Sequence[SpanFile]) -> tuple[list[SpanFile], list[str]]:
    """Return the file of the lowest rank of each start, in order, and problems."""
    by_start: dict[int, SpanFile] = {}
    problems = []
    for of in sorted(files, key=lambda of: (of.header.generation, of.header.rank)):
        number = of.header.generation
        if number in by_start or not any(_host_spans(of)):
            continue
        by_start[number] = of
        if of.header.rank:
            problems.append(
                f"start {number} has no spans of rank 0: rank {of.header.rank} is used"
            )
    missing = {of.header.generation for of in files} - set(by_start)
    problems += [
        f"start {number} has no spans of a host: it counts as time between starts"
        for number in sorted(missing)
    ]
    return [by_start[number] for number in sorted(by_start)], problems


def _host_spans(of: SpanFile) -> Iterator[tuple[int, Span]]:
    """Yield the spans of the host, each with its step.

    A host dispatches step n + 1 before it waits for step n (span `device`), and writes
    all spans of a step together. So the file of a killed process may end with step n
    and lack the dispatch of step n + 1, which came before the wait for step n. The gap
    before this wait is yielded as the dispatch of step n + 1.
    """
    lines = [line for line in of.lines if any(s.stream == "host" for s in line.spans)]
    is_cut_off = bool(lines) and of.lines[-1].end is None
    cursor_ns = lines[0].spans[0].start_ns if lines else 0
    for line in lines:
        has_begun = False
        for span in line.spans:
            if span.stream != "host":
                continue
            is_newest = is_cut_off and line is lines[-1] and has_begun
            if is_newest and span.name == "device" and span.start_ns > cursor_ns:
                missing = Span("dispatch", "host", "host", cursor_ns, span.start_ns)
                yield line.step + 1, missing
            yield line.step, span
            has_begun, cursor_ns = True, max(cursor_ns, span.end_ns)


def _first_step(of: SpanFile) -> int:
    """Return the first step that a start ran; 0 if none."""
    return min((step for step, _ in _host_spans(of) if step > 0), default=0)


def _to_wall_ns(of: SpanFile) -> int:
    """Return wall clock minus monotonic clock of the host."""
    return of.header.wall_ns - of.header.monotonic_ns


def _own_ns(of: SpanFile) -> tuple[int, int]:
    """Return the start and the end of the host's spans, by its monotonic clock."""
    spans = [span for _, span in _host_spans(of)]
    return min(span.start_ns for span in spans), max(span.end_ns for span in spans)


def _parts(of: SpanFile, kept: int, end_ns: int, kind: str) -> dict[str, float]:
    """Return the seconds of one start by part.

    Host time that no span covers is `other` before the first step, and unexplained
    after it.

    Args:
      of: spans of the start.
      kept: the last step whose work was kept.
      end_ns: end of the counted time.
      kind: `start`, or `restart` if it is not the first.
    """
    parts: dict[str, float] = collections.defaultdict(float)
    ordered = sorted(_host_spans(of), key=lambda item: item[1].start_ns)
    cursor_ns, has_stepped = ordered[0][1].start_ns, False
    for step, span in ordered:
        gap_ns = max(0, min(span.start_ns, end_ns) - cursor_ns)
        # Before the first step: barriers, and setup of the loop.
        rest = UNEXPLAINED if has_stepped else f"{kind}: other"
        parts[rest] += gap_ns / 1e9
        has_stepped |= step > 0
        own_ns = min(span.end_ns, end_ns) - max(span.start_ns, cursor_ns)
        parts[_part(step, span, kept, kind)] += max(0, own_ns) / 1e9
        cursor_ns = max(cursor_ns, min(span.end_ns, end_ns))
    return dict(parts)


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
