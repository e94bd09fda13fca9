"""Follow the files of a run: return the data appended since the last poll.

Input: a work dir. Output: shares of headers, lines, rows and events, each once; and on
request the lines of earlier steps, by their offsets in the files. Nothing is written.

If a folder has spans of several runs, only the run that began last is used.
"""

import array
import bisect
import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mjax.observe import gzipped, spans
from mjax.observe.output import printable
from mjax.observe.page.feed import check_header, check_line
from mjax.observe.page.model import Key, Process, Share
from mjax.observe.page.run_files import FILE_BATCHES, Problems, RunFiles, move
from mjax.observe.spans import Line, SpanFile
from mjax.observe.store.batches import Batch, digest
from mjax.observe.stream.tail import (
    RUN_FILES,
    ChangedError,
    Tail,
    discover,
    first_line,
    read_batches,
)

_SHARE_BYTES = 3_000_000
"""Approximate bytes of spans in one share. Viewers wait 0.2 s for it."""
_MOST_PLACES = 4096
"""Maximum number of index entries for a file; beyond it, every second one is
dropped."""
_FIND_S = 1.0
"""Shortest time between two scans of the folder."""
_FIND_SHARE = 10.0
"""The time between scans is also at least this multiple of the time of a scan."""


class Places:
    """Index of a file: offsets of some of its lines, in order."""

    def __init__(self) -> None:
        self._steps = array.array("q")
        """Largest step before each indexed line."""
        self._bytes = array.array("q")
        self._every = 1
        self._count = 0
        self._most = 0

    def add(self, at_byte: int, step: int) -> None:
        """Add the line that begins at a byte, with its step."""
        if self._count % self._every == 0:
            self._steps.append(self._most)
            self._bytes.append(at_byte)
            if len(self._steps) > _MOST_PLACES:
                self._steps, self._bytes = self._steps[::2], self._bytes[::2]
                self._every *= 2
        self._count += 1
        self._most = max(self._most, step)

    def between(self, first: int, last: int) -> tuple[int, int | None]:
        """Return the byte range with all lines of some steps; None means to the end."""
        # A late line of an older step may follow.
        low = max(0, bisect.bisect_left(self._steps, first) - 1)
        high = bisect.bisect_right(self._steps, last + 1)
        start = self._bytes[low] if self._bytes else 0
        return start, self._bytes[high] if high < len(self._bytes) else None


@dataclasses.dataclass(kw_only=True)
class _Followed:
    """A span file."""

    tail: Tail
    process: Process
    places: Places = dataclasses.field(default_factory=Places)
    last_n: int = -1


class FileFeed:
    """A run in a work dir."""

    def __init__(self, work_dir: Path, spans_dir: Path | None = None) -> None:
        """Set the folders; each poll looks for files.

        Args:
          work_dir: work dir of the run.
          spans_dir: folder of its spans; None takes the folder spans in the work dir.
        """
        self._work_dir, self._spans_dir = work_dir, spans_dir
        self._has_begun = False
        """Whether the work dir has been seen; the page may start before it exists."""
        self._followed: dict[Key, _Followed] = {}
        self._known: set[str] = set()
        """Files that are followed, and files that are ignored for good."""
        self._run: str | None = None
        self._others: collections.Counter[str] = collections.Counter()
        self._turns: collections.deque[Key] = collections.deque()
        self._found_at, self._find_s = -1e9, _FIND_S
        self._problems = Problems()
        self._run_files = RunFiles(work_dir, self._problems)

    def poll(self) -> Share:
        """Read a share; see `Feed`."""
        share = Share()
        now = time.monotonic()
        if now - self._found_at >= self._find_s:
            self._find(share)
            self._find_s = max(_FIND_S, _FIND_SHARE * (time.monotonic() - now))
            self._found_at = now
        self._run_files.poll(share)
        left = _SHARE_BYTES
        for _ in range(len(self._turns)):
            key = self._turns[0]
            self._turns.rotate(-1)
            left -= self._read_spans(self._followed[key], share)
            if left <= 0:
                share.is_behind = True
                break
        return share

    def lines(self, process: Process, first: int, last: int) -> Sequence[Line]:
        """Return the lines of some steps, possibly among others; see `Feed`."""
        followed = self._followed[process.key]
        start, end = followed.places.between(first, last)
        end = followed.tail.position if end is None else end
        try:
            with gzipped.opened(followed.tail.path) as file:
                file.seek(start)
                data = file.read(max(0, end - start))
        except (OSError, EOFError) as error:
            raise ValueError(
                f"{followed.tail.path} cannot be read: {error}; check whether it still "
                "exists"
            ) from error
        return list(_whole_lines(data))

    def whole(self, process: Process) -> SpanFile:
        """Return all lines of a process; see `Feed`."""
        lines = self.lines(process, 0, 2**62)
        return SpanFile(
            path=self._followed[process.key].tail.path,
            header=process.header,
            lines=tuple(lines),
            problems=(),
        )

    def config(self) -> Any:
        """Return the contents of config.json."""
        return self._run_files.config()

    def close(self) -> None:
        """Do nothing: no file is held open."""

    # ---------------------------------------------------------------------- new files

    def _find(self, share: Share) -> None:
        """Look for new files."""
        try:
            paths = discover(self._work_dir, None, self._spans_dir)
        except OSError as error:
            self._tell(share, f"{self._work_dir} cannot be read: {error.strerror}")
            return
        is_there = self._work_dir.is_dir()
        if self._has_begun and not is_there:
            self._tell(
                share, f"{self._work_dir} is gone; the page shows the data read before"
            )
            return
        self._has_begun |= is_there
        new: list[tuple[str, Path, spans.Header, bytes]] = []
        for source, path in paths.items():
            if source in self._known or source in RUN_FILES:
                continue
            if (found := self._header(source, path, share)) is not None:
                new.append((source, path, *found))
        if self._run is None and new:
            newest = max(new, key=lambda each: each[2].wall_ns)
            self._run = newest[2].run
        for source, path, header, line in new:
            self._known.add(source)
            self._follow(source, path, header, line, share)
        if self._run is not None and self._others:
            num, names = sum(self._others.values()), ", ".join(sorted(self._others))
            self._tell(
                share,
                f"{num} files of spans are of other runs ({names[:200]}) and are left "
                f"out, because run {self._run} began last; move those files to "
                "another work dir",
            )
            self._others.clear()

    def _header(
        self, source: str, path: Path, share: Share
    ) -> tuple[spans.Header, bytes] | None:
        """Return the header of a file and its line; None if absent or invalid."""
        try:
            line = first_line(path)
            if line is None:
                return None
            header = spans.decode_header(line)
            check_header(header)
            return header, line
        except (OSError, EOFError) as error:
            self._tell(share, f"{path} cannot be read: {error}")
        except ValueError as error:
            self._known.add(source)
            self._tell(share, f"{path} is left out: {error}")
        return None

    def _follow(
        self, source: str, path: Path, header: spans.Header, line: bytes, share: Share
    ) -> None:
        key = Key(header.generation, header.rank)
        if header.run != self._run:
            self._others[header.run] += 1
            return
        if key in self._followed:
            other = self._followed[key].tail.path.name
            self._tell(
                share,
                f"{path} is left out: {other} is also of rank {key.rank} in "
                f"generation {key.generation}; move one of them away",
            )
            return
        tail = Tail(
            path=path,
            source=source,
            kind="spans",
            run=header.run,
            identity=digest(line),
        )
        process = Process(header=header, where=printable(str(path)))
        self._followed[key] = _Followed(tail=tail, process=process)
        self._turns.append(key)
        share.started.append(process)

    # ---------------------------------------------------------------------- new lines

    def _read_spans(self, followed: _Followed, share: Share) -> int:
        """Read the data appended to a span file; return the number of bytes."""
        tail = followed.tail
        if tail.refused:
            return 0
        try:
            if gzipped.size_of(tail.path) == tail.position:
                return 0
            batches = read_batches(tail, FILE_BATCHES)
        except ChangedError:
            tail.refused = "changed"
            self._tell(
                share,
                f"{tail.path} no longer holds the data that was read from it, "
                "although span files only grow; the page shows the data read before; "
                "restart this command",
            )
            return 0
        except (OSError, EOFError) as error:
            self._gone(followed, share, error)
            return 0
        for batch in batches:
            lines = list(self._lines_of(followed, batch, share))
            if lines:
                share.lines.append((followed.process.key, lines))
            move(tail, batch)
        if len(batches) == FILE_BATCHES:
            share.is_behind = True
        return sum(batch.end - batch.start for batch in batches)

    def _gone(self, followed: _Followed, share: Share, error: Exception) -> None:
        """Report a file that cannot be read, unless it has been compressed."""
        tail = followed.tail
        packed = tail.path.with_name(tail.path.name + ".gz")
        if tail.path.suffix == ".jsonl" and packed.exists():
            tail.path, tail.is_checked = packed, False
            return
        self._tell(
            share,
            f"{tail.path} cannot be read: {error}; the page shows the data read before",
        )

    def _lines_of(
        self, followed: _Followed, batch: Batch, share: Share
    ) -> Iterator[Line]:
        """Yield the lines of a batch in order of their numbers; report gaps."""
        if batch.skipped is not None:
            where = f"{followed.tail.path}, line {batch.first_line}"
            self._tell(share, f"{where} is left out: {batch.skipped}")
            return
        at_byte, number = batch.start, batch.first_line - 1
        for text in batch.data.split(b"\n")[:-1]:
            start, number = at_byte, number + 1
            at_byte += len(text) + 1
            if number == 1:
                continue  # the header
            where = f"{followed.tail.path}, line {number}"
            try:
                line = spans.decode_line(text)
                check_line(line)
            except ValueError as error:
                self._tell(share, f"{where} is left out: {error}")
                continue
            if line.n <= followed.last_n:
                self._tell(share, f"{where} is left out: n is {line.n} again")
                continue
            if line.n > followed.last_n + 1:
                self._tell(share, f"{where}: n is {line.n} after {followed.last_n}")
            followed.last_n = line.n
            followed.places.add(start, line.step)
            yield line

    def _tell(self, share: Share, text: str) -> None:
        self._problems.tell(share, text)


def _whole_lines(data: bytes) -> Iterator[Line]:
    """Yield the readable lines; skip the header and incomplete lines."""
    last_n = -1
    for text in data.split(b"\n")[:-1]:
        try:
            line = spans.decode_line(text)
            check_line(line)
        except ValueError:
            continue  # reported by the first read
        if line.n > last_n:
            last_n = line.n
            yield line
