"""Time limits for ranks without progress.

Input: limits by phase, and the times of past steps. Output: time limits in seconds.
"""

import collections
import math

from mjax.launch.config import LimitsConfig
from mjax.launch.messages import RankState
from mjax.processes.progress import Phase

_NUM_STEP_TIMES = 256
_SORT_EVERY = 32


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

    def limit_s(self, state: RankState) -> float:
        """Return the seconds without progress after which a rank counts as hung."""
        phase = Phase(state.phase)
        if phase is not Phase.STEP:
            return getattr(self._limits, f"{phase.name.lower()}_s")
        if state.first_step_s is None:
            return max(self._limits.first_step_s, self._limits.step_s)
        return max(self._limits.step_s, self._limits.factor * self._p99_s)
