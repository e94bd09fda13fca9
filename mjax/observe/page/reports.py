"""Compute the results of this package's commands for the page.

Input: span files with as many lines as each command needs. Output: the objects that
the commands print with --json, plus `problem`: the reason for no result, or null.

A command that uses all ranks reads a limited number of lines; for a large run, only the
last steps.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mjax.observe import heatmap, ledger, mfu, mfu_run, stuck, whatif
from mjax.observe.events import Event
from mjax.observe.page import timeline
from mjax.observe.page.feed import Feed
from mjax.observe.page.model import Process
from mjax.observe.places import View
from mjax.observe.spans import SpanFile
from mjax.observe.step_times import step_times

MOST_LINES = 200_000
"""Maximum number of lines of all ranks. That many lines take about 10 s of one core, or
are 49 steps of 4,096 ranks."""
MOST_REPLAYED = 3_000_000
"""Maximum product of devices, replays and steps for `whatif`, which replays once for
each device. The replays take a minute of one core."""
_FEWEST_STEPS = 8
"""Minimum number of steps in a replay, including the two that it skips. The mean over
them shows a cause."""
LAST_STEPS = 1000
"""Number of last steps to compare, as in `heatmap`."""
_P99_STEPS = 256
"""Number of steps from which `stuck` computes the usual time."""


def last_steps(
    feed: Feed, processes: Sequence[Process], most: int = LAST_STEPS
) -> tuple[list[SpanFile], int]:
    """Read the last steps of the processes of a start.

    Returns:
      span files with the lines of these steps, and the largest number of steps in them.
    """
    num = max(2, min(most, MOST_LINES // max(1, len(processes))))
    newest = max((of.newest_step for of in processes), default=0)
    first = max(1, newest - num + 1)
    return [trimmed(feed, of, first, newest) for of in processes], num


def trimmed(feed: Feed, process: Process, first: int, last: int) -> SpanFile:
    """Return the file of a process with the lines of some steps, and all barriers."""
    lines = {line.n: line for line in process.barriers}
    for line in feed.lines(process, first, last):
        if first <= line.step <= last or line.end is not None:
            lines[line.n] = line
    return SpanFile(
        path=Path(process.where),
        header=process.header,
        lines=tuple(lines[n] for n in sorted(lines)),
        problems=(),
    )


def stragglers(feed: Feed, processes: Sequence[Process]) -> dict[str, Any]:
    """Report the slow hosts, as `heatmap` does."""

    def answer() -> dict[str, Any]:
        files, num = last_steps(feed, processes)
        times = step_times(files, num)
        found = heatmap.as_json(times, heatmap.report_of(times))
        problems = [*times.problems]
        if len(times.units) < 3:
            problems.append("two processes have no majority: no host is named")
        if not times.has_stamps:
            problems.append(
                "slow GPUs are not visible without stamps, which Hopper and Blackwell "
                "GPUs write by default (--observe.stamps)"
            )
        return {**found, "problems": problems}

    return _told({"outliers": []}, processes, answer)


def stragglers_cost(
    work_dir: Path, feed: Feed, processes: Sequence[Process]
) -> dict[str, Any]:
    """Report the cost of stragglers, as `whatif` does."""

    def answer() -> dict[str, Any]:
        num = sum(len(of.header.devices) for of in processes)
        steps = MOST_REPLAYED // num**2
        if steps < _FEWEST_STEPS:
            raise ValueError(
                f"a replay for each of {num} devices takes too long for the page; "
                "run python -m mjax.observe whatif"
            )
        files, _ = last_steps(feed, processes, min(LAST_STEPS, steps))
        return whatif.answer(work_dir, files=files).to_json()

    return _told({}, processes, answer)


def who_is_missing(
    work_dir: Path, feed: Feed, processes: Sequence[Process]
) -> dict[str, Any]:
    """Report the ranks that block the run, as `stuck` does."""

    def answer() -> dict[str, Any]:
        files = []
        for number, process in enumerate(processes):
            lines = tuple(process.lines)
            if number == 0:  # for the usual time
                last = process.newest_step
                lines = trimmed(feed, process, last - _P99_STEPS + 1, last).lines
            files.append(
                SpanFile(
                    path=Path(process.where),
                    header=process.header,
                    lines=lines,
                    problems=(),
                )
            )
        return stuck.report(work_dir, spans=files).to_json()

    return _told({}, processes, answer)


def where_time_went(
    work_dir: Path, feed: Feed, lowest: Sequence[Process]
) -> dict[str, Any]:
    """Report the wall time of the run by bucket, as `ledger` does.

    Args:
      work_dir: work dir of the run.
      feed: source of the run's data.
      lowest: process of the lowest rank of each start.
    """

    def answer() -> dict[str, Any]:
        files = [feed.whole(process) for process in lowest]
        return ledger.as_json(ledger.ledger(work_dir, files))

    return _told({}, lowest, answer)


def mfu_shape(work_dir: Path, feed: Feed, lowest: Sequence[Process]) -> dict[str, Any]:
    """Report the shape of the MFU, as `mfu` does; see `where_time_went`."""

    def answer() -> dict[str, Any]:
        files = [feed.whole(process) for process in lowest]
        return mfu.make_report(mfu_run.read_series(work_dir, None, files))

    return _told({}, lowest, answer)


def _told(
    nothing: dict[str, Any],
    processes: Sequence[Process],
    answer: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Return an answer, or the reason why there is none."""
    if not processes:
        return {**nothing, "problem": "no spans have been read yet"}
    try:
        return {**answer(), "problem": None}
    except ValueError as error:
        return {**nothing, "problem": str(error)}


def without_lines(process: Process) -> SpanFile:
    """Return the span file of a process with only its barriers."""
    return SpanFile(
        path=Path(process.where),
        header=process.header,
        lines=tuple(process.barriers),
        problems=(),
    )


def on_one_clock(
    work_dir: Path,
    feed: Feed,
    newest: Sequence[Process],
    events: Sequence[Event],
    steps: tuple[int, int],
    order: View,
    ranks: frozenset[int] | None,
) -> dict[str, Any]:
    """Read and merge steps of all ranks, or of the first ones if there are too many.

    Args:
      work_dir: work dir of the run.
      feed: source of the run's data.
      newest: processes of the newest start.
      events: events of the run.
      steps: first and last step.
      order: see `timeline.view`.
      ranks: ranks to show; None shows all.
    """
    first, last = steps
    wanted = newest
    if ranks is not None:
        wanted = [of for of in newest if of.header.rank in ranks]
    most = max(1, timeline.MOST_SPANS // (4 * (last - first + 1)))
    is_cut = len(wanted) > most
    chosen = {of.header.rank for of in wanted[:most]}
    try:
        files = [
            trimmed(feed, of, first, last)
            if of.header.rank in chosen
            else without_lines(of)
            for of in newest
        ]
        found = timeline.view(
            work_dir,
            files,
            events,
            first=first,
            last=last,
            order=order,
            ranks=chosen if is_cut or ranks is not None else None,
        )
    except ValueError as error:
        return timeline.empty(str(error))
    found["cut"] |= is_cut
    return found
