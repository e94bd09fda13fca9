"""Visibility within a tile: edges, the blocks between them, and masks.

Input: the rule of a `Problem`, and the edges that `op` computes from documents and
prefixes. Output: the blocks that the rows of a tile visit, which of these blocks an
edge cuts, and masked scores. An edge is the first or last visible column of each row;
it never decreases from one row to the next.

Additional letters: i position of a query, j of a key; P is here the padded length.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mjax.kernels.attention.mosaic_gpu.tiles import (
    ROW,
    ROWS,
    TILE,
    Problem,
    Scalar,
    along_rows,
    ceil_div,
    clip,
    floor_div,
)

_MOST_BITS = 16
"""Number of bits used in a 32-bit integer, so shifts stay below its width."""

Edges = tuple[jax.Array | None, jax.Array | None]
"""The first and the last visible column of each row of scores, as `ROW`; None if the
edge cuts no block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks that the rows visit, low to high - 1, as scalars of the kernel."""

    low: Scalar
    high: Scalar
    full_low: Scalar
    """Every row sees all of the blocks full_low to full_high - 1, which need no
    mask."""
    full_high: Scalar

    def within(self, low: Scalar, high: Scalar) -> "Blocks":
        """Return these blocks clipped to [low, high); the result may be empty."""
        return Blocks(
            low=clip(self.low, low, high),
            high=clip(self.high, low, high),
            full_low=clip(self.full_low, low, high),
            full_high=clip(self.full_high, low, high),
        )

    def ends_down(self) -> tuple[Scalar, Scalar, Scalar]:
        """Return the lower end of each part, from high to low: masked, unmasked,
        masked."""
        return self.full_high, self.full_low, self.low

    def parts(self, near: Edges, far: Edges) -> list[tuple[Scalar, Scalar, Edges]]:
        """Return (begin, end, edges that cut its blocks) for each part, ascending.

        Args:
          near: edges that cut the blocks low to full_low - 1.
          far: edges that cut the blocks full_high to high - 1.
        """
        cut = (near, (None, None), far)
        starts = (self.low, self.full_low, self.full_high)
        return list(zip(starts, (*starts[1:], self.high), cut, strict=True))


class FarEdge:
    """The far edge of a row's visible columns, on the side away from the diagonal.

    The near edge, on the other side, is the diagonal or, without causality or with a
    prefix, another column of each row.
    """

    def __init__(self, p: Problem, ref: Any | None, near: Any | None = None) -> None:
        """Build both edges from arrays, or from the diagonal and the window.

        Args:
          p: sizes; its window determines the far edge if `ref` is None.
          ref: far edge, [P] in global memory: `op.first_keys` or `op.last_queries` of
            one sequence, or None.
          near: near edge, [P] in global memory: `op.last_keys` or `op.first_queries` of
            one sequence. If None, the diagonal or the window determines it.
        """
        self._p, self._ref, self._near = p, ref, near
        self.is_cut = ref is not None or p.window is not None
        """Whether the far edge hides any column from any row."""
        self.is_diagonal = p.causal and near is None
        """Whether the near edge is the diagonal."""

    def near_by_window(self, position: Any) -> Any:
        """Return the near edge at positions, without documents or a prefix."""
        raise NotImplementedError

    def near_at(self, position: Scalar) -> Scalar:
        """Return the near edge at one position."""
        if self._near is not None:
            return self._near[position]
        return position if self._p.causal else self.near_by_window(position)

    def near_rows(self, start: Scalar) -> jax.Array:
        """Return the near edge at positions start to start + ROWS - 1, as `ROW`."""
        if self._near is not None:
            part = self._near.at[pl.ds(start, ROWS)]
            return plgpu.load(part, layout=ROW, optimized=False)
        rows = positions(start)
        return rows if self._p.causal else self.near_by_window(rows)

    def by_window(self, position: Any) -> Any:
        """Return the far edge at positions, without documents; may be out of range."""
        raise NotImplementedError

    def at(self, position: Scalar) -> Scalar:
        """Return the far edge at one position."""
        if self._ref is not None:
            return self._ref[position]
        return self.by_window(position)

    def rows(self, start: Scalar) -> jax.Array:
        """Return the far edge at positions start to start + ROWS - 1, as `ROW`."""
        if self._ref is not None:
            part = self._ref.at[pl.ds(start, ROWS)]
            return plgpu.load(part, layout=ROW, optimized=False)
        return self.by_window(positions(start))


class FirstKeys(FarEdge):
    """The first key of each query, which sees all keys from there to its last key."""

    def by_window(self, position: Any) -> Any:
        """Return the first key of queries."""
        return position - (self._p.reach - 1)

    def near_by_window(self, position: Any) -> Any:
        """Return the last key of queries; queries beyond the end see themselves."""
        num_keys = self._p.num_keys or self._p.seq_len
        last = jnp.minimum(position + (self._p.reach - 1), num_keys - 1)
        return jnp.maximum(last, position)

    def ends(self, start: Scalar, block: int) -> jax.Array | None:
        """Return the last keys of ROWS queries, as `ROW`; None if they cut no block."""
        p = self._p
        whole = (p.num_keys or p.seq_len) % block == 0
        if p.causal or self._near is not None or p.window is not None or not whole:
            return self.near_rows(start)
        return None

    def blocks(self, i0: Scalar, rows: int, block: int) -> Blocks:
        """Bound the blocks of keys that queries i0 to i0 + rows - 1 see.

        First and last visible keys never decrease with the query. So a block of keys a
        to b needs no mask iff a >= first_key(i0 + rows - 1) and b <= last_key(i0). The
        last keys never cut a block before the full blocks; both edges may cut a block
        after them.
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
        """Return the first key of one query, at least 0 as in `op.first_keys`."""
        first = self.at(position)
        return first if self._ref is not None else jnp.maximum(first, 0)


class LastQueries(FarEdge):
    """The last query of each key; the queries from its first to its last all see it."""

    def by_window(self, position: Any) -> Any:
        """Return the last query of keys."""
        return position + (self._p.reach - 1)

    def near_by_window(self, position: Any) -> Any:
        """Return the first query of keys."""
        return jnp.maximum(position - (self._p.reach - 1), 0)

    def begins(self, start: Scalar) -> jax.Array | None:
        """Return the first queries of ROWS keys, as `ROW`; None if all are 0."""
        p = self._p
        if p.causal or self._near is not None or p.window is not None:
            return self.near_rows(start)
        return None

    def blocks(self, j0: Scalar, rows: int, block: int) -> Blocks:
        """Bound the blocks of queries that see keys j0 to j0 + rows - 1.

        First and last queries never decrease with the key. So a block of queries a to b
        needs no mask iff a >= first_query(j0 + rows - 1) and b <= last_query(j0). Both
        edges may cut a block before the full blocks; the first queries never cut a
        block after them.
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
    """Return the edges that are not None: the arrays to pass to a kernel."""
    return tuple(edge for edge in edges if edge is not None)


def at_row(refs: list[Any], edges: tuple[Any, ...], b: Scalar) -> list[Any]:
    """Return the reference of each edge for sequence b; None if the edge is absent."""
    left = iter(refs)
    return [None if edge is None else next(left).at[b] for edge in edges]


def positions(start: Scalar) -> jax.Array:
    """Return the positions start to start + ROWS - 1, as `ROW`."""
    return start + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)


def hide_outside(x: jax.Array, value: float, edges: Edges, start: Scalar) -> jax.Array:
    """Replace the entries of x outside the edges; x begins at column start."""
    first, last = (None if edge is None else edge - start for edge in edges)
    if first is None and last is None:
        return x
    return hide(x, value, first=first, last=last)


def hide(
    x: jax.Array, value: float, *, first: jax.Array | None, last: jax.Array | None
) -> jax.Array:
    """Replace, in each row, the entries before column `first` or after column `last`.

    A thread holds the same columns of each group of 8, so one bit per group says
    whether they are visible. This takes two instructions per entry, with one edge or
    two.

    Args:
      x: [ROWS, n], as `TILE`.
      value: the replacement.
      first: first visible column of each row, as `ROW`; None hides nothing before.
      last: last visible column of each row, as `ROW`; None hides nothing after.
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
        """Return one bit per group of 8 columns: whether this thread's column is at or
        after the edge (`rounded` 7), or after it (8)."""
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
