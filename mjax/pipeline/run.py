"""Execute a pipeline schedule: one program for all stages.

Input: a schedule (`pipeline.schedule`), the model as functions of one device, this
device's weights, and the microbatches. Output: the loss and the gradients. Everything
here runs per device inside a `jax.shard_map` over all mesh axes.

The ticks are scanned phase by phase: warm-up, steady, cool-down. Only the bodies of
these loops are compiled, so compile time does not grow with the number of microbatches.
In a tick

1. the stage starts to send the gradient of the previous tick to the previous stage;
2. the forward half-tick runs a virtual stage and stores the residuals for its backward
   half-tick in a ring buffer; the last virtual stage also computes the loss and its
   gradient;
3. the stage starts to send its output to the next stage;
4. the backward half-tick runs the backward pass of a virtual stage on the gradient that
   has arrived, and adds to the gradients of the weights (`pipeline.held`);
5. the stage takes the activation that has arrived, or computes the embedding, as the
   input of the next tick.

So each transfer can overlap the whole half-tick of the other direction. Step 5 must be
in the same tick: if the loop body only returned the result of a transfer, XLA would
move the transfer to the start of the next iteration, where nothing overlaps it
(collective-permute-motion, jax 0.11.2). Values that depend only on the weights are
never stored: the backward half-tick reads the weights.

Weights are gathered in the order of their first use: the embedding, then the layers of
the first virtual stage. During the warm-up the other virtual stages are gathered, in
pieces, and so is the head, which is first used after the warm-up. The head's gradients
are complete after the last loss and are reduced during the cool-down. The embedding's
gradients are reduced after the last tick.

In an idle half-tick a stage computes on arbitrary data and discards the result
(`idle="compute"`; a backward half-tick then adds zeros), or skips the work by a
condition (`idle="skip"`). Both take the same time, because the stage waits for the
others anyway. But a condition makes a GPU wait for the host, and code inside it must
not send around the ring of another axis. Only one of the P stages needs the embedding,
and one the loss; the other stages always skip them.

Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Jiang et al. 2024,
arXiv:2402.15627, section 3.2 (decoupled sends and receives). Activations are sent
between stages split over tp, as they are between two layers (the scatter/gather
optimisation of Narayanan et al., section 4.1).
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from mjax.mesh import collectives
from mjax.pipeline.config import Idle, Options
from mjax.pipeline.held import Held as Held
from mjax.pipeline.held import changes, held_in_backward, held_in_forward
from mjax.pipeline.model import Chunks as Chunks
from mjax.pipeline.model import Microbatches, Model, Row, Weights
from mjax.pipeline.pieces import First, Pieces, after
from mjax.pipeline.schedule import Schedule
from mjax.pipeline.tick import Body, Carry, Execution
from mjax.trace import scopes
from mjax.trace.vjp import zeros_of


def gradients(
    schedule: Schedule,
    model: Model,
    weights: Weights,
    microbatches: Microbatches,
    *,
    options: Options,
    dtype: DTypeLike,
    pieces: Pieces,
    first: First | None = None,
    log: Any = None,
    mark: Callable[[Any, Array], tuple[Any, Array]] = lambda log, x: (log, x),
) -> tuple[Float[Array, ""], Weights, Any]:
    """Compute the loss of all microbatches and its gradients.

    Args:
      schedule: a training schedule of as many stages as the mesh has.
      model: its head returns a scalar; the losses of the microbatches are summed.
      weights: stored weights, varying over all mesh axes; `chunks` is a `Chunks`, as
        `pieces` expects.
      microbatches: this device's sequences, the same on every stage.
      options: see `Options`.
      dtype: dtype of the accumulated gradients.
      pieces: the object that gathers the weights and reduces the gradients.
      first: result of `pieces.gather_first` for these weights, if it ran before the
        step; None gathers them here.
      log: the log of stamps, passed from tick to tick.
      mark: function called at the start of each tick with the log and the input of the
        tick, or the gradient that the tick sends if it has no forward half-tick.
    Returns:
      loss: of these sequences on the last stage, zero on all others;
      gradients: reduced, laid out like `weights`; in `chunks`, this stage's gradients;
      log: with the stamps of this step.
    """
    embedding = pieces.gather_whole(
        *(weights.embedding, pieces.specs.embedding), first and first.embedding
    )
    chunks, layers = pieces.start(after(embedding, weights.chunks), first)
    stored, stored_head = after((chunks.others, layers), (weights.chunks, weights.head))
    head = pieces.gather_whole(stored_head, pieces.specs.head)

    run = Execution(schedule, model, embedding, microbatches, options)
    carry = run.start(chunks, layers, run.total_type(head), dtype)
    phases = _phases(schedule, pieces)
    with_loss = [n for n, phase in enumerate(phases) if phase.has_loss]
    parts: list[list[Array]] = []
    d_head: PyTree = None
    is_forward_only = True
    for number, phase in enumerate(phases):
        if number == with_loss[0]:
            zeros = jax.tree.map(lambda w: jnp.zeros_like(w, dtype), head)
            carry = carry._replace(d_head=zeros)
        if is_forward_only and phase.has_backward:
            is_forward_only = False
            carry = run.start_backward(carry)

        def tick(
            carry_and_log: tuple[Carry, Any], row: Row, phase: Body = phase
        ) -> Any:
            carry, log = carry_and_log
            # Mark the array that a tick uses first: its work then waits for the mark.
            first = "x" if phase.has_forward else "dx"
            log, value = mark(log, getattr(carry, first))
            carry = carry._replace(**{first: value})
            part: list[Array] = []
            if phase.reduces:
                since = row["tick"] - (schedule.num_ticks - pieces.num_ticks)
                with jax.named_scope(scopes.phase("backward")):
                    part = pieces.reduce(carry.d_chunks, since)
            if phase.gathers:
                # No half-tick of this tick reads the piece, so it can overlap the whole
                # tick.
                copy = pieces.gather(stored, carry.chunks, row["tick"])
                carry = run.tick(phase, carry, row, head)._replace(chunks=copy)
                return (carry, log), part
            return (run.tick(phase, carry, row, head), log), part

        rows = run.rows(phase.start, phase.stop)
        num_ticks = phase.stop - phase.start
        with jax.named_scope(scopes.loop("ticks", phase.start, num_ticks)):
            (carry, log), part = lax.scan(tick, (carry, log), rows)
        if phase.reduces:
            parts.append(part)
        if number == with_loss[-1]:
            with jax.named_scope(scopes.phase("backward")):
                d_head = pieces.reduce_whole(carry.d_head, pieces.specs.head)
            carry = carry._replace(d_head=None)
    with jax.named_scope(scopes.phase("backward")):
        stacked = [jnp.concatenate(part) for part in zip(*parts, strict=True)]
        d_chunks = pieces.finish(carry.d_chunks, carry.totals, stacked)
        d_embedding = pieces.reduce_whole(carry.d_embedding, pieces.specs.embedding)
    grads = Weights(chunks=d_chunks, embedding=d_embedding, head=d_head)
    return carry.total, grads, log


def forward(
    schedule: Schedule,
    model: Model,
    weights: Weights,
    microbatches: Microbatches,
    *,
    idle: Idle,
) -> Float[Array, "*dims"]:
    """Run all virtual stages forward and sum the results of the head.

    Args:
      schedule: result of `schedule.build_forward`.
      model: as for `gradients`; the head's result may have any shape.
      weights: gathered weights, varying over all mesh axes.
      microbatches: this device's sequences, the same on every stage.
      idle: see `Options`.
    Returns:
      the sum over the microbatches on the last stage, zero on all others.
    """
    options = Options(idle=idle)
    run = Execution(schedule, model, weights.embedding, microbatches, options)

    def tick(carry: tuple[Array, Array], row: Row) -> tuple[tuple[Array, Array], None]:
        x, total = carry
        micro = run.microbatch(row["forward_microbatch"])
        chunk = run.pick(weights.chunks, row["forward_chunk"])
        number = run.number(row["forward_chunk"])
        y = run.if_used(
            row["forward_chunk"],
            lambda: model.chunk(x, chunk, model.context(micro), number),
        )
        total = lax.cond(
            run.ends_at(row["forward_chunk"]),
            lambda: total + model.head(weights.embedding, weights.head, y, micro),
            lambda: total,
        )
        return (run.enter_next(row, collectives.send_to_next_stage(y)), total), None

    start = run.enter_first(), zeros_of(run.total_type(weights.head))
    (_, total), _ = lax.scan(tick, start, run.rows(0, schedule.num_ticks))
    return total


def _phases(schedule: Schedule, pieces: Pieces) -> list[Body]:
    """Split the schedule's phases where the ticks with pieces end or begin.

    The first tick, which gathers the layers of the first virtual stage, and the last
    tick, which reduces their gradients, are separate phases, because a collective that
    starts outside a loop cannot end inside it.
    """
    num_ticks, num_piece_ticks = schedule.num_ticks, pieces.num_ticks
    first_reducing = num_ticks - num_piece_ticks
    edges = [num_piece_ticks, first_reducing]
    if pieces.split:
        edges += [1, num_ticks - 1]
    forward = changes(held_in_forward(schedule.forward_chunk))
    backward = changes(held_in_backward(schedule.backward_chunk))
    loss = schedule.forward_chunk[:, -1] == schedule.num_chunks - 1
    phases = []
    for phase in schedule.phases:
        cuts = {phase.start, phase.stop}
        cuts |= {edge for edge in edges if phase.start < edge < phase.stop}
        for start, stop in itertools.pairwise(sorted(cuts)):
            phases.append(
                Body(
                    start=start,
                    stop=stop,
                    has_forward=phase.has_forward,
                    has_backward=phase.has_backward,
                    has_loss=bool(loss[start:stop].any()),
                    gathers=start < num_piece_ticks,
                    reduces=start >= first_reducing,
                    exchanges_forward=bool(forward[start:stop].any()),
                    exchanges_backward=bool(backward[start + 1 : stop + 1].any()),
                )
            )
    return phases
