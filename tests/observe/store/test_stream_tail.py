"""Files that grow, cut into batches."""

import gzip
from pathlib import Path

import pytest

from mjax.observe import gzipped
from mjax.observe.store import batches
from mjax.observe.store.batches import Outcome, digest
from mjax.observe.stream import tail
from mjax.observe.stream.tail import ChangedError, Tail, discover, read_batches
from tests.observe.store.run_files import metric_bytes, span_bytes, span_path


def tail_of(path: Path, kind: batches.Kind = "spans") -> Tail:
    line = tail.first_line(path)
    assert line is not None
    return Tail(path=path, source="s", kind=kind, run="r", identity=digest(line))


def move(to: Tail, batch: batches.Batch) -> None:
    """Advance past a batch that a sink has stored."""
    lines = batch.data.count(b"\n") if batch.skipped is None else 1
    to.move(
        Outcome(
            run="r",
            source="s",
            verdict="stored",
            revision=batch.revision,
            at_byte=batch.end,
            lines=batch.first_line - 1 + lines,
            tail=batch.tail,
        )
    )


def read_all(of: Tail, most: int = 3) -> list[batches.Batch]:
    found = []
    while new := read_batches(of, most):
        for batch in new:
            move(of, batch)
        found += new
    return found


@pytest.mark.parametrize("size", [300, 1_000, 7_000, 10**6])
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_batches_joined_are_the_file(tmp_path, monkeypatch, size, most, suffix):
    monkeypatch.setattr(tail, "MAX_BYTES", size)
    monkeypatch.setattr(tail, "MAX_LINES", 20)
    monkeypatch.setattr(tail, "_READ_BYTES", 2 * size)
    data = span_bytes(0, 50)
    path = tmp_path / f"f.jsonl{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    found = read_all(tail_of(path), most)
    assert found[0].start == 0
    assert found[-1].end == len(data)
    number = 1
    for batch, following in zip(found, [*found[1:], None], strict=True):
        assert following is None or following.start == batch.end
        assert batch.first_line == number
        assert len(batch.data) <= size
        if batch.skipped is None:
            assert batch.data == data[batch.start : batch.end]
            assert batch.tail == digest(batch.data.splitlines()[-1])
            assert batch.data.count(b"\n") <= 20
            number += batch.data.count(b"\n")
        else:
            line = data[batch.start : batch.end]
            assert line.count(b"\n") == 1
            assert line.endswith(b"\n")
            assert len(line) > size
            number += 1
    assert number == 52
    assert any(batch.skipped for batch in found) == (size == 300)


def test_a_line_without_an_end_waits(tmp_path):
    path = tmp_path / "f.jsonl"
    data = span_bytes(0, 3)
    path.write_bytes(data + b'{"n": 3, "ste')
    of = tail_of(path)
    (batch,) = read_all(of)
    assert batch.data == data
    with path.open("ab") as file:
        file.write(b'p": 4}\n')
    (batch,) = read_all(of)
    assert batch.data == b'{"n": 3, "step": 4}\n'
    assert batch.first_line == 5


def test_a_long_line_without_an_end_waits_too(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "MAX_BYTES", 1000)
    monkeypatch.setattr(tail, "_READ_BYTES", 1000)
    path = tmp_path / "f.jsonl"
    path.write_bytes(span_bytes(0, 1) + bytes(5000))
    of = tail_of(path)
    read_all(of)
    assert read_all(of) == []
    with path.open("ab") as file:
        file.write(b"\nafter\n")
    skipped, after = read_all(of)
    assert skipped.skipped == "the line has 5001 bytes, but at most 1000 can be sent"
    assert after.data == b"after\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"x" + data[1:],
        lambda data: data[:-3] + b"x" + data[-2:],
        lambda data: data[:-40],
        lambda data: b"",
    ],
)
def test_a_file_that_was_rewritten_is_noticed(tmp_path, change):
    path = tmp_path / "metrics.jsonl"
    data = metric_bytes(range(10))
    path.write_bytes(data)
    of = tail_of(path, "metrics")
    read_all(of)
    assert read_all(of) == []
    path.write_bytes(change(data))
    with pytest.raises(ChangedError, match="was rewritten"):
        read_all(of)


def test_a_file_that_was_replaced_by_its_copy_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(metric_bytes(range(10)))
    of = tail_of(path, "metrics")
    read_all(of)
    copy = tmp_path / "copy"
    copy.write_bytes(metric_bytes(range(11)))
    copy.replace(path)
    (batch,) = read_all(of)
    assert batch.data == metric_bytes([10])


def test_only_files_of_the_host_are_found(tmp_path):
    for rank in range(4):
        span_path(tmp_path, rank).write_bytes(span_bytes(rank, 1))
    (tmp_path / "spans" / "a%2Fb-c-7-1.jsonl").write_bytes(b"")
    (tmp_path / "spans" / "node0-0-1.jsonl.gz.tmp").write_bytes(b"")
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    assert [*discover(tmp_path, "node1")] == [
        "spans/node1-2-1.jsonl",
        "spans/node1-3-1.jsonl",
        "metrics.jsonl",
    ]
    assert "spans/a%2Fb-c-7-1.jsonl" in discover(tmp_path, "a/b-c")
    assert len(discover(tmp_path, None)) == 6


def test_spans_may_be_in_another_folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    local = tmp_path / "local"
    local.mkdir()
    (local / "node0-0-1.jsonl").write_bytes(span_bytes(0, 1))
    assert discover(tmp_path, None, local) == {
        "spans/node0-0-1.jsonl": local / "node0-0-1.jsonl",
        "metrics.jsonl": tmp_path / "metrics.jsonl",
    }


def test_a_file_that_is_being_compressed_is_there_once(tmp_path):
    path = span_path(tmp_path, 0)
    path.write_bytes(span_bytes(0, 2))
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(span_bytes(0, 2)))
    assert discover(tmp_path, None) == {"spans/node0-0-1.jsonl": path}
    path.unlink()
    assert discover(tmp_path, None) == {"spans/node0-0-1.jsonl": packed}
    assert gzipped.size_of(packed) == len(span_bytes(0, 2))
