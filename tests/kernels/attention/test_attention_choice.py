"""The choice of a backend, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.kernels.attention import api
from mjax.kernels.attention.tuning import BlockedTuning

GPU = {"platform": "gpu", "dtype": jnp.bfloat16, "head_dim": 64, "seq_len": 128}
CPU = {**GPU, "platform": "cpu"}


def test_auto_takes_blocked_on_cpu_and_says_why_not_the_others():
    choice = api.choose(**CPU)
    assert choice.name == "blocked"
    assert "cpu" in choice.reason
    assert choice.rejected == {
        "cudnn": "it needs platform gpu, not cpu",
        "reference": "slower than blocked",
    }


def test_auto_takes_cudnn_on_gpu():
    assert api.choose(**GPU, window=16).name == "cudnn"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "not float32"),
        ({"head_dim": 60}, "multiple of 8, not 60"),
        ({"head_dim": 136}, "at most 128, not 136"),
        ({"segments": True}, "segment_ids"),
        ({"soft_cap": 30.0}, "soft_cap=30.0"),
        ({"platform": "cpu"}, "not cpu"),
    ],
)
def test_what_cudnn_cannot_do_is_refused_by_name_and_avoided_by_auto(change, reason):
    asked = {**GPU, **change}
    with pytest.raises(ValueError, match=reason) as refusal:
        api.choose(**asked, backend="cudnn")
    assert "blocked, reference" in str(refusal.value)
    choice = api.choose(**asked)
    assert choice.name == "blocked"
    assert reason in choice.rejected["cudnn"]


def test_the_table_decides_about_windows_shorter_than_the_sequence(monkeypatch):
    windowless = api.Capability(dtypes=("bfloat16",), window=False)
    table = {**api.CAPABILITIES, "cudnn": windowless}
    monkeypatch.setattr(api, "CAPABILITIES", table)
    assert api.choose(**GPU, window=128).name == "cudnn"
    choice = api.choose(**GPU, window=127)
    assert choice.name == "blocked"
    assert choice.rejected["cudnn"] == "it does not honour window=127"


def test_every_backend_has_its_place_in_the_order():
    assert sorted(api._FASTEST_FIRST) == sorted(api.CAPABILITIES)


def test_a_named_backend_is_taken():
    choice = api.choose(**CPU, backend="reference")
    assert choice.name == "reference"
    assert choice.rejected["blocked"] == "not asked for"


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"reference, blocked, cudnn, got 'flash'"):
        api.choose(**CPU, backend="flash")


def test_a_dtype_that_no_backend_takes_is_refused():
    with pytest.raises(ValueError, match="no attention backend can do this"):
        api.choose(**{**CPU, "dtype": jnp.int8})


@pytest.mark.parametrize("window", [0, -3])
def test_choose_refuses_a_window_below_one(window):
    with pytest.raises(ValueError, match="window must be at least 1"):
        api.choose(**CPU, window=window)


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("q", "kv", "options", "message"),
    [
        ((2, 8, 3, 4), (2, 8, 2, 4), {}, "multiple of kv heads, got 3 and 2"),
        ((2, 8, 2, 4), (2, 7, 2, 4), {}, "T=8, S=7"),
        ((2, 8, 2, 4), (2, 8, 2, 4), {"window": 0}, "use None for full"),
        ((2, 8, 2, 4), (2, 8, 2, 4), {"soft_cap": 0.0}, "use None for no cap"),
        (
            (2, 8, 2, 4),
            (2, 9, 2, 4),
            {"segment_ids": jnp.zeros((2, 8), jnp.int32)},
            "S = T",
        ),
        ((2, 8, 2, 4), (2, 8, 2, 4), {"backend": "cudnn"}, "needs platform gpu"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(q, kv, options, message):
    with pytest.raises(ValueError, match=message):
        api.attention(zeros(*q), zeros(*kv), zeros(*kv), **options)


def test_mixed_dtypes_are_refused():
    q, k = zeros(2, 8, 2, 4), zeros(2, 8, 2, 4, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="float32, bfloat16, bfloat16: cast"):
        api.attention(q, k, k)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 8, 2, 4), (2, 8, 2, 4), (2, 8, 1, 4)),
        ((2, 8, 2, 4), (3, 8, 2, 4), (3, 8, 2, 4)),
        ((2, 8, 2, 4), (2, 8, 2, 5), (2, 8, 2, 5)),
        ((8, 2, 4), (8, 2, 4), (8, 2, 4)),
    ],
)
def test_shapes_that_disagree_are_refused_with_the_shapes(q, k, v):
    # The annotations catch these first in tests; users get the message.
    with pytest.raises(ValueError, match="got q"):
        api._check(zeros(*q), zeros(*k), zeros(*v), None)


def test_a_block_below_one_is_refused():
    with pytest.raises(ValueError, match="block=0"):
        BlockedTuning(block=0)


@pytest.mark.parametrize("window", [None, 5])
def test_cudnn_gets_the_window_together_with_the_causal_mask(monkeypatch, window):
    real, calls = jax.nn.dot_product_attention, []

    def on_cpu(*args, implementation, **options):
        calls.append((implementation, options["is_causal"]))
        return real(*args, implementation="xla", **options)

    q, k, v = (
        jax.random.normal(key, (2, 20, heads, 8), jnp.bfloat16)
        for key, heads in zip(
            jax.random.split(jax.random.key(0), 3), (4, 2, 2), strict=True
        )
    )
    want = api.attention(q, k, v, window=window, backend="reference")
    monkeypatch.setattr(jax.nn, "dot_product_attention", on_cpu)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    got = api.attention(q, k, v, window=window)
    assert calls == [("cudnn", True)]
    # The probabilities are rounded to bfloat16 (2^-9) before they meet the values.
    np.testing.assert_allclose(
        got.astype(jnp.float32), want.astype(jnp.float32), atol=3e-2
    )
