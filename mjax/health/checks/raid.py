"""Checks of software RAID: arrays are complete, and none is being rebuilt.

Source of the format: /proc/mdstat after the md driver,
https://github.com/torvalds/linux/blob/master/Documentation/admin-guide/md.rst
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
    judge_each,
    quoted,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.sources import File

_MDSTAT = File("/proc/mdstat")
_ARRAY = re.compile(
    r"^(md[\w.-]{1,40}) : (\w+)(?: \([a-z-]+\))?(?: (\w+))?((?: \S+)*)$"
)
_SLOTS = re.compile(r" \[([0-9]{1,4})/([0-9]{1,4})\] \[([U_]{1,400})\]")
_REBUILD = re.compile(
    r"(?:recovery|reshape|resync) ?= *(?:[0-9.]{1,6}%|DELAYED|PENDING|REMOTE)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """An array of disks."""

    is_active: bool
    members: str
    slots: str
    """U for a working member, _ for a failed one; empty without redundancy."""
    rebuild: str
    """The current operation and its progress."""


@functools.lru_cache(KEPT_TEXTS)
def arrays(text: str) -> Mapping[str, Array]:
    """Return the arrays, by name.

    Raises:
      UnreadableError: it is not /proc/mdstat.
    """
    lines = text.split("\n")
    if not lines[0].startswith("Personalities :") or lines[-1] != "":
        raise UnreadableError("it does not begin with Personalities, or ends early")
    if not lines[-2].startswith("unused devices:"):
        raise UnreadableError("it does not end with unused devices")
    blocks: list[list[str]] = []
    for line in lines[1:-2]:
        if not line.startswith(" ") and line:
            blocks.append([])
        if blocks:
            blocks[-1].append(line)
    return dict(_array(block[0], "\n".join(block[1:])) for block in blocks)


def _array(head: str, details: str) -> tuple[str, Array]:
    match = _ARRAY.match(head)
    if match is None:
        raise UnreadableError(f"expected an array, got {quoted(head)}")
    slots, work = _SLOTS.search(details), _REBUILD.search(details)
    return match[1], Array(
        is_active=match[2] == "active",
        members=match[4],
        slots=slots[3] if slots else "",
        rebuild=work[0] if work else "",
    )


@check(
    "raid.state",
    source=_MDSTAT,
    action="`mdadm --detail`; replace the disk, then `mdadm --add` it.",
)
def state(text: str, settings: Settings) -> Verdict:
    """Each software RAID is active and complete."""
    wanted = settings.expect.get("arrays", [])
    found = arrays(text)
    if not found and not wanted:
        return unknown("there is no array; arrays is not in the expectations")
    each = [(name, "there is no such array") for name in wanted if name not in found]
    for name, array in found.items():
        if not array.is_active:
            each.append((name, "inactive"))
        if "(F)" in array.members:
            each.append((name, f"a member has failed:{array.members}"))
        if "_" in array.slots:
            each.append((name, f"a member is missing: [{array.slots}]"))
    return judge_each(each, f"{len(found)} arrays", "active and complete")


@check(
    "raid.rebuild",
    source=_MDSTAT,
    action="Wait until it ends; /proc/mdstat shows the progress.",
)
def rebuild(text: str, settings: Settings) -> Verdict:
    """No software RAID is being rebuilt."""
    del settings
    found = arrays(text)
    if not found:
        return unknown("there is no array")
    each = [(name, array.rebuild) for name, array in found.items() if array.rebuild]
    return judge_each(each, f"{len(each)} of {len(found)} arrays", "none")


CHECKS = (
    state,
    rebuild,
)
