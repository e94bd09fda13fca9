"""Checks of the findings of NVIDIA's Data Center GPU Manager (DCGM).

Input: the output of `dcgmi health -c -j` and `dcgmi discovery -l`, which put no load
on the GPUs (`dcgmi diag` would). Output: verdicts. If no health watch is set or no host
engine runs, dcgmi ends with an error and the check is unknown.
Sources:
https://docs.nvidia.com/datacenter/dcgm/latest/reference/command-line-reference/dcgmi/dcgmi-health.html,
https://github.com/NVIDIA/DCGM (dcgmi/Health.cpp and DcgmiOutput.cpp write the JSON).
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from mjax import checked_json
from mjax.health.check import check
from mjax.health.findings import UnreadableError, Verdict, failed, ok, unknown
from mjax.health.settings import Settings
from mjax.health.sources import Command

HEALTH = Command(("dcgmi", "health", "-c", "-j"))
DISCOVERY = Command(("dcgmi", "discovery", "-l"))

_OVERALL = "Overall Health"
_RESULTS = ("Healthy", "Warning", "Failure")
_SHOWN_CHARS = 200
_FOUND = re.compile(r"([0-9]{1,4}) GPUs? found(?: \(Active\))?\.", re.ASCII)
_ROW = re.compile(r"\| ([0-9]{1,4}) +\| Name: .*\|", re.ASCII)
_BUS_ID = re.compile(r"\| +\| PCI Bus ID: ([0-9A-Fa-f:.]{1,20}) *\|", re.ASCII)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableError(f"{what} is not a JSON object")
    return value


def _result(box: Any, what: str) -> str:
    value = _mapping(box, what).get("value")
    if value not in _RESULTS:
        raise UnreadableError(f"{what} is {str(value)!r:.60}")
    return value


def _body(text: str) -> Mapping[str, Any]:
    try:
        content = checked_json.read(text, dict[str, Any])
    except ValueError as error:
        raise UnreadableError(f"it is {error!s:.60}") from error
    return _mapping(content.get("body"), "body")


@check(
    "dcgm.health",
    source=HEALTH,
    action="Follow DCGM's advice; run `dcgmi diag -r 3` on the drained host.",
)
def health(text: str, settings: Settings) -> Verdict:
    """No health watch of DCGM has reported a problem."""
    allowed = settings.limit("dcgm.health", "allowed")
    body = _body(text)
    overall = _result(body.get(_OVERALL), _OVERALL)
    bad = []
    for group, box in body.items():
        entities = _mapping(box, group).get("children", {})
        for entity, inner in _mapping(entities, group).items():
            result = _result(inner, f"{group} {entity}")
            if result not in allowed:
                bad.append(f"{group} {entity}: {result}{_incidents(inner)}")
    if overall not in allowed:
        reason = "; ".join(bad) or "it does not name the device"
        return failed(f"{overall}: {reason}", overall, " or ".join(allowed))
    if bad:
        return failed("; ".join(bad), overall, " or ".join(allowed))
    return ok(overall, " or ".join(allowed))


def _incidents(entity: Any) -> str:
    """Return the findings of a device as text; skip entries of unexpected form."""
    text = json.dumps(_mapping(entity, what="a device").get("children", {}))
    words = re.findall(r'"([^"\\]{1,200})"', text)
    known = {"Errors", "children", "value", "overflow", *_RESULTS}
    said = " ".join(word for word in words if word not in known)
    return f" ({said[:_SHOWN_CHARS]})" if said else ""


@check(
    "dcgm.gpus", source=DISCOVERY, action="Restart nvidia-dcgm; compare with gpu.count."
)
def discovery(text: str, settings: Settings) -> Verdict:
    """DCGM sees as many GPUs as expected."""
    lines = [line.strip() for line in text.splitlines()]
    found = [match for match in map(_FOUND.fullmatch, lines) if match]
    rows = [match for match in map(_ROW.fullmatch, lines) if match]
    ids = {match[1] for match in rows}
    if len(found) != 1 or not int(found[0][1]) == len(rows) == len(ids):
        raise UnreadableError("it does not list as many GPUs as it has found")
    has, wanted = len(rows), settings.expect.get("gpus")
    if wanted is None:
        return unknown(f"{has} GPUs; gpus is not in the expectations")
    if has != wanted:
        buses = [match[1] for match in map(_BUS_ID.fullmatch, lines) if match]
        reason = f"{has} GPUs, not {wanted}; there are {', '.join(buses) or 'none'}"
        return failed(reason, has, wanted)
    return ok(has, wanted)


CHECKS = (
    health,
    discovery,
)
