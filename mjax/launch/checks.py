"""Check hosts with a command, before ranks restart on them and while they train.

Input: hosts that may be broken. Output: orders to their agents, and the hosts that did
not pass. A host that does not answer in time has not passed.
"""

import asyncio
import json
import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Collection, Sequence

from mjax.launch.config import RunConfig
from mjax.launch.hosts import Fleet, Host, HostState
from mjax.launch.messages import Check, Checked

HOST_VARIABLE = "MJAX_HOST"
"""Environment variable that holds the host's name during a check."""
_SHOWN_CHARS = 500
_SLICE_S = 1.0
"""Seconds between two readings of the clock during a check."""
_NUMBERS_PER_S = 1000
_NO_FAULT = ("ok", "pass", "unknown")
"""States of a check that are no fault, so its reason is not reported. A check is
"unknown" if its tool is not installed."""


class _Round:
    """A round of checks: an order to some hosts, and their answers."""

    def __init__(self, limit_s: float, fleet: Fleet) -> None:
        self._limit_s, self._fleet = limit_s, fleet
        self._number, self._until_s = 0, -math.inf
        self._asked: set[str] = set()
        self._order: Check | None = None
        self._said: dict[str, Checked] = {}

    def begin(
        self, command: Sequence[str], names: Collection[str], now_s: float
    ) -> None:
        # Hosts may answer old orders late, so the number is larger than in all earlier
        # rounds, including those of the previous driver.
        self._number = max(self._number + 1, int(now_s * _NUMBERS_PER_S))
        self._asked, self._said = {*names}, {}
        self._until_s = now_s + self._limit_s
        self._order = Check(
            number=self._number, command=[*command], timeout_s=self._limit_s
        )
        for name in sorted(names):
            self._fleet.send(name, self._order)

    def repeat_for(self, name: str) -> None:
        if self._order is not None and name in self._asked - self._said.keys():
            self._fleet.send(name, self._order)

    def said(self, name: str, answer: Checked) -> None:
        if answer.number == self._number:
            self._said[name] = answer

    def is_over(self, now_s: float, lost: Collection[str] = ()) -> bool:
        return now_s > self._until_s or not self._asked - self._said.keys() - {*lost}

    def results(self) -> list[tuple[Host, str]]:
        """End the round; return (host, reason) by name; "" if the host passed."""
        names, self._asked = sorted(self._asked), set()
        return [(self._fleet.hosts[name], self._why_not(name)) for name in names]

    def _why_not(self, name: str) -> str:
        answer = self._said.get(name)
        if answer is None:
            return f"its check did not answer in {self._limit_s:g} s"
        return "" if answer.is_healthy else answer.text


class Checks:
    """Checks of suspects, of sick hosts, and of training hosts."""

    def __init__(
        self, config: RunConfig, fleet: Fleet, tell: Callable[..., None]
    ) -> None:
        """Start without checks.

        Args:
          config: the commands and their intervals.
          fleet: the hosts of the run.
          tell: records an event, see `events.teller`.
        """
        self.command = shlex.split(config.check_command)
        """Words of the check command; empty if there is none."""
        self._return_command = shlex.split(config.return_command) or self.command
        self._every_s, self._limit_s = config.check_every_s, config.restart.check_s
        self._fleet, self._tell = fleet, tell
        self._suspects = _Round(self._limit_s, fleet)
        self._sick = _Round(self._limit_s, fleet)
        self._active = _Round(self._limit_s, fleet)
        self._sick_at_s = self._active_at_s = -math.inf

    def begin(self, names: Collection[str], now_s: float) -> None:
        """Order checks of suspect hosts, before they train again."""
        self._suspects.begin(self.command, names, now_s)

    def said(self, name: str, answer: Checked) -> None:
        """Store the answer of a host."""
        for one in (self._suspects, self._sick, self._active):
            one.said(name, answer)

    def repeat_for(self, name: str) -> None:
        """Repeat pending orders to a host, because its agent is another process."""
        for one in (self._suspects, self._sick, self._active):
            one.repeat_for(name)

    def is_over(self, now_s: float, lost: Collection[str] = ()) -> bool:
        """Return whether all suspects have answered or are lost, or the time is up."""
        return self._suspects.is_over(now_s, lost)

    def take_results(self, now_s: float) -> None:
        """Exclude the suspects that did not pass."""
        for host, why in self._suspects.results():
            if not why:
                self._passed(host)
            elif host.state is HostState.ACTIVE:
                self._fleet.evict(host, why, HostState.SICK)
                self._sick_at_s = now_s + self._limit_s

    def repeat(self, now_s: float) -> None:
        """Check sick hosts periodically; make those that pass spares."""
        if not self._return_command or not self._sick.is_over(now_s):
            return
        for host, why in self._sick.results():
            if host.state is HostState.SICK and not why:
                self._passed(host)
                host.state, host.why = HostState.SPARE, ""
        hosts = self._fleet.hosts.values()
        sick = {host.name for host in hosts if host.state is HostState.SICK}
        if sick and now_s >= self._sick_at_s:
            self._sick_at_s = now_s + self._limit_s
            self._sick.begin(self._return_command, sick, now_s)

    def watch(self, now_s: float) -> list[tuple[Host, str]]:
        """Check training hosts periodically; return (host, reason) for failed hosts."""
        if self._every_s is None or not self._active.is_over(now_s):
            return []
        found = [
            (host, why)
            for host, why in self._active.results()
            if why and host.state is HostState.ACTIVE
        ]
        if found:
            self._sick_at_s = now_s + self._limit_s
        if now_s >= self._active_at_s + self._every_s:
            self._active_at_s = now_s
            self._active.begin(self.command, self._fleet.placement, now_s)
        return found

    def _passed(self, host: Host) -> None:
        self._tell("check", f"{host.name} has passed its check", host=host.name)


async def run(
    command: Sequence[str],
    timeout_s: float,
    host: str = "",
    now_s: Callable[[], float] = time.monotonic,
) -> tuple[bool, str]:
    """Run the check command on this host.

    Args:
      command: words of the command line.
      timeout_s: time limit of the command, in seconds.
      host: name of the host in the run; the command gets it in `HOST_VARIABLE`.
      now_s: clock for the limit.
    Returns:
      Whether the command exited with 0 in time; and a text: the reasons of the failed
      checks if it printed JSON (`checks: [{name, state, reason}]`), otherwise its
      output.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {HOST_VARIABLE: host},
        )
    except OSError as error:
        return False, f"the check cannot be run: {error}"
    until_s, ending = now_s() + timeout_s, asyncio.create_task(process.communicate())
    while not ending.done() and (left_s := until_s - now_s()) > 0:
        await asyncio.wait({ending}, timeout=min(left_s, _SLICE_S))
    if not ending.done():
        ending.cancel()
        os.killpg(process.pid, signal.SIGKILL)  # children may keep the pipe open
        await process.wait()
        return False, f"the check did not end in {timeout_s:g} s"
    text = _reasons(ending.result()[0].decode(errors="replace"))
    if process.returncode:
        return False, text or f"the check ended with {process.returncode}"
    return True, text


def _reasons(output: str) -> str:
    """Return the reasons in a check's output, for the journal."""
    try:
        checks = json.loads(output)["checks"]
        failed = [one for one in checks if one["state"] not in _NO_FAULT]
        text = "; ".join(f"{one['name']}: {one['reason']}" for one in failed)
    except (ValueError, TypeError, KeyError):
        text = output.strip()
    return text[-_SHOWN_CHARS:]
