"""Cost of blocked attention, read from the compiled program."""

import pytest

from mjax.kernels.attention import blocked, tuning
from scripts.kernels.attention_cost import (
    DOTS_BOTH,
    DOTS_FORWARD,
    Cost,
    attention_cost,
    find_faults,
    num_visible,
)

WINDOW = 256


@pytest.mark.parametrize("backward", [False, True])
def test_flops_and_memory_are_linear_in_the_length(backward):
    costs = [attention_cost(s, WINDOW, backward=backward) for s in (1024, 2048, 4096)]
    flops = [cost.flops for cost in costs]
    # The first window is cheaper, so the count is affine: increments double exactly.
    assert flops[2] - flops[1] == 2 * (flops[1] - flops[0])
    assert flops[2] <= 2.1 * flops[1]
    # Whole tiles at the two edges of the window: half a block more at each.
    block = tuning.BLOCKED_CPU.block
    for cost in costs:
        assert 1 < cost.flops / cost.visible_flops <= 1 + block / WINDOW
    # What does not grow is a few tiles, so doubling s at most doubles the memory.
    assert costs[1].temp_bytes <= 2.0 * costs[0].temp_bytes
    assert costs[2].temp_bytes <= 2.0 * costs[1].temp_bytes


@pytest.mark.parametrize("backward", [False, True])
def test_memory_does_not_depend_on_the_window(backward):
    narrow = attention_cost(2048, 64, backward=backward)
    full = attention_cost(2048, None, backward=backward)
    assert full.flops > 8 * narrow.flops
    # The list of pairs is a constant of the program, not a temporary.
    assert full.temp_bytes <= 1.02 * narrow.temp_bytes


def test_reference_is_quadratic_so_the_measure_can_tell():
    small, large = (
        attention_cost(s, WINDOW, backward=False, backend="reference")
        for s in (512, 1024)
    )
    assert large.flops == 4 * small.flops
    assert large.temp_bytes > 3.5 * small.temp_bytes


@pytest.mark.parametrize("window", [None, 100])
def test_flops_are_the_listed_pairs_times_the_dots_of_a_tile(window):
    s, head_dim, heads, block = 300, 32, 3, tuning.BLOCKED_CPU.block
    tiles = len(blocked.visible_tiles(s, block, window))
    for backward, dots in ((False, DOTS_FORWARD), (True, DOTS_BOTH)):
        cost = attention_cost(
            s, window, backward=backward, heads=heads, head_dim=head_dim
        )
        assert cost.flops == tiles * dots * heads * 2 * block**2 * head_dim


def test_visible_tiles_are_counted_one_by_one():
    for s, window in ((10, None), (10, 3), (10, 10), (10, 1), (4, 9)):
        by_hand = sum(min(i + 1, window or s) for i in range(s))
        assert num_visible(s, window) == by_hand


def test_a_cost_that_grows_faster_than_the_length_is_a_fault():
    def costs(flops, temp_bytes):
        return {
            (s, backward): Cost(flops=f, visible_flops=1, temp_bytes=m)
            for backward in (False, True)
            for s, f, m in zip((1, 2, 4), flops, temp_bytes, strict=True)
        }

    assert find_faults(costs((10, 22, 46), (8, 15, 28))) == []
    assert find_faults(costs((10, 40, 160), (8, 16, 40))) == [
        "fwd, 4 positions: the increment of FLOPs is 4.000 times",
        "fwd, 4 positions: memory is 2.500 times",
        "fwd+bwd, 4 positions: the increment of FLOPs is 4.000 times",
        "fwd+bwd, 4 positions: memory is 2.500 times",
    ]
