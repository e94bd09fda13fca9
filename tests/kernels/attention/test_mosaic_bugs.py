"""What the tests of the kernels would let through: nothing of what is planted here."""

import pytest

from tests.kernels.attention.mosaic_bugs import BUGS, controls, how_caught, submit
from tests.kernels.interpreter.runner import Pool


@pytest.mark.parametrize("name", controls())
def test_unchanged_source_passes_on_the_same_path(pool: Pool, name: str):
    assert how_caught(submit(pool, controls()[name])) is None


# Those of what the kernels share take 10 s each, for all three kernels.
@pytest.mark.parametrize(
    "name",
    [
        name if bug.case.kernel else pytest.param(name, marks=pytest.mark.slow)
        for name, bug in BUGS.items()
    ],
)
def test_a_planted_bug_is_caught(pool: Pool, name: str) -> None:
    assert how_caught(submit(pool, BUGS[name])) is not None
