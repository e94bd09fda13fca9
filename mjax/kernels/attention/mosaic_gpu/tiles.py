"""Common parts of the attention kernels: sizes, layouts, order, and ring buffers.

A thread block computes a tile: rows of queries (forward, dq) or of keys (dkv), `ROWS`
for each of its compute warpgroups. A block is a piece of keys (forward, dq) or of
queries (dkv). One more warpgroup loads blocks into a ring buffer in shared memory.

Additional letters: i position of a query, j of a key; P is here the padded length.
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
"""Rows of a warpgroup: m of every wgmma instruction (PTX ISA, wgmma.mma_async)."""
LOADER_REGISTERS = 24
"""Registers of a thread that only loads: the minimum that can be requested."""
LOG2_E = math.log2(math.e)

# Register layouts of a warpgroup: a [64, n] float32 accumulator, and vectors with one
# value per row or per column of the accumulator.
TILE = plgpu.Layout.WGMMA
ROW = TILE.reduce(1)
COLUMN = TILE.reduce(0)
GRID_NAMES = ("section", "tile", "heads")
_CACHED_BYTES = 25 * 2**20
"""Bytes in half of the L2 cache of an H100 or H200 (50 MiB). A multiprocessor reads the
other half through its own half, which keeps a copy."""
_LEAST_SECTION = 240
"""Minimum thread blocks per section, about two for each of 132 multiprocessors. With
fewer, each section would end with idle multiprocessors. Doubled if walks are uneven."""
Scalar = Any
"""An int, or an int32 scalar of the kernel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The sizes of one call, and the rule for which keys a query sees."""

    seq_len: int
    """T, which `op.attention` rounds up to a multiple of 8."""
    padded_len: int
    """P, length of arrays with one number per position (log-sum-exp, delta, segments).
    It is a multiple of tiles and blocks, so every copy of a part is aligned and in
    range."""
    heads: int
    """N."""
    kv_heads: int
    """K."""
    head_dim: int
    """H."""
    value_dim: int | None = None
    """Hv; None is H."""
    causal: bool = True
    """Query i sees key j only if j <= i, or if j is in the prefix."""
    num_keys: int | None = None
    """T before rounding: keys from here on are padding. None means `seq_len`."""
    window: int | None
    """Query i sees key j only if |i - j| < window; None means no window."""
    scale: float
    """Factor on the scores, positive."""
    soft_cap: float | None
    """Bound on the scaled scores, applied by tanh; None means no bound."""

    @property
    def out_dim(self) -> int:
        """Hv, width of values and of the output."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def group(self) -> int:
        """Number of query heads that read one key head."""
        return self.heads // self.kv_heads

    @property
    def reach(self) -> int:
        """The window, or P if there is none: i sees j only if |i - j| < reach."""
        return self.padded_len if self.window is None else self.window

    @property
    def exponent(self) -> float:
        """Factor that turns a result of `capped` into an exponent of 2, before `offset`
        is added."""
        cap = self.soft_cap
        return LOG2_E * (self.scale if cap is None else 2.0 * cap)

    @property
    def offset(self) -> float:
        """Offset added to all exponents of 2."""
        return 0.0 if self.soft_cap is None else LOG2_E * self.soft_cap

    def capped(self, scores: jax.Array) -> jax.Array:
        """Apply the nonlinear part of the soft cap to raw scores q k^T.

        tanh(x) = 1 - 2 r with r = 1 / (exp(2 x) + 1). The instruction tanh.approx is
        not used: its error of 2^-11 (PTX ISA) would be multiplied by the cap.

        Returns:
          scores if there is no cap, otherwise -r.
        """
        if self.soft_cap is None:
            return scores
        twice = 2.0 * LOG2_E * self.scale / self.soft_cap
        return -1.0 / (jnp.exp2(scores * twice) + 1.0)

    def times_slope(self, probs: jax.Array, capped: jax.Array) -> jax.Array:
        """Multiply probs by the cap's derivative, computed from the result of `capped`.

        The derivative is 4 r (1 - r); 1 - tanh(x)^2 would lose all digits for tanh(x)
        near 1.
        """
        if self.soft_cap is None:
            return probs
        return probs * (-4.0 * capped * (1.0 + capped))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Order of the thread blocks: the heaviest tiles of all heads first.

    The last thread blocks to start are then short. If all heads together read more than
    fits in the L2 cache, the heads are split into sections that run one after the
    other.
    """

    heads: int
    """Number of heads in the grid, per sequence."""
    sections: int
    tiles: int
    """Number of tiles of a head."""
    heads_of_section: int
    """Number of heads in a section, summed over the sequences of the batch."""

    @staticmethod
    def of(
        p: Problem,
        *,
        batch: int,
        heads: int,
        other_heads: int,
        tile: int,
        uneven: bool = False,
        entry_bytes: int = 2 * 2,
    ) -> "Order":
        """Choose the number of sections.

        Args:
          p: sizes.
          batch: B.
          heads: number of heads in the grid.
          other_heads: number of heads whose arrays are walked.
          tile: number of positions in a tile.
          uneven: whether some tiles have much longer walks than others.
          entry_bytes: bytes of all walked arrays per position and column; by default
            two 16-bit numbers. If an entry has more bytes, sections may have fewer
            thread blocks.
        """
        least = _LEAST_SECTION * (2 if uneven else 1) * 4 // entry_bytes
        rows, num_tiles = batch * heads, -(-p.seq_len // tile)
        sides = 1 if p.causal else 2
        walked = min(p.seq_len, sides * p.reach + tile)
        num_bytes = batch * other_heads * walked * (p.head_dim + p.out_dim)
        num_bytes = num_bytes * entry_bytes // 2
        able = [
            n
            for n in range(1, rows + 1)
            if rows % n == 0 and (n == 1 or rows * num_tiles // n >= least)
        ]
        fit = [n for n in able if num_bytes <= n * _CACHED_BYTES]
        num = fit[0] if fit else able[-1]
        return Order(
            heads=heads, sections=num, tiles=num_tiles, heads_of_section=rows // num
        )

    @property
    def grid(self) -> tuple[int, int, int]:
        """Shape of the grid: sections, tiles, heads of a section; the last axis varies
        fastest."""
        return self.sections, self.tiles, self.heads_of_section

    def place(self, section: Scalar, head: Scalar) -> tuple[Scalar, Scalar]:
        """Return the sequence and head for a section and a head within it."""
        row = section * self.heads_of_section + head
        return floor_div(row, self.heads), lax.rem(_int32(row), _int32(self.heads))

    def here(self) -> tuple[Scalar, Scalar, Scalar]:
        """Return the sequence, head and tile of this thread block."""
        section, tile, head = (lax.axis_index(name) for name in GRID_NAMES)
        return *self.place(section, head), tile


def add_eighths(sums: jax.Array, x: jax.Array) -> jax.Array:
    """Add column c of x [ROWS, n] to column c mod 8 of sums [ROWS, 8], for all c."""
    for start in range(0, x.shape[1], 8):
        sums = sums + lax.slice(x, (0, start), (ROWS, start + 8))
    return sums


def fill_rings(
    rounds: int,
    steps: Scalar,
    stages: int,
    rings: list[tuple[Any, Callable[[Scalar, Scalar, Scalar], None]]],
) -> None:
    """Load the data of all steps and rounds: the whole work of the loading warpgroup.

    Args:
      rounds: number of walks over the steps.
      steps: number of steps in each round, at least 1.
      stages: entries of each ring buffer.
      rings: for each ring buffer, the barriers that release its entries, and a function
        of (round, step, entry) that starts the copies into the entry.
    """

    @pl.loop(0, rounds)
    def _round(g):
        @pl.loop(0, steps)
        def _load(step):
            total = g * steps + step
            for free, copy in rings:
                pl.when(total >= stages)(lambda free=free: wait(free, total, stages))
                copy(g, step, slot(total, stages))

    # No thread needs this, but jax's interpreter requires a wait for each release.
    @pl.loop(jnp.maximum(rounds * steps - stages, 0), rounds * steps)
    def _drain(total):
        for free, _ in rings:
            wait(free, total, stages)


def wait(barriers: Any, step: Scalar, stages: int) -> None:
    """Wait at the barrier of the buffer entry of a step."""
    plgpu.barrier_wait(barriers.at[slot(step, stages)])


def arrive(barriers: Any, step: Scalar, stages: int) -> None:
    """Arrive at the barrier of the buffer entry of a step."""
    plgpu.barrier_arrive(barriers.at[slot(step, stages)])


def release_before(barriers: Any, step: Scalar, stages: int) -> None:
    """Arrive at the barrier of the previous step's entry, if there was one."""
    pl.when(step > 0)(lambda: arrive(barriers, step - 1, stages))


def in_loop(index: Scalar) -> jax.Array:
    """Return index as a value that is unknown to the compiler.

    Addresses that depend on the result are computed at each use. Otherwise all
    addresses of a loop stay in registers throughout, and accumulators are spilled.
    """
    return lax.optimization_barrier(index)


def accumulator(columns: int) -> Any:
    """Describe registers for a [64, columns] float32 sum of matmuls."""
    return plgpu.ACC((ROWS, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def smem_tile(shape: tuple[int, ...], dtype: Any, block: int = 64) -> Any:
    """Describe shared memory that wgmma reads: 16-bit, 8-row swizzles.

    The swizzle is 64 numbers wide if that divides the last dim and the block, otherwise
    32, because a matmul sums over whole swizzles.
    """
    columns = 64 if shape[-1] % 64 == 0 and block % 64 == 0 else 32
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(2 * columns)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def smem_sums(shape: tuple[int, ...]) -> Any:
    """Describe shared memory for float32 sums that the copy engine reads."""
    tiling = plgpu.TilingTransform((8, 32))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, jnp.float32, transforms=(tiling, swizzle))


def compiler_params() -> plgpu.CompilerParams:
    """Return parameters without automatic barriers; the kernels have their own."""
    return plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


def along_rows(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcast a value per row over the columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcast a value per column over the rows."""
    return lax.broadcast_in_dim(x, shape, [1])


def slot(step: Scalar, stages: int) -> jax.Array:
    """Return the ring buffer entry of a step."""
    return lax.rem(_int32(step), _int32(stages))


def floor_div(a: Scalar, b: Scalar) -> jax.Array:
    """Return a // b for a >= 0."""
    return lax.div(_int32(a), _int32(b))


def ceil_div(a: Scalar, b: Scalar) -> jax.Array:
    """Return ceil(a / b) for a >= 0."""
    return lax.div(_int32(a) + (b - 1), _int32(b))


def clip(x: Scalar, low: Scalar, high: Scalar) -> jax.Array:
    """Return x clipped to [low, high]."""
    return jnp.minimum(jnp.maximum(x, low), high)


def _int32(x: Scalar) -> jax.Array:
    return jnp.asarray(x, jnp.int32)
