"""Old rows are deleted, marks and sums stay, and ingestion continues meanwhile."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mjax.observe import spans
from mjax.observe.store import retention
from mjax.observe.store.batches import Batch
from mjax.observe.store.duck import DuckStore
from mjax.observe.store.ingester import Ingester
from mjax.observe.store.retention import Keep, batches
from mjax.observe.stream.collector import Collector
from mjax.observe.stream.service import IngestService
from mjax.observe.stream.sinks import open_sink
from tests.observe.store.run_files import (
    NAMES,
    STEP_NS,
    batch,
    event_bytes,
    header,
    line,
    metric_bytes,
    span_bytes,
    span_path,
)

DAY_NS = 86_400 * 10**9
OLD, NEW = "a" * 16, "b" * 16
NEW_NS = 100 * DAY_NS
"""Wall clock at the start of the new run; the old one began 5,000 s after 1970."""
KEEP = Keep(days=30.0, sums_days=None)


def spans_of(run: str, rank: int, num_lines: int = 120) -> Batch:
    head = header(rank, run=run)
    if run == NEW:
        head = spans.Header(
            run=run,
            host=head.host,
            rank=rank,
            generation=1,
            pid=1,
            wall_ns=NEW_NS,
            monotonic_ns=1_000 * STEP_NS,
            devices=(rank,),
            mesh=head.mesh,
        )
    lines = [head, *(line(n, rank) for n in range(num_lines))]
    data = b"".join(map(spans.encode, lines))
    return batch(data, f"spans/{spans.file_name(head)}", run=run)


def two_runs(store) -> None:
    """Store an old run and a new one, of three ranks each."""
    ingester = Ingester(store)
    found = [spans_of(run, rank) for run in (OLD, NEW) for rank in range(3)]
    rows = metric_bytes(range(1, 121))
    for run in (OLD, NEW):
        found.append(batch(rows, "metrics.jsonl", "metrics", run=run))
        found.append(batch(event_bytes(range(5)), "events.jsonl", "events", run=run))
    outcomes = ingester.submit(found).result(timeout=60)
    ingester.close()
    assert {outcome.verdict for outcome in outcomes} == {"stored"}


def counts(store) -> dict[str, tuple[int, int]]:
    """Return the rows of the old and of the new run by table."""

    def of(sql: str) -> tuple[int, int]:
        return tuple(store.query(sql, [run])[0][0] for run in (OLD, NEW))

    in_run = "file_id in (select file_id from files where run = ?)"
    return {
        "spans": of(f"select count(*) from spans where {in_run}"),
        "sums": of(f"select coalesce(sum(spans), 0) from phase_totals where {in_run}"),
        **{
            table: of(f"select count(*) from {table} where run = ?")
            for table in ("metrics", "events", "processes", "files")
        },
    }


def test_an_ended_run_loses_its_rows_and_keeps_its_marks_and_sums(opened):
    store = opened()
    two_runs(store)
    num = 3 * 120 * len(NAMES)
    before, marks = counts(store), sorted(store.marks(), key=lambda m: m.file_id)
    heat = sorted(store.query("select * from heat_map"))
    assert before["spans"] == before["sums"] == (num, num)
    assert list(batches(store, KEEP, NEW_NS - 80 * DAY_NS)) == []
    assert sum(batches(store, KEEP, NEW_NS + DAY_NS)) == num + 120
    after = before | {"spans": (0, num), "metrics": (0, 120)}
    assert counts(store) == after
    assert sorted(store.marks(), key=lambda m: m.file_id) == marks
    assert sorted(store.query("select * from heat_map")) == heat
    assert list(batches(store, KEEP, NEW_NS + DAY_NS)) == []


def test_sums_go_when_they_are_old_too(opened):
    store = opened()
    two_runs(store)
    num = 3 * 120 * len(NAMES)
    keep = Keep(days=30.0, sums_days=90.0)
    list(batches(store, keep, NEW_NS - 20 * DAY_NS))
    assert counts(store)["sums"] == (num, num)
    done: set = set()
    list(batches(store, keep, NEW_NS - 20 * DAY_NS, done))
    list(batches(store, keep, NEW_NS + DAY_NS, done))
    assert counts(store)["sums"] == (0, num)
    assert counts(store)["files"] == (5, 5)


@pytest.mark.parametrize("most", [30, 1_000, 10**6])
def test_batches_are_small_and_together_all_of_it(opened, monkeypatch, most):
    store = opened()
    two_runs(store)
    monkeypatch.setattr(retention, "_BATCH_ROWS", most)
    keep = Keep(days=30.0, sums_days=60.0)
    found = list(batches(store, keep, NEW_NS + DAY_NS))
    # Of a block whose steps are not all there, a batch has more of them.
    assert max(found) <= 2.5 * most
    assert sum(found) == 3 * 120 * len(NAMES) + 120 + 3 * 3 * len(NAMES)
    assert counts(store)["spans"][0] == counts(store)["metrics"][0] == 0
    assert len(found) >= sum(found) / (2.5 * most)
    assert most < 10**6 or len(found) == 3


def test_what_was_deleted_is_not_taken_again(opened):
    store = opened()
    two_runs(store)
    list(batches(store, KEEP, NEW_NS + DAY_NS))
    ingester = Ingester(store)
    again = [spans_of(OLD, rank) for rank in range(3)]
    rows = batch(metric_bytes(range(1, 121)), "metrics.jsonl", "metrics", run=OLD)
    outcomes = ingester.submit([*again, rows]).result(timeout=60)
    assert [outcome.verdict for outcome in outcomes] == ["known"] * 4
    assert counts(store)["spans"][0] == counts(store)["metrics"][0] == 0
    # Lines that a process still appends are stored, once.
    longer = spans_of(OLD, 0, 123)
    for verdict in ("stored", "known"):
        (outcome,) = ingester.submit([longer]).result(timeout=60)
        assert outcome.verdict == verdict
    ingester.close()
    rows = store.query(
        "select n, count(*) from spans s join processes p on "
        "p.file_id = s.file_id where p.run = ? group by n",
        [OLD],
    )
    assert sorted(rows) == [(n, len(NAMES)) for n in (120, 121, 122)]
    assert sum(batches(store, KEEP, NEW_NS + DAY_NS)) == 3 * len(NAMES)


def test_a_sweep_that_is_killed_goes_on_where_it_was(opened, monkeypatch):
    store = opened()
    two_runs(store)
    monkeypatch.setattr(retention, "_BATCH_ROWS", 100)
    left = 3 * 120 * len(NAMES) + 120
    for _ in range(4):
        running = batches(store, KEEP, NEW_NS + DAY_NS)
        left -= next(running) + next(running)
        running.close()
        store = opened()
        now = counts(store)
        assert now["spans"][0] + now["metrics"][0] == left
    assert sum(batches(store, KEEP, NEW_NS + DAY_NS)) == left


def test_ingestion_goes_on_between_and_during_batches(opened, monkeypatch):
    """A thread sweeps while another one ingests; both see all of their rows."""
    store = opened()
    two_runs(store)
    monkeypatch.setattr(retention, "_BATCH_ROWS", 150)
    ingester = Ingester(store)
    found: list[int] = []
    sweep = threading.Thread(
        target=lambda: found.extend(batches(store, KEEP, NEW_NS + DAY_NS))
    )
    sweep.start()
    verdicts = []
    for num in range(121, 136):
        (outcome,) = ingester.submit([spans_of(NEW, 0, num)]).result(timeout=60)
        verdicts.append(outcome.verdict)
    sweep.join()
    ingester.close()
    assert verdicts == ["stored"] * 15
    assert sum(found) == 3 * 120 * len(NAMES) + 120
    assert counts(store)["spans"] == (0, (135 + 120 + 120) * len(NAMES))


def test_compaction_keeps_every_row_and_key(opened):
    store = opened()
    two_runs(store)
    list(batches(store, Keep(days=30.0, sums_days=31.0), NEW_NS + DAY_NS))
    tables = ("spans", "heat_map", "metrics", "events", "processes", "files")
    before = {t: sorted(store.query(f"select * from {t}"), key=str) for t in tables}
    store.compact()
    for table in tables:
        found = store.query(f"select * from {table}")
        assert sorted(found, key=str) == before[table]
    ingester = Ingester(store)
    sent = [spans_of(NEW, 0), spans_of(NEW, 0, 121), spans_of(NEW, 5, 3)]
    outcomes = ingester.submit(sent).result(timeout=60)
    ingester.close()
    assert [outcome.verdict for outcome in outcomes] == ["known", "stored", "stored"]
    assert counts(store)["spans"] == (0, (3 * 120 + 1 + 3) * len(NAMES))


DIGITS = "with d(i) as (values (0),(1),(2),(3),(4),(5),(6),(7),(8),(9)) "


def add_spans(store, file_id: int, each: int = 3) -> None:
    """Add 100,000 times `each` spans of a file, behind the back of the store."""
    step = "(a.i + 10 * b.i + 100 * c.i + 1000 * d.i + 10000 * e.i)"
    rows = f"select {file_id}, {step}, f.i, {step}, 'forward', 'compute', 'host', "
    rows += f"{step} * 7919 + f.i, {step} * 7927 + 5 * f.i, null from "
    rows += ", ".join(f"d {name}" for name in "abcdef") + f" where f.i < {each}"
    with store._transaction() as base:
        base.execute(f"insert into spans {DIGITS} {rows}")


def test_room_is_used_again_and_given_back(opened):
    """DuckDB frees row groups of 122,880 rows, so there must be several."""
    store = opened()
    empty = store.size()
    add_spans(store, 1)
    store.reclaim()
    full = store.size()
    store.delete("delete from spans where file_id = ?", [1])
    store.reclaim()
    add_spans(store, 2)
    store.reclaim()
    assert store.size() - empty <= 1.2 * (full - empty)  # without reuse: twice
    add_spans(store, 3, each=1)  # at the end of the file, which so cannot be cut off
    store.delete("delete from spans where file_id = ?", [2])
    store.reclaim()
    before = store.size()
    store.compact()
    assert store.size() < before - 0.5 * (full - empty)
    assert store.query("select file_id, count(*) from spans group by 1") == [
        (3, 100_000)
    ]


def test_compaction_without_room_leaves_the_database_as_it_was(tmp_path, monkeypatch):
    store = DuckStore(str(tmp_path / "s.duckdb"))
    two_runs(store)
    before = counts(store)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"cannot be compacted .*; make room for a"):
        store.compact()
    monkeypatch.undo()
    assert counts(store) == before
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["s.duckdb"]


KILLED = """
import os, signal, sys
from pathlib import Path
from mjax.observe.store.duck import DuckStore
store = DuckStore(sys.argv[1])
if sys.argv[2] == "before":
    Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
else:
    real = Path.replace
    def replace(*names):
        real(*names)
        os.kill(os.getpid(), signal.SIGKILL)
    Path.replace = replace
store.compact()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compaction_that_is_killed_loses_nothing(tmp_path, when):
    path = tmp_path / "s.duckdb"
    store = DuckStore(str(path))
    two_runs(store)
    before = counts(store)
    store.close()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), when], timeout=60, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "s.duckdb.compact").exists() == (when == "before")
    store = DuckStore(str(path))
    assert counts(store) == before
    store.close()
    assert [found.name for found in tmp_path.iterdir()] == ["s.duckdb"]


def test_the_ingester_sweeps_and_a_collector_sends_nothing_again(tmp_path):
    """The run ended in 1970; its files are still on the host."""
    for rank in range(2):
        span_path(tmp_path, rank).write_bytes(span_bytes(rank, 60))
    said, swept = [], threading.Event()

    def say(text: str) -> None:
        said.append(text)
        swept.set()

    def service(**flags) -> IngestService:
        return IngestService(
            store=str(tmp_path / "s.duckdb"),
            listen=f"unix:{tmp_path}/s",
            **flags,
            say=say,
        )

    def collect(address: str) -> int:
        with contextlib.closing(open_sink(address, None)) as sink:
            one = Collector(tmp_path, sink, say=print)
            sent = one.round()
            assert one.is_done()
        return sent

    running = service()
    assert collect(running.address) > 0
    running.close()
    running = service(keep=KEEP, compact=True)
    assert swept.wait(60)
    while len(said) < 2:
        threading.Event().wait(0.01)
    assert "the database had " in said[0]
    assert said[1] == "840 rows of runs that ended long ago were deleted"
    assert collect(running.address) == 0
    assert running.store.query("select count(*) from spans") == [(0,)]
    assert running.store.query("select sum(spans) from heat_map") == [(840,)]
    running.close()
    assert not list(Path(tmp_path).glob("*.compact"))


def test_a_database_that_cannot_be_read_for_a_while_is_swept_later(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(retention, "_EVERY_S", 0.05)
    store = DuckStore(str(tmp_path / "store.duckdb"))
    two_runs(store)
    said, is_swept = [], threading.Event()
    store._base.close()  # as after an error of its disk

    def say(text: str) -> None:
        said.append(text)
        if "were deleted" in text:
            is_swept.set()
        elif len(said) == 1:
            store._reopen()

    sweeper = retention.Sweeper(store, KEEP, say)
    assert is_swept.wait(60)
    sweeper.close()
    store.close()
    assert said[0].startswith("deleting old rows failed: ")
    assert "cannot be read: " in said[0]
