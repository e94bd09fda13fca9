"""Send the growing files of a run to a sink.

Input: a work dir. Output: batches at a sink. The collector keeps no state of its own:
at the start, and with every answer, the sink returns the stored size of each file.
While the sink is unreachable, the data stays in the files.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mjax.observe import gzipped, spans
from mjax.observe.store.batches import MAX_BYTES, Batch, Mark, Outcome, digest
from mjax.observe.stream import logs, quota
from mjax.observe.stream.sinks import Sink
from mjax.observe.stream.tail import (
    ChangedError,
    Tail,
    discover,
    first_line,
    has_whole_lines,
    read_batches,
)
from mjax.observe.stream.wire import MarksAnswer, MarksRequest

_BATCHES = 256
_BYTES = 8 * 10**6
"""Approximate size of one request, in bytes. The request takes half a second of
ingestion."""
_SHARE = 8
"""Maximum number of batches of one file in a request."""
_ASK_S = 5.0
"""Seconds between two requests for the stored size of the files. The same request
reports the backlog that Prometheus shows."""


class Collector:
    """The collector of one work dir on one host."""

    def __init__(
        self,
        work_dir: Path,
        sink: Sink,
        *,
        host: str | None = None,
        spans_dir: Path | None = None,
        run: str | None = None,
        name: str = "",
        say: Callable[[str], None],
    ) -> None:
        """Set what to collect; each round looks for new files.

        Args:
          work_dir: work dir of the run.
          sink: sink for batches.
          host: send only spans of this host; None sends all.
          spans_dir: folder of the spans, if they are not in the work dir.
          run: run of metrics.jsonl and events.jsonl; None takes that of the spans.
          name: name of this collector, under which its backlog is reported.
          say: function that prints a message.
        """
        self._work_dir, self._sink = work_dir, sink
        self._spans_dir = spans_dir
        self._host, self._run, self._name, self._say = host, run, name, say
        self._tails: dict[str, Tail] = {}
        self._unreadable: dict[str, str] = {}
        self._again = 0
        self._asked_at = -_ASK_S

    def round(self) -> int:
        """Send new data; return the number of bytes sent.

        Raises:
          SinkGoneError: the sink does not accept the data; the next round tries again.
        """
        self._find()
        if self._tails and time.monotonic() - self._asked_at > _ASK_S:
            self._ask([*self._tails.values()])
            self._asked_at = time.monotonic()
        sent = 0
        while batches := self._next_batches():
            before = {tail.source: tail.position for tail in self._tails.values()}
            outcomes = self._sink.send(batches, self._again)
            for outcome in outcomes:
                self._settle(outcome)
            moved = [t.position - before[t.source] for t in self._tails.values()]
            sent += sum(step for step in moved if step > 0)
            if not any(moved):
                return sent
        return sent

    def is_done(self) -> bool:
        """Return whether the store has all lines that are complete at this moment."""
        self._find()
        if self._sink.is_queue:
            self._ask([*self._tails.values()])
        return all(
            tail.refused or (tail.committed >= tail.position and not _has_more(tail))
            for tail in self._tails.values()
        )

    def refused(self) -> dict[str, str]:
        """Return the files that cannot be sent, with reasons."""
        found = {t.source: t.refused for t in self._tails.values() if t.refused}
        return self._unreadable | found

    def spool(self) -> list[quota.Spool]:
        """Describe the span files of this host, for the quota."""
        newest: dict[str, int] = {}
        tails = [t for t in self._tails.values() if t.kind == "spans"]
        for tail in tails:
            rank, generation = _place(tail)
            newest[rank] = max(newest.get(rank, 0), generation)
        found = []
        for tail in tails:
            rank, generation = _place(tail)
            is_closed = tail.has_ended or generation < newest[rank]
            try:
                status = tail.path.stat()
                is_stored = not tail.refused and _is_stored(tail)
            except OSError:
                continue
            found.append(
                quota.Spool(
                    path=tail.path,
                    disk_bytes=status.st_size,
                    modified_s=status.st_mtime,
                    is_closed=is_closed,
                    is_stored=is_stored,
                )
            )
        return found

    def logs(self) -> list[quota.Spool]:
        """Describe the logs of this host, for their quota."""
        own = {tail.launched for tail in self._tails.values() if tail.launched}
        return logs.find(self._work_dir, now_s=time.time(), host=self._host, own=own)

    def _find(self) -> None:
        """Look for new files, and forget those that are gone."""
        paths = discover(self._work_dir, self._host, self._spans_dir)
        for source in [source for source in self._tails if source not in paths]:
            tail = self._tails.pop(source)
            self._say(f"{tail.path} is gone; {tail.position} bytes of it were sent")
        new = []
        for source, path in paths.items():
            tail = self._tails.get(source)
            if tail is not None:
                if tail.path != path:  # it has been compressed
                    tail.path, tail.is_checked = path, False
            elif (made := self._tail(source, path, new)) is not None:
                new.append(made)
        if new:
            self._ask(new)
            self._tails |= {tail.source: tail for tail in new}

    def _tail(self, source: str, path: Path, new: Sequence[Tail]) -> Tail | None:
        """Start to follow a file; None if it cannot be sent, or not yet."""
        try:
            line = first_line(path)
        except OSError as error:
            return self._cannot(source, f"{path} cannot be read: {error}")
        if line is None:
            if path.suffix == ".jsonl" and path.stat().st_size > MAX_BYTES:
                return self._cannot(source, f"{path} is not sent: line 1 is too long")
            return None  # it is still being written
        if not source.startswith(f"{spans.FOLDER}/"):
            run = self._run or self._only_run(path, [*self._tails.values(), *new])
            kind = "metrics" if source.startswith("metrics") else "events"
            launched = None
        else:
            kind = "spans"
            try:
                header = spans.decode_header(line)
            except ValueError as error:
                return self._cannot(source, f"{path} is not sent: {error}")
            run, launch = header.run, header.launch
            launched = (launch.generation, header.rank) if launch else None
        if run is None:
            return None
        self._unreadable.pop(source, None)
        return Tail(
            path=path,
            source=source,
            kind=kind,
            run=run,
            identity=digest(line),
            launched=launched,
        )

    def _only_run(self, path: Path, tails: Sequence[Tail]) -> str | None:
        """Return the run of the spans; None if there are none, or several."""
        runs = {tail.run for tail in tails if tail.kind == "spans"}
        if len(runs) == 1:
            return runs.pop()
        return self._cannot(
            path.name,
            f"{path} is not sent: there are spans of {len(runs)} runs "
            f"({', '.join(sorted(runs)) or 'none'}); give its run with --run",
        )

    def _cannot(self, source: str, reason: str) -> None:
        if self._unreadable.get(source) != reason:
            self._unreadable[source] = reason
            self._say(reason)

    def _ask(self, tails: list[Tail]) -> None:
        """Request the stored size of each file, and correct the positions."""
        by_run: dict[str, list[Tail]] = {}
        for tail in tails:
            by_run.setdefault(tail.run, []).append(tail)
        behind = sum(_behind(tail) for tail in self._tails.values())
        for run, group in by_run.items():
            request = MarksRequest(
                run=run,
                sources=[tail.source for tail in group],
                collector=self._name,
                behind_bytes=behind,
            )
            self._adopt(group, self._sink.marks(request))

    def _adopt(self, tails: list[Tail], answer: MarksAnswer) -> None:
        marks = {mark.source: mark for mark in answer.marks}
        for tail in tails:
            mark = marks.get(tail.source)
            reason = answer.refused.get(tail.source, "")
            if reason:
                self._refuse(tail, reason)
            is_same = mark is not None and mark.revision == tail.revision
            tail.committed = mark.at_byte if mark is not None and is_same else 0
            tail.has_ended = mark is not None and mark.exit_code is not None
            is_new = self._tails.get(tail.source) is not tail
            is_lost = answer.pending == 0 and tail.committed < tail.position
            if is_new or (is_lost and not tail.refused):
                if not is_new:
                    self._again = time.time_ns()
                self._settle_mark(tail, mark)

    def _settle_mark(self, tail: Tail, mark: Mark | None) -> None:
        """Move to the position up to which a file is stored."""
        tail.is_checked = False
        if mark is None:
            tail.revision = tail.position = tail.lines = 0
            tail.tail = ""
            return
        tail.revision, tail.position = mark.revision, mark.at_byte
        tail.lines, tail.tail = mark.lines, mark.tail
        tail.committed = mark.at_byte
        if mark.identity != tail.identity:
            self._rewritten(tail)

    def _settle(self, outcome: Outcome) -> None:
        """Continue at the positions that the sink returned."""
        tail = self._tails.get(outcome.source)
        if tail is None or tail.run != outcome.run:
            return
        if outcome.verdict == "refused":
            self._refuse(tail, outcome.reason)
            return
        tail.move(outcome)
        if not self._sink.is_queue:
            tail.committed = tail.position

    def _refuse(self, tail: Tail, reason: str) -> None:
        if tail.refused != reason:
            tail.refused = reason
            self._say(f"{tail.path} is no longer sent: {reason}")

    def _rewritten(self, tail: Tail) -> None:
        """Send a rewritten file again; span files are never rewritten."""
        if tail.kind == "spans":
            self._refuse(
                tail,
                "its content differs from the stored data; move it away, or give its "
                "run another name",
            )
            return
        try:
            line = first_line(tail.path)
        except OSError:
            return
        if line is not None:
            tail.identity = digest(line)
            tail.revision += 1
            tail.position = tail.lines = tail.committed = 0
            tail.tail, tail.is_checked = "", False

    def _next_batches(self) -> list[Batch]:
        """Read a share of each file that has new data."""
        found: list[Batch] = []
        size = 0
        for tail in [*self._tails.values()]:
            if size >= _BYTES or len(found) >= _BATCHES:
                break
            if tail.refused or not _may_have_more(tail):
                continue
            try:
                share = self._read(tail)
                found += share
                size += sum(len(batch.data) for batch in share)
            except (OSError, ChangedError) as error:
                self._cannot(tail.source, f"{tail.path} cannot be read: {error}")
        return found

    def _read(self, tail: Tail) -> list[Batch]:
        """Read a share of a file, from its beginning if it has been rewritten."""
        try:
            return read_batches(tail, _SHARE)
        except ChangedError:
            self._rewritten(tail)
            return [] if tail.refused else read_batches(tail, _SHARE)


def _place(tail: Tail) -> tuple[str, int]:
    """Return HOST-RANK and the generation from the name of a span file."""
    name, _, generation = tail.source.removesuffix(".jsonl").rpartition("-")
    return name, int(generation) if generation.isdigit() else 0


def _may_have_more(tail: Tail) -> bool:
    """Return whether to read a file: it has grown, or may have been rewritten."""
    try:
        if tail.kind != "spans":
            status = tail.path.stat()
            return status.st_size != tail.position or status.st_ino != tail.inode
        return gzipped.size_of(tail.path) != tail.position
    except OSError:
        return False


def _has_more(tail: Tail) -> bool:
    try:
        return _may_have_more(tail) and has_whole_lines(tail)
    except ChangedError:
        return tail.kind != "spans"
    except OSError:
        return False


def _is_stored(tail: Tail) -> bool:
    """Return whether the store has all complete lines of a file."""
    return tail.committed >= tail.position > 0 and not _has_more(tail)


def _behind(tail: Tail) -> int:
    try:
        return max(0, gzipped.size_of(tail.path) - tail.position)
    except OSError:
        return 0
