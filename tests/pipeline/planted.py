"""Bugs for the executor to run: schedules that are wrong, transfers that go astray."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import jax
import numpy as np

from mjax.mesh import collectives
from mjax.pipeline import run, tick
from mjax.pipeline.held import held_in_backward
from mjax.pipeline.schedule import IDLE, Schedule, build
from tests.pipeline import reference, toy

FORWARD = ("forward_chunk", "forward_microbatch", "stash_write")
BACKWARD = ("backward_chunk", "backward_microbatch", "stash_read", "gradient_read")


def interleaved() -> Schedule:
    return build("interleaved-1f1b", num_stages=4, num_chunks=2, num_microbatches=8)


def gpipe() -> Schedule:
    return build("gpipe", num_stages=4, num_chunks=1, num_microbatches=5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bug:
    """One change to a correct pipeline."""

    schedule: Callable[[], Schedule] = interleaved
    change: Callable[[Schedule], Schedule] = lambda schedule: schedule
    patched: tuple[object, str, Callable] | None = None
    """An object, the name of an attribute of it, and the value that replaces it."""
    by_schedule: str | None = None
    """Test in test_planted_tables.py that refuses such a table."""

    def apply(self) -> contextlib.AbstractContextManager:
        if self.patched is None:
            return contextlib.nullcontext()
        return mock.patch.object(*self.patched)


@functools.cache
def correct(num_chunks: int, num_microbatches: int) -> run.Weights:
    weights = toy.make_weights(num_chunks)
    micro = toy.make_microbatches(num_microbatches)
    return jax.jit(lambda w, m: reference.gradients(toy.MODEL, w, m)[1])(weights, micro)


def error(bug: Bug) -> float:
    """Return the largest relative error of a leaf of the gradients; NaN is inf."""
    schedule = bug.schedule()
    num_chunks = schedule.num_stages * schedule.num_chunks
    weights = toy.make_weights(num_chunks)
    micro = toy.make_microbatches(schedule.num_microbatches)
    want = correct(num_chunks, schedule.num_microbatches)
    with bug.apply():
        _, got = toy.pipelined(bug.change(schedule), weights, micro)
    errors = [
        np.abs(a - b).max() / np.abs(b).max()
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    return float(np.nan_to_num(max(errors), nan=np.inf))


def _changed(schedule: Schedule, tables: dict[str, np.ndarray]) -> Schedule:
    return dataclasses.replace(
        schedule, **{name: table.astype(np.int32) for name, table in tables.items()}
    )


def _swapped(kind: str, ticks: tuple[int, int]) -> Callable[[Schedule], Schedule]:
    """Exchange the work of stage 1 in two ticks."""

    def change(schedule: Schedule) -> Schedule:
        tables = {}
        for name in (f"{kind}_chunk", f"{kind}_microbatch"):
            tables[name] = getattr(schedule, name).copy()
            tables[name][list(ticks), 1] = tables[name][list(ticks)[::-1], 1]
            assert (tables[name][list(ticks), 1] != IDLE).all()
        return _changed(schedule, tables)

    return change


def _one_tick_early(names: tuple[str, ...], stage: int) -> Callable:
    def change(schedule: Schedule) -> Schedule:
        tables = {name: getattr(schedule, name).copy() for name in names}
        for table in tables.values():
            table[:, stage] = np.roll(table[:, stage], -1)
        return _changed(schedule, tables)

    return change


def _one_slot_less(buffer: str) -> Callable[[Schedule], Schedule]:
    def change(schedule: Schedule) -> Schedule:
        names = (f"{buffer}_write", f"{buffer}_read")
        tables = {name: getattr(schedule, name) for name in names}
        top = tables[names[0]].max()
        assert top > 0
        return _changed(
            schedule, {name: np.where(t == top, 0, t) for name, t in tables.items()}
        )

    return change


def _left_out(schedule: Schedule) -> Schedule:
    """Leave the last backward half-tick of stage 2 idle."""
    chunks = schedule.backward_chunk.copy()
    chunks[np.flatnonzero(chunks[:, 2] != IDLE)[-1], 2] = IDLE
    return _changed(schedule, {"backward_chunk": chunks})


def _idle_writes_to_slot_0(schedule: Schedule) -> Schedule:
    is_idle = (schedule.forward_chunk == IDLE) & (schedule.stash_write != IDLE)
    return _changed(
        schedule, {"stash_write": np.where(is_idle, 0, schedule.stash_write)}
    )


def _exchanged_late(chunks: np.ndarray) -> np.ndarray:
    """Hold a virtual stage one tick longer."""
    held = held_in_backward(chunks)
    return np.concatenate([held[:1], held[:-1]])


BUGS = {
    "two forward entries of a stage swapped": Bug(
        change=_swapped("forward", (5, 7)),
        by_schedule="test_two_swapped_entries_are_caught",
    ),
    "two backward entries of a stage swapped": Bug(
        change=_swapped("backward", (12, 14)),
        by_schedule="test_two_swapped_entries_are_caught",
    ),
    "a stage's forward slots before their inputs": Bug(
        change=_one_tick_early(FORWARD, 3),
        by_schedule="test_a_forward_slot_before_its_input_is_caught",
    ),
    "a stage's backward slots before their gradients": Bug(
        change=_one_tick_early(BACKWARD, 0),
        by_schedule="test_a_backward_slot_before_its_gradient_is_caught",
    ),
    "a stash of one slot less": Bug(
        change=_one_slot_less("stash"),
        by_schedule="test_a_stash_with_one_slot_less_is_caught",
    ),
    "a gradient buffer of one slot less": Bug(
        schedule=gpipe,
        change=_one_slot_less("gradient"),
        by_schedule="test_a_gradient_buffer_with_one_slot_less_is_caught",
    ),
    "a backward slot left out": Bug(
        change=_left_out, by_schedule="test_a_missing_slot_is_caught"
    ),
    "idle slots that write over something": Bug(
        change=_idle_writes_to_slot_0,
        by_schedule="test_an_idle_slot_that_writes_over_something_is_caught",
    ),
    "activations sent to the stage before": Bug(
        patched=(
            collectives,
            "send_to_next_stage",
            lambda x, send=collectives.send_to_previous_stage: send(x),
        )
    ),
    "gradients sent to the next stage": Bug(
        patched=(
            collectives,
            "send_to_previous_stage",
            lambda x, send=collectives.send_to_next_stage: send(x),
        )
    ),
    "activations sent two stages on": Bug(
        patched=(
            collectives,
            "send_to_next_stage",
            lambda x, send=collectives.send_to_next_stage: send(send(x)),
        )
    ),
    "sums of gradients put back a tick late": Bug(
        patched=(tick, "held_in_backward", _exchanged_late)
    ),
    "weights of the last chunk run forward": Bug(
        patched=(tick, "held_in_forward", _exchanged_late)
    ),
    "gradients of idle slots added": Bug(
        patched=(tick, "_unless_idle", lambda chunk, gradient: gradient)
    ),
}
