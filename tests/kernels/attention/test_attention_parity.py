"""Reference = an independent implementation; blocked = reference; both directions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.kernels.attention import api, blocked, reference
from mjax.kernels.attention.tuning import BlockedTuning

# Sums of at most 150 products of numbers of order 1, in another order: a few float32
# roundings (6e-8) of partial sums of order 10. Relative to the largest entry.
F32_TOLERANCE = 1e-5
# bfloat16 keeps 8 bits: inputs are the same, but probabilities, score gradients, the
# saved output and the results are rounded (2^-9 each) before they are summed.
BF16_TOLERANCE = 2e-2
BLOCK = 16
LENGTH = 45


def make_inputs(B=2, T=LENGTH, N=4, K=2, H=8, Hv=None, S=None, dtype=jnp.float32):
    """Return random q, k, v and a cotangent of the output."""
    q, k, v, d_out = jax.random.split(jax.random.key(T * N + K), 4)
    return (
        jax.random.normal(q, (B, T, N, H), dtype),
        jax.random.normal(k, (B, S or T, K, H), dtype),
        jax.random.normal(v, (B, S or T, K, Hv or H), dtype),
        jax.random.normal(d_out, (B, T, N, Hv or H), dtype),
    )


def make_segments(B, T):
    """Return rising segment ids; the first row is one document."""
    ids = np.sort(np.random.default_rng(T).integers(0, 4, (B, T)), axis=1)
    ids[0] = 7
    return jnp.asarray(ids, jnp.int32)


def run(attend, q, k, v, d_out):
    """Return output and gradients of q, k, v, as float32."""
    out, pull = jax.vjp(attend, q, k, v)
    return [np.asarray(x, np.float32) for x in (out, *pull(d_out))]


def run_blocked(
    inputs, segments=None, *, window=None, soft_cap=None, block=BLOCK, **masks
):
    attend = functools.partial(
        blocked.attention,
        segment_ids=segments,
        window=window,
        scale=0.3,
        soft_cap=soft_cap,
        tuning=BlockedTuning(block=block),
        **masks,
    )
    return run(attend, *inputs)


def run_reference(inputs, segments=None, *, window=None, soft_cap=None, **masks):
    attend = functools.partial(
        reference.attention,
        segment_ids=segments,
        window=window,
        scale=0.3,
        soft_cap=soft_cap,
        **masks,
    )
    return run(attend, *inputs)


def assert_near(got, want, tolerance):
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        error = np.abs(a - b).max() / max(1.0, np.abs(b).max())
        assert error <= tolerance, f"{name}: {error}"


@pytest.mark.parametrize(
    ("window", "kv_heads"), [(None, 2), (1, 2), (2, 4), (13, 1), (LENGTH - 1, 4)]
)
def test_reference_agrees_with_jax_nn(window, kv_heads):
    inputs = make_inputs(K=kv_heads)

    def attend(q, k, v):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=0.3,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="xla",
        )

    with jax.numpy_rank_promotion("allow"):  # jax.nn promotes ranks inside
        want = run(attend, *inputs)
    assert_near(run_reference(inputs, window=window), want, F32_TOLERANCE)


@pytest.mark.parametrize(("window", "kv_heads"), [(None, 2), (1, 4), (13, 1)])
def test_reference_agrees_with_jax_nn_on_both_sides(window, kv_heads):
    inputs = make_inputs(K=kv_heads)
    attend = functools.partial(
        jax.nn.dot_product_attention,
        scale=0.3,
        local_window_size=None if window is None else (window - 1, window - 1),
        implementation="xla",
    )
    with jax.numpy_rank_promotion("allow"):
        want = run(attend, *inputs)
    got = run_reference(inputs, window=window, causal=False)
    assert_near(got, want, F32_TOLERANCE)


PREFIXES = jnp.asarray([20, 0], jnp.int32)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("segmented", [False, True])
def test_reference_hides_what_the_rules_say(window, segmented):
    """One number a score, by the rules as they are written in `api.attention`."""
    T, ids = 33, np.asarray(make_segments(2, 33)) * segmented
    q, k, v, _ = make_inputs(T=T, N=1, K=1)
    for causal, prefixes in ((True, [0, 0]), (True, [20, 0]), (False, [0, 0])):
        seen = np.zeros((2, T, T), bool)
        for b, i, j in np.ndindex(2, T, T):
            seen[b, i, j] = (
                (j <= i or j < prefixes[b] or not causal)
                and abs(i - j) < (window or T)
                and ids[b, i] == ids[b, j]
            )
        scores = np.einsum("btnh,bsnh->bts", q, k) * 0.3
        probs = np.exp(scores) * seen
        want = np.einsum("bts,bsnh->btnh", probs, v)
        want /= probs.sum(axis=-1)[..., None, None]
        got = reference.attention(
            *(q, k, v, jnp.asarray(ids, jnp.int32)),
            causal=causal,
            prefix_len=jnp.asarray(prefixes, jnp.int32) if causal else None,
            window=window,
            scale=0.3,
            soft_cap=None,
        )
        np.testing.assert_allclose(got, want, atol=1e-5)


# Each rule alone, those that meet, a ragged length, wider and narrower values.
UNMASKED = {
    "full": {"causal": False},
    "full, window": {"causal": False, "window": 13},
    "full, window 1": {"causal": False, "window": 1},
    "full, segments": {"causal": False, "segmented": True},
    "full, all": {"causal": False, "segmented": True, "window": 9, "soft_cap": 0.7},
    "full, one block": {"causal": False, "T": 11},
    "full, whole blocks": {"causal": False, "T": 3 * BLOCK, "window": 20},
    "prefix": {"prefix_len": PREFIXES},
    "prefix, window": {"prefix_len": PREFIXES, "window": 11},
    "prefix, segments": {"prefix_len": PREFIXES, "segmented": True},
    "prefix beyond the end": {"prefix_len": PREFIXES + 100},
    "wide values": {"Hv": 12},
    "narrow values": {"Hv": 3, "window": 20},
    "narrow values, full": {"Hv": 3, "causal": False, "segmented": True},
}


@pytest.mark.parametrize("name", UNMASKED)
def test_blocked_agrees_with_reference_under_every_rule(name):
    masks = dict(UNMASKED[name])
    T = masks.pop("T", LENGTH)
    inputs = make_inputs(T=T, Hv=masks.pop("Hv", None))
    segments = make_segments(2, T) if masks.pop("segmented", False) else None
    want = run_reference(inputs, segments, **masks)
    assert want[0].shape == inputs[3].shape
    got = run_blocked(inputs, segments, **masks)
    assert all(np.isfinite(x).all() for x in got)
    assert_near(got, want, F32_TOLERANCE)


@pytest.mark.parametrize(
    ("window", "segmented"),
    [(w, False) for w in (None, 1, 2, BLOCK, BLOCK + 1, LENGTH - 1, LENGTH, LENGTH + 5)]
    + [(w, True) for w in (None, 1, 29)],
)
def test_blocked_agrees_with_reference_at_every_window(window, segmented):
    inputs = make_inputs()
    segments = make_segments(2, LENGTH) if segmented else None
    got = run_blocked(inputs, segments, window=window)
    want = run_reference(inputs, segments, window=window)
    assert_near(got, want, F32_TOLERANCE)


@pytest.mark.parametrize("length", [1, 15, 17, 48])
def test_blocked_agrees_with_reference_at_ragged_lengths(length):
    inputs = make_inputs(T=length)
    want = run_reference(inputs, window=9)
    assert_near(run_blocked(inputs, window=9), want, F32_TOLERANCE)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_blocked_agrees_with_reference_for_mha_and_mqa(kv_heads):
    inputs = make_inputs(K=kv_heads)
    want = run_reference(inputs, window=20)
    assert_near(run_blocked(inputs, window=20), want, F32_TOLERANCE)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_an_id_that_comes_again_is_another_document(backend):
    q, k, v, _ = make_inputs(B=1, T=12)
    ids = jnp.asarray([[5, 5, 5, -2, -2, 9, 9, 9, 5, 5, 5, 5]], jnp.int32)
    got = api.attention(q, k, v, segment_ids=ids, backend=backend)
    parts = [
        api.attention(*(x[:, a:b] for x in (q, k, v)), backend="reference")
        for a, b in ((0, 3), (3, 5), (5, 8), (8, 12))
    ]
    np.testing.assert_allclose(got, jnp.concatenate(parts, 1), atol=1e-6)


def test_blocked_agrees_with_reference_under_a_soft_cap():
    inputs = make_inputs()
    segments = make_segments(2, LENGTH)
    got = run_blocked(inputs, segments, window=20, soft_cap=0.7)
    want = run_reference(inputs, segments, window=20, soft_cap=0.7)
    assert_near(got, want, F32_TOLERANCE)
    uncapped = run_reference(inputs, segments, window=20)
    assert np.abs(want[0] - uncapped[0]).max() > 0.1


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("blocked", jnp.bfloat16),
        ("blocked", jnp.float16),
        ("reference", jnp.bfloat16),
    ],
)
def test_half_precision_is_near_the_float32_reference(backend, dtype):
    inputs = make_inputs(T=150, dtype=dtype)
    for masks in ({}, {"causal": False}, {"prefix_len": PREFIXES}):
        attend = functools.partial(
            api.attention, window=70, scale=0.3, backend=backend, **masks
        )
        out = jax.eval_shape(attend, *inputs[:3])
        assert out.dtype == dtype
        want = run_reference(
            [x.astype(jnp.float32) for x in inputs], window=70, **masks
        )
        assert_near(run(attend, *inputs), want, BF16_TOLERANCE)


def test_large_scores_neither_overflow_nor_give_nan():
    q, k, v, d_out = make_inputs()
    inputs = (q * 300.0, k * 300.0, v, d_out)
    got = run_blocked(inputs, window=20)
    want = run_reference(inputs, window=20)
    # Scores of order 1e5 carry an absolute rounding of 1e-2 into the exponential.
    assert all(np.isfinite(x).all() for x in got)
    np.testing.assert_allclose(got[0], want[0], atol=5e-2)


@pytest.mark.slow
@settings(max_examples=4)
@given(
    T=st.integers(1, 40),
    K=st.integers(1, 3),
    G=st.integers(1, 3),
    H=st.sampled_from([1, 4, 6]),
    block=st.integers(1, 20),
    window=st.none() | st.integers(1, 45),
    segmented=st.booleans(),
)
def test_blocked_agrees_with_reference_at_random_shapes(
    T, K, G, H, block, window, segmented
):
    inputs = make_inputs(T=T, N=K * G, K=K, H=H)
    segments = make_segments(2, T) if segmented else None
    got = run_blocked(inputs, segments, window=window, block=block)
    want = run_reference(inputs, segments, window=window)
    assert_near(got, want, F32_TOLERANCE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7, 30])
def test_listed_pairs_are_those_that_hold_a_visible_score(window, causal):
    T, block = 30, 7
    visible = np.zeros((35, 35), bool)
    visible[:T, :T] = reference.visible(T, window, causal=causal)
    tiles = visible.reshape(5, block, 5, block).any(axis=(1, 3))
    listed = blocked.visible_tiles(T, block, window, causal=causal)
    assert sorted(map(tuple, listed.tolist())) == list(map(tuple, np.argwhere(tiles)))


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_keys_past_the_last_query_are_not_seen(backend):
    q, k, v, d_out = make_inputs(S=LENGTH + 20)
    attend = functools.partial(api.attention, window=9, scale=0.3, backend=backend)
    got = run(attend, q, k, v, d_out)
    want = run_reference((q, k[:, :LENGTH], v[:, :LENGTH], d_out), window=9)
    for longer in got[2:]:
        assert not longer[:, LENGTH:].any()
    got = got[:2] + [x[:, :LENGTH] for x in got[2:]]
    assert_near(got, want, F32_TOLERANCE)


def test_the_default_scale_is_one_over_the_root_of_the_head_width():
    inputs = make_inputs(H=16)
    got = run(functools.partial(api.attention, backend="blocked"), *inputs)
    want = run(
        functools.partial(api.attention, backend="reference", scale=0.25), *inputs
    )
    assert_near(got, want, F32_TOLERANCE)
