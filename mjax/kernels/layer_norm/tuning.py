"""Sizes of the Mosaic GPU backward pass of norms, and their source."""

import dataclasses

LANE = 256
"""Entries per row into which mosaic_gpu splits a position: the most per dim that a copy
can move."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicTuning:
    """Sizes for the mosaic_gpu backend."""

    blocks: int
    """Number of thread blocks, of one warpgroup each. Block i processes positions i,
    i + blocks, i + 2 blocks and so on."""
    stages: int
    """Number of positions in shared memory: one is processed, the others are being
    loaded."""

    def __post_init__(self):
        if self.blocks < 1 or self.stages < 1:
            raise ValueError(
                "blocks and stages must be at least 1, got "
                f"{self.blocks} and {self.stages}; use 396 and 2"
            )


def mosaic(width: int) -> MosaicTuning:
    """Return the sizes for a model width.

    Not tuned on a GPU: chosen from the machine code
    (docs/benchmarks/memory_kernels.md). A single block takes 1000 clocks per position
    at width 768 and 2500 at 8192, mostly waiting. The memory of an H200 delivers one
    position to each of its 132 multiprocessors in 310 clocks at 768 and 3300 at 8192.
    So several blocks share a multiprocessor: enough that together they need only about
    half of the memory's clocks per position. There are two exceptions. At 768 the
    instructions alone take 335 clocks, more than the memory, and more blocks would not
    change this. At 8192 shared memory holds only one block, which needs 76% of the
    memory's clocks. Each block writes and reads 4 D bytes of partial sums. At 8192
    positions, one block per multiprocessor adds 1.6% to the traffic, two add 3.2%.
    """
    if width <= 1024:
        return MosaicTuning(blocks=4 * 132, stages=4)
    if width <= 3072:
        return MosaicTuning(blocks=3 * 132, stages=2)
    return MosaicTuning(blocks=(2 if width < 8192 else 1) * 132, stages=2)
