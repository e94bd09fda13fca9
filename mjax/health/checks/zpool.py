"""Checks of ZFS pools: state, errors of their devices, free space.

Sources of the formats: zpool-list(8) and zpool-status(8),
https://github.com/openzfs/zfs/blob/master/man/man8/zpool-status.8
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from mjax.health.check import check
from mjax.health.findings import (
    KEPT_TEXTS,
    UnreadableError,
    Verdict,
    judge_each,
    quoted,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.sources import Command

_LIST = Command(("zpool", "list", "-H", "-p", "-o", "name,size,capacity,health"))
_STATUS = Command(("zpool", "status", "-p"))
_DEVICE = re.compile(
    r"^\t( *)(\S{1,200}) +([A-Z]{4,10}) +([0-9]{1,20}) +([0-9]{1,20}) +([0-9]{1,20})"
    r"(?: .*)?$"
)
_NO_ERRORS = "No known data errors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """A pool, as a line of `zpool list`."""

    name: str
    percent: str
    """Capacity in use; "-" for a pool that cannot be read."""
    health: str


@functools.lru_cache(KEPT_TEXTS)
def pools(text: str) -> Sequence[Pool]:
    """Return the pools.

    Raises:
      UnreadableError: it is not an output of `zpool list -H`.
    """
    found = []
    for line in text.split("\n")[:-1]:
        fields = line.split("\t")
        if len(fields) != 4 or not re.fullmatch("[0-9]{1,3}|-", fields[2]):
            raise UnreadableError(f"expected a pool, got {quoted(line)}")
        name, _, percent, health = fields
        found.append(Pool(name=name, percent=percent, health=health))
    if not text.endswith("\n") and text:
        raise UnreadableError("it ends early")
    return found


@check(
    "zpool.state",
    source=_LIST,
    action="`zpool status`; `zpool import` it, or replace the failed device.",
)
def state(text: str, settings: Settings) -> Verdict:
    """Each ZFS pool is online, and all required pools exist."""
    wanted = settings.expect.get("zpools", [])
    found = pools(text)
    if not found and not wanted:
        return unknown("there is no pool; zpools is not in the expectations")
    names = {pool.name for pool in found}
    each = [(pool.name, pool.health) for pool in found if pool.health != "ONLINE"]
    each += [(name, "there is no such pool") for name in wanted if name not in names]
    return judge_each(each, f"{len(found)} pools", "ONLINE")


@check("zpool.capacity", source=_LIST, action="Remove old data and snapshots.")
def capacity(text: str, settings: Settings) -> Verdict:
    """No ZFS pool is nearly full."""
    most = settings.limit("zpool.capacity", "max_percent")
    found = [pool for pool in pools(text) if pool.percent != "-"]
    if not found:
        return unknown("there is no pool that can be read")
    each = [
        (pool.name, f"{pool.percent}% used")
        for pool in found
        if int(pool.percent) > most
    ]
    value = f"{max(int(pool.percent) for pool in found)}%"
    return judge_each(each, value, f"at most {most:g}%")


@functools.lru_cache(KEPT_TEXTS)
def statuses(text: str) -> Mapping[str, Sequence[str]]:
    """Return the lines of `zpool status` for each pool, by name.

    Raises:
      UnreadableError: it is not an output of `zpool status`.
    """
    found: dict[str, list[str]] = {}
    pool = ""
    for line in text.split("\n"):
        if line.startswith("  pool: "):
            pool = line.removeprefix("  pool: ")
            found[pool] = []
        elif pool:
            found[pool].append(line)
        elif line:
            raise UnreadableError(f"no pool before {quoted(line)}")
    return found


@check(
    "zpool.errors",
    source=_STATUS,
    action="Replace the device (`zpool replace`), then `zpool clear` the pool.",
)
def errors(text: str, settings: Settings) -> Verdict:
    """No device of a ZFS pool has errors."""
    most = settings.limit("zpool.errors", "max_count")
    each, num_devices = [], 0
    for pool, lines in statuses(text).items():
        devices = [match for line in lines if (match := _DEVICE.match(line))]
        said = [line for line in lines if line.startswith("errors: ")]
        if len(devices) < 2 or len(said) != 1:
            raise UnreadableError(f"{pool}: it has no device, or no line of errors")
        num_devices += len(devices)
        for device in devices:
            counts = [int(device[field]) for field in (4, 5, 6)]
            if max(counts) > most:
                shown = "read {} write {} checksum {}".format(*counts)
                each.append((f"{pool}/{device[2]}", shown))
            elif device[3] not in ("ONLINE", "AVAIL", "INUSE"):
                each.append((f"{pool}/{device[2]}", device[3]))
        if said[0].removeprefix("errors: ") != _NO_ERRORS:
            each.append((pool, said[0].removeprefix("errors: ")))
    if not num_devices:
        return unknown("there is no pool")
    return judge_each(each, f"{len(each)} faults", f"at most {most} errors a device")


CHECKS = (
    state,
    capacity,
    errors,
)
