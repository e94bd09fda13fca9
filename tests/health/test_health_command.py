"""`python -m mjax.health check` as a person and a launcher run it."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mjax.health import __main__ as command
from mjax.health import check_command
from mjax.health.check import Report
from mjax.health.check_command import table
from mjax.health.checks.table import CHECKS
from mjax.health.findings import Finding, State

REPOSITORY = Path(__file__).parents[2]


def run(*words, **variables):
    return subprocess.run(
        [sys.executable, "-m", "mjax.health", *words],
        cwd=REPOSITORY,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_this_host_is_judged_and_nothing_that_is_absent_is_ok():
    done = run("check", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    assert [one["name"] for one in found["checks"]] == [c.name for c in CHECKS]
    for one in found["checks"]:
        assert one["state"] in ("ok", "failed", "unknown", "incomplete")
        assert (one["state"] == "ok") == (one["reason"] == "")
        assert not (one["state"] == "ok" and one["name"].startswith("gpu."))
    assert found["seconds"] < 60


def finding(name, reason):
    return Finding(name=name, state=State.UNKNOWN, reason=reason)


def unknown_lines(findings, *, is_all=False, is_plain=False):
    report = Report(findings=findings, readings={}, seconds=1.0, is_plain=is_plain)
    return check_command.shown(report, is_all=is_all).splitlines()


def test_a_host_without_gpus_has_one_line_for_the_checks_of_gpus():
    findings = [
        finding("gpu.count", "there is no command nvidia-smi"),
        finding("gpu.ecc_mode", "there is no command nvidia-smi"),
        finding("infiniband.state", "there is no port"),
        finding("clock.offset", "there is no command chronyc"),
    ]
    lines = unknown_lines(findings, is_plain=True)
    assert lines[:2] == [
        "unknown    GPU, RDMA: no GPU and no RDMA device on this host, which leaves "
        "out 3 checks",
        "unknown    clock.offset: there is no command chronyc",
    ]
    each = unknown_lines(findings, is_all=True, is_plain=True)
    assert each[0] == "unknown    gpu.count: there is no command nvidia-smi"
    # A host that should have GPUs tells the reason of each check.
    assert "there is no command nvidia-smi" in unknown_lines(findings)[0]


@pytest.mark.parametrize(
    ("states", "summary"),
    [
        (
            [State.OK, State.OK, State.UNKNOWN],
            " has no fault in the 2 checks that were made; 1 could not be made "
            "(unknown), in 1.0 s",
        ),
        ([State.OK, State.OK], " is healthy: all 2 checks are ok, in 1.0 s"),
        (
            [State.OK, State.FAILED, State.UNKNOWN],
            " is NOT healthy: 1 failed, 0 incomplete, 1 ok; 1 could not be made "
            "(unknown), in 1.0 s",
        ),
        (
            [State.OK, State.INCOMPLETE],
            " is NOT healthy: 0 failed, 1 incomplete, 1 ok, in 1.0 s",
        ),
    ],
)
def test_the_summary_says_what_was_checked_and_what_was_not(states, summary):
    names = ("clock.offset", "memory.total", "gpu.count")
    findings = [Finding(name=n, state=s) for n, s in zip(names, states, strict=False)]
    report = Report(findings=findings, readings={}, seconds=1.0)
    assert check_command.shown(report, is_all=False).endswith(summary)


def test_unknown_checks_of_an_area_with_many_reasons_are_one_line_with_their_number():
    findings = [
        finding("gpu.count", "there is no command nvidia-smi"),
        finding("memory.total", "24 GiB; memory_gib is not in the expectations"),
        finding("clock.offset", "there is no command chronyc"),
        finding("clock.error", "there is no command chronyc"),
        finding("processors.smt", "off; smt is not in the expectations"),
    ]
    lines = unknown_lines(findings)
    assert lines[:3] == [
        "unknown    gpu.count: there is no command nvidia-smi",
        "unknown    system: 4 checks for 3 reasons, such as: there is no command "
        "chronyc",
        "           -> --all lists each of these checks with its reason",
    ]
    assert "no fault in the 0 checks that were made; 5 could not be made" in lines[3]
    each = unknown_lines(findings, is_all=True)
    assert len(each) == 6
    assert each[1] == f"unknown    memory.total: {findings[1].reason}"
    assert len(unknown_lines([])) == 1


def test_a_host_in_use_is_not_asked_for_idleness(capsys):
    words = ["check", "--json", "--only", "processors.*", "processes.*"]
    names = []
    for more in ([], ["--in-use"]):
        command.main([*words, *more])
        found = json.loads(capsys.readouterr().out)
        names.append({one["name"] for one in found["checks"]})
    left_out = {"processors.load", "processes.busy", "processes.training"}
    assert names[0] - names[1] == left_out


def test_what_is_required_fails_a_host_that_does_not_have_it(tmp_path):
    expect = tmp_path / "expect.toml"
    expect.write_text('require = ["memory.hugepages"]\n')
    done = run("check", "--expect", str(expect), "--only", "memory.hugepages")
    assert done.returncode == 1
    assert "and this check is required" in done.stdout
    assert "is NOT healthy" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "gpu.nonsense"], "--only gpu.nonsense: there is no such check"),
        (["--seconds", "0"], "--seconds must be positive, got 0"),
        (["--seconds", "inf"], "--seconds must be positive, got inf"),
        (["--expect", "/no/file"], "--expect /no/file cannot be read"),
        (["--limits", "/no/file"], "--limits /no/file cannot be read"),
        (["--out", "/no/folder/x"], "--out /no/folder/x cannot be written"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(words, message, capsys):
    if "--only" not in words:
        words = [*words, "--only", "memory.*"]
    assert command.main(["check", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--expect", "gpu = 8", "no expectation gpu; did you mean gpus?"),
        ("--expect", "gpus = true", "gpus must be of type int, got True"),
        ("--expect", 'require = ["gpux.*"]', "no check is named 'gpux.*'"),
        ("--expect", "require = [1]", "require[0] must be text, got 1"),
        ("--expect", 'services = ["sshd", 1]', "services[1] must be text, got 1;"),
        ("--expect", "versions = {cuda = 12.10}", "versions.cuda must be text, got"),
        ("--expect", "sysctl = {a = true}", "sysctl.a must be text, got True"),
        (
            "--expect",
            'versions = {driver = "570.124.06"}',
            "no check compares driver; did you mean nvidia_driver?",
        ),
        ("--expect", "gpus = ", "cannot be read"),
        ("--limits", "[memory]\nx = 1", "no check memory"),
        ("--limits", '["memory.swap"]\nmax = 1', "memory.swap has no limit max"),
        ("--limits", '["memory.swap"]\nmax_used_gib = "1"', "must be like 0, got '1'"),
        (
            "--limits",
            '["memory.swap"]\nsource = "me"',
            "memory.swap has no limit source\n",
        ),
        (
            "--limits",
            '["memory.swap"]\nmax_used_gib = nan',
            "memory.swap.max_used_gib must be like 0, got nan",
        ),
        (
            "--limits",
            '["processes.training"]\nnames = ["python*", 1]',
            "got ['python*', 1]",
        ),
        ("--limits", '["routes.arp"]\narp_announce = ["2"]', "got ['2']"),
        (
            "--limits",
            '["nvlink.rate"]\ngb_per_s = {B200 = "50"}',
            "got {'B200': '50'}",
        ),
    ],
)
def test_files_with_mistakes_are_refused(option, text, message, tmp_path, capsys):
    path = tmp_path / "file.toml"
    path.write_text(text + "\n")
    words = ["check", "--only", "memory.*", option, str(path)]
    assert command.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option} {path}")
    assert message in error


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "a command is missing"), (["chek"], "there is no command chek")],
)
def test_another_command_is_refused_with_a_list_of_all(words, message, capsys):
    assert command.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert "check     check this host" in error


def test_a_tool_that_hangs_is_incomplete_and_its_children_are_killed(tmp_path):
    """A fake nvidia-smi that never ends, with a child that holds the pipe."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nsleep 12345 & echo $! > $0.pid\nwait\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    gpu = next(c.name for c in CHECKS if c.source.shown.startswith("nvidia-smi"))
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run("check", "--json", "--only", gpu, "--seconds", "1", PATH=path)
    (finding,) = json.loads(done.stdout)["checks"]
    assert (done.returncode, finding["state"]) == (1, "incomplete")
    assert "time limit" in finding["reason"]
    child = Path(f"/proc/{smi.with_suffix('.pid').read_text().strip()}/cmdline")
    assert not child.exists() or "12345" not in child.read_text()


HANGING = """
import sys
from mjax.health.check import Check, run
from mjax.health.findings import ok
from mjax.health.settings import Settings
from mjax.health.sources import File
check = Check(
    name="a.b", what="", source=File(sys.argv[1]), judge=lambda *_: ok(), action=""
)
print(run([check], Settings(limits={}), total_s=0.1).findings[0].state)
"""


def test_a_file_that_hangs_is_incomplete_and_does_not_keep_the_command(tmp_path):
    """As one of a stale network file system: nobody ever writes into the pipe."""
    os.mkfifo(tmp_path / "pipe")
    argv = [sys.executable, "-c", HANGING, str(tmp_path / "pipe")]
    done = subprocess.run(
        argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("incomplete\n", "")


def test_the_table_of_the_docs_is_that_of_the_code():
    text = (REPOSITORY / "docs" / "hosts.md").read_text()
    found = re.search(r"<!-- checks -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert found is not None
    assert found[1].strip() == table(), (
        "write it with `python -m scripts.health.check_table`"
    )
