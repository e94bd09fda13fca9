"""The files of spans: what is read of whole, cut and damaged ones."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.observe import spans
from mjax.observe.spans import Event, Header, Launch, Line, Span

HEADER = Header(
    run="a1",
    host="node/07",
    rank=13,
    generation=2,
    pid=4711,
    wall_ns=10**18,
    monotonic_ns=5,
    devices=(26, 27),
    mesh={"pp": 2, "tp": 14},
    launch=Launch(name="b2", generation=1),
)
LINES = (
    Line(n=0, spans=(Span("barrier", "idle", "barrier", 6, 9),), barrier=0),
    Line(n=1, step=1, spans=(Span("data", "data", "host", 10, 20),)),
    Line(n=2, event=Event(time_ns=7, kind="slow_step", text="é\n", data={"step": 1})),
    Line(n=3, end=42),
)


def write(folder: Path, header: Header = HEADER, lines=LINES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / spans.file_name(header)
    path.write_bytes(b"".join(map(spans.encode, (header, *lines))))
    return path


def test_what_is_written_is_read(tmp_path):
    path = write(tmp_path)
    assert path.name == "node%2F07-13-2.jsonl"
    found = spans.read(path)
    assert (found.header, found.lines, found.problems) == (HEADER, LINES, ())


def test_a_file_that_is_cut_anywhere_has_the_lines_before_the_cut(tmp_path):
    path = write(tmp_path)
    data = path.read_bytes()
    ends = [at for at, char in enumerate(data) if char == ord("\n")]
    for cut in range(ends[0] + 1, len(data)):
        path.write_bytes(data[:cut])
        num_whole = sum(end < cut for end in ends) - 1
        assert spans.read(path).lines == LINES[:num_whole]


def test_a_damaged_line_is_reported_with_its_number_and_left_out(tmp_path):
    path = write(tmp_path)
    rows = path.read_bytes().split(b"\n")
    rows[2] = rows[2].replace(b'"data","data"', b'"data","dada"')
    path.write_bytes(b"\n".join(rows))
    found = spans.read(path)
    assert [line.n for line in found.lines] == [0, 2, 3]
    assert f"{path}, line 3 is left out" in found.problems[0]
    assert "dada" in found.problems[0]


def test_a_line_that_is_missing_or_there_twice_is_reported(tmp_path):
    path = write(tmp_path, lines=(LINES[0], LINES[0], LINES[2]))
    found = spans.read(path)
    assert [line.n for line in found.lines] == [0, 2]
    assert "line 3 is left out: n is 0 again" in found.problems[0]
    assert "line 4: n is 2 after 0" in found.problems[1]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "line 1 is not a header of spans"),
        (b'{"format": "spans"}\n', "line 1 is not a header of spans"),
        (b"\xff\xfe\n", "line 1 is not a header of spans"),
        (
            spans.encode(HEADER).replace(b'"version":1', b'"version":9'),
            "version 9 of the format, this mjax reads 1",
        ),
    ],
)
def test_a_file_without_a_header_of_this_version_is_refused(tmp_path, header, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(header)
    with pytest.raises(ValueError, match=message):
        spans.read(path)


@given(data=st.binary(max_size=200))
def test_any_bytes_after_the_header_are_lines_or_problems(data):
    problems: list[str] = []
    lines = list(spans._lines(data, Path("a"), problems))
    whole = data.split(b"\n")[:-1]
    assert len(lines) <= len(whole)
    assert len(lines) + sum("left out" in problem for problem in problems) == len(whole)


def test_a_span_that_ends_before_it_starts_is_damage():
    line = spans.encode(Line(n=0, spans=(Span("data", "data", "host", 2, 1),)))
    with pytest.raises(ValueError, match="span data ends before it starts"):
        spans.decode_line(line)


def test_a_run_is_read_by_generation_and_rank(tmp_path):
    def with_(**fields) -> Header:
        return Header(**{**spans.msgspec.structs.asdict(HEADER), **fields})

    for rank, generation in ((10, 1), (2, 1), (1, 2)):
        write(tmp_path / "spans", with_(rank=rank, generation=generation))
    write(tmp_path / "spans", with_(host="twin", rank=2, generation=1))
    (tmp_path / "spans" / "other.jsonl").write_text("no\n")
    files, problems = spans.read_run(tmp_path)
    keys = [(found.header.generation, found.header.rank) for found in files]
    assert keys == [(1, 2), (1, 10), (2, 1)]
    assert len(problems) == 2
    assert any("twin-2-1.jsonl is left out: " in problem for problem in problems)


def test_spans_of_two_runs_in_one_folder_are_refused(tmp_path):
    write(tmp_path / "spans")
    other = Header(**{**spans.msgspec.structs.asdict(HEADER), "run": "b", "rank": 0})
    write(tmp_path / "spans", other)
    with pytest.raises(ValueError, match=r"has spans of 2 runs: \['a1', 'b'\]"):
        spans.read_run(tmp_path)


def test_a_run_without_spans_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no spans; name the work dir"):
        spans.read_run(tmp_path)
