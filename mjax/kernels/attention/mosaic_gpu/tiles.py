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
GRID_NAMES = ("section", "tile", "heads")
_CACHED_BYTES = 25 * 2**20
"""Half of the L2 cache of an H100 or H200 (50 MiB): a multiprocessor reads the other
half through its own, which keeps a copy."""
_LEAST_SECTION = 240
"""Thread blocks of a section, some two for each of 132 multiprocessors: with fewer,
each section would end with idle ones. Twice as many where walks are uneven."""
_MOST_BITS = 16
"""Of the 32 of an integer: shifts stay below its width."""

Scalar = Any
"""An int, or an int32 scalar of the kernel."""
Edges = tuple[jax.Array | None, jax.Array | None]
"""The first column that each row of the scores sees, and the last, as `ROW`; None where
no block ends inside them."""


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
    value_dim: int | None = None
    """Hv; None is H."""
    causal: bool = True
    """Query i sees key j only where j <= i, or where j is in the prefix."""
    num_keys: int | None = None
    """T before it was rounded up to whole copies; None is `seq_len`."""
    window: int | None
    """Query i sees key j only where |i - j| < window; None is everywhere."""
    scale: float
    """Factor on the scores, positive."""
    soft_cap: float | None
    """Bound that tanh sets to the scaled scores."""

    @property
    def out_dim(self) -> int:
        """Hv, width of values and of the output."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.heads // self.kv_heads

    @property
    def reach(self) -> int:
        """Keys that a query can see; those of the last tile are beyond the end."""
        return self.padded_len if self.window is None else self.window

    @property
    def exponent(self) -> float:
        """Factor from what `capped` returns to an exponent of 2, less `offset`."""
        cap = self.soft_cap
        return LOG2_E * (self.scale if cap is None else 2.0 * cap)

    @property
    def offset(self) -> float:
        """What is added to all exponents of 2."""
        return 0.0 if self.soft_cap is None else LOG2_E * self.soft_cap

    def capped(self, scores: jax.Array) -> jax.Array:
        """Apply the soft cap to raw scores q k, as far as numbers are lost by it.

        tanh(x) = 1 - 2 r, r = 1 / (exp(2 x) + 1): the instruction tanh.approx has an
        error of 2^-11 (PTX ISA), which the cap would multiply.

        Returns:
          scores where there is no cap, else -r.
        """
        if self.soft_cap is None:
            return scores
        twice = 2.0 * LOG2_E * self.scale / self.soft_cap
        return -1.0 / (jnp.exp2(scores * twice) + 1.0)

    def times_slope(self, probs: jax.Array, capped: jax.Array) -> jax.Array:
        """Multiply with the derivative of the cap, by what `capped` has returned.

        It is 4 r (1 - r): 1 - tanh(x)^2 has no digits left where tanh(x) is near 1.
        """
        if self.soft_cap is None:
            return probs
        return probs * (-4.0 * capped * (1.0 + capped))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The order of the thread blocks: the heaviest tiles of all heads come first.

    So that the last to start are short. Where all heads together read more than the L2
    cache keeps, they are taken in sections, one after the other.
    """

    heads: int
    """Of the grid, in each row of the batch."""
    sections: int
    tiles: int
    """Of a head."""
    heads_of_section: int
    """Over all rows of the batch."""

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
          heads: of the grid.
          other_heads: those whose arrays are walked.
          tile: positions of a tile.
          uneven: whether the walks of some tiles are many times those of others.
          entry_bytes: of all arrays that are walked, for a position and column: two of
            16-bit numbers, unless it says otherwise. Sections of more bytes may have
            fewer thread blocks.
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
        """The last axis runs fastest."""
        return self.sections, self.tiles, self.heads_of_section

    def place(self, section: Scalar, head: Scalar) -> tuple[Scalar, Scalar]:
        """Return row of the batch and head, by their places in the grid."""
        row = section * self.heads_of_section + head
        return floor_div(row, self.heads), lax.rem(_int32(row), _int32(self.heads))

    def here(self) -> tuple[Scalar, Scalar, Scalar]:
        """Return row of the batch, head and place of the tile of this thread block."""
        section, tile, head = (lax.axis_index(name) for name in GRID_NAMES)
        return *self.place(section, head), tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks that rows visit: low to high - 1, scalars of the kernel."""

    low: Scalar
    high: Scalar
    full_low: Scalar
    """From here to full_high - 1, every row meets all of the block: no mask."""
    full_high: Scalar

    def within(self, low: Scalar, high: Scalar) -> "Blocks":
        """Return the part in [low, high); it may be empty."""
        return Blocks(
            low=clip(self.low, low, high),
            high=clip(self.high, low, high),
            full_low=clip(self.full_low, low, high),
            full_high=clip(self.full_high, low, high),
        )

    def ends_down(self) -> tuple[Scalar, Scalar, Scalar]:
        """Return where the parts end, from the last: masked, plain and masked."""
        return self.full_high, self.full_low, self.low

    def parts(self, near: Edges, far: Edges) -> list[tuple[Scalar, Scalar, Edges]]:
        """Return begin and end of the parts, and the edges that cut their blocks.

        Args:
          near: edges in blocks before the full ones.
          far: edges in blocks after them.
        """
        cut = (near, (None, None), far)
        starts = (self.low, self.full_low, self.full_high)
        return list(zip(starts, (*starts[1:], self.high), cut, strict=True))


class FarEdge:
    """Where what a row sees ends, away from the diagonal; it rises with the row.

    On the side of the diagonal it ends there, or, without causality, at an edge like
    this one.
    """

    def __init__(self, p: Problem, ref: Any | None, near: Any | None = None) -> None:
        """Describe it.

        Args:
          p: sizes; without `ref`, its window decides.
          ref: [P] in global memory, `op.first_keys` or `op.last_queries` of one row of
            the batch, or None.
          near: [P] in global memory, `op.last_keys` or `op.first_queries`, or None:
            then the diagonal decides, or the window.
        """
        self._p, self._ref, self._near = p, ref, near
        self.is_cut = ref is not None or p.window is not None
        """Whether some row does not see everything on that side."""
        self.is_diagonal = p.causal and near is None
        """Whether it ends at the diagonal on the other side."""

    def near_by_window(self, position: Any) -> Any:
        """Return the other edge where there are neither documents nor a prefix."""
        raise NotImplementedError

    def near_at(self, position: Scalar) -> Scalar:
        """Return the other edge of one position."""
        if self._near is not None:
            return self._near[position]
        return position if self._p.causal else self.near_by_window(position)

    def near_rows(self, start: Scalar) -> jax.Array:
        """Return those of positions start to start + ROWS - 1, as `ROW`."""
        if self._near is not None:
            part = self._near.at[pl.ds(start, ROWS)]
            return plgpu.load(part, layout=ROW, optimized=False)
        rows = positions(start)
        return rows if self._p.causal else self.near_by_window(rows)

    def by_window(self, position: Any) -> Any:
        """Return the edge where there are no documents; it may be beyond the ends."""
        raise NotImplementedError

    def at(self, position: Scalar) -> Scalar:
        """Return that of one position."""
        if self._ref is not None:
            return self._ref[position]
        return self.by_window(position)

    def rows(self, start: Scalar) -> jax.Array:
        """Return those of positions start to start + ROWS - 1, as `ROW`."""
        if self._ref is not None:
            part = self._ref.at[pl.ds(start, ROWS)]
            return plgpu.load(part, layout=ROW, optimized=False)
        return self.by_window(positions(start))


class FirstKeys(FarEdge):
    """The first key that each query sees; it sees all from there to itself."""

    def by_window(self, position: Any) -> Any:
        """Return the first key of queries."""
        return position - (self._p.reach - 1)

    def near_by_window(self, position: Any) -> Any:
        """Return the last key of queries; those beyond the end see themselves."""
        num_keys = self._p.num_keys or self._p.seq_len
        last = jnp.minimum(position + (self._p.reach - 1), num_keys - 1)
        return jnp.maximum(last, position)

    def ends(self, start: Scalar, block: int) -> jax.Array | None:
        """Return the last keys as `near_rows` does; None where they cut no block."""
        p = self._p
        whole = (p.num_keys or p.seq_len) % block == 0
        if p.causal or self._near is not None or p.window is not None or not whole:
            return self.near_rows(start)
        return None

    def blocks(self, i0: Scalar, rows: int, block: int) -> Blocks:
        """Bound the blocks of keys that queries i0 to i0 + rows - 1 see.

        First keys rise with the query, and last ones. So all of them see a block in
        full iff its last key is not after the last that the first query sees, and its
        first key not before the first one that the last query sees. What comes before
        these blocks, last keys do not cut; what comes after, both edges may.
        """
        first, last = self._clipped(i0), self._clipped(i0 + rows - 1)
        end = self.near_at(i0 + rows - 1) + 1
        full_high = floor_div(self.near_at(i0) + 1, block)
        return Blocks(
            low=floor_div(first, block),
            high=ceil_div(jnp.minimum(end, self._p.seq_len), block),
            full_low=jnp.minimum(ceil_div(last, block), full_high),
            full_high=full_high,
        )

    def _clipped(self, position: Scalar) -> Scalar:
        """Return the first key of one query, at least 0, as those of arrays are."""
        first = self.at(position)
        return first if self._ref is not None else jnp.maximum(first, 0)


class LastQueries(FarEdge):
    """The last query that sees each key; all from the first one on do."""

    def by_window(self, position: Any) -> Any:
        """Return the last query of keys."""
        return position + (self._p.reach - 1)

    def near_by_window(self, position: Any) -> Any:
        """Return the first query of keys."""
        return jnp.maximum(position - (self._p.reach - 1), 0)

    def begins(self, start: Scalar) -> jax.Array | None:
        """Return the first queries as `near_rows` does; None where all are 0."""
        p = self._p
        if p.causal or self._near is not None or p.window is not None:
            return self.near_rows(start)
        return None

    def blocks(self, j0: Scalar, rows: int, block: int) -> Blocks:
        """Bound the blocks of queries that see keys j0 to j0 + rows - 1.

        First queries rise with the key, and last ones. So all of a block see all the
        keys iff its first query is not before the first that sees the last key, and its
        last not after the last one that sees the first key. What comes before these
        blocks, both edges may cut; what comes after, first queries do not.
        """
        end = jnp.minimum(self.at(j0 + rows - 1) + 1, self._p.seq_len)
        full_low = ceil_div(self.near_at(j0 + rows - 1), block)
        return Blocks(
            low=floor_div(self.near_at(j0), block),
            high=ceil_div(end, block),
            full_low=full_low,
            full_high=jnp.maximum(floor_div(self.at(j0) + 1, block), full_low),
        )


def given(*edges: jax.Array | None) -> tuple[jax.Array, ...]:
    """Return the arrays that a kernel is passed."""
    return tuple(edge for edge in edges if edge is not None)


def at_row(refs: list[Any], edges: tuple[Any, ...], b: Scalar) -> list[Any]:
    """Return of each edge its reference at a row of the batch; None if not given."""
    left = iter(refs)
    return [None if edge is None else next(left).at[b] for edge in edges]


def positions(start: Scalar) -> jax.Array:
    """Return start to start + ROWS - 1, as `ROW`."""
    return start + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)


def hide_outside(x: jax.Array, value: float, edges: Edges, start: Scalar) -> jax.Array:
    """Replace what is outside the edges in a piece whose first column is start."""
    first, last = (None if edge is None else edge - start for edge in edges)
    if first is None and last is None:
        return x
    return hide(x, value, first=first, last=last)


def hide(
    x: jax.Array, value: float, *, first: jax.Array | None, last: jax.Array | None
) -> jax.Array:
    """Replace, in each row, what is before its first column or after its last.

    A thread holds the same columns of each 8, so that one bit for each 8 says what is
    seen: two instructions an entry, however many edges cut the row.

    Args:
      x: [ROWS, n], as `TILE`.
      value: the replacement.
      first: as `ROW`; None hides nothing before.
      last: as `ROW`; None hides nothing after.
    """
    columns = x.shape[1]
    if columns > _MOST_BITS * 8:
        middle = columns // 2
        halves = []
        for start in (0, middle):
            part = lax.slice(x, (0, start), (ROWS, start + middle))
            edges = [e if e is None else e - start for e in (first, last)]
            halves.append(hide(part, value, first=edges[0], last=edges[1]))
        return lax.concatenate(halves, 1)
    shape, num = (ROWS, 8), columns // 8
    own = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)

    def from_eighth(edge: jax.Array, rounded: int) -> jax.Array:
        """Return bits, set from the column's first eighth on that is at the edge."""
        eighth = along_rows(edge, shape) - own + rounded
        eighth = lax.shift_right_arithmetic(eighth, jnp.int32(3))
        return lax.shift_left(jnp.full(shape, -1, jnp.int32), eighth)

    seen = jnp.full(shape, -1, jnp.int32)
    if first is not None:
        seen = from_eighth(clip(first, 0, columns), 7)
    if last is not None:
        seen = seen & ~from_eighth(clip(last, -1, columns - 1), 8)
    seen = lax.concatenate([seen] * num, 1)
    bits = [
        plgpu.layout_cast(jnp.full(shape, 1 << n, jnp.int32), TILE) for n in range(num)
    ]
    return jnp.where((seen & lax.concatenate(bits, 1)) != 0, x, value)


def add_eighths(sums: jax.Array, x: jax.Array) -> jax.Array:
    """Add to sums [ROWS, 8] those of every eighth column of x [ROWS, n]."""
    for start in range(0, x.shape[1], 8):
        sums = sums + lax.slice(x, (0, start), (ROWS, start + 8))
    return sums


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


def smem_tile(shape: tuple[int, ...], dtype: Any, block: int = 64) -> Any:
    """Describe shared memory that wgmma reads: 16-bit numbers, rows swizzled in 8s.

    The swizzle is the widest that divides the rows, 64 numbers or 32, and the block:
    a product sums over whole swizzles.
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
