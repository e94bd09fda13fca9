"""The result of `health burn`: checks with one of four states, as JSON and as a table.

Input: checks. Output: text. `{"ok", "host", "hardware", "checks": [{"name", "state",
"value", "limit", "reason", "unit"}]}` is the format that the launcher's --check-command
reads.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mjax import checked_json
from mjax.health.burn.measurements import is_within
from mjax.health.findings import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Result of judging one measurement."""

    name: str
    state: State
    value: float | None
    limit: float | None
    """Smallest value that is ok; None: no limit."""
    reason: str
    unit: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Result of judging a host."""

    ok: bool
    host: str
    hardware: str
    checks: tuple[Check, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Check:
    """A check as a result file has it, with its state as a word."""

    name: str
    state: Literal["ok", "failed", "unknown", "incomplete"]
    value: float | None
    limit: float | None
    reason: str
    unit: str

    def __post_init__(self) -> None:
        if self.value is not None and not 0 < self.value < float("inf"):
            raise ValueError(f"{self.name} must be positive, got {self.value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Result:
    """The content of a result file."""

    ok: bool
    host: str
    hardware: str
    checks: tuple[_Check, ...]


def is_passed(checks: Sequence[Check], required: Sequence[str]) -> bool:
    """Return whether a host has passed.

    A host has not passed if a check failed or did not complete, if a required check is
    unknown, or if no check is ok, because then nothing is known about the host.
    """
    states = {check.state for check in checks}
    return (
        State.OK in states
        and not {State.FAILED, State.INCOMPLETE} & states
        and not any(
            check.state is not State.OK and is_within(check.name, one)
            for check in checks
            for one in required
        )
    )


def to_json(result: Result) -> str:
    """Return one JSON object, on one line."""
    return json.dumps(dataclasses.asdict(result))


def read_result(path: Path) -> Result:
    """Read the result of a host.

    Raises:
      ValueError: it cannot be read or is not valid; the message names the file.
    """
    try:
        found: _Result = checked_json.read(path.read_bytes(), _Result)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--compare {path}: {error}; give files written by burn --out"
        ) from error
    checks = tuple(
        Check(
            name=one.name,
            state=State(one.state),
            value=one.value,
            limit=one.limit,
            reason=one.reason,
            unit=one.unit,
        )
        for one in found.checks
    )
    return Result(ok=found.ok, host=found.host, hardware=found.hardware, checks=checks)


def to_table(result: Result) -> str:
    """Return the result as lines for a person."""
    rows = [("", "measurement", "value", "at least", "unit", "reason")]
    for check in result.checks:
        value, limit = _shown(check.value), _shown(check.limit)
        rows.append((check.state, check.name, value, limit, check.unit, check.reason))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[5]]).rstrip())
    counts = ", ".join(
        f"{sum(check.state is state for check in result.checks)} {state}"
        for state in State
    )
    verdict = "passed" if result.ok else "not passed"
    return "\n".join(
        [*lines, f"{result.host}: {verdict} ({counts}), {result.hardware}"]
    )


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
