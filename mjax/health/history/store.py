"""The history of hosts in one SQLite file.

Input: events. Output: the same events, oldest first. Several processes of one machine
may write at the same time. Recorded events survive a crash of the process or the
machine. A file that is damaged, has another format or comes from a newer mjax is
refused and never written to.

Source: sqlite.org: "Write-Ahead Logging" (readers and one writer at a time; all
processes must be on the same machine, so the file must not lie on a network file
system), "PRAGMA Statements" (synchronous, application_id, quick_check).
"""

import contextlib
import hashlib
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mjax.health.history.events import MAX_TEXT_CHARS, HostEvent, Kind

VERSION = 1
"""Version of the tables. A newer mjax reads tables of the previous version and migrates
them; an older one refuses newer tables."""
MIGRATIONS: dict[int, str] = {}
"""Maps a version to the SQL that migrates it to the next one."""
APPLICATION_ID = 0x6D6A6878
"""Distinguishes the file from other SQLite files, such as a launcher's journal. The
bytes of the value spell "mjhx"."""
BUSY_S = 30.0
"""Time that a writer waits for other writers. Recording an event takes milliseconds,
importing a long run seconds."""
BATCH = 1000
"""Events written in one transaction. Other writers then wait only milliseconds."""
_COLUMNS = "host, kind, time_ns, text, cause, share, started_ns, run, generation"
_TABLES = f"""
create table events (
  number integer primary key,
  identity text not null unique,
  host text not null,
  kind text not null,
  time_ns integer not null,
  text text not null,
  cause text not null,
  share real not null,
  started_ns integer,
  run text not null,
  generation integer not null,
  checksum text not null
);
create index events_by_host on events (host, time_ns);
pragma application_id = {APPLICATION_ID};
"""


class History:
    """A file of events."""

    def __init__(self, path: Path) -> None:
        """Open the file; create it if absent.

        Raises:
          ValueError: the file is damaged, not a history, or of another version; the
            message gives the fix.
          RuntimeError: another process holds it for too long.
        """
        self.path = path
        with self._told():
            if not os.path.exists(path):
                _make(path)
            elif path.stat().st_size == 0:
                raise ValueError(
                    f"{path} is empty, but a history of hosts never is; restore a "
                    "copy, or remove the file to start a new history"
                )
            self._base = _connect(path)
            try:
                self._check()
            except BaseException:
                # The write-ahead log of a damaged file is kept for whoever repairs it.
                self._base.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, True)
                self._base.close()
                raise

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def add(self, events: Iterable[HostEvent]) -> int:
        """Record events, except those that are already recorded.

        Returns:
          number of new events.
        """
        num, batch = 0, list[HostEvent]()
        for event in events:
            batch.append(event)
            if len(batch) == BATCH:
                num += self._write(batch)
                batch = []
        return num + (self._write(batch) if batch else 0)

    def events(self, host: str | None = None) -> list[HostEvent]:
        """Return the events of a host, or of all, oldest first."""
        where, words = ("where host = ?", (host,)) if host is not None else ("", ())
        query = f"select {_COLUMNS}, checksum from events {where}"
        with self._told():
            rows = self._base.execute(f"{query} order by time_ns, number", words)
            found = rows.fetchall()
            if any(checksum != _checksum(row) for *row, checksum in found):
                raise sqlite3.DatabaseError(
                    "an event has changed since it was recorded"
                )
        try:
            return [_event(row) for *row, _ in found]
        except ValueError as error:
            raise ValueError(
                f"{self.path} has an invalid event: {error}; restore a copy, or move "
                "the file away to start a new history"
            ) from error

    def hosts(self) -> list[str]:
        """Return all hosts with an event, by name."""
        with self._told():
            rows = self._base.execute("select distinct host from events order by host")
            return [row[0] for row in rows]

    def _write(self, events: list[HostEvent]) -> int:
        rows = [
            (event.identity, *(row := _row(event)), _checksum(row)) for event in events
        ]
        marks = ", ".join("?" * len(rows[0]))
        with self._told(), _transaction(self._base):
            before = self._base.total_changes
            self._base.executemany(
                f"insert into events (identity, {_COLUMNS}, checksum) values ({marks})"
                " on conflict (identity) do nothing",
                rows,
            )
            return self._base.total_changes - before

    def _check(self) -> None:
        """Raise if the file is not a history, is damaged, or has another version."""
        if _pragma(self._base, "application_id") != APPLICATION_ID:
            raise ValueError(
                f"{self.path} is an SQLite file, but not a history of hosts; "
                "name another"
            )
        version = _pragma(self._base, "user_version")
        if not VERSION - 1 <= version <= VERSION:
            raise ValueError(
                f"{self.path} has version {version}; this mjax writes {VERSION} and "
                f"reads {VERSION - 1}; use the version of mjax that wrote it"
            )
        said = self._base.execute("pragma quick_check(1)").fetchone()[0]
        if said != "ok":
            raise sqlite3.DatabaseError(said)
        if version < VERSION:
            self._migrate(version)

    def _migrate(self, version: int) -> None:
        """Migrate the tables of the previous version to this one."""
        with _transaction(self._base):
            # Another process may have done this in the meantime.
            if _pragma(self._base, "user_version") == version:
                for statement in MIGRATIONS[version].split(";"):
                    self._base.execute(statement)
                self._base.execute(f"pragma user_version = {version + 1}")

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(
            f"{self.path} is damaged ({error}) and was not changed; restore a copy, or "
            "move the file away to start a new history"
        )

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Convert errors of SQLite to messages that name the file and the fix."""
        try:
            yield
        except sqlite3.OperationalError as error:
            # The primary error code; 0 means that Python could not decode a text.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise RuntimeError(
                    f"{self.path} is held by another process for more than "
                    f"{BUSY_S:g} s; try again, or end that process"
                ) from error
            if code == sqlite3.SQLITE_FULL:
                raise RuntimeError(
                    f"{self.path} cannot grow: the disk is full"
                ) from error
            if code:
                raise ValueError(f"{self.path} cannot be used: {error}") from error
            raise self._damaged(error) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error
        except OSError as error:
            raise ValueError(f"{self.path} cannot be used: {error.strerror}") from error


def _row(event: HostEvent) -> tuple[Any, ...]:
    """Return the values of an event in the order of `_COLUMNS`."""
    return (
        *(event.host, event.kind.value, event.time_ns),
        *(event.text[:MAX_TEXT_CHARS], event.cause, event.share),
        *(event.started_ns, event.run, event.generation),
    )


def _checksum(row: Sequence[Any]) -> str:
    """Return a checksum of the values: SQLite checks only the structure of its file."""
    return hashlib.sha256(repr([*row]).encode()).hexdigest()[:16]


def _event(row: Sequence[Any]) -> HostEvent:
    """Return the event of a row; raise ValueError if it is invalid."""
    fields: dict[str, Any] = dict(zip(_COLUMNS.split(", "), row, strict=True))
    fields["kind"] = Kind(fields["kind"])
    return HostEvent(**fields)


def _connect(path: Path) -> sqlite3.Connection:
    # A launch opens the file in one thread and uses it in another.
    base = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    base.execute("pragma synchronous = full")
    return base


def _make(path: Path) -> None:
    """Create an empty history next to its path, and move it there atomically.

    A file at the path is therefore always complete. If two processes do this
    concurrently, the first file stays.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        with contextlib.closing(_connect(new)) as base:
            base.execute("pragma journal_mode = wal")
            base.executescript(_TABLES)
            base.execute(f"pragma user_version = {VERSION}")
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()


@contextlib.contextmanager
def _transaction(base: sqlite3.Connection) -> Iterator[None]:
    base.execute("begin immediate")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            base.execute("rollback")
        raise
    base.execute("commit")


def _pragma(base: sqlite3.Connection, name: str) -> int:
    return base.execute(f"pragma {name}").fetchone()[0]
