"""Completed tests: their file, and the rules that decide which of them failed.

Input: a JSON or TOML file that a person or the runner has written. Output: outcomes
for the search.

    [[tests]]
    hosts = ["n1", "n2"]
    outcome = "pass"  # or "fail"
    seconds = 61.5    # needed with --slow
    output = "9f3c"   # needed with --same-output
    round = 1

A test fails if its command fails. With `--slow` it also fails if it took much longer
than the median of passed tests. With `--same-output` it also fails if its last line of
output is not the most frequent one.
"""

import dataclasses
import json
import os
import statistics
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mjax import checked_json
from mjax.health.bisect.problem import Outcome

LEAST_COMPARED = 4
"""Minimum number of groups of a round that are compared. With a bad host in one of four
groups, the median is still the time of good groups."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A completed test."""

    hosts: tuple[str, ...]
    outcome: Literal["pass", "fail"]
    seconds: float | None = None
    """Duration of the command in seconds."""
    output: str | None = None
    """Last line that the command printed."""
    round: int = 1
    """Number of the test's round in the search, from 1."""
    reason: str = ""
    """Why the command failed; empty if it succeeded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File:
    """Content of an outcomes file."""

    tests: tuple[Record, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Criteria:
    """Rules by which a test fails even if its command succeeds."""

    slow: float | None = None
    """Multiple of the median time above which a test is slow; None: ignore times."""
    same_output: bool = False
    """Whether all tests must print the same last line."""

    @property
    def is_compared(self) -> bool:
        """Whether any rule compares tests with each other."""
        return self.same_output or self.slow is not None


def read(path: Path) -> list[Record]:
    """Return the records of an outcomes file.

    Raises:
      ValueError: the file is absent, not JSON or TOML, or has an entry that is not an
        outcome; the message gives its position.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--outcomes {path} cannot be read: {error}") from error
    try:
        if path.suffix == ".toml":
            value = checked_json.check(tomllib.loads(text), _File)
        else:
            value = checked_json.read(text, _File)
    except ValueError as error:
        raise ValueError(
            f"--outcomes {path}: {error}; each test needs hosts and an outcome, pass "
            "or fail"
        ) from error
    for number, record in enumerate(value.tests, 1):
        if record.round < 1:
            raise ValueError(
                f"--outcomes {path}: test {number} has round {record.round}; the first "
                "round is 1"
            )
        if record.seconds is not None and not 0 <= record.seconds < float("inf"):
            raise ValueError(
                f"--outcomes {path}: test {number} took {record.seconds} seconds"
            )
    return list(value.tests)


def write(path: Path, records: Sequence[Record]) -> None:
    """Write an outcomes file as JSON, atomically."""
    tests = [dataclasses.asdict(record) for record in records]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps({"tests": tests}, indent=1) + "\n")
    os.replace(partial, path)


def as_toml(groups: Sequence[Sequence[str]], number: int, criteria: Criteria) -> str:
    """Return pending tests as TOML, for a person to fill in.

    A form with empty entries is refused when it is read.
    """
    lines = []
    for group in groups:
        lines += ["[[tests]]", f"hosts = {json.dumps(list(group))}"]
        lines += ['outcome = ""  # pass or fail']
        lines += ["seconds =   # that it took"] if criteria.slow is not None else []
        lines += ['output = ""  # its last line'] if criteria.same_output else []
        lines += [f"round = {number}", ""]
    return "\n".join(lines)


def judge(records: Sequence[Record], criteria: Criteria) -> list[Outcome]:
    """Decide which tests have failed.

    Returns:
      an outcome for each record; empty while there are too few records to compare.
    Raises:
      ValueError: a test lacks its seconds or output, or no output is the most frequent.
    """
    if criteria.is_compared and len(records) < LEAST_COMPARED:
        return []
    reference = _most_common(records) if criteria.same_output else None
    outcomes = []
    for number, record in enumerate(records, 1):
        failed = record.outcome == "fail"
        if criteria.slow is not None and not failed:
            if record.seconds is None:
                raise ValueError(
                    f"--slow needs the seconds of each test; test {number} has none"
                )
            median_s = statistics.median(_compared_seconds(record, records))
            failed = record.seconds > criteria.slow * median_s
        if criteria.same_output and not failed:
            failed = record.output != reference
        outcomes.append(Outcome(hosts=record.hosts, failed=failed))
    return outcomes


def _compared_seconds(record: Record, records: Sequence[Record]) -> list[float]:
    """Return the seconds of the passed tests that a test is compared with.

    In the first two rounds most groups are good, so a test is compared with its own
    round. Later about half of the groups have a bad host, so a test is compared with
    the first two rounds, or with its own round if fewer than `LEAST_COMPARED` tests of
    the first two passed.
    """
    own = (record.round,)
    candidates = (own, (1, 2), own) if record.round <= 2 else ((1, 2), own)
    found: list[list[float]] = []
    for rounds in candidates:
        found.append(
            [
                one.seconds
                for one in records
                if one.round in rounds
                and one.outcome == "pass"
                and one.seconds is not None
            ]
        )
        if len(found[-1]) >= LEAST_COMPARED:
            return found[-1]
    return max(found, key=len)


def _most_common(records: Sequence[Record]) -> str | None:
    """Return the most frequent output of passed tests; None if no test passed."""
    for number, record in enumerate(records, 1):
        if record.outcome == "pass" and not record.output:
            raise ValueError(
                f"--same-output needs the last line of each test; test {number} has no "
                "output"
            )
    passed = [one.output for one in records if one.outcome == "pass"]
    if not passed:
        return None
    (output, most), *others = Counter(passed).most_common(2)
    if most < 2 or (others and others[0][1] == most):
        raise ValueError(
            f"--same-output: no output is the most frequent of {len(passed)} passed "
            "tests; the command must print the same on all good hosts, with the same "
            "number of hosts"
        )
    return output
