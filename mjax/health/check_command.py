"""`python -m mjax.health check`: check whether this host is healthy.

    python -m mjax.health check [--json] [--expect FILE] [--in-use] [--only NAMES]

Exit codes: 0 the host may be used, 1 a check failed or is incomplete, 2 bad input.
"""

import argparse
import collections
import fnmatch
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.cli import exit_codes
from mjax.cli.flags.standard import ArgumentParser
from mjax.health import check as checking
from mjax.health.check import Check, Report
from mjax.health.checks.nvidia_smi import SMI
from mjax.health.checks.table import AREA_OF, BY_NAME, CHECKS
from mjax.health.findings import Finding, State
from mjax.health.inventory import ADAPTERS, inventory
from mjax.health.settings import Settings, read_expected, read_limits
from mjax.health.sources import Reading

_ORDER = (State.FAILED, State.INCOMPLETE, State.UNKNOWN, State.OK)
_MADE = (State.FAILED, State.INCOMPLETE, State.OK)
_ADAPTERS_S = 5.0
"""Seconds to read the adapters for the inventory. The adapters are a few files of
/sys."""
_MAX_NAMES = 3
"""Maximum number of checks named for one reason. These names fit into one line of a
terminal."""
_MAX_REASONS = 2
"""Maximum number of reasons of an area that are listed. A host without GPUs has 60 of
them, which would hide a check that failed."""
_TRAINING_AREAS = ("GPU", "RDMA", "NCCL")
"""Areas that matter only on a host with a GPU or an RDMA device."""


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; return its exit code."""
    parser = ArgumentParser(
        prog="python -m mjax.health check",
        description=(__doc__ or "").splitlines()[0],
    )
    _add_check(parser)
    try:
        return _check(parser.parse_args(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT


def _add_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--expect", type=Path, help="TOML file: what this host must have")
    changed = "TOML file: limits that differ from the shipped ones"
    add("--limits", type=Path, help=changed)
    add("--only", nargs="+", default=["*"], help="names of checks, * for any")
    in_use = "leave out the checks that only an idle host can pass"
    add("--in-use", action="store_true", help=in_use)
    limit = "time limit of all checks in seconds"
    add("--seconds", type=float, default=checking.TOTAL_S, help=limit)
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="also write the JSON object to this file")
    add("--all", action="store_true", help="also list ok and unknown checks")


def _check(args: argparse.Namespace) -> int:
    if not 0 < args.seconds < float("inf"):
        raise ValueError(f"--seconds must be positive, got {args.seconds:g}")
    expect = {} if args.expect is None else read_expected(args.expect, [*BY_NAME])
    settings = Settings(limits=read_limits(args.limits), expect=expect)
    checks = chosen(args.only)
    if args.in_use:
        checks = [check for check in checks if not check.needs_idle]
    report = checking.run(checks, settings, total_s=args.seconds)
    found = to_json(report)
    if args.out is not None:
        try:
            args.out.write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"--out {args.out} cannot be written: {error}") from error
    print(json.dumps(found) if args.json else shown(report, is_all=args.all))
    sys.stdout.flush()
    return 0 if report.is_ok else 1


def chosen(patterns: Sequence[str]) -> list[Check]:
    """Return the checks that match any of the patterns.

    Raises:
      ValueError: a pattern matches no check.
    """
    for pattern in patterns:
        if not fnmatch.filter(BY_NAME, pattern):
            raise ValueError(
                f"--only {pattern}: there is no such check; `python -m mjax.health "
                "checks` lists them"
            )
    names = {name for pattern in patterns for name in fnmatch.filter(BY_NAME, pattern)}
    return [check for check in CHECKS if check.name in names]


def to_json(report: Report) -> dict[str, Any]:
    """Return a report as a JSON object.

    Returns:
      ok; host; seconds (the time that the report took); checks (for each: name, state,
      value, limit, reason); inventory (see `mjax.health.inventory`).
    """
    return {
        "ok": report.is_ok,
        "host": os.environ.get("MJAX_HOST") or socket.gethostname(),
        "seconds": round(report.seconds, 2),
        "checks": [_fields(finding) for finding in report.findings],
        "inventory": inventory(
            report.readings.get(SMI, Reading(absent="not asked for")),
            ADAPTERS.read(_ADAPTERS_S),
        ),
    }


def _fields(finding: Finding) -> dict[str, str]:
    return {
        "name": finding.name,
        "state": finding.state.value,
        "value": finding.value,
        "limit": finding.limit,
        "reason": finding.reason,
    }


def shown(
    report: Report, *, is_all: bool, checks: Mapping[str, Check] = BY_NAME
) -> str:
    """Return a report for a person, with problems first.

    Args:
      report: the findings.
      is_all: also show checks that are ok and each unknown check.
      checks: the checks of the report, by name.
    """
    lines = []
    for state in _ORDER:
        mine = [finding for finding in report.findings if finding.state is state]
        if state is State.OK and not is_all:
            mine = [finding for finding in mine if finding.reason]
        if state is State.UNKNOWN and not is_all:
            lines += _grouped(mine, is_plain=report.is_plain)
            mine = []
        for finding in mine:
            value = f" {finding.value}" if finding.value else ""
            limit = f" ({finding.limit})" if finding.limit else ""
            reason = f": {finding.reason}" if finding.reason else ""
            is_warning = state is State.OK and bool(finding.reason)
            word = "warning" if is_warning else state
            lines.append(f"{word:10} {finding.name}{value}{limit}{reason}")
            if state is State.FAILED or is_warning:
                lines.append(f"{'':10} -> {checks[finding.name].action}")
    lines.append(f"{socket.gethostname()} {_summary(report)}")
    return "\n".join(lines)


def _summary(report: Report) -> str:
    """Return how many checks were made, with which result, and how many were not."""
    count = collections.Counter(finding.state for finding in report.findings)
    num_unknown = count[State.UNKNOWN]
    num_made = len(report.findings) - num_unknown
    skipped = f"; {num_unknown} could not be made (unknown)" if num_unknown else ""
    if not report.is_ok:
        made = ", ".join(f"{count[state]} {state}" for state in _MADE)
        text = f"is NOT healthy: {made}{skipped}"
    elif num_unknown:
        text = f"has no fault in the {num_made} checks that were made{skipped}"
    else:
        text = f"is healthy: all {num_made} checks are ok"
    return f"{text}, in {report.seconds:.1f} s"


def _grouped(findings: Sequence[Finding], *, is_plain: bool) -> list[str]:
    """Return at most two lines for each area, and a last line about --all.

    Args:
      findings: unknown checks.
      is_plain: whether one line is enough for the checks of GPUs, RDMA and NCCL.
    """
    if not findings:
        return []
    areas: dict[str, dict[str, list[str]]] = {}
    for one in findings:
        # The checks of the doctor are in areas named after their groups.
        area = AREA_OF.get(one.name, one.name.partition(".")[0])
        areas.setdefault(area, {}).setdefault(one.reason, []).append(one.name)
    lines = []
    if is_plain:
        found = {name: areas.pop(name) for name in _TRAINING_AREAS if name in areas}
        number = sum(len(mine) for area in found.values() for mine in area.values())
        if number:
            lines.append(
                f"{State.UNKNOWN:10} {', '.join(found)}: no GPU and no RDMA device on "
                f"this host, which leaves out {number} checks"
            )
    for area, names in areas.items():
        if len(names) <= _MAX_REASONS:
            lines += [_named(mine, reason) for reason, mine in names.items()]
            continue
        common = max(names, key=lambda reason: len(names[reason]))
        number = sum(map(len, names.values()))
        lines.append(
            f"{State.UNKNOWN:10} {area}: {number} checks for {len(names)} reasons, "
            f"such as: {common}"
        )
    lines.append(f"{'':10} -> --all lists each of these checks with its reason")
    return lines


def _named(names: Sequence[str], reason: str) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{State.UNKNOWN:10} {', '.join(names[:_MAX_NAMES])}{more}: {reason}"


def listed() -> str:
    """Return all checks, one per line."""
    return "\n".join(
        f"{check.name:32} {check.what}  [{check.source.shown}]" for check in CHECKS
    )


def table() -> str:
    """Return all checks as a table: statement, limits, action."""
    limits = read_limits()
    lines = [
        "| check | on a healthy host | limit | action |",
        "|---|---|---|---|",
    ]
    for check in CHECKS:
        mine = dict(limits.get(check.name, {}))
        mine.pop("source", None)
        numbers = ", ".join(f"{name} {_plain(one)}" for name, one in mine.items())
        what = f"{check.what} (idle)" if check.needs_idle else check.what
        what = f"{what} (GPU or RDMA)" if check.for_training else what
        cells = (what, numbers, check.action)
        shown = " | ".join(cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| `{check.name}` | {shown} |")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
