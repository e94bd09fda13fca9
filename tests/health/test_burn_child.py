"""Measuring processes that hang, die, or send invalid reports."""

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mjax.health.burn import child as burn_child
from mjax.health.burn.child import Ended, Limits, Stopped
from mjax.health.burn.measurements import Task

RAISE = "raise --limit-s if the host is only slow"
KINDS_ASKED = ("bits.int8", "pair", "all_to_all", "all_reduce")
LIMITS = Limits(start_s=70.0, kind_s=60.0)
FAKE = """
import json, os, sys, time
task = json.loads(sys.argv[-1])
open(sys.argv[1], "a").write("started\\n")
def send(**report):
    os.write(task["report_fd"], (json.dumps(report) + "\\n").encode())
def hang():
    open(f"{sys.argv[1]}-{os.getpid()}", "x")
    time.sleep(600)
def end(kind):
    send(event="end", kind=kind, results=[{"name": kind, "outcome": "right"}])
{before}
send(event="hardware", hardware="fake")
for kind in task["kinds"]:
    send(event="begin", kind=kind)
    {what}
    end(kind)
{after}
"""


class Clock:
    """A clock that advances only while a measuring process hangs, even on a loaded
    machine.

    It is a step later then each time that it is asked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.now_s, self.step_s = folder, 0.0, 1000.0

    def __call__(self) -> float:
        pids = (path.name.partition("-")[2] for path in self._folder.glob("starts-*"))
        if any(Path(f"/proc/{pid}").exists() for pid in pids):
            self.now_s += self.step_s
        return self.now_s


@pytest.fixture(autouse=True)
def clock(tmp_path, monkeypatch) -> Clock:
    found = Clock(tmp_path)
    monkeypatch.setattr(burn_child, "time", types.SimpleNamespace(monotonic=found))
    return found


def fake(
    tmp_path: Path, what: str = "pass", *, before: str = "", after: str = ""
) -> list[str]:
    """Return the command of a measuring process that follows a script."""
    text = FAKE.replace("{before}", before).replace("{after}", after)
    path = tmp_path / "fake.py"
    path.write_text(text.replace("{what}", what))
    return [sys.executable, str(path), str(tmp_path / "starts")]


def measure(command: list[str], **changes: Any) -> Ended:
    task = Task(kinds=changes.pop("kinds", KINDS_ASKED), form="quick", **changes)
    return burn_child.measure(task, command, os.environ, LIMITS, lambda: False)


def outcomes(ended: Ended) -> dict[str, str]:
    return {one.name: one.outcome for one in ended.results}


def num_starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text().splitlines())


def test_one_process_measures_everything_when_nothing_goes_wrong(tmp_path):
    ended = measure(fake(tmp_path))
    assert outcomes(ended) == dict.fromkeys(KINDS_ASKED, "right")
    assert (ended.hardware, num_starts(tmp_path)) == ("fake", 1)


def test_a_measurement_that_hangs_is_incomplete_and_the_others_are_made(tmp_path):
    ended = measure(fake(tmp_path, "hang() if kind == 'pair' else None"))
    assert outcomes(ended) == dict.fromkeys(KINDS_ASKED, "right") | {
        "pair": "incomplete"
    }
    assert ended.results[1].note == f"pair did not end within 60 s; {RAISE}"
    assert num_starts(tmp_path) == 2


def test_a_measurement_that_kills_its_process_fails_with_its_last_words(tmp_path):
    stack = "Xid 79\\n    @     0x7f32  PyObject_Call\\n"
    what = f"kind == 'pair' and (print('{stack}', file=sys.stderr), os.abort())"
    ended = measure(fake(tmp_path, what))
    assert outcomes(ended) == dict.fromkeys(KINDS_ASKED, "right") | {"pair": "error"}
    assert ended.results[1].note == (
        "the measuring process was killed by signal 6 during pair: Xid 79"
    )


def test_a_host_on_which_everything_hangs_costs_two_limits_only(tmp_path):
    ended = measure(fake(tmp_path, "hang()"))
    assert outcomes(ended) == dict.fromkeys(KINDS_ASKED, "incomplete")
    assert num_starts(tmp_path) == 2
    why = f"pair did not end within 60 s; {RAISE}"
    assert ended.results[3].note == f"not measured after: {why}"


def test_a_process_that_cannot_start_fails_every_measurement(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no backend')"]
    ended = measure(command)
    assert outcomes(ended) == dict.fromkeys(KINDS_ASKED, "error")
    assert ended.results[0].note == "the measuring process ended with 1: no backend"


def test_a_start_that_hangs_is_incomplete(tmp_path):
    ended = measure(fake(tmp_path, before="hang()"))
    assert outcomes(ended) == dict.fromkeys(KINDS_ASKED, "incomplete")
    why = f"the measuring process did not start within 70 s; {RAISE}"
    assert ended.results[0].note == why
    assert num_starts(tmp_path) == 1


@pytest.mark.parametrize(
    "what",
    [
        "end('disk')",
        "os.write(task['report_fd'], b'x\\n')",
        "send(event='end', kind=kind, results=[])",
        "kind = 'pair'; send(event='end', kind=kind, results=[{'name': 'disk', "
        "'outcome': 'right'}])",
        "send(event='end', kind=kind, results=[{'name': kind, 'outcome': 'value'}])",
    ],
)
def test_a_process_that_reports_something_else_fails(tmp_path, what):
    ended = measure(fake(tmp_path, what), kinds=("pair",))
    assert outcomes(ended) == {"pair": "error"}
    assert "sent an invalid report" in ended.results[0].note


def test_a_process_that_hangs_after_its_last_report_has_measured(tmp_path, clock):
    clock.step_s = 20.0  # more than it has to end, less than for a measurement
    ended = measure(fake(tmp_path, after="hang()"))
    assert outcomes(ended) == dict.fromkeys(KINDS_ASKED, "right")
    assert num_starts(tmp_path) == 1
    assert clock.now_s < 60


def test_processes_that_measure_together_are_not_started_twice(tmp_path):
    command = fake(tmp_path, "os._exit(3)")
    ended = measure(command, kinds=("all_reduce_hosts",), num_processes=2)
    assert outcomes(ended) == {"all_reduce_hosts": "error"}
    assert num_starts(tmp_path) == 1


def test_a_stop_ends_the_measuring_process(tmp_path):
    pid = tmp_path / "pid"
    # Not hang(): then the clock of these tests would go on, and the limit might win.
    what = f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    task = Task(kinds=("pair",), form="quick")
    with pytest.raises(Stopped):
        burn_child.measure(
            *(task, fake(tmp_path, what), os.environ, LIMITS),
            lambda: pid.exists() and pid.read_text() != "",
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
