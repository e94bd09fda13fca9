"""Writing spans: what reaches the file, and when."""

import time

import pytest

from mjax.observe import spans as format_
from mjax.observe.spans import Event, Header
from mjax.run.spans import Spans

HEADER = Header(
    run="a",
    host="h",
    rank=0,
    generation=1,
    pid=1,
    wall_ns=0,
    monotonic_ns=0,
    devices=(0,),
    mesh={},
)


def lines(folder):
    found = format_.read(folder / "h-0-1.jsonl")
    assert found.problems == ()
    return found.lines


def test_what_the_host_does_tiles_its_time(tmp_path):
    spans = Spans(tmp_path, HEADER)
    begun_ns = time.monotonic_ns()
    for name in ("data", "dispatch", "metrics"):
        spans.enter(name, "host", 1)
    spans.flush()
    (line,) = lines(tmp_path)
    assert [span.name for span in line.spans] == ["data", "dispatch", "metrics"]
    ends = [span.end_ns for span in line.spans]
    assert [span.start_ns for span in line.spans[1:]] == ends[:-1]
    assert begun_ns <= line.spans[0].start_ns <= ends[-1] <= time.monotonic_ns()


def test_a_step_has_one_line_which_waits_for_its_metrics(tmp_path):
    spans = Spans(tmp_path, HEADER)
    spans.enter("data", "data", 1)
    spans.enter("data", "data", 2)
    spans.enter("device", "compute", 1)
    spans.enter("agree", "host", 2)
    spans.flush(before=2)
    (line,) = lines(tmp_path)
    assert (line.n, line.step) == (0, 1)
    assert [span.name for span in line.spans] == ["data", "device"]
    spans.close(0)
    _, second, end = lines(tmp_path)
    assert [span.name for span in second.spans] == ["data", "agree"]
    assert (second.step, end.end) == (2, 0)


def test_barriers_are_counted_and_events_written(tmp_path):
    spans, met = Spans(tmp_path, HEADER), []
    for _ in range(2):
        spans.barrier(lambda: met.append(time.monotonic_ns()))
    spans.tell(Event(time_ns=1, kind="slow_step", text="slow"))
    first, second, event = lines(tmp_path)
    assert [first.barrier, second.barrier] == [0, 1]
    assert first.spans[0].start_ns <= met[0] <= first.spans[0].end_ns
    assert event.event is not None
    assert event.event.text == "slow"


def test_what_a_full_disk_refuses_follows_later(tmp_path):
    said = []
    folder = tmp_path / "spans"
    folder.write_text("in the way")
    spans = Spans(folder, HEADER, said.append)
    for step in (1, 2):
        spans.enter("data", "data", step)
        spans.flush()
    assert len(said) == 1
    assert "h-0-1.jsonl cannot be written, training continues" in said[0]
    folder.unlink()
    spans.close(0)
    assert [line.step for line in lines(folder)] == [1, 2, -1]


def test_what_is_lost_leaves_a_gap_that_readers_see(tmp_path, monkeypatch):
    monkeypatch.setattr("mjax.run.spans._MOST_UNWRITTEN_BYTES", 400)
    folder = tmp_path / "spans"
    folder.write_text("in the way")
    spans = Spans(folder, HEADER, lambda _: None)
    for step in range(1, 10):
        spans.enter("data", "data", step)
        spans.flush()
    folder.unlink()
    spans.flush()
    spans.enter("data", "data", 10)
    spans.flush()
    found = format_.read(folder / "h-0-1.jsonl")
    assert found.lines[-1].step == 10
    assert "n is 9 after" in found.problems[0]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spans = Spans()
    spans.enter("data", "data", 1)
    spans.barrier(lambda: None)
    spans.close(0)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("close", [True, False])
def test_a_second_process_does_not_write_into_the_file_of_the_first(tmp_path, close):
    said = []
    first, second = Spans(tmp_path, HEADER), Spans(tmp_path, HEADER, said.append)
    first.flush()
    if close:
        first.close(0)
    before = (tmp_path / "h-0-1.jsonl").read_bytes()
    second.close(0)
    assert (tmp_path / "h-0-1.jsonl").read_bytes() == before
    assert "File exists" in said[0]
