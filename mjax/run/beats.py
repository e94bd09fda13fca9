"""Write heartbeats of this process at a fixed interval, from a Python thread.

Input: the progress word and the spans of the process, which say what it is doing.
Output: the file of `mjax.observe.beats`, overwritten in place. The thread needs the
interpreter lock, so the heartbeats stop while another thread holds the lock. A failed
write does not stop the run; the error is reported once.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mjax.observe.beats import FOLDER, Beat, encode, file_name
from mjax.observe.spans import Header
from mjax.processes.progress import Writer
from mjax.run.spans import Spans

_DEPTH = 12
"""Maximum number of stack frames written, the number that `mjax.launch.stacks`
compares."""
_JOIN_S = 5.0
"""Maximum seconds to wait for the thread at exit. A hung disk must not delay the
exit."""


class Beats:
    """Heartbeats of one process; a thread writes them until `close`."""

    def __init__(
        self,
        work_dir: Path,
        header: Header,
        marks: Writer,
        spans: Spans,
        every_s: int | float,
        warn: Callable[[str], None] = print,
    ) -> None:
        """Start the thread.

        Args:
          work_dir: work dir of the run.
          header: identifies the process.
          marks: holds the progress word of the process.
          spans: spans of the process.
          every_s: seconds between heartbeats.
          warn: prints a warning when heartbeats cannot be written.
        """
        self._path = work_dir / FOLDER / file_name(header)
        self._header, self._every_s, self._warn = header, every_s, warn
        self._marks, self._spans = marks, spans
        self._n, self._before = 0, (-1, -1)
        self._has_warned = False
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="mjax-beats", daemon=True
        )
        self._thread.start()

    def close(self, exit_code: int) -> None:
        """Stop the thread and write the last heartbeat."""
        self._closed.set()
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._beat(end=exit_code)

    def _run(self) -> None:
        self._beat()
        while not self._closed.wait(self._every_s):
            self._beat()

    def _beat(self, end: int | None = None) -> None:
        word = self._marks.word()
        entered, doing, began_ns = self._spans.doing
        stands = (entered, word.sequence) == self._before
        self._before = entered, word.sequence
        beat = Beat(
            n=self._n,
            whose=self._header,
            every_s=float(self._every_s),
            wall_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
            since_ns=max(word.monotonic_ns, began_ns),
            phase=word.phase,
            step=word.step,
            microstep=word.microstep,
            has_stepped=word.first_step_ns > 0,
            entered=entered,
            doing=doing,
            stack=_main_stack() if stands else "",
            end=end,
            again=self._n,
        )
        self._n += 1
        self._write(encode(beat))

    def _write(self, line: bytes) -> None:
        # The file is opened and closed for each heartbeat, so that network file systems
        # show it to other hosts.
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, line, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._has_warned:
                self._warn(
                    f"warning: {self._path} cannot be written, training continues: "
                    f"{error}"
                )
            self._has_warned = True


def _main_stack() -> str:
    """Return the innermost frames of the main thread in the format of faulthandler."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < _DEPTH:
        code = frame.f_code
        where = f'File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
        lines.append(f"  {where}\n")
        frame = frame.f_back
    return "".join(lines)
