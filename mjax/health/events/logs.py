"""Lines of logs with their times: dmesg, syslog, and the event log of UFM.

Input: bytes in pieces of any size. Output: `Line`s, each of at most `MAX_LINE_BYTES`,
with the time from the log. No clock is read here. Times without a zone are in the zone
given by the caller.

Sources of the formats:
- dmesg(1), https://man7.org/linux/man-pages/man1/dmesg.1.html: seconds since boot in
  brackets; `-T` and `--time-format iso`.
- syslog: RFC 3164 section 4.1.2 (no year) and RFC 5424 section 6.2.3, as rsyslog and
  `journalctl -o short-iso` write them.
- UFM: regular expressions of readers of /opt/ufm/log/event.log in
  https://github.com/imbue-ai/cluster-health (ufm_events/find_problematic_events.py) and
  https://github.com/Mellanox/ufm_sdk_3.0 (log analyzer); a line through syslog in the
  documentation of IBM's Cluster System Management ("Unified Fabric Manager").
"""

import dataclasses
import datetime
import functools
import re
from collections.abc import Iterator
from typing import Literal

Kind = Literal["kernel", "syslog", "ufm", "other"]
MAX_LINE_BYTES = 4096
"""Maximum length of a line; the rest is dropped. It is four times the kernel's maximum
of 1024 bytes; UFM lines have 200 to 400."""
_SECOND_NS = 10**9
_MAX_S = 7_258_118_400
"""Latest time of a line, the year 2200. With the delay of a test it is below 2^63
nanoseconds, which SQLite holds, and datetime can show it."""
_NEW_BOOT_NS = 60 * _SECOND_NS
"""A larger backward jump of the seconds since boot means a new boot. Lines of several
processors are out of order by milliseconds."""
_MONTHS = (
    *("Jan", "Feb", "Mar", "Apr", "May", "Jun"),
    *("Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
)

_UFM = re.compile(
    r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)\.(\d{1,9}) \[\d+\] \[\d+\] [A-Z]+ "
)
_BOOT = re.compile(r"(?:<\d{1,3}>)?\[ {0,12}(\d{1,10})\.(\d{1,9})\] ?")
_HUMAN = re.compile(
    r"\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) [ ]?(\d{1,2}) (\d\d:\d\d:\d\d) (\d{4})\] ?"
)
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)? "
)
_RFC3164 = re.compile(
    r"(?:<\d{1,3}>)?([A-Z][a-z]{2}) [ ]?(\d{1,2}) (\d\d:\d\d:\d\d) ([^ ]+) "
)
_HOST = re.compile(r"([^ ]{1,255}) ([^ \[:]{1,64})(?:\[\d{1,10}\])?:(?: |$)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a log."""

    text: str
    """The whole line as written, with U+FFFD for bytes that are not UTF-8."""
    kind: Kind
    """Kind of the previous line if this one has no time, as in a multi-line message."""
    time_ns: int | None
    """Time since 1970, or since boot. A line without a time has the time of the last
    line before it that has one; None if there is none."""
    is_since_boot: bool = False
    boot: int = 0
    """Number of reboots so far in this log."""
    host: str | None = None
    """Host named by syslog."""
    is_stamped: bool = True
    """Whether the line itself has a time."""
    end: int = 0
    """Offset of the byte after the line, counted from the first byte fed."""


@dataclasses.dataclass(kw_only=True)
class Counts:
    """Counts of the lines read."""

    lines: int = 0
    stamped: int = 0
    cut: int = 0
    """Number of lines longer than `MAX_LINE_BYTES`."""


class Splitter:
    """Splits bytes into lines in bounded memory."""

    def __init__(self) -> None:
        """Start with an empty line."""
        self._rest = bytearray()
        self._skipped = 0
        self._end = 0

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bool, int]]:
        """Yield (line, whether it is truncated, its end offset) of complete lines."""
        pieces = data.split(b"\n")
        for piece in pieces[:-1]:
            self._add(piece)
            self._end += 1
            yield self._take()
        self._add(pieces[-1])

    def finish(self) -> Iterator[tuple[bytes, bool, int]]:
        """Yield the last line in the form of `feed`, if it is unterminated."""
        if self._rest or self._skipped:
            yield self._take()

    def _add(self, piece: bytes) -> None:
        kept = piece[: MAX_LINE_BYTES - len(self._rest)]
        self._rest += kept
        self._skipped += len(piece) - len(kept)
        self._end += len(piece)

    def _take(self) -> tuple[bytes, bool, int]:
        line = bytes(self._rest), self._skipped > 0, self._end
        self._rest.clear()
        self._skipped = 0
        return line


class Reader:
    """Converts bytes to lines with times."""

    def __init__(self, *, year: int, zone: datetime.tzinfo = datetime.UTC) -> None:
        """Start a log.

        Args:
          year: year of the first line, if the format has none.
          zone: time zone of times that have none.
        """
        self._splitter, self._year, self._zone = Splitter(), year, zone
        self._month = 0
        self._boot, self._boot_ns = 0, -1
        self._last: tuple[int, bool] | None = None
        self._last_kind: Kind = "other"
        self._cached: tuple[str, int] = ("", 0)
        self.counts = Counts()

    def feed(self, data: bytes, *, is_over: bool = False) -> Iterator[Line]:
        """Yield the complete lines.

        Args:
          data: the next bytes.
          is_over: no more data follows, so an unterminated last line is complete.
        """
        yield from map(self._line, self._splitter.feed(data))
        if is_over:
            yield from map(self._line, self._splitter.finish())

    def _line(self, piece: tuple[bytes, bool, int]) -> Line:
        data, is_cut, end = piece
        text = data.rstrip(b"\r").decode(errors="replace")
        self.counts.lines += 1
        self.counts.cut += is_cut
        kind, found, host = self._stamp(text)
        if found is not None:
            self.counts.stamped += 1
            if found[1]:
                self._see_boot(found[0])
            self._last, self._last_kind = found, kind
        time_ns, is_since_boot = self._last or (None, False)
        return Line(
            text=text,
            kind=self._last_kind,
            time_ns=time_ns,
            is_since_boot=is_since_boot,
            boot=self._boot if is_since_boot else 0,
            host=host,
            is_stamped=found is not None,
            end=end,
        )

    def _see_boot(self, time_ns: int) -> None:
        if time_ns < self._boot_ns - _NEW_BOOT_NS:
            self._boot += 1
            self._boot_ns = time_ns
        self._boot_ns = max(self._boot_ns, time_ns)

    def _stamp(self, text: str) -> tuple[Kind, tuple[int, bool] | None, str | None]:
        """Return the kind of a line, (its time in ns, whether since boot), its host.

        The time and the host are None if the line does not have them.
        """
        try:
            if text[:1] == "[" or text[:1] == "<":
                if match := _BOOT.match(text):
                    seconds, part = match.groups()
                    return "kernel", (_ns(int(seconds), part), True), None
                if match := _HUMAN.match(text):
                    month, day, clock, year = match.groups()
                    number = _MONTHS.index(month) + 1
                    date = f"{year}-{number:02}-{int(day):02}"
                    return "kernel", (self._utc(date, clock, ""), False), None
            if match := _UFM.search(text[:256]):
                return "ufm", (self._utc(*match.groups()), False), None
            if match := _ISO.match(text):
                date, clock, part, zone = match.groups()
                time_ns = self._utc(date, clock, part or "", zone or "")
                if (
                    "," in match.group()
                ):  # only dmesg writes a comma, and it writes no host
                    return "kernel", (time_ns, False), None
                kind, host = _sender(text[match.end() :])
                return kind, (time_ns, False), host
            if match := _RFC3164.match(text):
                return self._rfc3164(text, match)
        except (ValueError, OverflowError):  # such as February 30, or the year 9999
            pass
        return "other", None, None

    def _rfc3164(
        self, text: str, match: re.Match[str]
    ) -> tuple[Kind, tuple[int, bool], str | None]:
        month, day, clock, host = match.groups()
        number = _MONTHS.index(month) + 1
        year = self._year
        if self._month == 1 and number == 12:  # a late line of the old year
            year -= 1
        else:
            self._year = year = year + (self._month == 12 and number == 1)
            self._month = number
        date = f"{year}-{number:02}-{int(day):02}"
        kind, _ = _sender(f"{host} {text[match.end() :]}")
        return kind, (self._utc(date, clock, ""), False), host

    def _utc(self, date: str, clock: str, part: str, zone: str = "") -> int:
        key = f"{date} {clock}{zone}"
        if key != self._cached[0]:  # many lines have the same second
            self._cached = key, _seconds(key, self._zone)
        return _ns(self._cached[1], part)


def _sender(rest: str) -> tuple[Kind, str | None]:
    """Return the kind and the host of a line of syslog.

    Args:
      rest: text of the line after its time.
    """
    match = _HOST.match(rest)
    if match is None:
        return "syslog", None
    return ("kernel" if match.group(2) == "kernel" else "syslog"), match.group(1)


def _seconds(stamp: str, zone: datetime.tzinfo) -> int:
    time = datetime.datetime.fromisoformat(stamp)
    if time.tzinfo is None:
        time = time.replace(tzinfo=zone)
    return (time - _epoch()) // datetime.timedelta(seconds=1)


@functools.cache
def _epoch() -> datetime.datetime:
    return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def _ns(seconds: int, part: str) -> int:
    if not 0 <= seconds <= _MAX_S:
        raise ValueError(f"{seconds} s is not a valid log time")
    return seconds * _SECOND_NS + int(part.ljust(9, "0") or "0")
