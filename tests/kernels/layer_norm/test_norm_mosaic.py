"""The Mosaic GPU backward pass of norms, interpreted: numbers, races, planted bugs."""

from typing import Any

import jax.numpy as jnp
import pytest

from mjax.kernels.layer_norm import api
from mjax.kernels.layer_norm.tuning import MosaicTuning
from mjax.kernels.target import Target
from tests.kernels.interpreter.runner import CaseError, Pool
from tests.kernels.layer_norm.norm_cases import BUGS, CASES

FUNCTION = "tests.kernels.layer_norm.norm_cases:errors"
# dx is rounded to 8 bits; d_scale is a float32 sum of a few terms of order 1.
DX_TOLERANCE, D_SCALE_TOLERANCE = 2**-8, 1e-5


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_formula(pool: Pool, name: str) -> None:
    dx, d_scale = pool.submit(FUNCTION, name=name).result()
    assert dx <= DX_TOLERANCE
    assert d_scale <= D_SCALE_TOLERANCE


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(pool: Pool, name: str) -> None:
    result = pool.submit(FUNCTION, name="LayerNorm", bug=name)
    failure = result.exception()
    if failure is None:
        dx, d_scale = result.result()
        assert not (dx <= DX_TOLERANCE and d_scale <= D_SCALE_TOLERANCE)
    else:
        assert isinstance(failure, CaseError)
        assert failure.how in ("kernel", "hung")


def test_the_kernel_is_chosen_on_hopper_for_what_it_can_do() -> None:
    can: dict[str, Any] = {
        "target": Target(platform="gpu", device_kind="NVIDIA H200"),
        "dtype": jnp.bfloat16,
        "width": 2048,
        "use_bias": False,
    }
    assert api.choose(**can) == "mosaic_gpu"
    others: tuple[dict[str, Any], ...] = (
        {"target": Target(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB")},
        {"target": Target(platform="cpu", device_kind="cpu")},
        {"dtype": jnp.float32},
        {"width": 2000},
        {"width": 12288},
        {"use_bias": True},
    )
    for other in others:
        assert api.choose(**can | other) == "xla"


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0 and 2"):
        MosaicTuning(blocks=0, stages=2)
