"""Checks of the clock: it is synchronised with a server.

A clock that is wrong by minutes breaks HTTPS and package managers; one that is wrong by
seconds puts log lines of a run in the wrong order.

Sources: `chronyc -c tracking` has the fields of chronyc(1) in their order, with offsets
in seconds and without words,
https://gitlab.com/chrony/chrony/-/blob/master/doc/chronyc.adoc; `timedatectl show` has
properties, https://github.com/systemd/systemd/blob/main/man/timedatectl.xml
"""

import dataclasses
import functools
import re
from collections.abc import Mapping

from mjax.health.check import check
from mjax.health.findings import (
    KEPT_TEXTS,
    UnreadableError,
    Verdict,
    failed,
    ok,
    quoted,
)
from mjax.health.settings import Settings
from mjax.health.sources import Command

_TRACKING = Command(("chronyc", "-c", "tracking"))
_TIMEDATECTL = Command(("timedatectl", "show"))
_NUM_FIELDS = 14
_LOCAL_REFERENCE = "7F7F0101"  # chronyc(1): the clock is not synchronised
_LEAPS = ("Normal", "Insert second", "Delete second")
_NUMBER = re.compile(r"^-?[0-9]{1,12}(?:\.[0-9]{1,12})?$")
_NAME = re.compile(r"^([A-Za-z]{1,40})=(.*)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracking:
    """State of the synchronisation with a server."""

    reference: str
    server: str
    stratum: int
    offset_s: float
    delay_s: float
    dispersion_s: float
    leap: str

    @property
    def error_s(self) -> float:
        """Upper bound of the error; chronyc(1), under Root dispersion."""
        return abs(self.offset_s) + self.dispersion_s + 0.5 * self.delay_s


@functools.lru_cache(KEPT_TEXTS)
def tracking(text: str) -> Tracking:
    """Return the tracking state of chronyd.

    Raises:
      UnreadableError: it is not a line of `chronyc -c tracking`.
    """
    fields = text.removesuffix("\n").split(",")
    if "\n" in fields[-1] or len(fields) != _NUM_FIELDS or not text.endswith("\n"):
        raise UnreadableError(f"no line of {_NUM_FIELDS} fields: {quoted(text)}")
    numbers = [fields[index] for index in (2, 4, 10, 11)]
    if not all(_NUMBER.match(number) for number in numbers):
        raise UnreadableError(f"no number among {numbers}")
    hops, offset_s, delay_s, dispersion_s = map(float, numbers)
    return Tracking(
        reference=fields[0],
        server=fields[1],
        stratum=int(hops),
        offset_s=offset_s,
        delay_s=delay_s,
        dispersion_s=dispersion_s,
        leap=fields[13],
    )


@check(
    "clock.followed",
    source=_TRACKING,
    action="`chronyc sources`; restart chronyd; check the path to its server.",
)
def followed(text: str, settings: Settings) -> Verdict:
    """Chrony follows a server."""
    del settings
    found = tracking(text)
    if found.leap not in _LEAPS:
        return failed(f"chrony: {found.leap}", found.leap, "Normal")
    if found.reference == _LOCAL_REFERENCE:
        return failed("chrony follows its own clock", found.reference, "a server")
    return ok(f"{found.server}, {found.leap}", "Normal")


@check(
    "clock.stratum",
    source=_TRACKING,
    action="Configure chrony with a server in the data centre.",
)
def stratum(text: str, settings: Settings) -> Verdict:
    """The time server is only a few hops away from a reference clock."""
    found, most = tracking(text), settings.limit("clock.stratum", "max_stratum")
    limit = f"1 to {most}"
    if not 1 <= found.stratum <= most:
        return failed(f"stratum {found.stratum}", found.stratum, limit)
    return ok(found.stratum, limit)


@check("clock.offset", source=_TRACKING, action="`chronyc makestep` while no job runs.")
def offset(text: str, settings: Settings) -> Verdict:
    """The clock is close to its server's."""
    found, most_s = tracking(text), settings.limit("clock.offset", "max_s")
    value, limit = f"{found.offset_s:.6f} s", f"at most {most_s:g} s"
    if abs(found.offset_s) > most_s:
        return failed(f"the clock is {value} away from {found.server}", value, limit)
    return ok(value, limit)


@check(
    "clock.error",
    source=_TRACKING,
    action="`chronyc sourcestats`; configure chrony with a closer server.",
)
def error(text: str, settings: Settings) -> Verdict:
    """The clock cannot be far from the true time."""
    found, most_s = tracking(text), settings.limit("clock.error", "max_s")
    value, limit = f"{found.error_s:.6f} s", f"at most {most_s:g} s"
    if found.error_s > most_s:
        return failed(f"the clock may be wrong by {value}", value, limit)
    return ok(value, limit)


@functools.lru_cache(KEPT_TEXTS)
def properties(text: str) -> Mapping[str, str]:
    """Return the properties of `timedatectl show`, by name.

    Raises:
      UnreadableError: it is not such an output.
    """
    found = {}
    for line in text.split("\n")[:-1]:
        match = _NAME.match(line)
        if match is None:
            raise UnreadableError(f"expected a property, got {quoted(line)}")
        found[match[1]] = match[2]
    if not text.endswith("\n"):
        raise UnreadableError("it is empty, or ends early")
    return found


def _flag(text: str, name: str) -> str:
    found = properties(text).get(name)
    if found not in ("yes", "no"):
        raise UnreadableError(f"{name} is {found!r}")
    return found


@check(
    "clock.synchronised",
    source=_TIMEDATECTL,
    action="`timedatectl set-ntp true`; check chronyd and its server.",
)
def synchronised(text: str, settings: Settings) -> Verdict:
    """The clock follows a server."""
    del settings
    has = _flag(text, "NTPSynchronized")
    if has == "no":
        return failed("the clock does not follow a server", has, "yes")
    return ok(has, "yes")


@check(
    "clock.hardware_clock", source=_TIMEDATECTL, action="`timedatectl set-local-rtc 0`."
)
def hardware_clock(text: str, settings: Settings) -> Verdict:
    """The hardware clock keeps UTC."""
    del settings
    has = _flag(text, "LocalRTC")
    if has == "yes":
        return failed("the hardware clock keeps local time", has, "no")
    return ok(has, "no")


CHECKS = (
    synchronised,
    hardware_clock,
    followed,
    stratum,
    offset,
    error,
)
