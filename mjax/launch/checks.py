"""Checks of hosts by a command, before ranks are started there again.

Enters: hosts that may be broken. Leaves: orders to their agents, and which hosts have
not passed. A host that does not answer in time has not passed.
"""

import asyncio
import json
import math
import os
import shlex
import signal
from collections.abc import Callable, Collection, Sequence

from mjax.launch.hosts import Fleet, HostState
from mjax.launch.messages import Check, Checked

_SHOWN_CHARS = 500


class Checks:
    """One round of checks after the other."""

    def __init__(
        self, command: str, limit_s: float, fleet: Fleet, tell: Callable[..., None]
    ) -> None:
        """Begin with none.

        Args:
          command: of the check; empty: there is none.
          limit_s: seconds that it may take, and before it is repeated.
          fleet: of the hosts.
          tell: records an event, see `events.teller`.
        """
        self.command = shlex.split(command)
        self._limit_s, self._fleet, self._tell = limit_s, fleet, tell
        self._number, self._until_s, self._again_s = 0, -math.inf, -math.inf
        self._asked: set[str] = set()
        self._said: dict[str, Checked] = {}

    def begin(self, names: Collection[str], now_s: float) -> None:
        """Order a check of these hosts."""
        self._number += 1
        self._asked, self._said = set(names), {}
        self._until_s = now_s + self._limit_s
        order = Check(
            number=self._number, command=self.command, timeout_s=self._limit_s
        )
        for name in sorted(names):
            self._fleet.send(name, order)

    def said(self, name: str, answer: Checked) -> None:
        """Take the answer of a host."""
        if answer.number == self._number:
            self._said[name] = answer

    def is_over(self, now_s: float, lost: Collection[str] = ()) -> bool:
        """Say whether all have answered, or the time is over."""
        return now_s > self._until_s or not self._asked - self._said.keys() - {*lost}

    def take_results(self, now_s: float) -> None:
        """Put aside the hosts that have not passed; sick ones that have are spares."""
        for name in sorted(self._asked):
            host, why = self._fleet.hosts[name], self._why_not(name)
            if not why:
                self._tell("check", f"{name} has passed its check", host=name)
                if host.state is HostState.SICK:
                    host.state, host.why = HostState.SPARE, ""
            elif host.state is HostState.ACTIVE:
                self._fleet.evict(host, why, HostState.SICK)
                self._again_s = now_s + self._limit_s
        self._asked = set()

    def repeat(self, now_s: float) -> None:
        """Bring back the sick hosts that pass by now; ask them now and then."""
        if not self.command or not self.is_over(now_s):
            return
        self.take_results(now_s)
        hosts = self._fleet.hosts.values()
        sick = {host.name for host in hosts if host.state is HostState.SICK}
        if sick and now_s >= self._again_s:
            self._again_s = now_s + self._limit_s
            self.begin(sick, now_s)

    def _why_not(self, name: str) -> str:
        """Say why a host has not passed; empty if it has."""
        answer = self._said.get(name)
        if answer is None:
            return f"its check did not answer in {self._limit_s:g} s"
        return "" if answer.is_healthy else answer.text


async def run(command: Sequence[str], timeout_s: float) -> tuple[bool, str]:
    """Run the command on this host.

    Returns:
      whether it ended with 0 in time, and what it says: the reasons of the checks that
      failed, if it printed JSON (`checks: [{name, state, reason}]`), else its output.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return False, f"the check cannot be run: {error}"
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)  # its children hold the pipe
        await process.wait()
        return False, f"the check did not end in {timeout_s:g} s"
    text = _reasons(output.decode(errors="replace"))
    if process.returncode:
        return False, text or f"the check ended with {process.returncode}"
    return True, text


def _reasons(output: str) -> str:
    """Return what a person should read of the output of a check."""
    try:
        checks = json.loads(output)["checks"]
        failed = [one for one in checks if one["state"] not in ("ok", "pass")]
        text = "; ".join(f"{one['name']}: {one['reason']}" for one in failed)
    except (ValueError, TypeError, KeyError):
        text = output.strip()
    return text[-_SHOWN_CHARS:]
