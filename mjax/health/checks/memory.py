"""Checks of a host's memory: size, swap, huge pages.

Source of the format: proc_meminfo(5), https://man7.org/linux/man-pages/man5/proc_meminfo.5.html
"""

import functools
import re
from collections.abc import Mapping

from mjax.health.check import check
from mjax.health.findings import UnreadableError, Verdict, failed, ok, unknown
from mjax.health.settings import Settings
from mjax.health.sources import File

_MEMINFO = File("/proc/meminfo")
_LINE = re.compile(r"^([A-Za-z0-9_()]+): +(\d+)(?: (kB))?$")
_KIB_PER_GIB = 2**20


@functools.lru_cache(4)
def meminfo(text: str) -> Mapping[str, int]:
    """Return the fields of /proc/meminfo by name, in KiB or as counts.

    Raises:
      UnreadableError: it is not /proc/meminfo.
    """
    fields = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            raise UnreadableError(f"expected a field of meminfo, got {line[:60]!r}")
        fields[found[1]] = int(found[2])
    if not text.endswith("\n") or "MemTotal" not in fields:
        raise UnreadableError("it ends early, or has no MemTotal")
    return fields


def _field(text: str, name: str) -> int:
    fields = meminfo(text)
    if name not in fields:
        raise UnreadableError(f"it has no {name}")
    return fields[name]


@check(
    "memory.total",
    source=_MEMINFO,
    action="Reseat or replace the module missing in `dmidecode -t memory`.",
)
def total(text: str, settings: Settings) -> Verdict:
    """The host has the expected amount of memory."""
    has_gib = _field(text, "MemTotal") / _KIB_PER_GIB
    wanted_gib = settings.expect.get("memory_gib")
    if wanted_gib is None:
        return unknown(f"{has_gib:.0f} GiB; memory_gib is not in the expectations")
    least_gib = settings.limit("memory.total", "min_fraction") * wanted_gib
    limit = f"at least {least_gib:.0f} GiB"
    if has_gib < least_gib:
        reason = f"{has_gib:.1f} GiB of {wanted_gib} GiB: a module may be missing"
        return failed(reason, f"{has_gib:.1f} GiB", limit)
    return ok(f"{has_gib:.1f} GiB", limit)


@check(
    "memory.available",
    needs_idle=True,
    source=_MEMINFO,
    action="Find the process (`ps --sort -rss`); empty /dev/shm; reboot.",
)
def available(text: str, settings: Settings) -> Verdict:
    """Enough memory is available for a run."""
    percent = 100 * _field(text, "MemAvailable") / max(1, _field(text, "MemTotal"))
    least = settings.limit("memory.available", "min_percent")
    value, limit = f"{percent:.2f}%", f"at least {least:g}%"
    if percent < least:
        return failed(f"only {percent:.2f}% of the memory is available", value, limit)
    return ok(value, limit)


@check(
    "memory.swap",
    source=_MEMINFO,
    action="`swapoff -a`; find the process that used the memory.",
    for_training=True,
)
def swap(text: str, settings: Settings) -> Verdict:
    """Swap is not in use."""
    used_gib = (_field(text, "SwapTotal") - _field(text, "SwapFree")) / _KIB_PER_GIB
    most = settings.limit("memory.swap", "max_used_gib")
    value, limit = f"{used_gib:.2f} GiB", f"at most {most:g} GiB"
    if used_gib > most:
        return failed(f"{used_gib:.2f} GiB of swap are used", value, limit)
    return ok(value, limit)


@check(
    "memory.hugepages",
    source=_MEMINFO,
    action="Set vm.nr_hugepages at boot: later, memory is too fragmented.",
)
def hugepages(text: str, settings: Settings) -> Verdict:
    """As many huge pages are reserved as expected."""
    has = _field(text, "HugePages_Total")
    wanted = settings.expect.get("hugepages")
    if wanted is None:
        return unknown(f"{has}; hugepages is not in the expectations")
    if has != wanted:
        return failed(f"{has} huge pages are reserved, not {wanted}", has, wanted)
    return ok(has, wanted)


CHECKS = (
    total,
    available,
    swap,
    hugepages,
)
