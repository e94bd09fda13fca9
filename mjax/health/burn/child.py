"""Run measurements in a separate process, which may hang or die.

Input: a task and the command of a measuring process. Output: the result of each kind.
A kind that exceeds its time limit is incomplete; its process is killed, and another
process measures the remaining kinds. A process that cannot be killed is left behind
after `_PARTING_S`.
"""

import contextlib
import dataclasses
import json
import os
import re
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from mjax import checked_json
from mjax.health.burn.measurements import Measured, Report, Task, is_within

_POLL_S = 0.2
"""Seconds between checks for a stop signal. Nobody notices a delay of that length."""
_PARTING_S = 10.0
"""Time limit in seconds for a process to exit after its last report. Devices need
seconds to close."""
_MOST_FAILURES = 2
"""Number of dead or hung processes after which the remaining kinds are skipped. It
bounds the time on a dead host."""
_MOST_BYTES = 2**20
_NOTE_CHARS = 300
_STACK = re.compile(r"\*\*\*|@ |PC: @|Fatal Python|Current thread|File |Extension mod")
"""Beginnings of stack lines of glog, absl and Python's faulthandler; the message is
above them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds of silence after which a measuring process counts as hung."""

    start_s: float
    """Limit before the first report: imports, the start of the devices, and the wait
    for other hosts."""
    kind_s: float
    """Limit between two reports."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """Reports of measuring processes."""

    results: tuple[Measured, ...] = ()
    hardware: str = ""
    agreed_s: float | None = None
    """Seconds of the longest burn among the processes that measure together."""


class Stopped(Exception):  # noqa: N818  (not an error: it was requested)
    """A signal arrived while a process measured."""


def measure(
    task: Task,
    command: Sequence[str],
    environment: Mapping[str, str],
    limits: Limits,
    is_stopped: Callable[[], bool],
) -> Ended:
    """Measure all kinds of a task, with as many processes as necessary.

    Args:
      task: its `report_fd` is set here.
      command: command of a measuring process; the task is appended as JSON.
      environment: environment of the process.
      limits: time limits.
      is_stopped: returns whether to stop immediately.
    Returns:
      the reports of all processes; each kind has at least one result.
    Raises:
      Stopped: `is_stopped` returned True.
    """
    ended, kinds, failures = Ended(), task.kinds, 0
    while kinds:
        child = _Child(dataclasses.replace(task, kinds=kinds), command, environment)
        try:
            found, why = child.follow(limits, is_stopped)
        finally:
            child.end()
        ended = Ended(
            results=(*ended.results, *found.results),
            hardware=found.hardware or ended.hardware,
            agreed_s=found.agreed_s,
        )
        kinds = kinds[len(child.done) :]
        if not kinds:
            break
        failures += 1
        stuck = kinds[:1] if child.current else kinds
        outcome = "incomplete" if child.is_hung else "error"
        ended = _with(ended, stuck, Measured(name="-", outcome=outcome, note=why))
        kinds = kinds[len(stuck) :]
        if failures == _MOST_FAILURES or task.num_processes > 1:
            note = f"not measured after: {why}"
            rest = Measured(name="-", outcome="incomplete", note=note)
            ended, kinds = _with(ended, kinds, rest), ()
    return ended


def _with(ended: Ended, kinds: Sequence[str], same: Measured) -> Ended:
    """Add the outcome `same` for each of several kinds."""
    added = (dataclasses.replace(same, name=kind) for kind in kinds)
    return dataclasses.replace(ended, results=(*ended.results, *added))


class _Child:
    """A measuring process."""

    def __init__(
        self, task: Task, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.done: list[str] = []
        self.current, self.is_hung = "", False
        self._task = task
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (see end)
        self._reader, writer = os.pipe()
        try:
            words = json.dumps(dataclasses.asdict(task) | {"report_fd": writer})
            self._process = subprocess.Popen(
                [*command, words],
                stdin=subprocess.PIPE,  # its end of file tells the child that we ended
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=(writer,),
                env=dict(environment),
                start_new_session=True,
            )
        finally:
            os.close(writer)

    def follow(
        self, limits: Limits, is_stopped: Callable[[], bool]
    ) -> tuple[Ended, str]:
        """Return the reports of the process, and why no more reports follow."""
        ended, rest, limit_s = Ended(), b"", limits.start_s
        heard_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while True:
                if is_stopped():
                    raise Stopped
                if not selector.select(_POLL_S):
                    if time.monotonic() - heard_s < limit_s:
                        continue
                    self.is_hung = True
                    return ended, self._why_hung(ended, limit_s)
                data = os.read(self._reader, _MOST_BYTES)
                if not data:
                    return ended, self._why_dead()
                *lines, rest = (rest + data).split(b"\n")
                try:
                    for line in lines:
                        ended = self._take(ended, checked_json.read(line, Report))
                except ValueError as error:
                    return ended, f"a measuring process sent an invalid report: {error}"
                heard_s = time.monotonic()
                limit_s = _PARTING_S if self._is_done(ended) else limits.kind_s

    def _take(self, ended: Ended, report: Report) -> Ended:
        """Return the reports with one more."""
        match report.event:
            case "hardware":
                return dataclasses.replace(ended, hardware=report.hardware)
            case "agreed":
                return dataclasses.replace(ended, agreed_s=report.elapsed_s)
            case "begin":
                self.current = report.kind
                return ended
        if [report.kind] != [*self._task.kinds[len(self.done) :][:1]]:
            raise ValueError(f"{report.kind} out of order")
        names = [one.name for one in report.results]
        if not names or not all(is_within(name, report.kind) for name in names):
            raise ValueError(f"{', '.join(names) or 'nothing'} for {report.kind}")
        self.done.append(report.kind)
        self.current = ""
        results = (*ended.results, *report.results)
        return dataclasses.replace(ended, results=results)

    def _is_done(self, ended: Ended) -> bool:
        """Return whether all reports have arrived."""
        has_met = self._task.num_processes == 1 or ended.agreed_s is not None
        return has_met and len(self.done) == len(self._task.kinds)

    def _why_hung(self, ended: Ended, limit_s: float) -> str:
        """Return a text on the part in which the process was silent for too long."""
        if self.current:
            what = f"{self.current} did not end"
        elif ended == Ended():
            what = "the measuring process did not start"
        else:
            what = "the measuring process did not begin its next measurement"
        return f"{what} within {limit_s:g} s; raise --limit-s if the host is only slow"

    def _why_dead(self) -> str:
        """Return why the process has ended, with the last line of its output."""
        try:
            code = self._process.wait(_PARTING_S)
        except subprocess.TimeoutExpired:
            return "the measuring process closed its pipe and did not exit"
        how = f"ended with {code}" if code >= 0 else f"was killed by signal {-code}"
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _MOST_BYTES))
        text = self._errors.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines()]
        last = next((x for x in lines[::-1] if x and not _STACK.match(x)), "")
        during = f" during {self.current}" if self.current else ""
        return f"the measuring process {how}{during}: {last[:_NOTE_CHARS]}"

    def end(self) -> None:
        """Kill the process and its descendants; do not wait if it cannot be killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(_PARTING_S)
        except subprocess.TimeoutExpired:
            self.is_hung = True  # blocked in the kernel, in a driver
        os.close(self._reader)
        self._errors.close()
