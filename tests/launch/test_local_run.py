"""Whole launches on this machine: real processes, sockets and signals, no jax."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mjax.launch import __main__ as command
from mjax.launch import messages
from mjax.launch.first_error import describe, first_error
from mjax.launch.messages import VERSION
from mjax.processes import lock
from mjax.processes.progress import LOCK_ANSWER, Phase

HERE = Path(__file__).parent
LAUNCH = """
import asyncio, sys
from pathlib import Path
from mjax.launch import local
from mjax.launch.config import LimitsConfig, RestartConfig, RunConfig
hosts, spares, per_host, work_dir, step_s, eval_s, trainer = sys.argv[1:]
config = RunConfig(
    hosts=int(hosts), spares=int(spares), ranks_per_host=int(per_host),
    limits=LimitsConfig(
        step_s=float(step_s), first_step_s=float(step_s), eval_s=float(eval_s)
    ),
    restart=RestartConfig(pause_s=0.1, lost_s=3.0),
)
flags, rank = ["--work-dir", work_dir], [sys.executable, trainer]
sys.exit(asyncio.run(local.run(config, flags, Path(work_dir), rank)))
"""


class Launch:
    """A launch in its own process, which tests may kill."""

    def __init__(
        self,
        work_dir,
        *,
        hosts=2,
        spares=0,
        per_host=1,
        step_s=60.0,
        eval_s=60.0,
        pace_s=0.05,
        faults=None,
    ):
        self.work_dir = work_dir
        work_dir.mkdir(exist_ok=True)
        told = (faults or {}) | {"pace_s": pace_s}
        (work_dir / "faults.json").write_text(json.dumps(told))
        words = [hosts, spares, per_host, work_dir, step_s, eval_s]
        words += [HERE / "fake_trainer.py"]
        self.words = [sys.executable, "-c", LAUNCH, *map(str, words)]
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            self.words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self):
        self.out, self.err = self.process.communicate(timeout=90)
        return self.process.returncode

    def events(self, kind=None):
        path = self.work_dir / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        events = [
            json.loads(line) for line in text.splitlines(keepends=True) if line[-1:]
        ]
        return [event for event in events if kind in (None, event["kind"])]

    def wait_for(self, condition):
        until_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until_s, self.events()
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def rows(self):
        path = self.work_dir / "rows.txt"
        text = path.read_text() if path.exists() else ""
        return [tuple(map(int, line.split())) for line in text.splitlines()]

    def pids(self):
        """Process ids of living ranks and agents."""
        found = subprocess.run(
            ["pgrep", "-f", str(self.work_dir)], capture_output=True, text=True
        )
        return [int(pid) for pid in found.stdout.split()]

    def assert_trained(self, num_ranks=2):
        """Every rank took every step, in one generation after the other."""
        for rank in range(num_ranks):
            rows = [
                (generation, step) for r, generation, step in self.rows() if r == rank
            ]
            assert sorted({step for _, step in rows}) == [*range(24)]
            assert rows == sorted(rows)
        assert [pid for pid in self.pids() if pid != os.getpid()] == []


@pytest.fixture(autouse=True)
def nobody_stays(tmp_path):
    yield
    subprocess.run(["pkill", "-9", "-f", str(tmp_path)], check=False)


def test_a_hang_in_an_evaluation_is_reported_with_its_phase_and_its_limit(tmp_path):
    faults = {"1:0": [10, "EVAL: sleep"], "1:1": [10, "EVAL: sleep"]}
    launch = Launch(tmp_path / "run", faults=faults, eval_s=1.5)
    assert launch.end() == 0, launch.err
    (failure,) = launch.events("failure")
    assert failure["data"]["cause"] == "hung"
    reason = "in eval: no progress for 1.5 s (--limits.eval-s)"
    assert reason in failure["text"]
    assert reason in launch.err


def test_a_run_without_faults_ends_with_0_in_one_generation(tmp_path):
    launch = Launch(tmp_path / "run", per_host=2)
    assert launch.end() == 0, launch.err
    launch.assert_trained(num_ranks=4)
    assert len(launch.events("generation")) == 1
    assert [event["data"]["step"] for event in launch.events("save")][-1] == 24
    token = tmp_path / "run" / "launch" / "token"
    assert token.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("rank", "what"),
    [
        (0, "SIGKILL"),
        pytest.param(1, "SIGKILL", marks=pytest.mark.slow),
        pytest.param(0, "SIGSEGV", marks=pytest.mark.slow),
        (1, "SIGSEGV"),
        (0, "exit 1"),
        (1, "exit 1"),
    ],
)
def test_a_rank_that_ends_costs_the_steps_since_the_last_save(tmp_path, rank, what):
    launch = Launch(tmp_path / "run", faults={f"1:{rank}": [10, what]})
    assert launch.end() == 0, launch.err
    launch.assert_trained()
    (failure,) = launch.events("failure")
    assert (failure["rank"], failure["generation"]) == (rank, 1)
    assert next(step for r, g, step in launch.rows() if (r, g) == (0, 2)) == 8
    if what == "exit 1":
        assert "error: told to exit 1" in failure["text"]
    found = first_error(launch.events())
    assert (found["generation"], found["ranks"]) == (1, [rank])
    assert (found["ends"][0]["rank"], found["text"]) == (rank, failure["text"])
    assert f"+0.000 s  rank {rank} on host-" in describe(found)


@pytest.mark.parametrize("what", ["sleep", "write slowly", "hold the lock", "stop"])
def test_a_rank_that_hangs_is_named_and_the_run_goes_on(tmp_path, monkeypatch, what):
    spy = tmp_path / "bin" / "py-spy"
    spy.parent.mkdir()
    spy.write_text('#!/bin/sh\necho "looked: $*"\n')
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{spy.parent}{os.pathsep}{os.environ['PATH']}")
    faults = {"1:1": [10, what]}
    launch = Launch(tmp_path / "run", hosts=3, step_s=2.0, faults=faults)
    assert launch.end() == 0, launch.err
    launch.assert_trained(num_ranks=3)
    (failure,) = launch.events("failure")
    assert failure["data"]["cause"] == "hung"
    assert failure["data"]["ranks"] == [1]
    (shown,) = launch.events("stacks")
    if what == "stop":
        assert "stopped by a signal" in failure["text"]
        assert "looked: dump --nonblocking --pid " in shown["data"]["spied"]["1"]
    elif what == "write slowly":
        stacks = shown["data"]["stacks"]["1"]
        assert stacks.endswith(f'  File "a.py", line 1 in slow\n{LOCK_ANSWER}')
    else:
        assert "fail" in shown["data"]["stacks"]["1"]


def test_an_agent_that_dies_takes_its_ranks_along_and_a_spare_steps_in(tmp_path):
    launch = Launch(tmp_path / "run", spares=1)
    launch.wait_for(lambda: len(launch.rows()) >= 10)
    placed = launch.events("generation")[0]["data"]["hosts"]
    pid = int((tmp_path / "run" / "launch" / f"agent-{placed[1]}.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    assert launch.end() == 0, launch.err
    launch.assert_trained()
    assert launch.events("failure")[0]["data"]["hosts"] in ([placed[1]], [])
    assert launch.events("generation")[-1]["generation"] == 2


def test_a_driver_that_is_killed_costs_no_step(tmp_path):
    launch = Launch(tmp_path / "run", pace_s=0.4)
    launch.wait_for(lambda: len(launch.rows()) >= 10)
    before = launch.pids()
    holder = lock.holder_of(launch.work_dir / lock.DRIVER)
    assert holder is not None
    assert holder.pid == launch.process.pid
    launch.process.kill()
    launch.process.communicate()
    assert lock.holder_of(launch.work_dir / lock.DRIVER) is None
    at = len(launch.rows())
    launch.start()
    launch.wait_for(lambda: launch.events("driver"))
    assert set(launch.pids()) >= set(before) - {launch.process.pid} - {before[0]}
    assert launch.end() == 0, launch.err
    launch.assert_trained()
    assert len(launch.events("generation")) == 1
    assert len(launch.rows()) == 48 > at


def test_a_driver_that_stands_still_blames_nobody(tmp_path):
    """It judges by its own clock, and reads what was sent to it meanwhile."""
    launch = Launch(tmp_path / "run", pace_s=0.3)
    launch.wait_for(lambda: len(launch.rows()) >= 4)
    launch.process.send_signal(signal.SIGSTOP)
    time.sleep(5)  # a host is lost after 3 s
    launch.process.send_signal(signal.SIGCONT)
    assert launch.end() == 0, launch.err
    launch.assert_trained()
    assert launch.events("failure") == []
    assert len(launch.events("generation")) == 1
    assert "this driver stood still for" in launch.events("gap")[0]["text"]


def test_an_agent_is_known_by_more_than_its_host_and_pid(tmp_path):
    """In containers, every agent is process 1."""
    launch = Launch(tmp_path / "run", hosts=1, pace_s=0.1)
    launch.wait_for(lambda: len(launch.rows()) >= 2)
    folder = tmp_path / "run" / "launch"
    address = json.loads((folder / "address.json").read_text())
    token = (folder / "token").read_text()

    def agent(name, word):
        words = {"address": "127.0.0.1", "pid": 1, "facts": {}, "version": VERSION}
        peer = socket.create_connection(address, timeout=10)
        hello = messages.Hello(token=token, host=name, id=word, **words)
        peer.sendall(messages.encode(hello))
        return peer

    with agent("host-7", "a") as first, agent("host-7", "b") as other:
        assert first.recv(100).startswith(b'{"type":"prepare"')
        assert b"an agent with the name host-7 is connected" in other.recv(300)
        with agent("host-7", "a") as again:  # the same process, on a new connection
            assert again.recv(100).startswith(b'{"type":"prepare"')
            assert first.recv(100) == b""  # the old one is closed
    assert launch.end() == 0, launch.err
    assert len(launch.events("generation")) == 1


def test_bad_input_of_a_rank_is_said_once_and_not_tried_again(tmp_path):
    launch = Launch(tmp_path / "run", faults={"1:1": [0, "exit 2"]})
    assert launch.end() == 2
    assert "error: told to exit 2" in launch.err
    assert len(launch.events("generation")) == 1


def test_a_message_of_all_ranks_is_printed_once(tmp_path):
    faults = {"1:0": [0, "exit 2"], "1:1": [0, "exit 2"]}
    launch = Launch(tmp_path / "run", faults=faults)
    assert launch.end() == 2
    assert launch.out == "error: told to exit 2\n"
    assert "ended with code 2, with the last lines of rank 0\n" in launch.err
    assert "told to exit 2" not in launch.err


def test_a_signal_to_the_launch_saves_and_ends_with_42(tmp_path):
    launch = Launch(tmp_path / "run")
    launch.wait_for(lambda: len(launch.rows()) >= 10)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end() == 42, launch.err
    assert int((tmp_path / "run" / "saved").read_text()) >= 4
    launch.start()
    assert launch.end() == 0, launch.err
    launch.assert_trained()
    assert launch.events("generation")[-1]["generation"] == 2


def test_people_ask_evict_and_stop(tmp_path, capsys):
    work_dir = tmp_path / "run"
    launch = Launch(work_dir, spares=1)
    launch.wait_for(lambda: len(launch.rows()) >= 4)
    assert command.main(["status", "--work-dir", str(work_dir), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["generation"]) == ("running", 1)
    assert {rank["phase"] for rank in status["ranks"]} <= {*Phase}
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    ask = ["evict", "--work-dir", str(work_dir), "--reason", "loud fan", "--host"]
    assert command.main([*ask, "host-9"]) == 2
    assert "no host host-9; the hosts are host-0" in capsys.readouterr().err
    first = launch.events("generation")[0]["data"]["hosts"]
    assert command.main([*ask, first[0]]) == 0
    launch.wait_for(lambda: len(launch.events("generation")) == 2)
    assert first[0] not in launch.events("generation")[1]["data"]["hosts"]
    assert command.main(["stop", "--work-dir", str(work_dir)]) == 0
    assert launch.end() == 42
    audits = [event["text"] for event in launch.events("audit")]
    assert [text.split()[0] for text in audits] == ["evict", "evict", "stop"]
    assert "loud fan" in audits[0]
    capsys.readouterr()
    assert command.main(["journal", "--work-dir", str(work_dir)]) == 0
    assert "loud fan" in capsys.readouterr().out
    assert command.main(["journal", "--work-dir", str(work_dir), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["events"]
    assert [one["text"] for one in told] == [one["text"] for one in launch.events()]
    end = launch.events("end")[-1]
    assert command.main(["status", "--work-dir", str(work_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "state": "ended",
        "exit_code": 42,
        "time_ns": pytest.approx(end["time_ns"], abs=1e6),
        "generation": 2,
        "why": "asked to stop",
    }
    assert command.main(["stop", "--work-dir", str(work_dir)]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith(f"error: {work_dir}: the run ended at ")
    assert "with exit code 42 (asked to stop), in generation 2" in refused


def test_an_update_is_checked_and_starts_after_a_save(tmp_path, capsys):
    launch = Launch(tmp_path / "run", pace_s=0.1)
    launch.wait_for(lambda: len(launch.rows()) > 4)

    def update(*words):
        own = ["--work-dir", str(launch.work_dir), "--reason", "to see"]
        return command.main(["update", *own, "--", *words])

    assert update("--seed", "13") == 2
    assert "error: --seed must not be 13" in capsys.readouterr().err
    assert update("--work-dir", "elsewhere") == 2
    assert "--work-dir cannot change in an update" in capsys.readouterr().err
    assert update("--seed", "5") == 0
    assert "restarts with the new flags and code" in capsys.readouterr().out
    launch.wait_for(lambda: launch.events("generation")[-1]["generation"] == 2)
    assert command.main(["status", "--work-dir", str(launch.work_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flags"][-2:] == ["--seed", "5"]
    assert launch.end() == 0, launch.err
    launch.assert_trained()
    assert {(r, g) for r, g, _ in launch.rows()} == {(0, 1), (1, 1), (0, 2), (1, 2)}
    (audit,) = launch.events("audit")
    assert audit["data"]["flags"] == ["--seed", "5"]


def test_an_update_that_ranks_refuse_is_taken_back(tmp_path):
    launch = Launch(tmp_path / "run", pace_s=0.1)
    launch.wait_for(lambda: len(launch.rows()) > 4)
    own = ["--work-dir", str(launch.work_dir), "--reason", "to see"]
    assert command.main(["update", *own, "--", "--seed", "17"]) == 0
    assert launch.end() == 0, launch.err
    launch.assert_trained()
    assert {generation for _, generation, _ in launch.rows()} == {1, 3}
    text = launch.events("update")[-1]["text"]
    assert text.startswith("the update is taken back: rank ")
    assert "--seed must not be 17" in text


@pytest.mark.parametrize("by", ["a person", "its agent"])
def test_a_drained_host_leaves_when_the_ranks_have_saved(tmp_path, by):
    launch = Launch(tmp_path / "run", spares=1, pace_s=0.1)
    launch.wait_for(lambda: len(launch.rows()) > 4)
    first = launch.events("generation")[0]["data"]["hosts"]
    spare = ({"host-0", "host-1", "host-2"} - {*first}).pop()
    own = ["--work-dir", str(launch.work_dir), "--host", first[1], "--reason", "a fan"]
    if by == "a person":
        assert command.main(["drain", *own]) == 0
    else:
        pid = (launch.work_dir / "launch" / f"agent-{first[1]}.pid").read_text()
        os.kill(int(pid), signal.SIGTERM)
    assert launch.end() == 0, launch.err
    launch.assert_trained()
    hosts = [event["data"]["hosts"] for event in launch.events("generation")]
    assert hosts == [first, [first[0], spare]]
    assert [event["data"]["cause"] for event in launch.events("failure")] == [
        "preempted"
    ]
    resumed = min(s for r, g, s in launch.rows() if (r, g) == (0, 2))
    assert resumed == 1 + max(s for r, g, s in launch.rows() if (r, g) == (0, 1))


def test_who_has_not_the_token_is_told_nothing(tmp_path, capsys):
    work_dir = tmp_path / "run"
    launch = Launch(work_dir, pace_s=1.0)
    launch.wait_for(lambda: len(launch.rows()) >= 4)
    wrong = tmp_path / "wrong"
    wrong.write_text("guess")
    ask = ["stop", "--work-dir", str(work_dir), "--token-file", str(wrong)]
    wrong.chmod(0o644)
    assert command.main(ask) == 2
    assert "has mode 0644: others may read it; chmod 600" in capsys.readouterr().err
    wrong.chmod(0o600)
    assert command.main(ask) == 2
    assert "error: wrong token" in capsys.readouterr().err
    address = json.loads((work_dir / "launch" / "address.json").read_text())
    agent = ["agent", "--driver", f"{address[0]}:{address[1]}", "--host", "host-7"]
    done = subprocess.run(
        [sys.executable, "-m", "mjax.launch", *agent, "--token-file", str(wrong)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "wrong token" in done.stderr
    good = [*agent[:-1], "host-0", "--token-file", str(work_dir / "launch" / "token")]
    done = subprocess.run(
        [sys.executable, "-m", "mjax.launch", *good],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert "an agent with the name host-0 is connected" in done.stderr
    assert command.main(["stop", "--work-dir", str(work_dir)]) == 0
    assert launch.end() == 42


@pytest.mark.parametrize("words", [[messages.Quit()], ["hello", "hello"]])
def test_who_says_what_is_not_said_there_is_left_alone(tmp_path, words):
    launch = Launch(tmp_path / "run")
    launch.wait_for(lambda: len(launch.rows()) >= 4)
    folder = tmp_path / "run" / "launch"
    fields = {"host": "host-7", "address": "127.0.0.1", "pid": 1, "facts": {}}
    token = (folder / "token").read_text()
    hello = messages.Hello(version=VERSION, token=token, **fields)
    lines = [messages.encode(hello if word == "hello" else word) for word in words]
    address = json.loads((folder / "address.json").read_text())
    with socket.create_connection(address, timeout=10) as stranger:
        stranger.sendall(b"".join(lines))
        answers = stranger.makefile("rb").read()  # until the driver hangs up
    assert answers in (b"", messages.encode(messages.Prepare(module="")))
    assert command.main(["stop", "--work-dir", str(tmp_path / "run")]) == 0
    assert launch.end() == 42
    assert "Traceback" not in launch.err


def test_a_second_driver_is_refused_and_changes_nothing(tmp_path, capsys, monkeypatch):
    words = ["--", "--recipe", "debug", "--work-dir", str(tmp_path)]
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    with lock.driving(tmp_path):
        (tmp_path / lock.ADDRESS).write_text('["127.0.0.1", 4321]')
        before = sorted(tmp_path.rglob("*"))
        for begins in ([], ["slurm"], ["driver", "--token-file", "absent"]):
            assert command.main([*begins, *words]) == 2
            said = capsys.readouterr().err
            assert f"its driver is process {os.getpid()} on " in said
            assert "at 127.0.0.1:4321; stop it (python -m mjax.launch stop" in said
        assert sorted(tmp_path.rglob("*")) == before


def test_a_launch_is_refused_while_a_trainer_started_by_hand_runs(tmp_path, capsys):
    held = lock.Lock(tmp_path / lock.TRAINING)
    assert held.take(lock.this_process()) is None
    words = ["--recipe", "debug", "--work-dir", str(tmp_path)]
    assert command.main(["--", *words]) == 2
    assert f"stop it (kill -INT {os.getpid()})" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["training.lock"]
    held.release()
    assert held.take(lock.this_process("launch", 2)) is None  # of a driver that died
    with lock.driving(tmp_path):
        pass
    held.release()


def test_another_protocol_is_refused_with_both_versions(tmp_path, capsys, monkeypatch):
    launch = Launch(tmp_path / "run")
    launch.wait_for(lambda: len(launch.rows()) >= 4)
    monkeypatch.setattr(messages, "VERSION", VERSION + 1)
    assert command.main(["stop", "--work-dir", str(tmp_path / "run")]) == 2
    assert f"protocol version {VERSION + 1} is not supported" in capsys.readouterr().err
    assert launch.end() == 0


def test_help_lists_every_command_with_what_it_does(capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main(["-h"])
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("commands") + 1
    listed = [line.split(maxsplit=1) for line in lines[first : lines.index("", first)]]
    assert [name for name, _ in listed] == [*command.COMMANDS]
    assert all(what.endswith(".") for _, what in listed)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the trainer's flags are missing; write python -m mjax.launch --hosts 2"),
        ("--hosts 0 -- --recipe debug", "--hosts must be at least 1, got 0"),
        ("--spares -1 --", "--spares must be at least 0, got -1"),
        ("--host 2 --", "unknown flag --host; the nearest is --hosts"),
        (
            "-- --distributed.process-id 1",
            "--distributed.process-id is set by the launch",
        ),
        ("-- --recipe debug -h", "for the trainer's flags, run python -m mjax.train"),
        ("-- --recipe debug --batch.size 0", "--batch.size must be at least 1, got 0"),
        (
            "--hosts 2 -- --recipe debug --simulate-devices 2 --batch.size 7",
            "dp x --batch.microbatches = 4 x 1 = 4, got 7; nearest that fit: --batch.",
        ),
        ("-- --restart-from-scratch", "would discard the run at every restart"),
        ("-- --work-dir gs://b/x", "--work-dir must be a folder, got the URL gs://b/x"),
        ("statu --work-dir a", "unknown command statu; the nearest is status"),
        (
            "agent --driver a --token-file t",
            "--driver must be host:port with a port from 1 to 65535, got 'a'",
        ),
        ("agent --driver a:1 --token-file absent", "cannot read the token file absent"),
        ("status --work-dir absent", "absent has no journal; no launch has run there"),
        ("stop --work-dir absent", "absent has no journal; no launch has run there"),
        (
            "status --work-dir absent --driver a:1 --token-file absent",
            "cannot read the token file absent",
        ),
        ("journal --work-dir absent", "absent has no journal; no launch has run there"),
    ],
)
def test_bad_input_is_one_message_and_starts_nothing(
    tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    assert command.main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_a_work_dir_with_another_run_that_has_not_ended_is_refused(tmp_path):
    launch = Launch(tmp_path / "run")
    launch.wait_for(lambda: len(launch.rows()) >= 4)
    launch.process.kill()
    launch.process.communicate()
    other = Launch(tmp_path / "run", hosts=3)
    assert other.end() != 0
    assert "belongs to an unfinished run with other hosts or flags" in other.err
    launch.start()
    assert launch.end() == 0


def test_importing_a_launch_loads_no_jax():
    code = "import mjax.launch.__main__, sys; print('jax' in sys.modules)"
    words = [sys.executable, "-c", code]
    assert subprocess.check_output(words, text=True) == "False\n"
