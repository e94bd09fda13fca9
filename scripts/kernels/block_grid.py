"""Simulate a grid of thread blocks: when it ends, and what it reads from memory.

Input: thread blocks in the order of a grid. Output: the end of the last block on a
number of SMs, and the bytes that an L2 cache does not have.
"""

import dataclasses
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence

from mjax.hardware.gpus import GPUS
from scripts.kernels.sm_model import NUM_SMS

GPU = GPUS["h200"]
_CACHE_BYTES = GPU.l2_bytes // 2
"""Half of the L2: an SM reads the other half through its own, which keeps a copy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One thread block."""

    batch: int
    head: int
    """Head of the grid: a key head in dkv, a query head otherwise."""
    tile: int
    """Index of the tile in the order of the grid."""
    work_us: float
    reads: tuple[tuple[int, ...], ...]
    """Identifiers of the chunks of memory that the block reads, in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Simulated result of an order of thread blocks."""

    efficiency: float
    """Time in which SMs do work, over the total time of all SMs; at most 1."""
    makespan_us: float
    read_us: float
    """Microseconds of all reads from memory, which overlap the work."""

    @property
    def bound_by_memory(self) -> bool:
        """Whether reading takes longer than computing."""
        return self.read_us > self.makespan_us


def makespan(
    work_us: Sequence[float], *, fixed_us: float = 0.0, sms: int = NUM_SMS
) -> float:
    """Return when the last block ends, if each starts in order on the first free SM."""
    free = [0.0] * sms
    for work in work_us:
        heapq.heapreplace(free, free[0] + work + fixed_us)
    return max(free)


def read_bytes(
    blocks: Sequence[Block],
    chunk_bytes: float,
    *,
    cache_bytes: int = _CACHE_BYTES,
    at_once: int = 1,
) -> float:
    """Return the bytes that are read from memory because the L2 does not have them.

    Blocks read whole chunks in order; the cache evicts the least recently used.

    Args:
      blocks: thread blocks of a grid, in order.
      chunk_bytes: size of a chunk.
      cache_bytes: size of the cache.
      at_once: blocks that run at the same time: all read their first chunks, then all
        their second ones.
    """
    cached = OrderedDict[tuple[int, ...], None]()
    slots, missed = int(cache_bytes // chunk_bytes), 0
    sides = (blocks[i : i + at_once] for i in range(0, len(blocks), at_once))
    walks = (itertools.zip_longest(*(block.reads for block in side)) for side in sides)
    for chunk in itertools.chain.from_iterable(itertools.chain.from_iterable(walks)):
        if chunk is None:  # This block has read all its chunks.
            continue
        if chunk in cached:
            cached.move_to_end(chunk)
            continue
        missed += 1
        cached[chunk] = None
        if len(cached) > slots:
            cached.popitem(last=False)
    return missed * chunk_bytes
