"""The calls that docs/benchmarks/gpu.md plans, on a GPU that is a CPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mjax.kernels.attention import tuning
from mjax.kernels.attention.tuning import MOSAIC_H200
from scripts.gpu import report as gpu_report
from scripts.gpu import tuning_times
from scripts.kernels import tune_attention


def run_on(kind: str, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.scripts.fake_gpu", kind, *map(str, argv)],
        cwd=gpu_report.REPOSITORY,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3"])
def test_a_second_call_goes_on_from_the_files_of_the_first(kind, tmp_path):
    flags = ["--part", "correctness", "--part", "ceilings", "--json-only"]
    flags += ["--commit", "abc"]
    first, second = tmp_path / "first", tmp_path / "second"
    done = run_on(kind, "report", *flags, "--out", first)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "At `abc`, " in done.stdout
    assert f", {kind}, driver " in done.stdout
    names = ["gpu_ceilings.json", "gpu_correctness.json"]
    # JSON alone: of the files that a call leaves, few may come back.
    assert sorted(path.name for path in first.iterdir()) == names
    stored = json.loads((first / names[1]).read_text())
    assert stored["mode"] == "gpu"
    assert [row["status"] for row in stored["rows"]] == ["ok"] * 3

    # One case is as if the call had ended before it.
    lost = stored["rows"].pop()["case"]
    (first / names[1]).write_text(json.dumps(stored))
    shutil.copytree(first, second)
    done = run_on(kind, "report", *flags, "--keep", "--out", second)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "correctness: 1 cases to run, 2 kept" in done.stdout
    assert f"correctness 1/1 {lost}: ok" in done.stdout
    assert "ceilings: 0 cases to run, 4 kept" in done.stdout

    # On another GPU nothing of it counts.
    done = run_on(
        "NVIDIA A100-SXM4-80GB",
        *("report", "--part", "ceilings", "--keep", "--commit", "abc"),
        *("--out", second),
    )
    assert "This is no Hopper GPU" in done.stdout
    assert "ceilings: 4 cases to run, 0 kept" in done.stdout
    assert (second / "gpu_ceilings.md").exists()


def test_tuning_leaves_times_from_which_winners_are_written_elsewhere(tmp_path):
    table = shutil.copy(tuning.__file__, tmp_path / "tuning.py")
    flags = ["--commit", "abc", "--out", tmp_path, "--tuning-file", table]
    done = run_on("NVIDIA H200", "tune", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads((tmp_path / "gpu_tuning.json").read_text())
    assert {row["status"] for row in stored["rows"]} == {"ok"}
    assert len(stored["rows"]) == len(tuning_times.read_candidates())
    text = Path(table).read_text()
    assert "Tuned on NVIDIA H200" in text
    shutil.copy(tuning.__file__, table)
    flags = ["--write-only", "--out", str(tmp_path), "--tuning-file", str(table)]
    assert tune_attention.main(flags) == 0
    assert Path(table).read_text() == text
    winners = tune_attention.choose(stored["rows"], MOSAIC_H200)
    assert {head_dim for _, head_dim in winners} == {64, 128}
