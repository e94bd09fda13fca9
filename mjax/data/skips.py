"""Batches of the data order that a run leaves out.

Input: the texts STEP:N of the flag `--data.skip`: after STEP steps, the next N batches
are left out. Output: the position of a step's batch in the order, and whether a state
is compatible with other skips. Everything is a function of these texts, so a restarted
run reads the same batches.

A run that diverges often recovers if it resumes from an earlier checkpoint and leaves
out the data that followed (PaLM, arXiv:2204.02311, section 5.1; there the same data,
read from another state, did no harm).
"""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, order=True)
class Skip:
    """Consecutive batches that are left out."""

    after: int
    """Number of optimizer steps before the left-out batches."""
    batches: int

    def __str__(self) -> str:
        return f"{self.after}:{self.batches}"


def read(texts: Sequence[str]) -> tuple[Skip, ...]:
    """Parse texts STEP:N.

    Raises:
      ValueError: a text is not of this form, or the texts are not in order.
    """
    found: list[Skip] = []
    for text in texts:
        after, _, batches = text.partition(":")
        are_numbers = all(
            word.isascii() and word.isdigit() for word in (after, batches)
        )
        if not are_numbers or int(batches) < 1:
            raise ValueError(
                f"--data.skip must be STEP:N with whole numbers, N at least 1, got "
                f"{text!r}; 40:12 leaves out 12 batches after step 40"
            )
        skip = Skip(int(after), int(batches))
        if found and skip.after <= found[-1].after:
            raise ValueError(
                f"--data.skip must name steps in order, each once, got "
                f"{' '.join(texts)}"
            )
        found.append(skip)
    return tuple(found)


def place(step: int, skips: Sequence[Skip]) -> int:
    """Return the position in the data order of the batch after `step` steps."""
    return step + sum(skip.batches for skip in skips if skip.after <= step)


def seen(step: int, skips: Sequence[Skip]) -> tuple[Skip, ...]:
    """Return the skips that are before a state of `step` steps."""
    return tuple(skip for skip in skips if skip.after < step)


def roll_back(skips: Sequence[Skip], to: int, step: int) -> tuple[Skip, ...]:
    """Return the skips of a run that goes back and leaves out the batches since then.

    Args:
      skips: skips so far.
      to: number of steps of the state from which the run resumes.
      step: number of steps of the state that cannot continue; its last batch is the
        last one left out.
    """
    kept = seen(to, skips)
    first = to + sum(skip.batches for skip in kept)
    return (*kept, Skip(to, max(1, place(step - 1, skips) + 1 - first)))


def continues(old: Sequence[Skip], new: Sequence[Skip]) -> bool:
    """Return whether a run with the old skips may continue with the new ones.

    New skips may be added. An old skip may be missing only if the last new skip is not
    after it: the run has then gone back to a state before the old skip.
    """
    last = new[-1].after if new else math.inf
    return all(skip in new or last <= skip.after for skip in old)
