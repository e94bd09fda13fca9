"""The page reads each line appended to the files of a run once."""

import gzip

import pytest

from mjax.observe import spans
from mjax.observe.page import file_feed
from mjax.observe.page.file_feed import FileFeed, Places
from mjax.observe.page.model import Key, Model
from mjax.observe.spans import Line
from tests.observe import page_runs
from tests.observe.page_runs import Rank, read_all


@pytest.fixture
def following(tmp_path, monkeypatch):
    """A feed that looks for new files each time."""
    monkeypatch.setattr(file_feed, "_FIND_S", 0.0)
    monkeypatch.setattr(file_feed, "_FIND_SHARE", 0.0)
    return FileFeed(tmp_path)


def steps_of(shares) -> list[int]:
    return [line.step for share in shares for _, of in share.lines for line in of]


def test_appended_lines_come_once_and_in_order(tmp_path, following):
    rank = Rank(tmp_path)
    seen = []
    model = Model()
    for first in (1, 4, 7):
        rank.steps(first, first + 2)
        model, shares = read_all(following, model)
        seen += steps_of(shares)
    assert seen == list(range(1, 10))
    assert model.processes[Key(1, 0)].newest_step == 9


def test_a_line_without_its_end_waits_until_it_is_whole(tmp_path, following):
    rank = Rank(tmp_path)
    rank.steps(1, 1)
    whole = spans.encode(Line(n=1, step=2, spans=()))
    rank.append(whole[:10])
    model, shares = read_all(following)
    assert steps_of(shares) == [1]
    rank.append(whole[10:])
    model, shares = read_all(following, model)
    assert steps_of(shares) == [2]
    assert model.problems == []


def test_a_line_that_cannot_be_read_is_told_with_its_place(tmp_path, following):
    rank = Rank(tmp_path)
    rank.steps(1, 2)
    rank.append(b'{"n": 2, "step": \xff}\n[]\n')
    rank.num_lines = 4
    rank.steps(3, 3)
    model, shares = read_all(following)
    assert steps_of(shares) == [1, 2, 3]
    found = [problem for problem in model.problems if "left out" in problem]
    assert [str(rank.path) + f", line {n} " in found[n - 4] for n in (4, 5)] == [
        True
    ] * 2


def test_a_folder_in_the_place_of_the_rows_is_told_once(tmp_path, following):
    Rank(tmp_path).steps(1, 1)
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    model, _ = read_all(following)
    model, _ = read_all(following, model)
    problem = f"{path} is a folder, not a file; move it away"
    assert model.problems.count(problem) == 1


def test_a_line_with_an_old_number_is_left_out(tmp_path, following):
    rank = Rank(tmp_path)
    rank.steps(1, 3)
    rank.num_lines = 1
    rank.steps(9, 9)
    model, shares = read_all(following)
    assert steps_of(shares) == [1, 2, 3]
    assert "n is 1 again" in model.problems[0]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"mesh": {"pp": 10**9, "tp": 10**9}}, "the sizes of the mesh"),
        ({"mesh": {"pp": 0}}, "the sizes of the mesh"),
        ({"devices": (7,)}, "rank 1 with devices [7]"),
        ({"devices": (-1,)}, "rank 1 with devices [-1]"),
        ({"rank": 9}, "rank 9 with devices"),
        (
            {"wall_ns": 2**63},
            f"the clocks of rank 1 show impossible times: wall {2**63}",
        ),
    ],
)
def test_a_header_that_cannot_be_true_is_left_out(tmp_path, following, wrong, why):
    Rank(tmp_path, 0, mesh={"dp_shard": 2}).steps(1, 2)
    fields = {"mesh": {"dp_shard": 2}, "devices": (1,), "host": "wrong"} | wrong
    Rank(tmp_path, fields.pop("rank", 1), **fields).steps(1, 2)
    model, _ = read_all(following)
    assert [*model.processes] == [(1, 0)]
    assert "wrong-" in model.problems[0]
    assert f"left out: {why}" in model.problems[0]


@pytest.mark.parametrize(
    "text",
    [
        b'{"n":0,"step":99999999999}',
        b'{"n":0,"step":1,"spans":[["a","host","host",1,18446744073709551615]]}',
        b'{"n":0,"step":1,"spans":[["a","host","host",-9223372036854775808,1]]}',
        b'{"n":0,"spans":[["barrier","idle","barrier",0,9223372036854775807]],'
        b'"barrier":0}',
    ],
)
def test_numbers_that_no_array_holds_are_left_out(tmp_path, following, text):
    rank = Rank(tmp_path)
    rank.append(text + b"\n")
    rank.num_lines = 1
    rank.steps(2, 3)
    model, shares = read_all(following)
    assert steps_of(shares) == [2, 3]
    assert "line 2 is left out" in model.problems[0]


def test_a_file_without_a_header_is_left_out(tmp_path, following):
    Rank(tmp_path).steps(1, 2)
    wrong = tmp_path / spans.FOLDER / "node7-7-1.jsonl"
    wrong.write_text("{}\n")
    model, _ = read_all(following)
    assert [*model.processes] == [(1, 0)]
    assert str(wrong) in model.problems[0]


def test_of_two_runs_in_a_folder_the_one_that_began_last_is_shown(tmp_path, following):
    Rank(tmp_path, 0, run="old", now_ns=10**18).steps(1, 9)
    Rank(tmp_path, 1, run="new", now_ns=2 * 10**18).steps(1, 3)
    model, _ = read_all(following)
    assert {of.header.run for of in model.processes.values()} == {"new"}
    assert model.problems[0].startswith("1 files of spans are of other runs (old)")


def test_a_second_file_of_a_rank_is_left_out(tmp_path, following):
    Rank(tmp_path, 0, host="node0").steps(1, 2)
    Rank(tmp_path, 0, host="other").steps(1, 2)
    model, shares = read_all(following)
    assert steps_of(shares) == [1, 2]
    assert "other-0-1.jsonl is left out: node0-0-1.jsonl is also of rank 0" in str(
        model.problems
    )


def test_a_file_that_comes_later_is_found(tmp_path, following):
    Rank(tmp_path, 0).steps(1, 2)
    model, _ = read_all(following)
    Rank(tmp_path, 1).steps(1, 2)
    model, _ = read_all(following, model)
    assert sorted(model.processes) == [(1, 0), (1, 1)]


def test_spans_that_were_rewritten_are_told_and_kept(tmp_path, following):
    rank = Rank(tmp_path)
    rank.steps(1, 3)
    model, _ = read_all(following)
    rank.path.rename(tmp_path / "moved")
    rank = Rank(tmp_path)
    rank.steps(1, 9)
    model, shares = read_all(following, model)
    assert steps_of(shares) == []
    assert "no longer holds the data" in model.problems[0]
    assert model.processes[Key(1, 0)].newest_step == 3


def test_a_file_that_is_compressed_meanwhile_goes_on(tmp_path, following):
    rank = Rank(tmp_path)
    rank.steps(1, 3)
    model, _ = read_all(following)
    rank.steps(4, 5)
    packed = rank.path.with_name(rank.path.name + ".gz")
    packed.write_bytes(gzip.compress(rank.path.read_bytes()))
    rank.path.unlink()
    seen = []
    for _ in range(2):
        model, shares = read_all(following, model)
        seen += steps_of(shares)
    assert seen == [4, 5]


def test_rows_that_a_restart_takes_out_are_gone(tmp_path, following):
    Rank(tmp_path).steps(1, 2)
    page_runs.write_rows(tmp_path, 1, 10)
    model, _ = read_all(following)
    assert len(model.rows) == 10
    path = tmp_path / "metrics.jsonl"
    kept = path.read_bytes().splitlines(keepends=True)[:6]
    path.with_suffix(".tmp").write_bytes(b"".join(kept))
    path.with_suffix(".tmp").replace(path)
    page_runs.write_rows(tmp_path, 7, 7, loss=9.0)
    model, _ = read_all(following, model)
    steps, columns = model.rows.copy()
    assert steps.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert columns["loss"][-1] == 9.0
    assert model.rows.revision == 1


def test_events_of_all_sources_are_ordered_by_time(tmp_path, following):
    rank = Rank(tmp_path, now_ns=10**18)
    rank.steps(1, 5)
    rank.event("slow_step", "step 5")
    page_runs.write_event(tmp_path, time_ns=10**18 + 1, text="first")
    page_runs.write_event(tmp_path, time_ns=10**18 + 10**12, text="last")
    model, _ = read_all(following)
    told = [(each.event.text, each.event.host) for each in model.events]
    assert told == [("first", None), ("step 5", "node0"), ("last", None)]


def test_a_large_run_is_read_in_shares(tmp_path, monkeypatch, following):
    monkeypatch.setattr(file_feed, "_SHARE_BYTES", 1000)
    for number in range(4):
        Rank(tmp_path, number).steps(1, 6)
    model, shares = read_all(following)
    assert len(shares) > 2
    assert [share.is_behind for share in shares].count(False) == 1
    assert sorted(steps_of(shares)) == sorted([*range(1, 7)] * 4)
    assert model.is_complete


def test_lines_of_chosen_steps_are_read_again(tmp_path, following):
    rank = Rank(tmp_path)
    rank.barrier(0)
    rank.steps(1, 300)
    model, _ = read_all(following)
    process = model.processes[Key(1, 0)]
    found = [line.step for line in following.lines(process, 100, 102)]
    assert {100, 101, 102} <= set(found)
    assert found == sorted(found)
    assert len(found) < 10
    whole = following.whole(process)
    assert whole.lines == spans.read(rank.path).lines


@pytest.mark.parametrize("num", [10, 5_000, 20_000])
def test_few_places_of_a_file_are_enough_to_find_its_steps(num):
    places = Places()
    for step in range(1, num + 1):
        places.add(100 * step, step)
    assert len(places._steps) <= file_feed._MOST_PLACES + 1
    for first in range(1, num, max(1, num // 50)):
        start, end = places.between(first, first + 2)
        assert start <= 100 * first
        assert end is None or end > 100 * min(num, first + 2)
        assert (num * 100 if end is None else end) - start < 100 * 40


def test_nothing_is_written(tmp_path, following):
    page_runs.write_run(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    read_all(following)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
