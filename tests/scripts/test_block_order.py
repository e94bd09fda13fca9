"""List scheduling of thread blocks, and what must hold of every order."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.kernels.attention.mosaic_gpu import tiles
from scripts.kernels import block_grid, persistent, schedule
from scripts.kernels.attention_shapes import KERNELS, SHAPES, Shape, traced_grid
from scripts.kernels.block_grid import Block
from scripts.kernels.sm_model import NUM_SMS

SMALL = Shape(name="small", batch=2, seq_len=1024, heads=4, kv_heads=2)


def block(head: int, tile: int, work_us: float) -> Block:
    reads = ((0, head, tile),)
    return Block(batch=0, head=head, tile=tile, work_us=work_us, reads=reads)


def test_blocks_start_on_the_first_free_sm():
    # SM 0: 3, then 2. SM 1: 1, 4, 1.
    assert block_grid.makespan([3, 1, 4, 2, 1], sms=2) == 6
    assert block_grid.makespan([4, 3, 2, 1, 1], sms=2) == 6
    assert block_grid.makespan([1, 1, 2, 3, 4], sms=2) == 7


def test_every_block_costs_the_fixed_time():
    assert block_grid.makespan([3, 1, 4], fixed_us=0.5, sms=2) == 6
    assert block_grid.makespan([3, 1], fixed_us=0.5, sms=2) == 3.5


@pytest.mark.parametrize("seed", range(20))
def test_longest_first_is_as_good_as_graham_proved(seed):
    # Graham 1969, bounds on multiprocessing timing anomalies: 4/3 - 1/(3 m).
    random = np.random.default_rng(seed)
    m = int(random.integers(2, 4))
    work = sorted(random.integers(1, 20, size=7), reverse=True)
    best = min(
        max(sum(w for w, s in zip(work, sms, strict=True) if s == one) for one in sms)
        for sms in itertools.product(range(m), repeat=len(work))
    )
    end = block_grid.makespan(work, sms=m)
    assert best <= end <= (4 / 3 - 1 / (3 * m)) * best + 1e-9


def test_only_what_is_not_cached_is_read():
    order = [block(0, 0, 1), block(1, 0, 1), block(0, 0, 1), block(1, 0, 1)]
    assert block_grid.read_bytes(order, 10.0, cache_bytes=20) == 20
    assert block_grid.read_bytes(order, 10.0, cache_bytes=10) == 40


def test_the_cache_drops_what_was_not_read_for_the_longest_time():
    order = [block(head, 0, 1) for head in (0, 1, 0, 2, 0)]
    assert block_grid.read_bytes(order, 10.0, cache_bytes=20) == 30


def test_a_plan_that_holds_is_as_good_as_starting_when_free():
    work = [5, 3, 3, 2, 2, 1]
    end = block_grid.makespan(work, fixed_us=0.5, sms=2)
    assert persistent.planned(work, work, fixed_us=0.5, slowness=[1, 1]) == end
    same = persistent.started_when_free(work, fixed_us=0.5, slowness=[1, 1])
    assert same == end


def test_a_plan_suffers_more_from_a_slow_sm():
    work = [1.0] * 40
    assert persistent.planned(work, work, slowness=[1, 2]) == 40
    # 26 or 27 of them go to the fast one.
    assert persistent.started_when_free(work, fixed_us=0, slowness=[1, 2]) <= 28


@given(
    st.lists(st.floats(0.1, 50), min_size=1, max_size=600), st.floats(0, 2, width=16)
)
def test_guided_thread_blocks_take_at_most_what_is_left_for_an_sm(work, fixed):
    counts = persistent.guided(work, fixed_us=fixed)
    assert sum(counts) == len(work)
    at, left = 0, math.fsum(work) + fixed * len(work)
    for count in counts:
        taken = math.fsum(work[at : at + count]) + count * fixed
        assert count == 1 or taken <= left / NUM_SMS * (1 + 1e-9)
        at, left = at + count, left - taken


def test_guided_thread_blocks_end_with_single_tiles():
    counts = persistent.guided([1.0] * 132 * 8)
    assert counts[0] == 8
    assert counts[-132:] == [1] * 132
    assert counts == sorted(counts, reverse=True)


def test_persistent_grids_begin_with_the_shipped_one():
    for shape, kernel in ((SHAPES[2], "dkv"), (SHAPES[9], "forward"), (SMALL, "dq")):
        found = persistent.efficiencies(shape, kernel, 1.0)
        assert len(found) == len(persistent.WAYS)
        want = schedule.outcomes(shape, kernel, step=1.0)["shipped"]
        if not want.bound_by_memory:
            assert found[0] == pytest.approx(want.efficiency)
        by = dict(zip(persistent.WAYS, found, strict=True))
        # Without documents the plan is what the counter does.
        if shape.mean_document is None:
            assert by["planned"] == pytest.approx(by["counter"])
        assert by["planned, uneven"] <= by["planned"]


def test_blocks_side_by_side_read_the_same_chunks_once():
    reads = tuple((0, 0, c) for c in range(10))
    walk = dataclasses.replace(block(0, 0, 1.0), reads=reads)
    last = dataclasses.replace(walk, reads=reads[5:])
    both = [walk, walk, last]
    apart = block_grid.read_bytes(both, 1.0, cache_bytes=4)
    assert apart == 10 + 10 + 5
    beside = block_grid.read_bytes(both, 1.0, cache_bytes=4, at_once=2)
    assert beside == 10 + 5
    # The third is five chunks ahead of the others.
    assert block_grid.read_bytes(both, 1.0, cache_bytes=4, at_once=3) == 10 + 5


def test_longest_first_begins_with_the_longest():
    order = schedule.longest_first([block(0, t, us) for t, us in enumerate((2, 5, 3))])
    assert [x.work_us for x in order] == [5, 3, 2]


def test_tiles_first_takes_the_heaviest_tiles_of_all_heads():
    order = schedule.tiles_first([block(h, t, 4 - t) for h in (0, 1) for t in range(3)])
    assert [(x.tile, x.head) for x in order] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]


def order(heads: int, num_tiles: int, head_bytes: float, batch: int = 1):
    """Return the order of heads that each walk so many bytes."""
    walked = int(head_bytes // (2 * 2 * 128))
    p = tiles.Problem(
        seq_len=128 * num_tiles,
        padded_len=walked,
        heads=heads,
        kv_heads=heads,
        head_dim=128,
        window=None,
        scale=1.0,
        soft_cap=None,
    )
    p = dataclasses.replace(p, seq_len=walked)
    tile = -(-walked // num_tiles)
    return tiles.Order.of(p, batch=batch, heads=heads, other_heads=heads, tile=tile)


MIB = 2**20


@pytest.mark.parametrize(
    ("heads", "num_tiles", "head_mib", "sections"),
    [
        (40, 40, 0.5, 1),  # 20 MiB fit into half of the L2
        (40, 40, 2.5, 4),  # of 100 MiB a fourth
        (40, 40, 2.6, 5),
        (8, 64, 25.0, 2),  # each with 256 blocks: no more
        (7, 100, 25.0, 1),  # 7 heads are not divided, and 100 blocks are too few
    ],
)
def test_sections_are_equal_and_fit_into_the_cache(
    heads, num_tiles, head_mib, sections
):
    found = order(heads, num_tiles, head_mib * MIB)
    assert found.sections == sections
    assert found.heads_of_section * sections == heads


def test_documents_leave_fewer_sections_to_dkv():
    """A section ends with idle multiprocessors, the more so with uneven walks."""
    plain, packed = (
        s
        for s in SHAPES
        if s.name.startswith("llama3-8b, T 8192")
        and s.kv_heads == 8
        and s.window is None
    )
    assert schedule.order_of(plain, "dkv", 1).sections == 2
    assert schedule.order_of(packed, "dkv", 1).sections == 1
    found = schedule.outcomes(packed, "dkv")
    assert found["shipped"].efficiency > 0.8
    assert not found["shipped"].bound_by_memory


def test_sections_hold_whole_heads_and_follow_each_other():
    blocks = [block(h, t, 40 - t) for h in range(40) for t in range(40)]
    ordered = schedule.shipped(blocks, order(40, 40, 2.5 * MIB))
    assert sorted(map(id, ordered)) == sorted(map(id, blocks))
    first = ordered[:400]
    assert {x.head for x in first} == set(range(10))
    assert [x.tile for x in first] == sorted(x.tile for x in first)


def test_every_row_and_head_has_its_place_once():
    found = order(6, 40, 2.5 * MIB, batch=4)
    assert found.sections > 1
    places = [
        tuple(int(x) for x in found.place(section, head))
        for section in range(found.sections)
        for head in range(found.heads_of_section)
    ]
    assert places == [(b, n) for b in range(4) for n in range(6)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_order_does_more_than_all_sms_could(kernel):
    for shape in (SMALL, SHAPES[2], SHAPES[4]):
        found = schedule.outcomes(shape, kernel)
        for outcome in found.values():
            assert 0 < outcome.efficiency <= 1
        # Without a split no order beats the longest block.
        bound = min(1.0, schedule.slack(shape, kernel))
        for name in ("by head", "tiles first", "unsplit", "longest first"):
            assert found[name].efficiency <= bound + 1e-9


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_work_is_that_of_the_visible_blocks(kernel):
    # A tile of 128 rows and the triangle: 8 tiles of 1024 positions, half a block each.
    steps, _, _ = schedule.visits(SMALL, kernel)
    sizes = getattr(schedule.MOSAIC_H200[SMALL.head_dim], kernel)
    positions = steps.sum(axis=1) * sizes.block * sizes.tile
    visible = 1024 * 1025 / 2
    assert np.all(positions >= visible)
    assert np.all(positions <= 1.15 * visible)


def test_a_masked_block_may_cost_more():
    plain, _, _ = schedule.visits(SMALL, "dq")
    masked, _, _ = schedule.visits(SMALL, "dq", 2.0)
    # Each warpgroup of 64 rows has one block on the diagonal.
    assert np.allclose(masked - plain, 1.0)


def test_documents_leave_less_to_visit():
    whole, _, _ = schedule.visits(SMALL, "forward")
    packed = Shape(
        name="", batch=2, seq_len=1024, heads=4, kv_heads=2, mean_document=128
    )
    steps, _, _ = schedule.visits(packed, "forward")
    assert steps.sum() < 0.7 * whole.sum()
    ids, again = packed.segment_ids(1), packed.segment_ids(1)
    assert ids is not None
    assert again is not None
    assert np.array_equal(ids, again)


def test_the_pieces_of_a_cut_tile_are_its_work():
    blocks = schedule.blocks_of(SMALL, "dkv", 1.0)
    total = math.fsum(x.work_us for x in blocks)
    for pieces, extra_us in (
        schedule.cut(blocks, SMALL, "dkv"),
        schedule.split(blocks, SMALL, 2),
    ):
        assert math.fsum(x.work_us for x in pieces) == pytest.approx(total)
        assert extra_us > schedule.LAUNCH_US


def test_a_few_long_walks_are_better_split():
    found = schedule.outcomes(SHAPES[2], "dkv")
    assert SHAPES[2].name == "llama3-8b, T 8192, tp 8"
    # 64 blocks, the heaviest with 4 times the mean load of an SM.
    assert found["unsplit"].efficiency < 0.25
    assert found["cut"].efficiency > 0.6
    assert found["shipped"].efficiency > 0.8


def test_dkv_is_split_only_where_its_blocks_are_few():
    parts = {s.name: schedule.parts_of(s, "dkv") for s in SHAPES}
    assert parts["llama3-8b, T 8192"] == 1
    assert parts["llama3-8b, T 8192, tp 8"] == 4
    # One query head a key head: there is nothing to split.
    assert parts["175b, T 2048, tp 8"] == 1
    assert {schedule.parts_of(s, "dq") for s in SHAPES} == {1}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_no_other_number_of_parts_is_much_faster(shape):
    """The rule of `tuning.GroupSplit`, without documents within a hundredth."""
    sizes = schedule.MOSAIC_H200[shape.head_dim].dkv
    blocks = schedule.blocks_of(
        shape, "dkv", schedule.step_us("dkv", shape.head_dim, sizes)
    )
    ends = {}
    for parts in (n for n in range(1, shape.group + 1) if shape.group % n == 0):
        pieces, sum_us = schedule.split(blocks, shape, parts)
        ordered = schedule.shipped(pieces, schedule.order_of(shape, "dkv", parts))
        work_us = [block.work_us for block in ordered]
        end_us = block_grid.makespan(work_us, fixed_us=schedule.FIXED_US)
        ends[parts] = end_us + sum_us
    most = 1.01 if shape.mean_document is None else 1.08
    assert ends[schedule.parts_of(shape, "dkv")] <= most * min(ends.values())


def test_warpgroups_of_the_fused_kernel_pass_no_block_by():
    for shape in (SMALL, dataclasses.replace(SMALL, window=100)):
        one, _, _ = schedule.visits(shape, "dkv")
        both, low, high = schedule.visits(shape, "fused")
        assert np.all(both == high - low)
        assert np.all(both > one)
    # Each tile has the diagonal, which is masked in two of its blocks.
    masked, _, _ = schedule.visits(SMALL, "fused", masked_cost=2.0)
    whole, _, _ = schedule.visits(SMALL, "fused")
    assert np.all(masked - whole == 2)


def test_the_simulation_has_the_grids_of_the_kernels():
    sections = Shape(name="", seq_len=16384, heads=36, kv_heads=36)
    split = Shape(name="", seq_len=8192, heads=8, kv_heads=1)
    packed = dataclasses.replace(split, heads=16, kv_heads=4, mean_document=1024)
    for kernel in (*KERNELS, "fused"):
        for shape in (sections, split, packed):
            parts = schedule.parts_of(shape, kernel)
            found = schedule.order_of(shape, kernel, parts)
            assert (found.sections > 1) == (shape is sections)
            assert (parts > 1) == (shape is not sections and kernel == "dkv")
            grid = traced_grid(kernel, shape)
            assert list(grid.items()) == list(
                zip(tiles.GRID_NAMES, found.grid, strict=True)
            )


def test_there_are_twelve_shapes():
    assert len({shape.name for shape in SHAPES}) == 12
