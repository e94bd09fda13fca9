"""Beats in files: what is read from them, and which processes are silent."""

import msgspec
import pytest

from mjax.observe import beats
from mjax.observe.beats import FOLDER, Beat, encode, file_name, read, read_run
from mjax.observe.spans import Header

HEADER = Header(
    run="a",
    host="h/1",
    rank=0,
    generation=1,
    pid=1,
    wall_ns=0,
    monotonic_ns=0,
    devices=(0,),
    mesh={},
)


def beat(rank=0, n=3, **fields) -> Beat:
    generation = fields.pop("generation", 1)
    whose = msgspec.structs.replace(HEADER, rank=rank, generation=generation)
    return Beat(
        whose=whose,
        **{
            "n": n,
            "every_s": 0.2,
            "wall_ns": 0,
            "monotonic_ns": 0,
            "since_ns": 0,
            "phase": 5,
            "step": 7,
            "microstep": 0,
            "has_stepped": True,
            "entered": 40,
            "doing": "device",
            "again": n,
        }
        | fields,
    )


def write(work_dir, one: Beat):
    path = work_dir / FOLDER / file_name(one.whose)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encode(one))
    return path


def test_the_rest_of_a_longer_line_is_not_read(tmp_path):
    path = write(tmp_path, beat(stack="x" * 400))
    short = encode(beat(n=4))
    data = path.read_bytes()
    path.write_bytes(short + data[len(short) :])
    assert read(path) == beat(n=4)
    assert path.name == "h%2F1-0-1.json"


def test_a_beat_that_is_being_written_is_read_when_it_is_whole(tmp_path):
    path = write(tmp_path, beat(n=4, again=3))
    found = read(path, lambda _: path.write_bytes(encode(beat(n=5))))
    assert found == beat(n=5)


@pytest.mark.parametrize(
    ("data", "says"), [(b"{}\n", "not a beat"), (b"\xff\n", "not a beat")]
)
def test_a_file_that_is_no_beat_is_reported_and_left_out(tmp_path, data, says):
    write(tmp_path, beat(rank=1))
    path = tmp_path / FOLDER / "other-0-1.json"
    path.write_bytes(data)
    found, (problem,) = read_run(tmp_path)
    assert [*found] == [1]
    assert str(path) in problem
    assert "is not a beat" in problem


def test_a_beat_of_another_version_is_refused(tmp_path):
    one = beat()
    whose = msgspec.structs.replace(one.whose, version=9)
    path = write(tmp_path, msgspec.structs.replace(one, whose=whose))
    with pytest.raises(ValueError, match="version 9, this mjax reads 1; read it with"):
        read(path)


def test_only_the_newest_start_counts(tmp_path):
    for rank, generation in ((0, 9), (1, 9), (0, 10)):
        write(tmp_path, beat(rank=rank, generation=generation))
    found, problems = read_run(tmp_path)
    assert ([*found], problems) == ([0], [])
    assert found[0].whose.generation == 10


def test_who_does_not_beat_again_is_silent(tmp_path):
    for rank in range(4):
        write(tmp_path, beat(rank=rank, end=0 if rank == 3 else None))
    before, _ = read_run(tmp_path)
    slept_s = []

    def sleep(seconds: float) -> None:
        slept_s.append(seconds)
        if len(slept_s) == 2:
            write(tmp_path, beat(rank=0, n=4, entered=41))

    again = beats.still_beating(tmp_path, before, sleep)
    assert {rank: one.n for rank, one in again.items()} == {0: 4, 3: 3}
    assert again[0].entered == 41
    assert sum(slept_s) == pytest.approx(beats._NUM_MISSED * 0.2, abs=0.11)


def test_nobody_waits_longer_than_until_all_have_beaten(tmp_path):
    write(tmp_path, beat())
    before, _ = read_run(tmp_path)
    write(tmp_path, beat(n=4))
    slept_s = []
    assert [*beats.still_beating(tmp_path, before, slept_s.append)] == [0]
    assert slept_s == []
