"""Which blocks the GPU kernels visit: all that are needed."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.kernels.attention.mosaic_gpu import dkv, op, tiles
from mjax.kernels.attention.reference import visible
from mjax.kernels.attention.tuning import MosaicKernel, MosaicTuning
from tests.kernels.attention import mosaic_poison
from tests.kernels.interpreter.runner import Pool


@pytest.mark.slow
@pytest.mark.parametrize("segments", [False, True])
def test_blocks_that_nobody_sees_are_not_computed(pool: Pool, segments: bool):
    finite = pool.submit(mosaic_poison.FUNCTION, segments=segments).result()
    assert {name for name, is_so in finite.items() if not is_so} == set()


def problem(T, window):
    return tiles.Problem(
        seq_len=T,
        padded_len=-(-T // 384) * 384,
        heads=1,
        kv_heads=1,
        head_dim=64,
        window=window,
        scale=1.0,
        soft_cap=None,
    )


sizes = st.tuples(
    st.integers(1, 700),
    st.one_of(st.none(), st.integers(1, 800)),
    st.sampled_from([64, 128, 192]),
    st.sampled_from([64, 128]),
    st.integers(0, 10),
)


@given(sizes)
def test_the_blocks_of_keys_are_those_with_a_visible_score(size):
    T, window, rows, block, t = size
    first = t * rows % T // 64 * 64
    mask = np.asarray(visible(T, window))[first : first + rows]
    found = tiles.FirstKeys(problem(T, window), None).blocks(first, rows, block)
    check(found, mask, block, complete=first + rows <= T)


@given(sizes)
def test_the_blocks_of_queries_are_those_with_a_visible_score(size):
    T, window, rows, block, t = size
    first = t * rows % T // 64 * 64
    mask = np.asarray(visible(T, window))[:, first : first + rows].T
    found = tiles.LastQueries(problem(T, window), None).blocks(first, rows, block)
    check(found, mask, block, complete=first + rows <= T)


def check(found, mask, block, *, complete):
    """Compare with a mask [rows of the tile, positions of the other sequence]."""
    low, high = int(found.low), int(found.high)
    parts = [
        mask[:, b * block : (b + 1) * block] for b in range(-(-mask.shape[1] // block))
    ]
    needed = [b for b, part in enumerate(parts) if part.any()]
    assert (low, high) == (needed[0], needed[-1] + 1)
    some = found.within(low, high)
    assert low <= some.full_low <= some.full_high <= high
    for b in range(int(some.full_low), int(some.full_high)):
        assert parts[b].all()
    if complete:  # Nothing is masked in vain, but for a block that the end cuts.
        whole = [b for b in needed if parts[b].all() and parts[b].shape[1] == block]
        assert set(whole) <= set(range(int(some.full_low), int(some.full_high)))


runs = st.lists(st.integers(1, 200), min_size=1, max_size=8)
windows = st.one_of(st.none(), st.integers(1, 300))


@pytest.mark.promotion(rank="allow")
@settings(max_examples=40, deadline=None)
@given(runs, windows)
def test_edges_of_documents_are_those_of_the_mask(lengths, window):
    """They rise also where the sequence is lengthened, where the last goes on."""
    ids, p, mask = documents(lengths, window)
    first = np.asarray(op.first_keys(p, jnp.asarray(ids)[None]))[0]
    last = np.asarray(op.last_queries(p, jnp.asarray(ids)[None]))[0]
    np.testing.assert_array_equal(first[: p.seq_len], mask.argmax(1)[: p.seq_len])
    assert (first <= np.arange(p.padded_len)).all()
    for j in range(p.seq_len):
        end = np.flatnonzero(mask[:, j])[-1]
        assert min(last[j], p.padded_len - 1) == end
    assert (np.diff(first) >= 0).all()
    assert (np.diff(last) >= 0).all()


@pytest.mark.promotion(rank="allow")
@settings(max_examples=40, deadline=None)
@given(runs, windows, st.sampled_from([(64, 64), (128, 64), (128, 128), (64, 128)]))
def test_blocks_of_documents_are_those_with_a_visible_score(lengths, window, sizes):
    rows, block = sizes
    ids, p, mask = documents(lengths, window)
    mask = mask[: p.seq_len, : p.seq_len]
    keys = tiles.FirstKeys(p, op.first_keys(p, jnp.asarray(ids)[None])[0])
    queries = tiles.LastQueries(p, op.last_queries(p, jnp.asarray(ids)[None])[0])
    for first in range(0, p.seq_len, rows):
        complete = first + rows <= p.seq_len
        found = keys.blocks(first, rows, block)
        check(found, mask[first : first + rows], block, complete=complete)
        found = queries.blocks(first, rows, block)
        check(found, mask[:, first : first + rows].T, block, complete=complete)


@pytest.mark.promotion(rank="allow")
@settings(max_examples=40, deadline=None)
@given(runs, windows)
def test_tiles_of_dkv_begin_with_those_that_most_queries_see(lengths, window):
    ids, p, mask = documents(lengths, window)
    last = op.last_queries(p, jnp.asarray(ids)[None])
    order = np.asarray(dkv.heaviest_first(p, last, 128))[0]
    num = -(-p.seq_len // 128)
    assert sorted(order) == list(range(num))
    walks = [
        np.flatnonzero(mask[: p.seq_len, t * 128 : (t + 1) * 128].any(1)).size
        for t in order
    ]
    assert walks == sorted(walks, reverse=True)


def documents(lengths, window):
    """Return ids [T], the problem, and the mask [P, P] of the lengthened sequence."""
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    p = problem(len(ids), window)
    padded = np.pad(ids, (0, p.padded_len - len(ids)), mode="edge")
    same = padded[:, None] == padded[None]
    return ids, p, same & np.asarray(visible(p.padded_len, window))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warpgroups": 4}, "warpgroups must be one of 2, 3, got 4"),
        ({"block": 96}, "multiple of 64, got 96"),
        ({"block": 0}, "multiple of 64, got 0"),
        ({"stages": 1}, "at least 2, got 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MosaicKernel(**{"block": 64, **change})


@pytest.mark.parametrize("warpgroups", [2, 3])
@pytest.mark.parametrize("block", [64, 128, 192, 256, 384])
def test_dkv_may_read_no_log_sum_exp_that_forward_does_not_write(warpgroups, block):
    forward, dkv = (
        MosaicKernel(block=64, warpgroups=warpgroups),
        MosaicKernel(block=block),
    )

    def rows(T: int, size: int) -> int:
        return -(-T // size) * size

    dq = MosaicKernel(block=64, stages=3)
    if all(rows(T, block) <= rows(T, forward.tile) for T in range(8, 2000, 8)):
        MosaicTuning(forward=forward, dq=dq, dkv=dkv)
        return
    message = f"must divide the {forward.tile} rows of a forward tile.* got {block}"
    with pytest.raises(ValueError, match=message):
        MosaicTuning(forward=forward, dq=dq, dkv=dkv)


def test_fewer_slots_than_dq_needs_are_refused():
    two, three = (MosaicKernel(block=64, stages=stages) for stages in (2, 3))
    MosaicTuning(forward=two, dq=three, dkv=two)
    message = r"dq.stages must be at least 3, got 2; .* would never end; use 4"
    with pytest.raises(ValueError, match=message):
        MosaicTuning(forward=two, dq=two, dkv=two)


@pytest.mark.parametrize(("block", "warpgroups"), [(128, 2), (64, 3)])
def test_sizes_that_the_fused_kernel_is_not_built_for_are_refused(block, warpgroups):
    sound = MosaicKernel(block=64, stages=3)
    tuning = MosaicTuning(forward=sound, dq=sound, dkv=sound, fused=sound)
    fused = MosaicKernel(block=block, warpgroups=warpgroups)
    with pytest.raises(ValueError, match=f"2 warpgroups, got {block} and {warpgroups}"):
        dataclasses.replace(tuning, fused=fused)
