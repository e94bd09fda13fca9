"""Rows in either database: each is stored once, however often it is sent."""

import dataclasses
import json
import sys

import pytest

from mjax.observe import spans
from mjax.observe.store.base import (
    ConflictError,
    StoreGoneError,
    migrate,
    open_store,
)
from mjax.observe.store.batches import Batch, Outcome, digest
from mjax.observe.store.ingester import Ingester
from tests.observe.store.run_files import (
    NAMES,
    batch,
    event_bytes,
    header,
    line,
    metric_bytes,
    span_bytes,
)

FIELDS = "p.rank, s.n, s.i, s.step, s.name, s.kind, s.stream, s.start_ns, s.end_ns"
ALL_SPANS = (
    f"select {FIELDS} from spans s join processes p on p.file_id = s.file_id "
    "order by p.rank, s.n, s.i"
)


def rows_of(rank: int, num_lines: int) -> list[tuple]:
    """Return what the table should hold, from the writer's side."""
    return [
        (rank, n, i, n + 1, *span)
        for n in range(num_lines)
        for i, span in enumerate(line(n, rank).spans)
    ]


def spans_of(rank: int, num_lines: int, generation: int = 1) -> Batch:
    source = f"spans/{spans.file_name(header(rank, generation))}"
    return batch(span_bytes(rank, num_lines, generation), source)


def cut(whole: Batch, begin: int, end: int) -> Batch:
    """Return lines `begin` to `end` of a batch, counted from 0."""
    lines = whole.data.splitlines(keepends=True)
    start = len(b"".join(lines[:begin]))
    data = b"".join(lines[begin:end])
    return dataclasses.replace(
        whole,
        start=start,
        end=start + len(data),
        first_line=begin + 1,
        tail=digest(lines[end - 1][:-1]),
        data=data,
    )


def send(store, *batches: Batch) -> list[Outcome]:
    """Ingest by an ingester that has just started."""
    ingester = Ingester(store)
    try:
        return ingester.submit(batches).result(timeout=60)
    finally:
        ingester.close()


def test_every_field_of_every_span_arrives(opened):
    store = opened()
    (found,) = send(store, spans_of(3, 20))
    assert found.verdict == "stored"
    assert store.query(ALL_SPANS) == rows_of(3, 20)
    (process,) = store.query(
        "select run, generation, rank, host, pid, wall_ns, monotonic_ns, devices, mesh "
        "from processes"
    )
    head = header(3)
    assert process[:-2] == (
        *(head.run, head.generation, head.rank, head.host, head.pid),
        *(head.wall_ns, head.monotonic_ns),
    )
    assert json.loads(process[-2]) == [3]
    assert json.loads(process[-1]) == head.mesh


def test_what_is_sent_again_is_recognised(opened):
    store = opened()
    whole = spans_of(0, 20)
    assert [o.verdict for o in send(store, whole, whole)] == ["stored", "known"]
    assert [o.verdict for o in send(store, cut(whole, 0, 7), whole)] == ["known"] * 2
    assert store.query(ALL_SPANS) == rows_of(0, 20)


def test_batches_that_overlap_are_joined(opened):
    store = opened()
    whole = spans_of(0, 20)
    send(store, cut(whole, 0, 9))
    found = send(store, cut(whole, 4, 15), cut(whole, 2, 21))
    assert [o.verdict for o in found] == ["stored", "stored"]
    assert found[-1].at_byte == len(whole.data)
    assert found[-1].lines == 21
    assert store.query(ALL_SPANS) == rows_of(0, 20)


def test_a_batch_after_a_gap_is_not_taken_and_the_place_is_told(opened):
    store = opened()
    whole = spans_of(0, 20)
    (first,) = send(store, cut(whole, 0, 5))
    (gap,) = send(store, cut(whole, 6, 21))
    assert gap.verdict == "gap"
    assert (gap.at_byte, gap.lines, gap.tail) == (first.at_byte, 5, first.tail)
    assert store.query(ALL_SPANS) == rows_of(0, 4)


@pytest.mark.services
def test_a_conflict_names_the_expected_and_the_stored_position(postgres):
    store = open_store(postgres.new_database("conflict"))
    whole = spans_of(0, 20)
    late = Ingester(store)
    try:
        (first,) = late.submit([cut(whole, 0, 5)]).result(timeout=60)
        (second,) = send(store, cut(whole, 5, 9))
        expected = (
            f"up to byte {first.at_byte} of revision {first.revision}, "
            f"got byte {second.at_byte} of revision {second.revision}: another ingester"
        )
        with pytest.raises(ConflictError, match=expected):
            late.submit([cut(whole, 5, 7)]).result(timeout=60)
    finally:
        late.close()
        store.close()


def test_a_corrupt_line_is_named_and_left_out(opened):
    store = opened()
    lines = span_bytes(0, 6).splitlines(keepends=True)
    lines[2] = b'{"n": 1, "spans": [["half\n'
    source = f"spans/{spans.file_name(header(0))}"
    (found,) = send(store, batch(b"".join(lines), source))
    assert found.verdict == "stored"
    assert store.query(ALL_SPANS) == [row for row in rows_of(0, 6) if row[1] != 1]
    ((number, reason),) = store.query("select line, reason from bad_lines")
    assert number == 3
    assert "truncated" in reason


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (spans.Line(n=2**31), "does not fit into 32 bits"),
        (spans.Line(n=3, step=-(2**40)), "does not fit into 32 bits"),
        (spans.Line(n=3, end=2**40), "does not fit into 32 bits"),
        (spans.Line(n=3, barrier=2**31), "does not fit into 32 bits"),
        (
            spans.Line(n=3, spans=(spans.Span("a", "host", "host", 1, 2**63),)),
            "do not fit into 64 bits",
        ),
        (spans.Line(n=2), "n is 2 again"),
    ],
)
def test_a_line_that_no_table_holds_does_not_stop_the_rest(opened, bad, reason):
    store = opened()
    if bad.barrier is not None:
        bad = dataclasses_replace(bad)
    lines = [header(0), *(line(n) for n in range(3)), bad, line(4)]
    source = f"spans/{spans.file_name(header(0))}"
    send(store, batch(b"".join(map(spans.encode, lines)), source))
    assert store.query(ALL_SPANS) == [row for row in rows_of(0, 5) if row[1] != 3]
    ((number, said),) = store.query("select line, reason from bad_lines")
    assert number == 5
    assert reason in said


def dataclasses_replace(bad: spans.Line) -> spans.Line:
    """Give the line of a barrier its span."""
    span = spans.Span("barrier", "idle", "host", 1, 2)
    return spans.Line(n=bad.n, spans=(span,), barrier=bad.barrier)


def test_names_that_a_database_refuses_are_escaped(opened):
    store = opened()
    names = ["a\0b", "tab\tand\\n", "\ud800", "ä\n½"]
    found = tuple(spans.Span(name, "host", "host", 1, 2) for name in names[:2])
    text = spans.encode(header(0)) + spans.encode(spans.Line(n=0, spans=found))
    source = f"spans/{spans.file_name(header(0))}"
    send(store, batch(text, source))
    stored = store.query("select name from spans order by i")
    assert stored == [("a\\x00b",), ("tab\tand\\n",)]
    events = [
        {"time_ns": 1, "source": "d", "kind": name, "severity": "info", "text": name}
        for name in names
    ]
    data = "".join(json.dumps(event) + "\n" for event in events).encode()
    (outcome,) = send(store, batch(data, "events.jsonl", "events"))
    assert outcome.verdict == "stored"
    kinds = store.query("select kind from events order by at_byte")
    bad = store.query("select count(*) from bad_lines")[0][0]
    assert len(kinds) + bad == len(names)
    assert ("ä\n½",) in kinds


def test_the_end_of_a_process_is_kept(opened):
    store = opened()
    data = span_bytes(0, 3) + spans.encode(spans.Line(n=3, end=42))
    send(store, batch(data, f"spans/{spans.file_name(header(0))}"))
    assert store.query("select exit_code, last_n from files") == [(42, 3)]


def test_a_second_file_of_the_same_process_is_refused(opened):
    store = opened()
    send(store, spans_of(0, 5))
    impostor = dataclasses.replace(spans_of(0, 9), source="other/node0-0-1.jsonl")
    (found,) = send(store, impostor)
    assert found.verdict == "refused"
    assert "rank 0 of generation 1" in found.reason
    assert store.query(ALL_SPANS) == rows_of(0, 5)


def test_a_file_under_the_name_of_another_is_refused(opened):
    store = opened()
    wrong = dataclasses.replace(spans_of(1, 5), source="spans/node0-0-1.jsonl")
    (found,) = send(store, wrong)
    assert found.verdict == "refused"
    assert "its header belongs to a file named node0-1-1.jsonl" in found.reason
    assert store.query("select count(*) from files") == [(0,)]


def test_rows_that_a_restart_rewrites_are_replaced(opened):
    store = opened()
    old, new = metric_bytes(range(1, 11)), metric_bytes(range(1, 8), loss=5.0)
    send(store, batch(old, "metrics.jsonl", "metrics"))
    again = batch(new, "metrics.jsonl", "metrics", revision=1)
    stale = batch(old, "metrics.jsonl", "metrics")
    assert [o.verdict for o in send(store, again, stale)] == ["stored", "known"]
    assert store.query("select step, loss from metrics order by step") == [
        (step, 5.0 + step) for step in range(1, 8)
    ]


def test_rows_before_and_after_a_rewriting_may_share_a_transaction(opened):
    store = opened()
    old, new = metric_bytes(range(1, 11)), metric_bytes(range(1, 8), loss=5.0)
    send(
        store,
        batch(old, "metrics.jsonl", "metrics"),
        batch(new, "metrics.jsonl", "metrics", revision=1),
    )
    assert store.query("select step, loss from metrics order by step") == [
        (step, 5.0 + step) for step in range(1, 8)
    ]


def test_events_of_a_file_that_was_rewritten_are_not_doubled(opened):
    store = opened()
    first = batch(event_bytes(range(5)), "events.jsonl", "events")
    longer = batch(event_bytes(range(8)), "events.jsonl", "events", revision=1)
    send(store, first)
    send(store, longer)
    found = store.query("select time_ns, text from events order by at_byte")
    assert found == [(number, f"event {number}") for number in range(8)]


def test_an_event_in_the_spans_is_an_event_of_its_process(opened):
    store = opened()
    event = spans.Event(time_ns=7, kind="slow-step", text="stacks", data={"p99": 2.0})
    data = spans.encode(header(3)) + spans.encode(spans.Line(n=0, event=event))
    send(store, batch(data, f"spans/{spans.file_name(header(3))}"))
    assert store.query(
        "select time_ns, source, host, rank, generation, kind, text, data from events"
    ) == [(7, "process", "node1", 3, 1, "slow-step", "stacks", '{"p99": 2.0}')]


def test_the_heat_map_adds_up_to_the_spans(opened):
    store = opened()
    send(store, *(spans_of(rank, 120) for rank in range(3)))
    send(store, spans_of(0, 130))
    for group in ("rank, phase", "host, kind", "first_step"):
        sums = store.query(
            f"select {group}, sum(spans), sum(seconds) from heat_map "
            f"group by {group} order by {group}"
        )
        exact = group.replace("first_step", "50 * (step / 50)")
        if "first_step" in group:
            exact = "step - step % 50"
        expected = store.query(
            f"select {exact}, sum(spans), sum(seconds) from step_phases "
            f"group by {exact} order by {exact}"
        )
        assert [row[:-1] for row in sums] == [row[:-1] for row in expected]
        # Sums of other orders: a few roundings of float64.
        assert [row[-1] for row in sums] == pytest.approx(
            [row[-1] for row in expected], rel=1e-12
        )
    assert store.query("select sum(spans) from heat_map")[0][0] == 370 * len(NAMES)


def test_times_of_the_host_are_on_its_wall_clock(opened):
    store = opened()
    send(store, spans_of(2, 1))
    head = header(2)
    expected = [
        (span.name, span.start_ns - head.monotonic_ns + head.wall_ns)
        for span in line(0, 2).spans
        if span.stream == "host"
    ]
    assert (
        store.query("select phase, start_wall_ns from host_times order by 2")
        == expected
    )


def test_a_store_of_version_1_is_migrated_with_all_its_rows(opened):
    store = opened(to=1)
    assert store.query("select version from schema_version") == [(1,)]
    values = "7, 'r', 's', 'spans', 'd', 0, 10, 2, 1, 5, null, 't'"
    old_file = f"insert into files values ({values})"
    old_spans = [
        f"insert into spans values (7, {n}, 0, {step}, 'data', 'data', 'host', {n}, "
        f"{n + 100}, null)"
        for n, step in enumerate([-1, 49, 50, 99, 100])
    ]
    execute(store, [old_file, *old_spans])
    store = opened()
    assert store.query("select version from schema_version") == [(2,)]
    assert store.query("select block, spans, ns from phase_totals order by 1") == [
        (-1, 1, 100),
        (0, 1, 100),
        (1, 2, 200),
        (2, 1, 100),
    ]
    assert store.query("select count(*) from spans") == [(5,)]
    (mark,) = store.marks()
    assert (mark.file_id, mark.at_byte, mark.last_n) == (7, 10, 1)
    # It goes on as a store that was made at this version.
    send(store, spans_of(0, 5))
    assert store.query("select max(file_id) from files") == [(8,)]


def test_a_migration_that_fails_leaves_the_old_version(opened, monkeypatch):
    store = opened(to=1)
    execute(store, ["create table phase_totals (in_the_way integer)"])
    with pytest.raises(Exception, match="phase_totals"):
        opened()
    store = opened(to=1)
    assert store.query("select version from schema_version") == [(1,)]
    assert store.query("select count(*) from phase_totals") == [(0,)]


def test_a_store_of_a_newer_mjax_is_refused(opened):
    execute(opened(), ["update schema_version set version = 99"])
    with pytest.raises(ValueError, match="has schema version 99, this mjax supports 2"):
        opened()


def execute(store, statements: list[str]) -> None:
    """Change a store behind its back."""
    with store._transaction() as base:
        for statement in statements:
            base.execute(statement)


def test_what_was_written_before_an_error_is_taken_back(opened):
    store = opened()

    def fail_after_a_row() -> None:
        with store._transaction() as base:
            base.execute("insert into schema_version values (9)")
            raise KeyError

    with pytest.raises(KeyError):
        fail_after_a_row()
    assert store.query("select version from schema_version") == [(2,)]


def test_a_value_that_the_database_refuses_stops_its_batch_alone(opened, monkeypatch):
    store = opened()
    good, bad, other = spans_of(0, 5), spans_of(1, 5), spans_of(2, 5)
    write = store.write

    def refuse(changes):
        if any(row[3] == 1 for row in changes.processes):
            raise ValueError("no such value")
        write(changes)

    monkeypatch.setattr(store, "write", refuse)
    found = send(store, good, bad, other)
    assert [o.verdict for o in found] == ["stored", "refused", "stored"]
    assert store.query(ALL_SPANS) == rows_of(0, 5) + rows_of(2, 5)


def test_a_commit_whose_answer_is_lost_is_not_repeated(opened, monkeypatch):
    store = opened()
    ingester = Ingester(store)
    write = store.write

    def write_and_lose(changes):
        write(changes)
        monkeypatch.undo()
        raise StoreGoneError("the answer is lost")

    monkeypatch.setattr(store, "write", write_and_lose)
    with pytest.raises(StoreGoneError):
        ingester.submit([spans_of(0, 5)]).result(timeout=60)
    (found,) = ingester.submit([spans_of(0, 9)]).result(timeout=60)
    ingester.close()
    assert found.verdict == "stored"
    assert store.query(ALL_SPANS) == rows_of(0, 9)


def test_a_duckdb_that_another_process_owns_is_refused(tmp_path):
    import subprocess

    path = tmp_path / "store.duckdb"
    code = (
        f"import duckdb, sys; c = duckdb.connect({str(path)!r}); print(1, flush=True)"
    )
    command = [sys.executable, "-c", f"{code}; sys.stdin.read()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ValueError, match="another process has it open: stop"):
            open_store(str(path))
        other.communicate()


def test_a_file_that_is_no_database_is_refused(tmp_path):
    path = tmp_path / "store.duckdb"
    path.write_text("no database" * 1000)
    with pytest.raises(ValueError, match=r"cannot be opened .*; move it away"):
        open_store(str(path))


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"path or postgresql.*got mysql://x"):
        open_store("mysql://x")


def test_a_migration_knows_only_versions_up_to_its_own():
    with pytest.raises(ValueError, match="has schema version 3, this mjax supports 2"):
        migrate(3, lambda text: None, dialect="duckdb", name="x")
