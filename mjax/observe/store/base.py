"""What a store does, whichever database it is, and the versions of its schema.

Enters: the address of a database. Leaves: a `Store`. A database that an older mjax
made is brought to the present version, one version in one transaction; one that a newer
mjax made is refused.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from mjax.observe.store.batches import Mark

VERSION = 2
"""Of the schema: the number of the last file in schema/."""


class StoreGoneError(RuntimeError):
    """The database does not answer, or cannot write; it may again later."""


class ConflictError(RuntimeError):
    """Another process has written to the database of this ingester."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
    """What one transaction writes. Rows are tuples in the order of the columns."""

    before: Sequence[Mark]
    """Marks that `after` replaces, as they must still be in the database."""
    after: Sequence[Mark]
    """All marks that are new or other ones."""
    processes: Sequence[tuple[Any, ...]] = ()
    spans: pa.Table
    totals: pa.Table
    """To be added to phase_totals."""
    rewritten: Sequence[tuple[str, int]] = ()
    """Runs whose metrics.jsonl was rewritten, and its revision: older rows go."""
    metrics: Sequence[tuple[Any, ...]] = ()
    events: Sequence[tuple[Any, ...]] = ()
    bad_lines: Sequence[tuple[Any, ...]] = ()


@runtime_checkable
class Store(Protocol):
    """A database with the schema. One thread writes, one may delete; any may query."""

    address: str
    """As `open_store` took it."""

    def marks(self) -> list[Mark]:
        """Return how far each file is stored."""
        ...

    def write(self, changes: Changes) -> None:
        """Write all of it, or nothing.

        Raises:
          ConflictError: a mark is not what it was before.
          StoreGoneError: the database is gone, or its disk is full.
          ValueError: the database refuses a value.
        """
        ...

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Read with a statement that both databases know; `?` stands for a value."""
        ...

    def delete(self, sql: str, values: Sequence[Any]) -> int:
        """Delete rows with a statement that both databases know, in one transaction.

        Returns:
          how many.
        Raises:
          StoreGoneError: the database is gone; nothing is deleted.
        """
        ...

    def reclaim(self) -> None:
        """Let new rows use the room of deleted ones; the thread that deletes calls it.

        Raises:
          StoreGoneError: the database is gone.
        """
        ...

    def compact(self) -> None:
        """Give the room of deleted rows back to the disk.

        Nobody else may use the store meanwhile. The tables are written anew, so there
        must be room for that.

        Raises:
          ValueError: there is no room; the database is as it was.
          StoreGoneError: the database is gone.
        """
        ...

    def size(self) -> int:
        """Return the bytes on the disk."""
        ...

    def close(self) -> None:
        """Release the database."""
        ...


def open_store(address: str, *, threads: int = 2) -> Store:
    """Open a database, make it if it is a file that is absent.

    Args:
      address: path of a DuckDB file, or postgresql://...
      threads: of DuckDB.
    Raises:
      ValueError: the address is none, the database belongs to another process or to a
        newer mjax, or a package is missing.
      StoreGoneError: PostgreSQL does not answer.
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
      version: of the database; None if it is empty.
      run: executes statements in one transaction.
      dialect: `duckdb` or `postgres`: which additional files count.
      name: of the database, for messages.
      to: version to stop at; an older one is for tests.
    Raises:
      ValueError: the database is of a newer version.
    """
    if version is not None and version > VERSION:
        raise ValueError(
            f"{name} has schema version {version}, this mjax knows {VERSION}; use the "
            "mjax that wrote it, or name another --store"
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
