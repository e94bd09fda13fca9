"""Simulate attention kernels whose thread blocks process several tiles in turn.

Input: the tiles of a kernel's grid, as in `schedule`. Output: the share of the time in
which the SMs work, by the way in which thread blocks get their next tile.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np

from scripts.kernels import block_grid, schedule
from scripts.kernels.attention_shapes import Shape
from scripts.kernels.sm_model import NUM_SMS

WAYS = (
    "shipped",
    "counter",
    "round robin",
    "planned",
    "guided",
    "shipped, uneven",
    "counter, uneven",
    "planned, uneven",
    "guided, uneven",
)
_UNEVEN = 0.05
"""Standard deviation of the slowness of SMs; an assumption."""


def planned(
    work_us: Sequence[float],
    plan_us: Sequence[float],
    *,
    fixed_us: float = 0.0,
    slowness: Sequence[float] = (1.0,) * NUM_SMS,
) -> float:
    """Return when the last SM ends if blocks are assigned to SMs in advance.

    A block is assigned to the SM that would be free first if all blocks took their
    planned time.

    Args:
      work_us: actual times of the blocks.
      plan_us: planned times of the blocks.
      fixed_us: cost of a block that is never overlapped.
      slowness: factor on the time of each SM; the plan does not include it.
    """
    free, load = [(0.0, sm) for sm in range(len(slowness))], [0.0] * len(slowness)
    for work, plan in zip(work_us, plan_us, strict=True):
        at, sm = free[0]
        heapq.heapreplace(free, (at + plan + fixed_us, sm))
        load[sm] += work + fixed_us
    return max(one * slow for one, slow in zip(load, slowness, strict=True))


def guided(plan_us: Sequence[float], *, fixed_us: float = 0.0) -> list[int]:
    """Return the number of tiles of each thread block, in grid order.

    The first blocks take many tiles, the last ones one: each at most the mean work left
    per SM. So most tiles begin while another one ends, and the last thread blocks to
    start have a single tile.

    Args:
      plan_us: planned times of the tiles, in order.
      fixed_us: cost of a tile that is not the first of its thread block.
    Source: Polychronopoulos and Kuck 1987, guided self-scheduling, 10.1109/TC.1987.
      5009495. Differs: tiles of unequal times; the counts are fixed beforehand.
    """
    counts, left_us, at = list[int](), math.fsum(plan_us) + fixed_us * len(plan_us), 0
    while at < len(plan_us):
        most_us = left_us / NUM_SMS
        taken_us, first = plan_us[at] + fixed_us, at
        at += 1
        while at < len(plan_us) and taken_us + plan_us[at] + fixed_us <= most_us:
            taken_us += plan_us[at] + fixed_us
            at += 1
        counts.append(at - first)
        left_us -= taken_us
    return counts


def started_when_free(
    work_us: Sequence[float], *, fixed_us: float, slowness: Sequence[float]
) -> float:
    """Return the end time as `makespan` does, on SMs of unequal speed."""
    free = [(0.0, sm) for sm in range(len(slowness))]
    for work in work_us:
        at, sm = free[0]
        heapq.heapreplace(free, (at + (work + fixed_us) * slowness[sm], sm))
    return max(at for at, _ in free)


def efficiencies(shape: Shape, kernel: str, step: float) -> list[float]:
    """Return the efficiency of ways to assign tiles to persistent thread blocks.

    Args:
      shape: shape of the call.
      kernel: name in `KERNELS`.
      step: microseconds of a block of the other sequence.

    Returns:
      The efficiency of each of `WAYS`, in this order. The first is the shipped grid.
      The next ones have one thread block per SM, which takes its next tile from a
      counter, takes every 132nd tile, or follows a plan made from the mask without
      documents. The next has more thread blocks; by the same plan, `guided` says how
      many tiles each takes. The rest repeat this on SMs of unequal speed.
    """

    def grid(shape: Shape) -> tuple[list[block_grid.Block], float]:
        return schedule.shipped_blocks(
            schedule.blocks_of(shape, kernel, step), shape, kernel
        )

    (order, sum_us), parts = grid(shape), schedule.parts_of(shape, kernel)
    without = dataclasses.replace(shape, mean_document=None)
    in_plan, _ = schedule.split(schedule.blocks_of(without, kernel, step), shape, parts)
    tiles_of = schedule.grid_tiles(shape, kernel)
    by_tile = {(b.batch, b.head, b.tile): b.work_us for b in in_plan}
    first = schedule.grid_tiles(without, kernel)[0]
    place = {int(tile): i for i, tile in enumerate(first)}
    work = [b.work_us for b in order]
    plan = [
        by_tile[b.batch, b.head, place[int(tiles_of[b.batch, b.tile])]] for b in order
    ]
    hidden_us = schedule.FIXED_US * (1 - schedule.HIDDEN)
    noise = np.random.default_rng(0).normal(0, _UNEVEN, NUM_SMS)
    uneven = [1 + abs(float(x)) for x in noise]
    even = [1.0] * NUM_SMS
    in_turn = [math.fsum(work[i::NUM_SMS]) for i in range(NUM_SMS)]
    in_turn = [w + len(work[i::NUM_SMS]) * hidden_us for i, w in enumerate(in_turn)]
    counts = guided(plan, fixed_us=hidden_us)
    starts = np.cumsum([0, *counts[:-1]])
    chains = [
        math.fsum(work[at : at + n]) + (n - 1) * hidden_us
        for at, n in zip(starts, counts, strict=True)
    ]
    ends = [
        started_when_free(work, fixed_us=schedule.FIXED_US, slowness=even),
        started_when_free(work, fixed_us=hidden_us, slowness=even) + hidden_us,
        max(in_turn) + hidden_us,
        planned(work, plan, fixed_us=hidden_us) + hidden_us,
        started_when_free(chains, fixed_us=schedule.FIXED_US, slowness=even),
        started_when_free(work, fixed_us=schedule.FIXED_US, slowness=uneven),
        started_when_free(work, fixed_us=hidden_us, slowness=uneven) + hidden_us,
        planned(work, plan, fixed_us=hidden_us, slowness=uneven) + hidden_us,
        started_when_free(chains, fixed_us=schedule.FIXED_US, slowness=uneven),
    ]
    return [math.fsum(work) / NUM_SMS / (end + sum_us) for end in ends]
