"""`observe mfu` reads the records of a run and classifies its MFU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mjax.observe import spans
from mjax.observe.detect.mfu import KINDS
from mjax.observe.mfu import _MEANING, LOWER, main
from mjax.observe.mfu_run import read_series

WALL_NS = 1_790_000_000_000_000_000
MONOTONIC_NS = 5_000_000_000_000


def steps_of(num: int, *, factor: float = 1.0, seed: int = 0) -> np.ndarray:
    """Durations of healthy steps of about a second."""
    noise = np.random.default_rng(seed).standard_normal(num)
    return factor * np.exp(0.004 * noise)


def write_rows(work_dir: Path, step_s: np.ndarray, **more: Any) -> None:
    """Write metrics.jsonl; `more` are fields of every row."""
    rows = [
        {"step": i, "step_s": float(s), "tokens_per_s": 4096 / float(s)}
        | {"mfu": 0.4 / float(s)}
        | more
        for i, s in enumerate(step_s, start=1)
    ]
    work_dir.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (work_dir / "metrics.jsonl").write_text(text)


def write_start(
    work_dir: Path,
    generation: int,
    begin_s: float,
    steps: dict[int, float],
    pauses: dict[int, tuple[str, float]],
    run: str = "a",
) -> float:
    """Write the spans of one start, and return when it ended.

    Args:
      work_dir: of the run.
      generation: of the start.
      begin_s: on the wall clock, after the first start.
      steps: step to its duration.
      pauses: step to the kind and the duration of a span after it.
      run: its name.
    """
    header = spans.Header(
        run=run,
        host="node07",
        rank=0,
        generation=generation,
        pid=1,
        wall_ns=WALL_NS + int(begin_s * 1e9),
        monotonic_ns=MONOTONIC_NS,
        devices=(0,),
        mesh={"pp": 1},
    )
    lines, now_s = [spans.encode(header)], 0.0

    def to_ns(at_s: float) -> int:
        return MONOTONIC_NS + int(at_s * 1e9)

    for n, (step, took_s) in enumerate(steps.items()):
        end_s = now_s + took_s
        found = [
            spans.Span("step", "compute", "step", to_ns(now_s), to_ns(end_s)),
        ]
        now_s = end_s
        if step in pauses:
            kind, pause_s = pauses[step]
            end_s = now_s + pause_s
            found.append(
                spans.Span(
                    kind,
                    "eval" if kind == "eval" else "ckpt",
                    "host",
                    to_ns(now_s),
                    to_ns(end_s),
                )
            )
            now_s = end_s
        lines.append(spans.encode(spans.Line(n=n, step=step, spans=tuple(found))))
    path = work_dir / spans.FOLDER / spans.file_name(header)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(lines))
    return begin_s + now_s


def report_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_class_has_a_meaning_and_an_action():
    assert set(_MEANING) == set(KINDS)
    assert all(all(each) for each in _MEANING.values())


def test_a_low_level_is_named_with_its_number_and_what_to_do(tmp_path, capsys):
    write_rows(tmp_path, steps_of(1200))
    argv = ["--work-dir", str(tmp_path), "--expected-mfu", "0.57"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert text.startswith("bad_link\n")
    assert "level 70." in text
    assert "from the start" in text
    assert "python -m mjax.health" in text
    assert "imbue.com" in text
    assert report_of(capsys, *argv)["class"] == "bad_link"


def test_a_level_between_the_classes_is_reported_with_a_caution(tmp_path, capsys):
    write_rows(tmp_path, steps_of(1200))
    argv = ["--work-dir", str(tmp_path), "--expected-mfu"]
    found = report_of(capsys, *argv, str(0.4 / 0.47))
    assert any("47.0% matches none in the" in each for each in found["cautions"])
    found = report_of(capsys, *argv, str(0.4 / 0.7))
    assert not any("none of the" in each for each in found["cautions"])


def test_the_expected_mfu_comes_from_the_plan_if_there_is_one(tmp_path, capsys):
    write_rows(tmp_path, steps_of(1200))
    argv = ["--work-dir", str(tmp_path)]
    without = report_of(capsys, *argv)
    assert without["class"] == "healthy"
    assert without["expected_from"] == "best level of this run"
    assert any("--expected-mfu" in each for each in without["cautions"])
    (tmp_path / "plan.json").write_text(json.dumps({"modelled": {"mfu": 0.6}}))
    found = report_of(capsys, *argv)
    assert (found["class"], found["expected"]) == ("bad_link", 0.6)
    assert found["expected_from"] == "modelled by the plan"
    (tmp_path / "plan.json").write_text(json.dumps({"modelled": {"mfu": 0.45}}))
    found = report_of(capsys, *argv)  # a model may be off by this much
    assert found["class"] == "healthy"
    assert any("modelled" in each for each in found["cautions"])
    assert report_of(capsys, *argv, "--expected-mfu", "0.45")["class"] != "healthy"
    found = report_of(capsys, *argv, "--expected-mfu", "0.4")
    assert (found["class"], found["expected_from"]) == ("healthy", "--expected-mfu")


def test_without_a_known_peak_tokens_per_second_take_the_place_of_the_mfu(
    tmp_path, capsys
):
    step_s = np.concatenate([steps_of(500), steps_of(700, factor=1 / 0.3)])
    write_rows(tmp_path, step_s, mfu=None)
    found = report_of(capsys, "--work-dir", str(tmp_path))
    assert (found["class"], found["unit"]) == ("no_gpudirect", "tokens/s")
    assert any("(step 501)" in each for each in found["evidence"])
    argv = ["--work-dir", str(tmp_path), "--expected-mfu", "0.4"]
    assert main(argv) == 2
    assert "--peak-tflops" in capsys.readouterr().err


def test_pauses_and_restarts_of_spans_become_marks(tmp_path):
    write_rows(tmp_path, steps_of(60))
    took = dict(enumerate(steps_of(60).tolist(), start=1))
    first = {step: took[step] for step in range(1, 46)}  # 41 to 45 are lost
    end_s = write_start(tmp_path, 1, 0.0, first, {10: ("eval", 3.0)})
    second = {step: took[step] for step in range(41, 61)}
    write_start(tmp_path, 2, end_s + 90.0, second, {50: ("save", 2.0)})
    series = read_series(tmp_path)
    assert [mark.kind for mark in series.marks] == ["eval", "restart", "save"]
    evaluation, restart, save = series.marks
    ends = series.step_end_s
    assert evaluation.start_s == pytest.approx(ends[9], abs=1e-6)
    assert evaluation.end_s - evaluation.start_s == pytest.approx(3.0, abs=1e-6)
    assert ends[10] == pytest.approx(evaluation.end_s + took[11], abs=1e-6)
    assert restart.start_s == pytest.approx(ends[39], abs=1e-6)
    assert restart.end_s == pytest.approx(ends[40] - took[41], abs=1e-6)
    assert 94.0 < restart.end_s - restart.start_s < 96.0  # with the lost steps
    assert save.start_s == pytest.approx(ends[49], abs=1e-6)
    assert ends[0] == pytest.approx(took[1], abs=1e-6)


def test_a_clock_that_was_set_back_between_starts_is_reported(tmp_path):
    write_rows(tmp_path, steps_of(60))
    took = dict(enumerate(steps_of(60).tolist(), start=1))
    first = {step: took[step] for step in range(1, 41)}
    write_start(tmp_path, 1, 0.0, first, {})
    second = {step: took[step] for step in range(41, 61)}
    write_start(tmp_path, 2, -3600.0, second, {45: ("save", 2.0)})
    series = read_series(tmp_path)
    (problem,) = series.problems
    assert "took step 41 has a clock 36" in problem
    assert (np.diff(series.step_end_s) > 0).all()
    save = next(mark for mark in series.marks if mark.kind == "save")
    assert save.start_s == pytest.approx(series.step_end_s[44], abs=1e-6)


def test_rows_alone_tell_saves_evaluations_and_restarts(tmp_path):
    write_rows(tmp_path, np.ones(10))
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3] |= {"eval_loss": 2.0}
    rows[6] |= {"ckpt_copy_s": 4.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    starts = tmp_path / "starts"
    starts.mkdir()
    (starts / "0001.json").write_text('{"start_step": 0}')
    (starts / "0002.json").write_text('{"start_step": 8}')
    series = read_series(tmp_path)
    times = [(mark.kind, mark.start_s, mark.end_s) for mark in series.marks]
    assert times == [("eval", 4, 4), ("save", 6, 10), ("restart", 12, 12)]
    assert series.step_end_s.tolist() == [1, 2, 3, 4, 5, 6, 11, 12, 13, 14]


def test_errors_of_the_driver_near_the_onset_are_shown(tmp_path, capsys):
    step_s = np.concatenate([steps_of(500), steps_of(500, factor=1 / 0.7)])
    write_rows(tmp_path, step_s)
    took = dict(enumerate(step_s.tolist(), start=1))
    write_start(tmp_path, 1, 0.0, took, {})
    events = [(490.0, "warning", "link\x1b[31m down"), (900.0, "error", "far away")]
    text = "".join(
        json.dumps(
            {"time_ns": WALL_NS + int(at * 1e9), "kind": "log"}
            | {"severity": severity, "text": text}
        )
        + "\n"
        for at, severity, text in events
    )
    (tmp_path / "events.jsonl").write_text(text + "{broken}\n")
    argv = ["--work-dir", str(tmp_path), "--expected-mfu", "0.4"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "from the onset of the fault, log: link\\x1b[31m down" in out
    assert "far away" not in out
    assert "events.jsonl, line 3 is left out" in out


def test_dips_are_named_with_their_steps_and_whether_data_were_late(tmp_path, capsys):
    step_s = steps_of(2000)
    step_s[[300, 1250, 1900]] *= 10.0
    write_rows(tmp_path, step_s)
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["data_wait_s"] = 0.0
    rows[300]["data_wait_s"] = 8.5
    rows[40]["mfu"] = None  # the numbers of later steps are still right
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = report_of(capsys, "--work-dir", str(tmp_path), "--expected-mfu", "0.4")
    assert found["best"] == "rare_dips"
    assert [dip["step"] for dip in found["dips"]] == [301, 1251, 1901]
    text = "\n".join(found["evidence"])
    assert "neighbours: 301, 1251, 1901" in text
    assert "1 of these waited for data" in text


def test_a_short_run_is_called_unclear_with_the_classes_that_are_left(tmp_path, capsys):
    write_rows(tmp_path, steps_of(60))
    assert main(["--work-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("unclear: healthy or rare_dips\n60 steps; ")
    assert "need at least 30 min" in out
    assert "\nnext\n" not in out
    cut = out.partition("what would decide it\n")[2]
    assert "- a run of at least 30 min; this one took 60." in cut
    assert "give --expected-mfu" in cut
    for meaning, action, _ in _MEANING.values():
        assert meaning not in out
        assert action not in out


@pytest.mark.parametrize(
    ("hosts", "has_network"), [(("a", "b"), True), (("a", "a"), False)]
)
def test_a_run_on_one_host_has_no_fault_of_the_network(
    tmp_path, capsys, hosts, has_network
):
    write_rows(tmp_path, steps_of(1200))
    (tmp_path / "starts").mkdir()
    (tmp_path / "starts" / "0001.json").write_text(
        json.dumps({"start_step": 0, "processes": [{"host": host} for host in hosts]})
    )
    argv = ["--work-dir", str(tmp_path), "--expected-mfu"]
    found = report_of(capsys, *argv, str(0.4 / 0.45))
    assert ("ragged" in found["scores_nats"]) == has_network
    found = report_of(capsys, *argv, str(0.4 / 0.7))
    assert found["class"] == "bad_link"
    assert ("network" in found["meaning"]) == has_network
    assert ("hosts" in found["action"]) == has_network


@pytest.mark.parametrize(
    ("start", "level", "name"),
    [
        ({"device": "cpu", "mesh": {"dp_shard": 1, "tp": 1}}, 0.7, LOWER),
        ({"device": "cpu", "mesh": {"dp_shard": 8, "tp": 1}}, 0.65, LOWER),
        ({"device": "NVIDIA H100", "mesh": {"dp_shard": 1, "tp": 1}}, 0.7, LOWER),
        ({"device": "NVIDIA H100", "mesh": {"dp_shard": 4, "tp": 2}}, 0.7, "bad_link"),
        ({"device": "NVIDIA H100", "mesh": {"dp_shard": 4, "tp": 2}}, 0.47, LOWER),
        ({}, 0.7, "bad_link"),
    ],
)
def test_a_link_is_blamed_only_where_one_is_and_at_its_level(
    tmp_path, capsys, start, level, name
):
    write_rows(tmp_path, steps_of(1200))
    (tmp_path / "starts").mkdir()
    (tmp_path / "starts" / "0001.json").write_text(json.dumps(start))
    argv = ["--work-dir", str(tmp_path), "--expected-mfu", str(0.4 / level)]
    found = report_of(capsys, *argv)
    assert found["class"] == name
    is_blamed = "link" in found["meaning"] + found["action"]
    assert is_blamed == (name == "bad_link")
    if name == LOWER:
        assert f"at {level:.0%} of its healthy level" in found["meaning"]


def test_unreadable_rows_are_left_out_and_said(tmp_path, capsys):
    write_rows(tmp_path, steps_of(1500))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[4], lines[8] = "{", json.dumps({"step": 9, "mfu": None, "step_s": 1.0})
    path.write_text("\n".join(lines) + '\n{"step": 1501, "mf')
    found = report_of(capsys, "--work-dir", str(tmp_path), "--expected-mfu", "0.4")
    assert (found["class"], found["steps"]) == ("healthy", 1499)
    assert found["steps_without_rate"] == 1
    damaged, cut = found["problems"]
    assert "line 5 is left out" in damaged
    assert "line 1501 is left out: it has no end" in cut
    path.unlink()
    path.mkdir()
    assert main(["--work-dir", str(tmp_path)]) == 2
    assert "Is a directory; move it away" in capsys.readouterr().err


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys):
    few, many, empty = (tmp_path / name for name in ("few", "many", "empty"))
    write_rows(few, steps_of(20))
    write_rows(many, steps_of(100))
    write_rows(empty, steps_of(0))
    (tmp_path / "bad.json").write_text('{"modelled": {}}')
    (tmp_path / "high.json").write_text('{"modelled": {"mfu": 1.3}}')
    for argv, message in (
        (["--work-dir", str(tmp_path / "none")], "does not exist; name the work dir"),
        (["--work-dir", str(empty)], "has no rows"),
        (["--work-dir", str(few)], "20 steps have a known MFU or rate, at least 30"),
        (["--work-dir", str(many), "--expected-mfu", "40"], "between 0 and 1, got 40"),
        (["--work-dir", str(many), "--expected-mfu", "nan"], "0 and 1, got nan"),
        (
            ["--work-dir", str(many), "--plan", str(tmp_path / "bad.json")],
            "modelled.mfu must be a number, got None; write it with python -m mjax.pl",
        ),
        (
            ["--work-dir", str(many), "--plan", str(tmp_path / "high.json")],
            "modelled.mfu must be between 0 and 1, got 1.3",
        ),
        (["--work-dir", str(many), "--plan", str(tmp_path / "no")], "cannot be read"),
        (["--work-dir", str(many), "--out", str(tmp_path / "no" / "x")], "No such"),
    ):
        assert main(argv) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert message in captured.err


def test_a_report_goes_to_a_file_and_nothing_of_the_run_changes(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "report.json"
    write_rows(run, steps_of(100))
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert main(["--work-dir", str(run), "--json", "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(out.read_text())["best"] == "healthy"
    assert {path: path.read_bytes() for path in run.iterdir()} == before
