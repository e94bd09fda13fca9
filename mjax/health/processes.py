"""The processes of a host and their current CPU use.

Input: /proc/PID/stat and the owner of each process, read twice. Output: one line per
process. `ps` is not used: it averages over the lifetime of a process, so a daemon that
was idle for weeks and busy for the last hour looks idle. This process, its children and
its ancestors are excluded. If an ancestor is a Python process, such as the agent of a
launch, all its descendants are excluded too.

Source of the format: proc_pid_stat(5),
https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
"""

import contextlib
import dataclasses
import os
import pwd
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from mjax.health.sources import Reading, whole

INTERVAL_S = 1.0
"""Seconds between the two readings. A clock tick is 10 ms, so 1% is visible."""
HEADER = "pid\tuser\tstate\tpercent\trss_mib\tcommand"
# Fields of /proc/PID/stat after the name, which may have spaces and parentheses.
_STAT = re.compile(r"^([0-9]+) \((.*)\) (\S) (.*)$", re.DOTALL)
_PPID, _UTIME, _STIME, _STARTTIME, _RSS = 0, 10, 11, 18, 20


@dataclasses.dataclass(frozen=True)
class _Process:
    """A process at one moment."""

    command: str
    state: str
    parent: int
    ticks: int
    """Processor time in clock ticks."""
    start: int
    """Time of the start in clock ticks since boot."""
    rss_pages: int
    user: str


@dataclasses.dataclass(frozen=True)
class Processes:
    """All processes except our own, as lines of `HEADER`, separated by tabs."""

    interval_s: float = INTERVAL_S

    @property
    def shown(self) -> str:
        """Name of the source, for a person."""
        return "/proc/*/stat"

    def read(self, limit_s: float) -> Reading:
        """Read all processes twice, and compare."""
        if limit_s < self.interval_s:
            return Reading(status=None)
        before, began_s = _look(), time.monotonic()
        time.sleep(self.interval_s)
        after, seconds = _look(), time.monotonic() - began_s
        if os.getpid() not in after:
            return Reading(absent="/proc cannot be read")
        return whole(table(before, after, seconds, os.getpid()))


def table(
    before: Mapping[int, _Process],
    after: Mapping[int, _Process],
    seconds: float,
    own: int,
) -> str:
    """Return `HEADER`, and a line for each process outside the `family` of one process.

    Args:
      before: processes of the first reading, by process id.
      after: processes of the second reading, by process id.
      seconds: time between the two readings.
      own: id of the process whose family is excluded.
    """
    hidden = family(
        own,
        {pid: process.parent for pid, process in after.items()},
        {pid for pid, process in after.items() if process.command.startswith("python")},
    )
    lines = [HEADER]
    hertz, page_bytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    for pid, process in sorted(after.items()):
        old = before.get(pid)
        if pid in hidden:
            continue
        is_same = old is not None and old.start == process.start
        ticks = process.ticks - (old.ticks if is_same and old else 0)
        percent = 100 * ticks / hertz / seconds
        rss_mib = process.rss_pages * page_bytes / 2**20
        lines.append(
            f"{pid}\t{process.user}\t{process.state}\t{percent:.1f}\t{rss_mib:.0f}\t"
            f"{process.command}"
        )
    return "\n".join([*lines, ""])


def family(
    own: int, parents: Mapping[int, int], pythons: Collection[int] = ()
) -> set[int]:
    """Return the ids of a process, its ancestors (except init) and its descendants.

    Args:
      own: id of the process.
      parents: maps each process id to the id of its parent.
      pythons: ids of Python processes; the descendants of an ancestor among them are
        included too.
    """
    ancestors = [own]
    while (parent := parents.get(ancestors[-1], 0)) > 1 and parent not in ancestors:
        ancestors.append(parent)
    found = {own, *(pid for pid in ancestors if pid in pythons)}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found | {*ancestors}


def _look() -> dict[int, _Process]:
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            uid = path.stat().st_uid
            text = (path / "stat").read_text(errors="replace")
            found[int(path.name)] = parsed(text, _name(uid))
    return found


def parsed(text: str, user: str) -> _Process:
    """Parse a line of /proc/PID/stat.

    Raises:
      ValueError: it is not such a line.
    """
    match = _STAT.match(text)
    fields = match[4].split() if match else []
    if match is None or len(fields) <= _RSS:
        raise ValueError(f"no /proc/PID/stat: {text[:60]!r}")
    return _Process(
        command=re.sub(r"[^\x21-\x7e]", "_", match[2]) or "_",
        state=match[3],
        parent=int(fields[_PPID]),
        ticks=int(fields[_UTIME]) + int(fields[_STIME]),
        start=int(fields[_STARTTIME]),
        rss_pages=int(fields[_RSS]),
        user=user,
    )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
