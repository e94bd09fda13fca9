"""The devices disabled by rules, stored in SQLite to survive restarts.

Input: steps of the life cycle of devices. Output: a file that only one watcher at a
time may use; a second one is refused. A step is recorded before its command runs, so
after a kill at any moment the record shows which command may have run.
"""

import dataclasses
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Step = Literal["disabling", "disabled", "testing", "enabling", "enabled", "kept"]
"""disabling and enabling: the command may have run. kept: only a person can enable the
device. Every step except enabled counts against the limit."""
_VERSION = 1
_KEPT_EVENTS = 10_000
"""Number of events that are remembered, so that reading the same log again does not
repeat them. The file takes a few megabytes."""
_TABLES = """
create table if not exists devices (
  device text primary key, rule text not null, step text not null,
  argvs text not null, due_ns integer not null, tests integer not null,
  max_tests integer not null, test_after_ns integer not null, limit_s real not null
);
create table if not exists events (number integer primary key, mark text unique);
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A device that a rule has disabled."""

    device: str
    """Identifier of the device: names and values of the groups of `Rule.by`."""
    rule: str
    step: Step
    argvs: Mapping[str, list[str]]
    """`action`, `test` and `undo`, filled when the rule fired."""
    due_ns: int
    """Log time of the next test."""
    tests: int = 0
    """Number of failed tests."""
    max_tests: int
    test_after_ns: int
    limit_s: float


class State:
    """Devices and events, in a file or, with no path, in memory."""

    def __init__(self, path: Path | None) -> None:
        """Open the file; create it if absent.

        Raises:
          ValueError: it is not a state file of this version, or cannot be created.
        """
        try:
            self._base = sqlite3.connect(
                ":memory:" if path is None else path, isolation_level=None, timeout=0.1
            )
            self._base.execute("pragma locking_mode = exclusive")
            self._base.execute("begin exclusive")
            self._base.execute("commit")  # the lock stays
            version = self._base.execute("pragma user_version").fetchone()[0]
            tables = self._base.execute("select count(*) from sqlite_master").fetchone()
            if version not in (0, _VERSION) or (version == 0 and tables[0]):
                raise ValueError(
                    f"--state {path} is not a state file of this version (it has "
                    f"{version}, this program writes {_VERSION}); give another file"
                )
            self._base.executescript(_TABLES)
            self._base.execute(f"pragma user_version = {_VERSION}")
        except sqlite3.Error as error:
            hint = "; does another watch run?" if "locked" in str(error) else ""
            raise ValueError(f"--state {path} cannot be used: {error}{hint}") from error

    def is_new(self, mark: str) -> bool:
        """Remember an event; return whether it is new."""
        done = self._base.execute(
            "insert or ignore into events (mark) values (?)", (mark,)
        )
        if done.rowcount:
            self._base.execute(
                "delete from events where number < ?",
                ((done.lastrowid or 0) - _KEPT_EVENTS + 1,),
            )
        return done.rowcount > 0

    def begin(self, device: Device, most: int) -> Device | None:
        """Record that a device is disabled, if the limit allows it.

        Returns:
          None if it was recorded; the existing record if it is already disabled.

        Raises:
          FullError: `most` devices are already disabled.
        """
        known = self.get(device.device)
        if known is not None and known.step != "enabled":
            return known
        if len(self.out_of_use()) >= most:
            raise FullError
        self.put(device)
        return None

    def put(self, device: Device) -> None:
        """Replace the record of a device."""
        row = dataclasses.asdict(device) | {"argvs": json.dumps(dict(device.argvs))}
        names = ", ".join(row)
        marks = ", ".join("?" * len(row))
        self._base.execute(
            f"insert or replace into devices ({names}) values ({marks})",
            [*row.values()],
        )

    def get(self, device: str) -> Device | None:
        """Return the record of a device."""
        found = [one for one in self.all() if one.device == device]
        return found[0] if found else None

    def all(self) -> list[Device]:
        """Return all records, ordered by name."""
        names = [field.name for field in dataclasses.fields(Device)]
        rows = self._base.execute(
            f"select {', '.join(names)} from devices order by device"
        )
        made = [dict(zip(names, row, strict=True)) for row in rows]
        return [Device(**one | {"argvs": json.loads(one["argvs"])}) for one in made]

    def out_of_use(self) -> list[Device]:
        """Return the devices that count against the limit."""
        return [one for one in self.all() if one.step != "enabled"]

    def close(self) -> None:
        """Close the file."""
        self._base.close()


class FullError(Exception):
    """The limit of disabled devices is reached."""
