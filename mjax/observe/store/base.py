"""The interface of a store, for both databases, and the versions of its schema.

Input: the address of a database. Output: a `Store`. A database from an older mjax is
migrated to the current version, each version in one transaction. A database from a
newer mjax is refused.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from mjax.observe.store.batches import Mark

VERSION = 2
"""Version of the schema: the number of the last file in schema/."""


class StoreGoneError(RuntimeError):
    """The database is unreachable or cannot write; it may recover later."""


class ConflictError(RuntimeError):
    """Another process has written to the database of this ingester."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes of one transaction. Rows are tuples in column order."""

    before: Sequence[Mark]
    """Marks that `after` replaces; the database must still contain them."""
    after: Sequence[Mark]
    """All new or changed marks."""
    processes: Sequence[tuple[Any, ...]] = ()
    spans: pa.Table
    totals: pa.Table
    """Rows to add to phase_totals."""
    rewritten: Sequence[tuple[str, int]] = ()
    """(run, revision) for each rewritten metrics.jsonl; rows of older revisions are
    deleted.
    """
    metrics: Sequence[tuple[Any, ...]] = ()
    events: Sequence[tuple[Any, ...]] = ()
    bad_lines: Sequence[tuple[Any, ...]] = ()


@runtime_checkable
class Store(Protocol):
    """A database with the schema. One thread writes, one may delete, any may query."""

    address: str
    """The address given to `open_store`."""

    def marks(self) -> list[Mark]:
        """Return the mark, the stored part, of each file."""
        ...

    def write(self, changes: Changes) -> None:
        """Write all changes, or none.

        Raises:
          ConflictError: a mark in the database has changed.
          StoreGoneError: the database is unreachable, or its disk is full.
          ValueError: the database refuses a value.
        """
        ...

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query that both databases accept; `?` is a placeholder for a value.

        Raises:
          StoreGoneError: the database cannot be read.
        """
        ...

    def delete(self, sql: str, values: Sequence[Any]) -> int:
        """Delete rows with a statement that both databases accept, in one transaction.

        Returns:
          the number of deleted rows.
        Raises:
          StoreGoneError: the database is unreachable; nothing is deleted.
        """
        ...

    def reclaim(self) -> None:
        """Let new rows reuse the space of deleted rows; called by the deleting thread.

        Raises:
          StoreGoneError: the database is unreachable.
        """
        ...

    def compact(self) -> None:
        """Return the space of deleted rows to the disk.

        No other process may use the store meanwhile. The tables are rewritten, so the
        disk needs space for a second copy.

        Raises:
          ValueError: there is not enough space; the database is unchanged.
          StoreGoneError: the database is gone.
        """
        ...

    def size(self) -> int:
        """Return the size on disk, in bytes."""
        ...

    def close(self) -> None:
        """Release the database."""
        ...


def open_store(address: str, *, threads: int = 2) -> Store:
    """Open a database; create an absent file.

    Args:
      address: path of a DuckDB file, or postgresql://...
      threads: number of DuckDB threads.
    Raises:
      ValueError: the address is invalid, another process has the database open, the
        database is from a newer mjax, or a package is missing.
      StoreGoneError: PostgreSQL is unreachable.
    """
    if address.startswith(("postgresql://", "postgres://")):
        try:
            from mjax.observe.store.postgres import PostgresStore
        except ImportError as error:
            raise ValueError(_missing(error, "observe-scale")) from error
        return PostgresStore(address)
    if "://" in address:
        raise ValueError(
            f"a store is a path or postgresql://USER@HOST/NAME, got {address}"
        )
    try:
        from mjax.observe.store.duck import DuckStore
    except ImportError as error:
        raise ValueError(_missing(error, "observe")) from error
    return DuckStore(address, threads=threads)


def migrate(
    version: int | None,
    run: Callable[[str], None],
    *,
    dialect: str,
    name: str,
    to: int = VERSION,
) -> None:
    """Bring a schema up to date.

    Args:
      version: version of the database; None if it is empty.
      run: function that executes statements in one transaction.
      dialect: `duckdb` or `postgres`; selects additional schema files.
      name: name of the database, for messages.
      to: version to stop at; an older one is for tests.
    Raises:
      ValueError: the database has a newer version.
    """
    if version is not None and version > VERSION:
        raise ValueError(
            f"{name} has schema version {version}, this mjax supports {VERSION}; use "
            "the mjax that wrote it, or name another --store"
        )
    for number in range((version or 0) + 1, to + 1):
        texts = [_schema(f"{number:04}.sql"), _schema(f"{number:04}.{dialect}.sql")]
        if number == 1:
            texts.insert(0, "create table schema_version (version integer not null);")
            texts.append("insert into schema_version values (1);")
        texts.append(f"update schema_version set version = {number};")
        run("\n".join(texts))


def _schema(name: str) -> str:
    """Return the statements of a file, without comments; empty if there is none."""
    path = resources.files("mjax.observe.store") / "schema" / name
    if not path.is_file():
        return ""
    return re.sub(r"--[^\n]*", "", path.read_text(encoding="utf-8"))


def _missing(error: ImportError, extra: str) -> str:
    return f"{error.name} is not installed; pip install 'mjax[{extra}]'"
