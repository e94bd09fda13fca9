"""The command: rounds, resume, exit codes, flags, and real runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mjax.cli import exit_codes
from mjax.health.burn import child as burn_child
from mjax.health.burn import command as burn
from mjax.health.burn import state as burn_state
from mjax.health.burn.child import Ended, Stopped
from mjax.health.burn.judging import Round
from mjax.health.burn.measurements import KINDS, Measured, Outcome, Task, is_within
from tests.processes.test_distributed import clean_environment, free_port


class Host:
    """Simulates measuring processes; a round takes 60 s of a clock that it advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds, self.now_s = 0, 0.0
        self.outcome: Outcome = "right"
        self.bad_round, self.stop_round = -1, -1
        self.tasks: list[Task] = []
        self.environment: dict[str, str] = {}
        self.agreed_s: float | None = None
        monkeypatch.setattr(burn_child, "measure", self.measure)
        monkeypatch.setattr(burn.time, "monotonic", lambda: self.now_s)

    def measure(self, task, command, environment, limits, is_stopped) -> Ended:
        self.tasks.append(task)
        self.environment = environment
        if self.rounds == self.stop_round:
            self.stop_round = -1
            os.kill(os.getpid(), signal.SIGTERM)
        if is_stopped():
            raise Stopped
        if task.num_processes > 1:
            assert self.agreed_s is not None
            self.agreed_s += 60.0
            results = (Measured(name=task.kinds[0], outcome="right"),)
            return Ended(results=results, hardware="fake", agreed_s=self.agreed_s)
        outcome = "wrong" if self.rounds == self.bad_round else self.outcome
        self.rounds += 1
        self.now_s += 60.0
        (kind,) = task.kinds
        note = f"said in round {self.rounds}"
        results = (Measured(name=kind, outcome=outcome, note=note),)
        return Ended(results=results, hardware="fake")


@pytest.fixture
def host(monkeypatch) -> Host:
    return Host(monkeypatch)


ONE = ("--only", "memory.pattern", "--host", "h")


def run(capsys, *words: str) -> tuple[int, Any, str]:
    """Run the command; return its exit code, its JSON and its errors."""
    code = burn.main([*ONE, "--json", *words])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else None, said.err


def test_a_result_is_one_json_object_on_stdout_and_in_the_file(host, capsys, tmp_path):
    code, found, _ = run(capsys, "--out", str(tmp_path / "a.json"))
    assert code == exit_codes.DONE
    assert found == json.loads((tmp_path / "a.json").read_text())
    assert found == {
        "ok": True,
        "host": "h",
        "hardware": "fake",
        "checks": [
            {
                "name": "memory.pattern",
                "state": "ok",
                "value": None,
                "limit": None,
                "reason": "said in round 1",
                "unit": "",
            }
        ],
    }


def test_people_get_a_table(host, capsys):
    assert burn.main([*ONE]) == exit_codes.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["ok", "memory.pattern"]
    assert lines[-1] == ("h: passed (1 ok, 0 failed, 0 unknown, 0 incomplete), fake")


def test_a_long_burn_ends_when_its_minutes_are_over_and_is_over_then(
    host, capsys, tmp_path
):
    flags = ("--minutes", "5", "--state", str(tmp_path / "s"))
    first = run(capsys, *flags)
    assert (first[0], host.rounds) == (0, 5)
    assert "round 5: 5.0 of 5 minutes burned" in first[2]
    assert run(capsys, *flags)[:2] == first[:2]
    assert host.rounds == 5
    assert run(capsys, "--minutes", "7", *flags[2:])[0] == 0
    assert host.rounds == 7


def test_a_burn_that_was_stopped_and_resumed_has_the_result_of_an_undisturbed_one(
    host, capsys, tmp_path
):
    undisturbed = run(capsys, "--minutes", "5", "--state", str(tmp_path / "a"))
    host.rounds, host.stop_round = 0, 3
    flags = ("--minutes", "5", "--state", str(tmp_path / "b"))
    code, found, errors = run(capsys, *flags)
    assert (code, found) == (exit_codes.PREEMPTED, None)
    assert "stopped after 3 complete rounds" in errors
    assert len(json.loads((tmp_path / "b").read_text())["rounds"]) == 3
    assert run(capsys, *flags)[:2] == undisturbed[:2]
    one, other = (json.loads((tmp_path / x).read_text()) for x in "ab")
    assert one["rounds"] == other["rounds"]


def test_a_failure_before_a_stop_fails_the_burn_though_later_rounds_pass(
    host, capsys, tmp_path
):
    host.bad_round, host.stop_round = 1, 4
    flags = ("--minutes", "9", "--state", str(tmp_path / "s"))
    assert run(capsys, *flags)[0] == exit_codes.PREEMPTED
    code, found, _ = run(capsys, *flags)
    assert (code, found["ok"], host.rounds) == (exit_codes.FAILED, False, 9)
    (check,) = found["checks"]
    assert check["state"] == "failed"
    assert check["reason"] == "round 2 of 9: said in round 2"


def test_signals_are_handled_as_before_when_the_burn_is_over(host, capsys):
    before = signal.getsignal(signal.SIGTERM)
    host.stop_round = 0
    code, _, errors = run(capsys)
    assert (code, "nothing is saved without --state" in errors) == (
        exit_codes.PREEMPTED,
        True,
    )
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("outcome", "require", "code"),
    [
        ("right", (), 0),
        ("wrong", (), 1),
        ("error", (), 1),
        ("incomplete", (), 1),
        ("absent", (), 1),  # nothing is ok
        ("right", ("--require", "memory"), 0),
        ("right", ("--require", "disk"), 1),
    ],
)
def test_the_exit_code_tells_whether_the_host_has_passed(
    host, capsys, outcome, require, code
):
    host.outcome = outcome
    found = run(capsys, *require)
    assert (found[0], found[1]["ok"]) == (code, code == 0)


def test_what_is_required_and_not_measured_is_named(host, capsys):
    _, found, _ = run(capsys, "--require", "gemm.int8.gpu0")
    check = found["checks"][-1]
    assert (check["name"], check["state"]) == ("gemm.int8.gpu0", "unknown")
    assert check["reason"] == "required, but not measured"


def test_a_state_of_another_burn_is_refused(host, capsys, tmp_path):
    state = str(tmp_path / "s")
    assert run(capsys, "--state", state)[0] == 0
    for words, says in (
        (("--host", "other"), "with host h, but this one has other"),
        (("--quick",), "with form short, but this one has quick"),
        (("--memory-mib", "7"), "with memory_mib None, but this one has 7"),
    ):
        code, found, errors = run(capsys, "--state", state, *words)
        assert (code, found) == (exit_codes.BAD_INPUT, None)
        assert errors.startswith(
            f"error: --state {state} belongs to a burn {says}; give"
        )
    for text in ("", "{", '{"rounds": 3}', "[]"):
        Path(state).write_text(text)
        code, _, errors = run(capsys, "--state", state)
        assert code == exit_codes.BAD_INPUT
        assert "move the file away to start again" in errors
    assert host.rounds == 1


def test_a_state_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "s"
    one = Round(begin_s=0.0, seconds=1.5, hardware="fake", results=())
    saved = burn_state.Saved(host="h", settings={"form": "long"}, rounds=(one,))
    burn_state.save(path, saved)
    assert burn_state.load(path, "h", {"form": "long"}) == saved
    assert [*tmp_path.iterdir()] == [path]

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(burn_state.os, "fsync", full)
    with pytest.raises(RuntimeError, match="No space left"):
        burn_state.save(path, burn_state.Saved(host="x", settings={}))
    assert burn_state.load(path, "h", {"form": "long"}) == saved


MEETING = ("--coordinator", "a:1", "--num-processes", "2", "--process-id", "0")


def test_processes_that_burn_together_end_by_the_time_that_they_agreed_on(host, capsys):
    """The other process is two minutes ahead."""
    host.agreed_s = 120.0
    code = burn.main(
        ["--only", "memory.pattern", "all_reduce_hosts", "--minutes", "5", *MEETING]
    )
    assert (code, host.rounds) == (0, 3)
    together = [task for task in host.tasks if task.num_processes == 2]
    assert [task.elapsed_s for task in together] == [60.0, 120.0, 180.0]
    assert {task.coordinator for task in together} == {"a:1"}


def test_a_meeting_that_failed_is_not_tried_again(host, capsys, monkeypatch):
    right = host.measure

    def measure(task, *rest) -> Ended:
        ended = right(task, *rest)
        bad = Measured(name="all_reduce_hosts", outcome="error", note="no peer")
        return ended if task.num_processes == 1 else Ended(results=(bad,))

    host.agreed_s = 0.0
    monkeypatch.setattr(burn_child, "measure", measure)
    words = ["--only", "memory.pattern", "all_reduce_hosts", "--minutes", "3"]
    assert burn.main([*words, *MEETING]) == exit_codes.FAILED
    assert len([task for task in host.tasks if task.num_processes == 2]) == 1
    assert "round 1 of 3: no peer" in capsys.readouterr().out


def test_a_host_with_gpus_is_not_measured_on_its_cpu_by_accident(
    host, capsys, monkeypatch
):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(burn, "_nvidia_devices", lambda: 8)
    run(capsys, "--only", "devices")
    assert host.environment["JAX_PLATFORMS"] == "cuda"
    assert host.environment["LC_ALL"] == "C"
    run(capsys, "--only", "devices", "--simulate-devices", "3")
    assert host.environment["JAX_PLATFORMS"] == "cpu"
    assert host.environment["XLA_FLAGS"].endswith("device_count=3")


def test_gpus_are_counted_by_their_device_files(tmp_path):
    for name in ("nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert burn._nvidia_devices(tmp_path) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--minutes 0", "--minutes must be positive, got 0"),
        ("--minutes nan", "--minutes must be positive, got nan"),
        ("--limit-s -1", "--limit-s must be positive, got -1"),
        ("--simulate-devices 0", "--simulate-devices must be at least 1, got 0"),
        ("--disk-mib 12", "--disk-mib must be a multiple of 8, got 12; the nearest"),
        ("--only gem", "unknown --only gem; the nearest is "),
        ("--only gemm.int8.gpu0", "unknown --only gemm.int8.gpu0; the nearest is gemm"),
        ("--require disc", "unknown --require disc; the nearest is disk"),
        ("--compare /none.json", "--compare /none.json: "),
        ("--compare-fraction 1.1", "--compare-fraction must be in (0, 1], got 1.1"),
        ("--baselines /none", "--baselines /none: "),
        ("--disk-dir /none", "--disk-dir /none is not a folder; make it first"),
        ("--out /none/x", "--out /none/x: its folder does not exist; make it first"),
        ("--coordinator a:1", "go together; give all three or none"),
        (" ".join(MEETING).replace("a:1", "a"), "must be HOST:PORT, got a"),
        (" ".join(MEETING[:5]) + " 2", "--process-id must be 0 to 1, got 2"),
        ("--simulate-devices 2 --platform cuda", "needs --platform cpu, got cuda"),
        ("--simulate 2", "unknown flag --simulate; the nearest is --simulate-devices"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_measured(host, capsys, words, says):
    assert burn.main(words.split()) == exit_codes.BAD_INPUT
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert says in said.err
    assert host.tasks == []


def test_results_of_other_hosts_are_read_back_and_bad_ones_refused(
    host, capsys, tmp_path
):
    path = tmp_path / "other.json"
    assert run(capsys, "--host", "b", "--out", str(path))[0] == 0
    assert run(capsys, "--compare", str(path))[0] == 0
    good = path.read_text()
    for old, new, says in (
        ('"value": null', '"value": NaN', "memory.pattern must be positive, got nan"),
        ('"state": "ok"', '"state": "fine"', "must be one of 'ok', 'failed'"),
        ('"unit": ""', '"unit": 3', "unit must be text, got 3"),
        ('"unit": ""', '"unit": "TB/s"', "is in TB/s, expected GB/s"),
        ("]}", "", "not JSON"),
    ):
        assert old in good
        path.write_text(good.replace(old, new))
        num_rounds = host.rounds
        code, _, errors = run(capsys, "--compare", str(path))
        assert code == exit_codes.BAD_INPUT
        assert errors.startswith("error: --compare")
        assert says in errors
        assert host.rounds == num_rounds, "nothing is measured for a bad file"


def test_a_result_is_printed_though_its_file_cannot_be_written(host, capsys, tmp_path):
    code, found, errors = run(capsys, "--out", str(tmp_path))
    assert (code, found["ok"]) == (exit_codes.FAILED, True)
    assert errors == f"error: cannot write --out {tmp_path}: Is a directory\n"


def test_the_command_loads_no_jax():
    """jax is loaded only in the measuring processes, where it may hang."""
    code = (
        "import sys, mjax.health.burn.command; "
        "assert not {'jax', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=True)


def start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """Start a real burn."""
    return subprocess.Popen(
        [sys.executable, "-m", "mjax.health.burn.command", "--quick", "--json", *words],
        env=clean_environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_quick_burn_of_two_cpu_devices_measures_everything(tmp_path):
    process = start(
        *(tmp_path, "--simulate-devices", "2", "--memory-mib", "24"),
        *("--disk-mib", "8", "--disk-dir", str(tmp_path), "--require", "bits"),
    )
    output, errors = process.communicate(timeout=300)
    assert process.returncode == exit_codes.DONE, errors
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    for kind in KINDS:
        assert any(is_within(name, kind) for name in checks), kind
    right = {name for name, check in checks.items() if check["state"] == "ok"}
    bits = {kind for kind in KINDS if kind.startswith("bits.")}
    assert right == {"devices", "memory.pattern", *bits}
    for name, check in checks.items():
        has_value = name not in {*bits, "memory.pattern", "all_reduce_hosts"}
        assert (check["value"] is not None) == has_value, check
    assert checks["disk.read"]["unit"] == "GB/s"
    assert {"gemm.float32.cpu1", "pair.cpu1.cpu0", "all_reduce.2"} <= checks.keys()
    assert [*tmp_path.iterdir()] == []


def test_two_processes_reduce_over_the_network_and_agree(tmp_path):
    words = ("--simulate-devices", "1", "--only", "all_reduce_hosts", "--join-s", "60")
    address = f"127.0.0.1:{free_port()}"
    processes = [
        start(
            *(tmp_path, *words, "--coordinator", address, "--num-processes", "2"),
            *("--process-id", str(rank), "--state", str(tmp_path / str(rank))),
        )
        for rank in range(2)
    ]
    try:
        done = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    agreed = set()
    for rank, (output, errors) in enumerate(done):
        (check,) = json.loads(output)["checks"]
        assert (check["name"], check["state"]) == ("all_reduce_hosts.2", "unknown"), (
            errors
        )
        assert check["value"] > 0
        agreed.add(json.loads((tmp_path / str(rank)).read_text())["agreed_s"])
    assert len(agreed) == 1


def test_a_real_measuring_process_ends_with_its_parent(tmp_path):
    """The parent is killed and can do nothing about it."""
    parent = start(tmp_path, "--only", "memory", "--minutes", "9", "--memory-mib", "24")
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.05)
    parent.kill()
    parent.communicate()
    while Path(f"/proc/{found[0]}").exists():
        time.sleep(0.05)
