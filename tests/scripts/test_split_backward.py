"""What is counted of a split backward slot, against formulas."""

import numpy as np
import pytest

from mjax.pipeline.schedule import IDLE, Schedule, build
from scripts.kernels.split_backward import (
    WAYS,
    best_lag,
    main,
    most_waiting,
    split_bubble,
    used_ticks,
    weight_slots,
)

by_size = pytest.mark.parametrize(
    "sizes", [(4, 1, 8), (4, 2, 8), (3, 3, 3), (8, 2, 32)]
)


def table(sizes: tuple[int, int, int]) -> Schedule:
    num_stages, num_chunks, num_microbatches = sizes
    return build(
        "interleaved-1f1b",
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
    )


@by_size
@pytest.mark.parametrize("lag", [0, 1, 7, 50])
def test_each_weight_slot_follows_a_backward_slot_of_its_own(sizes, lag):
    schedule = table(sizes)
    weight = np.cumsum(weight_slots(schedule, lag), axis=0)
    backward = np.cumsum(schedule.backward_chunk != IDLE, axis=0)
    work = schedule.num_chunks * schedule.num_microbatches
    assert (weight[-1] == work).all()
    assert (weight[: len(backward)] <= backward).all()


@by_size
def test_with_the_best_lag_all_stages_have_their_weight_slots_in_the_same_ticks(sizes):
    """Fewer ticks are not possible: a stage alone needs as many."""
    schedule = table(sizes)
    lag = best_lag(schedule)
    slots = weight_slots(schedule, lag)
    assert lag == schedule.num_stages - 1
    assert used_ticks(slots) == schedule.num_chunks * schedule.num_microbatches
    waiting = most_waiting(schedule.backward_chunk != IDLE, slots)
    assert waiting.tolist() == list(range(1, schedule.num_stages + 1))


@by_size
def test_what_waits_for_its_weight_slot_takes_no_larger_stash(sizes):
    """The stage that waits longest for W is the one that waited least for B."""
    schedule = table(sizes)
    forward, backward = schedule.forward_chunk != IDLE, schedule.backward_chunk != IDLE
    until_backward = most_waiting(forward, backward)
    assert tuple(until_backward.tolist()) == schedule.in_flight
    weight = weight_slots(schedule, best_lag(schedule))
    assert most_waiting(forward, weight).max() == until_backward.max()


@by_size
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_bubble_that_is_counted_is_that_of_the_formula(sizes, way):
    schedule = table(sizes)
    work = schedule.num_chunks * schedule.num_microbatches
    fill = schedule.num_stages - 1
    time = (1 + way.backward_time) * (work + fill) + way.weight_time * work
    found = split_bubble(schedule, best_lag(schedule), way)
    # Divisions and subtractions in float64, of numbers near 1.
    assert found == pytest.approx(time / (work * (1 + way.joined_time)) - 1, abs=1e-14)


def test_the_numbers_of_the_documentation_are_printed(capsys):
    main(["--pp", "8", "--chunks", "2", "--microbatches", "32", "--layers", "4"])
    out = capsys.readouterr().out
    assert "ticks with F, B, W        71 71 64\n" in out
    rows = [line.split()[-7:] for line in out.splitlines() if "%" in line]
    assert rows == [
        ["1", "1", "1", "0.1094", "0.0729", "-33%", "288"],
        ["1", "1", "2", "0.1094", "0.4062", "+271%", "8"],
        ["1", "2", "1", "0.1094", "0.0820", "-25%", "512"],
        ["1", "2", "2", "0.1094", "0.3320", "+204%", "288"],
        ["1", "2", "3", "0.1094", "0.5820", "+432%", "8"],
    ]
    assert "4 chunks: bubble 0.0547, in flight 39 chunk inputs, before 23" in out
