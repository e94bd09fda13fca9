"""The store in PostgreSQL, for runs with many readers or with other tools as readers.

Input: a postgresql:// address. Output: a `Store`. Spans are inserted with COPY. If a
connection breaks, the next call reconnects.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict

from mjax.observe.store.base import (
    VERSION,
    Changes,
    ConflictError,
    StoreGoneError,
    migrate,
)
from mjax.observe.store.batches import Mark

_MARK_FIELDS = tuple(field.name for field in dataclasses.fields(Mark))
_SWEPT = ("spans", "metrics", "phase_totals")
"""Tables from which old rows are deleted."""
_CONNECT_S = 5
"""Seconds after which a connection attempt fails. The ingester retries anyway."""
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
"""Escapes in COPY's text format (postgresql.org/docs/15/sql-copy.html)."""
_UNNEST = (
    "insert into phase_totals select * from unnest(%s::int[], %s::int[], %s::text[], "
    "%s::text[], %s::text[], %s::bigint[], %s::bigint[]) on conflict (file_id, block, "
    "name, kind, stream) do update set spans = phase_totals.spans + excluded.spans, "
    "ns = phase_totals.ns + excluded.ns"
)


class _NumberLoader(Loader):
    """Reads PostgreSQL's `numeric`, the type of a sum of `bigint`.

    A whole number becomes an int, as in DuckDB.
    """

    def load(self, data: Buffer) -> int | float:
        """Read a number."""
        text = bytes(data).decode()
        return int(text) if text.lstrip("-").isdigit() else float(text)


class PostgresStore:
    """A store in a database of PostgreSQL."""

    def __init__(self, address: str, *, to: int = VERSION) -> None:
        """Connect, and create absent tables.

        Raises:
          ValueError: the address is invalid, or the schema is from a newer mjax.
          StoreGoneError: the server is unreachable.
        """
        try:
            parts = conninfo_to_dict(address)
        except psycopg.Error as error:
            raise ValueError(f"--store is not a PostgreSQL address: {error}") from error
        self.address = address
        self._name = f"PostgreSQL {parts.get('host', '')}/{parts.get('dbname', '')}"
        self._writer: psycopg.Connection | None = None
        self._reader: psycopg.Connection | None = None
        self._sweeper: psycopg.Connection | None = None
        self._lock = threading.Lock()
        try:
            self._migrate(to)
        except BaseException:
            self.close()
            raise

    def marks(self) -> list[Mark]:
        """Return the mark, the stored part, of each file."""
        with self._transaction() as base:
            rows = base.execute(
                f"select {', '.join(_MARK_FIELDS)} from files".encode()
            ).fetchall()
        return [Mark(**dict(zip(_MARK_FIELDS, row, strict=True))) for row in rows]

    def write(self, changes: Changes) -> None:
        """Write all changes, or none; see `Store`."""
        try:
            with self._transaction() as base:
                _write(base, changes)
        except psycopg.errors.UniqueViolation as error:
            raise ConflictError(
                f"{self._name}: {error.diag.message_primary}"
            ) from error
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            raise ValueError(f"{self._name} refuses a row: {error}") from error

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query. Any thread may call this; queries run one after another."""
        statement = _statement(sql)
        with self._lock:
            for attempt in (0, 1):
                try:
                    if self._reader is None or self._reader.closed:
                        self._reader = self._connect(autocommit=True)
                    return self._reader.execute(statement, list(values)).fetchall()
                except psycopg.OperationalError as error:
                    self._reader = None
                    if attempt:
                        raise StoreGoneError(f"{self._name}: {error}") from error
        raise AssertionError("unreachable")

    def delete(self, sql: str, values: Sequence[Any]) -> int:
        """Delete rows; see `Store`. Writes continue meanwhile."""
        return self._sweep(_statement(sql), values)

    def reclaim(self) -> None:
        """Free the space of deleted rows; writes continue meanwhile."""
        self._sweep(f"vacuum {', '.join(_SWEPT)}".encode())

    def compact(self) -> None:
        """Rewrite the large tables; see `Store`."""
        try:
            for table in _SWEPT:
                self._sweep(f"vacuum (full, analyze) {table}".encode())
        except StoreGoneError as error:
            if isinstance(error.__cause__, psycopg.errors.DiskFull):
                raise ValueError(
                    f"{self._name} cannot be compacted ({error.__cause__}); make room "
                    "for a second copy of its largest table, or leave out --compact"
                ) from error
            raise

    def size(self) -> int:
        """Return the size of the database, in bytes."""
        return self.query("select pg_database_size(current_database())")[0][0]

    def close(self) -> None:
        """Close the connections."""
        for connection in (self._writer, self._reader, self._sweeper):
            if connection is not None:
                connection.close()

    def _sweep(self, statement: bytes, values: Sequence[Any] = ()) -> int:
        """Run a single statement; return the number of rows that it changed."""
        try:
            if self._sweeper is None or self._sweeper.closed:
                self._sweeper = self._connect(autocommit=True)
            return self._sweeper.execute(statement, list(values) or None).rowcount
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            text = " ".join(str(error).split())
            raise StoreGoneError(f"{self._name}: {text}") from error

    def _migrate(self, to: int) -> None:
        with self._transaction() as base:
            # If two ingesters start together, only one may create the tables.
            base.execute("select pg_advisory_xact_lock(7245001)")
            migrate(
                _version(base),
                lambda statements: _run_all(base, statements),
                dialect="postgres",
                name=self._name,
                to=to,
            )

    def _connect(self, *, autocommit: bool) -> psycopg.Connection:
        try:
            made = psycopg.connect(
                self.address, autocommit=autocommit, connect_timeout=_CONNECT_S
            )
            made.adapters.register_loader("numeric", _NumberLoader)
            return made
        except psycopg.OperationalError as error:
            text = " ".join(str(error).split())
            raise StoreGoneError(f"{self._name} does not answer: {text}") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        """Run a transaction; if the server is unreachable, close the connection."""
        if self._writer is None or self._writer.closed:
            self._writer = self._connect(autocommit=False)
        try:
            with self._writer.transaction():
                yield self._writer
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            self._writer.close()
            text = " ".join(str(error).split())
            raise StoreGoneError(f"{self._name}: {text}") from error


def _statement(sql: str) -> bytes:
    """Convert a statement to psycopg's placeholders."""
    return sql.replace("%", "%%").replace("?", "%s").encode()


def _version(base: psycopg.Connection) -> int | None:
    found = base.execute("select to_regclass('schema_version') is not null").fetchone()
    if found != (True,):
        return None
    row = base.execute("select version from schema_version").fetchone()
    return None if row is None else row[0]


def _run_all(base: psycopg.Connection, statements: str) -> None:
    base.execute(statements.encode())


def _write(base: psycopg.Connection, changes: Changes) -> None:
    for mark in changes.before:
        held = base.execute(
            "select revision, at_byte from files where file_id = %s for update",
            [mark.file_id],
        ).fetchone()
        if held != (mark.revision, mark.at_byte):
            found = "nothing"
            if held is not None:
                found = f"byte {held[1]} of revision {held[0]}"
            raise ConflictError(
                f"{mark.source} must be stored up to byte {mark.at_byte} of revision "
                f"{mark.revision}, got {found}: another ingester has written to "
                "this database; collectors will send the batch again"
            )
    if changes.spans.num_rows:
        with base.cursor().copy("copy spans from stdin") as copy:
            copy.write(_copy_text(changes.spans))
        columns = [column.to_pylist() for column in changes.totals.columns]
        base.execute(_UNNEST, columns)
    for run, revision in changes.rewritten:
        base.execute(
            "delete from metrics where run = %s and revision < %s", [run, revision]
        )
    _insert_rows(base, changes)
    new = {mark.file_id for mark in changes.after} - {m.file_id for m in changes.before}
    replaced = [mark for mark in changes.after if mark.file_id not in new]
    with base.cursor() as cursor:
        if replaced:
            cursor.execute(
                "delete from files where file_id = any(%s)",
                [[mark.file_id for mark in replaced]],
            )
        cursor.executemany(
            f"insert into files values ({_places(len(_MARK_FIELDS))})".encode(),
            [dataclasses.astuple(mark) for mark in changes.after],
        )


def _insert_rows(base: psycopg.Connection, changes: Changes) -> None:
    """Insert the rows of the small tables."""
    for table, rows in (
        ("processes", changes.processes),
        ("metrics", changes.metrics),
        ("events", changes.events),
        ("bad_lines", changes.bad_lines),
    ):
        if not rows:
            continue
        conflict = {"events": "on conflict do nothing"}.get(table, "")
        with base.cursor() as cursor:
            if table == "metrics":
                cursor.executemany(
                    b"delete from metrics where run = %s and step = %s",
                    [row[:2] for row in rows],
                )
            places = _places(len(rows[0]))
            cursor.executemany(
                f"insert into {table} values ({places}) {conflict}".encode(), rows
            )


def _places(number: int) -> str:
    return ", ".join(["%s"] * number)


def _copy_text(table: pa.Table) -> bytes:
    """Write rows in COPY's text format."""
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        values = column.to_pylist()
        if field.type == pa.string():
            escaped = {value: value.translate(_ESCAPES) for value in set(values)}
            columns.append([escaped[value] for value in values])
        elif column.null_count:
            columns.append(["\\N" if value is None else str(value) for value in values])
        else:
            columns.append([*map(str, values)])
    lines = map("\t".join, zip(*columns, strict=True))
    return ("\n".join(lines) + "\n").encode()
