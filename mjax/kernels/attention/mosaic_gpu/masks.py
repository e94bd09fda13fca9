"""What the rows of a tile see: edges, the blocks between them, and masks.

Enters: the rule of a `Problem`, and the edges that `op` makes of documents and
prefixes. Leaves: which blocks rows visit, which of them an edge cuts, and scores
without what is hidden there. All edges rise with the position.

Letters beside the usual ones: i positions of queries, j of keys, P padded length.
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
"""Of the 32 of an integer: shifts stay below its width."""

Edges = tuple[jax.Array | None, jax.Array | None]
"""The first column that each row of the scores sees, and the last, as `ROW`; None where
no block ends inside them."""


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
        first key not before the first one that the last query sees. Last keys do not
        cut the blocks before these; both edges may cut those after.
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
        last not after the last one that sees the first key. Both edges may cut the
        blocks before these; first queries do not cut those after.
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
