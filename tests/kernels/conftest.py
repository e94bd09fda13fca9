"""Workers that interpret kernels, shared by all tests of kernels."""

from collections.abc import Iterator

import pytest

from tests.kernels.interpreter.runner import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two workers for cases; they start with the first one."""
    with Pool() as pool:
        yield pool


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> list[str]:
    """The values of `name` with which this module's tests are to run, in order.

    With these a module submits its cases all at once, and two run at a time while the
    tests wait for one after the other.
    """
    calls = (
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
        if hasattr(item, "callspec")
    )
    return [str(params["name"]) for params in calls if "name" in params]
