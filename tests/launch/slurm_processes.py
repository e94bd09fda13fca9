"""Daemons of a test, which end with every process that they have started.

Slurm's daemons leave processes behind: a step is adopted by init, with a title in place
of its environment, and a job may start daemons of its own. Here a small program is the
parent of the daemons and adopts all orphans below it (PR_SET_CHILD_SUBREAPER), so the
processes to end are its descendants. It kills them when its stdin closes: at `end`, or
when the process that holds the other end is killed.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 10.0
"""Time limit of the kills. Chosen: a killed process is gone within milliseconds, unless
the kernel holds it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Daemons:
    """Programs that run in the background until `end`."""

    def __init__(self) -> None:
        """Start the parent of the programs."""
        self._parent = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> int:
        """Start a program and return its process id.

        Args:
          words: its command line.
          environment: the whole environment.
          log: file to which its output is appended.
        Raises:
          RuntimeError: it cannot be started.
        """
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        request = [*words], {**environment}, str(log)
        with contextlib.suppress(BrokenPipeError):
            self._parent.stdin.write(json.dumps(request) + "\n")
            self._parent.stdin.flush()
        answer = self._parent.stdout.readline().strip()
        if not answer.isdigit():
            raise RuntimeError(f"{words[0]} cannot be started: {answer or 'no answer'}")
        return int(answer)

    def end(self) -> None:
        """Kill the programs and all that descends from them.

        Raises:
          RuntimeError: processes survive.
        """
        out, _ = self._parent.communicate()
        if self._parent.returncode != 0:
            raise RuntimeError(f"not all processes could be killed: {out.strip()}")


def is_running(pid: int) -> bool:
    """Return whether a process that is not ours to wait for still exists."""
    return Path(f"/proc/{pid}").exists()


def descendants(ancestor: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may have spaces; the state and parent follow.
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [*children.get(ancestor, [])]
    for pid in found:
        found += children.get(pid, [])
    return found


def main() -> int:
    """Start a program for each request on stdin; at its end kill all descendants."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError("this kernel has no PR_SET_CHILD_SUBREAPER")
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    try:
        for line in sys.stdin:
            print(_start(*json.loads(line)), flush=True)
    except BrokenPipeError:
        pass
    finally:
        left = _kill_all()
    if left:
        with contextlib.suppress(BrokenPipeError):
            print(*left, flush=True)
    return 1 if left else 0


def _start(words: list[str], environment: dict[str, str], log: str) -> int | str:
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        return os.posix_spawnp(
            words[0],
            words,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, append, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigdef=[*_SIGNALS, signal.SIGCHLD],
        )
    except OSError as error:
        return str(error)


def _kill_all() -> list[int]:
    """Kill all descendants until there are none; return those that survive."""
    until_s = time.monotonic() + _KILL_S
    while (found := descendants(os.getpid())) and time.monotonic() < until_s:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return found


if __name__ == "__main__":
    sys.exit(main())
