"""`python -m mjax.doctor`: its checks, what makes them fail, and its output."""

import json
import re
import signal
import socket
import sys
import tomllib
from pathlib import Path

import pytest

from mjax.doctor import command, folders, network, probe, software, together
from mjax.doctor.facts import check
from mjax.doctor.facts import probe as source
from mjax.health import check as checking
from mjax.health.check_command import shown, to_json
from mjax.health.checks.table import BY_NAME
from mjax.health.findings import State
from mjax.health.kernel_rules import RULES_PATH
from mjax.health.log_digest import Now, Scanner
from mjax.health.settings import Settings, read_limits
from mjax.health.sources import Command, Reading

GPUS = {
    "platform": "gpu",
    "kinds": ["NVIDIA H100 80GB HBM3"] * 8,
    "seconds": 9.0,
    "gpus": 8,
    "driver": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06",
    "plugins": {"jax-cuda13-plugin": "0.11.2"},
    "error": "",
    "visible": None,
}
PACKAGES = {
    "python": "3.12.1",
    "requires_python": ">=3.12",
    "required": [["jax>=0.11.2", "0.11.2"], ["numpy>=2", "2.3.4"]],
    "extras": {"data": [["pyarrow>=26", "26.0.0"]], "eval": [["lm-eval>=0.4", None]]},
    "jaxlib": "0.11.2",
    "plugins": {"jax-cuda13-plugin": "0.11.2"},
}
FOLDER = {
    "path": "/data/runs",
    "tried": "/data",
    "type": "nfs4",
    "free_bytes": 5e12,
    "free_files": -1,
    "seconds": 0.01,
    "error": "",
}
NAME = {"name": "gpu001", "addresses": ["10.0.0.7"], "error": ""}


def usable(facts):
    return folders.usable(facts, least_gb=10)


def several(facts):
    return network.host_name(facts, hosts=2)


def one(facts):
    return network.host_name(facts, hosts=1)


@pytest.mark.parametrize(
    ("judge", "facts", "value"),
    [
        (software.python, PACKAGES, "3.12.1"),
        (software.packages, PACKAGES, "2 packages"),
        (software.extras, PACKAGES, "whole: data"),
        (software.plugin, PACKAGES, "jax-cuda13-plugin 0.11.2"),
        (software.jax_computes, GPUS, "8 x NVIDIA H100 80GB HBM3, in 9.0 s"),
        (software.jax_sees_gpus, GPUS, "8 of 8 GPUs"),
        (software.driver, GPUS, "580.65.06"),
        (one, NAME | {"addresses": ["127.0.1.1"]}, "gpu001 is 127.0.1.1"),
        (several, NAME, "gpu001 is 10.0.0.7"),
        (network.free_ports, {"taken": {}}, ""),
        (network.reached, {"silent": {}}, ""),
        (usable, FOLDER, "/data/runs (nfs4): 5000.0 GB free, tried in 0.01 s"),
        (folders.shared, FOLDER, "/data/runs (nfs4)"),
    ],
)
def test_a_host_that_is_ready_passes(judge, facts, value):
    verdict = judge(facts)
    assert (verdict.state, verdict.value) == (State.OK, value)


@pytest.mark.parametrize(
    ("judge", "facts", "reason"),
    [
        (software.python, PACKAGES | {"python": "3.11.9"}, "Python is 3.11.9"),
        (
            software.packages,
            PACKAGES | {"required": [["jax>=0.11.2", "0.10.0"], ["optax>=0.2", None]]},
            "jax>=0.11.2: is 0.10.0; optax>=0.2: is not installed",
        ),
        (
            software.extras,
            PACKAGES | {"extras": {"data": [["pyarrow>=26", "20.0.0"]]}},
            "pyarrow>=26 of mjax[data]: is 20.0.0",
        ),
        (
            software.plugin,
            PACKAGES | {"jaxlib": "0.11.3"},
            "jax-cuda13-plugin: is 0.11.2, jaxlib is 0.11.3",
        ),
        (
            software.plugin,
            PACKAGES
            | {"plugins": {"jax-cuda12-plugin": "1", "jax-cuda13-plugin": "1"}},
            "two plugins",
        ),
        (software.jax_computes, GPUS | {"error": "RuntimeError: no"}, "no"),
        (
            software.jax_sees_gpus,
            GPUS | {"platform": "cpu", "kinds": ["cpu"]},
            "the driver has 8 GPUs, jax uses cpu",
        ),
        (
            software.jax_sees_gpus,
            GPUS | {"kinds": GPUS["kinds"][:1]},
            "the driver has 8 GPUs, jax uses 1 of them",
        ),
        (
            software.driver,
            GPUS | {"driver": "NVRM version: 570.124.06"},
            "the driver is 570.124.06, CUDA 13 needs 580",
        ),
        (several, NAME | {"addresses": ["127.0.1.1", "::1"]}, "connect to themselves"),
        (one, NAME | {"error": "gpu001 has no address"}, "no address"),
        (network.free_ports, {"taken": {"12355": "in use"}}, "port 12355: in use"),
        (network.reached, {"silent": {"a:1": "refused"}}, "a:1: refused"),
        (usable, FOLDER | {"free_bytes": 9e9}, "has 9.0 GB free"),
        (usable, FOLDER | {"free_files": 12}, "can hold 12 more files"),
        (usable, FOLDER | {"error": "Read-only file system"}, "Read-only"),
        (folders.shared, FOLDER | {"type": "xfs"}, "that only this host sees"),
    ],
)
def test_a_host_that_is_not_ready_fails_with_the_value(judge, facts, reason):
    verdict = judge(facts)
    assert verdict.state is State.FAILED
    assert reason in verdict.reason


@pytest.mark.parametrize("judge", [software.jax_sees_gpus, software.driver])
def test_a_host_without_gpus_is_not_judged_by_them(judge):
    facts = GPUS | {"platform": "cpu", "kinds": ["cpu"], "gpus": 0, "driver": ""}
    assert judge(facts).state is State.UNKNOWN


def test_gpus_that_a_variable_hides_are_not_judged():
    facts = GPUS | {"kinds": GPUS["kinds"][:1], "visible": "3"}
    verdict = software.jax_sees_gpus(facts)
    assert verdict.state is State.UNKNOWN
    assert verdict.reason == "jax uses 1 of 8 GPUs, CUDA_VISIBLE_DEVICES is 3"


def test_a_folder_is_left_as_it_was(tmp_path):
    (tmp_path / "mine").write_text("1")
    found = probe.folder(str(tmp_path / "not" / "there"))
    assert (found["tried"], found["error"]) == (str(tmp_path), "")
    assert found["free_bytes"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_written_is_told_with_its_name(tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert "Not a directory" in probe.folder(str(file / "runs"))["error"]
    assert probe.folder("/proc/1")["error"]
    # As for a stale mount or a closed parent: looking up the folder is itself an error.
    unasked = probe.folder(str(tmp_path / ("x" * 300) / "runs"))
    assert "File name too long" in unasked["error"]
    assert folders.usable(unasked, least_gb=0).state is State.FAILED


def test_a_file_system_is_found_by_the_longest_mount_point():
    mounts = "none / overlay rw\nfs:/a /tmp nfs4 rw\nnone /tmp/a\\040b tmpfs rw\n"
    find = probe._file_system
    assert find(Path("/tmp/x"), mounts) == "nfs4"
    assert find(Path("/tmp/a b/x"), mounts) == "tmpfs"
    assert find(Path("/tmpx"), mounts) == "overlay"


def test_a_port_in_use_and_one_that_answers_are_told_apart():
    with socket.create_server(("", 0)) as server:
        taken = str(server.getsockname()[1])
        assert [*probe.ports(taken)["taken"]] == [taken]
        assert probe.connect(f"127.0.0.1:{taken}") == {"silent": {}}
    assert probe.ports(taken) == {"taken": {}}
    assert [*probe.connect(f"127.0.0.1:{taken}")["silent"]] == [f"127.0.0.1:{taken}"]


def state_of(source):
    asked = check("a.b", "", source, lambda facts: software.python(PACKAGES), "")
    settings = Settings(limits={})
    (found,) = checking.run([asked], settings, source_s=20.0).findings
    return found


def test_a_probe_that_crashes_fails_the_host():
    crash = "import os; os.kill(os.getpid(), 11)"
    found = state_of(Command((sys.executable, "-c", crash)))
    assert found.state is State.FAILED
    assert "it crashed with SIGSEGV" in found.reason


def test_a_probe_that_raises_fails_the_host_with_what_it_said():
    found = state_of(source("ports", "no number"))
    assert found.state is State.FAILED
    assert "ended with 1: it raised an error" in found.reason
    assert "invalid literal for int()" in found.reason


def test_a_group_that_crashes_fails_the_host():
    [group] = [c for c in network.checks(1, [], []) if c.name == "network.group"]
    assert {1, -signal.SIGSEGV} <= {*group.failing}
    assert "did not meet" in group.failing[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "0"], "--hosts must be at least 1, got 0"),
        (["--ports", "70000"], "--ports must be from 1 to 65535, got 70000"),
        (["--connect", "gpu001"], "--connect must be host:port"),
        (["--seconds", "0"], "--seconds must be positive, got 0"),
        (["--space-gb", "-1"], "--space-gb must be at least 0, got -1"),
        (["--expect", "/no/file"], "--expect /no/file cannot be read"),
        (["--distributed.num-processes", "1"], "--distributed flags need --together"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_tried(words, message, capsys):
    assert command.main(words) == 2
    assert message in capsys.readouterr().err


def test_this_host_is_judged(tmp_path, capsys):
    words = ["--no-hardware", "--json", "--space-gb", "0"]
    code = command.main([*words, "--work-dir", str(tmp_path / "runs")])
    found = json.loads(capsys.readouterr().out)
    states = {one["name"]: one["state"] for one in found["checks"]}
    assert code == (0 if found["ok"] else 1)
    for name in ("software.jax", "software.packages", "network.group"):
        assert states[name] == "ok", found
    assert states["folders.work_dir"] == "ok", found
    assert states["software.gpus"] == "unknown"
    assert not (tmp_path / "runs").exists()


def test_hardware_is_judged_by_the_checks_of_health():
    asked = command.DoctorFlags()
    names = {check.name for check in command.checks_of(asked)}
    assert {"gpu.count", "clock.offset", "software.jax"} <= names
    assert "processors.load" not in names  # only an idle host passes it
    without = command.checks_of(command.DoctorFlags(hardware=False))
    assert {check.name for check in without} < names


def test_an_unlisted_line_of_the_boot_warns_and_a_later_one_fails():
    (check,) = [
        one
        for one in command.checks_of(command.DoctorFlags())
        if one.name == "kernel.unlisted"
    ]
    settings = Settings(limits=read_limits())

    def reading(log: str) -> Reading:
        scanner = Scanner("dmesg", Now(unix_s=1e9, uptime_s=900.0), is_severe=True)
        scanner.feed(log.encode())
        return scanner.reading()

    def judged(log: str) -> checking.Report:
        finding = checking.judge(check, reading(log), settings)
        return checking.Report(findings=[finding], readings={}, seconds=0.0)

    boot = "[2.5] Spectre V9: odd (it's)\n"
    report = judged(boot)
    assert report.is_ok
    text = shown(report, is_all=False, checks={check.name: check})
    line, action, _ = text.splitlines()
    assert line.startswith("warning    kernel.unlisted 1 of 1 lines")
    assert action.endswith("allow it as shown.")
    assert str(RULES_PATH) in line
    added = "\n".join(re.findall("`(.*?)`", line))
    (allowed,) = tomllib.loads(added)["allow"]
    assert re.search(allowed["pattern"], boot)
    assert next(together._lines([], [to_json(report)])).startswith("warning ")
    later = judged(boot + "[400.0] sbridge: HANDLING MCE MEMORY ERROR\n")
    assert not later.is_ok
    assert "the last: sbridge" in later.findings[0].reason
    strict = checking.judge(BY_NAME[check.name], reading(boot), settings)
    assert strict.state is State.FAILED


def test_several_hosts_need_a_shared_folder():
    names = [check.name for check in command.checks_of(command.DoctorFlags(hosts=2))]
    assert "folders.shared" in names
