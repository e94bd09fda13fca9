"""Checks of resource limits: locked memory, files, processes, shared memory.

The limits are those of this process; ranks started from here inherit them.

Sources of the formats: proc_pid_limits(5),
https://man7.org/linux/man-pages/man5/proc_pid_limits.5.html, and `df -P` of POSIX.
"""

import functools
import re
from collections.abc import Mapping

from mjax.health.check import check
from mjax.health.checks.disks import BYTES, file_systems
from mjax.health.findings import (
    KEPT_TEXTS,
    UnreadableError,
    Verdict,
    failed,
    ok,
    quoted,
)
from mjax.health.settings import Settings
from mjax.health.sources import Command, File

_LIMITS = File("/proc/self/limits")
_SHM = Command(("df", "-P", "-B1", "/dev/shm"))
_HEAD = re.compile(r"^Limit +Soft Limit +Hard Limit +Units *$")
_LINE = re.compile(
    r"^(Max [a-z ]{1,24}?) {2,}(unlimited|[0-9]{1,20}) +(?:unlimited|[0-9]{1,20})"
    r"(?: +\w+)?$"
)
_BYTES_PER_GIB = 2**30


@functools.lru_cache(KEPT_TEXTS)
def soft_limits(text: str) -> Mapping[str, float]:
    """Return the soft limits by name; infinity is unlimited.

    Raises:
      UnreadableError: it is not /proc/PID/limits.
    """
    lines = [line.rstrip() for line in text.split("\n")]
    if _HEAD.match(lines[0]) is None or lines[-1] != "":
        raise UnreadableError("no header, or it ends early")
    found = {}
    for line in lines[1:-1]:
        match = _LINE.match(line)
        if match is None:
            raise UnreadableError(f"expected a limit, got {quoted(line)}")
        found[match[1]] = float("inf") if match[2] == "unlimited" else float(match[2])
    return found


def _at_least(text: str, name: str, least: float, unit: str) -> Verdict:
    limits = soft_limits(text)
    if name not in limits:
        raise UnreadableError(f"it has no {name}")
    value = _shown(limits[name], unit)
    limit = _shown(least, unit, "at least ")
    if limits[name] < least:
        return failed(f"{name} is {value}, not {limit}", value, limit)
    return ok(value, limit)


def _shown(number: float, unit: str, before: str = "") -> str:
    return "unlimited" if number == float("inf") else f"{before}{number:.0f}{unit}"


@check(
    "ulimits.locked_memory",
    source=_LIMITS,
    action="`LimitMEMLOCK=infinity` in the unit, or memlock in limits.conf.",
    for_training=True,
)
def locked_memory(text: str, settings: Settings) -> Verdict:
    """Memory can be locked without limit."""
    del settings
    return _at_least(text, "Max locked memory", float("inf"), " B")


@check(
    "ulimits.open_files",
    source=_LIMITS,
    action="`LimitNOFILE=` in the unit, or nofile in limits.conf.",
    for_training=True,
)
def open_files(text: str, settings: Settings) -> Verdict:
    """A process can open enough files."""
    least = float(settings.limit("ulimits.open_files", "min_count"))
    return _at_least(text, "Max open files", least, "")


@check(
    "ulimits.processes",
    source=_LIMITS,
    action="`LimitNPROC=` in the unit, or nproc in limits.conf.",
    for_training=True,
)
def processes(text: str, settings: Settings) -> Verdict:
    """A user can start enough processes and threads."""
    least = float(settings.limit("ulimits.processes", "min_count"))
    return _at_least(text, "Max processes", least, "")


@check(
    "ulimits.shared_memory",
    source=_SHM,
    action="Remove files of old runs there; mount it with a larger size.",
    for_training=True,
)
def shared_memory(text: str, settings: Settings) -> Verdict:
    """/dev/shm has enough free space."""
    found = file_systems(text, BYTES)
    if "/dev/shm" not in found:
        raise UnreadableError("there is no line of /dev/shm")
    shm = found["/dev/shm"]
    least_gib = settings.limit("ulimits.shared_memory", "min_free_gib")
    gib = shm.available / _BYTES_PER_GIB
    value = f"{gib:.1f} GiB free of {shm.size / _BYTES_PER_GIB:.1f}"
    limit = f"at least {least_gib:g} GiB"
    if gib < least_gib:
        return failed(f"/dev/shm: {value}", value, limit)
    return ok(value, limit)


CHECKS = (
    locked_memory,
    open_files,
    processes,
    shared_memory,
)
