"""`health watch` as a person runs it: events, exit codes, safety."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mjax.health.events import command
from mjax.observe import events as run_events

PIPE = subprocess.PIPE
REPOSITORY = Path(__file__).parents[3]
RULES = """
[[rule]]
name = "flap"
pattern = 'Port: (?P<port>[0-9]+) Link DOWN'
by = ["port"]
count = 2
within_s = 10
event = { kind = "flap", severity = "error", text = "port {port} of {host}" }
action = ["site", "off", "{port}"]
test = ["site", "test", "{port}"]
undo = ["site", "on", "{port}"]
test_after_s = 60
policy = "POLICY"
"""
LOG = (
    "[    1.0] Port: 7 Link DOWN\n[    2.0] noise\n[    3.5] Port: 7 Link DOWN\n"
    "[   80.0] noise\n"
)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with rules, a log, and a program on PATH that records its calls."""
    for policy in ("tell", "confirm", "run"):
        path = tmp_path / f"{policy}.toml"
        path.write_text(RULES.replace("POLICY", policy))
    (tmp_path / "log").write_text(LOG)
    program = tmp_path / "bin" / "site"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    program.chmod(0o755)
    (tmp_path / "calls").touch()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def watch(site, policy, *words, state=True):
    argv = [str(site / "log"), "--rules", str(site / f"{policy}.toml"), *words]
    return command.main([*argv, *(["--state", str(site / "state")] if state else [])])


def calls(site):
    return (site / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("policy", "words", "runs"),
    [
        *(("tell", [], False), ("tell", ["--yes"], False)),
        *(("confirm", [], False), ("confirm", ["--yes"], True)),
        *(("run", [], True), ("run", ["--yes"], True), ("run", ["--dry-run"], False)),
    ],
)
def test_commands_run_only_with_yes_or_by_policy(site, policy, words, runs):
    assert watch(site, policy, *words) == 1
    assert calls(site) == (["off 7", "test 7", "on 7"] if runs else [])


def test_the_commands_to_confirm_are_printed(site, capsys):
    watch(site, "confirm")
    out = capsys.readouterr().out
    assert "3.500 s since boot error flap: port 7 of " in out
    assert "to be confirmed: run again with --yes" in out
    assert "  action: site off 7\n  test: site test 7\n  undo: site on 7\n" in out


def test_events_have_the_fields_of_the_launcher_and_are_appended(site, capsys):
    events = site / "events.jsonl"
    events.write_text('{"old": 1}\n')
    watch(site, "confirm", "--yes", "--json", "--events", str(events), "--host", "h1")
    printed = capsys.readouterr().out.splitlines()
    assert events.read_text().splitlines() == ['{"old": 1}', *printed]
    first = json.loads(printed[0])
    fields = "time_ns source host rank generation kind severity text data"
    assert list(first) == fields.split()
    assert (first["time_ns"], first["host"]) == (3_500_000_000, "h1")
    assert first["data"]["clock"] == "since boot"
    steps = [json.loads(line)["data"]["step"] for line in printed[1:]]
    assert steps == ["disable", "test", "enable"]
    read, (problem,) = run_events.read(site)
    assert [one.kind for one in read] == [json.loads(line)["kind"] for line in printed]
    assert "line 1 is left out" in problem


def test_a_replay_gives_the_same_events_as_full_speed(site):
    for name, words in (("a", []), ("b", ["--replay-speed", "1000"])):
        argv = [str(site / "log"), "--rules", str(site / "run.toml"), *words]
        argv += ["--state", str(site / f"state-{name}")]
        command.main([*argv, "--events", str(site / name)])
    assert (site / "a").read_text() == (site / "b").read_text()
    assert calls(site) == ["off 7", "test 7", "on 7"] * 2


@pytest.mark.parametrize(
    ("log", "code", "message"),
    [
        ("[ 1.0] noise\n", 0, "1 lines, 0 matched"),
        ("", 1, "no line had a time in a known format, so only"),
        ("Port: 1 Link DOWN\n", 1, "1 matches had no time and were not counted"),
        ("\x00\x01junk", 1, "so only rules with count 1 can fire"),
    ],
)
def test_only_a_log_that_was_understood_is_without_fault(
    site, capsys, log, code, message
):
    (site / "log").write_text(log)
    assert watch(site, "tell") == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["LOG"], "give a log (a file, or - for stdin) and --rules FILE"),
        (["/no/log", "--rules", "R"], "/no/log cannot be read: No such file"),
        (["LOG", "--rules", "/no/rules"], "--rules /no/rules cannot be read"),
        (
            ["LOG", "--rules", "R", "--replay-speed", "0"],
            "--replay-speed must be finite and above 0, got 0; give for example 10",
        ),
        (
            ["LOG", "--rules", "R", "--replay-speed", "nan"],
            "must be finite and above 0, got nan",
        ),
        (["-", "--rules", "R", "--follow"], "--follow needs a file"),
        (["LOG", "--rules", "R", "--yes", "--dry-run"], "contradict each other"),
        (["LOG", "--rules", "R", "--yes"], "--state FILE is missing"),
        (
            ["LOG", "--rules", "R", "--time-zone", "Mars/A"],
            "--time-zone Mars/A: no such",
        ),
        (
            ["LOG", "--rules", "R", "--events", "/no/x"],
            "--events /no/x cannot be written",
        ),
        (["LOG", "--rules", "R", "--state", "/no/x"], "--state /no/x cannot be used"),
        (["--release", "port=7"], "--release takes --state FILE"),
        (["--release", "port=7", "--state", "/no/x"], "does not exist; give the file"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(site, capsys, words, message):
    known = {"LOG": str(site / "log"), "R": str(site / "confirm.toml")}
    assert command.main([str(known.get(word, word)) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert calls(site) == []


def test_release_brings_a_device_back(site, capsys):
    (site / "log").write_text("".join(LOG.splitlines(keepends=True)[:3]))
    watch(site, "run")
    state = ["--state", str(site / "state")]
    assert command.main(["--release", "port=7", *state]) == 0
    assert command.main(["--release", "port=7", *state]) == 2
    assert "disabled: none" in capsys.readouterr().err


def test_signs_that_steer_a_terminal_are_not_printed(site, capsys):
    text = RULES.replace("POLICY", "tell").replace("[0-9]+", "[^ ]+")
    (site / "tell.toml").write_text(text)
    (site / "log").write_text(LOG.replace("7", "\x1b[2J"))
    watch(site, "tell")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2J" in out


def test_a_line_with_an_impossible_time_does_not_end_the_watch(site, capsys):
    """Anyone who can write to a log can write such a line."""
    times = ("9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59")
    lines = [f"{t} h app: {i} Port: 9 Link DOWN\n" for t in times for i in range(2)]
    (site / "log").write_text("".join(lines) + LOG)
    assert watch(site, "run") == 1
    assert "error flap: port 7" in capsys.readouterr().out
    assert calls(site) == ["off 7", "test 7", "on 7"]


def child(*words, stdin=None, stderr=None):
    argv = [sys.executable, "-m", "mjax.health.events.command", *words]
    return subprocess.Popen(
        argv, cwd=REPOSITORY, stdin=stdin, stdout=PIPE, stderr=stderr
    )


def test_a_pipe_is_read_line_by_line_and_a_signal_ends_with_a_summary(site):
    words = ["-", "--rules", str(site / "tell.toml"), "--json"]
    with child(*words, stdin=PIPE, stderr=PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(LOG.encode())
        process.stdin.flush()  # and stays open
        assert json.loads(process.stdout.readline())["kind"] == "flap"
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"lines, 2 matched, 1 events" in error
    assert b"Traceback" not in error


def test_a_log_that_is_followed_and_rotated_loses_no_line(site):
    log = site / "log"
    log.write_text("[ 1.0] Port: 1 Link DOWN\n[ 2.0] Port: 1 Link DO")
    words = [str(log), "--rules", str(site / "tell.toml"), "--follow", "--json"]
    with child(*words, stderr=PIPE) as process:
        assert process.stdout
        with log.open("a") as file:
            file.write("WN\n")
        assert json.loads(process.stdout.readline())["data"]["device"] == {"port": "1"}
        log.rename(site / "log.1")
        log.write_text("[ 3.0] Port: 2 Link DOWN\n[ 4.0] Port: 2 Link DOWN\n")
        assert json.loads(process.stdout.readline())["data"]["device"] == {"port": "2"}
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 1


@pytest.mark.slow
def test_a_log_of_200_mb_is_read_in_bounded_memory(site):
    rng = random.Random(6)
    with (site / "log").open("wb") as file:
        block = (
            b"".join(
                b"[%12.6f] usb %d-1: new device number %d\n"
                % (i / 9, i % 7, rng.randrange(99))
                for i in range(40_000)
            )
            + rng.randbytes(50_000)
            + b"\n"
        )
        while file.tell() < 200e6:
            file.write(block)
        file.write(b"[99990.0] Port: 3 Link DOWN\n[99991.0] Port: 3 Link DOWN\n")
    words = ["-", "--rules", str(site / "tell.toml"), "--json"]
    with child(*words, stdin=PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin
        assert process.stdout
        with (site / "log").open("rb") as file:
            while data := file.read(2**20):
                process.stdin.write(data)
        process.stdin.flush()
        event = json.loads(process.stdout.readline())
        status = Path(f"/proc/{process.pid}/status").read_text()
    (peak,) = (x.split()[1] for x in status.splitlines() if x.startswith("VmHWM"))
    assert event["data"]["device"] == {"port": "3"}
    assert int(peak) < 60_000  # KiB; the interpreter has 20,000
    assert process.returncode == 1
