"""The trainer's flags of each generation: the launch's flags, with later updates.

Input: the flags of the launch, and later changes by a user. Output: the flags of the
next generation. If the trainer refuses updated flags at its first start with them, the
update is undone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mjax.cli.flags import values, with_flags


class TrainerFlags:
    """Trainer flags of one run."""

    def __init__(self, words: Sequence[str]) -> None:
        """Start with the flags of the launch."""
        self.words = [*words]
        self._before: list[str] | None = None
        self._updated = 0

    def update(self, words: Sequence[str], generation: int) -> None:
        """Change the values of some flags, from the next generation on.

        Raises:
          ValueError: the words do not begin with a flag.
        """
        changed = with_flags(self.words, values(words))
        self._before, self.words = self.words, changed
        self._updated = generation

    def keep(self, generation: int) -> None:
        """Make the update permanent, because ranks of this generation took a step."""
        if generation > self._updated:
            self._before = None

    def take_back(self) -> bool:
        """Undo an update that is not permanent; return whether there was one."""
        if self._before is None:
            return False
        self.words, self._before = self._before, None
        return True

    def to_json(self) -> dict[str, Any]:
        """Return the state that a new driver needs."""
        return {
            "words": self.words,
            "before": self._before,
            "updated": self._updated,
        }

    def take_up(self, fields: Mapping[str, Any]) -> None:
        """Restore the result of `to_json`."""
        self.words, self._before = fields["words"], fields["before"]
        self._updated = fields["updated"]
