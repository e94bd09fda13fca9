"""The span file of a process: what it did, and when, one JSON object per line.

Input: a file below `spans/` in the work dir, named HOST-RANK-GENERATION.jsonl, plain
or compressed (`mjax.observe.gzipped`). Output: its header, its lines, and its problems.
Nothing here changes a file.

The first line is a `Header`, every other one a `Line`. A line is appended with one
write, so a killed process loses at most the line that it was about to write. An
incomplete last line is normal; any other unreadable line is reported and left out.
(run, generation, rank, n) identifies a line permanently, so a reader that stores lines
can read the same file twice.

Times are nanoseconds of the host's monotonic clock (CLOCK_MONOTONIC), which never
jumps. The header has one reading of this clock and of the wall clock, taken together.
The offsets between the clocks of hosts follow from barriers, see `mjax.observe.clocks`.
"""

import dataclasses
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from mjax.observe import gzipped

VERSION = 1
FOLDER = "spans"
"""Folder of the span files, in the work dir."""
ENDING = ".jsonl"
"""Suffix of file names, before compression."""

type Kind = Literal[
    "compute",
    "tp",
    "pp",
    "dp",
    "optimizer",
    "data",
    "host",
    "ckpt",
    "eval",
    "restart",
    "idle",
]


class Span(NamedTuple):
    """An interval of time with a name."""

    name: str
    kind: Kind
    stream: str
    """Name of the sequence of spans: `host`, `step`, or `device:N`, where N is the
    number of the device in the mesh."""
    start_ns: int
    end_ns: int


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The launch of a process, and its start within that launch."""

    name: str
    generation: int
    """Number of the start within the launch, from 1."""


class Header(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="mjax-spans"
):
    """The first line: identity of the process."""

    version: int = VERSION
    run: str
    """Id of the run; the same in all starts in a work dir."""
    host: str
    rank: int
    generation: int
    """Number of this start within the run, over all launches, from 1."""
    pid: int
    wall_ns: int
    """Wall-clock time since 1970, read together with monotonic_ns."""
    monotonic_ns: int
    devices: tuple[int, ...]
    """Mesh numbers of the devices of this process."""
    mesh: dict[str, int]
    """Sizes of the mesh axes, outermost first."""
    launch: Launch | None = None
    boot: str | None = None
    """Boot id of the host: processes of one boot share a monotonic clock."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event of this process, as in events.jsonl."""

    time_ns: int
    """Time since 1970."""
    kind: str
    text: str
    severity: Literal["info", "warning", "error"] = "info"
    data: dict[str, Any] = {}
    """JSON, for programs."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The spans of one process in one step, or outside of steps."""

    n: int
    """Number of the line, from 0."""
    step: int = -1
    """The optimizer step, from 1; -1 outside of steps."""
    spans: tuple[Span, ...] = ()
    barrier: int | None = None
    """Number of a barrier of all processes, from 0 in each generation; the line's only
    span is that barrier."""
    event: Event | None = None
    end: int | None = None
    """Exit code, in the last line of a process that ended by itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanFile:
    """The contents of one file."""

    path: Path
    header: Header
    lines: tuple[Line, ...]
    problems: tuple[str, ...]
    """Problems, for people; each names the file and, if possible, the line."""


def file_name(header: Header) -> str:
    """Return the file name for a process, with the host name percent-encoded."""
    host = urllib.parse.quote(header.host, safe="")
    return f"{host}-{header.rank}-{header.generation}{ENDING}"


def encode(line: Header | Line) -> bytes:
    """Encode a line, with a newline."""
    return msgspec.json.encode(line) + b"\n"


_decode_header = msgspec.json.Decoder(Header).decode
_decode_line = msgspec.json.Decoder(Line).decode


def decode_header(data: bytes) -> Header:
    """Read the first line of a file.

    Raises:
      ValueError: it is not a header, or has another version.
    """
    try:
        header = _decode_header(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"line 1 is not a header of spans: {error}") from error
    if header.version != VERSION:
        raise ValueError(
            f"version {header.version} of the format, this mjax reads {VERSION}; read "
            "it with the mjax that wrote it"
        )
    return header


def decode_line(data: bytes) -> Line:
    """Read a line after the header.

    Raises:
      ValueError: it is not a line, or a span ends before it starts.
    """
    try:
        line = _decode_line(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    for span in line.spans:
        if span.end_ns < span.start_ns:
            raise ValueError(f"span {span.name} ends before it starts")
    return line


def read(path: Path) -> SpanFile:
    """Read a whole file; the process may still be writing it.

    Raises:
      ValueError: it cannot be read, or has no header.
    """
    try:
        data, problem = gzipped.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    first, _, rest = data.partition(b"\n")
    cut = f"{path} {problem}; the rest is left out"
    try:
        header = decode_header(first)
    except ValueError as error:
        raise ValueError(cut if problem else f"{path}: {error}") from error
    problems = [cut] if problem else []
    lines = tuple(_lines(rest, path, problems))
    return SpanFile(path=path, header=header, lines=lines, problems=tuple(problems))


def _lines(data: bytes, path: Path, problems: list[str]) -> Iterator[Line]:
    """Yield the lines in order of their numbers; report gaps and repetitions."""
    *whole, _ = data.split(b"\n")  # the last line is truncated, or empty
    following = 0
    for number, text in enumerate(whole, start=2):
        where = f"{path}, line {number}"
        try:
            line = decode_line(text)
        except ValueError as error:
            problems.append(f"{where} is left out: {error}")
            continue
        if line.n < following:
            problems.append(f"{where} is left out: n is {line.n} again")
            continue
        if line.n > following:
            problems.append(f"{where}: n is {line.n} after {following - 1}")
        following = line.n + 1
        yield line


def paths(folder: Path) -> list[Path]:
    """Return the span files of a folder, compressed or not, one for each process."""
    return [*gzipped.find(folder, ENDING).values()]


def read_run(work_dir: Path) -> tuple[list[SpanFile], list[str]]:
    """Read all files of a run, by generation and rank.

    Returns:
      the files, and problems with them and with files that were left out.
    Raises:
      ValueError: the run has no spans.
    """
    folder = work_dir / FOLDER
    there = paths(folder)
    if not there:
        raise ValueError(
            f"{folder} has no spans; name the work dir of a run with --work-dir "
            "(runs that were started with --observe.no-spans have none)"
        )
    files: dict[tuple[int, int], SpanFile] = {}
    problems = []
    for path in there:
        try:
            found = read(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        problems += found.problems
        key = found.header.generation, found.header.rank
        if key in files:
            problems.append(
                f"{path} is left out: {files[key].path.name} is also of rank {key[1]} "
                f"in generation {key[0]}"
            )
            continue
        files[key] = found
    runs = {found.header.run for found in files.values()}
    if len(runs) > 1:
        raise ValueError(
            f"{folder} has spans of {len(runs)} runs: {sorted(runs)}; move the files "
            "of all but one to another work dir"
        )
    return [files[key] for key in sorted(files)], problems
