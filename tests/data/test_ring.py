import os
from pathlib import Path

import numpy as np
import pytest

from mjax.data.ring import Layout, Ring, TornRowError, create

LAYOUT = Layout(num_slots=2, num_rows=3, row_words=5, num_consumers=2)


@pytest.fixture
def rings():
    """The writer's view and a reader's view of one memory, from step 7 on."""
    descriptor = create(LAYOUT, start_step=7)
    views = Ring(descriptor, LAYOUT), Ring(descriptor, LAYOUT)
    os.close(descriptor)  # the memory lives on: it is mapped
    return views


def rows_of(step):
    return np.arange(step, step + 15, dtype=np.int32).reshape(3, 5)


def test_rows_come_out_as_they_went_in_and_are_copies(rings):
    writer, reader = rings
    assert not reader.holds(7)
    writer.write(7, rows_of(7))
    assert reader.holds(7)
    rows = reader.read(7, 1, 3)
    np.testing.assert_array_equal(rows, rows_of(7)[1:])
    writer.write(9, rows_of(9))  # the same slot
    np.testing.assert_array_equal(rows, rows_of(7)[1:])


def test_a_slot_has_room_only_when_every_consumer_is_done_with_it(rings):
    writer, reader = rings
    assert [writer.has_room(step) for step in (7, 8, 9)] == [True, True, False]
    reader.finish(0, 7)
    assert not writer.has_room(9)
    reader.finish(1, 7)
    assert [writer.has_room(step) for step in (9, 10)] == [True, False]


def test_a_new_writer_begins_after_what_is_there(rings):
    writer, reader = rings
    assert reader.next_step() == 7
    writer.write(7, rows_of(7))
    writer.write(8, rows_of(8))
    assert reader.next_step() == 9
    reader.finish(0, 7)
    assert reader.next_step() == 9
    # A writer killed while it wrote step 9 leaves the slot of step 7 without a step.
    reader.finish(1, 7)
    writer.steps[9 % 2] = -1
    assert reader.next_step() == 9
    reader.finish(0, 8)
    reader.finish(1, 8)
    assert reader.next_step() == 9


@pytest.mark.parametrize("change", ["bit", "step", "place"])
def test_a_row_that_is_not_what_was_written_is_refused(rings, change):
    writer, reader = rings
    writer.write(7, rows_of(7))
    if change == "bit":
        writer._rows[1, 2, 4] ^= 1
    elif change == "step":  # the old rows under a new step
        writer.steps[1] = 9
    else:
        for part in (writer._rows[1], writer._checksums[1]):
            part[[1, 2]] = part[[2, 1]]
    step = 9 if change == "step" else 7
    with pytest.raises(TornRowError, match=f"of step {step} in shared memory"):
        reader.read(step, 0, 3)


def test_a_failure_is_of_a_step_and_those_after_it(rings):
    writer, reader = rings
    assert reader.failure(1000) is None
    writer.fail(8, "OSError: ü " + "x" * 5000)
    assert reader.failure(7) is None
    assert reader.failure(8) == reader.failure(9)
    assert (reader.failure(8) or "").startswith("OSError: ü xxx")


def test_the_memory_has_no_name_and_ends_with_its_last_view():
    ring = Ring(create(LAYOUT, 0), LAYOUT)
    assert ring.wanted.tolist() == [0, 0]
    mapped = [line for line in own_maps() if "mjax-rows" in line]
    assert [line.split(" ", 5)[5].strip() for line in mapped] == [
        "/memfd:mjax-rows (deleted)"
    ]
    del ring
    assert not any("mjax-rows" in line for line in own_maps())


def own_maps():
    return Path("/proc/self/maps").read_text().splitlines()
