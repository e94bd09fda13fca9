"""Follow metrics.jsonl and events.jsonl in a work dir.

Input: a work dir. Output: rows and events that were appended since the last poll, and
reading problems. A rewritten file, such as the rows after a restart, is read again from
its beginning.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mjax.observe import events
from mjax.observe.output import printable
from mjax.observe.page.model import Share
from mjax.observe.store.batches import Batch, Outcome, digest
from mjax.observe.stream.tail import (
    RUN_FILES,
    ChangedError,
    Tail,
    first_line,
    read_batches,
)
from mjax.records import config_json

FILE_BATCHES = 4
"""Maximum number of batches to read from a file in one poll: 3.6 MB."""
_MOST_TOLD = 10_000

_decode_event = msgspec.json.Decoder(events.Event).decode
_decode_row = msgspec.json.Decoder(dict[str, Any]).decode


class Problems:
    """Reports each problem once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, share: Share, text: str) -> None:
        """Add a problem to a share, if it is new."""
        text = printable(text)
        if text not in self._told:
            if len(self._told) < _MOST_TOLD:
                self._told.add(text)
            share.problems.append(text)


class RunFiles:
    """Follows the files of a run other than its spans."""

    def __init__(self, work_dir: Path, problems: Problems) -> None:
        """Set the work dir."""
        self._work_dir, self._problems = work_dir, problems
        self._tails: dict[str, Tail] = {}

    def poll(self, share: Share) -> None:
        """Add new data to a share."""
        for source in RUN_FILES:
            path = self._work_dir / source
            if path.is_dir():
                self._tell(share, f"{path} is a folder, not a file; move it away")
            elif source not in self._tails and path.is_file():
                self._follow(source, path)
        self._read(share)

    def config(self) -> Any:
        """Return the fields of config.json; None if it cannot be read."""
        try:
            data = (self._work_dir / "config.json").read_bytes()
            return config_json.current(msgspec.json.decode(data, type=dict[str, Any]))
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
            return None  # not written yet; it never changes later

    def _follow(self, source: str, path: Path) -> None:
        try:
            line = first_line(path)
        except OSError:
            return  # it may exist at the next poll
        if line is not None:
            kind = "metrics" if source.startswith("metrics") else "events"
            self._tails[source] = Tail(
                path=path, source=source, kind=kind, run="", identity=digest(line)
            )

    def _read(self, share: Share) -> None:
        for tail in self._tails.values():
            try:
                batches = self._new_batches(tail, share)
            except (OSError, EOFError) as error:
                self._tell(share, f"{tail.path} cannot be read: {error}")
                continue
            is_rows = tail.kind == "metrics"
            decode: Callable[[bytes], Any] = _decode_row if is_rows else _decode_event
            into: list[Any] = share.rows if is_rows else share.events
            for batch in batches:
                self._decode(batch, tail.path, decode, into, share)
                move(tail, batch)
            if len(batches) == FILE_BATCHES:
                share.is_behind = True

    def _new_batches(self, tail: Tail, share: Share) -> list[Batch]:
        """Read the new part of a file, or all of it if it has been rewritten."""
        status = tail.path.stat()
        if (status.st_size, status.st_ino) == (tail.position, tail.inode):
            return []
        try:
            return read_batches(tail, FILE_BATCHES)
        except ChangedError:
            line = first_line(tail.path)
            if line is None:
                return []
            tail.identity, tail.tail, tail.is_checked = digest(line), "", False
            tail.position = tail.lines = 0
            if tail.kind == "metrics":
                share.are_rows_new = True
            else:
                share.are_events_new = True
            return read_batches(tail, FILE_BATCHES)

    def _decode(
        self,
        batch: Batch,
        path: Path,
        decode: Callable[[bytes], Any],
        into: list[Any],
        share: Share,
    ) -> None:
        number = batch.first_line - 1
        if batch.skipped is not None:
            self._tell(share, f"{path}, line {number + 1} is left out: {batch.skipped}")
            return
        for text in batch.data.split(b"\n")[:-1]:
            number += 1
            try:
                into.append(decode(text))
            except (
                msgspec.MsgspecError,
                UnicodeDecodeError,
                RecursionError,
            ) as error:
                self._tell(share, f"{path}, line {number} is left out: {error}")

    def _tell(self, share: Share, text: str) -> None:
        self._problems.tell(share, text)


def move(tail: Tail, batch: Batch) -> None:
    """Advance the position of a tail past a batch."""
    num = 1 if batch.skipped is not None else batch.data.count(b"\n")
    tail.move(
        Outcome(
            run=tail.run,
            source=tail.source,
            verdict="stored",
            revision=tail.revision,
            at_byte=batch.end,
            lines=batch.first_line - 1 + num,
            tail=batch.tail,
        )
    )
