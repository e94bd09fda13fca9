"""Write the stacks of this process when a step takes far longer than usual.

Input: the start and end of each step. Output: stacks of all threads in a file, written
while the slow step still runs, and an event after it. Python's watchdog writes the
stacks (`faulthandler.dump_traceback_later`). Its thread needs no interpreter lock, so
it also works if another thread holds the lock for ever. Starting that thread costs more
than a short step, so one thread watches several steps, and the stacks are written when
a step has lasted 1 to 1.25 times the limit.
"""

import bisect
import faulthandler
import math
import time
from collections import deque
from pathlib import Path
from typing import TextIO

from mjax.observe.spans import Event

_NUM_USUAL = 200
"""Number of recent steps that the percentile covers. The 99th percentile of fewer than
100 steps is their maximum."""
_NUM_BEFORE = 20
"""Number of steps before the first check. The first steps compile and fill caches."""
_LEAST_S = 1.0
"""Seconds below which no step is slow. It is above the noise of the operating
system."""
_MOST_S = 86_400.0
"""Maximum limit in seconds. It is far above any step, and longer waits overflow."""
_MOST_DUMPS = 20
"""Maximum number of stacks written by one process. It bounds the size of the file."""
_REARM_PART = 0.25
"""Fraction of the limit after which the watchdog is restarted. Not measured."""


class SlowSteps:
    """Watches the steps of one process. Called from one thread."""

    def __init__(self, path: Path | None = None, factor: int | float = 3.0) -> None:
        """Start without recorded steps.

        Args:
          path: file of stacks, created when needed; None watches no step.
          factor: a step is slow above this multiple of the 99th percentile.
        """
        self._path, self._factor = path, factor
        self._can_write = True
        self._file: TextIO | None = None
        self._usual: deque[float] = deque()
        self._ascending: list[float] = []
        self._began_s: float | None = None
        self._armed_s = -math.inf
        self._limit_s = math.inf
        self._num_dumps = 0

    def begin(self) -> None:
        """Watch the step that starts now."""
        if self._path is None:
            return
        self._began_s = now_s = time.perf_counter()
        late_s = _REARM_PART * self._limit_s
        is_armed = now_s - self._armed_s < late_s
        if not self._can_write or is_armed or math.isinf(late_s):
            return
        if self._file is None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a")
            except OSError:
                self._can_write = False
                return
        faulthandler.dump_traceback_later(self._limit_s + late_s, file=self._file)
        self._armed_s = now_s

    def end(self, step: int) -> Event | None:
        """Stop watching; report the step if it was slow.

        Args:
          step: the step that has ended, from 1.
        """
        if self._began_s is None:
            return None
        took_s = time.perf_counter() - self._began_s
        self._began_s = None
        was_slow, limit_s = took_s > self._limit_s, self._limit_s
        self._count(took_s)
        self._num_dumps += was_slow
        self._limit_s = self._next_limit_s()
        if not was_slow:
            return None
        late_s = (1 + _REARM_PART) * limit_s
        stacks = (
            f"stacks after {late_s:.1f} s are in {self._path}"
            if self._can_write
            else "no stacks were written"
        )
        return Event(
            time_ns=time.time_ns(),
            kind="slow_step",
            severity="warning",
            text=f"step {step} took {took_s:.1f} s, more than {limit_s:.1f} s: "
            f"{self._factor:g} times the 99th percentile; {stacks}",
            data={"step": step, "step_s": took_s, "limit_s": limit_s},
        )

    def skip(self) -> None:
        """Stop watching before an evaluation or a save, which takes longer."""
        self._began_s = None
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed_s = -math.inf

    def close(self) -> None:
        """Close the file."""
        self.skip()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _count(self, took_s: float) -> None:
        """Record the time of a step; drop the oldest if there are too many."""
        self._usual.append(took_s)
        bisect.insort(self._ascending, took_s)
        if len(self._usual) > _NUM_USUAL:
            oldest_s = self._usual.popleft()
            del self._ascending[bisect.bisect_left(self._ascending, oldest_s)]

    def _next_limit_s(self) -> float:
        if len(self._usual) < _NUM_BEFORE or self._num_dumps >= _MOST_DUMPS:
            return math.inf
        at = math.ceil(0.99 * len(self._usual)) - 1
        return min(max(_LEAST_S, self._factor * self._ascending[at]), _MOST_S)
