"""Compressed files are read like plain ones, and compression loses nothing."""

import fcntl
import gzip
import random
import signal
import subprocess
import sys

import pytest

from mjax.observe import gzipped, spans
from mjax.observe.__main__ import main
from mjax.observe.stream.collector import Collector
from mjax.observe.stream.service import IngestService
from mjax.observe.stream.sinks import open_sink
from tests.observe.store.run_files import (
    header,
    metric_bytes,
    span_bytes,
    span_path,
)

DATA = random.Random(1).randbytes(300_000) + b"x" * 300_000


def compressed_run(work_dir, num_ranks: int = 3):
    """Write spans; all files but that of rank 0 are compressed."""
    for rank in range(num_ranks):
        path = span_path(work_dir, rank)
        path.write_bytes(span_bytes(rank, 30))
        if rank:
            gzipped.compress(path)
    (work_dir / "metrics.jsonl").write_bytes(metric_bytes(range(1, 31)))


def test_compression_keeps_every_byte_and_the_time_of_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(DATA)
    before = path.stat()
    gzipped.compress(path)
    (found,) = tmp_path.iterdir()
    assert found.name == "a.jsonl.gz"
    assert gzip.decompress(found.read_bytes()) == DATA
    assert gzipped.read(found) == (DATA, "")
    assert gzipped.size_of(found) == len(DATA)
    assert found.stat().st_mtime_ns == before.st_mtime_ns
    assert found.stat().st_mode == before.st_mode


def test_a_plain_file_counts_beside_its_compressed_one(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"plain")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"old"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"b"))
    (tmp_path / "c.jsonl.gz.tmp").write_bytes(b"half")
    found = gzipped.find(tmp_path, ".jsonl")
    assert {name: gzipped.read(path)[0] for name, path in found.items()} == {
        "a.jsonl": b"plain",
        "b.jsonl": b"b",
    }


def test_a_file_that_is_compressed_before_it_is_opened_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(DATA)
    gzipped.compress(path)
    assert gzipped.read(path) == (DATA, "")
    with pytest.raises(FileNotFoundError):
        gzipped.read(tmp_path / "b.jsonl")


@pytest.mark.parametrize("part", [0.0, 0.00001, 0.3, 0.9, 0.9999])
def test_of_a_file_that_was_cut_off_the_start_is_read(tmp_path, part):
    path = tmp_path / "a.gz"
    whole = gzip.compress(DATA)
    path.write_bytes(whole[: int(part * len(whole))])
    data, problem = gzipped.read(path)
    assert problem == ("is truncated" if part else "is empty")
    assert DATA.startswith(data)
    assert len(data) >= 0.9 * part * len(whole) - 100  # half of it does not shrink
    if part:
        with pytest.raises(OSError, match=r"truncated"), gzipped.opened(path) as file:
            file.read()


def test_of_a_damaged_file_the_start_is_read(tmp_path):
    path = tmp_path / "a.gz"
    whole = bytearray(gzip.compress(DATA))
    whole[200_000:200_100] = b"\xff" * 100
    path.write_bytes(whole)
    data, problem = gzipped.read(path)
    assert problem.startswith("is damaged: ")
    assert data
    assert data[:100_000] == DATA[: len(data[:100_000])]


def test_files_that_were_joined_are_read_whole(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(DATA) + gzip.compress(b"more") + gzip.compress(b""))
    assert gzipped.read(path) == (DATA + b"more", "")


def test_a_file_that_is_written_meanwhile_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.log"
    path.write_bytes(DATA)

    def copy(source, target, *_):
        target.write(source.read())
        with path.open("ab") as file:
            file.write(b"one line more\n")

    monkeypatch.setattr("shutil.copyfileobj", copy)
    with pytest.raises(OSError, match="it was written to while it was compressed"):
        gzipped.compress(path)
    assert [found.name for found in tmp_path.iterdir()] == ["a.log"]
    assert path.read_bytes() == DATA + b"one line more\n"


def test_two_processes_do_not_compress_one_file_at_once(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(DATA)
    with (tmp_path / "a.log.gz.tmp").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            gzipped.compress(path)
        assert path.read_bytes() == DATA
    gzipped.compress(path)  # what a killed process has left is used again
    assert [found.name for found in tmp_path.iterdir()] == ["a.log.gz"]


KILLED = """
import os, signal, sys
from pathlib import Path
from mjax.observe import gzipped
name, number = sys.argv[1], int(sys.argv[2])
calls = 0
def dying(real):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
import shutil
for owner, function in (
    (os, "open"), (shutil, "copyfileobj"), (os, "fsync"), (shutil, "copystat"),
    (Path, "replace"), (Path, "unlink"), (gzipped, "_check_unchanged"),
):
    setattr(owner, function, dying(getattr(owner, function)))
gzipped.compress(Path(name))
print(calls)
"""


def test_killed_at_any_moment_nothing_is_lost_and_nothing_doubled(tmp_path):
    """Kill before each call that changes something; then compress again."""
    number, ended = 0, False
    while not ended:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "a.log"
        path.write_bytes(DATA)
        words = [sys.executable, "-c", KILLED, str(path), str(number)]
        done = subprocess.run(words, capture_output=True, timeout=60, text=True)
        ended = done.returncode == 0
        assert ended or done.returncode == -signal.SIGKILL, done.stderr
        (found,) = gzipped.find(folder, ".log").values()
        assert gzipped.read(found) == (DATA, "")
        if not gzipped.is_compressed(found):
            gzipped.compress(found)
        assert [left.name for left in folder.iterdir()] == ["a.log.gz"]
        assert gzipped.read(folder / "a.log.gz") == (DATA, "")
    assert number > 8


def test_a_run_is_read_with_its_compressed_files(tmp_path):
    plain, some = tmp_path / "plain", tmp_path / "some"
    for rank in range(3):
        span_path(plain, rank).write_bytes(span_bytes(rank, 30))
    compressed_run(some)
    for found, expected in zip(
        *(spans.read_run(work_dir)[0] for work_dir in (some, plain)), strict=True
    ):
        assert (found.header, found.lines) == (expected.header, expected.lines)
    assert spans.read_run(some)[1] == []


def test_a_compressed_file_that_was_cut_off_is_said_and_its_start_is_read(tmp_path):
    compressed_run(tmp_path)
    path = span_path(tmp_path, 1).with_name(spans.file_name(header(1)) + ".gz")
    path.write_bytes(path.read_bytes()[:-40])
    other = span_path(tmp_path, 2).with_name(spans.file_name(header(2)) + ".gz")
    other.write_bytes(other.read_bytes()[:12])
    files, problems = spans.read_run(tmp_path)
    assert [found.header.rank for found in files] == [0, 1]
    whole, cut = files
    assert 0 < len(cut.lines) <= len(whole.lines)
    assert cut.lines == spans.read(path).lines
    assert problems == [
        f"{path} is truncated; the rest is left out",
        f"{other} is truncated; the rest is left out",
    ]


def test_a_collector_says_which_compressed_file_is_cut_off_and_sends_the_rest(tmp_path):
    compressed_run(tmp_path)
    path = span_path(tmp_path, 1).with_name(spans.file_name(header(1)) + ".gz")
    path.write_bytes(path.read_bytes()[:-40])
    said: list[str] = []
    service = IngestService(
        store=str(tmp_path / "s.duckdb"), listen=f"unix:{tmp_path}/s", say=said.append
    )
    sink = open_sink(service.address, None)
    one = Collector(tmp_path, sink, say=said.append)
    for _ in range(3):
        one.round()
        assert one.is_done()
    assert [text.split(": ")[0] for text in said] == [f"{path} cannot be read"]
    assert list(one.refused()) == [f"spans/{path.name.removesuffix('.gz')}"]
    found = service.store.query(
        "select p.rank, max(s.n) from spans s join processes p "
        "on p.file_id = s.file_id group by p.rank order by p.rank"
    )
    assert found == [(0, 29), (2, 29)]
    sink.close()
    service.close()


@pytest.mark.parametrize("command", ["ledger", "stuck", "timeline", "mfu", "heatmap"])
def test_every_command_says_the_same_of_compressed_files(tmp_path, capsys, command):
    """Also what it refuses: these spans have no barriers and no stamps."""
    said = []
    for name in ("plain", "some"):
        work_dir = tmp_path / name
        if name == "some":
            compressed_run(work_dir)
        else:
            for rank in range(3):
                span_path(work_dir, rank).write_bytes(span_bytes(rank, 30))
            (work_dir / "metrics.jsonl").write_bytes(metric_bytes(range(1, 31)))
        words = [command, "--work-dir", str(work_dir)]
        words += ["--steps", "3:5"] if command == "timeline" else []
        out = work_dir / "out.json"
        words += ["--out", str(out)] if command == "timeline" else []
        code = main(words)
        text = capsys.readouterr()
        wrote = out.read_text() if out.exists() else ""
        said.append((code, *(t.replace(str(work_dir), "") for t in (*text, wrote))))
    assert said[0] == said[1]
    assert "/spans has no spans" not in said[0][2]
