"""Actions after an event: disable a device, test it, and enable it again.

Input: detections, and the time of the log. Output: records of completed actions, or of
those that are left to a person. A command runs only if its rule has the policy `run`,
or the policy `confirm` and the caller was given --yes. Commands are argument lists
without a shell, and have a time limit. A value from a log enters an argument list only
if it is a plain name.

Life cycle: disabling -> disabled -> testing -> enabling -> enabled; a failed test leads
back to disabled, and `max_tests` failed tests or a failed command lead to kept.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mjax.health.events.engine import Detection, text_of
from mjax.health.events.rules import Limits, Rule, filled
from mjax.health.events.state import Device, FullError, State

_NS = 10**9
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./:-]{0,126}[A-Za-z0-9_])?")
"""Values of a log that may enter an argument. The rule
allows no option, blank or shell character, because a program may pass its arguments to
a shell on another machine."""
_KILLED = -signal.SIGKILL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """An event as in events.jsonl, without source and host."""

    time_ns: int
    kind: str
    severity: str
    text: str
    data: Mapping[str, Any]


Run = Callable[[Sequence[str], float], int]
"""Runs an argument list with a time limit in seconds; returns the exit status."""


def run(argv: Sequence[str], limit_s: float) -> int:
    """Return the exit status of a command: 127 if it cannot start, -9 at its limit."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, ValueError):
        return 127
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return _KILLED
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def argvs_of(detection: Detection) -> dict[str, list[str]]:
    """Return the filled argument lists of a rule, by step: action, test and undo.

    Raises:
      ValueError: a value from the log is not a plain name.
    """
    rule = detection.rule
    return {
        step: [_argument(word, detection.values) for word in getattr(rule, step)]
        for step in ("action", "test", "undo")
        if getattr(rule, step)
    }


def _argument(template: str, values: Mapping[str, str]) -> str:
    named = {
        name: value for name, value in values.items() if "{" + name + "}" in template
    }
    for name, value in named.items():
        if not _NAME.fullmatch(value) or ".." in value:
            raise ValueError(f"{name} is {value[:80]!r}")
    return filled(template, values)


class Actions:
    """Carries out the actions of rules."""

    def __init__(
        self, state: State, limits: Limits, *, may: Callable[[Rule], bool], run: Run
    ) -> None:
        """Continue from the saved state.

        Args:
          state: state of this and earlier runs.
          limits: number of devices that may be disabled.
          may: returns whether the commands of a rule may be run.
          run: runs a command.
        """
        self._state, self._limits, self._may, self._run = state, limits, may, run
        self._due_ns: int | None = None
        self._plan()

    def resume(self, now_ns: int) -> list[Record]:
        """Finish interrupted steps, and return their records.

        Call it once, as soon as the log time is known.
        """
        records = []
        for device in self._state.all():
            if device.step == "disabling":
                records += self._disable(device, now_ns)
            elif device.step in ("testing", "enabling"):
                # The test may be out of date, so it runs again before the device is
                # enabled.
                self._put(device, step="disabled", due_ns=now_ns)
        self._plan()
        return records

    def handle(self, detection: Detection) -> list[Record]:
        """Act on an event; return the records of the event and of its actions.

        The list is empty if the event was already handled.
        """
        if not self._state.is_new(_mark(detection)):
            return []
        rule = detection.rule
        data: dict[str, Any] = {
            "rule": rule.name,
            "device": dict(detection.device),
            "count": detection.count,
            "first_ns": detection.first_ns,
            "line": detection.line.text[:400],
        }
        if detection.line.is_since_boot:
            data["clock"] = "since boot"
        if rule.ticket:
            data["ticket"] = text_of(detection, rule.ticket)
        after = self._act(detection, data) if rule.action else []
        self._plan()
        first = Record(
            time_ns=detection.time_ns,
            kind=rule.event.kind,
            severity=rule.event.severity,
            text=text_of(detection, rule.event.text),
            data=data,
        )
        return [first, *after]

    def advance(self, now_ns: int) -> list[Record]:
        """Test the devices that are due, enable those that pass; return the records."""
        records: list[Record] = []
        if self._due_ns is None or now_ns < self._due_ns:
            return records  # the usual case, for each line
        for device in self._waiting():
            if device.due_ns <= now_ns:
                records += self._test(device, now_ns)
        self._plan()
        return records

    def _waiting(self) -> list[Device]:
        """Return the devices that wait for a test, in the order of their test times."""
        found = [
            one
            for one in self._state.all()
            if one.step == "disabled" and "test" in one.argvs
        ]
        return sorted(found, key=lambda one: one.due_ns)

    def _plan(self) -> None:
        self._due_ns = min((one.due_ns for one in self._waiting()), default=None)

    def release(self, name: str, now_ns: int) -> Record:
        """Forget a device that a person has enabled again; return the record.

        Raises:
          ValueError: it is not disabled.
        """
        known = {one.device: one for one in self._state.out_of_use()}
        if name not in known:
            shown = ", ".join(known) or "none"
            raise ValueError(f"--release {name}: not disabled; disabled: {shown}")
        self._put(known[name], step="enabled")
        return _record(known[name], now_ns, "released", "info", "released by a person")

    def _act(self, detection: Detection, data: dict[str, Any]) -> list[Record]:
        """Disable the device and return the records, or say in `data` why not."""
        rule, name = detection.rule, _device_name(detection)
        try:
            argvs = argvs_of(detection)
        except ValueError as error:
            data["status"] = f"refused: {error}, which is not a plain name"
            return []
        data["commands"] = {step: shlex.join(argv) for step, argv in argvs.items()}
        if not self._may(rule):
            data["status"] = (
                "to do by a person: the policy is tell"
                if rule.policy == "tell"
                else "to be confirmed: run again with --yes, or run the commands"
            )
            return []
        device = Device(
            device=name,
            rule=rule.name,
            step="disabling",
            argvs=argvs,
            due_ns=detection.time_ns + int(rule.test_after_s * _NS),
            max_tests=rule.max_tests,
            test_after_ns=int(rule.test_after_s * _NS),
            limit_s=rule.limit_s,
        )
        try:
            known = self._state.begin(device, self._limits.most)
        except FullError:
            data["status"] = (
                f"refused: {self._limits.most} devices are disabled, the most allowed "
                "at a time; look for a common cause, then --release those that work"
            )
            return []
        if known is not None:
            data["status"] = f"already disabled by rule {known.rule}: {known.step}"
            return []
        data["status"] = "run"
        return self._disable(device, detection.time_ns)

    def _disable(self, device: Device, now_ns: int) -> list[Record]:
        status = self._run(device.argvs["action"], device.limit_s)
        if status != 0:
            # It may have partly worked: the device counts as disabled until it is
            # checked.
            self._put(device, step="kept")
            text = "could not be disabled; a person must look, then --release it"
            return [_record(device, now_ns, "disable", "error", text, status)]
        self._put(device, step="disabled" if "test" in device.argvs else "kept")
        return [_record(device, now_ns, "disable", "warning", "disabled", status)]

    def _test(self, device: Device, now_ns: int) -> list[Record]:
        self._put(device, step="testing")
        status = self._run(device.argvs["test"], device.limit_s)
        if status == 0:
            passed = _record(device, now_ns, "test", "info", "passed its test", status)
            return [passed, self._enable(device, now_ns)]
        tests = device.tests + 1
        is_last = tests >= device.max_tests
        self._put(
            device,
            step="kept" if is_last else "disabled",
            tests=tests,
            due_ns=now_ns + device.test_after_ns,
        )
        text = f"failed test {tests} of {device.max_tests} and stays disabled"
        if is_last:
            text += "; a person must look, then --release it"
        severity = "error" if is_last else "warning"
        return [_record(device, now_ns, "test", severity, text, status)]

    def _enable(self, device: Device, now_ns: int) -> Record:
        self._put(device, step="enabling")
        status = self._run(device.argvs["undo"], device.limit_s)
        self._put(device, step="enabled" if status == 0 else "kept")
        if status == 0:
            return _record(device, now_ns, "enable", "info", "enabled", status)
        text = "could not be enabled; a person must look, then --release it"
        return _record(device, now_ns, "enable", "error", text, status)

    def _put(self, device: Device, **changes: Any) -> None:
        self._state.put(dataclasses.replace(device, **changes))


def _record(
    device: Device,
    now_ns: int,
    step: str,
    severity: str,
    text: str,
    status: int | None = None,
) -> Record:
    names = {"disable": "action", "test": "test", "enable": "undo"}
    data: dict[str, Any] = {"rule": device.rule, "device": device.device, "step": step}
    if step in names:
        data |= {"argv": device.argvs[names[step]], "exit": status}
    if status == _KILLED:
        text += f" (its command had {device.limit_s:g} s and was killed)"
    elif status:
        text += f" (exit {status})"
    return Record(
        time_ns=now_ns,
        kind="action",
        severity=severity,
        text=f"{device.device} {text}",
        data=data,
    )


def _device_name(detection: Detection) -> str:
    """Return the identifier of a device, which is the same for every rule."""
    return " ".join(f"{k}={v}" for k, v in sorted(detection.device.items()))


def _mark(detection: Detection) -> str:
    """Return the identifier of an event, the same when its log is read again."""
    line = detection.line
    text = zlib.crc32(line.text.encode(errors="replace"))
    name, device = detection.rule.name, _device_name(detection)
    return json.dumps([name, device, line.boot, detection.time_ns, text])
