"""The page reads the same data from a database as from the files that filled it."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mjax.observe import serve, spans
from mjax.observe.page import store_feed
from mjax.observe.page.file_feed import FileFeed
from mjax.observe.page.model import Key, Model
from mjax.observe.page.reports import trimmed
from mjax.observe.page.store_feed import StoreFeed, open_reader
from mjax.observe.store.base import Store
from mjax.observe.store.ingester import Ingester
from mjax.observe.stream import wire
from mjax.observe.stream.collector import Collector
from mjax.observe.stream.http_server import marks_answer
from tests.observe import page_runs
from tests.observe.page_runs import Rank, read_all
from tests.observe.store.conftest import OpenStore


class Sink:
    """An ingester without a network."""

    is_queue = False

    def __init__(self, store: Store) -> None:
        self.ingester = Ingester(store)

    def marks(self, request: wire.MarksRequest) -> wire.MarksAnswer:
        return marks_answer(self.ingester, request, 0)

    def send(self, batches, again):
        return self.ingester.submit(batches).result(timeout=60)

    def close(self) -> None:
        self.ingester.close()


@dataclasses.dataclass(kw_only=True)
class Both:
    """A work dir and a database with the same spans."""

    work_dir: Path
    store: Store
    bring: Callable[[], object]
    """Move new data of the files to the database."""


@pytest.fixture
def both(tmp_path: Path, opened: OpenStore, monkeypatch) -> Iterator[Both]:
    monkeypatch.setattr(store_feed, "_BARRIERS_S", 0.0)
    work_dir = tmp_path / "run"
    work_dir.mkdir()
    store = opened()
    sink = Sink(store)
    collector = Collector(work_dir, sink, say=lambda _: None)
    yield Both(work_dir=work_dir, store=store, bring=collector.round)
    sink.close()


def model_of(feed) -> Model:
    return read_all(feed)[0]


def assert_alike(one: Model, other: Model) -> None:
    """Compare the views."""
    assert one.processes.keys() == other.processes.keys()
    for key, process in one.processes.items():
        held = other.processes[key]
        assert process.header == held.header
        assert (process.newest_step, process.code) == (held.newest_step, held.code)
        assert process.barriers == held.barriers
    assert sorted(one.grids.phases) == sorted(other.grids.phases)
    for phase in one.grids.phases:
        first, second = (m.grids.matrix(phase, None, None) for m in (one, other))
        assert (first.ranks, first.hosts) == (second.ranks, second.hosts)
        assert first.steps == second.steps
        np.testing.assert_array_equal(first.mean_s, second.mean_s)
    told = [[each.event for each in model.events] for model in (one, other)]
    assert told[0] == told[1]
    assert one.marks() == other.marks()
    assert one.rows.copy()[0].tolist() == other.rows.copy()[0].tolist()


def test_a_run_is_the_same_in_both(both):
    ranks = page_runs.write_run(both.work_dir)
    ranks[2].event("slow_step", "step 12")
    for rank in ranks:
        rank.line(end=0)
    both.bring()
    feed = StoreFeed(both.work_dir, both.store)
    assert_alike(model_of(FileFeed(both.work_dir)), model_of(feed))


def test_a_run_that_goes_on_is_the_same_in_both(both, monkeypatch):
    monkeypatch.setattr(store_feed, "_SHARE_LINES", 8)
    mesh = {"pp": 1, "dp_replicate": 1, "dp_shard": 3, "tp": 1}
    ranks = [Rank(both.work_dir, number, mesh=mesh) for number in range(3)]
    feed, model = StoreFeed(both.work_dir, both.store), Model()
    taken = [0, 0, 0]
    for last in (5, 6, 9, 30):
        for lag, rank in enumerate(ranks):  # the last rank is two steps behind
            rank.steps(taken[lag] + 1, last - lag)
            taken[lag] = last - lag
            if last == 6:
                rank.barrier(0)
        both.bring()
        model, _ = read_all(feed, model)
        page_runs.write_rows(both.work_dir, last, last)
        begin_ns = ranks[0].now_ns  # a step may have a second line, which comes late
        late = spans.Span("eval", "eval", "host", begin_ns, begin_ns + last)
        ranks[0].line(step=last, spans=(late,))
        both.bring()
        model, _ = read_all(feed, model)
    model, _ = read_all(feed, model)
    assert_alike(model_of(FileFeed(both.work_dir)), model)


def test_starts_that_take_steps_again_are_the_same_in_both(both):
    for generation, (first, last) in enumerate([(1, 9), (5, 12), (3000, 3002)], 1):
        for number in range(2):
            rank = Rank(both.work_dir, number, generation=generation)
            rank.steps(first, last)
    both.bring()
    model = model_of(StoreFeed(both.work_dir, both.store))
    assert_alike(model_of(FileFeed(both.work_dir)), model)
    assert model.processes[Key(3, 1)].newest_step == 3002


def test_steps_are_read_again_for_all_ranks_and_for_one(both, monkeypatch):
    page_runs.write_run(both.work_dir)
    both.bring()
    of_files, of_store = FileFeed(both.work_dir), StoreFeed(both.work_dir, both.store)
    model, held = model_of(of_files), model_of(of_store)
    for most in (store_feed._HELD_LINES, 1):
        monkeypatch.setattr(store_feed, "_HELD_LINES", most)
        for key, process in model.processes.items():
            expected = trimmed(of_files, process, 4, 6)
            found = trimmed(of_store, held.processes[key], 4, 6)
            assert found.lines == expected.lines
            assert [line.step for line in found.lines][1:-1] == [4, 5, 6]
    first = Key(1, 0)
    whole = of_store.whole(held.processes[first])
    assert whole.lines == of_files.whole(model.processes[first]).lines


def test_of_several_runs_the_one_that_is_named_is_shown(both):
    Rank(both.work_dir, 0, run="old", now_ns=10**18).steps(1, 3)
    Rank(both.work_dir, 1, run="new", now_ns=2 * 10**18).steps(1, 5)
    both.bring()
    for name, run, step in ((None, "new", 5), ("old", "old", 3), ("new", "new", 5)):
        feed = StoreFeed(both.work_dir, both.store, name)
        (process,) = model_of(feed).processes.values()
        assert (process.header.run, process.newest_step) == (run, step)


def test_a_database_without_spans_is_a_run_that_has_just_begun(both):
    assert model_of(StoreFeed(both.work_dir, both.store)).processes == {}
    Rank(both.work_dir).steps(1, 2)
    both.bring()
    assert len(model_of(StoreFeed(both.work_dir, both.store)).processes) == 1


def test_a_file_of_duckdb_is_refused(tmp_path):
    with pytest.raises(ValueError, match="only be opened by its ingester"):
        open_reader(str(tmp_path / "store.duckdb"))


def test_flags_that_do_not_go_together_are_refused(tmp_path, capsys):
    base = ["--work-dir", str(tmp_path)]
    assert serve.main([*base, "--run", "a"]) == 2
    store = ["--store", "postgresql://x/y"]
    assert serve.main([*base, *store, "--spans-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "--run needs --store" in said
    assert "--spans-dir and --store" in said


def test_a_database_that_does_not_answer_is_told(tmp_path, capsys):
    store = f"postgresql:///mjax?host={tmp_path}"
    assert serve.main(["--work-dir", str(tmp_path), "--store", store]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.services
def test_a_database_without_the_schema_is_refused_and_not_changed(postgres):
    address = postgres.new_database("empty")
    with pytest.raises(ValueError, match="ingest of this mjax version"):
        open_reader(address)


@pytest.mark.services
def test_postgresql_is_read_through_a_connection_that_cannot_write(postgres, tmp_path):
    from mjax.observe.store.base import open_store

    address = postgres.new_database("read_only")
    store = open_store(address)
    Rank(tmp_path).steps(1, 3)
    sink = Sink(store)
    Collector(tmp_path, sink, say=lambda _: None).round()
    sink.close()
    store.close()
    reader = open_reader(address)
    feed = StoreFeed(tmp_path, reader)
    assert model_of(feed).processes[Key(1, 0)].newest_step == 3
    with pytest.raises(Exception, match="read-only transaction"):
        reader.query("delete from spans returning 1")
    feed.close()
