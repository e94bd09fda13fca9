"""Batches of lines, marks of files, and the new part of a batch.

Input: a batch from a file, and the mark of that file. Output: the bytes that the store
does not have yet, or the reason for a refusal. Pure.

A mark states that everything before `at_byte` is stored. The transaction that writes
the rows also writes the mark. So a repeated batch is recognised by its position, and a
batch that would leave a gap is refused until the bytes before it have arrived.
"""

import dataclasses
import hashlib
from typing import Literal

Kind = Literal["spans", "metrics", "events"]
Verdict = Literal["stored", "known", "gap", "refused"]
"""`known`: the store already had all bytes of the batch; `gap`: it lacks earlier bytes
of the file."""
MAX_LINES = 2_000
"""Maximum number of lines in a batch. The cost of a commit per batch is then small."""
MAX_BYTES = 900_000
"""Maximum size of a batch in bytes: NATS accepts messages of 1 MiB by default
(docs.nats.io, max_payload). A longer line is reported and left out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Whole lines of one file, unchanged."""

    run: str
    source: str
    """Path of the file below the work dir."""
    kind: Kind
    identity: str
    """`digest` of the first line of the file."""
    revision: int = 0
    """Number of times the file was rewritten, according to the store; 0 for span
    files."""
    start: int
    """Position of the first byte in the file."""
    end: int
    first_line: int
    """Number of the first line, counted from 1."""
    tail: str
    """`digest` of the last line."""
    skipped: str | None = None
    """Reason why the bytes of one line were not sent; `data` is then empty."""
    data: bytes = b""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """Stored part of a file. The fields are the columns of the table `files`."""

    file_id: int
    run: str
    source: str
    kind: Kind
    identity: str
    revision: int
    at_byte: int
    lines: int
    last_n: int
    last_end_ns: int | None
    exit_code: int | None
    tail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result for a batch, and the stored part of its file."""

    run: str
    source: str
    verdict: Verdict
    reason: str = ""
    revision: int = 0
    at_byte: int = 0
    lines: int = 0
    tail: str = ""


def digest(line: bytes) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a line."""
    return hashlib.sha256(line).hexdigest()[:16]


def admit(batch: Batch, mark: Mark | None) -> tuple[Verdict, str, int]:
    """Find the new part of a batch.

    Args:
      batch: lines of a file.
      mark: mark of the same run and source; None if nothing of the file is stored.
    Returns:
      verdict: `stored` if the bytes from the returned position on must be stored.
      reason: reason for a refusal; otherwise empty.
      start: position in the file of the first new byte.
    """
    if mark is None:
        return ("stored", "", 0) if batch.start == 0 else ("gap", "", 0)
    if batch.kind != mark.kind:
        return "refused", f"{batch.source} was stored as {mark.kind}", 0
    if batch.revision < mark.revision:
        return "known", "", mark.at_byte
    if batch.revision > mark.revision:
        if batch.kind == "spans":
            return "refused", _changed(batch), 0
        return ("stored", "", 0) if batch.start == 0 else ("gap", "", 0)
    if batch.identity != mark.identity:
        return "refused", _changed(batch), 0
    if batch.end <= mark.at_byte:
        return "known", "", mark.at_byte
    if batch.start > mark.at_byte:
        return "gap", "", mark.at_byte
    return "stored", "", mark.at_byte


def outcome(
    batch: Batch, mark: Mark | None, verdict: Verdict, reason: str = ""
) -> Outcome:
    """Return the outcome of a batch, with the stored part of its file."""
    found = Outcome(run=batch.run, source=batch.source, verdict=verdict, reason=reason)
    if mark is None:
        return found
    return dataclasses.replace(
        found,
        revision=mark.revision,
        at_byte=mark.at_byte,
        lines=mark.lines,
        tail=mark.tail,
    )


def _changed(batch: Batch) -> str:
    return (
        f"{batch.source} of run {batch.run} is not the file that was stored under this "
        "name; span files only grow, so move this one away or give its run another "
        "name"
    )
