"""Cases of checks: a recorded output, words that are changed in it, and the verdict.

tests/health/fixtures/GROUP/cases.toml has those of a group; `about` there says where
the formats are from.
"""

import dataclasses
import functools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.health.check import Check, judge
from mjax.health.checks.table import BY_NAME
from mjax.health.findings import Finding, State
from mjax.health.settings import Settings, read_limits
from mjax.health.sources import Reading

FIXTURES_DIR = Path(__file__).parent / "fixtures"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An output and what a check must say of it."""

    check: str
    state: State
    group: str
    file: str
    replace: Sequence[Sequence[str]] = ()
    """(old, new), in this order; each old must occur."""
    after: str = ""
    """Replace only in what follows this text, which must occur; for one of several
    devices."""
    before: str = ""
    """Replace only in what stands in front of this text; sought behind `after`."""
    expect: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    status: int = 0
    value: str = ""
    """What it shows as the value; empty: not compared."""
    reason: str = ""
    """Words that the reason must have."""

    @property
    def text(self) -> str:
        """The output."""
        text, kept, rest = fixture(self.group, self.file), "", ""
        if self.after:
            assert self.after in text, f"{self.group}/{self.file}: {self.after!r}"
            kept, _, text = text.partition(self.after)
            kept += self.after
        if self.before:
            assert self.before in text, f"{self.group}/{self.file}: {self.before!r}"
            text, _, rest = text.partition(self.before)
            rest = self.before + rest
        for old, new in self.replace:
            assert old in text, f"{self.group}/{self.file} has no {old!r}"
            text = text.replace(old, new)
        return kept + text + rest

    def play(self, check: Check | None = None) -> Finding:
        """Let the check judge it; another one than that of the table, if given."""
        text = self.text
        num_bytes = len(text.encode(errors="surrogateescape"))
        reading = Reading(text=text, status=self.status, num_bytes=num_bytes)
        return judge(check or BY_NAME[self.check], reading, self.settings)

    @property
    def settings(self) -> Settings:
        """What it is compared with."""
        return Settings(limits=limits(), expect=self.expect)

    def is_met_by(self, finding: Finding) -> bool:
        """Say whether that is what the check must say."""
        return (
            finding.state is self.state
            and self.reason in finding.reason
            and self.value in ("", finding.value)
        )


@functools.cache
def limits() -> Mapping[str, Mapping[str, Any]]:
    """Return the limits that are shipped."""
    return read_limits()


@functools.cache
def fixture(group: str, file: str) -> str:
    """Return a recorded output."""
    return (FIXTURES_DIR / group / file).read_bytes().decode(errors="surrogateescape")


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return all cases."""
    found = []
    for path in sorted(FIXTURES_DIR.glob("*/cases.toml")):
        content = tomllib.loads(path.read_text())
        assert content["about"], path
        for fields in content["case"]:
            state = State(fields.pop("state"))
            found.append(Case(state=state, group=path.parent.name, **fields))
    return tuple(found)


def of_check(name: str) -> list[Case]:
    """Return the cases of one check."""
    return [case for case in cases() if case.check == name]
