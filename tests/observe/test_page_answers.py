"""What the page answers about a run that was written."""

import dataclasses
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from mjax.observe import heatmap, ledger, schedule, spans, step_times, stuck
from mjax.observe.page import (
    answers,
    assets,
    file_feed,
    model,
    ranks,
    reports,
    timeline,
)
from mjax.observe.page.answers import Page
from mjax.observe.page.app import make_app
from mjax.observe.page.file_feed import FileFeed
from mjax.observe.page.guard import POLICY
from mjax.run.metrics import read_rows
from tests.observe import page_runs
from tests.observe.page_runs import Rank

TOKEN = "0123456789abcdef"
HOSTILE = '<script>alert("1")</script>\u2028\x00é'


@dataclasses.dataclass(kw_only=True)
class Viewer:
    """Asks a page."""

    client: TestClient
    page: Page

    def get(self, path: str, status: int = 200) -> Any:
        """Return the JSON of an address of the API."""
        answer = self.client.get(f"/api/{path}")
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        return json.loads(answer.text, parse_constant=_refuse)

    def heat(self, path: str) -> tuple[dict[str, Any], np.ndarray]:
        """Return header and cells."""
        answer = self.client.get(f"/api/heat{path}")
        assert answer.status_code == 200, answer.text
        size = int.from_bytes(answer.content[:4], "little")
        header = json.loads(answer.content[4 : 4 + size])
        cells = np.frombuffer(answer.content[4 + size :], np.uint8)
        return header, cells.reshape(len(header["ranks"]), len(header["steps"]))

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the page has seen something."""
        until = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < until, "the page does not see it"
            time.sleep(0.01)

    def version(self) -> int:
        """Return how often the page has seen a change."""
        return self.page.seen().version


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture
def opened(tmp_path, monkeypatch) -> Iterator[Callable[[], Viewer]]:
    """Open pages on tmp_path."""
    monkeypatch.setattr(file_feed, "_FIND_S", 0.0)
    monkeypatch.setattr(file_feed, "_FIND_SHARE", 0.0)
    monkeypatch.setattr(answers, "_STATE_S", 0.0)
    pages = []

    def open_page(work_dir: Path = tmp_path) -> Viewer:
        page = Page(
            FileFeed(work_dir), name=work_dir.name, work_dir=work_dir, poll_s=0.01
        )
        pages.append(page)
        app = make_app(page, token=TOKEN, names=frozenset({"testserver"}))
        client = TestClient(app, headers={"authorization": f"Bearer {TOKEN}"})
        viewer = Viewer(client=client, page=page)
        viewer.until(lambda: page.seen().is_complete)
        return viewer

    yield open_page
    for page in pages:
        page.close()


def test_the_run_is_described(tmp_path, opened):
    page_runs.write_run(tmp_path)
    found = opened().get("run")
    assert (found["run"], found["name"]) == ("run-a", tmp_path.name)
    assert found["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "tp": 1}
    assert [each["rank"] for each in found["ranks"]] == [0, 1, 2, 3]
    assert found["ranks"][2]["host"] == "node2"
    assert found["ranks"][2]["devices"] == [2]
    assert (found["generation"], found["newest_step"]) == (1, 12)
    assert found["config"] == {"steps": 12}
    assert found["problems"] == []


def test_a_rank_without_a_file_is_told(tmp_path, opened):
    page_runs.write_run(tmp_path, ranks=(0, 1, 3))
    (problem,) = opened().get("run")["problems"]
    assert problem.startswith("1 of 4 devices have no file of spans: 2;")


class _SlowFeed(FileFeed):
    """Reads nothing until it may."""

    may_read = threading.Event()

    def poll(self) -> model.Share:
        return super().poll() if self.may_read.is_set() else model.Share(is_behind=True)


def test_an_answer_says_whether_the_run_has_been_read(tmp_path):
    page_runs.write_run(tmp_path)
    page = Page(_SlowFeed(tmp_path), name="run", work_dir=tmp_path, poll_s=0.01)
    app = make_app(page, token=TOKEN, names=frozenset({"testserver"}))
    client = TestClient(app, headers={"authorization": f"Bearer {TOKEN}"})
    viewer = Viewer(client=client, page=page)
    names = ("run", "metrics")
    try:
        assert [viewer.get(name)["is_complete"] for name in names] == [False, False]
        _SlowFeed.may_read.set()
        viewer.until(lambda: page.seen().is_complete)
        assert [viewer.get(name)["is_complete"] for name in names] == [True, True]
        assert viewer.get("metrics")["steps"] != []
    finally:
        page.close()


def test_a_run_that_has_just_begun_says_that_there_is_nothing_yet(tmp_path, opened):
    (tmp_path / "config.json").write_text("{}")
    viewer = opened()
    assert "no spans yet" in viewer.get("run")["problems"][0]
    for name in ("stragglers", "stuck", "ledger", "whatif"):
        assert viewer.get(name)["problem"] == "no spans have been read yet"
    assert viewer.get("timeline")["problems"] == ["no spans have been read yet"]
    assert viewer.get("metrics")["steps"] == []
    assert viewer.heat("")[0]["phases"] == []
    assert viewer.get("state")["ranks"] == []
    assert viewer.get("events") == {"events": [], "next": 0}
    Rank(tmp_path).steps(1, 3)
    viewer.until(lambda: viewer.get("run")["newest_step"] == 3)
    assert viewer.get("run")["problems"] == []


def test_a_run_that_starts_after_the_page_is_shown(tmp_path, opened):
    work_dir = tmp_path / "run"
    viewer = opened(work_dir)
    (problem,) = viewer.get("run")["problems"]
    assert problem.startswith(f"the work dir {work_dir} does not exist yet")
    assert viewer.get("metrics")["steps"] == []
    page_runs.write_run(work_dir)
    viewer.until(lambda: viewer.get("run")["newest_step"] == 12)
    viewer.until(lambda: len(viewer.get("metrics")["steps"]) == 12)
    assert viewer.get("run")["problems"] == []
    shutil.rmtree(work_dir)
    viewer.until(lambda: viewer.get("run")["problems"] != [])
    assert "is gone" in viewer.get("run")["problems"][0]


def test_rows_are_thinned_and_have_marks(tmp_path, opened):
    (rank,) = page_runs.write_run(tmp_path, ranks=(0,))
    page_runs.write_rows(tmp_path, 13, 1000)
    nonfinite = {"eval_loss": None, "nonfinite": {"eval_loss": "nan"}}
    page_runs.write_rows(tmp_path, 1001, 1001, loss=99.0, **nonfinite)
    rank.event("slow_step", "step 12 took 9 s")
    found = opened().get("metrics?points=100")
    assert found["rows"] == 1001
    assert len(found["steps"]) <= 100
    assert found["columns"]["loss"][found["steps"].index(1001)] == 99.0
    assert "mfu" not in found["columns"]  # this run knows no peak
    assert found["marks"] == [
        {"step": 12, "kind": "warning", "text": "slow_step: step 12 took 9 s"},
        {"step": 1001, "kind": "error", "text": "eval_loss is nan"},
    ]
    assert found["num_marks"] == {"warning": 1, "error": 1}
    assert found["mfu_report"]["unit"] == "tokens/s"


def test_every_curve_has_the_values_of_the_rows(tmp_path, opened):
    page_runs.write_run(tmp_path, ranks=(0,))
    page_runs.write_rows(tmp_path, 13, 40, mfu=0.3, lr=2e-3)
    page_runs.write_rows(tmp_path, 41, 41, eval_loss=1.5, eval_bits_per_byte=2.25)
    written = read_rows(tmp_path / "metrics.jsonl")
    found = opened().get("metrics")
    assert found["steps"] == [row["step"] for row in written]
    names = {name for row in written for name in row} - {"step"}
    assert found["columns"] == {
        name: [row.get(name) for row in written] for name in names
    }


def test_saves_evaluations_and_restarts_are_marked_at_their_steps(tmp_path, opened):
    first = Rank(tmp_path)
    first.steps(1, 4)
    begin_ns = first.now_ns
    span = spans.Span
    first.line(step=5, spans=(span("eval", "eval", "host", begin_ns, begin_ns + 9),))
    first.line(step=5, spans=(span("save", "ckpt", "host", begin_ns, begin_ns + 9),))
    Rank(tmp_path, generation=2, host="node9").steps(6, 7)
    page_runs.write_rows(tmp_path, 1, 7)
    marks = [(mark["step"], mark["kind"]) for mark in opened().get("metrics")["marks"]]
    assert marks == [(5, "eval"), (5, "save"), (6, "restart")]


def test_the_heat_map_has_the_seconds_of_each_rank_and_step(tmp_path, opened):
    files = page_runs.write_run(tmp_path, ranks=(0, 1, 2))
    files[1].steps(13, 13, slower_ms=15)
    viewer = opened()
    header, cells = viewer.heat("?phase=backward")
    assert header["ranks"] == [0, 1, 2]
    assert header["hosts"] == ["node0", "node1", "node2"]
    assert header["steps"] == list(range(1, 14))
    assert (header["least"], header["most"]) == (40.0, 50.0)
    assert cells[1, 12] == 254
    assert cells[0, 12] == cells[2, 12] == 255
    assert (cells[:, :12] == 0).all()
    part, inside = viewer.heat("?phase=data&from=3&to=5")
    assert part["steps"] == [3, 4, 5]
    assert inside.shape == (3, 3)


def test_the_timeline_has_spans_in_columns_on_one_clock(tmp_path, opened):
    page_runs.write_run(tmp_path)
    found = opened().get("timeline?from=3&to=4&ranks=0,2")
    assert [(row["rank"], row["stream"]) for row in found["rows"]] == [
        *((0, "host"), (0, "step"), (0, "device:0")),
        *((2, "host"), (2, "step"), (2, "device:2")),
    ]
    assert all(row["bound_us"] is not None for row in found["rows"])
    columns = found["spans"]
    assert len({len(values) for values in columns.values()}) == 1
    named = [found["names"][at] for at in columns["name"]]
    steps = [
        (columns["start_us"][i], columns["end_us"][i], columns["step"][i])
        for i, name in enumerate(named)
        if name == "step"
    ]
    assert steps == [(0.0, 1e5, 3)] * 2 + [(1e5, 2e5, 4)] * 2
    assert {found["kinds"][at] for at in columns["kind"]} >= {"compute", "data", "dp"}
    assert found["groups"]["dp"] == [[0, 1, 2, 3]]
    assert found["cut"] is False


def write_pipeline(work_dir):
    """Write four ticks of two stages; stage 0 works in the first and the last one."""
    mesh = {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
    for number in (0, 1):
        rank = Rank(work_dir, number, mesh=mesh, now_ns=10**18)
        rank.barrier(0)
        ticks = [
            spans.Span("tick", "compute", f"device:{number}", begin, begin + 10)
            for begin in range(rank.now_ns, rank.now_ns + 40, 10)
        ]
        rank.line(step=1, spans=tuple(ticks))


def test_pipelines_have_slots_and_arrows_from_each_to_the_one_that_uses_it(
    tmp_path, opened
):
    write_pipeline(tmp_path)
    known = schedule.Schedule(
        run="run-a",
        generation=1,
        name="1f1b",
        idle="skip",
        num_stages=2,
        num_chunks=1,
        num_microbatches=1,
        forward=[[[0, 0], None], [None, [0, 0]], [None, None], [None, None]],
        backward=[[None, None], [None, None], [None, [0, 0]], [[0, 0], None]],
    )
    path = schedule.path_of(tmp_path, 1)
    path.parent.mkdir()
    path.write_text(schedule.to_json(known))
    found = opened().get("timeline?from=1&to=1")
    columns, rows = found["spans"], found["rows"]

    def told(span):
        name = found["names"][columns["name"][span]]
        return rows[columns["row"][span]]["stream"], name, columns["start_us"][span]

    begin_us = columns["start_us"][columns["name"].index(found["names"].index("tick"))]
    assert [(told(a), told(b)) for a, b in found["arrows"]] == [
        (
            ("device:0 forward", "F0a", begin_us),
            ("device:1 forward", "F0a", pytest.approx(begin_us + 0.01)),
        ),
        (
            ("device:1 backward", "B0a", pytest.approx(begin_us + 0.02)),
            ("device:0 backward", "B0a", pytest.approx(begin_us + 0.03)),
        ),
    ]
    idle = found["kinds"].index("idle")
    slots = {told(n)[1] for n, kind in enumerate(columns["kind"]) if kind == idle}
    assert {"F idle", "B idle"} <= slots


def test_a_pipeline_without_a_recorded_schedule_has_no_arrows_and_says_why(
    tmp_path, opened
):
    write_pipeline(tmp_path)
    found = opened().get("timeline?from=1&to=1")
    assert found["arrows"] == []
    assert any("has not recorded its schedule" in each for each in found["problems"])


def test_a_timeline_of_too_many_spans_is_cut_and_says_so(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(timeline, "MOST_SPANS", 20)
    page_runs.write_run(tmp_path)
    found = opened().get("timeline?from=1&to=3&ranks=0,1")
    assert found["cut"] is True
    assert len(found["spans"]["row"]) == 20
    assert len(found["rows"]) == 3


def test_steps_that_no_one_has_taken_are_a_problem_and_no_error(tmp_path, opened):
    page_runs.write_run(tmp_path)
    viewer = opened()
    found = viewer.get("timeline?from=100&to=101")
    assert found["problems"] == ["no rank has spans of steps 100 to 101; choose others"]
    assert (
        "none of these ranks" in viewer.get("timeline?from=1&ranks=77")["problems"][0]
    )


def test_files_that_are_gone_are_a_problem_and_what_was_read_stays(tmp_path, opened):
    page_runs.write_run(tmp_path)
    viewer = opened()
    shutil.rmtree(tmp_path)
    assert "cannot be read" in viewer.get("timeline?from=2&to=3")["problems"][0]
    assert "cannot be read" in viewer.get("stragglers")["problem"]
    assert viewer.heat("?phase=data")[1].shape == (4, 12)
    viewer.until(lambda: any("is gone" in p for p in viewer.get("run")["problems"]))


def test_a_clock_that_has_jumped_has_no_bound(tmp_path, opened):
    ranks = page_runs.write_run(tmp_path)
    ranks[1].now_ns += 3600 * 10**9
    for rank in ranks:
        rank.steps(13, 13)
        rank.barrier(2)
    found = opened().get("timeline?from=13&to=13")
    bounds = {row["rank"]: row["bound_us"] for row in found["rows"]}
    assert bounds[1] is None
    assert bounds[2] is not None
    assert any("clock has jumped" in problem for problem in found["problems"])


def test_reports_are_those_of_the_commands(tmp_path, opened):
    page_runs.write_run(tmp_path)
    viewer = opened()
    files, _ = spans.read_run(tmp_path)
    times = step_times.step_times(files, 1000)
    expected = heatmap.as_json(times, heatmap.report_of(times))
    found = viewer.get("stragglers")
    assert found["problem"] is None
    assert {name: found[name] for name in expected} == json.loads(json.dumps(expected))
    found = viewer.get("ledger")
    expected = ledger.as_json(ledger.ledger(tmp_path))
    assert {name: found[name] for name in expected} == expected
    found = viewer.get("stuck")
    expected = stuck.report(tmp_path).to_json()
    for one in (found, expected):
        for seen in one["seen"]:
            del seen["age_s"]
    assert {name: found[name] for name in expected} == expected
    found = viewer.get("whatif")
    assert found["problem"] is None
    assert found["steps"] == [3, 12]


def test_a_replay_of_too_many_devices_is_not_begun(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(reports, "MOST_REPLAYED", 100)
    page_runs.write_run(tmp_path)
    problem = opened().get("whatif")["problem"]
    assert "a replay for each of 4 devices takes too long" in problem


def test_a_slow_host_is_named(tmp_path, opened):
    now_ns = time.time_ns() - 10**12
    mesh = {"pp": 1, "dp_replicate": 1, "dp_shard": 8, "tp": 1}
    for number in range(8):
        rank = Rank(tmp_path, number, mesh=mesh, now_ns=now_ns)
        rank.steps(1, 60, slower_ms=15 if number == 5 else 0)
    (outlier,) = opened().get("stragglers")["outliers"]
    assert (outlier["host"], outlier["ranks"]) == ("node5", [5])
    assert set(outlier) >= {"phase", "cause", "ratio", "cost", "confidence"}
    assert outlier["since_step"] < 60


def test_a_rank_has_its_groups_and_its_neighbours(tmp_path, opened):
    mesh = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "tp": 2}
    for number in range(8):
        Rank(tmp_path, number, mesh=mesh).steps(1, 2)
    found = opened().get("rank?rank=3")
    assert found["coordinates"] == [
        {"pp": 0, "dp_replicate": 0, "dp_shard": 1, "tp": 1}
    ]
    assert found["groups"] == {"tp": [2, 3], "dp": [1, 3], "pp": [3, 7]}
    assert (found["sends_to"], found["receives_from"]) == ([7], [])
    assert (found["last"]["step"], found["last"]["kind"]) == (2, "compute")


def test_a_rank_that_was_killed_has_an_error_and_its_stacks(tmp_path, opened):
    rank = Rank(tmp_path, now_ns=time.time_ns() - 60 * 10**9)
    rank.header = spans.msgspec.structs.replace(
        rank.header, monotonic_ns=time.monotonic_ns() - 60 * 10**9
    )
    rank.path.write_bytes(spans.encode(rank.header))
    rank.now_ns = rank.header.monotonic_ns
    rank.steps(1, 2)
    folder = tmp_path / "stacks"
    folder.mkdir()
    (folder / f"{rank.path.stem}.txt").write_text(f"Timeout (0:00:01)!\n{HOSTILE}")
    viewer = opened()
    found = viewer.get("rank?rank=0")
    assert "its process is gone" in found["error"]
    assert found["stacks"] == f"Timeout (0:00:01)!\n{HOSTILE}"
    assert viewer.get("run")["live"] is False
    rank.line(end=1)
    viewer.until(lambda: viewer.get("state")["ranks"][0]["ended"] == 1)
    assert viewer.get("rank?rank=0")["error"] == "it has ended with exit code 1"


def test_a_run_is_live_until_its_process_is_killed(tmp_path, opened):
    with subprocess.Popen(["sleep", "60"]) as process:
        ago_ns = time.monotonic_ns() - 60 * 10**9
        rank = Rank(tmp_path, pid=process.pid, now_ns=ago_ns)
        wall_ns = time.time_ns() - 60 * 10**9
        rank.header = spans.msgspec.structs.replace(rank.header, wall_ns=wall_ns)
        rank.path.write_bytes(spans.encode(rank.header))
        rank.steps(1, 2)
        viewer = opened()
        assert viewer.get("run")["live"] is True
        assert viewer.get("rank?rank=0")["error"] is None
        process.kill()
    assert viewer.get("run")["live"] is False
    assert viewer.get("state")["live"] is False
    assert "its process is gone" in viewer.get("rank?rank=0")["error"]


def test_a_run_whose_ranks_say_something_is_live(tmp_path, opened):
    rank = Rank(tmp_path)
    rank.steps(1, 1)
    viewer = opened()
    assert viewer.get("run")["live"] is True
    rank.line(end=0)
    viewer.until(lambda: viewer.get("run")["live"] is False)


def test_a_clock_that_is_ahead_gives_no_age_below_zero(tmp_path, opened):
    Rank(tmp_path, now_ns=time.time_ns() + 10**13).steps(1, 2)
    assert opened().get("state")["ranks"][0]["age_s"] == 0.0


def test_events_have_numbers_and_go_on_where_a_viewer_was(tmp_path, opened):
    Rank(tmp_path).steps(1, 1)
    for number in range(12):
        page_runs.write_event(tmp_path, text=f"event {number}", time_ns=number)
    viewer = opened()
    found = viewer.get("events?after=0&limit=5")
    assert [(e["i"], e["text"]) for e in found["events"]] == [
        (number, f"event {number}") for number in range(5)
    ]
    rest = viewer.get(f"events?after={found['next']}")
    assert [e["i"] for e in rest["events"]] == list(range(5, 12))
    assert viewer.get(f"events?after={rest['next']}") == {"events": [], "next": 12}
    newest = viewer.get("events?limit=2")
    assert [e["i"] for e in newest["events"]] == [10, 11]


def test_hostile_text_is_a_string_of_json_and_no_markup(tmp_path, opened):
    host = "<img src=x onerror=alert(1)>"
    rank = Rank(tmp_path, host=host)
    rank.steps(1, 3)
    rank.event("kind", HOSTILE)
    begin_ns = rank.now_ns
    named = spans.Span(HOSTILE, "host", "host", begin_ns, begin_ns + 10**6)
    rank.line(step=4, spans=(named,))
    viewer = opened()
    assert viewer.get("run")["ranks"][0]["host"] == host
    assert viewer.get("events")["events"][0]["text"] == HOSTILE
    assert HOSTILE in viewer.heat("")[0]["phases"]
    assert HOSTILE in viewer.get("timeline?from=4&to=4")["names"]
    error = viewer.get("nothing?<script>", 404)["error"]
    assert error == "there is nothing at /api/nothing; the page is at /"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("timeline?from=x", "from"),
        ("timeline?from=5&to=2", "from must be at most to"),
        ("timeline?view=zz", "dp, pp, tp"),
        ("timeline?ranks=1,,2", "ranks"),
        ("metrics?points=1", "from 10 to 20000"),
        ("metrics?points=1e3", "points"),
        ("events?limit=0", "limit"),
        ("rank", "rank is missing"),
        ("rank?rank=77", "there is no rank 77"),
        ("rank?rank=-1", "rank"),
        ("heat?phase=zz", "phase must be one of"),
        (f"heat?from={2**60}", "from"),
    ],
)
def test_a_wrong_question_is_answered_with_what_would_do(tmp_path, opened, path, named):
    page_runs.write_run(tmp_path)
    error = opened().get(path, 400)["error"]
    assert named in error
    assert "\n" not in error


def test_corrupt_lines_are_told_and_the_rest_is_shown(tmp_path, opened):
    rank = Rank(tmp_path)
    rank.steps(1, 3)
    rank.append(b"{not json}\n" * 100)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    (tmp_path / "events.jsonl").write_text("[]\n")
    viewer = opened()
    found = viewer.get("run")
    assert found["newest_step"] == 3
    assert any("metrics.jsonl, line 2 is left out" in p for p in found["problems"])
    assert any("events.jsonl, line 1 is left out" in p for p in found["problems"])
    assert found["problems"][-1].startswith("and ")
    assert viewer.get("metrics")["steps"] == [1, 2]


def test_a_file_name_that_is_no_text_does_not_end_the_page(tmp_path, opened):
    Rank(tmp_path).steps(1, 2)
    wrong = bytes(tmp_path / "spans") + b"/\xff\n-1-1.jsonl"
    with open(wrong, "wb") as file:
        file.write(b"{}\n")
    (problem,) = opened().get("run")["problems"]
    assert "is left out" in problem
    assert problem.isprintable()


def test_every_answer_has_the_headers(tmp_path, opened):
    page_runs.write_run(tmp_path, ranks=(0,))
    viewer = opened()
    anyone = TestClient(viewer.client.app, headers={"authorization": "Bearer no"})
    elsewhere = {"host": "evil.example"}
    for answer in (
        *(viewer.client.get(path) for path in ("/", "/api/run", "/api/heat", "/no")),
        *(viewer.client.get(path) for path in ("/static/no", "/api/rank")),
        anyone.get("/api/run"),
        anyone.get("/static/main.js"),
        viewer.client.post("/api/run"),
        viewer.client.get("/api/run", headers=elsewhere),
    ):
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    for path in ("/api/run", "/api/heat", "/api/rank", "/"):
        assert viewer.client.get(path).headers["cache-control"] == "no-store"


def test_an_error_of_ours_is_one_line_and_the_page_lives_on(
    tmp_path, opened, monkeypatch, capsys
):
    page_runs.write_run(tmp_path, ranks=(0,))
    viewer = opened()
    quiet = TestClient(
        viewer.client.app,
        headers=viewer.client.headers,
        raise_server_exceptions=False,
    )
    monkeypatch.setattr(ranks, "where", lambda *_: 1 / 0)
    answer = quiet.get("/api/state")
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("ZeroDivisionError in the server")
    assert answer.headers["content-security-policy"] == POLICY
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert viewer.get("run")["newest_step"] == 12


def test_a_bug_in_reading_is_told_and_what_is_known_stays(
    tmp_path, opened, monkeypatch, capsys
):
    (rank,) = page_runs.write_run(tmp_path, ranks=(0,))
    viewer = opened()
    monkeypatch.setattr(viewer.page._model, "take", lambda share: 1 / 0)
    rank.steps(13, 13)
    viewer.until(lambda: viewer.get("run")["problems"] != [])
    found = viewer.get("run")
    assert "the page no longer follows it" in found["problems"][0]
    assert found["newest_step"] == 12
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "../app.py",
        "%2e%2e/app.py",
        "..%2fapp.py",
        "vendor/../../app.py",
        "/etc/passwd",
        "%2fetc/passwd",
        "x%00.js",
        "",
        "vendor",
    ],
)
def test_no_path_leads_out_of_the_static_files(tmp_path, opened, name):
    Rank(tmp_path)
    answer = opened().client.get(f"/static/{name}")
    assert answer.status_code == 404
    assert b"def " not in answer.content


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    (tmp_path / "static").mkdir()
    (tmp_path / "secret.js").write_text("secret")
    (tmp_path / "static" / "link.js").symlink_to(tmp_path / "secret.js")
    (tmp_path / "static" / "own.js").write_text("own")
    assert assets.read("link.js", tmp_path / "static") is None
    found = assets.read("own.js", tmp_path / "static")
    assert found is not None
    assert found.content_type.startswith("text/javascript")


def test_a_static_file_that_a_browser_has_is_not_sent_again(tmp_path, opened):
    Rank(tmp_path)
    client = opened().client
    first = client.get("/static/main.js")
    assert first.status_code == 200
    again = client.get(
        "/static/main.js", headers={"if-none-match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
