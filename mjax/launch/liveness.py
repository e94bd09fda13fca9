"""Time limits for others, and a clock that forgives the pauses of this process.

Input: limits by phase, and the times of past steps. Output: time limits in seconds; and
the time by which a driver or an agent may judge others.
"""

import collections
import math
import time

from mjax.launch.config import LimitsConfig
from mjax.launch.messages import RankState
from mjax.processes.progress import Phase

_NUM_STEP_TIMES = 256
_SORT_EVERY = 32


class Clock:
    """A monotonic clock that stands still while this process does.

    A process may be stopped (SIGSTOP, a debugger, a paused virtual machine) or wait for
    a disk. The messages of others then wait in its sockets, so it must not count that
    time against them. Whatever two readings are apart beyond `most_s` is such a gap.
    """

    def __init__(self, most_s: float) -> None:
        """Start at the time of `time.monotonic`.

        Args:
          most_s: seconds between two readings while the process works.
        """
        self._most_s, self._read_s = most_s, time.monotonic()
        self.lost_s = 0.0
        """Seconds of all gaps so far."""
        self.is_held = False
        """Whether the clock stands still because this process cannot act."""

    def now_s(self) -> float:
        """Return the time, in seconds."""
        monotonic_s = time.monotonic()
        most_s = 0.0 if self.is_held else self._most_s
        self.lost_s += max(0.0, monotonic_s - self._read_s - most_s)
        self._read_s = monotonic_s
        return monotonic_s - self.lost_s

    def real_s(self, at_s: float) -> float:
        """Return the time of `time.monotonic` at a time since the last gap."""
        return at_s + self.lost_s


class Liveness:
    """Time limits that follow the recent step time."""

    def __init__(self, limits: LimitsConfig) -> None:
        """Start without a known step time."""
        self._limits = limits
        self._step_times_s: collections.deque[float] = collections.deque(
            maxlen=_NUM_STEP_TIMES
        )
        self._num_taken, self._p99_s = 0, 0.0

    def took(self, state: RankState) -> None:
        """Record the time of a rank's last step, if it reports one."""
        if state.step_s is not None:
            self._step_times_s.append(state.step_s)
            self._num_taken += 1
            if self._num_taken <= _SORT_EVERY or self._num_taken % _SORT_EVERY == 0:
                ordered = sorted(self._step_times_s)
                self._p99_s = ordered[math.ceil(0.99 * len(ordered)) - 1]

    def limit(self, state: RankState) -> tuple[float, str]:
        """Return the seconds without progress after which a rank counts as hung.

        The second value is the field of `LimitsConfig` that sets this limit.
        """
        limits, phase = self._limits, Phase(state.phase)
        if phase is not Phase.STEP:
            name = f"{phase.name.lower()}_s"
            return getattr(limits, name), name
        shortest = limits.step_s, "step_s"
        if state.first_step_s is None:
            return max((limits.first_step_s, "first_step_s"), shortest)
        return max((limits.factor * self._p99_s, "factor"), shortest)
