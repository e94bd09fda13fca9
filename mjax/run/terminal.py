"""Terminal output of a run: one live line, and colours.

Input: rows, and lines of text. Output: the lines, and below them a live line that is
redrawn: progress, smoothed loss, time left, throughput, MFU and memory. It never wraps;
parts that do not fit the width of the terminal are omitted. All other output to stdout
or stderr, including errors, appears above it.

If stdout is not a terminal, there is no live line and no colour. NO_COLOR and TERM=dumb
turn colours off. In a notebook, `!python -m mjax.train` prints a log instead of a live
line, because the output cell would keep every redrawn copy.
"""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO, cast, runtime_checkable

import mjax

_SMOOTHING = 0.95
"""Decay of the smoothed loss. The result is a mean over about twenty steps."""
_REDRAWN_PER_S = 4
_COLORS = {
    "warning:": "yellow",
    "gave up:": "red",
    "failed:": "red",
    "error:": "red",
}
"""Colours of lines by prefix."""
_CODES = {"yellow": 33, "red": 31}


@runtime_checkable
class Stream(Protocol):
    """The output streams: stdout, stderr."""

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        ...


def shows_live_line(stream: Stream) -> bool:
    """Return whether a stream is a terminal on which a line can be redrawn."""
    in_notebook = "JPY_PARENT_PID" in os.environ  # Jupyter sets it for its kernels
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not in_notebook


def painted(text: str, stream: Stream) -> str:
    """Colour a warning or an error if the stream is a terminal that shows colours."""
    if not shows_live_line(stream) or os.environ.get("NO_COLOR"):
        return text
    for begin, color in _COLORS.items():
        if text.startswith(begin):
            return f"\x1b[{_CODES[color]}m{text}\x1b[0m"
    return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one device, in bytes."""

    used: int
    """Peak use so far."""
    available: int


class Progress:
    """Progress of a run as the parts of a line. Pass every row to `add`."""

    def __init__(
        self, *, start_step: int, num_steps: int, memory: Callable[[], Memory | None]
    ) -> None:
        """Start without rows.

        Args:
          start_step: steps of the restored state.
          num_steps: steps of the complete run.
          memory: memory of a device of this process; None if unknown.
        """
        self._step, self._num_steps = start_step, num_steps
        self._memory = memory
        self._row: Mapping[str, Any] = {}
        self._mean, self._weight = 0.0, 0.0
        self._first: tuple[int, float] | None = None
        self._last_s = 0.0

    def add(self, row: Mapping[str, Any], now_s: float) -> None:
        """Add the row of a step.

        Args:
          row: a row of metrics.jsonl.
          now_s: end of the step on a monotonic clock.
        """
        self._row, self._step, self._last_s = row, row["step"], now_s
        if self._first is None:  # includes compilation or loading, so it is not counted
            self._first = (row["step"], now_s)
        if math.isfinite(row["loss"]):
            self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * row["loss"]
            self._weight = _SMOOTHING * self._weight + 1 - _SMOOTHING

    def parts(self, now_s: float) -> list[str]:
        """Return the parts of the line, the most important first.

        Args:
          now_s: time on the clock of `add`; the time left counts down between steps.
        """
        step, count = self._step, self._num_steps
        parts = [f"step {step}/{count} {step / count:.0%}"]
        if not self._row:
            return [*parts, "waiting for the first step"]
        loss = self._row["loss"]
        if self._weight and math.isfinite(loss):
            loss = self._mean / self._weight
        parts.append(f"loss {loss:.4f}")
        left_s = self._left_s(now_s)
        if left_s is not None:
            parts.append(f"{duration(left_s)} left")
        parts.append(f"{quantity(self._row['tokens_per_s'])} tokens/s")
        if self._row["mfu"] is not None:
            parts.append(f"MFU {self._row['mfu']:.1%}")
        memory = self._memory()
        if memory is not None:
            parts.append(
                f"memory {memory.used / 2**30:.1f} of {memory.available / 2**30:.0f} "
                "GiB"
            )
        return parts

    def _left_s(self, now_s: float) -> float | None:
        """Return the seconds left; None before the second row.

        Each remaining step is assumed to take the mean time of the past steps,
        including their evaluations and saves.
        """
        if self._first is None or self._step == self._first[0]:
            return None
        first_step, first_s = self._first
        one_s = (self._last_s - first_s) / (self._step - first_step)
        left_s = one_s * (self._num_steps - self._step)
        return max(0.0, left_s - min(now_s - self._last_s, one_s))


def fitted(parts: Sequence[str], width: int) -> str:
    """Join as many leading parts as fit, with two spaces.

    Args:
      parts: texts, the most important first.
      width: width of the terminal in characters; the last column stays free.
    """
    line = parts[0][: max(width - 1, 0)]
    for part in parts[1:]:
        if len(line) + 2 + len(part) >= width:
            break
        line = f"{line}  {part}"
    return line


def duration(seconds: int | float) -> str:
    """Write a time as 45 s, 3:20 min, 5:08 h or 2 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    if whole < 48 * 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02} h"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def quantity(number: int | float) -> str:
    """Write a number below 999.5e9 in at most three digits: 830, 12.3k, 4.56M."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:  # otherwise 999,600 would round to 1000k
            return f"{number / factor:.3g}{letter}"
    return f"{number:.0f}"


class _Forgiving:
    """A stream that escapes characters that it cannot encode and ignores write errors.

    Closing the terminal must not stop a run.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.encoding = stream.encoding or "utf-8"
        self.is_gone = False

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        shown = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        return self._unless_gone(lambda: self._stream.write(shown)) or 0

    def flush(self) -> None:
        self._unless_gone(self._stream.flush)

    def _unless_gone(self, action: Callable[[], int | None]) -> int | None:
        if self.is_gone:
            return None
        try:
            return action()
        except OSError:
            self.is_gone = True
            return None


class LiveLine:
    """The live line on stdout; a thread draws it."""

    def __init__(self, progress: Progress) -> None:
        """Start to draw.

        Args:
          progress: progress of the run, which gives the parts of the line.
        """
        # Imported only for a terminal, so that a log does not pay for the import.
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._progress = progress
        # Rich moves the cursor, so it writes below the filter of the program.
        self._stdout = _Forgiving(getattr(sys.stdout, "unfiltered", sys.stdout))
        file = cast(TextIO, self._stdout)
        self._console = Console(file=file, highlight=False, emoji=False)

        def draw() -> Text:
            parts = progress.parts(time.monotonic())
            line = fitted(parts, self._console.width)
            return Text(line, style="bold cyan", no_wrap=True, overflow="crop")

        self._live = Live(
            get_renderable=draw,
            console=self._console,
            refresh_per_second=_REDRAWN_PER_S,
        )
        self._live.start()
        # Rich now redirects both streams, and restores them when it stops.
        sys.stdout = mjax.Screen(sys.stdout)
        sys.stderr = mjax.Screen(sys.stderr)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of a step."""
        self._progress.add(row, time.monotonic())

    def say(self, text: str) -> None:
        """Print a text of any length above the line; control characters are escaped."""
        style = next((c for begin, c in _COLORS.items() if text.startswith(begin)), "")
        self._console.print(
            mjax.printable(text), style=style, markup=False, soft_wrap=True
        )

    def close(self) -> None:
        """Draw the line for the last time and leave it on the screen."""
        self._live.stop()
        if self._stdout.is_gone:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- for the rest of the run
