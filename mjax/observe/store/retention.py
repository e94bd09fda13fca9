"""Delete old rows of ended runs, in small batches.

Input: a store that an ingester fills, and the number of days to keep rows. Output: the
store without older rows. A run counts as ended if none of its processes has written a
span for that many days; only whole runs expire, and runs without span files never do.
The stored size of each file, the processes and the events stay, so a file that is still
on a host is not sent again.

A batch is a range of steps, because DuckDB and PostgreSQL store rows of the same steps
together. For spans, the sums of the heat map give its size: they count the spans per 50
steps.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator

from mjax.observe.store.base import Store, StoreGoneError

_DAY_NS = 86_400 * 10**9
_BATCH_ROWS = 50_000
"""Approximate number of rows to delete in one transaction. The deletion takes about 10
ms."""
_EVERY_S = 600.0
"""Seconds between two searches for old runs. The limit is in days."""
_BLOCK_STEPS = 50
"""Steps that one row of phase_totals covers, see schema/0002.sql."""
_OF_RUN = "file_id in (select file_id from processes where run = ?)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Time for which rows of a run are kept after its last span."""

    days: float
    """Days to keep spans and rows of metrics."""
    sums_days: float | None
    """Days to keep sums of the heat map, at least `days`; None: for ever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """An expired run."""

    name: str
    has_old_sums: bool
    stored_bytes: int
    """Stored bytes of its span files."""


class Sweeper:
    """Deletes expired rows in its own thread."""

    def __init__(self, store: Store, keep: Keep, say: Callable[[str], None]) -> None:
        """Start the thread; it searches at once."""
        self._store, self._keep, self._say = store, keep, say
        self._done: set[_Run] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sweeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after the current batch, and after the space is reclaimed."""
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self._sweep()
            except StoreGoneError as error:
                self._say(f"deleting old rows failed: {error}")
            self._stop.wait(_EVERY_S)

    def _sweep(self) -> None:
        total, began_s = 0, time.monotonic()
        for num in batches(self._store, self._keep, time.time_ns(), self._done):
            total += num
            # Pause as long as the deletion took, so that the ingester can write.
            if self._stop.wait(time.monotonic() - began_s):
                break
            began_s = time.monotonic()
        if total:
            self._store.reclaim()
            self._say(f"{total} rows of runs that ended long ago were deleted")


def batches(
    store: Store, keep: Keep, now_ns: int, done: set[_Run] | None = None
) -> Generator[int]:
    """Delete expired rows; after each transaction, yield how many it deleted.

    Args:
      store: store to which an ingester may write meanwhile.
      keep: time for which rows are kept.
      now_ns: current time since 1970.
      done: runs with nothing left to delete; this function adds to them.
    Raises:
      StoreGoneError: the database is unreachable; deleted rows stay deleted.
    """
    done = set() if done is None else done
    for run in _old_runs(store, keep, now_ns):
        if run not in done:
            yield from _delete_spans(store, run.name)
            yield from _delete_metrics(store, run.name)
            if run.has_old_sums:
                yield from _delete_sums(store, run.name)
            done.add(run)


def _old_runs(store: Store, keep: Keep, now_ns: int) -> list[_Run]:
    """Return the expired runs, sorted by the wall time of their last span.

    A process without spans counts with the time of its start.
    """
    limit_ns = now_ns - round(keep.days * _DAY_NS)
    sums_ns = -math.inf
    if keep.sums_days is not None:
        sums_ns = now_ns - round(keep.sums_days * _DAY_NS)
    rows = store.query(
        "select p.run, max(coalesce(f.last_end_ns, p.monotonic_ns) - p.monotonic_ns "
        "+ p.wall_ns) as ended_ns, sum(f.at_byte) "
        "from processes p join files f on f.file_id = p.file_id group by p.run"
    )
    return [
        _Run(name=name, has_old_sums=ended_ns < sums_ns, stored_bytes=int(size))
        for name, ended_ns, size in sorted(rows, key=lambda row: row[1])
        if ended_ns < limit_ns
    ]


def _delete_spans(store: Store, run: str) -> Iterator[int]:
    if not store.query(f"select 1 from spans where {_OF_RUN} limit 1", [run]):
        return
    blocks = store.query(
        f"select block, sum(spans) from phase_totals where {_OF_RUN} group by block "
        "order by block",
        [run],
    )
    begin, held = None, 0
    for block, num in blocks:
        first = block * _BLOCK_STEPS
        if begin is not None and held + num > _BATCH_ROWS:
            yield _delete_steps(store, run, begin, first)
            begin, held = None, 0
        if num <= _BATCH_ROWS:
            begin, held = first if begin is None else begin, held + int(num)
            continue
        steps = max(1, _BLOCK_STEPS * _BATCH_ROWS // int(num))
        for step in range(first, first + _BLOCK_STEPS, steps):
            end = min(step + steps, first + _BLOCK_STEPS)
            yield _delete_steps(store, run, step, end)
    if begin is not None:
        yield _delete_steps(store, run, begin, None)


def _delete_steps(store: Store, run: str, begin: int, end: int | None) -> int:
    """Delete the spans of steps `begin` to `end` - 1; None means no end.

    Returns:
      The number of deleted rows.
    """
    if end is None:
        sql = f"delete from spans where {_OF_RUN} and step > ?"
        return store.delete(sql, [run, begin - 1])
    sql = f"delete from spans where {_OF_RUN} and step between ? and ?"
    return store.delete(sql, [run, begin, end - 1])


def _delete_metrics(store: Store, run: str) -> Iterator[int]:
    """Delete rows from the first step on; yield the number deleted in each batch."""
    while True:
        ((first,),) = store.query("select min(step) from metrics where run = ?", [run])
        if first is None:
            return
        yield store.delete(
            "delete from metrics where run = ? and step < ?", [run, first + _BATCH_ROWS]
        )


def _delete_sums(store: Store, run: str) -> Iterator[int]:
    ((num, least, most),) = store.query(
        f"select count(*), min(block), max(block) from phase_totals where {_OF_RUN}",
        [run],
    )
    if not num:
        return
    width = max(1, (most - least + 1) * _BATCH_ROWS // num)
    for block in range(least, most + 1, width):
        yield store.delete(
            f"delete from phase_totals where {_OF_RUN} and block between ? and ?",
            [run, block, block + width - 1],
        )
