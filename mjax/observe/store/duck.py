"""The store in DuckDB: one file, owned by one process.

Input: the path of the database. Output: a `Store`. While the ingester has the file
open, no other process can open it, not even to read
(duckdb.org/docs/stable/connect/concurrency). The live page therefore reads the files of
the run instead.
"""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from mjax.observe.store.base import VERSION, Changes, StoreGoneError, migrate
from mjax.observe.store.batches import Mark

_MEMORY_LIMIT = "2GB"
"""Memory limit. The ingester may run on a host that trains. DuckDB's default is 80% of
the memory."""
_MARK_FIELDS = tuple(field.name for field in dataclasses.fields(Mark))
_TYPES = {"int": pa.int32(), "big": pa.int64(), "real": pa.float64(), "": pa.string()}


def _schema(text: str) -> pa.Schema:
    """Parse columns from `name` (text) or `name:type`."""
    pairs = [word.partition(":") for word in text.split()]
    return pa.schema([(name, _TYPES[kind]) for name, _, kind in pairs])


# Rows are inserted by column: each DuckDB statement takes at least a millisecond.
_SCHEMAS = {
    "files": _schema(
        "file_id:int run source kind identity revision:int at_byte:big lines:big "
        "last_n:big last_end_ns:big exit_code:int tail"
    ),
    "processes": _schema(
        "file_id:int run generation:int rank:int host pid:big wall_ns:big "
        "monotonic_ns:big devices mesh"
    ),
    "metrics": _schema(
        "run step:int revision:int at_byte:big loss:real grad_norm:real lr:real "
        "tokens:big step_s:real data_wait_s:real tokens_per_s:real mfu:real "
        "skipped:int eval_loss:real line"
    ),
    "events": _schema(
        "file_id:int at_byte:big digest run time_ns:big source generation:int host "
        "rank:int kind severity text data"
    ),
    "bad_lines": _schema("file_id:int revision:int line:big reason"),
}


class DuckStore:
    """A store in a file of DuckDB."""

    def __init__(self, path: str, *, threads: int = 2, to: int = VERSION) -> None:
        """Open the file; create it if it is absent.

        Raises:
          ValueError: another process has it open, it is from a newer mjax, or it is not
            a database.
        """
        self.address = path
        self._threads = threads
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._base = self._open()
        try:
            migrate(self._version(), self._run_all, dialect="duckdb", name=path, to=to)
        except BaseException:
            self._base.close()
            raise

    def marks(self) -> list[Mark]:
        """Return the mark, the stored part, of each file."""
        rows = self.query(f"select {', '.join(_MARK_FIELDS)} from files")
        return [Mark(**dict(zip(_MARK_FIELDS, row, strict=True))) for row in rows]

    def write(self, changes: Changes) -> None:
        """Write all changes, or none; see `Store`."""
        with self._reopened_after_errors(), self._transaction() as base:
            self._write(base, changes)

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query. Any number of threads may call this at the same time."""
        try:
            with self._lock:
                cursor = self._base.cursor()
            try:
                return cursor.execute(sql, list(values)).fetchall()
            finally:
                cursor.close()
        except duckdb.ProgrammingError:
            raise
        except duckdb.Error as error:
            raise StoreGoneError(f"{self.address} cannot be read: {error}") from error

    def delete(self, sql: str, values: Sequence[Any]) -> int:
        """Delete rows; see `Store`. Writes wait meanwhile."""
        with self._reopened_after_errors(), self._transaction() as base:
            found = base.execute(sql, list(values)).fetchone()
            return 0 if found is None else found[0]

    def reclaim(self) -> None:
        """Free the blocks of deleted rows; the file keeps its size."""
        # A running query may prevent the checkpoint; a later call or `close` then makes
        # it.
        with (
            self._reopened_after_errors(),
            contextlib.suppress(duckdb.TransactionException),
        ):
            self._base.execute("checkpoint")

    def compact(self) -> None:
        """Copy all data to a new file, which replaces the old one."""
        path = Path(self.address)
        fresh, fresh_log = _compacted(path)
        try:
            quoted = str(fresh).replace("'", "''")
            ((name,),) = self.query("select current_database()")
            self._base.execute("checkpoint")
            self._base.execute(f"attach '{quoted}' as compacted")
            self._base.execute(f'copy from database "{name}" to compacted')
            self._base.execute("detach compacted")
            _sync(fresh)
            self._base.close()  # writes everything to the file and leaves no log
            logs = [fresh_log, path.with_name(path.name + ".wal")]
            if any(log.exists() for log in logs):
                raise OSError(f"{path} was not written completely")
            fresh.replace(path)
            _sync(path.parent)
        except (duckdb.Error, OSError) as error:
            raise ValueError(
                f"{path} cannot be compacted ({' '.join(str(error).split())}); make "
                "room for a second copy, or leave out --compact"
            ) from error
        finally:
            self._base.close()
            self._base = self._open()

    def size(self) -> int:
        """Return the size of the file, in bytes."""
        return Path(self.address).stat().st_size

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def _open(self) -> duckdb.DuckDBPyConnection:
        settings: dict[str, Any] = {"threads": self._threads}
        settings["memory_limit"] = _MEMORY_LIMIT
        try:
            Path(self.address).parent.mkdir(parents=True, exist_ok=True)
            opened = duckdb.connect(self.address, config=settings)
            for left in _compacted(Path(self.address)):  # from a killed process
                left.unlink(missing_ok=True)
            return opened
        except duckdb.Error as error:
            text = " ".join(str(error).split())
            hint = (
                "another process has it open: stop that process, or query it"
                if "lock" in text
                else "move it away to start a new one; collectors send their data again"
            )
            raise ValueError(
                f"{self.address} cannot be opened ({text}); {hint}"
            ) from error
        except OSError as error:
            raise ValueError(
                f"{self.address} cannot be opened ({error.strerror}); "
                "name another --store"
            ) from error

    @contextlib.contextmanager
    def _reopened_after_errors(self) -> Iterator[None]:
        """Let one thread write at a time, and convert errors to errors of `Store`."""
        with self._writing:
            try:
                yield
            except (duckdb.IntegrityError, duckdb.DataError) as error:
                raise ValueError(f"{self.address} refuses a row: {error}") from error
            except duckdb.Error as error:
                self._reopen()
                raise StoreGoneError(
                    f"{self.address} cannot be written: {error}"
                ) from error

    def _reopen(self) -> None:
        """Reconnect after an error that may have broken the connection."""
        with self._lock:
            try:
                self._base.close()
                self._base = self._open()
            except (duckdb.Error, ValueError):
                return  # the next write fails and reconnects

    def _version(self) -> int | None:
        found = self.query(
            "select count(*) from information_schema.tables where table_name = ?",
            ["schema_version"],
        )
        if found == [(0,)]:
            return None
        return self.query("select version from schema_version")[0][0]

    def _run_all(self, statements: str) -> None:
        with self._transaction() as base:
            base.execute(statements)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        base = self._base
        base.execute("begin")
        try:
            yield base
            base.execute("commit")
        except BaseException:
            with contextlib.suppress(duckdb.Error):
                base.execute("rollback")
            raise

    def _write(self, base: duckdb.DuckDBPyConnection, changes: Changes) -> None:
        if changes.spans.num_rows:
            with _view(base, changes.spans):
                base.execute("insert into spans select * from arriving")
            with _view(base, changes.totals):
                base.execute(
                    "insert into phase_totals select * from arriving on conflict do "
                    "update set spans = phase_totals.spans + excluded.spans, "
                    "ns = phase_totals.ns + excluded.ns"
                )
        for run, revision in changes.rewritten:
            base.execute(
                "delete from metrics where run = ? and revision < ?", [run, revision]
            )
        for table, rows, conflict in (
            ("processes", changes.processes, ""),
            ("metrics", changes.metrics, "or replace"),
            ("events", changes.events, "or ignore"),
            ("bad_lines", changes.bad_lines, ""),
        ):
            if rows:
                with _view(base, _table(rows, _SCHEMAS[table])):
                    base.execute(
                        f"insert {conflict} into {table} select * from arriving"
                    )
        marks = [dataclasses.astuple(mark) for mark in changes.after]
        with _view(base, _table(marks, _SCHEMAS["files"])):
            base.execute(
                "delete from files where file_id in (select file_id from arriving)"
            )
            base.execute("insert into files select * from arriving")


def _compacted(path: Path) -> tuple[Path, Path]:
    """Return the paths of an unfinished database copy and of its log."""
    fresh = path.with_name(f"{path.name}.compact")
    return fresh, fresh.with_name(f"{fresh.name}.wal")


def _sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _view(base: duckdb.DuckDBPyConnection, table: pa.Table) -> Iterator[None]:
    base.register("arriving", table)
    try:
        yield
    finally:
        base.unregister("arriving")


def _table(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = zip(*rows, strict=True)
    arrays = [
        pa.array(column, field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)
