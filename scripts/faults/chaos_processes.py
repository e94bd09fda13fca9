"""Start, watch and end the four training processes of a run.

A part of scripts.faults.chaos. The processes are forks of this one, which has imported
their modules and touched no device. Each then runs `python -m mjax.train`.
"""

import atexit
import ctypes
import os
import re
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

# Modules that the processes need, imported once before the forks.
import mjax.ckpt.manager
import mjax.data.loader
import mjax.recipes
import mjax.run.loop
import mjax.run.report
import mjax.step.traced  # noqa: F401
from scripts.evidence import REPOSITORY

NUM_PROCESSES = 4
SILENCE_LIMIT_S = 300.0
"""Seconds without new text or a new row after which a group has failed."""
_PR_SET_PDEATHSIG = 1


class Group:
    """Four processes of one run."""

    def __init__(self, flags: list[str], work_dir: Path) -> None:
        """Start them.

        Args:
          flags: flags of the trainer, without the flags of the process group.
          work_dir: work dir of the run; the log of process 0 is written next to it.
        """
        self._store = work_dir / "checkpoints"
        self._rows = work_dir / "metrics.jsonl"
        self.log = work_dir.with_name(f"{work_dir.name}-{time.monotonic_ns()}.log")
        self._known = self._folders()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        flags = [
            *(*flags, "--distributed.coordinator", f"127.0.0.1:{port}"),
            *("--distributed.num-processes", str(NUM_PROCESSES)),
        ]
        self.started_s = time.perf_counter()
        self._pids = [
            _fork(
                [*flags, "--distributed.process-id", str(rank)],
                self.log if rank == 0 else self.log.with_suffix(f".{rank}"),
            )
            for rank in range(NUM_PROCESSES)
        ]
        self._codes: dict[int, int] = {}
        self.cpu_s = 0.0
        """Exit codes of the processes that have ended."""

    def is_whole(self) -> bool:
        """Return whether all processes are running."""
        for pid in self._pids:
            if pid not in self._codes:
                found, status, usage = os.wait4(pid, os.WNOHANG)
                if found:
                    self.cpu_s += usage.ru_utime + usage.ru_stime
                    self._codes[pid] = os.waitstatus_to_exitcode(status)
        return not self._codes

    def kill(self, rank: int, number: int) -> None:
        """Send a signal to one process."""
        os.kill(self._pids[rank], number)

    def wait(self, grace_s: float | None = None) -> list[int]:
        """Wait for all processes, kill those that hang, and return the exit codes.

        Args:
          grace_s: seconds after which they are killed. None kills them a minute after
            the first one ends, or after a long silence.
        """
        until_s = None if grace_s is None else time.perf_counter() + grace_s
        heard_s, heard = time.perf_counter(), -1
        while len(self._codes) < NUM_PROCESSES:
            now_s = time.perf_counter()
            if not self.is_whole() and until_s is None:
                until_s = now_s + 60
            if self._heard() != heard:
                heard_s, heard = now_s, self._heard()
            if (until_s and now_s > until_s) or now_s > heard_s + SILENCE_LIMIT_S:
                for pid in self._pids:
                    if pid not in self._codes:
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        return [self._codes[pid] for pid in self._pids]

    def text(self) -> str:
        """Return what process 0 has printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def resumed(self) -> int:
        """Return the restored step, 0 for a new state, -1 if not yet known."""
        found = re.search(r"resuming after step (\d+)", self.text())
        if found:
            return int(found[1])
        return 0 if self.has_begun() else -1

    def has_begun(self) -> bool:
        """Return whether the state is restored and rows of later steps are dropped."""
        return "MFU" in self.text()

    def new_rows(self) -> int:
        """Return how many rows this generation has written."""
        if not self.has_begun() or not self._rows.exists():
            return 0
        return self._rows.read_bytes().count(b"\n") - self.resumed()

    def new_folders(self, *, unfinished: bool) -> set[str]:
        """Return the folders that appeared in the store since the start."""
        fresh = self._folders() - self._known
        return {name for name in fresh if (".unfinished-" in name) == unfinished}

    def phase(self) -> str:
        """Return the activity of process 0, read from its log and the store."""
        text = self.text()
        if "start-up: compile" not in text:
            return "start"
        if not self.has_begun():
            return "restore"
        if not self.new_rows():
            return "first step"
        newest = max((int(n) for n in self._folders() if n.isdigit()), default=0)
        writing = [
            int(name.partition(".")[0]) for name in self.new_folders(unfinished=True)
        ]
        if any(step > newest for step in writing):
            return "save"
        return "removal of an old step" if writing else "steps"

    def restore_s(self) -> float | None:
        """Return the seconds that restoring took; None if nothing was restored."""
        found = re.search(r"restored in ([0-9.]+) s", self.text())
        return float(found[1]) if found else None

    def _heard(self) -> int:
        size = self._rows.stat().st_size if self._rows.exists() else 0
        return len(self.text()) + size

    def _folders(self) -> set[str]:
        return set(os.listdir(self._store)) if self._store.exists() else set()


def _fork(flags: list[str], log: Path) -> int:
    """Start `python -m mjax.train` in a fork of this process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(REPOSITORY)
        sys.argv = ["mjax.train", *flags]
        runpy.run_module("mjax.train", run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 70
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # as at exit: jax leaves the process group
        sys.stdout.flush()
        os._exit(code)
