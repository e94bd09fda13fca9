"""Rules over logs, read from TOML and checked before any line is read.

Input: a TOML file with `[[rule]]` tables and an optional `[limits]` table. Output: a
`RuleSet`. A wrong rule is refused here, with its name, because an error at the first
match would come too late.
"""

import dataclasses
import difflib
import re
import string
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from mjax import checked_json
from mjax.health.events import patterns

Policy = Literal["tell", "confirm", "run"]
Severity = Literal["info", "warning", "error"]
LogKind = Literal["any", "kernel", "syslog", "ufm"]
GIVEN = ("rule", "host", "count", "within_s")
"""Names that every template may use, besides the groups of the pattern of its rule."""
_MAX_COUNT = 10_000
"""Maximum `count`. With it, the timestamps that are kept for one device take 0.5 MB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventText:
    """The record that is written when a rule fires."""

    kind: str
    """One word, for programs."""
    text: str
    """Template of the text for a person."""
    severity: Severity = "warning"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule fires if `count` lines of a device match it within `within_s` seconds."""

    name: str
    pattern: str
    """Regular expression, searched for in a line; named groups fill templates."""
    event: EventText
    log: LogKind = "any"
    """Kind of log to whose lines the rule applies."""
    count: int = 1
    within_s: float = 0.0
    """Maximum seconds, inclusive, from the first of the `count` lines to the last."""
    by: tuple[str, ...] = ()
    """Groups of `pattern` that identify a device. Lines are counted separately for each
    device."""
    cool_down_s: float = 3600.0
    """Cool-down after an event, in seconds of log time. Until it is over, lines of the
    same device cause no other event of this rule."""
    action: tuple[str, ...] = ()
    """Command that disables a device: a list of templates, one per argument. It runs
    without a shell. Running it twice must do no harm."""
    test: tuple[str, ...] = ()
    """Command that tests the device; it must exit with 0 before `undo` runs."""
    undo: tuple[str, ...] = ()
    """Command that enables the device again."""
    test_after_s: float = 600.0
    """Log time in seconds from the action to the first test, and between two tests."""
    max_tests: int = 3
    """Number of failed tests after which only a person can enable the device."""
    limit_s: float = 60.0
    """Time limit of each command, seconds of wall time."""
    policy: Policy = "confirm"
    """tell: show the commands, never run them; confirm: run them with --yes; run: run
    them."""
    ticket: str = ""
    """Template of the text of a ticket."""
    source: str = ""
    """Source of the pattern and of the numbers."""

    def __post_init__(self) -> None:
        """Check everything that does not depend on other rules."""
        if not re.fullmatch(r"[\w.-]{1,64}", self.name):
            raise ValueError("name must be 1 to 64 letters, digits, '_', '.' or '-'")
        groups = self.regex.groupindex
        for name in self.by:
            _known(name, groups, "by: the pattern has no group")
        _check_numbers(self)
        _check_actions(self)
        texts = {"event.text": self.event.text, "ticket": self.ticket}
        for field, template in texts.items():
            check_template(template, (*groups, *GIVEN), field)
        for field in ("action", "test", "undo"):
            for word in getattr(self, field):
                check_template(word, (*groups, *GIVEN), field)

    @property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern, which `re` caches."""
        return patterns.compiled(self.pattern)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Number of devices that these rules may disable at the same time.

    2 covers the two ends of one link. If more devices fail at once, the fault is in a
    switch, a power supply, the log or a rule, and disabling more devices does not fix
    it. In a small fabric 5 percent may be less than 2; the smaller number applies."""

    max_disabled: int = 2
    max_disabled_percent: float = 5.0
    """Maximum in percent of num_devices."""
    num_devices: int | None = None
    """Number of all devices; None: unknown, and the percentage does not apply."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.max_disabled < 0:
            raise ValueError(
                f"max_disabled must be at least 0, got {self.max_disabled}"
            )
        if not 0 <= self.max_disabled_percent <= 100:
            percent = f"{self.max_disabled_percent:g}"
            raise ValueError(f"max_disabled_percent must be 0 to 100, got {percent}")
        if self.num_devices is not None and self.num_devices < 1:
            raise ValueError(f"num_devices must be at least 1, got {self.num_devices}")

    @property
    def most(self) -> int:
        """Number of devices that may be disabled at the same time."""
        if self.num_devices is None:
            return self.max_disabled
        share = int(self.num_devices * self.max_disabled_percent / 100 + 1e-9)
        return min(self.max_disabled, share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleSet:
    """All rules of a file."""

    rules: tuple[Rule, ...]
    limits: Limits = Limits()


def read(path: Path) -> RuleSet:
    """Read the rules of a file; raises as `parse`."""
    try:
        text = path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"--rules {path} cannot be read: {error}") from error
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"--rules {path}: {error}") from error


def parse(text: str) -> RuleSet:
    """Return the rules of a TOML text.

    Raises:
      ValueError: the text is not TOML, or a rule is wrong; the message names the rule.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not TOML: {error}") from error
    for name in tables:
        _known(name, ("rule", "limits"), "unknown table")
    found = tables.get("rule", [])
    if not isinstance(found, list) or not found:
        raise ValueError("there is no rule; write at least one [[rule]] table")
    rules = tuple(_rule(table, i) for i, table in enumerate(found, 1))
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two rules are named {name}; rename one")
    limits = tables.get("limits", {})
    try:
        return RuleSet(rules=rules, limits=_made(limits, Limits))
    except ValueError as error:
        raise ValueError(f"limits: {error}") from error


def _rule(table: Any, number: int) -> Rule:
    name = table.get("name") if isinstance(table, dict) else None
    shown = f"rule {name}" if isinstance(name, str) else f"rule {number} (no name)"
    try:
        return _made(table, Rule)
    except ValueError as error:
        raise ValueError(f"{shown}: {error}") from error


def _made(table: Any, cls: Any) -> Any:
    """Convert a table to a dataclass; for an unknown key, suggest the nearest one."""
    if isinstance(table, dict):
        fields = {field.name for field in dataclasses.fields(cls)}
        for key in table:
            _known(key, fields, "unknown key")
        inner = table.get("event")
        if cls is Rule and isinstance(inner, dict):
            for key in inner:
                _known(key, ("kind", "text", "severity"), "unknown key event:")
    return checked_json.check(table, cls)


def _known(name: str, names: Collection[str], what: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"
        raise ValueError(f"{what} {name}{hint}")


def _check_numbers(rule: Rule) -> None:
    if not 1 <= rule.count <= _MAX_COUNT:
        raise ValueError(f"count must be 1 to {_MAX_COUNT}, got {rule.count}")
    if rule.max_tests < 1:
        raise ValueError(f"max_tests must be at least 1, got {rule.max_tests}")
    for field in ("within_s", "cool_down_s", "test_after_s", "limit_s"):
        value = getattr(rule, field)
        if not 0 <= value <= 1e9:
            raise ValueError(f"{field} must be 0 to 1e9 seconds, got {value:g}")
    if rule.count > 1 and rule.within_s == 0:
        raise ValueError(f"count {rule.count} needs within_s above 0")
    if rule.limit_s == 0:
        raise ValueError("limit_s must be above 0")


def _check_actions(rule: Rule) -> None:
    if bool(rule.test) != bool(rule.undo) or (rule.undo and not rule.action):
        raise ValueError(
            "test and undo need each other and an action, because a device is enabled "
            "again only after a passed test; give all three, or the action alone"
        )
    if rule.action and not rule.by:
        raise ValueError("an action needs `by`: the groups that name the device")
    for field in ("action", "test", "undo"):
        argv = getattr(rule, field)
        if argv and (not argv[0] or "{" in argv[0] or argv[0].startswith("-")):
            raise ValueError(
                f"{field}: the program must be a fixed name, got {argv[0]!r}: a log "
                "must not choose which program runs"
            )


def check_template(template: str, names: Collection[str], field: str) -> None:
    """Refuse a template whose braces contain anything but a known name.

    Args:
      template: text with {names}.
      names: the known names.
      field: field of the rule, for the message.
    Raises:
      ValueError: the message has the field, and the nearest known name.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{field}: {template!r}: {error}") from error
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if spec or conversion or not name.isidentifier():
            raise ValueError(f"{field}: {template!r}: only plain {{names}} are allowed")
        _known(name, names, f"{field}: {template!r} uses an unknown name:")


def filled(template: str, values: Mapping[str, str]) -> str:
    """Fill the names of a template that `check_template` has accepted."""
    parts = string.Formatter().parse(template)
    return "".join(t + (values[n] if n is not None else "") for t, n, _, _ in parts)
