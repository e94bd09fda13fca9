"""Several sources combined into one, and sources with a shorter name.

`Several` is for a check that compares several sources. Input: sources. Output: one
`Reading` whose text has a header line before the text of each source; `parts` splits it
again. An absent source gives an empty part with the reason, and the check decides what
that means; the combined source is absent only if all its sources are. The combined exit
status is None if a source exceeded its time limit, otherwise the first one that is not
0.
"""

import dataclasses
import re
import time
from collections.abc import Sequence

from mjax.health.findings import UnreadableError
from mjax.health.sources import Reading, Source, num_bytes_of

_HEADER = re.compile(r"==> .*? (?:\(absent: (.*)\) )?<==")


@dataclasses.dataclass(frozen=True)
class Called:
    """A source with a shorter name, for files with many patterns."""

    name: str
    source: Source

    @property
    def shown(self) -> str:
        """Short name of the source."""
        return self.name

    def read(self, limit_s: float) -> Reading:
        """Read the source."""
        reading = self.source.read(limit_s)
        if reading.absent:
            return dataclasses.replace(reading, absent=f"there is no {self.name}")
        return reading


@dataclasses.dataclass(frozen=True)
class Several:
    """Sources that are read one after the other."""

    sources: tuple[Source, ...]

    @property
    def shown(self) -> str:
        """Names of all sources."""
        return "; ".join(source.shown for source in self.sources)

    def read(self, limit_s: float) -> Reading:
        """Read all sources, within limit_s seconds in total."""
        until_s = time.monotonic() + limit_s
        readings: list[Reading] = []
        for source in self.sources:
            left_s = until_s - time.monotonic()
            late = Reading(status=None)
            readings.append(source.read(left_s) if left_s > 0 else late)
        if all(reading.absent for reading in readings):
            return Reading(absent="; ".join(reading.absent for reading in readings))
        return self._joined(readings)

    def _joined(self, readings: Sequence[Reading]) -> Reading:
        text, num_bytes = "", 0
        for source, reading in zip(self.sources, readings, strict=True):
            why = f" (absent: {_one_line(reading.absent)})" if reading.absent else ""
            head = f"==> {_one_line(source.shown)}{why} <==\n"
            end = "" if reading.text.endswith("\n") or not reading.text else "\n"
            text += head + reading.text + end
            had = num_bytes_of(reading.text)
            missing = 0 if reading.num_bytes is None else reading.num_bytes - had
            num_bytes += num_bytes_of(head + end) + had + missing
        statuses = [reading.status for reading in readings if not reading.absent]
        bad = [status for status in statuses if status != 0]
        errors = [reading.error for reading in readings if reading.error]
        return Reading(
            text=text,
            num_bytes=num_bytes,
            status=None if None in bad else (bad[0] if bad else 0),
            error="; ".join(errors),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The output of one of the sources."""

    text: str
    absent: str
    """Why there is no output; empty if there is one."""


def parts(text: str, num: int) -> Sequence[Part]:
    """Split the text of `Several` at its headers.

    Args:
      text: text of all sources.
      num: required number of sources.
    Raises:
      UnreadableError: the number of sources is wrong, or text precedes the first
        header.
    """
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines(keepends=True):
        header = _HEADER.fullmatch(line.rstrip("\n"))
        if header:
            found.append((header[1] or "", []))
        elif found:
            found[-1][1].append(line)
        else:
            raise UnreadableError(f"expected a source header, got {line[:60]!r}")
    if len(found) != num:
        raise UnreadableError(f"it has {len(found)} sources, not {num}")
    return [Part(text="".join(lines), absent=absent) for absent, lines in found]


def present(part: Part) -> str:
    """Return the text of a required part.

    Raises:
      UnreadableError: it is absent.
    """
    if part.absent:
        raise UnreadableError(part.absent)
    return part.text


def _one_line(text: str) -> str:
    return " ".join(text.split())
