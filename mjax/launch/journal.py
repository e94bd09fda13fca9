"""The journal of a run: every event, and the driver's state, in SQLite.

Input: events and snapshots. Output: `launch/journal.db` in the work dir, from which a
driver can restart after it was killed at any moment, and `events.jsonl` in the work
dir, one object per line, for programs. Each line has its number in the journal, so a
reader notices gaps. It also has the time of the wall clock and of the monotonic clock
of the host, because the wall clock may be set during a run.
"""

import contextlib
import dataclasses
import json
import secrets
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.launch.events import Event
from mjax.launch.failures import LOG_FOLLOWS
from mjax.launch.policy import EXIT_CODES, Cause

VERSION = 1
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


class Journal:
    """The journal of one work dir. One process writes, others may read."""

    def __init__(self, work_dir: Path) -> None:
        """Open the journal; create it if absent.

        Raises:
          ValueError: the file is not a journal, or is of another version of mjax.
          OSError: the journal cannot be created.
        """
        folder = work_dir / "launch"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "journal.db"
        try:
            self._base = sqlite3.connect(self.path, isolation_level=None)
            self._base.execute("pragma journal_mode=wal")
            # A commit survives the death of the process. To survive a crash of the
            # machine, each commit would have to wait for the disk; such a crash ends
            # the run anyway.
            self._base.execute("pragma synchronous=normal")
            self._base.executescript(_TABLES)
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"{self.path} cannot be used ({error}); move it away to begin anew"
            ) from error
        version = self.fact("version")
        if version is None:
            self.set_fact("version", VERSION)
        elif not VERSION - 1 <= version <= VERSION:
            raise ValueError(
                f"{self.path} has version {version}; this mjax writes {VERSION} and "
                f"reads {VERSION - 1}; use the version of mjax that wrote it"
            )
        if self.fact("name") is None:
            self.set_fact("name", secrets.token_hex(8))
        self.name: str = self.fact("name")
        """Name of the launch. Generation numbers continue as long as this journal
        exists."""
        self._lines = (work_dir / "events.jsonl").open("a", encoding="utf-8")

    def fact(self, name: str) -> Any:
        """Return a named JSON value; None if absent."""
        found = self._base.execute("select value from facts where name = ?", (name,))
        row = found.fetchone()
        return None if row is None else json.loads(row[0])

    def set_fact(self, name: str, value: Any) -> None:
        """Set or replace a named JSON value."""
        self._base.execute(
            "insert or replace into facts values (?, ?)", (name, json.dumps(value))
        )

    def record(self, event: Event, generation: int) -> None:
        """Append an event."""
        time_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
        cursor = self._base.execute(
            "insert into events (time_ns, generation, kind, severity, host, rank, text,"
            " data) values (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(time_ns, generation, event.kind, event.severity),
                *(event.host, event.rank, event.text, json.dumps(dict(event.data))),
            ),
        )
        line = {"time_ns": time_ns, "monotonic_ns": monotonic_ns, "source": "driver"}
        line |= {"number": cursor.lastrowid, "generation": generation}
        line |= {"kind": event.kind, "severity": event.severity, "host": event.host}
        line |= {"rank": event.rank, "text": event.text, "data": dict(event.data)}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()

    def close(self) -> None:
        """Close both files."""
        self._base.close()
        self._lines.close()


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
