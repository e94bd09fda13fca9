"""What the tests of the kernels would let through: nothing of what is planted here."""

import pytest

from tests.kernels.attention.mosaic_bugs import BUGS, controls, how_caught, submit
from tests.kernels.attention.mosaic_cases import short
from tests.kernels.interpreter.runner import Pool

SHORT_CONTROLS = ("no change: dq, T200-dq", "no change: dkv, T64-N4-K2-dkv-parts1")
SHORT = (
    *("forward: K read without waiting for it", "forward: turn not passed on"),
    *("forward: results stored without a fence", "window one too short"),
    *("dq: slot of K released before dq is added to", "dq: not scaled"),
    *("dkv: product read before it is there", "dkv: idle warpgroup releases nothing"),
    *("dkv: query heads of another group", "dkv: a part not added"),
    *("forward: copy of the log-sum-exp in no group", "forward: first maximum 0"),
    "slope of a saturated soft cap as 1 - x * x",
    "fused: one buffer of gradients of scores",
    "fused: dq overwritten while it is added",
    *("dkv_wide: operands given without a fence", "keys beyond the end are seen"),
    "dkv_wide: one buffer for what is given",
)
"""A race, a deadlock or a wrong number in each kernel; the others are slow."""


@pytest.mark.parametrize("name", short(controls(), SHORT_CONTROLS))
def test_unchanged_source_passes_on_the_same_path(pool: Pool, name: str):
    assert how_caught(submit(pool, controls()[name])) is None


@pytest.mark.parametrize("name", short(BUGS, SHORT))
def test_a_planted_bug_is_caught(pool: Pool, name: str) -> None:
    assert how_caught(submit(pool, BUGS[name])) is not None
