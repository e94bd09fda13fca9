"""One tick of a pipeline on one device: a forward and a backward half-tick.

`Execution` holds the data that all ticks share, `Carry` the data that one tick passes
to the next. The docstring of `pipeline.run` lists the work of a tick in order.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree

from mjax.mesh import collectives
from mjax.pipeline.config import Options
from mjax.pipeline.held import (
    Held,
    held_in_backward,
    held_in_forward,
    put_layers,
    take_layers,
)
from mjax.pipeline.model import STASH, Chunks, Microbatch, Microbatches, Model, Row
from mjax.pipeline.schedule import IDLE, Phase, Schedule
from mjax.trace import scopes
from mjax.trace.vjp import SplitVJP, row_major, zeros_of

_TABLES = (
    *("forward_chunk", "forward_microbatch", "backward_chunk", "backward_microbatch"),
    *("stash_write", "stash_read", "gradient_write", "gradient_read"),
)


class Carry(NamedTuple):
    """Data that one tick passes to the next."""

    x: Array
    """Input of the forward half-tick."""
    dx: Array
    """Result of the previous backward half-tick, which this tick sends."""
    gradients: Array
    """Ring buffer of gradients that have arrived, [entries, b, t, D]."""
    stash: tuple[Array, ...]
    """Ring buffers of residuals kept for their backward half-tick, [entries, ...]."""
    chunks: Chunks
    """The gathered weights, leaves [v, n, ...]. They are in the carry because more
    pieces of them may arrive."""
    total: Array
    """Sum of the losses."""
    d_chunks: Chunks
    """Sums of the gradients. The sums of joined weights are None if v = 1; if v > 1,
    the sums of the current virtual stage are in `totals` instead."""
    d_embedding: PyTree
    d_head: PyTree | None
    """Sums of the head's gradients. None before the first loss and after the last one,
    when their reduction starts."""
    forward_layers: tuple[PyTree, ...]
    """Joined weights of the virtual stage that the forward half-tick runs."""
    backward_layers: tuple[PyTree, ...] | None
    """Joined weights of the virtual stage that the backward half-tick runs; None before
    the first backward half-tick, and if v = 1."""
    totals: tuple[PyTree, ...]
    """Sums of the gradients of the virtual stage that the backward half-tick runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Body(Phase):
    """Consecutive ticks that run the same loop body; the flags say what it contains."""

    has_loss: bool
    """Some tick runs the last virtual stage forward."""
    gathers: bool
    """Pieces of the next virtual stage's weights are gathered."""
    reduces: bool
    """Pieces of a finished virtual stage's gradients are reduced."""
    exchanges_forward: bool
    """Some stage changes to another virtual stage in its forward half-tick."""
    exchanges_backward: bool
    """Some stage changes its virtual stage in the next tick's backward half-tick."""


class Execution:
    """Data that all ticks share on one device, and the work of one tick."""

    def __init__(
        self,
        schedule: Schedule,
        model: Model,
        embedding: PyTree,
        microbatches: Microbatches,
        options: Options,
    ) -> None:
        self.schedule, self.model, self.embedding = schedule, model, embedding
        self.microbatches, self.options = microbatches, options
        self.stage = collectives.stage_index()
        # Select by the stage, as in a tick, so that the type varies over stages.
        self.any_microbatch = {
            name: _get(x, self.stage) for name, x in microbatches.items()
        }
        self.x_type = jax.eval_shape(model.embed, embedding, self.any_microbatch)

    def total_type(self, head: PyTree) -> Any:
        """Return the type of the head's result, given the head's weights or types."""
        return jax.eval_shape(
            self.model.head, self.embedding, head, self.x_type, self.any_microbatch
        )

    # --------------------------------------------------------- inputs of a tick

    def rows(self, start: int, stop: int) -> dict[str, Int[Array, " ticks"]]:
        """Return this stage's column of the tables, tick start to stop - 1."""
        tables = {name: getattr(self.schedule, name) for name in _TABLES}
        for name in ("chunk", "microbatch"):
            later = tables[f"forward_{name}"][1:]
            tables[f"next_{name}"] = np.pad(
                later, ((0, 1), (0, 0)), constant_values=IDLE
            )
        held = held_in_forward(tables["forward_chunk"])
        tables["forward_held"] = held
        tables["forward_held_before"] = np.concatenate([held[:1], held[:-1]])
        held = held_in_backward(tables["backward_chunk"])
        tables["backward_held"] = held
        tables["backward_held_after"] = np.concatenate([held[1:], held[-1:]])
        stacked = np.stack([table[start:stop] for table in tables.values()])
        mine = jnp.asarray(stacked)[:, :, self.stage]
        return dict(zip(tables, mine, strict=True)) | {"tick": jnp.arange(start, stop)}

    def number(self, chunk: Int[Array, ""]) -> Int[Array, ""]:
        """Return the index in the model of a local virtual stage."""
        return chunk * self.schedule.num_stages + self.stage

    def begins_at(self, chunk: Int[Array, ""]) -> Bool[Array, ""]:
        """Return whether a local virtual stage is the model's first."""
        return (chunk == 0) & (self.stage == 0)

    def ends_at(self, chunk: Int[Array, ""]) -> Bool[Array, ""]:
        """Return whether a local virtual stage is the model's last."""
        last_stage = self.schedule.num_stages - 1
        return (chunk == self.schedule.num_chunks - 1) & (self.stage == last_stage)

    def microbatch(self, index: Int[Array, ""]) -> Microbatch:
        """Return the microbatch of this index; an arbitrary one if idle."""
        return {name: _get(x, index) for name, x in self.microbatches.items()}

    def pick(self, chunks: PyTree, chunk: Int[Array, ""]) -> PyTree:
        """Return the weights of a local virtual stage; of an arbitrary one if idle."""
        return jax.tree.map(lambda w: _get(w, chunk), chunks)

    def if_used(self, chunk: Int[Array, ""], compute: Callable[[], Any]) -> Any:
        """Compute a half-tick. If idle, return arbitrary values (compute) or zeros
        (skip).
        """
        if self.options.idle == "compute":
            return compute()
        types = jax.eval_shape(compute)
        with jax.named_scope(scopes.SKIP):
            return lax.cond(
                chunk != IDLE, compute, lambda: jax.tree.map(zeros_of, types)
            )

    # ------------------------------------------------------------------- a tick

    def start(
        self,
        chunks: Chunks,
        layers: tuple[PyTree, ...],
        total_type: Any,
        dtype: DTypeLike,
    ) -> Carry:
        """Make the carry of the first tick; `layers` are the first virtual stage's."""
        totals = jax.tree.map(lambda w: jnp.zeros_like(w, dtype), layers)
        layers = tuple(map(self.model.hold, layers))
        d_chunks = jax.tree.map(lambda w: jnp.zeros_like(w, dtype), chunks)
        if self.schedule.num_chunks == 1:
            d_chunks = d_chunks._replace(joined=None)
        slot = (
            self.x_type,
            Held(layers, totals, self.pick(chunks.others, self.stage)),
            self.model.context(self.any_microbatch),
            self.stage,
        )
        if self.options.stash == "residuals":
            self._chunk = SplitVJP(self.model.chunk, *slot)
        _, kept = jax.eval_shape(self._keep, *slot)
        slots, waiting = self.schedule.num_stash_slots, self.schedule.num_gradient_slots
        return Carry(
            x=self.enter_first(),
            dx=zeros_of(self.x_type),
            gradients=zeros_of(self.x_type, waiting),
            stash=tuple(checkpoint_name(zeros_of(leaf, slots), STASH) for leaf in kept),
            chunks=chunks,
            total=zeros_of(total_type),
            d_chunks=d_chunks,
            d_embedding=jax.tree.map(
                lambda w: jnp.zeros_like(w, dtype), self.embedding
            ),
            d_head=None,
            forward_layers=layers,
            backward_layers=None,
            totals=totals,
        )

    def start_backward(self, carry: Carry) -> Carry:
        """Select the weights of the first backward half-tick, just before it."""
        if self.schedule.num_chunks == 1:
            return carry
        first = self._held_at(held_in_backward(self.schedule.backward_chunk)[0])
        layers = self._take_held(carry.chunks, first)
        return carry._replace(backward_layers=layers)

    def _held_at(self, row: Int[np.ndarray, " P"]) -> Int[Array, ""]:
        """Return this stage's entry of one tick's row in a table."""
        return jnp.asarray(row)[self.stage]

    def tick(self, phase: Body, carry: Carry, row: Row, head: PyTree | None) -> Carry:
        """Run the forward and the backward half-tick of one tick.

        Args:
          phase: the phase of the tick.
          carry: the carry of the tick before.
          row: the entries of the schedule's tables for this tick and stage.
          head: the head's weights if the phase has a loss.
        """
        gradient, received = carry.dx, None
        if phase.has_backward:
            with jax.named_scope(scopes.phase("backward")):
                gradient = collectives.send_to_previous_stage(gradient)
        if phase.has_forward:
            if phase.exchanges_forward:
                with jax.named_scope(scopes.EXCHANGE):
                    carry = self._exchange_forward(carry, row)
            y, carry = self._forward_slot(carry, row)
            received = collectives.send_to_next_stage(y)
            if phase.has_loss:
                with jax.named_scope(scopes.phase("loss")):
                    gradient, carry = self._loss(carry, row, y, gradient, head)
        with jax.named_scope(scopes.phase("backward")):
            if phase.has_backward or phase.has_loss:
                waiting = _put(carry.gradients, row["gradient_write"], gradient)
                carry = carry._replace(gradients=waiting)
            if phase.has_backward:
                carry = self._backward_slot(carry, row)
            if phase.exchanges_backward:
                with jax.named_scope(scopes.EXCHANGE):
                    carry = self._exchange_backward(carry, row)
        if received is not None:
            carry = carry._replace(x=self.enter_next(row, received))
        return carry

    def enter_first(self) -> Array:
        """Return the input of the first tick's forward half-tick."""
        first = self.schedule.forward_chunk[0], self.schedule.forward_microbatch[0]
        chunk, index = (jnp.asarray(column)[self.stage] for column in first)
        return self._enter(chunk, index, zeros_of(self.x_type))

    def enter_next(self, row: Row, received: Array) -> Array:
        """Return the input of the next tick's forward half-tick."""
        return self._enter(row["next_chunk"], row["next_microbatch"], received)

    def _enter(
        self, chunk: Int[Array, ""], index: Int[Array, ""], received: Array
    ) -> Array:
        return lax.cond(
            self.begins_at(chunk),
            lambda: self.model.embed(self.embedding, self.microbatch(index)),
            lambda: received,
        )

    def _forward_slot(self, carry: Carry, row: Row) -> tuple[Array, Carry]:
        """Run a virtual stage forward and store its residuals."""
        chunk = row["forward_chunk"]
        context = self.model.context(self.microbatch(row["forward_microbatch"]))
        others = self.pick(carry.chunks.others, chunk)
        held = Held(carry.forward_layers, carry.totals, others)
        y, kept = self.if_used(
            chunk, lambda: self._keep(carry.x, held, context, self.number(chunk))
        )
        # Without this constraint XLA chooses the layout of a buffer for one of the two
        # half-ticks, and copies the whole buffer for the other.
        stash = tuple(
            row_major(_put(row_major(buffer), row["stash_write"], row_major(leaf)))
            for buffer, leaf in zip(carry.stash, kept, strict=True)
        )
        return y, carry._replace(stash=stash)

    def _loss(
        self, carry: Carry, row: Row, y: Array, gradient: Array, head: PyTree
    ) -> tuple[Array, Carry]:
        """Add the loss of a microbatch that has left the last virtual stage.

        The last virtual stage has no next stage. Its backward half-tick uses the
        gradient of the loss instead of a received one.
        """
        micro = self.microbatch(row["forward_microbatch"])

        so_far = carry.d_embedding, carry.d_head

        def compute() -> tuple[Array, PyTree, Array]:
            loss, pull = jax.vjp(
                lambda embedding, head, y: self.model.head(embedding, head, y, micro),
                *(self.embedding, head, y),
            )
            *more, dy = pull(jnp.ones_like(loss))
            return carry.total + loss, _add(so_far, tuple(more)), dy

        total, (d_embedding, d_head), gradient = lax.cond(
            self.ends_at(row["forward_chunk"]),
            compute,
            lambda: (carry.total, so_far, gradient),
        )
        return gradient, carry._replace(
            total=total, d_embedding=d_embedding, d_head=d_head
        )

    def _backward_slot(self, carry: Carry, row: Row) -> Carry:
        """Run a virtual stage backward, from the gradient that has arrived."""
        chunk = row["backward_chunk"]
        micro = self.microbatch(row["backward_microbatch"])
        context = self.model.context(micro)
        kept = tuple(
            row_major(_get(row_major(buffer), row["stash_read"]))
            for buffer in carry.stash
        )
        dy = _unless_idle(chunk, _get(carry.gradients, row["gradient_read"]))
        layers = carry.backward_layers or carry.forward_layers
        held = Held(layers, carry.totals, self.pick(carry.chunks.others, chunk))

        def compute() -> tuple[PyTree, tuple[PyTree, ...], Array]:
            dx, d_held = self._pull(kept, dy, held, context, self.number(chunk))
            others = _add_to_chunk(carry.d_chunks.others, d_held.others, chunk)
            return others, d_held.totals, dx

        if self.options.idle == "skip":
            unchanged = carry.d_chunks.others, carry.totals
            with jax.named_scope(scopes.SKIP):
                others, totals, dx = lax.cond(
                    chunk != IDLE,
                    compute,
                    lambda: (*unchanged, zeros_of(self.x_type)),
                )
        else:
            others, totals, dx = compute()

        def embed_backward() -> PyTree:
            _, pull = jax.vjp(lambda w: self.model.embed(w, micro), self.embedding)
            return _add(carry.d_embedding, pull(dx)[0])

        d_embedding = lax.cond(
            self.begins_at(chunk), embed_backward, lambda: carry.d_embedding
        )
        d_chunks = carry.d_chunks._replace(others=others)
        return carry._replace(
            dx=dx, d_chunks=d_chunks, d_embedding=d_embedding, totals=totals
        )

    # ------------------------------------- change of the current virtual stage

    def _take_held(self, chunks: Chunks, chunk: Int[Array, ""]) -> tuple[PyTree, ...]:
        """Select the joined weights of a virtual stage, in the form of `Model.hold`."""
        return tuple(map(self.model.hold, take_layers(chunks.joined, chunk)))

    def _exchange_forward(self, carry: Carry, row: Row) -> Carry:
        """Select the weights for this tick's forward half-tick."""
        chunk = row["forward_held"]
        layers = lax.cond(
            chunk != row["forward_held_before"],
            lambda layers: self._take_held(carry.chunks, chunk),
            lambda layers: layers,
            carry.forward_layers,
        )
        # Without the barrier XLA overlaps the transfers of x over tp with this
        # selection. The first matmul then waits for a transfer and overlaps none.
        x, layers = lax.optimization_barrier((carry.x, layers))
        return carry._replace(x=x, forward_layers=layers)

    def _exchange_backward(self, carry: Carry, row: Row) -> Carry:
        """Write the gradient sums back; select sums and weights for the next tick."""
        before, after = row["backward_held"], row["backward_held_after"]

        def exchange(sums: PyTree, totals: Any, layers: Any) -> tuple[Any, Any, Any]:
            sums = put_layers(sums, before, totals)
            layers = self._take_held(carry.chunks, after)
            return sums, take_layers(sums, after), layers

        sums, totals, layers = lax.cond(
            before != after,
            exchange,
            lambda *same: same,
            *(carry.d_chunks.joined, carry.totals, carry.backward_layers),
        )
        d_chunks = carry.d_chunks._replace(joined=sums)
        return carry._replace(d_chunks=d_chunks, totals=totals, backward_layers=layers)

    # --------------------------------------- a virtual stage and its residuals

    def _keep(self, x: Array, *args: PyTree) -> tuple[Array, tuple[Array, ...]]:
        """Run a virtual stage; return its output and residuals."""
        with jax.named_scope(scopes.SLOT):
            if self.options.stash == "input":
                return self.model.chunk(x, *args), (x,)
            return self._chunk.forward(x, *args)

    def _pull(
        self, kept: tuple[Array, ...], dy: Array, *args: PyTree
    ) -> tuple[Array, PyTree]:
        """Return the gradients of the input and of the weights of a virtual stage."""
        with jax.named_scope(scopes.SLOT):
            if self.options.stash == "residuals":
                return self._chunk.backward(kept, dy, *args)
            has_gradient = (True, True, False, False)
            _, pullback = jax.vjp(self.model.chunk, *kept, *args, in_nzs=has_gradient)
            dx, d_weights, *_ = pullback(dy)
            return dx, d_weights


def _get(buffer: Array, slot: Int[Array, ""]) -> Array:
    # An idle half-tick (index -1) reads entry 0; jax would read the last entry.
    if buffer.shape[0] == 1:
        return buffer[0]
    return lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), 0, keepdims=False)


def _put(buffer: Array, slot: Int[Array, ""], value: Array) -> Array:
    if buffer.shape[0] == 1:
        return value[None]
    return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)


def _add(total: PyTree, more: PyTree) -> PyTree:
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, more)


def _unless_idle(chunk: Int[Array, ""], gradient: Array) -> Array:
    """Return the gradient, or zeros if the half-tick is idle."""
    return jnp.where(chunk == IDLE, 0, gradient)


def _add_to_chunk(total: PyTree, more: PyTree, chunk: Int[Array, ""]) -> PyTree:
    """Add to the gradients of one virtual stage; add zeros if idle."""
    # Without the barrier each kernel looks the index up in the table. Then XLA
    # cannot tell that slice and update have the same index, and copies the slice.
    slot = lax.optimization_barrier(jnp.maximum(chunk, 0))

    def leaf(total: Array, more: Array) -> Array:
        at = (slot, *[0] * more.ndim)
        old = lax.dynamic_slice(total, at, (1, *more.shape))
        new = old + more[None].astype(total.dtype)
        return lax.dynamic_update_slice(total, new, at)

    return jax.tree.map(leaf, total, more)
