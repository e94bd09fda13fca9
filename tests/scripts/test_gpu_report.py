"""The GPU report: what can be shown of it without a GPU."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time

import pytest

from scripts import evidence_claims
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
MACHINE = {
    "platform": "gpu",
    "device_kind": "NVIDIA H200",
    "driver": "1",
    "ptxas": "13.0",
    "versions": {"jax": "2"},
}
ORIGIN = pages.Origin(
    mode="gpu", commit="abc", date="2026-01-01", command="report", machine=MACHINE
)
# None of these is needed where the report runs (but by the step with stamps, msgspec);
# other programs need them.
BLOCKED = (
    *("grain", "tokenizers", "pyarrow", "torch", "tokamax", "msgspec"),
    *("google_crc32c", "matplotlib", "duckdb"),
)


@pytest.fixture(scope="module")
def bare_env(tmp_path_factory):
    """Return an environment whose processes cannot import what a GPU may lack."""
    blocked = tmp_path_factory.mktemp("blocked")
    for name in BLOCKED:
        (blocked / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    return dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([str(blocked), os.environ.get("PYTHONPATH", "")])
    }


def test_every_part_is_imported_without_the_packages_of_other_programs(bare_env):
    program = """
import scripts.kernels.tune_attention
from scripts.gpu import worker
from scripts.gpu.parts import PARTS
for part in PARTS.values():
    part.module.cases(False)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=gpu_report.REPOSITORY,
        env=bare_env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory, bare_env):
    """Run every part small."""
    out = tmp_path_factory.mktemp("report")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu.report", "--rehearse", "--out", str(out)],
        env=bare_env,
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
                word in row["case"] for word in ("cudnn", "fused", "torch", "tokamax")
            )
            skipped = needs_more or name == "kernels" or row["case"] == "step"
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
    assert "skipped: torch cannot be imported: ImportError: no torch here" in page


def test_a_part_that_cannot_be_imported_spoils_no_other(tmp_path, capsys):
    broken = dataclasses.replace(PLANTED, path="scripts.gpu.no_such_part")
    options = {"deadline": time.monotonic() + 600, "keep": False}
    counts = gpu_report.run_part(broken, ORIGIN, tmp_path, **options)
    assert counts == {"error": 1}
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
    counts = gpu_report.run_part(PLANTED, ORIGIN, tmp_path, **options)
    num_cases = len(planted_part.cases(False))
    assert counts == {"kept": 0, "ok": num_cases}
    assert [len(rows) for rows in seen] == list(range(1, num_cases + 1))
    assert [p.suffix for p in sorted(tmp_path.iterdir())] == [".json"]


def test_rows_of_an_earlier_call_are_kept_where_they_fit(tmp_path):
    rows = {
        "good": {"case": "good", "status": "ok"},
        "bad": {"case": "bad", "status": "error", "why": ""},
        "left": {"case": "left", "status": "not run", "why": ""},
    }
    pages.write_rows(tmp_path, PLANTED, ORIGIN, rows)
    assert list(pages.load_rows(tmp_path, PLANTED, ORIGIN)) == ["good"]
    for other in (
        dataclasses.replace(ORIGIN, commit="def"),
        dataclasses.replace(ORIGIN, mode="rehearse"),
        dataclasses.replace(ORIGIN, machine=MACHINE | {"device_kind": "NVIDIA H100"}),
    ):
        assert pages.load_rows(tmp_path, PLANTED, other) == {}
    later = dataclasses.replace(ORIGIN, date="2026-01-02")
    assert list(pages.load_rows(tmp_path, PLANTED, later)) == ["good"]


def test_a_file_that_is_no_report_is_not_kept(tmp_path, capsys):
    """The rows of a call that brought back half a file are measured again."""
    pages.write_rows(tmp_path, PLANTED, ORIGIN, {"a": {"case": "a", "status": "ok"}})
    path = pages.json_path(tmp_path, PLANTED)
    whole = path.read_text()
    for spoilt in (whole[: len(whole) // 2], "[]", '{"rows": []}', '{"rows": [{}]}'):
        path.write_text(spoilt)
        assert pages.load_rows(tmp_path, PLANTED, ORIGIN) == {}
        assert "is not kept" in capsys.readouterr().out


def test_a_page_that_cannot_be_made_leaves_the_rows_and_the_other_pages(
    tmp_path, monkeypatch, capsys
):
    row = {"case": "bfloat16 GEMM, 8192 cubed", "status": "ok"}  # without its numbers
    pages.write_rows(tmp_path, PARTS["ceilings"], ORIGIN, {row["case"]: row})
    pages.write_rows(tmp_path, PARTS["training"], ORIGIN, {})
    flags = ["--pages-only", "--out", str(tmp_path)]
    flags += ["--part", "ceilings", "--part", "training", "--part", "layers"]
    assert gpu_report.main(flags) == 1
    out = capsys.readouterr().out
    assert "ceilings: error: no page: KeyError" in out
    assert "layers: there is no" in out
    assert not (tmp_path / "gpu_ceilings.md").exists()
    assert "NVIDIA H200" in (tmp_path / "gpu_training.md").read_text()


def test_a_long_error_is_one_short_line_of_the_output():
    row = {"case": "a", "status": "error", "why": "x" * 1500}
    assert len(gpu_report.progress(row)) < 250


@pytest.mark.parametrize(
    ("kind", "generation"),
    [
        ("NVIDIA H100 80GB HBM3", "hopper"),
        ("NVIDIA H100 PCIe", "hopper"),
        ("NVIDIA H100 NVL", "hopper"),
        ("NVIDIA H200", "hopper"),
        ("NVIDIA GH200 480GB", "hopper"),
        ("NVIDIA A100-SXM4-80GB", "ampere"),
    ],
)
def test_the_generation_is_read_from_the_name_of_the_device(kind, generation):
    machine = MACHINE | {"device_kind": kind}
    assert gpu_report.generation(machine) == generation


def test_pages_are_made_without_touching_a_device():
    """A parent that took the device would leave no memory to the workers."""
    program = """
from jax._src import xla_bridge
from scripts.gpu.parts import PARTS
from scripts.gpu import tuning_times
for part in (*PARTS.values(), tuning_times.PART):
    for small in (False, True):
        part.module.tables({}, small)
        for case in part.module.cases(small).values():
            part.module.kind_of(case), part.module.process_of(case)
assert not xla_bridge._backends, xla_bridge._backends
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=gpu_report.REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


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
    folder = evidence_claims.EVIDENCE_DIR
    text = "".join(path.read_text() for path in folder.glob("*.md"))
    for name in PARTS:
        assert f"(../benchmarks/gpu_{name}.md)" in text
