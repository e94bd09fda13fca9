"""Average the timing of the last steps, for lines that people read.

A step's time ends when the host reads its metrics. The host dispatches later steps
meanwhile, so one step can be charged with the time of its successor, whose own time is
then almost 0. Only the sum over several steps is meaningful.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

LEAST_STEPS = 10
"""Minimum number of steps in an average. One wrong step changes it little."""


class Speed:
    """The mean timing of the last steps of a start."""

    def __init__(self, num_steps: int) -> None:
        """Start without steps.

        Args:
          num_steps: steps in an average, at least `LEAST_STEPS`.
        """
        self._rows = deque[Mapping[str, Any]](maxlen=max(num_steps, LEAST_STEPS))
        self._is_first = True

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of a step.

        The first row of a start contains the compilation, so the second one replaces
        it.
        """
        if len(self._rows) == 1 and self._is_first:
            self._rows.clear()
            self._is_first = False
        self._rows.append(row)

    def mean(self) -> dict[str, float | None]:
        """Return the fields of timing of a row, averaged over the added rows.

        Returns:
          `step_s` and `data_wait_s`, seconds per step; `tokens_per_s`, all tokens over
          all seconds; `mfu`, weighted by time, None if it is unknown.
        """
        num, time_s = len(self._rows), sum(row["step_s"] for row in self._rows)
        tokens = sum(row["tokens"] for row in self._rows)
        mfu = None
        if all(row["mfu"] is not None for row in self._rows):
            mfu = sum(row["mfu"] * row["step_s"] for row in self._rows) / time_s
        return {
            "step_s": time_s / num,
            "data_wait_s": sum(row["data_wait_s"] for row in self._rows) / num,
            "tokens_per_s": tokens / time_s,
            "mfu": mfu,
        }
