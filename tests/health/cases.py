"""Cases of checks: a recorded output, replacements in it, and the expected verdict.

tests/health/fixtures/GROUP/cases.toml has the cases of a group; its key `about` gives
the sources of the formats.
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
from mjax.health.log_digest import Now, Scanner
from mjax.health.logs import Log
from mjax.health.settings import Settings, read_limits
from mjax.health.sources import Reading

NOW = Now(unix_s=1717200000.0, uptime_s=864000.0)
"""Time at which kernel logs are read: 2024-06-01 0:00 UTC, 10 days after boot."""
FIXTURES_DIR = Path(__file__).parent / "fixtures"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An output and the expected finding of a check."""

    check: str
    state: State
    group: str
    file: str
    replace: Sequence[Sequence[str]] = ()
    """Replacements (old, new), applied in this order; each old must occur."""
    after: str = ""
    """Replace only after this text, which must occur; selects one of several
    devices."""
    before: str = ""
    """Replace only before this text, which is searched after `after`."""
    expect: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    status: int = 0
    error: str = ""
    """Text that the command writes to stderr."""
    value: str = ""
    """Expected value of the finding; "" compares none."""
    limit: str = ""
    """Expected limit of the finding; "" compares none."""
    reason: str = ""
    """Text that the reason must contain."""

    @property
    def text(self) -> str:
        """Input of the check: the output, or the digest of a log."""
        return self.reading.text

    @functools.cached_property
    def reading(self) -> Reading:
        """The reading of the check's source."""
        text, source = self.output, BY_NAME[self.check].source
        data = text.encode(errors="surrogateescape")
        if isinstance(source, Log):
            scanner = Scanner(self.file, NOW, is_severe=source.is_severe)
            scanner.feed(data)
            return dataclasses.replace(scanner.reading(), status=self.status)
        return Reading(
            text=text, status=self.status, num_bytes=len(data), error=self.error
        )

    @property
    def output(self) -> str:
        """The text of the file after the replacements."""
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
        """Judge the case with the check of the table, or with the given check."""
        return judge(check or BY_NAME[self.check], self.reading, self.settings)

    @property
    def settings(self) -> Settings:
        """Limits and expectations for the check."""
        return Settings(limits=limits(), expect=self.expect)

    def is_met_by(self, finding: Finding) -> bool:
        """Return whether a finding is the expected one."""
        return (
            finding.state is self.state
            and self.reason in finding.reason
            and self.value in ("", finding.value)
            and self.limit in ("", finding.limit)
        )


@functools.cache
def limits() -> Mapping[str, Mapping[str, Any]]:
    """Return the shipped limits."""
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
            _ = found[-1].reading  # now, and not while an example is drawn
    return tuple(found)


def of_check(name: str) -> list[Case]:
    """Return the cases of one check."""
    return [case for case in cases() if case.check == name]
