"""Decide whether to restart a run, and after which pause.

Input: saved steps, and the cause of each generation's end. Output: a pause, or the
reason to give up after too many generations that saved nothing new.
"""

from collections.abc import Mapping

from mjax.launch.config import RestartConfig
from mjax.launch.policy import Cause

_NOTHING_FAILED = (Cause.PREEMPTED, Cause.EVICTED)


class Restarts:
    """Counts consecutive generations that failed without a new saved step.

    A preempted or evicted generation resets the count.
    """

    def __init__(self, config: RestartConfig) -> None:
        """Start with no saved step."""
        self._config = config
        self.saved_step = -1
        """The newest step known to be saved; -1 if there is none."""
        self.num_fruitless = 0
        self._saved_before = -1
        self._ended = 0
        self._goes_back_to: int | None = None

    def to_json(self) -> dict[str, int]:
        """Return the state that a new driver needs."""
        to = self._goes_back_to
        return {
            "saved_step": self.saved_step if to is None else to,
            "saved_before": self._saved_before,
            "num_fruitless": self.num_fruitless,
            "ended": self._ended,
        }

    def take_up(self, fields: Mapping[str, int]) -> None:
        """Restore the result of `to_json`; ignore other fields."""
        self.saved_step = fields["saved_step"]
        self._saved_before = fields["saved_before"]
        self.num_fruitless = fields["num_fruitless"]
        self._ended = fields.get("ended", 0)

    def begin(self) -> None:
        """Begin a generation."""
        if self._goes_back_to is not None:
            self.saved_step, self._goes_back_to = self._goes_back_to, None
        self._saved_before = self.saved_step

    def go_back(self, step: int) -> None:
        """Record that the next generation starts at an older saved step."""
        self._goes_back_to = step

    @property
    def is_fruitless(self) -> bool:
        """Whether the current generation has saved nothing new yet."""
        return self.saved_step <= self._saved_before

    def end(self, cause: Cause, generation: int) -> None:
        """Count an ended generation, once."""
        if generation == self._ended:  # by the driver before this one
            return
        self._ended = generation
        if self.is_fruitless and cause not in _NOTHING_FAILED:
            self.num_fruitless += 1
        else:
            self.num_fruitless = 0

    @property
    def why_useless(self) -> str:
        """Why another generation is useless; "" if it may help."""
        if self.num_fruitless < self._config.max_fruitless:
            return ""
        return (
            f"{self.num_fruitless} generations in a row ended without a new saved step"
        )

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next generation."""
        if not self.num_fruitless:
            return 0.0
        pause_s = self._config.pause_s * 2 ** (self.num_fruitless - 1)
        return min(pause_s, self._config.max_pause_s)
