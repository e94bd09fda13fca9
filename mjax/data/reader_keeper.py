"""Run the reader of a host, and replace it when it dies.

Enters: a `host_reader.Job`. Leaves: a child process that does it, until `close`.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from mjax.data.host_reader import Job
from mjax.data.ring import COUNTERS, Ring

MAX_DEATHS = 3
"""Readers that may die one after the other without reading a single step."""
_END_S = 10


class Keeper:
    """Runs the reader of a host, and replaces it when it dies."""

    def __init__(self, job: Job, lifelines: Sequence[socket.socket] = ()) -> None:
        """Start the reader.

        Args:
          job: what it is to do; its descriptors are ours to close.
          lifelines: connections to the other processes; they end when we do.
        """
        self._job, self._lifelines = job, lifelines
        self._ring = Ring(job.ring, job.layout)
        self._lock = threading.Lock()
        self._is_closed = False
        self._process = self._start()
        self._thread = threading.Thread(
            target=self._keep, name="mjax-host-reader", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the reader that runs now."""
        return self._process.pid

    def close(self) -> None:
        """End the reader and wait for it."""
        with self._lock:
            self._is_closed = True
            _close_pipe(self._process)
        self._thread.join(_END_S)
        if self._thread.is_alive():  # it is stopped, or waits for a file system
            self._process.kill()
            self._thread.join()
        for descriptor in (self._job.ring, self._job.doorbell, *self._job.bells):
            os.close(descriptor)
        for connection in self._lifelines:
            connection.close()

    def _keep(self) -> None:
        num_rows, num_deaths = 0, 0
        while True:
            code = self._process.wait()
            with self._lock:
                _close_pipe(self._process)
                if self._is_closed or int(self._ring.failed_step[0]) >= 0:
                    return
                before, num_rows = (
                    num_rows,
                    int(self._ring.counters[COUNTERS.index("rows")]),
                )
                num_deaths = 1 if num_rows > before else num_deaths + 1
                step = self._ring.next_step()
                death = f"the reader (process {self.pid}) {_how(code)}"
                if num_deaths == MAX_DEATHS:
                    self._fail(step, f"{death}, {num_deaths} times in a row")
                    return
                self._process = self._start()
            print(f"{death}; a new one continues at step {step}", flush=True)

    def _fail(self, step: int, message: str) -> None:
        self._ring.fail(step, f"{message}, before step {step} was read")
        for bell in self._job.bells:
            os.eventfd_write(bell, 1)

    def _start(self) -> subprocess.Popen[bytes]:
        job = self._job
        process = subprocess.Popen(
            [sys.executable, "-m", "mjax.data.host_reader"],
            stdin=subprocess.PIPE,
            pass_fds=(job.ring, job.doorbell, *job.bells),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died; `_keep` will see that
            process.stdin.write(pickle.dumps(job))
            process.stdin.flush()
        return process


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # closing writes what is left
        process.stdin.close()


def _how(code: int) -> str:
    """Say how a process ended."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
