"""A collector before sinks that fail in every way: each row arrives once."""

import contextlib
import random
from pathlib import Path

import pytest

from mjax.observe import spans
from mjax.observe.store.base import StoreGoneError
from mjax.observe.store.batches import Batch, Outcome
from mjax.observe.store.duck import DuckStore
from mjax.observe.store.ingester import Ingester
from mjax.observe.stream import quota, tail, wire
from mjax.observe.stream.collector import Collector
from mjax.observe.stream.http_server import marks_answer
from mjax.observe.stream.sinks import SinkGoneError
from tests.observe.store.run_files import (
    event_bytes,
    header,
    line,
    metric_bytes,
    span_bytes,
    span_path,
)


class DirectSink:
    """An ingester without a network; `fault` is the next fault."""

    is_queue = False

    def __init__(self) -> None:
        self.store = DuckStore(":memory:")
        self.ingester = Ingester(self.store)
        self.fault = ""

    def marks(self, request: wire.MarksRequest) -> wire.MarksAnswer:
        if self.fault == "gone":
            raise SinkGoneError("gone")
        return marks_answer(self.ingester, request, 0)

    def send(self, batches: list[Batch], again: int) -> list[Outcome]:
        if self.fault == "gone":
            raise SinkGoneError("gone")
        body = wire.encode_batches(batches)
        taken = wire.decode_batches(body)
        if self.fault == "half":
            taken = taken[: len(taken) // 2]
        found: list[Outcome] = []
        if taken:
            try:
                found = self.ingester.submit(taken).result(timeout=60)
            except StoreGoneError as error:
                raise SinkGoneError(str(error)) from error
        if self.fault in ("half", "no answer"):
            raise SinkGoneError("the answer is lost")
        return found

    def forget(self) -> None:
        """Lose the database."""
        self.ingester.close()
        self.store.close()
        self.store = DuckStore(":memory:")
        self.ingester = Ingester(self.store)

    def close(self) -> None:
        self.ingester.close()
        self.store.close()


class QueueSink(DirectSink):
    """A queue before the ingester that loses, repeats and reorders messages."""

    is_queue = True

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[tuple[bytes, int]] = []
        self.ids: set[tuple] = set()

    def marks(self, request: wire.MarksRequest) -> wire.MarksAnswer:
        if self.fault == "gone":
            raise SinkGoneError("no ingester")
        return marks_answer(self.ingester, request, len(self.queue))

    def send(self, batches: list[Batch], again: int) -> list[Outcome]:
        if self.fault == "gone":
            raise SinkGoneError("gone")
        for batch in batches:
            name = (again, batch.source, batch.revision, batch.start, batch.end)
            if name not in self.ids:
                self.ids.add(name)
                self.queue.append((wire.encode_batches([batch]), 0))
        if self.fault in ("half", "no answer"):
            raise SinkGoneError("the answer is lost")
        return [
            Outcome(
                run=b.run,
                source=b.source,
                verdict="stored",
                revision=b.revision,
                at_byte=b.end,
                lines=b.first_line - 1 + b.data.count(b"\n"),
                tail=b.tail,
            )
            for b in batches
        ]

    def work(self, generator: random.Random, *, is_bad: bool) -> None:
        """Ingest the queued messages, with losses, repetitions and another order."""
        if is_bad:
            generator.shuffle(self.queue)
            self.queue = [m for m in self.queue if generator.random() > 0.2]
            self.queue += self.queue[:2]
        waiting, self.queue = self.queue, []
        for body, tries in waiting:
            found = self.ingester.submit(wire.decode_batches(body)).result(timeout=60)
            if any(outcome.verdict == "gap" for outcome in found) and tries < 3:
                self.queue.append((body, tries + 1))


@pytest.fixture
def sink():
    made = DirectSink()
    yield made
    made.close()


@pytest.fixture
def said() -> list[str]:
    return []


def collector(work_dir: Path, sink, said: list[str], **more) -> Collector:
    made = Collector(work_dir, sink, say=said.append, name="c", **more)
    made._asked_at = -1e9
    return made


def written(work_dir: Path) -> list[tuple]:
    """Read the files as the package's reader does."""
    files, _ = spans.read_run(work_dir)
    return sorted(
        (f.header.generation, f.header.rank, found.n, i, found.step, *span)
        for f in files
        for found in f.lines
        for i, span in enumerate(found.spans)
    )


def stored(sink: DirectSink) -> list[tuple]:
    return sorted(
        sink.store.query(
            "select p.generation, p.rank, s.n, s.i, s.step, s.name, s.kind, s.stream, "
            "s.start_ns, s.end_ns from spans s join processes p using (file_id)"
        )
    )


def make_run(work_dir: Path, num_lines: int = 10) -> None:
    for rank in range(3):
        span_path(work_dir, rank).write_bytes(span_bytes(rank, num_lines))
    (work_dir / "metrics.jsonl").write_bytes(metric_bytes(range(1, num_lines)))
    (work_dir / "events.jsonl").write_bytes(event_bytes(range(4)))


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_all_files_of_a_run_arrive(tmp_path, sink, said):
    make_run(tmp_path)
    one = collector(tmp_path, sink, said)
    one.round()
    assert one.is_done()
    assert stored(sink) == written(tmp_path)
    assert sink.store.query("select count(*), sum(step) from metrics") == [(9, 45)]
    assert sink.store.query("select count(distinct run) from files") == [(1,)]
    assert sink.store.query("select count(*) from events") == [(4,)]
    assert said == []


def test_a_new_collector_goes_on_where_the_last_one_was(tmp_path, sink, said):
    make_run(tmp_path)
    collector(tmp_path, sink, said).round()
    append(span_path(tmp_path, 1), spans.encode(line(10, 1)))
    size = len(spans.encode(line(10, 1)))
    assert collector(tmp_path, sink, said).round() == size
    assert stored(sink) == written(tmp_path)


@pytest.mark.parametrize("fault", ["gone", "no answer", "half"])
def test_after_a_fault_of_the_sink_nothing_is_lost_or_doubled(
    tmp_path, sink, said, fault
):
    make_run(tmp_path)
    one = collector(tmp_path, sink, said)
    one.round()
    for number in range(10, 15):
        append(span_path(tmp_path, 0), spans.encode(line(number)))
    append(tmp_path / "events.jsonl", event_bytes([9]))
    sink.fault = fault
    with pytest.raises(SinkGoneError):
        one.round()
    append(span_path(tmp_path, 0), spans.encode(line(15)))
    sink.fault = ""
    one.round()
    assert one.is_done()
    assert stored(sink) == written(tmp_path)
    assert sink.store.query("select count(*) from events") == [(5,)]


def test_a_database_that_was_lost_is_filled_again(tmp_path, sink, said):
    make_run(tmp_path)
    one = collector(tmp_path, sink, said)
    one.round()
    path = span_path(tmp_path, 0)
    quota.carry_out(quota.Action(path=path, kind="compress"))
    sink.forget()
    one._asked_at = -1e9
    one.round()
    assert one.is_done()
    expected = [row for row in stored(sink) if row[1] == 0]
    assert len(expected) == 10 * len(line(0).spans)
    assert sink.store.query("select count(*) from events") == [(4,)]


def test_a_lost_database_is_noticed_at_the_next_batch_too(tmp_path, sink, said):
    make_run(tmp_path)
    one = collector(tmp_path, sink, said)
    one.round()
    one._asked_at = 1e18
    sink.forget()
    append(span_path(tmp_path, 0), spans.encode(line(10)))
    one.round()
    rank_0 = [row for row in written(tmp_path) if row[1] == 0]
    assert stored(sink) == rank_0


def test_data_that_waits_in_a_queue_is_not_sent_again(tmp_path, said):
    """The ingester is slow: the store does not have yet what was sent."""
    sink = QueueSink()
    make_run(tmp_path)
    one = collector(tmp_path, sink, said)
    sent = one.round()
    num_messages = len(sink.queue)
    assert sent > 0
    assert num_messages > 0
    for _ in range(3):
        one._asked_at = -1e9
        assert one.round() == 0
        assert not one.is_done()
    assert len(sink.queue) == num_messages
    sink.work(random.Random(0), is_bad=False)
    assert one.is_done()
    assert stored(sink) == written(tmp_path)
    sink.close()


def test_data_that_a_queue_has_lost_is_sent_again(tmp_path, said):
    sink = QueueSink()
    make_run(tmp_path)
    one = collector(tmp_path, sink, said)
    one.round()
    sink.queue.clear()
    one._asked_at = -1e9
    assert one.round() > 0
    sink.work(random.Random(0), is_bad=False)
    assert one.is_done()
    assert stored(sink) == written(tmp_path)
    sink.close()


def test_rows_that_are_rewritten_in_the_file_are_rewritten_in_the_store(
    tmp_path, sink, said
):
    make_run(tmp_path)
    one = collector(tmp_path, sink, said)
    one.round()
    path = tmp_path / "metrics.jsonl"
    path.with_suffix(".tmp").write_bytes(metric_bytes(range(1, 6), 3.0))
    path.with_suffix(".tmp").replace(path)
    one.round()
    append(path, metric_bytes([6], 4.0))
    one.round()
    rows = sink.store.query("select step, loss from metrics order by step")
    assert rows == [*((step, 3.0 + step) for step in range(1, 6)), (6, 10.0)]
    # A collector that starts now finds all data stored.
    other = collector(tmp_path, sink, said)
    assert other.round() == 0
    assert other.is_done()


def test_spans_that_are_rewritten_are_refused_and_named_once(tmp_path, sink, said):
    make_run(tmp_path)
    collector(tmp_path, sink, said).round()
    before = stored(sink)
    span_path(tmp_path, 0).write_bytes(span_bytes(0, 10).replace(b"data", b"atad"))
    append(span_path(tmp_path, 0), spans.encode(line(10)))
    one = collector(tmp_path, sink, said)
    one.round()
    one.round()
    assert len(said) == 1
    assert "node0-0-1.jsonl is no longer sent: its content differs" in said[0]
    assert [*one.refused()] == ["spans/node0-0-1.jsonl"]
    assert stored(sink) == before


def test_a_file_that_vanishes_is_named(tmp_path, sink, said):
    make_run(tmp_path)
    one = collector(tmp_path, sink, said)
    one.round()
    size = span_path(tmp_path, 2).stat().st_size
    span_path(tmp_path, 2).unlink()
    one.round()
    assert said == [f"{span_path(tmp_path, 2)} is gone; {size} bytes of it were sent"]


def test_a_file_without_a_header_is_named_and_left_out(tmp_path, sink, said):
    make_run(tmp_path)
    wrong = tmp_path / "spans" / "node9-9-1.jsonl"
    wrong.write_bytes(b'{"format": "other"}\n')
    newer = tmp_path / "spans" / "node9-8-1.jsonl"
    newer.write_bytes(
        spans.encode(header(8)).replace(b'"version":1', b'"version":2') + b"\n"
    )
    begun = tmp_path / "spans" / "node9-7-1.jsonl"
    begun.write_bytes(b'{"format": "mjax-sp')
    one = collector(tmp_path, sink, said)
    one.round()
    one.round()
    assert len(said) == 2
    assert "line 1 is not a header of spans" in said[1]
    assert "version 2 of the format, this mjax reads 1" in said[0]
    assert sorted(one.refused()) == ["spans/node9-8-1.jsonl", "spans/node9-9-1.jsonl"]
    assert sink.store.query("select count(*) from processes") == [(3,)]


def test_rows_of_two_runs_need_a_name(tmp_path, sink, said):
    make_run(tmp_path)
    other = span_path(tmp_path, 5)
    other.write_bytes(spans.encode(header(5, run="b" * 16)))
    one = collector(tmp_path, sink, said)
    one.round()
    assert any("there are spans of 2 runs" in text and "--run" in text for text in said)
    assert "metrics.jsonl" in one.refused()
    named = collector(tmp_path, sink, said, run="b" * 16)
    named.round()
    assert named.is_done()
    assert not named.refused()
    assert sink.store.query("select distinct run from metrics") == [("b" * 16,)]


def test_without_spans_it_says_that_rows_need_a_run(tmp_path, sink, said):
    (tmp_path / "metrics.jsonl").write_bytes(metric_bytes(range(3)))
    one = collector(tmp_path, sink, said)
    one.round()
    assert "metrics.jsonl" in one.refused()
    assert "spans of 0 runs (none); give its run with --run" in said[0]


def test_only_files_that_are_stored_and_closed_may_be_deleted(tmp_path, sink, said):
    make_run(tmp_path)
    append(span_path(tmp_path, 0), spans.encode(spans.Line(n=10, end=0)))
    append(span_path(tmp_path, 1), b'{"n": 10, "st')
    span_path(tmp_path, 1, generation=2).write_bytes(span_bytes(1, 3, generation=2))
    sink.fault = "gone"
    one = collector(tmp_path, sink, said)
    with pytest.raises(SinkGoneError):
        one.round()
    assert one.spool() == []
    sink.fault = ""
    one.round()
    append(span_path(tmp_path, 2), spans.encode(line(10, 2)))
    sink.fault = "gone"
    with pytest.raises(SinkGoneError):
        one.round()
    one._asked_at, sink.fault = -1e9, ""
    one._ask([*one._tails.values()])
    found = {s.path.name: (s.is_closed, s.is_stored) for s in one.spool()}
    assert found == {
        "node0-0-1.jsonl": (True, True),  # its last line is there
        "node0-1-1.jsonl": (True, True),  # what is cut off will not be finished
        "node0-1-2.jsonl": (False, True),
        "node1-2-1.jsonl": (False, False),
    }


def test_the_backlog_is_told(tmp_path, sink, said):
    make_run(tmp_path)
    one = collector(tmp_path, sink, said)
    one.round()
    append(span_path(tmp_path, 0), b"x" * 77)
    one._asked_at = -1e9
    one.round()
    assert sink.ingester.behind()["c"][0] == 77


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [DirectSink, QueueSink])
def test_through_any_faults_each_row_arrives_once(tmp_path, monkeypatch, make, seed):
    """Faults of the sink, the queue, the collector and the database, in any order."""
    monkeypatch.setattr(tail, "MAX_LINES", 3)
    generator = random.Random(seed)
    sink = make()
    said: list[str] = []
    counts = dict.fromkeys(range(3), 0)
    for rank in counts:
        span_path(tmp_path, rank).write_bytes(spans.encode(header(rank)))
    one = collector(tmp_path, sink, said)
    for _ in range(40):
        for rank in counts:
            for _ in range(generator.randrange(4)):
                text = spans.encode(line(counts[rank], rank))
                counts[rank] += 1
                append(span_path(tmp_path, rank), text)
        sink.fault = generator.choice(["", "", "", "gone", "no answer", "half"])
        one._asked_at = generator.choice([-1e9, 1e18])
        with contextlib.suppress(SinkGoneError):
            one.round()
        if isinstance(sink, QueueSink):
            sink.work(generator, is_bad=generator.random() < 0.5)
        if generator.random() < 0.2:
            one = collector(tmp_path, sink, said)
        if generator.random() < 0.05:
            sink.forget()
    sink.fault = ""
    for _ in range(30):
        one._asked_at = -1e9
        one.round()
        if isinstance(sink, QueueSink):
            sink.work(generator, is_bad=False)
        if one.is_done():
            break
    else:
        pytest.fail("it does not come to an end")
    assert stored(sink) == written(tmp_path)
    assert len(stored(sink)) == sum(counts.values()) * len(line(0).spans)
    sink.close()
