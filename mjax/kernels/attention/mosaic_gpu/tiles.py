"""What the three attention kernels share: sizes, layouts, masks, and the loading ring.

A tile is what one thread block computes: rows of queries (forward, dq) or of keys
(dkv), `ROWS` for each of its compute warpgroups. A block is a piece of the other
sequence, loaded into a ring of slots in shared memory. One more warpgroup does nothing
but load.

Letters beside the usual ones: i positions of queries, j of keys, P padded length.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows of a warpgroup: M of every wgmma instruction (PTX ISA, wgmma.mma_async)."""
LOADER_REGISTERS = 24
"""Registers of a thread that only loads: the least that can be asked for."""
LOG2_E = math.log2(math.e)

# How a [64, n] float32 accumulator lies in the registers of a warpgroup, and the two
# vectors that go with it: a value for each row, a value for each column.
TILE = plgpu.Layout.WGMMA
ROW = TILE.reduce(1)
COLUMN = TILE.reduce(0)

Scalar = Any
"""An int, or an int32 scalar of the kernel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The sizes of one call, and the rule by which a query sees a key."""

    seq_len: int
    """T."""
    padded_len: int
    """P, length of rows with one number per position (log-sum-exp, delta, segments):
    whole tiles and blocks, so that each copy of a part is aligned and inside."""
    heads: int
    """N."""
    kv_heads: int
    """K."""
    head_dim: int
    """H."""
    window: int | None
    """Keys that a query sees, itself included; None is all before it."""
    scale: float
    """Factor on the scores, positive."""
    soft_cap: float | None
    """Bound that tanh sets to the scaled scores."""

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.heads // self.kv_heads

    @property
    def reach(self) -> int:
        """Keys that a query can see."""
        return self.seq_len if self.window is None else self.window

    @property
    def exponent(self) -> float:
        """Factor from what `capped` returns to an exponent of 2."""
        return LOG2_E * (self.scale if self.soft_cap is None else self.soft_cap)

    def capped(self, scores: jax.Array) -> jax.Array:
        """Apply the soft cap to raw scores q k; times `exponent` it is the logit.

        tanh(x) = 1 - 2 / (exp(2 x) + 1): the instruction tanh.approx has an error of
        2^-11 (PTX ISA), which the cap would multiply.
        """
        if self.soft_cap is None:
            return scores
        twice = 2.0 * LOG2_E * self.scale / self.soft_cap
        return 1.0 - 2.0 / (jnp.exp2(scores * twice) + 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks that rows visit: low to high - 1, scalars of the kernel."""

    low: Scalar
    high: Scalar
    full_low: Scalar
    """From here to full_high - 1, every row meets all of the block: no mask."""
    full_high: Scalar

    def within(
        self, low: Scalar, high: Scalar, full: tuple[Scalar, Scalar]
    ) -> "Blocks":
        """Return the part in [low, high), masked outside `full`; it may be empty."""
        low = clip(self.low, low, high)
        high = clip(self.high, low, high)
        full_low = clip(jnp.maximum(self.full_low, full[0]), low, high)
        full_high = clip(jnp.minimum(self.full_high, full[1]), full_low, high)
        return Blocks(low=low, high=high, full_low=full_low, full_high=full_high)

    def parts(self) -> list[tuple[Scalar, Scalar, bool]]:
        """Return begin, end and whether a mask is needed, in order."""
        return [
            (self.low, self.full_low, True),
            (self.full_low, self.full_high, False),
            (self.full_high, self.high, True),
        ]


def key_blocks(p: Problem, i0: Scalar, rows: int, block: int) -> Blocks:
    """Bound the blocks of keys that queries i0 to i0 + rows - 1 see.

    Block kb is seen in full by all of them iff its last key is not after the first
    query, and its first key is still in the window of the last.
    """
    return Blocks(
        low=floor_div(jnp.maximum(i0 - (p.reach - 1), 0), block),
        high=ceil_div(jnp.minimum(i0 + rows, p.seq_len), block),
        full_low=ceil_div(jnp.maximum(i0 + rows - p.reach, 0), block),
        full_high=floor_div(i0 + 1, block),
    )


def keys_in_segments(
    blocks: Blocks, segment_refs: list[Any], b: Scalar, t: Scalar
) -> tuple[Scalar, Scalar, Scalar, Any | None]:
    """Narrow the blocks of keys of tile t to those that may share a segment with it.

    Args:
      blocks: those that the window leaves.
      segment_refs: the segment of each position and `op.key_bounds`, or nothing.
      b: row of the batch.
      t: tile.

    Returns:
      low, high, the first block from which on all is one segment, and the segments of
      row b, None where there are none.
    """
    low, high = blocks.low, blocks.high
    if not segment_refs:
        return low, high, low, None
    ids, bounds = segment_refs
    return jnp.maximum(low, bounds[b, 0, t]), high, bounds[b, 1, t], ids.at[b]


def query_blocks(p: Problem, j0: Scalar, rows: int, block: int) -> Blocks:
    """Bound the blocks of queries that see keys j0 to j0 + rows - 1.

    All queries of block qb see all the keys iff its first is not before the last key,
    and its last still has the first key in its window.
    """
    return Blocks(
        low=floor_div(j0, block),
        high=ceil_div(jnp.minimum(j0 + rows - 1 + p.reach, p.seq_len), block),
        full_low=ceil_div(j0 + rows - 1, block),
        full_high=floor_div(j0 + p.reach, block),
    )


def visible(
    p: Problem,
    shape: tuple[int, int],
    starts: tuple[Scalar, Scalar],
    query_dim: int,
    segments: Any | None,
) -> jax.Array:
    """Tell, for each entry of a piece of the scores, whether the query sees the key.

    Args:
      p: the rule.
      shape: of the piece.
      starts: first position along each dim.
      query_dim: the dim along which queries lie.
      segments: [P] in global memory, the segment of each position; None is one for all.
    """
    where = [
        start + plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=TILE)
        for dim, start in enumerate(starts)
    ]
    i, j = where[query_dim], where[1 - query_dim]
    mask = j <= i
    if p.window is not None:
        mask = mask & (j > i - p.window)
    if segments is not None:
        rows, columns = (
            plgpu.load(segments.at[pl.ds(start, size)], layout=layout, optimized=False)
            for start, size, layout in zip(starts, shape, (ROW, COLUMN), strict=True)
        )
        mask = mask & (along_rows(rows, shape) == along_columns(columns, shape))
    return mask


def fill_rings(
    rounds: int,
    steps: Scalar,
    stages: int,
    rings: list[tuple[Any, Callable[[Scalar, Scalar, Scalar], None]]],
) -> None:
    """Load what the steps of all rounds use; the whole work of the loading warpgroup.

    Args:
      rounds: how often the steps are walked.
      steps: their number in each round, at least 1.
      stages: slots of each ring.
      rings: for each, the barriers by which its slots are released, and a function of
        round, step and slot that starts the copies into the slot.
    """

    @pl.loop(0, rounds)
    def _round(g):
        @pl.loop(0, steps)
        def _load(step):
            total = g * steps + step
            for free, copy in rings:
                pl.when(total >= stages)(lambda free=free: wait(free, total, stages))
                copy(g, step, slot(total, stages))

    # No thread needs this, but jax's interpreter wants each release to be seen.
    @pl.loop(jnp.maximum(rounds * steps - stages, 0), rounds * steps)
    def _drain(total):
        for free, _ in rings:
            wait(free, total, stages)


def wait(barriers: Any, step: Scalar, stages: int) -> None:
    """Wait at the barrier of the slot that a step uses."""
    plgpu.barrier_wait(barriers.at[slot(step, stages)])


def arrive(barriers: Any, step: Scalar, stages: int) -> None:
    """Arrive at the barrier of the slot that a step uses."""
    plgpu.barrier_arrive(barriers.at[slot(step, stages)])


def release_before(barriers: Any, step: Scalar, stages: int) -> None:
    """Arrive at the barrier of the slot that the step before used, if there was one."""
    pl.when(step > 0)(lambda: arrive(barriers, step - 1, stages))


def in_loop(index: Scalar) -> jax.Array:
    """Return index, hidden from the compiler.

    Addresses computed from it are computed where they are used. Otherwise all those of
    a loop are kept in registers throughout, and accumulators are spilled.
    """
    return lax.optimization_barrier(index)


def accumulator(columns: int) -> Any:
    """Describe registers for a [64, columns] float32 sum of matrix products."""
    return plgpu.ACC((ROWS, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def smem_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Describe shared memory that wgmma reads: 16-bit numbers, rows swizzled in 8s.

    The swizzle is the widest that divides the rows: 64 numbers, or 32.
    """
    columns = 64 if shape[-1] % 64 == 0 else 32
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(2 * columns)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def compiler_params() -> plgpu.CompilerParams:
    """Barriers and fences are written out in the kernels; none is added."""
    return plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


def along_rows(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Give each row its value of x."""
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Give each column its value of x."""
    return lax.broadcast_in_dim(x, shape, [1])


def slot(step: Scalar, stages: int) -> jax.Array:
    """Return the place in a ring of what a step uses."""
    return lax.rem(_int32(step), _int32(stages))


def floor_div(a: Scalar, b: Scalar) -> jax.Array:
    """Return a // b for a >= 0."""
    return lax.div(_int32(a), _int32(b))


def ceil_div(a: Scalar, b: Scalar) -> jax.Array:
    """Return ceil(a / b) for a >= 0."""
    return lax.div(_int32(a) + (b - 1), _int32(b))


def clip(x: Scalar, low: Scalar, high: Scalar) -> jax.Array:
    """Return x, moved into [low, high]."""
    return jnp.minimum(jnp.maximum(x, low), high)


def _int32(x: Scalar) -> jax.Array:
    return jnp.asarray(x, jnp.int32)
