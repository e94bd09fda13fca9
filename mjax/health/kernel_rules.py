"""Rules of `kernel_log.toml` that recognise faults in the kernel log.

Input: that file. Output: frozen, compiled rules; the first rule that matches a line
applies. Comments at the top of the file explain the fields and give the source of each
rule.
"""

import dataclasses
import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

RULES_PATH = Path(__file__).with_name("kernel_log.toml")
Kind = Literal["fatal", "counted", "told", "xid", "action"]
Heals = Literal["reboot", "repair", "reset", "itself"]
UNLISTED = "unlisted"
"""Name of the rule for a severe line that matches no other rule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A kind of line of the kernel log, and its meaning."""

    name: str
    check: str
    anchor: str
    pattern: re.Pattern[str]
    kind: Kind
    heals: Heals
    action: str
    source: str
    ended_by: str = ""

    @property
    def is_for_this_boot(self) -> bool:
        """Whether the fault lasts until a reboot or a repair."""
        return self.heals in ("reboot", "repair")


@dataclasses.dataclass(frozen=True)
class Allowed:
    """A line that looks like a fault but is not one."""

    pattern: re.Pattern[str]
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A match of a rule in a line."""

    rule: str
    device: str
    code: str
    count: int
    """Number of errors that the line reports."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of a file."""

    rules: Mapping[str, Rule]
    allowed: Sequence[Allowed]
    xids: Mapping[int, str]
    """Maps the number of an Xid to its kind."""
    xid_actions: Mapping[str, str]
    """Maps a kind of Xid to the action that an operator should take."""
    xid_names: Mapping[int, str]

    @property
    def anchors(self) -> list[bytes]:
        """Literal texts; every line that matches a rule contains at least one."""
        return [*dict.fromkeys(rule.anchor.encode() for rule in self.rules.values())]

    def match(self, line: str, *, is_severe: bool = False) -> Found | None:
        """Return the match of the first matching rule.

        Args:
          line: line of the kernel's log, without its time.
          is_severe: whether the level of the line means a fault; a severe line that
            matches no other rule matches `UNLISTED`.
        """
        found = _found(UNLISTED, {}) if is_severe else None
        for rule in self.rules.values():
            groups = rule.pattern.search(line) if rule.anchor in line else None
            if groups is not None:
                found = _found(rule.name, groups.groupdict())
                break
        if found and any(allowed.pattern.search(line) for allowed in self.allowed):
            return None
        return found


def _found(rule: str, groups: Mapping[str, str | None]) -> Found:
    return Found(
        rule=rule,
        device=groups.get("device") or "",
        code=groups.get("code") or "",
        count=int(groups.get("count") or 1),
    )


@functools.cache
def shipped() -> Rules:
    """Return the shipped rules."""
    return read(RULES_PATH)


def read(path: Path) -> Rules:
    """Return the rules of a file.

    Raises:
      ValueError: it is not TOML, or a rule has an unknown field; the message names the
        file.
    """
    try:
        return _rules(tomllib.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, re.error) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from error


def _rules(content: Mapping[str, Any]) -> Rules:
    unknown = content.keys() - {"rule", "allow", "xid"}
    if unknown:
        raise ValueError(f"unknown tables: {', '.join(sorted(unknown))}")
    rules = [_rule(fields) for fields in content["rule"]]
    xid = content["xid"]
    return Rules(
        rules={rule.name: rule for rule in rules},
        allowed=[
            Allowed(re.compile(allowed["pattern"]), allowed["reason"])
            for allowed in content["allow"]
        ],
        xids={n: kind["name"] for kind in xid["kind"] for n in kind["numbers"]},
        xid_actions={kind["name"]: kind["action"] for kind in xid["kind"]},
        xid_names={int(n): name for n, name in xid["names"].items()},
    )


def _rule(fields: Mapping[str, Any]) -> Rule:
    return Rule(**{**fields, "pattern": re.compile(fields["pattern"])})
