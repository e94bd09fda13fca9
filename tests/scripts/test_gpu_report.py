"""The GPU report: what can be shown of it without a GPU."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.gpu import (
    kernel_times,
    pages,
    supervise,
    timing,
)
from scripts.gpu import report as gpu_report
from scripts.gpu.parts import PARTS
from scripts.gpu.setting import Part, make_setting
from tests.scripts import planted_part

PLANTED = Part(name="planted", title="", path=planted_part.__name__, timeout_s=4)
MACHINE = {"device_kind": "NVIDIA H200", "driver": "1", "versions": {"jax": "2"}}
ORIGIN = pages.Origin(
    mode="gpu", commit="abc", date="2026-01-01", command="report", machine=MACHINE
)
# None of these is needed where the report runs; a run of the trainer needs them.
BLOCKED = ("grain", "tokenizers", "pyarrow", "torch", "tokamax")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Run every part small, in processes that cannot import what a GPU may lack."""
    blocked = tmp_path_factory.mktemp("blocked")
    for name in BLOCKED:
        (blocked / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    out = tmp_path_factory.mktemp("report")
    env = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([str(blocked), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu.report", "--rehearse", "--out", str(out)],
        env=env,
        capture_output=True,
        text=True,
    )
    return out, done


@pytest.mark.slow
def test_the_rehearsal_runs_every_part_without_the_trainers_packages(rehearsal):
    out, done = rehearsal
    assert done.returncode == 0, done.stdout + done.stderr
    for name in PARTS:
        stored = json.loads((out / f"gpu_{name}.json").read_text())
        assert [row["case"] for row in stored["rows"]] == list(
            PARTS[name].module.cases(True)
        )
        for row in stored["rows"]:
            needs_more = any(
                word in row["case"] for word in ("cudnn", "torch", "tokamax")
            )
            skipped = needs_more or name == "kernels"
            assert row["status"] == ("skipped" if skipped else "ok"), row
            assert skipped == ("why" in row)


@pytest.mark.slow
def test_pages_of_a_rehearsal_say_that_they_measure_nothing(rehearsal):
    out, _ = rehearsal
    for name in PARTS:
        page = (out / f"gpu_{name}.md").read_text()
        assert "**A rehearsal on a CPU with tiny shapes: no measurement.**" in page
        assert "no torch here" in page or name != "attention"


@pytest.mark.slow
def test_a_contender_that_is_not_there_has_its_reason_in_the_table(rehearsal):
    out, _ = rehearsal
    page = (out / "gpu_attention.md").read_text()
    assert "skipped: cuDNN plans its kernels with its library" in page
    assert page.count("skipped: no torch here") > 0


def run_planted(**changes) -> tuple[dict, list]:
    rows = []
    options = {"deadline": time.time() + 600, "on_row": rows.append} | changes
    supervise.run_cases(PLANTED, planted_part.cases(False), "rehearse", **options)
    return {row["case"]: row for row in rows}, rows


@pytest.mark.slow
def test_a_case_that_fails_is_a_row_and_the_rest_goes_on():
    rows, in_order = run_planted()
    assert [row["case"] for row in in_order] == list(planted_part.ORDER)
    assert {name: row["status"] for name, row in rows.items()} == {
        "fine": "ok",
        "raises": "error",
        "dies": "error",
        "fine after": "ok",
        "hangs": "error",
        "absent": "skipped",
        "last": "ok",
    }
    assert rows["raises"]["why"] == "ValueError: planted"
    assert rows["dies"]["why"] == "its process ended with code 7; last words"
    assert rows["hangs"]["why"].startswith("killed: no result in 4 s")
    assert rows["absent"]["why"] == "No module named 'planted'"
    # What shares a process does, until one dies; what asks for its own has it.
    pids = [rows[name]["pid"] for name in ("fine", "fine after", "last")]
    assert len(set(pids)) == 3


def test_a_case_that_outlives_the_budget_is_no_failure(monkeypatch):
    monkeypatch.setattr(supervise, "GRACE_S", 0.5)
    cases = {name: name for name in ("hangs", "last")}
    rows = []
    patient = dataclasses.replace(PLANTED, timeout_s=600)
    # Time to start, which a loaded machine needs more of.
    deadline = time.time() + 30
    monkeypatch.setattr(supervise.time, "time", HurriedClock(deadline))
    supervise.run_cases(
        patient, cases, "rehearse", deadline=deadline, on_row=rows.append
    )
    assert [row["status"] for row in rows] == ["not run", "not run"]
    assert rows[0]["why"].startswith("killed: the budget was spent")
    assert rows[1]["why"] == "the budget was spent"


class HurriedClock:
    """Says that there is time until a case has begun, then that there is none."""

    def __init__(self, deadline: float):
        self.deadline, self.readings = deadline, 0

    def __call__(self) -> float:
        # Read before a group, before its first message, before its second.
        self.readings += 1
        return self.deadline + (1.0 if self.readings > 2 else -600.0)


def test_no_case_begins_when_the_budget_is_spent():
    rows, _ = run_planted(deadline=time.time() - 1)
    assert list(rows) == list(planted_part.ORDER)
    assert {(r["status"], r["why"]) for r in rows.values()} == {
        ("not run", "the budget was spent")
    }


class _Importable(Part):
    """A part that this process can import and a worker cannot."""

    module = planted_part  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


@pytest.mark.slow
def test_processes_that_cannot_start_are_not_started_for_ever():
    rows = []
    path = "scripts.gpu.no_such_part"
    broken = _Importable(name="planted", title="", path=path, timeout_s=4)
    supervise.run_cases(
        broken,
        dict.fromkeys("abcde"),
        "rehearse",
        deadline=time.time() + 600,
        on_row=rows.append,
    )
    assert [row["status"] for row in rows] == ["error"] * 3 + ["not run"] * 2
    assert "No module named 'scripts.gpu.no_such_part'" in rows[0]["why"]
    assert rows[-1]["why"] == "3 processes in a row ended without a result"


def test_a_part_that_cannot_be_imported_spoils_no_other(tmp_path, capsys):
    broken = dataclasses.replace(PLANTED, path="scripts.gpu.no_such_part")
    options = {"deadline": time.time() + 600, "keep": False}
    assert gpu_report.run_part(broken, ORIGIN, tmp_path, **options) == 1
    assert "No module named 'scripts.gpu.no_such_part'" in capsys.readouterr().out


def test_without_a_gpu_the_report_ends_before_any_work(tmp_path, capsys):
    out = tmp_path / "out"
    assert gpu_report.main(["--part", "ceilings", "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "an NVIDIA GPU that jax can use is needed" in message
    assert "--rehearse" in message
    assert not out.exists()


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("error", 1)])
def test_compiling_only_ends_with_1_if_a_case_does_not_compile(
    status, code, monkeypatch, capsys
):
    def run(part, cases, mode, *, deadline, on_row):
        assert mode == "compile"
        # What a GPU will run, not what is rehearsed.
        assert list(cases) == list(part.module.cases(False))
        row = {"status": status, "why": "spoilt", "seconds": 1.0, "bytes": {"": 2**30}}
        for name in cases:
            on_row({"case": name, **row})

    monkeypatch.setattr(supervise, "run_cases", run)
    monkeypatch.setattr(supervise, "probe", lambda mode: {"device_kind": "cpu"})
    flags = ["--compile-only", "--part", "ceilings", "--commit", "abc"]
    assert gpu_report.main(flags) == code
    out = capsys.readouterr().out
    assert f"4 {status}" in out
    assert ("1.00 GiB" in out) == (status == "ok")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--part", "speed"], "invalid choice: 'speed'"),
        (["--budget-s", "0"], "must be positive and finite, got 0"),
        (["--rehearse", "--compile-only"], "not allowed with argument"),
    ],
)
def test_bad_arguments_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_report.main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_git_the_commit_must_be_given(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_report, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match="give it with --commit"):
        gpu_report.find_commit()


def test_rows_are_on_disk_after_every_case(tmp_path, monkeypatch):
    seen = []

    def run(part, cases, mode, *, deadline, on_row):
        for name in cases:
            on_row({"case": name, "status": "ok", "seconds": 1.0})
            seen.append(json.loads(pages.json_path(tmp_path, part).read_text())["rows"])

    monkeypatch.setattr(supervise, "run_cases", run)
    options = {"deadline": 0.0, "keep": False}
    assert gpu_report.run_part(PLANTED, ORIGIN, tmp_path, **options) == 0
    assert [len(rows) for rows in seen] == list(range(1, len(planted_part.ORDER) + 1))
    assert [p.suffix for p in sorted(tmp_path.iterdir())] == [".json", ".md"]


def test_rows_of_an_earlier_call_are_kept_where_they_fit(tmp_path):
    rows = {
        "good": {"case": "good", "status": "ok"},
        "bad": {"case": "bad", "status": "error", "why": ""},
        "left": {"case": "left", "status": "not run", "why": ""},
    }
    pages.write(tmp_path, PLANTED, ORIGIN, rows, small=False)
    assert list(pages.load_rows(tmp_path, PLANTED, ORIGIN)) == ["good"]
    for other in (
        dataclasses.replace(ORIGIN, commit="def"),
        dataclasses.replace(ORIGIN, mode="rehearse"),
        dataclasses.replace(ORIGIN, machine=MACHINE | {"device_kind": "NVIDIA H100"}),
    ):
        assert pages.load_rows(tmp_path, PLANTED, other) == {}
    later = dataclasses.replace(ORIGIN, date="2026-01-02")
    assert list(pages.load_rows(tmp_path, PLANTED, later)) == ["good"]


def test_every_part_has_tables_of_no_rows_and_of_failed_ones():
    for part in PARTS.values():
        for small in (False, True):
            failed = {
                name: {"case": name, "status": "error", "why": "planted | fault"}
                for name in part.module.cases(small)
            }
            for rows in ({}, failed):
                tables = part.module.tables(rows, small)
                page = pages.markdown(part.title, ORIGIN, tables)
                widths = [
                    line.replace("\\|", "").count("|")
                    for table in page.split("\n\n")
                    if table.startswith("|")
                    for line in table.splitlines()
                ]
                assert widths
                for table in tables:
                    assert {len(row) for row in table.rows} <= {len(table.header)}
            assert "error: planted \\| fault" in page


# -------------------------------------------------------------------------- timing


class FakeDevice:
    """A device whose calls take a known time, and whose clock can be read."""

    def __init__(self, call_s: list[float]):
        self.call_s, self.now, self.calls = call_s, 0.0, []

    def call(self, i: int) -> int:
        self.now += self.call_s[len(self.calls) % len(self.call_s)]
        self.calls.append(i)
        return i


def test_the_time_of_a_call_is_the_median_over_batches_that_go_round_the_inputs():
    device = FakeDevice([0.002])
    found = timing.time_calls(device.call, lambda _: None, clock=lambda: device.now)
    assert found.median_ms == pytest.approx(2.0)
    assert found.spread == pytest.approx(0.0, abs=1e-9)
    per_batch = math.ceil(timing.BATCH_S / 0.002)
    assert found.calls == timing.ROUNDS * per_batch
    assert device.calls[-per_batch:] == [
        i % timing.INPUT_SETS for i in range(per_batch)
    ]


def test_one_slow_batch_moves_the_spread_and_not_the_median():
    device = FakeDevice([0.03])
    # Warm-up 2 calls, then 1, then 5; each batch is one call.
    device.call_s = [0.03] * 8 + [0.02, 0.03, 0.03, 0.09, 0.03, 0.03, 0.03, 0.03, 0.03]
    found = timing.time_calls(device.call, lambda _: None, clock=lambda: device.now)
    assert found.median_ms == pytest.approx(30.0)
    assert found.spread == pytest.approx(7 / 3)


def test_slow_calls_are_timed_three_times_only():
    device = FakeDevice([2.0])
    found = timing.time_calls(device.call, lambda _: None, clock=lambda: device.now)
    assert (found.calls, found.median_ms) == (3, pytest.approx(2000.0))


def test_kernels_get_their_medians_in_the_order_of_the_run():
    runs = [[("a", 1.0), ("b", 9.0)], [("a", 3.0), ("b", 8.0)], [("a", 2.0), ("b", 7)]]
    assert kernel_times.medians(runs) == [("a", 2.0), ("b", 8.0)]
    with pytest.raises(ValueError, match="shorter"):
        kernel_times.medians([runs[0], runs[1][:1]])


def test_cupti_gets_the_program_and_its_kernels_become_the_row(monkeypatch):
    def measure(function, *, aggregate, iterations):
        def run(*args):
            gradients = function(*args)
            assert [x.shape for x in gradients] == [x.shape for x in args[:3]]
            assert not aggregate
            return gradients, [[("dq", 2.0), ("dkv", 3.0)]] * iterations

        return run

    monkeypatch.setattr(kernel_times.profiler, "measure", measure)
    case = next(c for n, c in kernel_times.cases(True).items() if "ours" in n)
    # Tiny shapes and blocked attention, but not skipped.
    setting = make_setting("rehearse")
    monkeypatch.setattr(type(setting), "small", False)
    row = kernel_times.measure(case, setting)
    assert row == {"kernels": [("dq", 2.0), ("dkv", 3.0)]}


def test_the_pages_are_named_in_the_docs():
    text = (Path(gpu_report.BENCHMARKS_DIR) / "gpu.md").read_text()
    for name in PARTS:
        assert f"gpu_{name}.md" in text
