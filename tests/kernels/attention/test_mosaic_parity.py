"""The Mosaic GPU attention kernels, interpreted, are the reference; without a race.

Output, log-sum-exp and all gradients, each compared element by element. The unit of an
error is the largest one that rounding to 16 bits explains there (`mosaic_truth`), so
the bound is 1 for everything.
"""

import dataclasses
from concurrent.futures import Future
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention.mosaic_case import FUNCTION, Case, make_segments
from tests.kernels.attention.mosaic_cases import CASES, SHORT, short
from tests.kernels.attention.mosaic_truth import truth
from tests.kernels.interpreter.runner import Pool


def submit(pool: Pool, case: Case) -> Future[Any]:
    return pool.submit(FUNCTION, **dataclasses.asdict(case))


def assert_explained_by_rounding(errors: dict[str, float]) -> None:
    assert set(errors) == {"out", "lse", "dq", "dk", "dv"}
    assert {name: error for name, error in errors.items() if not error <= 1} == {}


@pytest.mark.parametrize("name", short(CASES, SHORT))
def test_kernels_agree_with_the_reference(pool: Pool, name: str) -> None:
    assert_explained_by_rounding(submit(pool, CASES[name]).result()["errors"])


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
    assert_explained_by_rounding(submit(pool, case).result()["errors"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bounds_hold_for_rounding_and_not_for_errors(dtype: str) -> None:
    """The values themselves, rounded, are within; a hundredth more is not."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.standard_normal((1, 40, heads, 8)), dtype)
        for heads in (2, 1, 1, 2)
    )
    options = {"window": 9, "scale": 0.3, "soft_cap": None}
    want = truth(q, k, v, d_out, make_segments("sorted", 1, 40), **options)
    rounded = {name: jnp.asarray(x, dtype) for name, x in want.values.items()}
    rounded["lse"] = jnp.asarray(want.values["lse"], jnp.float32)
    assert max(want.errors(rounded).values()) <= 1
    off = {name: jnp.asarray(x) * 1.05 for name, x in want.values.items()}
    assert min(want.errors(off).values()) > 1
    unknown = {name: jnp.full_like(x, jnp.nan) for name, x in rounded.items()}
    assert set(want.errors(unknown).values()) == {np.inf}
