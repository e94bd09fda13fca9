"""What the tests of the kernels would let through: nothing of what is planted here."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from tests.kernels.attention.mosaic_bugs import BUGS, controls, how_caught, submit
from tests.kernels.interpreter.runner import Pool

Outcomes = Mapping[str, Future[Any]]


@pytest.fixture(scope="module")
def outcomes(pool: Pool, selected: list[str]) -> Outcomes:
    bugs = controls() | BUGS
    return {name: submit(pool, bugs[name]) for name in selected}


@pytest.mark.parametrize("name", controls())
def test_unchanged_source_passes_on_the_same_path(outcomes: Outcomes, name: str):
    assert how_caught(outcomes[name]) is None


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(outcomes: Outcomes, name: str) -> None:
    assert how_caught(outcomes[name]) is not None
