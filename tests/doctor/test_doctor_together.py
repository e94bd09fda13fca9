"""`python -m mjax.doctor --together`: processes that meet, and those that do not."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEET = Path(__file__).with_name("meet_and_look.py")
ENDS_S = 90


def run(work_dirs, limit_s, num=None, bad=()):
    """Run one process a work dir; return exit codes, the answer, and all errors."""
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    words = [sys.executable, MEET, address, str(num or len(work_dirs))]
    started = [
        subprocess.Popen(
            [*words, str(rank), work_dir, str(limit_s), *(["bad"] * (rank in bad))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )
        for rank, work_dir in enumerate(work_dirs)
    ]
    try:
        said = [process.communicate(timeout=ENDS_S) for process in started]
    finally:
        for process in started:
            process.kill()
    codes = [process.returncode for process in started]
    assert all(out == "" for out, _ in said[1:])
    return codes, json.loads(said[0][0]), "".join(error for _, error in said)


def states(answer):
    return {step["name"]: step["state"] for step in answer["together"]}


def test_processes_meet_compare_see_files_and_add(tmp_path):
    codes, answer, _ = run([tmp_path / "runs"] * 2, 60, bad=[1])
    assert states(answer) == dict.fromkeys(("meet", "same", "files", "sum"), "ok")
    # All is well between them; one of the hosts is not.
    assert codes == [1, 1]
    assert [host["ok"] for host in answer["hosts"]] == [True, False]
    assert [*(tmp_path / "runs").iterdir()] == []


def test_folders_that_are_not_shared_are_found_and_no_collective_is_tried(tmp_path):
    codes, answer, _ = run([tmp_path / "a", tmp_path / "b"], 6)
    assert codes == [1, 1]
    expected = {"meet": "ok", "same": "ok", "files": "failed", "sum": "unknown"}
    assert states(answer) == expected
    (files,) = (one for one in answer["together"] if one["name"] == "files")
    assert "process 1" in files["reason"]
    assert "all hosts mount" in files["reason"]


def test_a_process_that_does_not_come_is_waited_for_no_longer_than_asked(tmp_path):
    codes, answer, _ = run([tmp_path], 3, num=2)
    assert codes == [1]
    assert states(answer)["meet"] == "failed"
    assert "not all processes connected" in answer["together"][0]["reason"]


def test_a_process_that_does_not_reach_the_coordinator_says_so_itself(tmp_path):
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    done = subprocess.run(
        [sys.executable, MEET, address, "2", "1", tmp_path, "2"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        timeout=ENDS_S,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: meet: process 1 of 2" in done.stderr
    assert "nothing answers there" in done.stderr


def test_a_step_that_never_ends_loses_nothing_that_is_known():
    program = """
import time
from mjax.doctor.together import _limit
with _limit("sum", 0.2, lambda: ["ok together.meet", "failed gpu7: gpu.count"]):
    time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        timeout=ENDS_S,
    )
    assert done.returncode == 1
    assert "sum did not end within" in done.stderr
    assert "failed gpu7: gpu.count" in done.stderr


def test_fewer_processes_than_hosts_are_a_failure(tmp_path):
    done = subprocess.run(
        [sys.executable, MEET, "127.0.0.1:1", "1", "0", tmp_path, "5", "64"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        timeout=ENDS_S,
    )
    assert done.returncode == 1
    (meet, *others) = json.loads(done.stdout)["together"]
    assert meet["state"] == "failed"
    assert "--hosts is 64, and 1 processes met" in meet["reason"]
    assert {step["state"] for step in others} == {"unknown"}
