"""Rollback of a diverged run: the step to return to and the data to skip.

Input: a rank's report of its divergence. Output: the values of `--data.skip` for all
later generations, or the advice to give up.
Source: PaLM, arXiv:2204.02311, section 5.1; that run went back about 100 steps and
skipped 200 to 500 batches.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mjax.launch.config import RestartConfig
from mjax.launch.messages import Divergence


class RollBacks:
    """Chooses and counts the rollbacks."""

    def __init__(self, config: RestartConfig, tell: Callable[..., None]) -> None:
        """Start with no rollback.

        Args:
          config: how far and how often to roll back.
          tell: records an event, see `events.teller`.
        """
        self._saves, self._most = config.rollback_saves, config.max_rollbacks
        self._tell = tell
        self._num, self._in_a_row, self._furthest = 0, 0, -1
        self.skip: list[str] | None = None
        """Values of `--data.skip` for later generations; None keeps the trainer's
        flags."""
        self.to = 0
        """Step to which the last rollback went."""

    def go_back(self, found: Divergence | None) -> str:
        """Choose the step to go back to; return "", or why the run gives up instead."""
        assert found is not None
        if self._num >= self._most:
            return (
                f"the run has diverged {self._num + 1} times (--restart.max-rollbacks "
                f"{self._most})"
            )
        is_again = found.step <= self._furthest
        self._in_a_row = self._in_a_row + 1 if is_again else 1
        self._furthest = max(self._furthest, found.step)
        self._num += 1
        saved = sorted(map(int, found.ways))
        self.to = saved[max(0, len(saved) - self._saves * self._in_a_row)]
        self.skip = found.ways[str(self.to)]
        self._tell(
            "roll_back",
            f"rollback {self._num} of at most {self._most}, from step {found.step} to "
            f"{self.to}, skipping the data since: --data.skip {' '.join(self.skip)}",
            "error",
            data={"number": self._num, "to": self.to, "skip": self.skip},
        )
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return the state that a new driver needs."""
        return {
            "skip": self.skip,
            "num_rollbacks": self._num,
            "rollbacks_in_a_row": self._in_a_row,
            "furthest_divergence": self._furthest,
        }

    def take_up(self, fields: Mapping[str, Any]) -> None:
        """Restore the result of `to_json`; ignore other fields."""
        self.skip = fields.get("skip")
        self._num = fields.get("num_rollbacks", 0)
        self._in_a_row = fields.get("rollbacks_in_a_row", 0)
        self._furthest = fields.get("furthest_divergence", -1)
