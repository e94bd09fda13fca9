"""The trainer's flags from one generation to the next: as given, then as updated.

Enters: the flags of the launch, and those that a person changes meanwhile. Leaves: the
flags of the next generation. What the trainer refuses at its first start with them is
taken back.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mjax.flags import values, with_flags


class TrainerFlags:
    """The flags of one run."""

    def __init__(self, words: Sequence[str]) -> None:
        """Begin with those of the launch."""
        self.words = [*words]
        self._before: list[str] | None = None
        self._updated = 0

    def update(self, words: Sequence[str], generation: int) -> None:
        """Give some flags other values, from the generation after this one on.

        Raises:
          ValueError: the words do not begin with a flag.
        """
        changed = with_flags(self.words, values(words))
        self._before, self.words = self.words, changed
        self._updated = generation

    def keep(self, generation: int) -> None:
        """Take them for good: the ranks of this generation have taken a step."""
        if generation > self._updated:
            self._before = None

    def take_back(self) -> bool:
        """Go back to those of before an update; say whether there was one."""
        if self._before is None:
            return False
        self.words, self._before = self._before, None
        return True

    def to_json(self) -> dict[str, Any]:
        """Return what a new driver must know."""
        return {
            "words": self.words,
            "before": self._before,
            "updated": self._updated,
        }

    def take_up(self, fields: Mapping[str, Any]) -> None:
        """Go on with what `to_json` returned."""
        self.words, self._before = fields["words"], fields["before"]
        self._updated = fields["updated"]
