"""Who holds a work dir is known as long as it lives, and no longer."""

import fcntl
import json
import os
import signal
import subprocess
import sys

import msgspec
import pytest

from mjax.processes import lock
from mjax.processes.lock import Holder, Lock, holder_of, this_process

HOLD = """
import sys, time
from pathlib import Path
from mjax.processes.lock import Lock, this_process
held = Lock(Path(sys.argv[1]))
assert held.take(this_process(sys.argv[2], int(sys.argv[3]))) is None
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.lock"


@pytest.fixture
def hold(path):
    """Hold the file in another process, until the test ends."""
    processes = []

    def begin(launch="", generation=0):
        words = [sys.executable, "-c", HOLD, str(path), launch, str(generation)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def test_a_process_that_is_killed_holds_nothing(path, hold):
    process = hold()
    found = Lock(path).take(this_process())
    assert found is not None
    assert found.pid == process.pid
    assert holder_of(path) == found
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert holder_of(path) is None
    ours = Lock(path)
    assert ours.take(this_process()) is None
    assert json.loads(path.read_text())["pid"] == os.getpid()
    ours.release()


def test_a_file_that_is_released_can_be_held_again_in_this_process(path):
    first, second = Lock(path), Lock(path)
    assert first.take(this_process()) is None
    assert first.take(this_process()) is None
    found = second.take(this_process())
    assert found is not None
    assert found.pid == os.getpid()
    first.release()
    assert second.take(this_process()) is None
    second.release()


def test_only_a_later_generation_of_the_same_launch_replaces_the_holder(path, hold):
    hold("launch", 3)
    for launch, generation in [("launch", 3), ("launch", 2), ("other", 4), ("", 0)]:
        assert Lock(path).take(this_process(launch, generation)) is not None
    newer = Lock(path)
    assert newer.take(this_process("launch", 4)) is None
    found = Lock(path).take(this_process())
    assert found is not None
    assert (found.pid, found.generation) == (os.getpid(), 4)
    newer.release()


def test_the_lock_of_another_host_refuses_nothing(path):
    far = Lock(path)
    there = Holder(host="far", boot="another boot", pid=1)
    assert far.take(there) is None
    assert holder_of(path) is None
    ours = Lock(path)
    assert ours.take(this_process()) is None
    found = holder_of(path)
    assert found is not None
    assert found.pid == os.getpid()
    for one in (far, ours):
        one.release()


def test_a_file_system_without_locks_refuses_nothing(path, monkeypatch):
    def refuse(file, operation):
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert Lock(path).take(this_process()) is None
    assert holder_of(path) is None


def test_a_look_creates_nothing_and_a_folder_that_cannot_be_written_is_no_error(path):
    assert holder_of(path) is None
    assert not path.exists()
    assert Lock(path.parent / "absent" / "a.lock").take(this_process()) is None


def test_a_file_that_was_moved_away_is_held_anew(path):
    ours = Lock(path)
    assert ours.take(this_process()) is None
    path.rename(path.with_suffix(".moved"))
    assert ours.take(this_process()) is None
    assert holder_of(path) is not None
    assert holder_of(path.with_suffix(".moved")) is None
    ours.release()


def test_a_holder_without_a_name_is_waited_for_then_refused(path, monkeypatch):
    monkeypatch.setattr(lock, "_SETTLE_S", 0.05)
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert Lock(path).take(this_process()) == lock.UNKNOWN
        assert holder_of(path) == lock.UNKNOWN
        file.write(msgspec.json.encode(this_process("launch", 2)))
        file.flush()
        assert holder_of(path) == this_process("launch", 2)
