"""Start process groups: real ones, and misbehaving programs."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from mjax.health.startup import command as init
from mjax.health.startup import model as init_model
from mjax.health.startup import starts as init_start
from mjax.health.startup.starts import FailedError, time_start

LISTENER = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[-1].rpartition(":")[2])))
while True:
    server.accept()[0].close()
"""
WELL = """
import json, os, sys, time
rank, number, address, descriptor, began = sys.argv[1:]
rank = int(rank)
def say(phase, **times):
    times = {"wall_s": 1.0 + rank, "cpu_s": 10.0 + rank} | times
    os.write(int(descriptor), (json.dumps({"phase": phase, **times}) + "\\n").encode())
    os.read(0, 1)
"""


def fake(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Let the processes of a group run this after WELL, without jax."""
    script = WELL + textwrap.dedent(body)
    python = (sys.executable, "-S", "-c")
    monkeypatch.setattr(init_start, "CHILD", (*python, script))
    monkeypatch.setattr(init_start, "COORDINATOR", (*python, LISTENER))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """Measure a real group of 2, and 2 clients."""
    words = ["--processes", "2", "--clients", "2", "--repeats", "1", "--json"]
    code = f"""
import sys
from mjax.health.startup import command
sys.exit(command.main({words}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_real_group_goes_through_all_phases(real: dict[str, Any]):
    (start,) = real["starts"]["2"]
    assert [phase["name"] for phase in start] == [
        *("spawn", "import", "connect", "barrier", "comparison", "devices"),
        *("compile", "collective", "end"),
    ]
    for phase in start:
        assert len(phase["wall_s"]) == len(phase["cpu_s"]) == 2
        assert min(phase["wall_s"]) > 0
    cpu_s = {phase["name"]: min(phase["cpu_s"]) for phase in start}
    assert cpu_s["import"] > 10 * cpu_s["barrier"]


def test_real_clients_ask_the_coordinator_for_the_same(real: dict[str, Any]):
    (start,), (light,) = real["starts"]["2"], real["clients"]["2"]
    names = [phase["name"] for phase in start]
    assert [phase["name"] for phase in light] == [
        *("import", "connect", "barrier", "comparison", "devices", "end"),
    ]
    assert {phase["name"] for phase in light} <= {*names}
    assert all(phase["coordinator_s"] > 0 for phase in light)


def test_what_the_model_says_of_phases_is_of_phases_that_exist(real: dict[str, Any]):
    names = {phase["name"] for phase in real["phases"]}
    for group in ("LOCAL", "SILENT", "CPU_ONLY", "ONE_BY_ONE"):
        assert {*getattr(init_model, group)} <= names
    assert init_start.LAST in names


def test_one_size_is_not_said_to_tell_a_law(real: dict[str, Any]):
    laws = [phase["growth"]["slowest"]["law"] for phase in real["phases"]]
    assert {*laws} == {None}
    assert real["total"]["value_s"] is None


def test_the_times_are_those_of_their_process(monkeypatch: pytest.MonkeyPatch):
    """Process 0 reports last."""
    fake(monkeypatch, "time.sleep(0.1 * (rank == 0))\nsay('one')\nsay('end')")
    one, end = time_start(3, port=0, limit_s=60)
    assert (one.name, end.name) == ("one", "end")
    assert one.wall_s == end.wall_s == (1.0, 2.0, 3.0)
    assert one.cpu_s == (10.0, 11.0, 12.0)


def test_a_phase_begins_when_all_have_ended_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
):
    body = """
    time.sleep(0.15 * rank)
    say("one", wall_s=time.monotonic())
    say("end", wall_s=time.monotonic())
    """
    fake(monkeypatch, body)
    one, end = time_start(2, port=0, limit_s=60)
    assert one.wall_s[0] < one.wall_s[1] < min(end.wall_s)


def test_a_process_that_dies_is_named_with_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    body = f"""
    open(f"{tmp_path}/{{rank}}", "w").write(str(os.getpid()))
    say("one")
    if rank == 1:
        print("before\\nno such device")
        sys.exit(7)
    time.sleep(3600)
    """
    fake(monkeypatch, body)
    with pytest.raises(FailedError) as caught:
        time_start(3, port=0, limit_s=60)
    assert str(caught.value) == (
        "process 1 ended with exit code 7; its last lines:\n  before\n  no such device"
    )
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [pid for pid in pids if is_running(pid)] == []


def test_a_process_that_is_killed_is_named_with_the_signal(
    monkeypatch: pytest.MonkeyPatch,
):
    fake(monkeypatch, "say('one')\nos.kill(os.getpid(), 9)")
    with pytest.raises(FailedError, match=r"process \d ended with signal 9 \(Killed\)"):
        time_start(2, port=0, limit_s=60)


def test_a_process_that_hangs_ends_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fake(monkeypatch, "say('one') if rank else time.sleep(3600)")
    began_s = time.monotonic()
    words = ["--processes", "2", "--clients", "--limit-s", "0.7"]
    assert init.main(words) == 1
    assert time.monotonic() - began_s < 30
    error = capsys.readouterr().err
    assert "a start of 2 processes: process 0 did not come to the end" in error
    assert "--limit-s 0.7; give more time" in error
    assert "process 1" not in error


def test_a_process_that_ends_alone_is_no_success(monkeypatch: pytest.MonkeyPatch):
    fake(monkeypatch, "say('one')\nif rank == 0: say('two')")
    with pytest.raises(FailedError, match="process 1 has ended, others have not"):
        time_start(2, port=0, limit_s=60)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "before the phase 'end'; phases done: none"),
        ("say('one')", "before the phase 'end'; phases done: one"),
        ("say(f'phase-{rank}')", "different phases: phase-0, phase-1"),
        ("os.write(int(descriptor), b'ready\\n')", "which is not a phase report"),
        ("say('one', wall_s='soon')", r"not a phase report .*`\$.wall_s`"),
    ],
)
def test_a_group_that_does_not_do_all_phases_has_failed(
    monkeypatch: pytest.MonkeyPatch, body: str, message: str
):
    fake(monkeypatch, body)
    with pytest.raises(FailedError, match=message):
        time_start(2, port=0, limit_s=60)


def test_a_coordinator_that_dies_is_named(monkeypatch: pytest.MonkeyPatch):
    fake(monkeypatch, "say('one')\nsay('end')")
    dying = (sys.executable, "-c", "print('no memory'); raise SystemExit(3)")
    monkeypatch.setattr(init_start, "COORDINATOR", dying)
    with pytest.raises(FailedError, match="coordinator does not listen") as caught:
        time_start(2, port=0, limit_s=60)
    assert "no memory" in str(caught.value)


def test_a_port_in_use_is_bad_input(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert init.main(["--processes", "2", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"error: --port {port} cannot be listened on" in error
    assert "give another port" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "0"], "--processes must be distinct numbers, each at least 2"),
        (["--processes", "4", "4"], "got 4 4"),
        (["--clients", "1"], "--clients must be distinct numbers, each at least 2"),
        (["--clients", "100000"], "--clients must be at most 4096, got 100000"),
        (["--processes", "1000000"], "--processes 1000000 may take 400000.0 GB"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--hosts", "1"], "--hosts must be at least 2, got 1"),
        (["--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        (["--limit-s", "0"], "--limit-s must be positive, got 0"),
        (["--limit-s", "inf"], "--limit-s must be positive, got inf"),
        (["--round-trip-us", "-1"], "--round-trip-us must be at least 0, got -1"),
    ],
)
def test_bad_flags_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert init.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "two"], "argument --repeats: invalid int value: 'two'"),
        (["--process", "2"], "unrecognized arguments: --process 2"),
    ],
)
def test_flags_that_cannot_be_read_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        init.main(words)
    assert message in capsys.readouterr().err


def test_absent_flags_have_the_values_of_the_documentation():
    assert init.parse([], "init") == init.InitFlags()
    found = init.parse(["--clients", "--processes", "4", "2"], "init")
    assert found.clients == ()
    assert found.processes == (4, 2)


def test_the_cpu_clock_of_a_process_is_its_own():
    before_s = time.process_time()
    found_s = init_start._cpu_s(os.getpid())
    assert before_s <= found_s <= time.process_time()


def test_a_process_ends_when_whoever_started_it_has_gone():
    """It waits for its release after the first phase, and would wait forever."""
    words = (sys.executable, "-m", "mjax.processes.timed_start")
    with open(os.devnull, "w") as report:
        done = subprocess.run(
            [*words, "0", "2", "127.0.0.1:1", str(report.fileno()), "0"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            pass_fds=[report.fileno()],
            timeout=60,
        )
    assert done.returncode == 1


def test_a_signal_ends_the_processes_too(tmp_path: Path):
    child = f"""
import os, sys, time
open(f"{tmp_path}/{{sys.argv[1]}}.new", "w").write(str(os.getpid()))
os.rename(f"{tmp_path}/{{sys.argv[1]}}.new", f"{tmp_path}/{{sys.argv[1]}}")
time.sleep(3600)
"""
    code = f"""
import sys
from mjax.health.startup import command as init
from mjax.health.startup import starts as init_start
python = (sys.executable, "-S", "-c")
init_start.CHILD = (*python, {child!r})
init_start.COORDINATOR = (*python, {LISTENER!r})
sys.exit(init.main(["--processes", "2", "--clients"]))
"""
    running = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2]
    )
    paths = [tmp_path / str(rank) for rank in range(2)]
    try:
        until_s = time.monotonic() + 60
        while not all(path.exists() for path in paths):
            assert time.monotonic() < until_s
            time.sleep(0.02)
        running.terminate()
        assert running.wait(timeout=60) == 128 + 15
    finally:
        running.kill()
        running.wait()
    assert not [path for path in paths if is_running(int(path.read_text()))]
