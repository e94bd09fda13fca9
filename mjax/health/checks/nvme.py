"""Checks of NVMe disks: their own warnings, spare blocks, wear, errors, temperature.

Input: the output of `nvme smart-log -o json` for each controller, after a line that
names it. Temperatures are in kelvins. Counters cover the whole life of a disk, so the
limit is above zero where a single event is normal.

Source of the format: json_smart_log of nvme-cli,
https://github.com/linux-nvme/nvme-cli/blob/master/src/nvme-print-json.c; meaning of the
fields: https://manpages.ubuntu.com/manpages/questing/man2/nvme_smart_log.2.html
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from mjax import checked_json
from mjax.health.check import check
from mjax.health.findings import (
    KEPT_TEXTS,
    UnreadableError,
    Verdict,
    judge_each,
)
from mjax.health.settings import Settings
from mjax.health.small_files import Each, outputs

_SMART = Each(("nvme", "smart-log", "-o", "json"), "/sys/class/nvme/nvme[0-9]*")
_KELVIN = 273
_COLDEST_K = 200  # a number below is not in kelvins
_WARNINGS = (  # bits of critical_warning, enum nvme_smart_crit of libnvme
    "spare blocks are used up",
    "temperature outside its limits",
    "unreliable because of errors",
    "read-only",
    "the backup of volatile memory failed",
    "persistent memory is read-only",
)


@dataclasses.dataclass(frozen=True)
class Smart:
    """The SMART log of a disk. `spare`, `spare_limit` and `used` are in percent."""

    warning: int
    temperature_k: int
    spare: int
    spare_limit: int
    used: int
    media_errors: int


@functools.lru_cache(KEPT_TEXTS)
def smart_logs(text: str) -> Mapping[str, Smart]:
    """Return the log of each disk, by device.

    Raises:
      UnreadableError: a log is missing, or is not JSON of nvme-cli.
    """
    found = {device: _smart(device, said) for device, said in outputs(text)}
    if not found:
        raise UnreadableError("there is no disk")
    return found


def _smart(device: str, text: str) -> Smart:
    try:
        fields: dict[str, Any] = checked_json.read(text, dict[str, Any])
    except ValueError as error:
        raise UnreadableError(f"{device}: {error}") from error
    warning = fields.get("critical_warning")
    if isinstance(warning, dict):  # with -v, and in some versions always
        fields = fields | {"critical_warning": warning.get("value")}
    smart = Smart(
        warning=_number(device, fields, "critical_warning"),
        temperature_k=_number(device, fields, "temperature"),
        spare=_number(device, fields, "avail_spare"),
        spare_limit=_number(device, fields, "spare_thresh"),
        used=_number(device, fields, "percent_used"),
        media_errors=_number(device, fields, "media_errors"),
    )
    if smart.temperature_k < _COLDEST_K:
        raise UnreadableError(f"{device}: {smart.temperature_k} is not in kelvins")
    return smart


def _number(device: str, fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not re.fullmatch("[0-9]{1,39}", str(value)):
        raise UnreadableError(f"{device}: {name} is {value!r}")
    return int(str(value))


@check(
    "nvme.warnings",
    source=_SMART,
    action="Copy its data, then replace the disk; if it is hot, check the fans.",
)
def warnings(text: str, settings: Settings) -> Verdict:
    """No disk sets a bit of its critical warning."""
    del settings
    logs = smart_logs(text)
    each = [
        (device, ", ".join(_bits(smart.warning)))
        for device, smart in logs.items()
        if smart.warning
    ]
    return judge_each(each, f"{len(each)} of {len(logs)} disks", "none")


def _bits(warning: int) -> list[str]:
    known = [text for bit, text in enumerate(_WARNINGS) if warning >> bit & 1]
    return known or [f"critical_warning {warning:#x}"]


@check("nvme.spare", source=_SMART, action="Replace the disk.")
def spare(text: str, settings: Settings) -> Verdict:
    """Each disk has at least as many spare blocks as its own limit."""
    del settings
    logs = smart_logs(text)
    each = [
        (device, f"{smart.spare}% spare, its limit is {smart.spare_limit}%")
        for device, smart in logs.items()
        if smart.spare < smart.spare_limit
    ]
    value = f"{min(smart.spare for smart in logs.values())}%"
    return judge_each(each, value, "at least the limit of the disk")


@check("nvme.wear", source=_SMART, action="Plan to replace the disk.")
def wear(text: str, settings: Settings) -> Verdict:
    """No disk has used up its rated endurance."""
    most = settings.limit("nvme.wear", "max_percent")
    logs = smart_logs(text)
    each = [
        (device, f"{smart.used}% of its life used")
        for device, smart in logs.items()
        if smart.used > most
    ]
    value = f"{max(smart.used for smart in logs.values())}%"
    return judge_each(each, value, f"at most {most:g}%")


@check(
    "nvme.media_errors",
    source=_SMART,
    action="Replace the disk; check the files on it.",
)
def media_errors(text: str, settings: Settings) -> Verdict:
    """No disk has many errors that could not be corrected."""
    most = settings.limit("nvme.media_errors", "max_count")
    logs = smart_logs(text)
    each = [
        (device, f"{smart.media_errors} media errors")
        for device, smart in logs.items()
        if smart.media_errors > most
    ]
    value = f"{max(smart.media_errors for smart in logs.values())}"
    return judge_each(each, value, f"at most {most:g}")


@check(
    "nvme.temperature",
    source=_SMART,
    action="Check the fans and the air flow of the host.",
)
def temperature(text: str, settings: Settings) -> Verdict:
    """No disk is too hot."""
    most = settings.limit("nvme.temperature", "max_c")
    logs = smart_logs(text)
    each = [
        (device, f"{smart.temperature_k - _KELVIN} C")
        for device, smart in logs.items()
        if smart.temperature_k - _KELVIN > most
    ]
    value = f"{max(smart.temperature_k for smart in logs.values()) - _KELVIN} C"
    return judge_each(each, value, f"at most {most:g} C")


CHECKS = (
    warnings,
    spare,
    wear,
    media_errors,
    temperature,
)
