"""Which blocks the GPU kernels visit: all that are needed."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.kernels.attention.mosaic_gpu import op, tiles
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
    found = tiles.key_blocks(problem(T, window), first, rows, block)
    check(found, mask, block, complete=first + rows <= T)


@given(sizes)
def test_the_blocks_of_queries_are_those_with_a_visible_score(size):
    T, window, rows, block, t = size
    first = t * rows % T // 64 * 64
    mask = np.asarray(visible(T, window))[:, first : first + rows].T
    found = tiles.query_blocks(problem(T, window), first, rows, block)
    check(found, mask, block, complete=first + rows <= T)


def check(found, mask, block, *, complete):
    """Compare with a mask [rows of the tile, positions of the other sequence]."""
    low, high = int(found.low), int(found.high)
    parts = [
        mask[:, b * block : (b + 1) * block] for b in range(-(-mask.shape[1] // block))
    ]
    needed = [b for b, part in enumerate(parts) if part.any()]
    assert (low, high) == (needed[0], needed[-1] + 1)
    some = found.within(low, high, (low, high))
    assert low <= some.full_low <= some.full_high <= high
    for b in range(int(some.full_low), int(some.full_high)):
        assert parts[b].all()
    if complete:  # Nothing is masked in vain, but for a block that the end cuts.
        whole = [b for b in needed if parts[b].all() and parts[b].shape[1] == block]
        assert set(whole) <= set(range(int(some.full_low), int(some.full_high)))


@pytest.mark.slow
@pytest.mark.promotion(rank="allow")
@settings(max_examples=10)
@given(st.data())
def test_segments_bound_the_blocks_for_any_ids(data):
    tile, block = data.draw(st.sampled_from([(128, 64), (128, 128), (64, 128)]))
    runs = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=8))
    names = data.draw(st.permutations(range(len(runs))))
    if data.draw(st.booleans()):
        names = sorted(names)
    ids = np.repeat(names, runs)
    P = -(-len(ids) // 128) * 128
    ids = np.pad(ids, (0, P - len(ids)), mode="edge").astype(np.int32)
    same = ids[:, None] == ids[None]
    causal = np.tril(np.ones((P, P), bool))

    keys = np.asarray(op.key_bounds(jnp.asarray(ids)[None], tile, block))[0]
    queries = np.asarray(op.query_bounds(jnp.asarray(ids)[None], tile, block))[0]
    for t in range(P // tile):
        own = slice(t * tile, (t + 1) * tile)
        seen = (same & causal)[own].any(0).reshape(-1, block).any(1)
        assert keys[0, t] <= np.flatnonzero(seen)[0]
        last = -(-(t + 1) * tile // block)
        for b in range(keys[1, t], last):
            assert same[own, b * block : (b + 1) * block].all()
        seeing = (same & causal)[:, own].any(1).reshape(-1, block).any(1)
        assert queries[0, t] >= np.flatnonzero(seeing)[-1] + 1
        for b in range(t * tile // block, min(queries[1, t], P // block)):
            assert same[b * block : (b + 1) * block, own].all()
        if names == sorted(names):
            assert keys[0, t] == np.flatnonzero(seen)[0]
            assert queries[0, t] == np.flatnonzero(seeing)[-1] + 1


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

    if all(rows(T, block) <= rows(T, forward.tile) for T in range(8, 2000, 8)):
        MosaicTuning(forward=forward, dq=forward, dkv=dkv)
        return
    message = f"must divide the {forward.tile} rows of a forward tile.* got {block}"
    with pytest.raises(ValueError, match=message):
        MosaicTuning(forward=forward, dq=forward, dkv=dkv)
