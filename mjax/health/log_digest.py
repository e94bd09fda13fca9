"""Count the faults in a kernel log in bounded memory.

Input: a log in pieces, of any length. Output: a `Digest`, also as JSON: each fault
found by a rule of `kernel_log.toml`, with its device, count, times and last line. A log
of 1 GB needs no more memory than one of 1 MB: pieces are searched one at a time, and
the number of different faults is limited.

Times: seconds since boot (`[  12.345678]`, of dmesg and of `journalctl -o
short-monotonic`), seconds since 1970 (`-o short-unix`), or ISO 8601 (`-o short-iso`,
`dmesg --time-format iso`). A line without a time, or with a time that is not of this
boot, counts as new. Source of the formats: dmesg(1) of util-linux, journalctl(1) of
systemd.
"""

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence

from mjax import checked_json
from mjax.health import kernel_rules
from mjax.health.findings import KEPT_TEXTS, UnreadableError
from mjax.health.kernel_rules import UNLISTED, Found, Rules
from mjax.health.sources import Reading

CHUNK_BYTES = 2**20
MAX_LINE_BYTES = 2**13
"""Maximum length of a line that may be a fault. A record of /dev/kmsg has the same
maximum. A longer line is not searched, and the digest says so."""
BOOT_S = 300.0
"""Seconds after which a boot has ended. Drivers of a host with eight GPUs load within
five minutes."""
AT_BOOT = "at boot"
"""Code of a match of `UNLISTED` in the first `BOOT_S` seconds after the last boot."""
_MOST_KEYS = 64
"""Number of different faults of a rule that are counted separately. It is more than a
host has devices of a kind. The rest are summed under the device `others`."""
_MOST_CACHED = 1024
"""Number of messages whose match is cached. A flood repeats a few."""
_SHOWN_CHARS = 300
OLD_H = 168
"""Ages are counted up to this limit of a week. The shipped limits cover a day."""
_HEAD_BYTES = 2**12  # part of a piece that is searched for the first time of the log
_SLACK_S = 60.0  # the clock of the log may be ahead of ours
_OLDEST_S = 10 * 365 * 86400.0

_LEVEL = re.compile(r"^<[0-9]+>")
_TIME = re.compile(
    r"^(?:<[0-9]+>)?(?:"
    r"\[ *([0-9]{1,9}\.[0-9]+)\]"  # since boot
    r"|([0-9]{9,11}\.[0-9]+) "  # since 1970
    r"|([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:[.,][0-9]+)?"
    r"(Z|[+-][0-9]{2}:?[0-9]{2}) "
    r"|.{0,80}?kernel: \[ *([0-9]{1,9}\.[0-9]+)\])"  # since boot, after syslog's time
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Now:
    """The time at which a log is read."""

    unix_s: float
    uptime_s: float


@dataclasses.dataclass(kw_only=True)
class Match:
    """The matching lines of one rule, device and code."""

    rule: str
    device: str
    code: str
    count: int = 0
    """Number of errors: one per line, or the number in the line."""
    hours: dict[str, int] = dataclasses.field(default_factory=dict)
    """Maps an age in whole hours, at most `OLD_H`, to the number of errors of that
    age."""
    first: str = ""
    """Time of the first of these lines, in ISO 8601, UTC; empty if none has a time."""
    last: str = ""
    """As `first`, of the last line."""
    last_index: int = 0
    """Position of the last of these lines among the matching lines of all rules, from
    1."""
    line: str = ""
    """The last matching line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digest:
    """The faults of a log."""

    read_from: str
    is_severe: bool
    """Whether the log has only lines of severe levels, so that it is normally empty."""
    num_lines: int
    num_bytes: int
    num_long: int
    """Number of lines that were too long to search."""
    begin: str
    """Time of the first line that has a time, in ISO 8601, UTC; empty if none has."""
    matches: Sequence[Match]


class Scanner:
    """Builds a digest of a log that arrives in pieces."""

    def __init__(
        self,
        read_from: str,
        at: Now,
        *,
        is_severe: bool = False,
        rules: Rules | None = None,
    ) -> None:
        """Begin with an empty digest.

        Args:
          read_from: origin of the log.
          at: the present time, from which ages are counted.
          is_severe: see `logs.Log`.
          rules: rules to apply; None: the shipped rules.
        """
        self._rules = rules or kernel_rules.shipped()
        self._anchors = [b"\n"] if is_severe else self._rules.anchors
        self._read_from, self._now, self._is_severe = read_from, at, is_severe
        self._rest, self._is_in_long = b"", False
        self.num_bytes, self._num_lines, self._num_long = 0, 0, 0
        self._begin = ""
        # A host that floods its log repeats the same lines.
        self._match = functools.lru_cache(_MOST_CACHED)(
            functools.partial(self._rules.match, is_severe=is_severe)
        )
        self._matches: dict[tuple[str, str, str], Match] = {}
        self._ages: dict[tuple[str, str, str], tuple[float, float]] = {}
        self._keys: dict[str, int] = {}
        self._num_matches = 0

    def feed(self, data: bytes) -> None:
        """Search the next piece of the log, which may end inside a line."""
        self.num_bytes += len(data)
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        start = 0
        if end and self._is_in_long:
            start, self._is_in_long = data.find(b"\n") + 1, False
        if len(self._rest) > CHUNK_BYTES:
            self._num_long += not self._is_in_long
            self._is_in_long = True
        if self._is_in_long:
            self._rest = self._rest[-1:]
        self._num_lines += data.count(b"\n", start, end)
        self._search(data[start:end])

    def _search(self, data: bytes) -> None:
        """Search whole lines."""
        for line in data[:_HEAD_BYTES].split(b"\n") if not self._begin else ():
            age_s, _ = split_time(_decoded(line), self._now)
            self._begin = self._begin or self._when(age_s)
        for start, stop in sorted(_spans(data, self._anchors)):
            if stop - start > MAX_LINE_BYTES:
                self._num_long += 1
                continue
            age_s, message = split_time(_decoded(data[start:stop]), self._now)
            found = self._match(message)
            if found is not None:
                self._add(found, age_s, message)

    def _add(self, found: Found, age_s: float | None, message: str) -> None:
        key = (found.rule, found.device, found.code)
        since_boot_s = BOOT_S if age_s is None else self._now.uptime_s - age_s
        if found.rule == UNLISTED and 0 <= since_boot_s < BOOT_S:
            key = (found.rule, found.device, AT_BOOT)
        if key not in self._matches:
            self._keys[found.rule] = self._keys.get(found.rule, 0) + 1
            if self._keys[found.rule] > _MOST_KEYS:
                key = (found.rule, "others", "")
        match = self._matches.setdefault(
            key, Match(rule=key[0], device=key[1], code=key[2])
        )
        self._num_matches += 1
        hours = str(_hours(age_s))
        match.count += found.count
        match.hours[hours] = match.hours.get(hours, 0) + found.count
        match.last_index = self._num_matches
        match.line = message
        if age_s is not None:  # `digest` formats it: formatting is slow
            first_s, _ = self._ages.get(key, (age_s, age_s))
            self._ages[key] = (first_s, age_s)

    def _when(self, age_s: float | None) -> str:
        """Return the time of a line of this age in ISO 8601; "" if the age is None."""
        if age_s is None:
            return ""
        when = datetime.datetime.fromtimestamp(self._now.unix_s - age_s, datetime.UTC)
        return when.strftime("%Y-%m-%dT%H:%M:%SZ")

    def digest(self) -> Digest:
        """Return the faults found so far, in terminated lines."""
        for key, match in self._matches.items():
            first_s, last_s = self._ages.get(key, (None, None))
            match.first, match.last = self._when(first_s), self._when(last_s)
            match.line = match.line.strip()[:_SHOWN_CHARS]
        return Digest(
            read_from=self._read_from,
            is_severe=self._is_severe,
            num_lines=self._num_lines,
            num_bytes=self.num_bytes,
            num_long=self._num_long,
            begin=self._begin,
            matches=[*self._matches.values()],
        )

    def reading(self) -> Reading:
        """Return the digest as JSON, marked truncated if the log ends inside a line."""
        text = json.dumps(dataclasses.asdict(self.digest()), indent=1) + "\n"
        return Reading(text=text, num_bytes=len(text) + (self._rest != b""))


def _decoded(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _spans(data: bytes, anchors: Sequence[bytes]) -> set[tuple[int, int]]:
    """Return (start, end) of each line with an anchor; all lines must be complete."""
    spans = set()
    for anchor in anchors:
        at = data.find(anchor)
        while at >= 0:
            start, stop = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
            spans.add((start, stop))
            at = data.find(anchor, stop + 1)
    return spans


def split_time(line: str, at: Now) -> tuple[float | None, str]:
    """Return the age of a line in seconds, and the text after its time.

    The age is None if the line has no time, or a time that is not of this boot.
    """
    found = _TIME.match(line)
    if found is None:
        return None, _LEVEL.sub("", line)
    rest = line[found.end() :]
    since_boot, unix, iso, zone, after_host = found.groups()
    if since_boot or after_host:
        age_s = at.uptime_s - float(since_boot or after_host)
        return age_s if age_s > -_SLACK_S else None, rest  # None: of another boot
    if unix:
        return _sane(at.unix_s - float(unix)), rest
    try:
        then = datetime.datetime.fromisoformat(iso + zone)
    except ValueError:
        return None, line
    return _sane(at.unix_s - then.timestamp()), rest


def _sane(age_s: float) -> float | None:
    """Return the age in seconds, or None if it is out of range."""
    return age_s if -_SLACK_S < age_s < _OLDEST_S else None


def _hours(age_s: float | None) -> int:
    """Return the age in whole hours, at most `OLD_H`; 0 if it is None."""
    return 0 if age_s is None else min(OLD_H, int(max(0.0, age_s) // 3600))


@functools.lru_cache(KEPT_TEXTS)
def digest(text: str) -> Digest:
    """Return a digest from its JSON.

    Raises:
      UnreadableError: it is not a digest, or the log was not fully searched.
    """
    try:
        found: Digest = checked_json.read(text, Digest)
        ages = [int(age) for m in found.matches for age in m.hours]
    except ValueError as error:
        raise UnreadableError(str(error)) from error
    if found.num_lines < 1 and not found.is_severe:
        raise UnreadableError("it has no line")
    if found.num_lines > 0 and not found.begin:
        raise UnreadableError("no line has a time: it is not a kernel log")
    if found.num_long:
        raise UnreadableError(f"{found.num_long} lines are too long for a log")
    known = kernel_rules.shipped().rules.keys() | {UNLISTED}
    if any(m.rule not in known or m.count < 1 for m in found.matches) or any(
        age < 0 for age in ages
    ):
        raise UnreadableError(
            "it has an unknown rule, or a count or an age out of range"
        )
    return found


def recent(hours: Mapping[str, int], window_h: int) -> int:
    """Return the number of errors that are younger than window_h hours.

    Args:
      hours: see `Match.hours`.
      window_h: number of hours.
    """
    return sum(count for age, count in hours.items() if int(age) < window_h)
