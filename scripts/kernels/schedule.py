"""Simulate which order of the attention kernels' blocks keeps 132 SMs busy.

Input: shapes of a call, the blocks of keys or queries that each tile visits, counted
with the kernels' own functions. Output: for each kernel and order the share of the time
in which the SMs do the work of the tiles.

    python -m scripts.kernels.schedule

One thread block runs on an SM at a time. Blocks start in the order of the grid, each on
the SM that is free first. A block costs its work and a fixed time that is never
overlapped.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mjax.kernels.attention.mosaic_gpu import dkv, masks, op, tiles
from mjax.kernels.attention.tuning import FUSED_H200, MOSAIC_H200, MosaicKernel
from scripts.kernels.attention_shapes import KERNELS, SHAPES, Shape
from scripts.kernels.block_grid import GPU, Block, Outcome, makespan, read_bytes
from scripts.kernels.sm_model import CLOCK_GHZ, FLOPS_PER_CLOCK, NUM_SMS

ORDERS = (
    "by head",
    "tiles first",
    "unsplit",
    "shipped",
    "longest first",
    "cut",
    "persistent",
)
FIXED_US = 2.0
"""Fixed microseconds of a thread block: start, first loads, output. An assumption;
nothing was measured.
"""
HIDDEN = 0.5
"""Share of `FIXED_US` that a persistent grid overlaps: the loads of the next tile and
the stores of the last one, but not the first matmul and softmax of a tile.
"""
SUSTAINED = 0.6
"""Share of the tensor cores' peak that the loop reaches in `step_us`."""
PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4, "fused": 5}
"""Matmuls for each visited block."""
LAUNCH_US = 3.0
"""Fixed microseconds of the kernel that adds the parts of a split walk. An
assumption."""
BY_KEYS = ("dkv", "fused")
"""Kernels with tiles of keys and blocks of queries."""
_FUSED = MosaicKernel(block=64, stages=3)
"""Sizes of the fused kernel for head widths that it is not built for."""
_CHUNK = 128
"""Number of positions that the simulated cache loads and evicts together."""


def step_us(kernel: str, head_dim: int, sizes: MosaicKernel) -> float:
    """Return the microseconds of a block of the other sequence, for a whole tile."""
    flops = PRODUCTS[kernel] * 2.0 * sizes.tile * sizes.block * head_dim
    return flops / FLOPS_PER_CLOCK / (CLOCK_GHZ * 1e3) / SUSTAINED


def problem(shape: Shape) -> tiles.Problem:
    """Return the `Problem` of a call: the sizes that the kernels get."""
    tuning = MOSAIC_H200[shape.head_dim]
    return tiles.Problem(
        seq_len=shape.seq_len,
        padded_len=op.padded_len(shape.seq_len, tuning.forward, tuning.dq, tuning.dkv),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        window=shape.window,
        scale=1.0,
        soft_cap=None,
    )


def order_of(shape: Shape, kernel: str, parts: int) -> tiles.Order:
    """Return the order of the kernel's own grid.

    Args:
      shape: shape of the call.
      kernel: name in `KERNELS`.
      parts: parts of a group of query heads, for dkv; 1 for other kernels.
    """
    heads, other_heads = shape.heads, shape.kv_heads
    if kernel in BY_KEYS:
        heads, other_heads = other_heads * parts, heads
    return tiles.Order.of(
        problem(shape),
        batch=shape.batch,
        heads=heads,
        other_heads=other_heads,
        tile=sizes_of(kernel, shape.head_dim).tile,
        uneven=kernel in BY_KEYS and shape.mean_document is not None,
        entry_bytes=_entry_bytes(kernel),
    )


def parts_of(shape: Shape, kernel: str) -> int:
    """Return into how many parts dkv splits a group of query heads; 1 if not dkv."""
    if kernel != "dkv":
        return 1
    return dkv.shipped_parts(
        problem(shape),
        batch=shape.batch,
        tile=MOSAIC_H200[shape.head_dim].dkv.tile,
        has_documents=shape.mean_document is not None,
    )


def sizes_of(kernel: str, head_dim: int) -> MosaicKernel:
    """Return the shipped sizes of a kernel for a head width."""
    if kernel == "fused":
        return FUSED_H200.get(head_dim, _FUSED)
    return getattr(MOSAIC_H200[head_dim], kernel)


def _entry_bytes(kernel: str) -> int:
    """Return the bytes of all walked arrays per position and column of a head.

    The arrays have 16-bit numbers (K and V, or queries and cotangents) and, in the
    fused kernel, float32 sums.
    """
    return 2 * 2 + (4 if kernel == "fused" else 0)


def visits(
    shape: Shape, kernel: str, masked_cost: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps, the first block and the end block of each sequence and tile.

    A step counts in part if some warpgroups skip the block.

    Args:
      shape: shape of the call.
      kernel: name in `KERNELS`.
      masked_cost: cost of a step with a masked block, in plain steps.
    """
    sizes = sizes_of(kernel, shape.head_dim)
    p = problem(shape)
    first = jnp.arange(math.ceil(shape.seq_len / sizes.tile)) * sizes.tile
    by_keys = kernel in BY_KEYS
    bounds = masks.LastQueries if by_keys else masks.FirstKeys
    edges = op.last_queries if by_keys else op.first_keys
    ids = shape.segment_ids()
    refs = [None] * shape.batch if ids is None else edges(p, jnp.asarray(ids))
    rows = []
    for ref in refs:
        seen = bounds(p, ref)
        whole = seen.blocks(first, sizes.tile, sizes.block)
        steps = jnp.zeros(first.shape)
        parts = [
            seen.blocks(first + wg * tiles.ROWS, tiles.ROWS, sizes.block).within(
                whole.low, whole.high
            )
            for wg in range(sizes.warpgroups)
        ]
        if kernel == "fused":
            # Warpgroups synchronise in each block, even those that skip it.
            low = functools.reduce(jnp.maximum, (part.full_low for part in parts))
            high = functools.reduce(jnp.minimum, (part.full_high for part in parts))
            all_plain = masks.Blocks(
                low=whole.low,
                high=whole.high,
                full_low=low,
                full_high=jnp.maximum(low, high),
            )
            parts = [all_plain] * sizes.warpgroups
        for part in parts:
            plain = jnp.maximum(part.full_high - part.full_low, 0)
            masked = jnp.maximum(part.high - part.low, 0) - plain
            steps += (plain + masked * masked_cost) / sizes.warpgroups
        rows.append((steps, whole.low, whole.high))
    steps, low, high = (np.stack([np.asarray(r[i]) for r in rows]) for i in range(3))
    return steps, low, high


def grid_tiles(shape: Shape, kernel: str) -> np.ndarray:
    """Return the tiles of each sequence of the batch, in the order of the grid.

    The heaviest tiles of a head come first: the last queries; the first keys, or, with
    documents, those that most queries see.
    """
    p, tile = problem(shape), sizes_of(kernel, shape.head_dim).tile
    ids = shape.segment_ids()
    if kernel == "dkv" and ids is not None:
        last = op.last_queries(p, jnp.asarray(ids))
        return np.asarray(dkv.heaviest_first(p, last, None, tile))
    order = np.arange(math.ceil(shape.seq_len / tile))
    order = order if kernel in BY_KEYS else order[::-1]
    return np.broadcast_to(order, (shape.batch, len(order)))


def blocks_of(
    shape: Shape, kernel: str, step: float, masked_cost: float = 1.0
) -> list[Block]:
    """List the blocks of a kernel without splits, one head after the other."""
    sizes = sizes_of(kernel, shape.head_dim)
    steps, low, high = visits(shape, kernel, masked_cost)
    by_keys = kernel in BY_KEYS
    grid_heads = shape.kv_heads if by_keys else shape.heads
    walks = shape.group if by_keys else 1
    order = grid_tiles(shape, kernel)
    blocks = []
    for b in range(shape.batch):
        for n in range(grid_heads):
            for place, t in enumerate(order[b]):
                begin = int(low[b, t]) * sizes.block // _CHUNK
                end = math.ceil(int(high[b, t]) * sizes.block / _CHUNK)
                first = n * walks if by_keys else n // shape.group
                reads = tuple(
                    (b, first + g, c) for g in range(walks) for c in range(begin, end)
                )
                work = float(steps[b, t]) * step * walks
                blocks.append(
                    Block(batch=b, head=n, tile=place, work_us=work, reads=reads)
                )
    return blocks


def tiles_first(blocks: Sequence[Block]) -> list[Block]:
    """Order by tile, then sequence, then head: the heaviest tiles come first."""
    return sorted(blocks, key=lambda x: (x.tile, x.batch, x.head))


def shipped(blocks: Sequence[Block], order: tiles.Order) -> list[Block]:
    """Order blocks as the shipped grid does: by section of heads, then by tile."""

    def place(block: Block) -> tuple[int, int, int]:
        row = block.batch * order.heads + block.head
        return row // order.heads_of_section, block.tile, row

    return sorted(blocks, key=place)


def longest_first(blocks: Sequence[Block]) -> list[Block]:
    """Order blocks by work, longest first; ties keep their order."""
    return sorted(blocks, key=lambda x: -x.work_us)


def split(
    blocks: Sequence[Block], shape: Shape, parts: int
) -> tuple[list[Block], float]:
    """Give each equal part of dkv's query heads its own block and head of the grid.

    Returns:
      The blocks, and the microseconds to add the parts.
    """
    pieces = [
        dataclasses.replace(_piece(block, i, parts), head=block.head * parts + i)
        for block in blocks
        for i in range(parts)
    ]
    return pieces, _sum_us(shape, "dkv", len(pieces) if parts > 1 else 0)


def cut(
    blocks: Sequence[Block], shape: Shape, kernel: str
) -> tuple[list[Block], float]:
    """Split the tiles that take more than half of an SM's mean load, longest first.

    Returns:
      The pieces, and the microseconds to add them.
    """
    most_us = math.fsum(block.work_us for block in blocks) / NUM_SMS / 2
    pieces, partial = list[Block](), 0
    for block in blocks:
        num = math.ceil(block.work_us / most_us)
        pieces += [_piece(block, i, num) for i in range(num)]
        partial += num if num > 1 else 0
    return longest_first(pieces), _sum_us(shape, kernel, partial)


def _piece(block: Block, index: int, num: int) -> Block:
    """Return one of the equal parts of a walk."""
    begin, end = (len(block.reads) * i // num for i in (index, index + 1))
    reads = block.reads[begin : max(end, begin + 1)]
    return dataclasses.replace(block, work_us=block.work_us / num, reads=reads)


def _sum_us(shape: Shape, kernel: str, num_partial: int) -> float:
    """Return the microseconds to write partial float32 sums and add them in order.

    The sums are written to memory and read back, and the 16-bit results are written.
    """
    if not num_partial:
        return 0.0
    tile = sizes_of(kernel, shape.head_dim).tile
    sums, heads = (2, shape.kv_heads) if kernel == "dkv" else (1, shape.heads)
    partial_bytes = num_partial * sums * tile * shape.head_dim * 4.0
    positions = shape.batch * shape.seq_len * heads
    num_bytes = 2 * partial_bytes + positions * sums * shape.head_dim * 2.0
    return LAUNCH_US + num_bytes / GPU.memory_bytes_per_s * 1e6


def outcomes(
    shape: Shape,
    kernel: str,
    *,
    step: float | None = None,
    masked_cost: float = 1.0,
    fixed_us: float = FIXED_US,
) -> dict[str, Outcome]:
    """Simulate every order of a kernel's blocks.

    Args:
      shape: shape of the call.
      kernel: name in `KERNELS`.
      step: microseconds of a block of the other sequence; None uses `step_us`.
      masked_cost: time of a masked block over that of a plain one.
      fixed_us: cost of a thread block that nothing overlaps.
    """
    sizes = sizes_of(kernel, shape.head_dim)
    if step is None:
        step = step_us(kernel, shape.head_dim, sizes)
    blocks = blocks_of(shape, kernel, step, masked_cost)
    total_us = math.fsum(block.work_us for block in blocks)
    chunk = min(_CHUNK, shape.seq_len) * shape.head_dim
    chunk_bytes = float(chunk * _entry_bytes(kernel))
    # Sums evicted from the cache are written to memory and read back when needed.
    more = 1.5 if kernel == "fused" else 1.0

    def outcome(order: Sequence[Block], fixed: float, extra_us: float = 0.0):
        end_us = makespan([block.work_us for block in order], fixed_us=fixed)
        num_bytes = read_bytes(order, chunk_bytes, at_once=NUM_SMS) * more
        read_us = num_bytes / GPU.memory_bytes_per_s * 1e6
        whole_us = max(end_us, read_us) + extra_us
        return Outcome(
            efficiency=total_us / NUM_SMS / whole_us,
            makespan_us=end_us + extra_us,
            read_us=read_us,
        )

    whole = shipped(blocks, order_of(shape, kernel, 1))
    ordered, sum_us = shipped_blocks(blocks, shape, kernel)
    found = {
        "by head": outcome(blocks, fixed_us),
        "tiles first": outcome(tiles_first(blocks), fixed_us),
        "unsplit": outcome(whole, fixed_us),
        "shipped": outcome(ordered, fixed_us, sum_us),
        "longest first": outcome(longest_first(blocks), fixed_us),
        "persistent": outcome(ordered, fixed_us * (1 - HIDDEN), sum_us),
    }
    pieces, extra_us = cut(blocks, shape, kernel)
    found["cut"] = outcome(pieces, fixed_us, extra_us)
    return found


def shipped_blocks(
    blocks: Sequence[Block], shape: Shape, kernel: str
) -> tuple[list[Block], float]:
    """Split and order blocks as the kernel does.

    Returns:
      The blocks of the grid, and the time to add up the parts of a group.
    """
    parts = parts_of(shape, kernel)
    pieces, sum_us = split(blocks, shape, parts)
    return shipped(pieces, order_of(shape, kernel, parts)), sum_us


def one_grid(
    works: Sequence[Sequence[Block]],
    *,
    fixed_us: float = FIXED_US,
    extra_us: float = 0.0,
) -> float:
    """Return the efficiency of several kernels' blocks in one grid, longest first."""
    blocks = longest_first([block for work in works for block in work])
    work_us = [block.work_us for block in blocks]
    end_us = makespan(work_us, fixed_us=fixed_us) + extra_us
    return math.fsum(work_us) / NUM_SMS / end_us


def slack(shape: Shape, kernel: str) -> float:
    """Return the mean load of an SM over the time of the longest tile, unsplit."""
    work = [block.work_us for block in blocks_of(shape, kernel, 1.0)]
    return math.fsum(work) / NUM_SMS / max(work)


def table(
    shapes: Sequence[Shape],
    steps: Callable[[str, int], float] | None = None,
    fixed_us: float = FIXED_US,
) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table, one row per shape and kernel.

    Each column is an order of the thread blocks.

    Args:
      shapes: shapes of the calls.
      steps: (kernel, head width) -> microseconds of a block of the other sequence; None
        uses `step_us`.
      fixed_us: cost of a thread block that nothing overlaps.
    """
    rows = []
    for shape in shapes:
        for kernel in KERNELS:
            step = None if steps is None else steps(kernel, shape.head_dim)
            found = outcomes(shape, kernel, step=step, fixed_us=fixed_us)
            cells = [_cell(found[order]) for order in ORDERS]
            parts = str(parts_of(shape, kernel))
            load = f"{slack(shape, kernel):.2f}"
            time = f"{found['shipped'].makespan_us:.0f}"
            rows.append([shape.name, kernel, load, parts, time, *cells])
    return ["shape", "kernel", "load / longest", "parts", "us", *ORDERS], rows


def _cell(outcome: Outcome) -> str:
    return f"{outcome.efficiency:.2f}{' m' if outcome.bound_by_memory else ''}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--fixed-us", type=float, default=FIXED_US, help="cost of a block, not hidden"
    )
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    header, rows = table(SHAPES, fixed_us=args.fixed_us)
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
