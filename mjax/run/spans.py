"""Write the spans of this process: the host's work in each step.

Input: calls of the loop that mark the start of each span. Output: lines in the format
of `mjax.observe.spans`, with one write per step and per event. The line of a step is
written when the metrics of the step have been read. Each line reaches the operating
system at once, so killing the process loses no line. A full disk never stops a run: it
is reported once, and the missing lines are written when there is space.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mjax.observe.spans import (
    Event,
    Header,
    Kind,
    Line,
    Span,
    encode,
    file_name,
)

_MOST_UNWRITTEN_BYTES = 16 * 2**20
"""Bytes kept while the disk is full. Beyond them the newest lines are lost, which is
reported. The lines of hours of steps fit into it."""


class Spans:
    """The spans of one process. One thread calls the methods; any may read `doing`."""

    def __init__(
        self,
        folder: Path | None = None,
        header: Header | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        """Prepare the first line; the file is created at the first write.

        Args:
          folder: folder of the files of all processes, created if absent; None writes
            nothing.
          header: first line of the file.
          warn: prints a warning when spans cannot be written.
        """
        self._path = None
        self._unwritten = b""
        if folder is not None and header is not None:
            self._path = folder / file_name(header)
            self._unwritten = encode(header)
        self._warn = warn
        self._descriptor: int | None = None
        self._has_warned = False
        self._n = 0
        self._num_barriers = 0
        self._open: tuple[str, Kind, int, int] | None = None
        self._pending: dict[int, list[Span]] = {}
        self._num_entered = 0

    @property
    def doing(self) -> tuple[int, str, int]:
        """Number of spans begun, name of the current one, and its start in ns.

        All processes of a run begin the same spans in the same order, so the numbers
        show which process is behind. A barrier counts twice, at its start and at its
        end. Any thread may call this.
        """
        name, _, _, start_ns = self._open or ("", "host", -1, 0)
        return self._num_entered, name, start_ns

    def enter(self, name: str, kind: Kind, step: int) -> int:
        """End the current span and begin one; return the time in ns.

        The host has one span at a time.

        Args:
          name: name of the span.
          kind: kind of the span.
          step: optimizer step of the span, from 1; -1 outside of steps.
        """
        now_ns = time.monotonic_ns()
        self._close(now_ns)
        self._open = name, kind, step, now_ns
        self._num_entered += 1
        return now_ns

    def add(
        self,
        name: str,
        kind: Kind,
        stream: str,
        start_ns: int,
        end_ns: int,
        *,
        step: int = -1,
    ) -> None:
        """Add an ended span of another stream."""
        span = Span(name, kind, stream, start_ns, end_ns)
        self._pending.setdefault(step, []).append(span)

    def flush(self, before: int | None = None) -> None:
        """Write the spans that have ended, one line per step.

        Args:
          before: spans of this step and later ones wait, so that each step has one
            line; None also ends the current span.
        """
        if before is None:
            self._close(time.monotonic_ns())
        ready = [s for s in sorted(self._pending) if before is None or s < before]
        for step in ready:
            self._append(step=step, spans=tuple(self._pending.pop(step)))
        self._write()

    def barrier(self, meet: Callable[[], object]) -> None:
        """Pass a barrier of all processes and record when.

        Args:
          meet: the barrier; returns after all processes have called it.
        """
        start_ns = time.monotonic_ns()
        self._num_entered += 1
        meet()
        self._num_entered += 1
        span = Span("barrier", "idle", "barrier", start_ns, time.monotonic_ns())
        self._append(spans=(span,), barrier=self._num_barriers)
        self._num_barriers += 1

    def tell(self, event: Event) -> None:
        """Write an event."""
        self._append(event=event)
        self._write()

    def close(self, exit_code: int) -> None:
        """Write the last line; the object must not be used afterwards."""
        self.flush()
        self._append(end=exit_code)
        self._write()
        if self._unwritten:
            self._report(f"{len(self._unwritten)} bytes of spans are lost")
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _close(self, now_ns: int) -> None:
        if self._open is not None:
            name, kind, step, start_ns = self._open
            self.add(name, kind, "host", start_ns, now_ns, step=step)
            self._open = None

    def _append(self, **fields: Any) -> None:
        if self._path is None:
            return
        line = encode(Line(n=self._n, **fields))
        self._n += 1  # lost lines are counted too, so readers see the gap
        if len(self._unwritten) + len(line) <= _MOST_UNWRITTEN_BYTES:
            self._unwritten += line

    def _write(self) -> None:
        if self._path is None or not self._unwritten:
            return
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
                self._descriptor = os.open(self._path, flags, 0o644)
            num = os.write(self._descriptor, self._unwritten)
            self._unwritten = self._unwritten[num:]
        except OSError as error:
            self._report(str(error))

    def _report(self, problem: str) -> None:
        if not self._has_warned:
            self._warn(
                f"warning: {self._path} cannot be written, training continues: "
                f"{problem}"
            )
        self._has_warned = True
