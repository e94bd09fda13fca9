"""Workers that interpret kernels, shared by all tests of kernels."""

from collections.abc import Iterator

import pytest

from tests.kernels.interpreter.runner import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """A worker for cases beside this process, which waits; it starts with the first."""
    with Pool(workers=1) as pool:
        yield pool
