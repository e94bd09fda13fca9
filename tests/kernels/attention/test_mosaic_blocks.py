"""Which blocks the GPU kernels visit: all that are needed."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.kernels.attention.mosaic_gpu import dkv, masks, op, tiles
from mjax.kernels.attention.reference import visible
from mjax.kernels.attention.tuning import MosaicKernel, MosaicTuning
from tests.kernels.attention import mosaic_poison
from tests.kernels.interpreter.runner import Pool


@pytest.mark.slow
@pytest.mark.parametrize("segments", [False, True])
def test_blocks_that_nobody_sees_are_not_computed(pool: Pool, segments: bool):
    finite = pool.submit(mosaic_poison.FUNCTION, segments=segments).result()
    assert {name for name, is_so in finite.items() if not is_so} == set()


def problem(T, window, causal=True):
    return tiles.Problem(
        seq_len=T,
        padded_len=-(-T // 384) * 384,
        heads=1,
        kv_heads=1,
        head_dim=64,
        window=window,
        scale=1.0,
        soft_cap=None,
        causal=causal,
    )


# Where edges of windows and of blocks meet, a mistake of one shows.
near_blocks = st.builds(
    lambda block, off: 64 * block + off, st.integers(1, 6), st.integers(-2, 2)
)
windows = st.one_of(st.none(), st.integers(1, 800), near_blocks)
sizes = st.tuples(
    st.one_of(st.integers(1, 700), near_blocks),
    windows,
    st.sampled_from([64, 128, 192]),
    st.sampled_from([32, 64, 128]),
    st.integers(0, 10),
    st.booleans(),
)


@given(sizes)
def test_the_blocks_of_keys_are_those_with_a_visible_score(size):
    T, window, rows, block, t, causal = size
    first = t * rows % T // 64 * 64
    mask = np.asarray(visible(T, window, causal=causal))[first : first + rows]
    p = problem(T, window, causal)
    found = masks.FirstKeys(p, None).blocks(first, rows, block)
    check(found, mask, block, complete=first + rows <= T)


@given(sizes)
def test_the_blocks_of_queries_are_those_with_a_visible_score(size):
    T, window, rows, block, t, causal = size
    first = t * rows % T // 64 * 64
    mask = np.asarray(visible(T, window, causal=causal))[:, first : first + rows].T
    p = problem(T, window, causal)
    found = masks.LastQueries(p, None).blocks(first, rows, block)
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


prefixes = st.one_of(st.none(), st.integers(0, 900))
"""None is without causality."""


@pytest.mark.promotion(rank="allow")
@settings(max_examples=40, deadline=None)
@given(runs, windows, st.booleans(), prefixes)
def test_edges_of_documents_are_those_of_the_mask(lengths, window, split, prefix):
    """They rise also where the sequence is lengthened, where the last goes on."""
    ids, p, mask = documents(lengths, window, split, prefix)
    edges = keys_of(p, ids, prefix), queries_of(p, ids, prefix)
    (first, last), (last_query, first_query) = np.asarray(edges)
    seen, T = mask[: p.seq_len, : p.seq_len], p.seq_len
    np.testing.assert_array_equal(first[:T], seen.argmax(1))
    np.testing.assert_array_equal(last[:T], T - 1 - seen[:, ::-1].argmax(1))
    np.testing.assert_array_equal(first_query[:T], seen.argmax(0))
    end = T - 1 - seen[::-1].argmax(0)
    np.testing.assert_array_equal(np.minimum(last_query[:T], T - 1), end)
    assert (first <= np.arange(p.padded_len)).all()
    assert (last >= np.arange(p.padded_len)).all()
    for edge in (first, last, first_query, last_query):
        assert (np.diff(edge) >= 0).all()


@pytest.mark.promotion(rank="allow")
@settings(max_examples=40, deadline=None)
@given(
    runs,
    windows,
    st.booleans(),
    prefixes,
    st.sampled_from([(64, 64), (128, 64), (128, 128), (64, 128), (64, 32)]),
)
def test_blocks_of_documents_are_those_with_a_visible_score(
    lengths, window, split, prefix, sizes
):
    rows, block = sizes
    ids, p, mask = documents(lengths, window, split, prefix)
    mask = mask[: p.seq_len, : p.seq_len]
    keys = masks.FirstKeys(p, *keys_of(p, ids, prefix))
    queries = masks.LastQueries(p, *queries_of(p, ids, prefix))
    for first in range(0, p.seq_len, rows):
        complete = first + rows <= p.seq_len
        found = keys.blocks(first, rows, block)
        check(found, mask[first : first + rows], block, complete=complete)
        found = queries.blocks(first, rows, block)
        check(found, mask[:, first : first + rows].T, block, complete=complete)


@pytest.mark.promotion(rank="allow")
@settings(max_examples=40, deadline=None)
@given(runs, windows, prefixes)
def test_tiles_of_dkv_begin_with_those_that_most_queries_see(lengths, window, prefix):
    ids, p, mask = documents(lengths, window, True, prefix)
    last, first = (edge[None] for edge in queries_of(p, ids, prefix))
    first = None if prefix == 0 else first
    order = np.asarray(dkv.heaviest_first(p, last, first, 128))[0]
    num = -(-p.seq_len // 128)
    assert sorted(order) == list(range(num))
    walks = [
        np.flatnonzero(mask[: p.seq_len, t * 128 : (t + 1) * 128].any(1)).size
        for t in order
    ]
    assert walks == sorted(walks, reverse=True)


def documents(lengths, window, split, prefix):
    """Return ids [1, T], the problem, and the mask [P, P] of the lengthened sequence.

    Args:
      lengths: of the documents.
      window: as in `reference.visible`.
      split: keep the documents apart; otherwise they are one.
      prefix: its length; None is without causality.
    """
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32) * split, lengths)
    causal = prefix is not None
    p = problem(len(ids), window, causal)
    padded = np.pad(ids, (0, p.padded_len - len(ids)), mode="edge")
    mask = np.asarray(visible(p.padded_len, window, causal=causal))
    if causal:
        in_prefix = np.arange(p.padded_len) < prefix
        both = np.asarray(visible(p.padded_len, window, causal=False))
        mask = mask | (both & in_prefix)
    return jnp.asarray(ids)[None], p, (padded[:, None] == padded[None]) & mask


def keys_of(p, ids, prefix):
    """Return first and last keys [P], by the functions that make the arrays."""
    prefix = None if prefix is None else jnp.asarray([prefix], jnp.int32)
    return op.first_keys(p, ids)[0], op.last_keys(p, ids, prefix)[0]


def queries_of(p, ids, prefix):
    """Return last and first queries [P]."""
    prefix = None if prefix is None else jnp.asarray([prefix], jnp.int32)
    return op.last_queries(p, ids)[0], op.first_queries(p, ids, prefix)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warpgroups": 4}, "warpgroups must be one of 2, 3, got 4"),
        ({"block": 96}, "32 or a multiple of 64, got 96"),
        ({"block": 0}, "32 or a multiple of 64, got 0"),
        ({"warpgroups": 3, "splits_width": True}, "for 2 warpgroups, got 3"),
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
    with pytest.raises(ValueError, match=f"warpgroups 2, got {block} and {warpgroups}"):
        dataclasses.replace(tuning, fused=fused)
