"""The journal of a run: every event, and the driver's state, in SQLite.

Input: events and snapshots. Output: `launch/journal.db` in the work dir, from which a
driver can restart after it was killed at any moment; calls that wait until all this is
on disk; and `events.jsonl` in the work
dir, one object per line, for programs. Each line has its number in the journal, so a
reader notices gaps. It also has the time of the wall clock and of the monotonic clock
of the host, because the wall clock may be set during a run.
"""

import collections
import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from mjax.launch.events import Event
from mjax.launch.failures import LOG_FOLLOWS
from mjax.launch.policy import EXIT_CODES, Cause

VERSION = 1
_OPEN_S, _BUSY_S = 60.0, 1.0
"""Seconds to wait for a lock of another process: to open the journal, and for a write,
which is then repeated."""
_RETRY_S, _LOOK_S = 0.5, 2.0
"""Seconds until a failed write is repeated, and between looks whether the files are
still there."""
_FLUSH_S = 10.0
_BATCH, _MOST_ROWS = 1000, 20_000
"""Events of one transaction, and unwritten events that are kept."""
_MOST_BYTES = 16 * 2**20
_PIECE_BYTES = 2**16
_TABLES = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists events (
  number integer primary key,
  time_ns integer not null,
  generation integer not null,
  kind text not null,
  severity text not null,
  host text,
  rank integer,
  text text not null,
  data text not null
);
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended, as its driver recorded it."""

    exit_code: int
    """Exit code of the launch."""
    time_ns: int
    """Time of the end in nanoseconds since the epoch."""
    generation: int
    """Number of the last generation."""
    why: str
    """Reason for the end; "" if the run ended after its last step."""

    def __str__(self) -> str:
        seconds = time.localtime(self.time_ns / 1e9)
        why = f" ({self.why})" if self.why else ""
        return (
            f"the run ended at {time.strftime('%Y-%m-%d %H:%M:%S', seconds)} with exit "
            f"code {self.exit_code}{why}, in generation {self.generation}"
        )


class _Call(NamedTuple):
    """A function that waits for the journal."""

    number: int
    """Number of the write that it waits for."""
    until_s: float
    call: Callable[[], None]


class Journal:
    """The journal of one work dir. One process writes, others may read.

    A thread writes, so the caller waits neither for a lock of another process nor for a
    disk. What cannot be written (a full disk, a file system that is read-only or gone)
    is kept and written later. A file that was deleted or replaced is written again.
    """

    def __init__(self, work_dir: Path) -> None:
        """Open the journal; create it if absent.

        Raises:
          ValueError: the file is not a journal, or is of another version of mjax, or
            another process locks it for too long.
          OSError: the journal cannot be created.
        """
        folder = work_dir / "launch"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "journal.db"
        try:
            self._base = _connect(self.path)
            self._facts: dict[str, str] = dict(
                self._base.execute("select name, value from facts")
            )
            last = self._base.execute("select max(number) from events").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise ValueError(_unusable(self.path, error)) from error
        self._identity = _identity(self.path)
        self._changed = threading.Condition()
        self._rows: collections.deque[tuple[Any, ...]] = collections.deque()
        self._unsaved: dict[str, str] = {}
        self._number = last or 0
        self._asked = self._saved = 0
        self._waiting: collections.deque[_Call] = collections.deque()
        self._is_closing = False
        self.on_saved: Callable[[], None] = lambda: None
        """Called in the thread after a write; see `deliver`."""
        self.on_problem: Callable[[str], None] = lambda problem: None
        """Called in the thread when writing begins to fail, and with "" when it works
        again."""
        version = self.fact("version")
        if version is not None and not VERSION - 1 <= version <= VERSION:
            raise ValueError(
                f"{self.path} has version {version}; this mjax writes {VERSION} and "
                f"reads {VERSION - 1}; use the version of mjax that wrote it"
            )
        self._lines = _Lines(work_dir / "events.jsonl")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if version is None:
            self.set_fact("version", VERSION)
        if self.fact("name") is None:
            self.set_fact("name", secrets.token_hex(8))
        self.name: str = self.fact("name")
        """Name of the launch. Generation numbers continue as long as this journal
        exists."""

    def fact(self, name: str) -> Any:
        """Return a named JSON value; None if absent."""
        value = self._facts.get(name)
        return None if value is None else json.loads(value)

    def set_fact(self, name: str, value: Any) -> None:
        """Set or replace a named JSON value."""
        self._facts[name] = text = json.dumps(value)
        with self._changed:
            self._unsaved[name] = text
            self._note()

    def record(self, event: Event, generation: int) -> None:
        """Append an event. Beyond `_MOST_ROWS` unwritten ones it is lost."""
        row = (
            *(time.time_ns(), time.monotonic_ns(), generation, event.kind),
            *(event.severity, event.host, event.rank, event.text),
            json.dumps(dict(event.data)),
        )
        with self._changed:
            self._number += 1  # also for a lost event, so that readers see the gap
            if len(self._rows) < _MOST_ROWS:
                self._rows.append((self._number, *row))
            self._note()

    def log_events(self, generation: int) -> list[Mapping[str, Any]]:
        """Return the events `log` that earlier drivers recorded, with their age."""
        query = (
            "select time_ns, host, rank, text, data from events "
            "where kind = 'log' and generation = ? order by number"
        )
        return [
            {
                "age_s": (time.time_ns() - time_ns) / 1e9,
                "host": host,
                "rank": rank,
                "text": text,
                "data": json.loads(data),
            }
            for time_ns, host, rank, text, data in self._base.execute(
                query, (generation,)
            )
        ]

    def when_saved(self, call: Callable[[], None], wait_s: float = math.inf) -> None:
        """Call a function when all that was set and recorded so far is on disk.

        It is called at once or from `deliver`, after earlier ones.

        Args:
          call: the function.
          wait_s: seconds after which it is called although the disk fails.
        """
        with self._changed:
            is_saved = self._saved == self._asked and not self._waiting
            if not is_saved:
                until_s = time.monotonic() + wait_s
                self._waiting.append(_Call(self._asked, until_s, call))
        if is_saved:
            call()

    @property
    def holds(self) -> bool:
        """Whether functions of `when_saved` wait."""
        return bool(self._waiting)

    def deliver(self, *, is_last: bool = False) -> None:
        """Call the functions of `when_saved` that are due; at last, all of them."""
        while self._waiting:
            first = self._waiting[0]
            is_over = is_last or time.monotonic() > first.until_s
            if first.number > self._saved and not is_over:
                return
            self._waiting.popleft().call()

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Wait until everything is on disk; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._saved == self._asked, timeout_s)

    def close(self, timeout_s: float = _FLUSH_S) -> bool:
        """Write the rest and close both files; return whether all was written."""
        is_saved = self.flush(timeout_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s if is_saved else _BUSY_S)
        return is_saved

    def _note(self) -> None:
        self._asked += 1
        self._changed.notify_all()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        has_failed = False
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closing or self._saved < self._asked, _LOOK_S
                )
                if self._is_closing:
                    break
                rows = [*itertools.islice(self._rows, _BATCH)]
                facts = {**self._unsaved}
                is_all = len(rows) == len(self._rows)
                asked = self._asked
            try:
                self._restore()
                if rows or facts:
                    self._write(rows, facts)
            except (sqlite3.Error, OSError) as error:
                if not has_failed:
                    has_failed = True
                    self.on_problem(f"{self.path}: {error}")
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closing, _RETRY_S)
                continue
            problem = self._lines.write(rows)
            with self._changed:
                for _ in rows:
                    self._rows.popleft()
                for name, text in facts.items():
                    if self._unsaved[name] == text:
                        del self._unsaved[name]
                if is_all:
                    self._saved = asked
                self._changed.notify_all()
            if bool(problem) != has_failed:
                has_failed = bool(problem)
                self.on_problem(problem)
            self.on_saved()
        self._base.close()
        self._lines.close()

    def _write(self, rows: Sequence[tuple[Any, ...]], facts: Mapping[str, str]) -> None:
        """Write events and facts in one transaction."""
        try:
            self._base.execute("begin immediate")
            self._base.executemany(
                "insert into events (number, time_ns, generation, kind, severity, host,"
                " rank, text, data) values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(number, time_ns, *rest) for number, time_ns, _, *rest in rows],
            )
            self._base.executemany(
                "insert or replace into facts values (?, ?)", [*facts.items()]
            )
            self._base.execute("commit")
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):
                self._base.execute("rollback")
            raise

    def _restore(self) -> None:
        """Write the whole journal again if its file was deleted or replaced."""
        if _identity(self.path) == self._identity:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        new = self.path.with_suffix(".new")
        new.unlink(missing_ok=True)
        try:
            self._base.execute("vacuum into ?", (str(new),))
        except sqlite3.DatabaseError:  # the content is lost, but not the facts
            with contextlib.closing(_connect(new)) as base:
                base.executemany("insert into facts values (?, ?)", self._facts.items())
        for kind in ("journal", "wal", "shm"):  # logs of the database that is gone
            self.path.with_name(f"{self.path.name}-{kind}").unlink(missing_ok=True)
        new.replace(self.path)
        self._base.close()
        self._base = _connect(self.path)
        self._identity = _identity(self.path)


class _Lines:
    """events.jsonl: the events for programs, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        self._file = path.open("a+b", buffering=0)
        self._file.truncate(_num_whole(self._file))

    def write(self, rows: Sequence[tuple[Any, ...]]) -> str:
        """Append events; return the problem if that is not possible now."""
        lines = b"".join(map(_line, rows))
        if len(self._rest) + len(lines) <= _MOST_BYTES:
            self._rest += lines
        try:
            if not self._is_in_place():
                file = self._path.open("a+b", buffering=0)
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    file.close()
                    return f"{self._path} is not a file"
                if not os.fstat(file.fileno()).st_size:  # it was deleted or moved
                    num = os.fstat(self._file.fileno()).st_size
                    self._rest = os.pread(self._file.fileno(), num, 0) + self._rest
                self._file.close()
                self._file = file
            while self._rest:
                self._rest = self._rest[self._file.write(self._rest) or 0 :]
        except OSError as error:
            return f"{self._path}: {error}"
        return ""

    def _is_in_place(self) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._file.fileno()), there)

    def close(self) -> None:
        self._file.close()


def _line(row: Sequence[Any]) -> bytes:
    number, time_ns, monotonic_ns, generation, kind, severity, host, rank, *texts = row
    line = {"time_ns": time_ns, "monotonic_ns": monotonic_ns, "source": "driver"}
    line |= {"number": number, "generation": generation}
    line |= {"kind": kind, "severity": severity, "host": host}
    line |= {"rank": rank, "text": texts[0], "data": json.loads(texts[1])}
    return json.dumps(line).encode() + b"\n"


def _num_whole(file: IO[bytes]) -> int:
    """Return the number of bytes of a file up to its last line end."""
    size = os.fstat(file.fileno()).st_size
    for begin in range((size - 1) // _PIECE_BYTES * _PIECE_BYTES, -1, -_PIECE_BYTES):
        at = os.pread(file.fileno(), _PIECE_BYTES, begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
    return 0


def _connect(path: Path) -> sqlite3.Connection:
    base = sqlite3.connect(
        path, timeout=_OPEN_S, isolation_level=None, check_same_thread=False
    )
    # Not a write-ahead log: SQLite maps its index into memory, so a fault of the disk
    # would kill this process, and it works on no network file system.
    base.execute("pragma journal_mode=truncate")
    base.execute("pragma synchronous=normal")
    base.executescript(_TABLES)
    base.execute(f"pragma busy_timeout={1e3 * _BUSY_S:.0f}")
    return base


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if it is absent."""
    try:
        there = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return there.st_dev, there.st_ino


def _unusable(path: Path, error: sqlite3.DatabaseError) -> str:
    """Return why a journal cannot be opened, and what to do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        fix = f"another process has locked it for {_OPEN_S:g} s; end that process"
    elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        fix = "move it away to begin anew"
    else:
        fix = "free space or restore access to it, then repeat the command"
    return f"{path} cannot be used ({error}); {fix}"


def read_events(work_dir: Path) -> list[Mapping[str, Any]]:
    """Return all events of a run, oldest first; this needs no driver.

    Raises:
      ValueError: there is no journal, or the journal cannot be read.
    """
    names = "time_ns, generation, kind, severity, host, rank, text, data"
    rows = _select(work_dir, f"select {names} from events order by number")
    found = [dict(zip(names.split(", "), row, strict=True)) for row in rows]
    return [event | {"data": json.loads(event["data"])} for event in found]


def read_ending(work_dir: Path) -> Ending | None:
    """Return how a run ended; None if it has not ended, even if it has no driver now.

    Raises:
      ValueError: there is no journal, or the journal cannot be read.
    """
    last = _select(
        work_dir,
        "select number, kind, time_ns, generation, data from events "
        "where kind in ('launch', 'end') order by number desc limit 2",
    )
    if not last or last[0][1] != "end":
        return None
    number, _, time_ns, generation, data = last[0]
    began = last[1][0] if len(last) == 2 else 0
    exit_code = json.loads(data)["code"]
    is_stop = exit_code == EXIT_CODES[Cause.PREEMPTED]
    reasons = _select(
        work_dir,
        "select text from events where kind in (?, ?) and number between ? and ? "
        "order by number desc limit 1",
        (*(("stop", "stop") if is_stop else ("failure", "gave_up")), began, number),
    )
    is_done = exit_code == EXIT_CODES[Cause.DONE] or not reasons
    why = "" if is_done else reasons[0][0].partition(LOG_FOLLOWS)[0]
    return Ending(exit_code=exit_code, time_ns=time_ns, generation=generation, why=why)


def _select(
    work_dir: Path, query: str, values: Sequence[Any] = ()
) -> list[tuple[Any, ...]]:
    path = work_dir / "launch" / "journal.db"
    if not path.exists():
        raise ValueError(f"{work_dir} has no journal; no launch has run there")
    try:
        with contextlib.closing(sqlite3.connect(path)) as base:
            return base.execute(query, values).fetchall()
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
