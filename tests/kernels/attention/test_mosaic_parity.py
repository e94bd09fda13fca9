"""The Mosaic GPU attention kernels, interpreted, are the reference; without a race.

Output, log-sum-exp and all gradients, each compared element by element. The unit of an
error is the largest one that rounding to 16 bits explains there (`mosaic_truth`), so
the bound is 1 for everything.
"""

import dataclasses
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.kernels.attention import reference
from tests.kernels.attention.mosaic_case import FUNCTION, Case, make_inputs
from tests.kernels.attention.mosaic_cases import CASES, SHORT, short
from tests.kernels.attention.mosaic_truth import truth
from tests.kernels.interpreter.runner import Pool


def submit(pool: Pool, case: Case) -> Future[Any]:
    return pool.submit(FUNCTION, **dataclasses.asdict(case))


def assert_explained_by_rounding(errors: dict[str, float], case: Case) -> None:
    results = {"out", "lse", "dq", "dk", "dv"}
    if case.kernel == "fused":
        results = {"dq", "dk", "dv"}
    assert set(errors) == results
    assert {name: error for name, error in errors.items() if not error <= 1} == {}


@pytest.mark.parametrize("name", short(CASES, SHORT))
def test_kernels_agree_with_the_reference(pool: Pool, name: str) -> None:
    case = CASES[name]
    assert_explained_by_rounding(submit(pool, case).result()["errors"], case)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    T = draw(st.integers(1, 260))
    K = draw(st.sampled_from([1, 2]))
    return Case(
        T=T,
        K=K,
        # Few heads: the time is in blocks times heads.
        N=K * draw(st.sampled_from([1, 2] if K == 1 else [1])),
        H=draw(st.sampled_from([64, 128])),
        window=draw(st.none() | st.integers(1, T + 10)),
        segments=draw(st.sampled_from([None, "sorted", "edge"])),
        soft_cap=draw(st.sampled_from([None, None, 3.0])),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
    )


@pytest.mark.slow
@settings(max_examples=4)
@given(case=cases())
def test_kernels_agree_with_the_reference_at_random_shapes(pool: Pool, case: Case):
    assert_explained_by_rounding(submit(pool, case).result()["errors"], case)


TRUTHS = {
    "window, documents, groups": Case(
        T=40, B=2, N=4, K=2, H=8, window=9, segments="sorted", scale=0.3
    ),
    "soft cap": Case(T=40, H=8, soft_cap=2.0),
    "drift": Case(T=64, H=32, window=30, logits="drift"),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_the_truth_is_the_reference(name: str) -> None:
    """As far as float32 goes: the reference has sums of T terms, exponents of 400.

    Not for a saturated soft cap: there its derivative, 1 - tanh^2, has no digits.
    """
    q, k, v, d_out, segment_ids, options = make_inputs(TRUTHS[name])
    want = truth(q, k, v, d_out, segment_ids, **options)
    q, k, v, d_out = (x.astype(jnp.float32) for x in (q, k, v, d_out))

    def attend(q, k, v):
        return reference.attention(q, k, v, segment_ids, **options)

    out, pull = jax.vjp(attend, q, k, v)
    got = dict(zip(("out", "dq", "dk", "dv"), (out, *pull(d_out)), strict=True))
    for key, array in got.items():
        exact = want.values[key]
        tolerance = 2e-4 * np.abs(exact).max()
        np.testing.assert_allclose(array, exact, rtol=0, atol=tolerance, err_msg=key)


def test_drifting_logits_rise_towards_the_window_and_fall_far_below_zero() -> None:
    """By more than float32 has exponents for: 88 as natural ones."""
    case = Case(T=256, logits="drift")
    q, k, *_, options = make_inputs(case)
    logits = jnp.einsum("btnh,bsnh->ts", q, k).astype(jnp.float32) * options["scale"]
    assert (logits[129::4, 0] - logits[129::4, 64:128].max(axis=1) > 60).all()
    assert (logits[193::4, 0] - logits[193::4, 128:192].max(axis=1) > 120).all()
    assert (logits[2::4] < -200).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bounds_hold_for_rounding_and_not_for_errors(dtype: str) -> None:
    """The values themselves, rounded, are within; a hundredth more is not."""
    case = Case(T=40, N=2, H=8, window=9, scale=0.3, segments="sorted", dtype=dtype)
    *arrays, options = make_inputs(case)
    want = truth(*arrays, **options)
    rounded = {name: jnp.asarray(x, dtype) for name, x in want.values.items()}
    rounded["lse"] = jnp.asarray(want.values["lse"], jnp.float32)
    assert max(want.errors(rounded).values()) <= 1
    off = {name: jnp.asarray(x) * 1.05 for name, x in want.values.items()}
    assert min(want.errors(off).values()) > 1
    unknown = {name: jnp.full_like(x, jnp.nan) for name, x in rounded.items()}
    assert set(want.errors(unknown).values()) == {np.inf}
