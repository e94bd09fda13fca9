"""What ends with the daemons of a test cluster, and what does not."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.slurm_processes import Daemons, is_running

ROOT = Path(__file__).parents[2]
# A daemon that leaves a process to init, in a session of its own and without its
# environment, as slurmd does with slurmstepd.
DAEMON = "(env -i setsid ./slurmstepd 1234 & echo $! > step.pid); exec ./slurmd 1234"
HOLDER = f"""
import os, sys, time
from tests.launch.slurm_processes import Daemons
daemons = Daemons()
daemons.start(["sh", "-c", {DAEMON!r}], os.environ, "log")
print("ready", flush=True)
time.sleep(1234)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with programs of Slurm's names that only wait."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    for name in ("slurmd", "slurmstepd"):
        shutil.copy(sleep, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def step_of(folder: Path) -> int:
    path = folder / "step.pid"
    until_s = time.monotonic() + 20
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return int(path.read_text())


def test_steps_end_with_their_cluster_and_those_of_others_do_not(folder):
    with subprocess.Popen(["./slurmstepd", "1234"], start_new_session=True) as other:
        daemons = Daemons()
        daemon = daemons.start(["sh", "-c", DAEMON], os.environ, folder / "log")
        step = step_of(folder)
        assert is_running(daemon)
        assert is_running(step)
        daemons.end()
        assert not is_running(daemon)
        assert not is_running(step)
        assert other.poll() is None
        other.kill()


def test_a_daemon_is_killed_alone_and_its_step_goes_on_until_the_end(folder):
    daemons = Daemons()
    daemon = daemons.start(["sh", "-c", DAEMON], os.environ, folder / "log")
    step = step_of(folder)
    os.kill(daemon, signal.SIGKILL)
    until_s = time.monotonic() + 20
    while is_running(daemon):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert is_running(step)
    daemons.end()
    assert not is_running(step)


def test_nothing_is_left_when_the_process_that_started_them_is_killed(folder):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        step = step_of(folder)
        holder.kill()
    until_s = time.monotonic() + 20
    while is_running(step):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_program_that_is_missing_is_named(folder):
    daemons = Daemons()
    with pytest.raises(RuntimeError, match=r"\./absent cannot be started: .*No such"):
        daemons.start(["./absent"], os.environ, folder / "log")
    daemons.end()
