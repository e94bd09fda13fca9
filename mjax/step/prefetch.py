"""Run layers; gather weights one layer ahead and reduce gradients one layer behind.

Input: the layers, their stacked parameters, and the input of the first layer. Output:
the output of the last layer; in the backward pass, the reduced gradients. With data
parallelism a layer's weights are gathered while the layer before it computes, and its
gradients are reduced while the next layer of the backward pass computes. Within an
iteration of the loop over layers, communication does not depend on compute, so the
compiler can overlap them. Only the first gather and the last reduction are exposed.

Levels 1 and 2 (`mesh.zero`) gather weights in the forward pass of the first microbatch,
and keep the gathered weights of all layers. Level 3 gathers them in every pass. It
keeps the last layer's weights for its backward pass, which follows at once.

The backward pass is explicit. The transpose of the scan would keep the weights that
level 3 gathered, and reduce a gradient in the iteration that computes it.

Source: Jiang et al. 2024 (MegaScale), arXiv:2402.15627, section 3.2; Zhao et al. 2023
(PyTorch FSDP), arXiv:2304.11277, section 3.3.2.

Everything runs per device inside shard_map.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree

from mjax.layers.stack import LayerPattern
from mjax.mesh import zero
from mjax.mesh.axes import DP, DP_NODE, DP_REPLICATE, DP_SHARD, SHARDS
from mjax.step import stacks
from mjax.step.offload import Offload
from mjax.step.trained import Trained
from mjax.trace import scopes
from mjax.trace.vjp import SplitVJP, row_major, zeros_of

Index = stacks.Index
Hop = Callable[[PyTree, PyTree, Index], PyTree]
"""(gradients of a layer, sum over earlier microbatches or None, index of the layer) ->
gradients after one step of their reduction."""
Places = Callable[[int, Index], SplitVJP]
"""(index in the pattern, index of a layer) -> the layer with its backward pass."""


class Weights(NamedTuple):
    """Parameters of all layers, leaves [L, ...]."""

    stacked: PyTree
    """This device's parts of the stored weights (`is_stored`), or gathered weights."""
    is_stored: bool


class Kept(NamedTuple):
    """Arrays that the forward pass keeps for the backward pass of the layers."""

    scanned: PyTree
    """Residuals of the layers in the loop: a tuple with an entry per layer of the
    pattern, leaves [patterns, ...]; in host memory if they are offloaded."""
    rest: tuple[PyTree, ...]
    """Residuals of each layer after the loop."""
    last: PyTree
    """Weights of the last layer if the backward pass gathers all others again,
    otherwise None."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlappedLayers:
    """Forward and backward pass over all layers, with overlapped communication.

    Weights are gathered one layer ahead, gradients reduced one layer behind.
    """

    pattern: LayerPattern
    num_layers: int
    specs: PyTree
    """PartitionSpecs of the stored parameters [L, ...]."""
    trained: Trained
    """Parameters that have gradients."""
    level: int
    """ZeRO level."""
    compute: DTypeLike
    """Dtype of the gathered weights."""
    reduce: DTypeLike
    """Dtype of the reduced gradients."""
    horizon: int | None
    """How many layers ahead inputs are loaded from host memory; None keeps them on the
    device."""

    @property
    def num_scanned(self) -> int:
        """Number of layers that run in the loop, in whole patterns.

        With data parallelism the last layers run after the loop: the last one gathers
        nothing, and when the backward pass enters the loop, every hop must have
        gradients to reduce.
        """
        num_left = len(self._hops(finish=True))
        num_layers = max(self.num_layers - num_left, 0)
        return num_layers - num_layers % self._period

    def places(self, x: Array, weights: Weights) -> Places:
        """Return a function that gives each kind of layer with its backward pass.

        A kind is traced once, at its first use, and both passes share the result.
        Tracing a kind takes about as long as tracing one pass.

        Args:
          x: [B, t, D], input of a layer; only its type is used.
          weights: weights of the layer; only their types are used.
        """
        params = jax.eval_shape(lambda: self._at(weights, 0))
        pattern = self.pattern
        if self.horizon is not None:  # this class, not the layer, offloads residuals
            pattern = dataclasses.replace(pattern, remat="full")

        @functools.cache
        def make(place: int, in_loop: bool) -> SplitVJP:
            layer = pattern.one(place, in_loop=in_loop)
            return SplitVJP(layer, x, params, *self._context(0))

        return lambda place, index: make(place, self._is_in_loop(index))

    def forward(
        self,
        x: Array,
        weights: Weights,
        places: Places | None,
        *,
        first: PyTree | None = None,
    ) -> tuple[Array, Weights, Kept]:
        """Run all layers.

        Args:
          x: [B, t, D], input of the first layer.
          weights: weights of all layers. Stored weights are gathered one layer ahead.
          places: result of `places`, if a backward pass follows; None keeps no
            residuals.
          first: result of `gather_first_layer`; None gathers the first layer here.
        Returns:
          the output of the last layer; the weights for the next pass (gathered at
          levels 1 and 2); the residuals.
        """
        offload = self._offload
        makes_copy = places is not None and weights.is_stored and self.level < 3
        ahead, copy = None, None
        if weights.is_stored:
            ahead = self._at(weights, 0, first)
        if makes_copy:
            copy = stacks.stack_of(ahead, self.num_layers)

        def layer(carry: Any, place: int, index: Index, *, is_last: bool) -> Any:
            x, ahead, copy = carry
            params = self._at(weights, index) if ahead is None else ahead
            if ahead is not None and not is_last:
                ahead = self._at(weights, index + 1)
            if copy is not None:
                copy = stacks.put(copy, params, index)
            args = x, params, *self._context(index)
            if places is None:
                one = self.pattern.one(place, in_loop=self._is_in_loop(index))
                return (one(*args), ahead, copy), ()
            x, kept = places(place, index).forward(*args)
            if offload is not None:
                kept = offload.store(kept, index)
            return (x, ahead, copy), kept

        def pattern(carry: Any, first: Index) -> Any:
            kept = []
            for place in range(self._period):
                with jax.named_scope(scopes.place(place)):
                    carry, one = layer(carry, place, first + place, is_last=False)
                kept.append(one)
            return carry, tuple(kept)

        carry, scanned = (x, ahead, copy), ()
        if self.num_scanned:
            # With offloading, use lax.scan: it can make its stacks in host memory.
            own_stacks = places is not None and offload is None
            scan = stacks.scan if own_stacks else lax.scan
            with jax.named_scope(self._loop()):
                carry, scanned = scan(pattern, carry, self._firsts())
        rest = []
        for index in range(self.num_scanned, self.num_layers):
            is_last = index == self.num_layers - 1
            with jax.named_scope(scopes.single("layers", index)):
                carry, one = layer(carry, index % self._period, index, is_last=is_last)
            rest.append(one)
        x, last, copy = carry
        if copy is not None:
            weights, last = Weights(copy, is_stored=False), None
        return x, weights, Kept(scanned, tuple(rest), last)

    def backward(
        self,
        dy: Array,
        weights: Weights,
        kept: Kept,
        total: PyTree | None,
        places: Places,
        *,
        finish: bool,
    ) -> tuple[Array, PyTree]:
        """Run the backward pass of all layers.

        Args:
          dy: gradient of the last layer's output.
          weights: the weights that `forward` returned.
          kept: the residuals that `forward` returned.
          total: sum of the gradients of the earlier microbatches, leaves [L, ...] as
            `zero.summand` returns them; None for the first microbatch.
          places: as for `forward`.
          finish: whether this is the last microbatch: then the sum is reduced over
            data parallelism.
        Returns:
          the gradient of the first layer's input; the sum including this microbatch,
          reduced if `finish`.
        """
        offload = self._offload
        hops = self._hops(finish=finish)

        def so_far(out: PyTree) -> PyTree:
            # Read the old sum from the array to which the new sum is written. A loop
            # that read `total` and wrote to another array would keep both arrays.
            return out if total is not None and not finish else total

        def layer(carry: Any, place: int, kept: PyTree, index: Index) -> Any:
            dy, ahead, moving, out = carry
            params = self._at(weights, index) if ahead is None else ahead
            if ahead is not None:
                # No layer precedes layer 0: it is gathered again, and not used.
                ahead = self._at(weights, jnp.maximum(index - 1, 0))
            moving, out = _move(hops, moving, so_far(out), out, index)
            one = places(place, index)
            dx, grads = one.backward(kept, dy, params, *self._context(index))
            grads = self.trained.of(grads)
            if hops:
                moving = (grads, *moving[1:])
            else:
                part = self._added(grads, so_far(out), index)
                out = stacks.put(out, self._reduced(part) if finish else part, index)
            return dx, ahead, moving, out

        def pattern(state: Any, xs: Any) -> Any:
            (carry, inputs), (first, ones) = state, xs
            for place in reversed(range(self._period)):
                with jax.named_scope(scopes.place(place)):
                    if offload is None:
                        one = ones[place]
                    else:
                        one, inputs = offload.advance_in_loop(
                            inputs, kept.scanned, place=place, first=first
                        )
                    carry = layer(carry, place, one, first + place)
            return (carry, inputs), None

        out = total
        if total is None or finish:
            out = self._empty_sum(weights, finish=finish)
        carry, inputs = (dy, kept.last, (None,) * len(hops), out), ()
        if offload is not None:
            inputs = offload.start(kept.scanned, kept.rest)
        for index in reversed(range(self.num_scanned, self.num_layers)):
            with jax.named_scope(scopes.single("layers", index)):
                one = kept.rest[index - self.num_scanned]
                if offload is not None:
                    one, inputs = offload.advance(
                        *(inputs, kept.scanned, kept.rest), index=index, dy=carry[0]
                    )
                carry = layer(carry, index % self._period, one, index)
        xs = self._firsts(), kept.scanned if offload is None else ()
        if self.num_scanned:
            with jax.named_scope(self._loop(reverse=True)):
                (carry, _), _ = lax.scan(pattern, (carry, inputs), xs, reverse=True)
        dx, _, moving, out = carry
        for turn in range(len(hops)):
            moving, out = _move(hops, moving, so_far(out), out, -1 - turn)
        return dx, out

    # ------------------------------------------------------------ weights and gradients

    @property
    def _gradient_specs(self) -> PyTree:
        return self.trained.of(self.specs)

    def _at(
        self, weights: Weights, index: Index, gathered: PyTree | None = None
    ) -> PyTree:
        """Return the weights of one layer, in the compute dtype."""
        one = stacks.get(weights.stacked, index)
        if weights.is_stored:
            one = zero.gather(one, self.specs, self.compute, gathered)
        return jax.tree.map(lambda p: row_major(p[0]), one)

    def _hops(self, *, finish: bool) -> list[Hop]:
        """Return the steps in which a layer's gradients are reduced.

        Each step runs in another iteration of the loop, overlapped with another layer.
        HSDP needs two, reduce-scatter and all-reduce, because the second reads the
        result of the first. A hierarchical reduce-scatter takes two by itself: inside
        nodes, then between them.
        """
        level = self.level
        two_steps = level > 1 and lax.axis_size(DP_NODE) > 1 < lax.axis_size(DP_SHARD)

        def inside(grads: PyTree, total: PyTree, index: Index) -> PyTree:
            if level == 3:
                return self._summand(grads, axes=(DP_SHARD,))
            part = self._added(grads, total, index)
            return zero.scatter(
                part, self._gradient_specs, level=level, axes=(DP_SHARD,)
            )

        def between(part: PyTree, total: PyTree, index: Index) -> PyTree:
            if level == 3:
                part = jax.tree.map(lambda g: g[0], part)
                return self._added(part, total, index, axes=(DP_NODE,))
            return zero.scatter(
                part, self._gradient_specs, level=level, axes=(DP_NODE,)
            )

        def scatter(grads: PyTree, total: PyTree, index: Index) -> PyTree:
            part = self._added(grads, total, index)
            return zero.scatter(part, self._gradient_specs, level=level)

        def reduce(part: PyTree, total: PyTree, index: Index) -> PyTree:
            del total, index
            return zero.reduce_over(DP, part, self._gradient_specs)

        def last(part: PyTree, total: PyTree, index: Index) -> PyTree:
            return reduce(between(part, total, index), total, index)

        def both(grads: PyTree, total: PyTree, index: Index) -> PyTree:
            return self._reduced(self._added(grads, total, index))

        num_shards = lax.axis_size(SHARDS)
        if not finish:
            if level < 3 or num_shards == 1:
                return []
            return [inside, between] if two_steps else [self._added]
        if lax.axis_size(DP) == 1:
            return []
        if two_steps and lax.axis_size(DP_REPLICATE) == 1:
            return [inside, last]
        if two_steps:
            return [inside, between, reduce]
        if level == 0 or lax.axis_size(DP) in (num_shards, lax.axis_size(DP_REPLICATE)):
            return [both]
        return [scatter, reduce]

    def _summand(self, grads: PyTree, axes: Sequence[str] = SHARDS) -> PyTree:
        """Return a layer's gradients as `zero.summand` does, leaves [1, ...]."""
        grads = jax.tree.map(lambda g: g[None], grads)
        return zero.summand(
            *(grads, self._gradient_specs),
            level=self.level,
            dtype=self.reduce,
            axes=axes,
        )

    def _added(
        self,
        grads: PyTree,
        total: PyTree | None,
        index: Index,
        axes: Sequence[str] = SHARDS,
    ) -> PyTree:
        """Add a layer's gradients to its entry of the sum; return leaves [1, ...]."""
        grads = self._summand(grads, axes)
        if total is None:
            return grads
        added = jax.tree.map(jnp.add, stacks.get(total, index), grads)
        return jax.tree.map(row_major, added)

    def _reduced(self, part: PyTree) -> PyTree:
        """Reduce the sum of a layer's gradients over data parallelism."""
        part = zero.scatter(part, self._gradient_specs, level=self.level)
        return zero.reduce_over(DP, part, self._gradient_specs)

    def _empty_sum(self, weights: Weights, *, finish: bool) -> PyTree:
        """Make zeros [L, ...] for the sum, or for the reduced sum with `finish`."""

        def one() -> PyTree:
            part = self._added(self.trained.of(self._at(weights, 0)), None, 0)
            part = self._reduced(part) if finish else part
            return jax.tree.map(lambda p: p[0], part)

        return jax.tree.map(lambda t: zeros_of(t, self.num_layers), jax.eval_shape(one))

    # ------------------------------------------------------------------------ places

    @property
    def _period(self) -> int:
        return len(self.pattern.kinds)

    @property
    def _offload(self) -> Offload | None:
        if self.horizon is None:
            return None
        return Offload(
            num_layers=self.num_layers,
            num_scanned=self.num_scanned,
            period=self._period,
            horizon=self.horizon,
        )

    def _firsts(self) -> Int[Array, " patterns"]:
        return jnp.arange(0, self.num_scanned, self._period)

    def _loop(self, *, reverse: bool = False) -> str:
        """Return the scope of the loop over the patterns."""
        firsts = range(0, self.num_scanned, self._period)
        firsts = firsts[::-1] if reverse else firsts
        return scopes.loop("layers", firsts.start, len(firsts), step=firsts.step)

    def _context(self, index: Index) -> tuple[Array, PyTree]:
        """Return the arguments of a layer besides its input and its weights."""
        # Make an array of a Python index too, which jax would trace as a constant.
        number = jnp.zeros((), jnp.int32) + self.pattern.first_layer + index
        return number, self.pattern.context

    def _is_in_loop(self, index: Index) -> bool:
        # XLA unrolls a single-iteration loop into the surrounding computation.
        return self.num_scanned > self._period and not isinstance(index, int)


def gather_first_layer(stacked: PyTree, specs: PyTree, dtype: DTypeLike) -> PyTree:
    """Gather the first layer's weights, which `OverlappedLayers.forward` needs first.

    Args:
      stacked: stored parameters of all layers, leaves [L, ...].
      specs: PartitionSpecs of the stored parameters.
      dtype: dtype of the gathered weights.
    Returns:
      the result of `zero.gather_split` for the first layer, leaves [1, ...].
    """
    return zero.gather_split(stacks.get(stacked, 0), specs, dtype)


def _move(
    hops: Sequence[Hop],
    moving: tuple[PyTree, ...],
    total: PyTree,
    out: PyTree,
    index: Index,
) -> tuple[tuple[PyTree, ...], PyTree]:
    """Run one hop for each layer whose gradients are being reduced.

    Args:
      hops: hops of the reduction, in order.
      moving: entry k has the gradients of layer index + 1 + k before hop k, or None.
      total: sum of the gradients of the earlier microbatches, or None.
      out: the stack to which gradients are written after all hops.
      index: index of the layer whose backward pass overlaps the hops.
    Returns:
      `moving` for the next layer, in which the caller sets entry 0 (None here); and
      `out`.
    """
    after: list[PyTree] = [None]
    for number, (hop, grads) in enumerate(zip(hops, moving, strict=True)):
        after.append(None if grads is None else hop(grads, total, index + 1 + number))
    *moved, done = after
    if hops and done is not None:
        out = stacks.put(out, done, index + len(hops))
    return tuple(moved), out
