"""PostgreSQL behind NATS, killed and emptied; make test-services."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mjax.observe import spans
from mjax.observe.stream.collector import Collector
from mjax.observe.stream.service import IngestService
from mjax.observe.stream.sinks import SinkGoneError, open_sink
from tests.observe.store.run_files import (
    event_bytes,
    line,
    metric_bytes,
    span_bytes,
    span_path,
)
from tests.observe.store.services import Nats, Postgres

pytestmark = pytest.mark.services
_WAIT_S = 60

Start = Callable[[], IngestService]


@pytest.fixture
def start(postgres: Postgres, nats: Nats, tmp_path: Path) -> Iterator[Start]:
    """Give a function that starts the ingester again; a clean database each test."""
    address = postgres.new_database(tmp_path.name.replace("-", "_").lower())
    running: list[IngestService] = []

    def start_one() -> IngestService:
        for old in running:
            old.close()
        running[:] = [
            IngestService(
                store=address,
                listen=f"unix:{tmp_path}/s",
                nats=nats.address,
                say=lambda text: None,
            )
        ]
        return running[0]

    yield start_one
    for old in running:
        old.close()


@pytest.fixture
def collector(tmp_path: Path, nats: Nats) -> Iterator[Collector]:
    sink = open_sink(nats.address, None)
    made = Collector(tmp_path, sink, say=lambda text: None, name="c")
    yield made
    sink.close()


def make_run(work_dir: Path) -> None:
    for rank in range(3):
        span_path(work_dir, rank).write_bytes(span_bytes(rank, 40))
    (work_dir / "metrics.jsonl").write_bytes(metric_bytes(range(1, 41)))
    (work_dir / "events.jsonl").write_bytes(event_bytes(range(9)))


def append(work_dir: Path, n: int) -> None:
    for rank in range(3):
        with span_path(work_dir, rank).open("ab") as file:
            file.write(spans.encode(line(n, rank)))


def ship(collector: Collector) -> None:
    """Send until all is stored."""
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(SinkGoneError):
            collector.round()
            if collector.is_done():
                return
        time.sleep(0.1)
    pytest.fail("not all is stored")


def check(service: IngestService, work_dir: Path) -> None:
    """Compare every span with the files, and count the rest."""
    files, problems = spans.read_run(work_dir)
    assert problems == []
    expected = sorted(
        (file.header.rank, found.n, i, found.step, *span)
        for file in files
        for found in file.lines
        for i, span in enumerate(found.spans)
    )
    stored = service.store.query(
        "select p.rank, s.n, s.i, s.step, s.name, s.kind, s.stream, s.start_ns, "
        "s.end_ns from spans s join processes p on p.file_id = s.file_id"
    )
    assert sorted(stored) == expected
    assert service.store.query("select count(*), sum(step) from metrics") == [(40, 820)]
    assert service.store.query("select count(*), sum(time_ns) from events") == [(9, 36)]
    exact = service.store.query("select count(*), sum(end_ns - start_ns) from spans")
    assert service.store.query("select sum(spans), sum(ns) from phase_totals") == exact


def test_all_rows_come_through_queue_and_database(start, collector, tmp_path):
    make_run(tmp_path)
    service = start()
    ship(collector)
    check(service, tmp_path)


def test_without_an_ingester_the_collector_waits(start, collector, tmp_path):
    make_run(tmp_path)
    with pytest.raises(SinkGoneError, match=r"no ingester answers at nats://127.0.0.1"):
        collector.round()
    service = start()
    ship(collector)
    check(service, tmp_path)


def test_while_the_ingester_is_gone_the_queue_takes_batches(start, collector, tmp_path):
    make_run(tmp_path)
    service = start()
    ship(collector)
    service.close()
    collector._asked_at = 1e18
    append(tmp_path, 40)
    assert collector.round() > 0
    service = start()
    ship(collector)
    check(service, tmp_path)


def test_after_a_kill_of_the_queue_all_rows_are_there_once(
    start, collector, tmp_path, nats
):
    make_run(tmp_path)
    service = start()
    for n in range(40, 44):
        append(tmp_path, n)
        with contextlib.suppress(SinkGoneError):
            collector.round()
        nats.kill()
        nats.start()
    ship(collector)
    check(service, tmp_path)


def test_a_queue_that_lost_its_messages_is_filled_again(
    start, collector, tmp_path, nats
):
    make_run(tmp_path)
    service = start()
    ship(collector)
    service.close()
    collector._asked_at = 1e18
    append(tmp_path, 40)
    collector.round()
    nats.kill()
    nats.forget()
    nats.start()
    collector._asked_at = -1e9
    service = start()
    ship(collector)
    check(service, tmp_path)


def test_after_kills_of_the_database_all_rows_are_there_once(
    start, collector, tmp_path, postgres
):
    make_run(tmp_path)
    service = start()
    for n in range(40, 43):
        append(tmp_path, n)
        with contextlib.suppress(SinkGoneError):
            collector.round()
        postgres.kill()
        postgres.start()
    ship(collector)
    check(service, tmp_path)


def test_two_ingesters_on_one_database_do_not_double_rows(
    start, collector, tmp_path, postgres
):
    make_run(tmp_path)
    service = start()
    other = IngestService(
        store=service.store.address,
        listen=f"unix:{tmp_path}/other",
        say=lambda text: None,
    )
    sinks = [open_sink(one.address, None) for one in (service, other)]
    made = [Collector(tmp_path, sink, say=lambda text: None) for sink in sinks]
    for n in range(40, 46):
        append(tmp_path, n)
        for one in made:
            with contextlib.suppress(SinkGoneError):
                one.round()
    for one in made:
        ship(one)
    check(service, tmp_path)
    for sink in sinks:
        sink.close()
    other.close()
