"""Convert the `events.jsonl` of a launch to events of its hosts.

Input: lines of the file, as the launcher writes them: objects with time_ns, source,
generation, kind, severity, host, rank, text and data. Output: events for the history of
hosts, and the number of unreadable lines. An unterminated last line is still being
written, and is left for the next import. A copy of the file gives the same events, so
importing it again adds nothing.

The launcher's lines of these kinds become events of hosts: `failure` (its hosts share
the blame), `evict`, `check` of one host, `host` if the host is back as a spare, and
`log` if the line names hardware. `rank_end` is left out: most ranks end because another
rank ended first, and the `failure` line names that rank. Lines of other sources, such
as `mjax.health ports --events`, are skipped.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mjax import checked_json
from mjax.health.history.events import NOT_OF_HOSTS, HostEvent, Kind

MAX_LINE_BYTES = 64 * 2**20
"""Maximum length of a line in bytes. One line has the stacks of all ranks of a large
run."""
HARDWARE_RULES = frozenset(
    {
        *("Xid", "SXid", "GPU driver", "GPU memory", "GPU is gone"),
        *("PCIe", "machine check"),
    }
)
"""Log rules of the launcher whose lines name the hardware of a host."""
_EVICTED_BY_CHECK = "sick"
_EVICTED_FOR_GOOD = "evicted"
_BACK = " is back as a spare"
_LAUNCHER = "driver"
"""Source of the launcher's lines."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the launcher in events.jsonl; other keys are ignored."""

    time_ns: int
    kind: str
    text: str
    generation: int = 0
    host: str | None = None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Counts:
    """Numbers of lines of a file, and of unreadable ones."""

    num_lines: int = 0
    num_unreadable: int = 0
    """Number of lines that cannot be read as a `Line`."""
    first_unreadable: str = ""
    """File and number of the first unreadable line, and the reason."""
    is_cut: bool = False
    """Whether the last line has no line end."""


def read(path: Path, counts: Counts) -> Iterator[HostEvent]:
    """Yield the events of hosts in a file.

    Args:
      path: path of events.jsonl.
      counts: updated while the events are consumed.
    Raises:
      ValueError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
            yield from parse(lines, str(path), counts)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def parse(lines: Iterable[bytes], source: str, counts: Counts) -> Iterator[HostEvent]:
    """Yield the events of hosts, as `read` does.

    Args:
      lines: lines of the file with their line ends, as `readline` with the limit
        MAX_LINE_BYTES returns them; a longer line comes in several parts.
      source: name of the file in `Counts.first_unreadable`.
      counts: updated while the events are consumed.
    """
    run, failure, is_rest = "", "", False
    for text in lines:
        is_whole = text.endswith(b"\n")
        if not is_whole and len(text) < MAX_LINE_BYTES:
            counts.is_cut = True
            return
        is_part, is_rest = is_rest, not is_whole
        if is_part:  # rest of a line that is too long and already counted
            continue
        counts.num_lines += 1
        # The first line has a time in nanoseconds, so it identifies the run.
        run = run or hashlib.sha256(text).hexdigest()[:16]
        try:
            if not is_whole:
                raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
            line = _line(text)
            if line is None:
                continue
            yield from _of_line(line, run, failure)
            failure = line.text if line.kind == "failure" else failure
        except ValueError as error:
            counts.num_unreadable += 1
            place = f"{source}:{counts.num_lines}"
            counts.first_unreadable = counts.first_unreadable or f"{place}: {error}"


def _line(text: bytes) -> Line | None:
    """Return a line of the launcher, None for a line of another source."""
    value = checked_json.read(text, dict[str, Any])
    if value.get("source", _LAUNCHER) != _LAUNCHER:
        return None
    names = {field.name for field in dataclasses.fields(Line)}
    kept = {key: item for key, item in value.items() if key in names}
    line: Line = checked_json.check(kept, Line)
    # JSON can contain text that UTF-8 cannot encode, such as half a surrogate pair.
    whole = line.text.encode(errors="backslashreplace").decode()
    return dataclasses.replace(line, text=whole)


def _of_line(line: Line, run: str, failure: str) -> Iterator[HostEvent]:
    """Yield the host events of a line.

    Args:
      line: line of the file.
      run: identifier of the run.
      failure: text of the last failure before the line.
    """
    if line.kind == "failure":
        yield from _of_failure(line, run)
        return
    found = _kind_of(line, failure)
    if found is None or line.host is None:
        return
    kind, cause, key = found
    yield HostEvent(
        host=line.host,
        kind=kind,
        time_ns=line.time_ns,
        text=line.text,
        cause=cause,
        run=run,
        generation=line.generation,
        key=key,
    )


def _of_failure(line: Line, run: str) -> Iterator[HostEvent]:
    cause = checked_json.check(line.data.get("cause"), str, "data.cause")
    hosts = checked_json.check(line.data.get("hosts", []), list[str], "data.hosts")
    if cause in NOT_OF_HOSTS:
        return
    for host in dict.fromkeys(hosts):
        yield HostEvent(
            host=host,
            kind=Kind.FAULT,
            time_ns=line.time_ns,
            text=line.text,
            cause=cause,
            share=1.0 / len(set(hosts)),
            run=run,
            generation=line.generation,
        )


def _kind_of(line: Line, failure: str) -> tuple[Kind, str, str] | None:
    """Return (kind, cause, key) of an event of one host; None for all other lines."""
    if line.kind == "evict":
        state, why = line.data.get("state"), line.data.get("why")
        if state == _EVICTED_BY_CHECK:
            # The launcher excludes suspect hosts before it checks them. Such an `evict`
            # line repeats the reason of the failure, and is no result of a check.
            is_suspect = isinstance(why, str) and bool(why) and failure.endswith(why)
            return None if is_suspect else (Kind.CHECK_FAILED, "", "")
        return (Kind.EVICTED, "", "") if state == _EVICTED_FOR_GOOD else None
    if line.kind == "check":
        return Kind.CHECK_OK, "", ""
    if line.kind == "host" and line.text.endswith(_BACK):
        return Kind.RETURNED, "", ""
    rule = line.data.get("rule")
    if line.kind == "log" and rule in HARDWARE_RULES:
        # A broken host repeats its lines, which are one event per generation.
        return Kind.FAULT, "logged", f"log/{rule}"
    return None
