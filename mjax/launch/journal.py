"""The journal of a run: every event, and the driver's state, in SQLite.

Enters: events and snapshots. Leaves: `launch/journal.db` in the work dir, from which a
driver can restart after it was killed at any moment, and `events.jsonl` beside it, one
object a line, for programs. A line has its number in the journal, so that a reader sees
gaps. It has the time by both clocks of the host, because the wall clock may be set
during a run.
"""

import contextlib
import json
import secrets
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mjax.launch.events import Event

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


class Journal:
    """The journal of one work dir. One process writes, others may read."""

    def __init__(self, work_dir: Path) -> None:
        """Open the journal; create it if absent.

        Raises:
          ValueError: it is of another version of mjax, or not a journal.
          OSError: it cannot be created.
        """
        folder = work_dir / "launch"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "journal.db"
        try:
            self._base = sqlite3.connect(self.path, isolation_level=None)
            self._base.execute("pragma journal_mode=wal")
            # A commit survives the death of the process. It need not survive that of
            # the machine, which ends the run: each commit would wait for the disk.
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
        """Name of the launch. Generations are counted on as long as this journal
        exists."""
        self._lines = (work_dir / "events.jsonl").open("a", encoding="utf-8")

    def fact(self, name: str) -> Any:
        """Return a fact; None if absent."""
        found = self._base.execute("select value from facts where name = ?", (name,))
        row = found.fetchone()
        return None if row is None else json.loads(row[0])

    def set_fact(self, name: str, value: Any) -> None:
        """Replace a fact with a JSON value."""
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
    """Return all events of a run, oldest first, whether or not its driver runs.

    Raises:
      ValueError: there is no journal, or it cannot be read.
    """
    path = work_dir / "launch" / "journal.db"
    if not path.exists():
        raise ValueError(f"{work_dir} has no journal; no launch has run there")
    names = "time_ns, generation, kind, severity, host, rank, text, data"
    try:
        with contextlib.closing(sqlite3.connect(path)) as base:
            rows = base.execute(f"select {names} from events order by number")
            found = [dict(zip(names.split(", "), row, strict=True)) for row in rows]
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return [event | {"data": json.loads(event["data"])} for event in found]
