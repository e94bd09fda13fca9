"""The processes of the GPU report: whatever one does, the others go on."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from scripts.gpu import cuda_root, supervise, worker
from scripts.gpu import report as gpu_report
from scripts.gpu.setting import Part, make_setting
from tests.scripts import planted_part

PLANTED = Part(
    name="planted", title="", path=planted_part.__name__, timeout_s=4, run_s=1.5
)


# On a machine under load, what is no fault takes long.
PATIENT = dataclasses.replace(PLANTED, timeout_s=600, run_s=600)


def run_planted(*names: str, part: Part = PLANTED, **changes) -> tuple[dict, list]:
    rows = []
    every = planted_part.cases(False)
    cases = {name: every[name] for name in names}
    options = {"deadline": time.monotonic() + 600, "on_row": rows.append} | changes
    supervise.run_cases(part, cases, "rehearse", **options)
    return {row["case"]: row for row in rows}, rows


@pytest.mark.slow
def test_a_case_that_fails_is_a_row_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setattr(supervise, "STOP_S", 1.0)
    rows, in_order = run_planted(*planted_part.ORDER)
    os.kill(int(rows["leaves a child"]["why"].split()[-1]), signal.SIGKILL)
    assert [row["case"] for row in in_order] == list(planted_part.ORDER)
    assert {name: row["status"] for name, row in rows.items()} == {
        "fine": "ok",
        "raises": "error",
        "dies": "error",
        "fine after": "ok",
        "hangs": "error",
        "absent": "skipped",
        "half a line": "error",
        "leaves a child": "error",
        "last": "ok",
    }
    assert rows["raises"]["why"] == "ValueError: planted"
    # Where it was raised, for who reads it on another machine.
    assert "in measure" in rows["raises"]["trace"]
    why = "no result; its process ended with code 7; last words"
    assert rows["dies"]["why"] == why
    assert rows["hangs"]["why"].startswith("killed: no result in 4 s")
    assert rows["absent"]["why"] == "No module named 'planted'"
    assert "ended with code 9" in rows["half a line"]["why"]
    # What shares a process does, until one dies; what asks for its own has it.
    pids = [rows[name]["pid"] for name in ("fine", "fine after", "last")]
    assert len(set(pids)) == 3


def test_a_kernel_that_hangs_is_killed_when_it_has_had_the_device_long_enough():
    patient = dataclasses.replace(PLANTED, timeout_s=600)
    rows, _ = run_planted("runs for ever", part=patient)
    assert rows["runs for ever"]["why"].startswith("killed: no result in 2 s; ")


def test_cases_of_a_kind_that_ends_processes_are_given_up_and_others_go_on():
    rows, _ = run_planted("dies 0", "dies 1", "dies 2", "dies 3", "fine")
    assert {name: row["status"] for name, row in rows.items()} == {
        "dies 0": "error",
        "dies 1": "error",
        "dies 2": "not run",
        "dies 3": "not run",
        "fine": "ok",
    }
    assert rows["dies 3"]["why"] == "2 processes in a row ended in cases of 'dies'"


def test_processes_work_at_once_and_have_the_device_one_after_the_other():
    names = [f"times {i}" for i in range(4)]
    rows, _ = run_planted(*names, part=PATIENT, processes=2)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert len({row["pid"] for row in rows.values()}) == 2
    spans = sorted(row["span"] for row in rows.values())
    pairs = itertools.pairwise(spans)
    assert all(end <= start for (_, end), (start, _) in pairs)


def test_a_case_that_outlives_the_budget_is_no_failure(monkeypatch):
    monkeypatch.setattr(supervise, "GRACE_S", 0.5)
    patient = dataclasses.replace(PLANTED, timeout_s=600, run_s=600)
    rows, _ = run_planted(
        "runs for ever", "last", part=patient, deadline=time.monotonic() + 8
    )
    assert [row["status"] for row in rows.values()] == ["not run", "not run"]
    why = rows["runs for ever"]["why"]
    # A machine under load may not have started it.
    assert why.startswith(("killed: the budget was spent", "its process did not start"))
    assert rows["last"]["why"] == "the budget was spent"


def test_no_case_begins_when_the_budget_is_spent():
    rows, _ = run_planted(*planted_part.ORDER, deadline=time.monotonic() - 1)
    assert list(rows) == list(planted_part.ORDER)
    assert {(r["status"], r["why"]) for r in rows.values()} == {
        ("not run", "the budget was spent")
    }


def test_a_clock_that_is_set_spends_no_budget(monkeypatch):
    """As on a virtual machine that has been resumed."""
    monkeypatch.setattr(time, "time", lambda: 4e9)
    rows, _ = run_planted("fine")
    assert rows["fine"]["status"] == "ok"


class _Importable(Part):
    """A part that this process can import and a worker cannot."""

    module = planted_part  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


def test_processes_that_cannot_start_are_not_started_for_ever():
    path = "scripts.gpu.no_such_part"
    broken = _Importable(name="planted", title="", path=path, timeout_s=4)
    rows, _ = run_planted(*planted_part.ORDER[:5], part=broken)
    statuses = [row["status"] for row in rows.values()]
    assert statuses == ["error"] * 3 + ["not run"] * 2
    assert "No module named 'scripts.gpu.no_such_part'" in rows["fine"]["why"]
    assert rows["hangs"]["why"] == "3 processes in a row did not start"


@pytest.mark.parametrize("first", ["the process that starts", "one that does not"])
def test_where_the_device_takes_one_process_alone_it_runs_all_cases(
    first, monkeypatch, capsys
):
    """As in the compute mode of one process, or without memory for more."""
    start, alive = supervise.start_worker, []
    receive = supervise.Worker.next_message
    go_on_without = supervise._Run._go_on_without
    has_started, has_failed = threading.Event(), threading.Event()

    def received(worker, timeout_s):
        starts = worker is alive[0]
        if starts and first == "one that does not":
            assert has_failed.wait(120)
        if not starts and first == "the process that starts":
            assert has_started.wait(120)
        message = receive(worker, timeout_s)
        if starts:
            has_started.set()
        return message

    def failed(*args, **options):
        goes_on = go_on_without(*args, **options)
        has_failed.set()
        return goes_on

    monkeypatch.setattr(supervise.Worker, "next_message", received)
    monkeypatch.setattr(supervise._Run, "_go_on_without", failed)

    def started(path, *args, **options):
        if any(worker.process.poll() is None for worker in alive):
            path = "scripts.gpu.no_such_part"
        alive.append(start(path, *args, **options))
        return alive[-1]

    monkeypatch.setattr(supervise, "start_worker", started)
    names = ["times 0", "times 1", "times 2", "fine"]
    rows, in_order = run_planted(*names, part=PATIENT, processes=3)
    assert len(in_order) == len(names)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert "planted: one process fewer: " in capsys.readouterr().out


def test_an_error_of_this_program_is_raised_and_leaves_no_process():
    def full(row):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run_planted("fine", "fine after", on_row=full)


_DRIVER = """
import sys, time
from pathlib import Path
from scripts.gpu import pages, report, supervise
from tests.scripts import planted_part, test_gpu_report as told
from tests.scripts.test_gpu_supervise import PLANTED
import dataclasses
planted_part.cases = lambda small: {n: n for n in ("fine", "runs for ever", "last")}
part = dataclasses.replace(PLANTED, timeout_s=600, run_s=600)
start = supervise.start_worker
def started(*args, **kwargs):
    worker = start(*args, **kwargs)
    print("worker", worker.process.pid, flush=True)
    return worker
supervise.start_worker = started
report.stop_by_signal()
origin = dataclasses.replace(told.ORIGIN, mode="rehearse")
deadline = time.monotonic() + 600
report.run_part(part, origin, Path(sys.argv[1]), deadline=deadline, keep=True)
"""


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_report_and_its_rows_stay(number, tmp_path):
    """One that went on would keep the device from the next call."""
    report = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(tmp_path)],
        cwd=gpu_report.REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert report.stdout is not None
    pid = None
    for line in report.stdout:
        if line.startswith("worker "):
            pid = int(line.split()[1])
        if "fine: ok" in line:
            break
    assert pid is not None
    assert is_running(pid)
    report.send_signal(number)
    assert report.wait(30) in (-number, 128 + number)
    report.stdout.close()
    end = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(pid)
    stored = json.loads((tmp_path / "gpu_planted.json").read_text())
    assert [row["case"] for row in stored["rows"]] == ["fine"]


# ------------------------------------------------------------------- environment


def test_processes_that_share_a_device_take_memory_as_they_need_it():
    own = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "CUDA_ROOT": "/c"}
    shared = supervise.environment(own, "gpu", shared=True)
    alone = supervise.environment(own, "gpu", shared=False)
    assert shared["JAX_PLATFORMS"] == alone["JAX_PLATFORMS"] == "cuda,cpu"
    assert shared["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert alone["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert "XLA_FLAGS" not in shared
    assert shared["CUDA_ROOT"] == "/c"


def toolkit(root: Path) -> Path:
    """Make the two files that a CUDA toolkit is known by."""
    (root / "bin").mkdir(parents=True)
    (root / "nvvm" / "libdevice").mkdir(parents=True)
    ptxas = root / "bin" / "ptxas"
    ptxas.write_text("#!/bin/sh\necho 'Cuda tools, release 12.9, V12.9.1'\n")
    ptxas.chmod(0o755)
    (root / "nvvm" / "libdevice" / "libdevice.10.bc").touch()
    return root


def test_a_toolkit_that_only_the_path_names_is_told_to_jax(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_root, "_of_wheels", list)
    monkeypatch.setattr(cuda_root, "_installed", list)
    monkeypatch.setattr(cuda_root, "_DEFAULT", tmp_path / "none")
    root = toolkit(tmp_path / "cuda")
    links = tmp_path / "bin"
    links.mkdir()
    (links / "ptxas").symlink_to(root / "bin" / "ptxas")
    env = {"PATH": str(links)}
    assert cuda_root.missing_to_jax(env) == root
    assert supervise.environment(env, "gpu", shared=True)["CUDA_ROOT"] == str(root)
    assert cuda_root.missing_to_jax({"PATH": "/none"}) is None
    assert cuda_root.missing_to_jax({"PATH": "/none", "CUDA_HOME": str(root)}) == root
    # Where jax finds one by itself, that one is used.
    monkeypatch.setattr(cuda_root, "_DEFAULT", toolkit(tmp_path / "default"))
    assert cuda_root.missing_to_jax(env) is None
    assert cuda_root.describe_ptxas({}).endswith("default/bin/ptxas, 12.9, V12.9.1")


@pytest.mark.parametrize(
    ("script", "driver"),
    [
        ("echo 580.159.04; echo 580.159.04", "580.159.04"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "unknown"),
        ("exit 0", "unknown"),
    ],
)
def test_the_driver_is_what_nvidia_smi_says_if_it_works(
    script, driver, tmp_path, monkeypatch
):
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert worker._driver() == driver
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert worker._driver() == "unknown"


def test_a_case_that_runs_out_of_memory_is_a_row_with_the_text():
    def measure(case, setting):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory" + "x" * 5000)

    greedy = types.ModuleType("greedy")
    vars(greedy)["measure"] = measure
    row = worker.run_case(greedy, None, make_setting("rehearse"))
    assert row["status"] == "error"
    assert row["why"].startswith("RuntimeError: RESOURCE_EXHAUSTED: Out of memory")
    assert len(row["why"]) == 1500
    assert json.dumps(row)
