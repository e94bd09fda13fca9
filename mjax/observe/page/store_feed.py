"""Follow the spans of a run in a database that collectors fill.

Input: a store that an ingester fills, and the work dir for rows, events and the
config. Output: the same shares as from files. The statements run on both DuckDB and
PostgreSQL; nothing is written.

Spans are read by step, for which the store has an index, and complete steps are not
read again. Barriers are outside of steps and are read once a minute.
"""

import collections
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mjax.observe import spans
from mjax.observe.page.feed import check_header
from mjax.observe.page.model import Key, Process, Share
from mjax.observe.page.run_files import Problems, RunFiles
from mjax.observe.spans import Line, Span, SpanFile
from mjax.observe.store.base import VERSION, Store, StoreGoneError, open_store

_SHARE_LINES = 20_000
"""Approximate number of lines in one share. Reading them takes half a second."""
_HELD_LINES = 250_000
"""Maximum number of lines in memory for one range of steps, over all processes. That
many lines take 500 MB."""
_BARRIERS_S = 60.0
"""Seconds between two reads of barriers, which scan the whole table."""
_MOST_LAG = 1_000
"""Largest lag of a rank in steps; if it lags more, its spans are not read. Not
measured."""
_READ_ONLY = "options=-c%20default_transaction_read_only%3Don"
_LINE = (
    "s.file_id, s.n, s.step, s.barrier, s.name, s.kind, s.stream, s.start_ns, s.end_ns"
)
_OF_START = (
    "from spans s join processes p on p.file_id = s.file_id "
    "where p.run = ? and p.generation = ? and s.step between ? and ?"
)


def open_reader(address: str) -> Store:
    """Open a PostgreSQL database read-only.

    Raises:
      ValueError: the address is invalid, no ingester has made the database, or its
        schema has another version.
      StoreGoneError: it is unreachable.
    """
    if not address.startswith(("postgresql://", "postgres://")):
        raise ValueError(
            f"--store must be postgresql://USER@HOST/NAME, got {address}; a DuckDB "
            "file can only be opened by its ingester: leave --store out to read the "
            "spans from the work dir"
        )
    try:
        found = open_store(address + ("&" if "?" in address else "?") + _READ_ONLY)
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed; pip install 'mjax[observe-scale]'"
        ) from error
    except Exception as error:
        if "ReadOnlySqlTransaction" not in type(error).__name__:
            raise
        raise ValueError(
            f"--store has no schema of version {VERSION}; first start python -m "
            "mjax.observe ingest of this mjax version with this --store"
        ) from error
    return found


@dataclasses.dataclass(kw_only=True)
class _Followed:
    """A process in the database."""

    file_id: int
    process: Process
    last_n: int = -1
    last_barrier: int = -1
    stored: int = 0
    """Number of lines in the store at the last poll."""
    has_ended: bool = False


@dataclasses.dataclass(kw_only=True)
class _Start:
    """A start of the run, and how far it has been read."""

    files: dict[int, _Followed] = dataclasses.field(default_factory=dict)
    position: int = 1
    """Next step to read."""
    stored: int = -1
    """Number of stored lines when the last complete read ended."""


class StoreFeed:
    """A run whose spans are in a database."""

    def __init__(self, work_dir: Path, store: Store, run: str | None = None) -> None:
        """Set the sources.

        Args:
          work_dir: work dir of the run, for rows, events and the config.
          store: database of the spans; closed with this feed.
          run: id of the run; None takes the one that began last.
        """
        self._store, self._run = store, run
        self._problems = Problems()
        self._run_files = RunFiles(work_dir, self._problems)
        self._starts: dict[int, _Start] = {}
        self._barriers_at = -1e9
        self._num_events = 0
        self._events_at: dict[int, int] = {}
        self._held: tuple[Any, dict[int, list[Line]]] = (None, {})

    def poll(self) -> Share:
        """Read a share; see `Feed`."""
        share = Share()
        self._run_files.poll(share)
        try:
            self._find(share)
            self._read_ends(share)
            self._read_events(share)
            self._read_barriers(share)
            for generation in sorted(self._starts):
                if self._read_steps(generation, share):
                    share.is_behind = True
                    break
        except StoreGoneError as error:
            raise OSError(str(error)) from error
        return share

    def lines(self, process: Process, first: int, last: int) -> Sequence[Line]:
        """Return the lines of some steps; see `Feed`.

        If they are not too many, the lines of all processes of the start are read
        together, because a caller that requests one process also requests the others.
        """
        key = process.key
        start = self._starts[key.generation]
        file_id = self._file_id(key)
        files = [*start.files.values()]
        most = min(last, max(of.process.newest_step for of in files))
        if (most - first + 1) * len(files) > _HELD_LINES:
            return self._lines_of(file_id, first, last)
        asked = (key.generation, first, last, self._total(start))
        if self._held[0] != asked:
            rows = self._ask(_OF_START, key.generation, first, last)
            found: dict[int, list[Line]] = collections.defaultdict(list)
            for of, line in _lines(rows):
                found[of].append(line)
            self._held = asked, dict(found)
        return self._held[1].get(file_id, [])

    def whole(self, process: Process) -> SpanFile:
        """Return all lines of a process; see `Feed`."""
        lines = self._lines_of(self._file_id(process.key), -1, 2**31 - 1)
        if process.code is not None:
            lines.append(Line(n=lines[-1].n + 1 if lines else 0, end=process.code))
        return SpanFile(
            path=Path(process.where),
            header=process.header,
            lines=tuple(lines),
            problems=(),
        )

    def config(self) -> Any:
        """Return the contents of config.json."""
        return self._run_files.config()

    def close(self) -> None:
        """Close the database."""
        self._store.close()

    # ------------------------------------------------------------------------- reading

    def _find(self, share: Share) -> None:
        """Look for new processes."""
        if self._run is None:
            rows = self._store.query(
                "select run from processes order by wall_ns desc limit 1"
            )
            if not rows:
                return
            self._run = rows[0][0]
        known = sum(len(start.files) for start in self._starts.values())
        (num,) = self._store.query(
            "select count(*) from processes where run = ?", [self._run]
        )
        if num[0] == known:
            return
        for row in self._store.query(
            "select p.file_id, f.source, p.generation, p.rank, p.host, p.pid, "
            "p.wall_ns, p.monotonic_ns, p.devices, p.mesh from processes p "
            "join files f on f.file_id = p.file_id where p.run = ?",
            [self._run],
        ):
            self._follow(row, share)

    def _follow(self, row: Sequence[Any], share: Share) -> None:
        file_id, source, generation, rank, host, pid, wall_ns, monotonic_ns = row[:8]
        files = self._starts.setdefault(generation, _Start()).files
        if file_id in files:
            return
        header = spans.Header(
            run=self._run or "",
            host=host,
            rank=rank,
            generation=generation,
            pid=pid,
            wall_ns=wall_ns,
            monotonic_ns=monotonic_ns,
            devices=tuple(json.loads(row[8])),
            mesh=json.loads(row[9]),
        )
        try:
            check_header(header)
        except ValueError as error:
            self._problems.tell(share, f"{source} is left out: {error}")
            return
        process = Process(header=header, where=source)
        files[file_id] = _Followed(file_id=file_id, process=process)
        share.started.append(process)

    def _read_steps(self, generation: int, share: Share) -> bool:
        """Read some steps of a start; return whether there may be more now."""
        start = self._starts[generation]
        stored = self._total(start)
        if start.stored == stored:
            return False
        first = start.position
        num = max(1, _SHARE_LINES // len(start.files))
        rows = self._ask(_OF_START, generation, first, first + num - 1)
        found: dict[int, list[Line]] = collections.defaultdict(list)
        for file_id, line in _lines(rows):
            followed = start.files.get(file_id)
            if followed is not None and line.n > followed.last_n:
                followed.last_n = line.n
                found[file_id].append(line)
        for file_id, lines in found.items():
            share.lines.append((start.files[file_id].process.key, lines))
        if rows:
            start.position = first + num
            return True
        following = self._ask_min(generation, first + num)
        if following is not None:
            start.position = following
            return True
        # All is read: continue at the step of the slowest rank, which may get more
        # spans.
        files = start.files.values()
        fastest = max(of.process.newest_step for of in files)
        live = [of.process.newest_step for of in files if not of.has_ended]
        start.position = max(1, min([*live, fastest]), fastest - _MOST_LAG)
        start.stored = stored
        return False

    def _total(self, start: _Start) -> int:
        """Return the number of lines of a start that were stored at the last poll."""
        return sum(of.stored for of in [*start.files.values()])

    def _read_ends(self, share: Share) -> None:
        """Read the stored size of each file, and exit codes."""
        if self._run is None:
            return
        rows = self._store.query(
            "select f.file_id, p.generation, f.last_n, f.exit_code from files f "
            "join processes p on p.file_id = f.file_id where p.run = ?",
            [self._run],
        )
        for file_id, generation, last_n, code in rows:
            start = self._starts.get(generation, _Start())
            followed = start.files.get(file_id)
            if followed is None:
                continue  # it arrived after the search for processes, or is left out
            followed.stored = last_n + 1
            if code is not None and not followed.has_ended:
                followed.has_ended = True
                line = Line(n=last_n, end=code)
                share.lines.append((followed.process.key, [line]))

    def _read_events(self, share: Share) -> None:
        """Read the events in the spans of processes."""
        if self._run is None:
            return
        of_run = "from events where run = ? and source = 'process'"
        (num,) = self._store.query(f"select count(*) {of_run}", [self._run])
        if num[0] == self._num_events:
            return
        self._num_events = num[0]
        by_id = self._by_id()
        for file_id, at_byte, time_ns, kind, severity, text, data in self._store.query(
            f"select file_id, at_byte, time_ns, kind, severity, text, data {of_run} "
            "order by file_id, at_byte",
            [self._run],
        ):
            if file_id in by_id and at_byte > self._events_at.get(file_id, -1):
                self._events_at[file_id] = at_byte
                event = spans.Event(
                    time_ns=time_ns,
                    kind=kind,
                    severity=severity,
                    text=text,
                    data=json.loads(data),
                )
                line = Line(n=by_id[file_id].last_n, event=event)
                share.lines.append((by_id[file_id].process.key, [line]))

    def _read_barriers(self, share: Share) -> None:
        """Read barriers, from which clock offsets are computed."""
        now = time.monotonic()
        if self._run is None or now - self._barriers_at < _BARRIERS_S:
            return
        by_id = self._by_id()
        rows = self._store.query(
            f"select {_LINE} from spans s join processes p on p.file_id = s.file_id "
            "where p.run = ? and s.barrier is not null order by s.file_id, s.n, s.i",
            [self._run],
        )
        for file_id, line in _lines(rows):
            followed = by_id.get(file_id)
            if followed is not None and line.n > followed.last_barrier:
                followed.last_barrier = line.n
                share.lines.append((followed.process.key, [line]))
        self._barriers_at = time.monotonic()

    def _by_id(self) -> dict[int, _Followed]:
        """Return the processes of all starts by their number in the store."""
        found: dict[int, _Followed] = {}
        for start in self._starts.values():
            found |= start.files
        return found

    def _ask(self, condition: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._store.query(
            f"select {_LINE} {condition} order by s.file_id, s.n, s.i",
            [self._run, *values],
        )

    def _ask_min(self, generation: int, first: int) -> int | None:
        """Return the first stored step of a start that is not below `first`."""
        (row,) = self._store.query(
            f"select min(s.step) {_OF_START}",
            [self._run, generation, first, 2**31 - 1],
        )
        return row[0]

    def _lines_of(self, file_id: int, first: int, last: int) -> list[Line]:
        rows = self._store.query(
            f"select {_LINE} from spans s where s.file_id = ? "
            "and s.step between ? and ? order by s.n, s.i",
            [file_id, first, last],
        )
        return [line for _, line in _lines(rows)]

    def _file_id(self, key: Key) -> int:
        files = [*self._starts[key.generation].files.values()]
        return next(of.file_id for of in files if of.process.key == key)


def _lines(rows: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Line]]:
    """Yield (file id, line) for each series of spans that belong to one line."""
    at, step, barrier = None, -1, None
    own: list[Span] = []
    for file_id, n, of_step, of_barrier, *span in rows:
        if (file_id, n) != at:
            if at is not None:
                yield at[0], _line(at[1], step, barrier, own)
            at, step, barrier, own = (file_id, n), of_step, of_barrier, []
        own.append(Span(*span))
    if at is not None:
        yield at[0], _line(at[1], step, barrier, own)


def _line(n: int, step: int, barrier: int | None, own: Sequence[Span]) -> Line:
    return Line(n=n, step=step, barrier=barrier, spans=tuple(own))
