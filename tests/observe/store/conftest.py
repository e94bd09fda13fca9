"""Stores to test: DuckDB always, PostgreSQL with make test-services."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mjax.observe.store.base import VERSION, Store
from mjax.observe.store.duck import DuckStore
from mjax.observe.store.postgres import PostgresStore
from tests.observe.store.services import Nats, Postgres

OpenStore = Callable[..., Store]
"""Opens the same database each time; `to` is the version to make."""


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.end()


@pytest.fixture
def nats() -> Iterator[Nats]:
    server = Nats()
    yield server
    server.end()


_numbers = itertools.count()


@pytest.fixture(params=["duckdb", pytest.param("postgres", marks=pytest.mark.services)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Yield a function that opens the test's database; close all that it opened."""
    stores: list[Store] = []
    if request.param == "duckdb":
        address, cls = str(tmp_path / "store.duckdb"), DuckStore
    else:
        server = request.getfixturevalue("postgres")
        address, cls = server.new_database(f"test{next(_numbers)}"), PostgresStore

    def open_one(to: int = VERSION) -> Store:
        for store in stores:
            store.close()
        stores.append(cls(address, to=to))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()
