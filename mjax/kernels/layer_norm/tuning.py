"""Sizes of the Mosaic GPU backward pass of norms, and where they come from."""

import dataclasses

LANE = 256
"""Entries of a row of a position, for mosaic_gpu: the longest that one copy moves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicTuning:
    """Sizes for the mosaic_gpu backend."""

    blocks: int
    """Thread blocks of one warpgroup, each with every blocks-th position."""
    stages: int
    """Positions in shared memory: one in work, the others on their way."""

    def __post_init__(self):
        if self.blocks < 1 or self.stages < 1:
            raise ValueError(
                "blocks and stages must be at least 1, got "
                f"{self.blocks} and {self.stages}; use 264 and 2"
            )


def mosaic(width: int) -> MosaicTuning:
    """Return the sizes for a model width.

    Not timed. Two blocks for each of the 132 multiprocessors of an H200, while
    registers and shared memory hold two; each block adds 4 D bytes of partial sums,
    written and read, 3% of the traffic at 8192 positions.
    """
    return MosaicTuning(blocks=264 if width <= 4096 else 132, stages=2)
