"""Checks of kernel parameters: those in the expectations, and some for every host.

Sources: sysctl(8); /sys/kernel/mm/transparent_hugepage/enabled has the mode in use in
brackets (Documentation/admin-guide/mm/transhuge.rst of the kernel).
"""

import functools
import re
from collections.abc import Mapping

from mjax.health.check import check
from mjax.health.findings import (
    KEPT_TEXTS,
    UnreadableError,
    Verdict,
    failed,
    judge_each,
    ok,
    quoted,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.sources import Command, File

_SYSCTL = Command(("sysctl", "-a"))
_HUGE_PAGES = File("/sys/kernel/mm/transparent_hugepage/enabled")
_LINE = re.compile(r"^([\w./*+:@-]{1,200}) = ?(.*)$")
_MODE = re.compile(r"\[(\w{1,20})\]")


@functools.lru_cache(KEPT_TEXTS)
def parameters(text: str) -> Mapping[str, str]:
    """Return the parameters by name; several numbers are separated by one space.

    Raises:
      UnreadableError: it is not an output of `sysctl -a`.
    """
    found: dict[str, str] = {}
    for line in text.split("\n")[:-1]:
        match = _LINE.match(line)
        if match is not None:
            found[match[1]] = " ".join(match[2].split())
        elif not found:
            raise UnreadableError(f"expected a parameter, got {quoted(line)}")
    if "kernel.ostype" not in found or not text.endswith("\n"):
        raise UnreadableError("it has no kernel.ostype, or ends early")
    return found


@check(
    "sysctl.expected",
    source=_SYSCTL,
    action="Write them into /etc/sysctl.d and run `sysctl --system`.",
)
def expected(text: str, settings: Settings) -> Verdict:
    """Kernel parameters have the expected values."""
    wanted = settings.expect.get("sysctl")
    if not wanted:
        return unknown("sysctl is not in the expectations")
    has = parameters(text)
    each = [
        (name, f"{has.get(name, 'not there')}, not {value}")
        for name, value in wanted.items()
        if has.get(name) != " ".join(str(value).split())
    ]
    return judge_each(each, f"{len(wanted) - len(each)}", f"{len(wanted)}")


def _whole(text: str, name: str) -> int:
    value = parameters(text).get(name, "")
    if not re.fullmatch("[0-9]{1,19}", value):
        raise UnreadableError(f"{name} is {value!r}")
    return int(value)


@check(
    "sysctl.numa_balancing",
    source=_SYSCTL,
    action="`sysctl -w kernel.numa_balancing=0`, and in /etc/sysctl.d.",
    for_training=True,
)
def numa_balancing(text: str, settings: Settings) -> Verdict:
    """The kernel does not migrate pages between NUMA nodes."""
    del settings
    has = _whole(text, "kernel.numa_balancing")
    if has != 0:
        return failed(f"kernel.numa_balancing is {has}", has, 0)
    return ok(has, 0)


@check(
    "sysctl.pid_max",
    source=_SYSCTL,
    action="`sysctl -w kernel.pid_max=4194304`, and in /etc/sysctl.d.",
    for_training=True,
)
def pid_max(text: str, settings: Settings) -> Verdict:
    """There are enough process IDs for the threads of all ranks."""
    has = _whole(text, "kernel.pid_max")
    least = settings.limit("sysctl.pid_max", "min_count")
    limit = f"at least {least}"
    if has < least:
        return failed(f"kernel.pid_max is {has}", has, limit)
    return ok(has, limit)


@check(
    "sysctl.huge_pages",
    source=_HUGE_PAGES,
    action="Write madvise into /sys/kernel/mm/transparent_hugepage/enabled.",
    for_training=True,
)
def huge_pages(text: str, settings: Settings) -> Verdict:
    """Programs may use transparent huge pages."""
    found = _MODE.search(text)
    if found is None:
        raise UnreadableError(f"expected a mode in brackets, got {quoted(text)}")
    modes = settings.limit("sysctl.huge_pages", "modes")
    limit = " or ".join(modes)
    if found[1] not in modes:
        return failed(f"transparent huge pages: {found[1]}", found[1], limit)
    return ok(found[1], limit)


CHECKS = (
    expected,
    numa_balancing,
    pid_max,
    huge_pages,
)
