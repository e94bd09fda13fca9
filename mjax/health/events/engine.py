"""Detect events in the lines of a log, in bounded memory.

Input: rules and lines. Output: `Detection`s. A rule fires if `Rule.count` lines of one
device match it within `Rule.within_s` seconds. Times come from the log, so the result
does not depend on the speed of arrival. A late line is counted at its own time, and a
repeated line is counted once. For each rule and device, the times of at most 4 `count`
lines are kept. Pure: no clock, no file.
"""

import bisect
import collections
import dataclasses
from collections.abc import Mapping, Sequence

from mjax.health.events.logs import Line
from mjax.health.events.rules import Rule, filled

MAX_KEYS = 10_000
"""Maximum number of pairs of a rule and a device. It is enough for ten rules over a
fabric of 1,000 ports."""
_KEPT = 4
"""Timestamps kept per rule and device, as a multiple of `count`. Until a rule fires,
each period of `within_s` has fewer than `count` timestamps, so 4 `count` timestamps
cover more than 4 `within_s`. A line that is up to 3 `within_s` late is therefore still
compared with all lines of the `within_s` before it. The value 4 is a choice, not a
measurement."""
_NS = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection:
    """A rule that fired."""

    rule: Rule
    time_ns: int
    """Time of the latest line that made it fire."""
    first_ns: int
    count: int
    device: Mapping[str, str]
    """Values of the groups in `Rule.by`, and the host if the log names it."""
    values: Mapping[str, str]
    """Values to fill into the templates of the rule."""
    line: Line


@dataclasses.dataclass(kw_only=True)
class Counts:
    """Number of matches of lines with rules, and of matches that were not counted."""

    matched: int = 0
    duplicates: int = 0
    cooling: int = 0
    """Matches within the cool-down of an event."""
    untimed: int = 0
    """Matches that were not counted because no line so far had a time, and the rule
    needs several lines."""
    dropped_keys: int = 0
    """Number of devices that were forgotten because there were too many."""


@dataclasses.dataclass(slots=True)
class _Window:
    """State of one device for one rule."""

    times_ns: list[int]
    """Times of matching lines, sorted."""
    seen: collections.deque[int]
    """Hashes of the latest lines."""
    fired_ns: int | None = None


_Key = tuple[int, int, str, tuple[str, ...]]


class Engine:
    """Applies rules to the lines of one log."""

    def __init__(self, rules: Sequence[Rule], *, max_keys: int = MAX_KEYS) -> None:
        """Start before the first line."""
        self._rules = [(i, rule, rule.regex) for i, rule in enumerate(rules)]
        self._max_keys = max_keys
        self._windows: collections.OrderedDict[_Key, _Window] = (
            collections.OrderedDict()
        )
        self.counts = Counts()

    @property
    def num_keys(self) -> int:
        """Number of pairs of a rule and a device that are remembered."""
        return len(self._windows)

    def feed(self, line: Line) -> list[Detection]:
        """Return the events that a line completes, in the order of the rules."""
        found = []
        for index, rule, regex in self._rules:
            if rule.log not in ("any", line.kind):
                continue
            match = regex.search(line.text)
            if match is not None:
                self.counts.matched += 1
                groups = {k: v or "" for k, v in match.groupdict().items()}
                detection = self._count(index, rule, line, groups)
                if detection is not None:
                    found.append(detection)
        return found

    def _count(
        self, index: int, rule: Rule, line: Line, groups: dict[str, str]
    ) -> Detection | None:
        """Count a line that matched; return the event that it completes."""
        if line.time_ns is None and rule.count > 1:
            self.counts.untimed += 1
            return None
        time_ns = line.time_ns or 0
        # UFM runs on two machines that take over from each other, so the name of the
        # machine is not part of a port's identity.
        host = "" if line.kind == "ufm" else line.host or ""
        device = {name: groups[name] for name in rule.by}
        window = self._window((index, line.boot, host, tuple(device.values())), rule)
        if not self._is_new(window, rule, line):
            return None
        span = _completed(window.times_ns, time_ns, rule)
        if span is None:
            return None
        window.times_ns.clear()
        window.fired_ns = span[1]
        if host and "host" not in device:
            device["host"] = host
        values = {
            "rule": rule.name,
            "host": host,
            "count": str(rule.count),
            "within_s": f"{rule.within_s:g}",
        }
        return Detection(
            rule=rule,
            time_ns=span[1],
            first_ns=span[0],
            count=rule.count,
            device=device,
            values=values | groups,
            line=line,
        )

    def _is_new(self, window: _Window, rule: Rule, line: Line) -> bool:
        """Return whether a line is neither a duplicate nor within a cool-down."""
        time_ns = line.time_ns or 0
        mark = hash((time_ns, line.text))
        if line.time_ns is not None and mark in window.seen:
            self.counts.duplicates += 1
            return False
        window.seen.append(mark)
        if (
            window.fired_ns is not None
            and abs(time_ns - window.fired_ns) < rule.cool_down_s * _NS
        ):
            self.counts.cooling += 1
            return False
        return True

    def _window(self, key: _Key, rule: Rule) -> _Window:
        window = self._windows.get(key)
        if window is None:
            window = _Window([], collections.deque(maxlen=_KEPT * rule.count))
            self._windows[key] = window
            if len(self._windows) > self._max_keys:
                self._windows.popitem(last=False)
                self.counts.dropped_keys += 1
        self._windows.move_to_end(key)
        return window


def _completed(times_ns: list[int], time_ns: int, rule: Rule) -> tuple[int, int] | None:
    """Add a time to the sorted list; return the event that this time completes.

    Returns:
      the first and the last of `rule.count` times within `rule.within_s` seconds; None
      if there are too few.
    """
    at = bisect.bisect_right(times_ns, time_ns)
    times_ns.insert(at, time_ns)
    for last in range(max(at, rule.count - 1), min(at + rule.count, len(times_ns))):
        first = last - rule.count + 1
        if times_ns[last] - times_ns[first] <= rule.within_s * _NS:
            return times_ns[first], times_ns[last]
    if len(times_ns) > _KEPT * rule.count:
        del times_ns[0]
    return None


def text_of(detection: Detection, template: str) -> str:
    """Return a filled template of the rule that fired."""
    return filled(template, detection.values)
