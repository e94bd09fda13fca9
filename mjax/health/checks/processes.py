"""Checks of the processes that use a host before a run starts.

Input: the text of `mjax.health.processes`, a header and one line per process.
`processes.training` finds programs left over from another run; `processes.busy` finds
every process that uses a processor.
"""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Sequence

from mjax.health.check import check
from mjax.health.findings import (
    KEPT_TEXTS,
    MOST_NAMED,
    UnreadableError,
    Verdict,
    judge_each,
    quoted,
)
from mjax.health.processes import HEADER, Processes
from mjax.health.settings import Settings

_SOURCE = Processes()
_LINE = re.compile(
    r"^([0-9]{1,9})\t([^\t]{1,40})\t([A-Za-z])\t([0-9]{1,9}\.[0-9])\t([0-9]{1,12})\t"
    r"([^\t]{1,80})$"
)
_MIB_PER_GIB = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """A process, as a line of the text."""

    pid: int
    user: str
    state: str
    percent: float
    """Use in percent of one processor."""
    rss_mib: int
    command: str

    @property
    def shown(self) -> str:
        """Name for a person."""
        return f"{self.command} ({self.pid}, {self.user})"


@functools.lru_cache(KEPT_TEXTS)
def processes(text: str) -> Sequence[Process]:
    """Return the processes.

    Raises:
      UnreadableError: it is not from `mjax.health.processes`, or lists no process.
    """
    lines = text.split("\n")
    if lines[0] != HEADER or lines[-1] != "" or len(lines) < 3:
        raise UnreadableError("no header, no process, or it ends early")
    found = []
    for line in lines[1:-1]:
        match = _LINE.match(line)
        if match is None:
            raise UnreadableError(f"expected a process, got {quoted(line)}")
        pid, user, state, percent, rss_mib, command = match.groups()
        found.append(
            Process(
                pid=int(pid),
                user=user,
                state=state,
                percent=float(percent),
                rss_mib=int(rss_mib),
                command=command,
            )
        )
    return found


@check(
    "processes.busy",
    needs_idle=True,
    source=_SOURCE,
    action="Find out what it does; stop it, or move it to another host.",
)
def busy(text: str, settings: Settings) -> Verdict:
    """No process keeps a processor busy that a run needs."""
    most = settings.limit("processes.busy", "max_percent")
    found = sorted(processes(text), key=_percent, reverse=True)
    each = [(p.shown, f"{p.percent:.1f}%") for p in found if p.percent > most]
    return judge_each(
        each[:MOST_NAMED], f"{found[0].percent:.1f}%", f"at most {most:g}%"
    )


def _percent(process: Process) -> float:
    return process.percent


@check(
    "processes.training",
    needs_idle=True,
    source=_SOURCE,
    action="Ask its user; `kill PID`, then check the memory of the GPUs.",
)
def training(text: str, settings: Settings) -> Verdict:
    """No process of another run is left over."""
    names = settings.limit("processes.training", "names")
    least_gib = settings.limit("processes.training", "min_gib")
    each = [
        (p.shown, f"{p.rss_mib / _MIB_PER_GIB:.1f} GiB")
        for p in processes(text)
        if p.rss_mib >= least_gib * _MIB_PER_GIB
        and any(fnmatch.fnmatchcase(p.command, name) for name in names)
    ]
    return judge_each(
        each[:MOST_NAMED], f"{len(each)}", f"none of {least_gib:g} GiB and more"
    )


@check(
    "processes.zombies",
    source=_SOURCE,
    action="Restart the parent (`ps -o ppid= -p PID`); reboot.",
)
def zombies(text: str, settings: Settings) -> Verdict:
    """There are few zombie processes."""
    most = settings.limit("processes.zombies", "max_count")
    found = [p for p in processes(text) if p.state == "Z"]
    each = [(p.shown, "it has ended") for p in found]
    return judge_each(
        each[:MOST_NAMED] if len(each) > most else [], f"{len(each)}", f"at most {most}"
    )


CHECKS = (
    busy,
    training,
    zombies,
)
