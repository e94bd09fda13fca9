"""Gather weights and reduce gradients in pieces, one piece per tick.

A stage needs the weights of its second virtual stage (`chunk` in names) only P ticks
after those of its first, and completes the gradients of its last one (v - 1) P ticks
before the end. So only the first virtual stage is gathered in the first tick, and only
its gradients are reduced in the last tick. Both happen layer by layer: while one layer
computes, the weights of the next layer are gathered, or the gradients of the previous
one are reduced. The other virtual stages are sent in pieces, at most P per virtual
stage, while the stage computes. Embedding and head are sent whole; `pipeline.run` says
when.

Pieces are equal slices of each weight along a dim that is not split over dp_shard. A
weight without such a dim (a norm's scale) is gathered before the first tick and reduced
after the last, for all virtual stages together.

Source: Jiang et al. 2024 (MegaScale), arXiv:2402.15627, section 3.2 and figure 4: the
gather of the next chunk is prefetched, the reduce-scatter of the finished one deferred.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree

from mjax.mesh import rules, zero
from mjax.mesh.axes import DP_SHARD
from mjax.pipeline.held import put_layers, stack_layers, take_layers
from mjax.pipeline.model import Chunks, Weights


class First(NamedTuple):
    """Weights gathered before the step, as `zero.gather_split` returns them."""

    embedding: PyTree
    others: PyTree
    """The weights of `Chunks` that `Pieces.start` has gathered."""
    layer: PyTree
    """Gathered joined weights of the first layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """Data-parallel communication of weights and gradients, in pieces."""

    num_stages: int
    """P, and the number of ticks in which the pieces of a virtual stage are sent."""
    num_chunks: int
    """v, virtual stages per stage."""
    split: bool
    """Whether to communicate in pieces. If False, everything is gathered before the
    first tick and reduced after the last one; use False if dp has size 1."""
    specs: Weights
    """PartitionSpec of each stored leaf; leaves of the blocks are [slots, ...]."""
    level: int
    """ZeRO level, 0 to 2."""
    compute_dtype: DTypeLike
    """Dtype of the gathered weights."""
    reduce_dtype: DTypeLike
    """Dtype in which gradients are reduced."""

    @property
    def num_ticks(self) -> int:
        """Ticks that gather pieces at the start; as many reduce pieces at the end."""
        return (self.num_chunks - 1) * self.num_stages if self.split else 0

    def gather_whole(
        self, stored: PyTree, specs: PyTree, gathered: PyTree | None = None
    ) -> PyTree:
        """Gather weights at once.

        Args:
          stored: this device's parts of the weights.
          specs: PartitionSpecs of the weights.
          gathered: as for `zero.gather`.
        Returns:
          the gathered weights.
        """
        return zero.gather(stored, specs, self.compute_dtype, gathered)

    def reduce_whole(self, grads: PyTree, specs: PyTree) -> PyTree:
        """Reduce gradients at once, as `zero.reduce_gradients`.

        Args:
          grads: this device's gradients of gathered weights.
          specs: PartitionSpecs of the stored weights.
        Returns:
          this device's parts of the reduced gradients.
        """
        return zero.reduce_gradients(
            grads, specs, level=self.level, dtype=self.reduce_dtype
        )

    def gather_first(self, stored: Weights) -> First:
        """Gather the weights that a step uses first: embedding and first layer.

        Args:
          stored: this device's parts of the weights; leaves of the blocks are
            [v, n, ...]. For joined weights, the first layer, [1, 1, ...], is enough.
        Returns:
          the gathered weights, which need not be gathered again later.
        """
        specs: Chunks = self.specs.chunks
        others = jax.tree.map(self._started, stored.chunks.others, specs.others)
        layer = take_layers(stored.chunks.joined, 0)[0]

        def gather(stored: PyTree, specs: PyTree) -> PyTree:
            return zero.gather_split(stored, specs, self.compute_dtype)

        return First(
            gather(stored.embedding, self.specs.embedding),
            gather(others, specs.others),
            gather(jax.tree.map(lambda x: x[None], layer), specs.joined),
        )

    def start(
        self, stored: Chunks, first: First | None = None
    ) -> tuple[Chunks, tuple[PyTree, ...]]:
        """Gather the first virtual stage, and all weights that have no pieces.

        Args:
          stored: this device's parts, leaves [v, n, ...].
          first: result of `gather_first`, if it ran before the step.
        Returns:
          the gathered weights, with zeros for the pieces that are not gathered yet; the
          gathered joined weights of the first virtual stage, by layer.
        """

        def whole(x: Array, spec: PartitionSpec) -> Array:
            return _over_stack(x, spec, self.gather_whole)

        specs: Chunks = self.specs.chunks
        if not self.split:
            copy = jax.tree.map(whole, stored, specs)
            return copy, take_layers(copy.joined, 0)

        def others(x: Array, spec: PartitionSpec, gathered: PyTree = None) -> Array:
            first = self.gather_whole(self._started(x, spec), spec, gathered)
            if self._cut(x, spec) is None:
                return first.reshape(*x.shape[:2], *first.shape[1:])
            return self._with_zeros(first)

        trees = stored.others, specs.others
        rest = jax.tree.map(others, *trees, *([] if first is None else [first.others]))
        layers: list[PyTree] = []
        for layer in take_layers(stored.joined, 0):
            gathered = () if first is None or layers else (first.layer,)
            layer = after((rest, layers), layer)
            layers.append(
                jax.tree.map(self._gather_layer, layer, specs.joined, *gathered)
            )
        joined = jax.tree.map(
            lambda *first: self._with_zeros(jnp.stack(first)), *layers
        )
        return Chunks(joined, rest), tuple(layers)

    def gather(self, stored: PyTree, copy: PyTree, tick: Int[Array, ""]) -> PyTree:
        """Gather this tick's piece.

        The pieces of virtual stage c are gathered in the P ticks before tick c P.

        Args:
          stored: this device's parts, leaves [v, n, ...].
          copy: the gathered weights so far.
          tick: index of the tick, below `num_ticks`.
        Returns:
          the gathered weights with this piece filled in.
        """
        chunk, piece = tick // self.num_stages + 1, tick % self.num_stages

        def leaf(x: Array, copy: Array, spec: PartitionSpec) -> Array:
            cut = self._cut(x, spec)
            if cut is None:
                return copy
            part, at = _slice(x, cut, chunk, piece)
            whole = self.gather_whole(part, spec)
            return lax.dynamic_update_slice(copy, whole[None], at)

        return jax.tree.map(leaf, stored, copy, self.specs.chunks)

    def reduce(self, grads: PyTree, tick: Int[Array, ""]) -> list[Array]:
        """Reduce this tick's piece, from the last virtual stage to the second.

        Args:
          grads: this device's gradients, leaves [v, n, ...].
          tick: index within the last `num_ticks` ticks.
        Returns:
          this device's part of the piece, for each leaf that has pieces.
        """
        chunk = self.num_chunks - 1 - tick // self.num_stages
        parts = []
        for x, spec, cut in self._leaves(grads):
            if cut is not None:
                part, _ = _slice(x, cut, chunk, tick % self.num_stages)
                parts.append(self.reduce_whole(part, spec))
        return parts

    def finish(
        self, grads: Chunks, totals: tuple[PyTree, ...], parts: list[Array]
    ) -> Chunks:
        """Reduce the first virtual stage and weights without pieces; join all parts.

        Args:
          grads: this device's gradients, leaves [v, n, ...], without those in `totals`;
            `grads.joined` is None if v = 1.
          totals: gradients of the joined weights of the first virtual stage, by layer;
            with `split` each layer is reduced separately.
          parts: results of `reduce`, stacked over the ticks.
        Returns:
          this device's parts of the reduced gradients, leaves [v, n, ...].
        """

        def whole(x: Array, spec: PartitionSpec) -> Array:
            return _over_stack(x, spec, self.reduce_whole)

        specs: Chunks = self.specs.chunks
        if not self.split:
            if grads.joined is None:
                joined = stack_layers(totals)
            else:
                joined = put_layers(grads.joined, 0, totals)
            return jax.tree.map(whole, Chunks(joined, grads.others), specs)
        remaining = iter(parts)

        def with_parts(first: Array, x: Array, spec: PartitionSpec) -> Array:
            return self._with_parts(first, next(remaining), self._cut(x, spec))

        def others(x: Array, spec: PartitionSpec) -> Array:
            if self._cut(x, spec) is None:
                return whole(x, spec)
            return with_parts(self.reduce_whole(x[0], spec), x, spec)

        layers = [jax.tree.map(self._reduce_layer, x, specs.joined) for x in totals]
        if grads.joined is None:
            joined = stack_layers(tuple(layers))
        else:
            first = jax.tree.map(lambda *layer: jnp.stack(layer), *layers)
            joined = jax.tree.map(with_parts, first, grads.joined, specs.joined)
        return Chunks(joined, jax.tree.map(others, grads.others, specs.others))

    def _started(self, x: Array, spec: PartitionSpec) -> Array:
        """Return the part of a leaf [v, n, ...] that `start` gathers, [slots, ...]."""
        return x.reshape(-1, *x.shape[2:]) if self._cut(x, spec) is None else x[0]

    def _gather_layer(
        self, x: Array, spec: PartitionSpec, gathered: PyTree | None = None
    ) -> Array:
        return self.gather_whole(x[None], spec, gathered)[0]

    def _reduce_layer(self, x: Array, spec: PartitionSpec) -> Array:
        return self.reduce_whole(x[None], spec)[0]

    def _with_zeros(self, first: Array) -> Array:
        """Make [v, n, ...] from the first virtual stage, with zeros for the others."""
        rest = jnp.zeros_like(first, shape=(self.num_chunks - 1, *first.shape))
        return jnp.concatenate([first[None], rest])

    def _with_parts(self, first: Array, rest: Array, cut: "_Cut | None") -> Array:
        """Make [v, n, ...] from the first virtual stage and the pieces."""
        assert cut is not None
        rest = rest.reshape(-1, self.num_stages, *rest.shape[1:])[::-1, : cut.num]
        rest = jnp.moveaxis(rest, 1, 1 + cut.dim).reshape(-1, *first.shape)
        return jnp.concatenate([first[None], rest])

    def _leaves(
        self, tree: PyTree
    ) -> Iterator[tuple[Array, PartitionSpec, "_Cut | None"]]:
        """Yield each leaf, its spec, and its `_Cut` (None if it has no pieces)."""
        leaves, specs = jax.tree.leaves(tree), jax.tree.leaves(self.specs.chunks)
        for x, spec in zip(leaves, specs, strict=True):
            yield x, spec, self._cut(x, spec)

    def _cut(self, x: Array, spec: PartitionSpec) -> "_Cut | None":
        """Choose the dim with the most pieces, at most P; None if there are none."""
        if self.num_ticks == 0:
            return None
        sizes = x.shape[1:]
        cuts = [
            _Cut(dim, _largest_divisor(sizes[dim], self.num_stages))
            for dim in range(1, len(sizes))
            if dim != rules.dim_of(spec, DP_SHARD)
        ]
        return max(cuts, key=lambda cut: (cut.num, sizes[cut.dim]), default=None)


def after(gathered: PyTree, stored: PyTree) -> PyTree:
    """Return `stored` such that its gather starts after other gathers have ended.

    XLA starts independent gathers in any order. So a gather of weights needed later
    could delay the weights needed first.
    """
    return lax.optimization_barrier((gathered, stored))[1]


class _Cut(NamedTuple):
    """How a weight [n, ...] is split into pieces."""

    dim: int
    num: int
    """Number of pieces. If there are more ticks, these send the last piece again."""


def _largest_divisor(size: int, most: int) -> int:
    return max(num for num in range(1, most + 1) if size % num == 0)


def _slice(
    x: Array, cut: _Cut, chunk: Int[Array, ""], piece: Int[Array, ""]
) -> tuple[Array, list[Any]]:
    """Return a piece of a leaf [v, n, ...], and its start index."""
    sizes = [1, *x.shape[1:]]
    sizes[1 + cut.dim] //= cut.num
    at: list[Any] = [0] * x.ndim
    at[0] = chunk
    at[1 + cut.dim] = jnp.minimum(piece, cut.num - 1) * sizes[1 + cut.dim]
    return lax.dynamic_slice(x, at, sizes)[0], at


def _over_stack(x: Array, spec: PartitionSpec, f: Callable[..., Array]) -> Array:
    """Apply f, which takes leaves [slots, ...], to leaves [v, n, ...]."""
    flat = f(x.reshape(-1, *x.shape[2:]), spec)
    return flat.reshape(*x.shape[:2], *flat.shape[1:])
