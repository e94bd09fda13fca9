"""Bugs planted in the tables of schedules are caught by the rules."""

import dataclasses
import re

import numpy as np
import pytest

from mjax.pipeline.schedule import IDLE, Schedule
from tests.pipeline.schedule_rules import validate
from tests.pipeline.tables import entries, interleaved, one_chunk


def changed(schedule: Schedule, **cells: dict[tuple[int, int], int]) -> Schedule:
    """Copy a schedule with some cells of some tables replaced."""
    tables = {name: getattr(schedule, name).copy() for name in cells}
    for name, values in cells.items():
        for cell, value in values.items():
            tables[name][cell] = value
    return dataclasses.replace(schedule, **tables)


def refused(schedule: Schedule) -> str:
    with pytest.raises(ValueError, match=r"stage|slot") as caught:
        validate(schedule)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_two_swapped_entries_are_caught(kind: str):
    """Sabotage: stage 1 does two microbatches of a chunk in the other order."""
    schedule = interleaved(4, 2, 8)
    cells = [(t, 1) for t, s, c, _ in entries(schedule, kind) if (s, c) == (1, 1)][:2]
    table = getattr(schedule, f"{kind}_microbatch")
    values = dict(zip(cells, [table[cell] for cell in reversed(cells)], strict=True))
    message = refused(changed(schedule, **{f"{kind}_microbatch": values}))
    arrives = "input" if kind == "forward" else "gradient"
    assert re.search(
        rf"the {kind} slot of chunk \d, microbatch \d is in tick \d+; its {arrives} "
        r"arrives in tick \d+",
        message,
    )


def test_a_forward_slot_before_its_input_is_caught():
    """Sabotage: the last stage begins one tick early; the wire takes one."""
    schedule = one_chunk("1f1b", 4, 8)
    assert schedule.forward_chunk[2, 3] == IDLE
    message = refused(
        changed(
            schedule,
            forward_chunk={(2, 3): 0, (3, 3): IDLE},
            forward_microbatch={(2, 3): 0, (3, 3): IDLE},
        )
    )
    assert message == (
        "the forward slot of chunk 3, microbatch 0 is in tick 2; its input arrives in "
        "tick 3"
    )


def test_a_backward_slot_before_its_gradient_is_caught():
    """Sabotage: the first stage begins backward one tick early."""
    schedule = interleaved(4, 2, 8)
    assert schedule.backward_chunk[9, 0] == IDLE
    message = refused(
        changed(
            schedule,
            backward_chunk={(9, 0): 1, (10, 0): IDLE},
            backward_microbatch={(9, 0): 0, (10, 0): IDLE},
        )
    )
    assert message == (
        "the backward slot of chunk 4, microbatch 0 is in tick 9; its gradient arrives "
        "in tick 10"
    )


def test_a_forward_slot_after_its_input_has_gone_is_caught():
    """Sabotage: the last stage does its last microbatch one tick late."""
    schedule = one_chunk("1f1b", 4, 8)
    assert schedule.forward_chunk[11, 3] == IDLE
    message = refused(
        changed(
            schedule,
            forward_chunk={(10, 3): IDLE, (11, 3): 0},
            forward_microbatch={(10, 3): IDLE, (11, 3): 7},
        )
    )
    assert message == (
        "the forward slot of chunk 3, microbatch 7 is in tick 11; its input arrives in "
        "tick 10"
    )


def test_a_backward_slot_after_its_gradient_has_gone_is_caught():
    """Sabotage: the first stage does its last backward slot one tick late."""
    schedule = one_chunk("1f1b", 2, 3)
    tables = {
        field.name: np.vstack([value, value[-1:]])
        for field in dataclasses.fields(schedule)
        if isinstance(value := getattr(schedule, field.name), np.ndarray)
    }
    for name in ("backward_chunk", "backward_microbatch"):
        tables[name][-2, 0] = IDLE
    message = refused(dataclasses.replace(schedule, **tables))
    assert message == (
        "the backward slot of chunk 0, microbatch 2 is in tick 5; its gradient arrives "
        "in tick 4"
    )


def test_a_backward_slot_before_its_forward_slot_is_caught():
    """Sabotage: the last microbatch goes backward first."""
    schedule = one_chunk("1f1b", 1, 3)
    message = refused(changed(schedule, backward_microbatch={(0, 0): 2, (2, 0): 0}))
    assert message == (
        "the backward slot of chunk 0, microbatch 2 is in tick 0, before its forward "
        "slot"
    )


def test_two_gradients_that_arrive_in_one_tick_are_caught():
    """Sabotage: all backward slots move on by a tick; loss and neighbour collide."""
    schedule = interleaved(2, 2, 4)
    num_ticks = schedule.num_ticks + 1
    idle = np.full((1, 2), IDLE, np.int32)
    # A slot for each tick: the buffers are large enough for anything.
    slots = np.repeat(np.arange(num_ticks, dtype=np.int32)[:, None], 2, axis=1)
    reads = {name: np.full_like(slots, IDLE) for name in ("stash", "gradient")}
    forward = {(s, c, i): t for t, s, c, i in entries(schedule, "forward")}
    for tick, stage, chunk, microbatch in entries(schedule, "backward"):
        begun = forward[stage, chunk, microbatch]
        from_loss = (stage, chunk) == (1, 1)
        reads["stash"][tick + 1, stage] = begun
        reads["gradient"][tick + 1, stage] = begun if from_loss else tick + 1
    message = refused(
        dataclasses.replace(
            schedule,
            forward_chunk=np.vstack([schedule.forward_chunk, idle]),
            forward_microbatch=np.vstack([schedule.forward_microbatch, idle]),
            backward_chunk=np.vstack([idle, schedule.backward_chunk]),
            backward_microbatch=np.vstack([idle, schedule.backward_microbatch]),
            stash_write=slots,
            stash_read=reads["stash"],
            gradient_write=slots,
            gradient_read=reads["gradient"],
        )
    )
    assert re.fullmatch(
        r"stage 1 has one gradient slot to write in tick \d+, for what ticks \d+ and "
        r"\d+ need",
        message,
    )


def test_a_doubled_slot_is_caught():
    """Sabotage: a stage does one microbatch twice, the second time while idle."""
    schedule = interleaved(4, 2, 8)
    tick = schedule.num_ticks - 8
    assert schedule.forward_chunk[tick, 0] == IDLE
    message = refused(
        changed(
            schedule, forward_chunk={(tick, 0): 1}, forward_microbatch={(tick, 0): 7}
        )
    )
    assert message == (
        "stage 0 must fill one forward slot for each (chunk, microbatch); missing: [], "
        "too many: [(1, 7)]"
    )


def test_a_missing_slot_is_caught():
    """Sabotage: the last backward slot of stage 2 is left idle."""
    schedule = interleaved(4, 2, 8)
    tick, stage, chunk, microbatch = [
        entry for entry in entries(schedule, "backward") if entry[1] == 2
    ][-1]
    message = refused(changed(schedule, backward_chunk={(tick, stage): IDLE}))
    assert message == (
        "stage 2 must fill one backward slot for each (chunk, microbatch); missing: "
        f"[({chunk}, {microbatch})], too many: []"
    )


@pytest.mark.parametrize("target", range(10))
def test_a_stash_with_one_slot_less_is_caught(target: int):
    """Sabotage: the top slot's number falls onto another, as in a buffer too small."""
    schedule = interleaved(4, 2, 8)
    top = schedule.num_stash_slots - 1
    assert top == 10
    message = refused(
        dataclasses.replace(
            schedule,
            **{
                name: np.where(table == top, target, table).astype(np.int32)
                for name in ("stash_write", "stash_read")
                for table in [getattr(schedule, name)]
            },
        )
    )
    assert re.fullmatch(
        rf"stage \d overwrites stash slot {target} in tick \d+; it is needed until "
        r"tick \d+",
        message,
    )


def test_a_gradient_buffer_with_one_slot_less_is_caught():
    """Sabotage: GPipe's last stage keeps two microbatches' gradients in one slot."""
    schedule = one_chunk("gpipe", 3, 4)
    top = schedule.num_gradient_slots - 1
    message = refused(
        dataclasses.replace(
            schedule,
            **{
                name: np.where(table == top, 0, table).astype(np.int32)
                for name in ("gradient_write", "gradient_read")
                for table in [getattr(schedule, name)]
            },
        )
    )
    assert message.startswith("stage 2 overwrites gradient slot 0 in tick ")


def test_an_idle_slot_that_writes_over_something_is_caught():
    """Sabotage: idle forward slots all write to slot 0, which is in use."""
    schedule = interleaved(4, 2, 8)
    is_idle = (schedule.forward_chunk == IDLE) & (schedule.stash_write != IDLE)
    cells = {(int(t), int(s)): 0 for t, s in np.argwhere(is_idle)}
    message = refused(changed(schedule, stash_write=cells))
    assert re.match(r"stage \d overwrites stash slot 0 in tick \d+", message)


@pytest.mark.parametrize("name", ["stash", "gradient"])
def test_an_idle_slot_without_a_place_to_write_is_caught(name: str):
    """Sabotage: an idle slot writes to IDLE, -1: as an index, the last slot."""
    schedule = interleaved(4, 2, 8)
    message = refused(changed(schedule, **{f"{name}_write": {(0, 3): IDLE}}))
    assert message == f"stage 3 has no {name} slot to write in tick 0"


@pytest.mark.parametrize("name", ["stash", "gradient"])
def test_reading_another_slot_is_caught(name: str):
    """Sabotage: one backward slot reads the slot beside its own."""
    schedule = interleaved(4, 2, 8)
    read = getattr(schedule, f"{name}_read")
    message = refused(
        changed(schedule, **{f"{name}_read": {(12, 1): int(read[12, 1]) + 1}})
    )
    assert re.fullmatch(
        rf"stage 1 reads {name} slot {read[12, 1] + 1} in tick 12; what it needs was "
        rf"put into slot {read[12, 1]} in tick \d+",
        message,
    )
