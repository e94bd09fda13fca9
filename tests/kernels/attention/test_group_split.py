"""When and how dkv divides the query heads of a key head among thread blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.estimate.liveness import peak_bytes
from mjax.kernels.attention.mosaic_gpu import dkv, tiles
from mjax.kernels.attention.tuning import DKV_SPLIT, MOSAIC_H200, GroupSplit


def problem(seq_len: int, heads: int, kv_heads: int, window: int | None = None):
    return tiles.Problem(
        seq_len=seq_len,
        padded_len=-(-seq_len // 384) * 384,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        window=window,
        scale=1.0,
        soft_cap=None,
    )


def shipped(*sizes: int, batch: int = 1, documents: bool = False, **options) -> int:
    p = problem(*sizes, **options)
    return dkv.shipped_parts(p, batch=batch, tile=128, has_documents=documents)


def test_one_key_head_on_a_gpu_is_split_and_eight_are_not():
    assert shipped(8192, 4, 1) == 4
    assert shipped(8192, 8, 1) == 4
    assert shipped(8192, 32, 8) == 1
    assert shipped(8192, 8, 1, batch=2) == 2
    assert shipped(32768, 8, 1) == 1
    # Nothing to split, however few.
    assert shipped(128, 1, 1) == 1


def test_equal_walks_need_fewer_thread_blocks():
    """Without a window the longest walk is twice the mean."""
    assert shipped(8192, 8, 1, window=1024) == 2
    assert shipped(8192, 8, 1) == 4


def test_documents_need_more_thread_blocks():
    assert shipped(8192, 8, 1, documents=True) == 8
    assert shipped(8192, 16, 4) == 1
    assert shipped(8192, 16, 4, documents=True) == 2
    assert shipped(8192, 32, 8, documents=True) == 1


@given(st.integers(1, 1000), st.integers(1, 100_000), st.integers(1, 96), st.booleans())
def test_parts_are_the_fewest_equal_ones_with_the_load(longest, rest, group, documents):
    total = longest + rest
    parts = DKV_SPLIT.parts(
        longest=longest, total=total, group=group, documents=documents
    )
    assert group % parts == 0
    least = 1.8 if documents else 0.9
    enough = [
        n
        for n in range(1, group + 1)
        if group % n == 0 and total / 132 >= least * longest / n
    ]
    assert parts == min(enough, default=group)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multiprocessors": 0}, "multiprocessors must be at least 1, got 0"),
        ({"least_load": 0.0}, "least_load must be above 0"),
        ({"least_load": 2.0}, "at most least_load_documents, got 2.0 and 1.8"),
    ],
)
def test_rules_that_cannot_be_are_refused(change, message):
    fields = {"multiprocessors": 132, "least_load": 0.9, "least_load_documents": 1.8}
    with pytest.raises(ValueError, match=message):
        GroupSplit(**{**fields, **change})


def test_parts_are_added_in_their_order():
    """Float32 sums depend on the order; here every order of the four differs."""
    rng = np.random.default_rng(0)
    shape = (4, 2, 8, 1, 16)
    parts = rng.standard_normal(shape).astype(np.float32) * np.float32(2) ** (
        rng.integers(0, 24, shape)
    ).astype(np.float32)
    want = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    other = ((parts[3] + parts[2]) + parts[1]) + parts[0]
    assert (want != other).any()
    got = jax.jit(dkv._added)(jnp.asarray(parts))
    np.testing.assert_array_equal(np.asarray(got), want)


def traced(parts: int):
    T, N, K, H = 1024, 4, 1, 128
    p = problem(T, N, K)
    q = jax.ShapeDtypeStruct((1, T, N, H), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, T, K, H), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((1, N, p.padded_len), jnp.float32)
    call = functools.partial(
        dkv.key_value_gradients,
        problem=p,
        tuning=MOSAIC_H200[H].dkv,
        parts=parts,
    )
    return jax.make_jaxpr(call)(q, k, k, q, row, row, None)


def test_the_estimate_of_memory_counts_the_parts():
    """Float32 dk and dv of every part, beside the first 16-bit result."""
    part_bytes = 2 * 1024 * 128 * 4
    whole, two, four = (peak_bytes(traced(n)) for n in (1, 2, 4))
    assert whole == part_bytes / 2
    assert two >= 2 * part_bytes
    assert four - two == 2 * part_bytes


def test_parts_that_do_not_divide_the_group_are_a_bug():
    with pytest.raises(AssertionError):
        traced(3)


def test_parts_are_float32(monkeypatch):
    """No value shows it: rounding parts costs less than rounding probabilities."""
    dtypes = []
    added = dkv._added
    monkeypatch.setattr(
        dkv, "_added", lambda parts: dtypes.append(parts.dtype) or added(parts)
    )
    traced(2)
    assert dtypes == [jnp.float32, jnp.float32]
