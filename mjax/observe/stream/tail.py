"""Split growing files into batches.

Input: a file of a run, and the position up to which it was sent. Output: complete
lines after it. An incomplete line is left for later: it is being written, or its writer
was killed. Compressed files are read too; positions count uncompressed bytes.
"""

import dataclasses
import io
import os
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from mjax.observe import gzipped, spans
from mjax.observe.store.batches import (
    MAX_BYTES,
    MAX_LINES,
    Batch,
    Kind,
    Outcome,
    digest,
)

RUN_FILES: dict[str, Kind] = {"metrics.jsonl": "metrics", "events.jsonl": "events"}
_READ_BYTES = 4 * MAX_BYTES


class ChangedError(ValueError):
    """A file no longer contains the data that was sent from it."""


@dataclasses.dataclass(kw_only=True)
class Tail:
    """A file and the position up to which it was sent."""

    path: Path
    source: str
    kind: Kind
    run: str
    identity: str
    revision: int = 0
    position: int = 0
    lines: int = 0
    """Number of lines before the position."""
    tail: str = ""
    """Digest of the line before the position; empty if unknown."""
    is_checked: bool = False
    """Whether the file is known to contain the sent data."""
    inode: int = -1
    committed: int = 0
    """Number of bytes in the store."""
    has_ended: bool = False
    """Whether the process has ended and written its last line."""
    refused: str = ""
    launched: tuple[int, int] | None = None
    """Generation of the launch and rank."""

    def move(self, to: Outcome) -> None:
        """Move to the position up to which a sink has accepted the file."""
        expected = self.revision == to.revision and self.position <= to.at_byte
        self.is_checked = self.is_checked and expected
        self.revision, self.position = to.revision, to.at_byte
        self.lines, self.tail = to.lines, to.tail


def discover(
    work_dir: Path, host: str | None, spans_dir: Path | None = None
) -> dict[str, Path]:
    """Return the files of a run by source, or only those of one host.

    A file that is being compressed exists twice: the plain one is used.
    """
    found: dict[str, Path] = {}
    folder = spans_dir or work_dir / spans.FOLDER
    for name, path in gzipped.find(folder, spans.ENDING).items():
        if host is None or urllib.parse.unquote(name.rsplit("-", 2)[0]) == host:
            found[f"{spans.FOLDER}/{name}"] = path
    for name in RUN_FILES:
        if (work_dir / name).is_file():
            found[name] = work_dir / name
    return found


def first_line(path: Path) -> bytes | None:
    """Return the first line of a file without its newline; None while incomplete."""
    with gzipped.opened(path) as file:
        line = file.readline(MAX_BYTES)
    return line[:-1] if line.endswith(b"\n") else None


def read_batches(tail: Tail, most: int) -> list[Batch]:
    """Read complete lines after the position of a file.

    Args:
      tail: file and position; the position does not change.
      most: largest number of batches.
    Raises:
      OSError: the file is gone, or cannot be read.
      ChangedError: the file no longer contains the sent data.
    """
    with gzipped.opened(tail.path) as file:
        inode = os.fstat(file.fileno()).st_ino
        if not tail.is_checked or inode != tail.inode or tail.kind != "spans":
            _check(tail, file)
            tail.is_checked, tail.inode = True, inode
        file.seek(tail.position)
        found: list[Batch] = []
        start, number = tail.position, tail.lines + 1
        rest = b""
        while len(found) < most:
            data = rest + file.read(_READ_BYTES)
            if len(data) == len(rest):
                break
            cut = data.rfind(b"\n") + 1
            rest = data[cut:]
            for batch in _cut(tail, data[:cut], start, number):
                found.append(batch)
                start = batch.end
                number += batch.data.count(b"\n") if batch.data else 1
            if len(rest) > _READ_BYTES:
                size = _size_of_line(file, len(rest))
                if size is None:
                    break
                found.append(_skipped(tail, start, size, number))
                start, number, rest = start + size, number + 1, b""
    return found[:most]


def has_whole_lines(tail: Tail) -> bool:
    """Return whether there is data to send."""
    return bool(read_batches(tail, 1))


def _cut(tail: Tail, data: bytes, start: int, number: int) -> Iterator[Batch]:
    """Yield batches of complete lines."""
    begin = place = 0
    first = number
    while place < len(data):
        end = data.index(b"\n", place) + 1
        is_long = end - place > MAX_BYTES
        is_full = end - begin > MAX_BYTES or number - first == MAX_LINES
        if place > begin and (is_long or is_full):
            yield _batch(tail, data[begin:place], start + begin, first)
            begin, first = place, number
        if is_long:
            yield _skipped(tail, start + place, end - place, number)
            begin, first = end, number + 1
        place, number = end, number + 1
    if place > begin:
        yield _batch(tail, data[begin:place], start + begin, first)


def _batch(tail: Tail, data: bytes, start: int, number: int) -> Batch:
    last = data[data.rfind(b"\n", 0, -1) + 1 : -1]
    return Batch(
        run=tail.run,
        source=tail.source,
        kind=tail.kind,
        identity=tail.identity,
        revision=tail.revision,
        start=start,
        end=start + len(data),
        first_line=number,
        tail=digest(last),
        data=data,
    )


def _skipped(tail: Tail, start: int, size: int, number: int) -> Batch:
    """Replace a line that is too long to send."""
    return Batch(
        run=tail.run,
        source=tail.source,
        kind=tail.kind,
        identity=tail.identity,
        revision=tail.revision,
        start=start,
        end=start + size,
        first_line=number,
        tail="",
        skipped=f"the line has {size} bytes, but at most {MAX_BYTES} can be sent",
    )


def _size_of_line(file: io.BufferedIOBase, size: int) -> int | None:
    """Read on to the end of a line; return its size, or None if it is incomplete."""
    while data := file.read(_READ_BYTES):
        end = data.find(b"\n")
        if end >= 0:
            file.seek(end + 1 - len(data), io.SEEK_CUR)
            return size + end + 1
        size += len(data)
    return None


def _check(tail: Tail, file: io.BufferedIOBase) -> None:
    """Raise ChangedError if the file no longer contains the sent data."""
    line = file.readline(MAX_BYTES)
    begins_alike = line.endswith(b"\n") and digest(line[:-1]) == tail.identity
    if begins_alike and (tail.position == 0 or not tail.tail):
        return
    begin = max(0, tail.position - MAX_BYTES - 1)
    file.seek(begin)
    before = file.read(tail.position - begin)
    is_whole = len(before) == tail.position - begin and before.endswith(b"\n")
    last = before[before.rfind(b"\n", 0, -1) + 1 : -1]
    if not (begins_alike and is_whole and digest(last) == tail.tail):
        raise ChangedError(f"{tail.path} was rewritten")
