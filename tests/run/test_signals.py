"""Signals to the program in each phase of a run: exit code 42, at once or soon."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mjax.ckpt.store import Store
from mjax.cli import exit_codes
from mjax.run import ending
from mjax.run.metrics import read_rows

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 240
"""Far longer than any test takes, so that a hang is a failure."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Let the runs share a compilation cache, separate from the user's."""
    home = tmp_path_factory.mktemp("cache")
    return os.environ | {"XDG_CACHE_HOME": str(home), "PYTHONUNBUFFERED": "1"}


def start(work_dir, environment, *more):
    words = ["--recipe", "debug", "--data.path", "synthetic", "--simulate-devices", "2"]
    words += ["--log.sample-tokens", "4", "--work-dir", str(work_dir), *more]
    return subprocess.Popen(
        [sys.executable, "-m", "mjax.train", *words],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(process, text):
    """Read what the process prints until `text`; return it."""
    said = []
    for line in process.stdout:
        said.append(line)
        if text in line:
            return "".join(said)
    raise AssertionError(f"{text!r} is not in:\n{''.join(said)}")


def end_of(process):
    timer = threading.Timer(LIMIT_S, process.kill)
    timer.start()
    said, _ = process.communicate()
    timer.cancel()
    return process.returncode, said


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("mesh pp 1", signal.SIGTERM),
        ("memory of one", signal.SIGINT),
        *(
            pytest.param(line, number, marks=pytest.mark.slow)
            for line, number in [
                ("mesh pp 1", signal.SIGINT),
                ("start-up: import", signal.SIGTERM),
                ("start-up: import", signal.SIGINT),
                ("memory of one", signal.SIGTERM),
                ("start-up: build", signal.SIGTERM),
                ("start-up: build", signal.SIGINT),
            ]
        ),
    ],
)
def test_before_the_first_step_a_signal_ends_the_process_at_once(
    tmp_path, environment, line, number
):
    """During the build, and during the compilation that follows it."""
    process = start(tmp_path / "run", environment)
    wait_for(process, line)
    process.send_signal(number)
    code, said = end_of(process)
    assert code == exit_codes.PREEMPTED, said
    # The main thread may print once more between these words and the end.
    assert f"stopped by {number.name} before the first step; nothing is lost\n" in said
    assert "Traceback" not in said
    assert "first step" not in said.replace("before the first step", "")


BLOCKED = """
import {first}
import ctypes, signal
print("blocked", flush=True)
if not {is_program}:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
# Native code that holds the main thread: no handler of Python's runs meanwhile.
ctypes.CDLL(None).poll(None, 0, 200_000) and ctypes.CDLL(None).poll(None, 0, 200_000)
print("interrupted", flush=True)
ctypes.CDLL(None).sleep(200)
"""


def blocked(first, is_program):
    code = BLOCKED.format(first=first, is_program=is_program)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(process, "blocked")
    return process


def test_native_code_that_holds_the_main_thread_is_not_waited_for():
    process = blocked("mjax.run.ending; mjax.run.ending.watch()", True)
    process.send_signal(signal.SIGTERM)
    code, said = end_of(process)
    assert code == exit_codes.PREEMPTED, said


@pytest.mark.slow
def test_importing_the_program_as_a_library_leaves_signals_alone():
    process = blocked("mjax.trainer", False)
    process.send_signal(signal.SIGTERM)
    assert end_of(process)[0] == -signal.SIGTERM


@pytest.mark.slow
def test_a_signal_while_the_state_is_restored_changes_nothing(tmp_path, environment):
    process = start(tmp_path / "run", environment, "--steps", "2")
    assert end_of(process)[0] == exit_codes.DONE
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    process = start(tmp_path / "run", environment, "--steps", "4", "--no-keep-compiled")
    wait_for(process, "start-up: compile")
    process.send_signal(signal.SIGTERM)
    code, said = end_of(process)
    assert code == exit_codes.PREEMPTED, said
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes()[: len(before)] == before
    process = start(tmp_path / "run", environment, "--steps", "4")
    assert end_of(process)[0] == exit_codes.DONE
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


EVALUATED = ["--steps", "4", "--eval.every", "2", "--log.every", "1"]


@pytest.mark.slow
def test_a_signal_during_an_evaluation_or_the_sample_is_42_and_the_rest_comes_later(
    tmp_path, environment
):
    path = tmp_path / "run"
    # Too long to wait for: they end only if interrupted.
    process = start(path, environment, *EVALUATED, "--eval.batches", "100000")
    wait_for(process, "step 1/4")
    process.send_signal(signal.SIGTERM)
    code, said = end_of(process)
    assert code == exit_codes.PREEMPTED, said
    assert json.loads((path / "summary.json").read_text())["exit"] == code
    assert "stopped and saved; the same command resumes" in said
    process = start(path, environment, *EVALUATED, "--log.sample-tokens", "100000")
    wait_for(process, "step 4/4")
    process.send_signal(signal.SIGTERM)
    code, said = end_of(process)
    assert code == exit_codes.PREEMPTED, said
    assert not (path / "sample.txt").exists()
    process = start(path, environment, *EVALUATED)
    code, said = end_of(process)
    assert code == exit_codes.DONE, said
    assert (path / "sample.txt").exists()
    rows = read_rows(path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4]


def together(work_dir, environment, *more):
    with socket.create_server(("localhost", 0)) as probe:
        coordinator = f"localhost:{probe.getsockname()[1]}"
    flags = ["--distributed.num-processes", "2", "--distributed.process-id"]
    where = ["--distributed.coordinator", coordinator]
    return [
        start(work_dir, environment, *more, *where, *flags, str(index))
        for index in range(2)
    ]


@pytest.mark.parametrize("told", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_is_stopped_before_the_first_step_takes_the_others_along(
    tmp_path, environment, told
):
    processes = together(tmp_path / "run", environment)
    wait_for(processes[0], "memory of one")
    processes[told].send_signal(signal.SIGTERM)
    ends = [end_of(process) for process in processes]
    assert [code for code, _ in ends] == [exit_codes.PREEMPTED] * 2, ends
    assert "stopped by SIGTERM before the first step" in ends[told][1]
    other = f"stopped by SIGTERM to process {told} before the first step"
    assert other in ends[1 - told][1]


@pytest.mark.slow
def test_a_work_dir_that_is_deleted_during_the_run_is_made_again(tmp_path, environment):
    path = tmp_path / "run"
    process = start(path, environment, *EVALUATED[2:], "--steps", "30")
    wait_for(process, "step 3/30")
    path.rename(tmp_path / "gone")  # rmtree may race with the recreation
    shutil.rmtree(tmp_path / "gone")
    code, said = end_of(process)
    assert "was deleted, moved or replaced during the run" in said
    assert code == exit_codes.DONE, said
    rows = read_rows(path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert (path / "config.json").exists()
    assert (path / "summary.json").exists()
    assert (path / "checkpoints" / "30").is_dir()


@pytest.mark.slow
def test_a_learning_rate_that_destroys_the_model_is_no_success(tmp_path, environment):
    process = start(tmp_path / "run", environment, "--optim.lr", "1e9")
    code, said = end_of(process)
    assert code == exit_codes.GAVE_UP, said
    assert "gave up: the last 19 steps were skipped" in said
    assert Store(tmp_path / "run" / "checkpoints").steps() == []
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit"] == exit_codes.GAVE_UP


def test_a_stop_tells_how_long_ago_the_signal_came():
    with ending.StopRequest() as stop:
        assert stop.stopped_s() is None
        os.kill(os.getpid(), signal.SIGTERM)
        first_s = stop.stopped_s()
        second_s = stop.stopped_s()
    assert first_s is not None
    assert second_s is not None
    assert 0 <= first_s <= second_s
