"""Run the processes of one training run on this machine.

Input: a command for each process. Output: their logs, if all succeed.
"""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scripts.evidence import REPOSITORY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """A process to start."""

    log: Path
    flags: Sequence[str]
    module: Sequence[str] = ("mjax.train",)
    """Arguments after `python -m` that come before the flags."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def coordinated(num_processes: int) -> list[str]:
    """Return the flags of a run of several processes, with a free port."""
    with socket.create_server(("", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    flags = ["--distributed.coordinator", coordinator]
    return [*flags, "--distributed.num-processes", str(num_processes)]


def run(processes: Iterable[Process], limit_s: float) -> None:
    """Start processes on CPU devices, and wait until all have ended.

    Args:
      processes: the processes, in the order in which they are waited for.
      limit_s: time limit until all have ended.
    Raises:
      RuntimeError: a process failed; the message has its errors.
      subprocess.TimeoutExpired: one did not end in time.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for one in processes:
            log = stack.enter_context(one.log.open("w+"))
            process = subprocess.Popen(
                [sys.executable, "-m", *one.module, *one.flags],
                cwd=REPOSITORY,
                env={**os.environ, "JAX_PLATFORMS": "cpu", **one.environment},
                stdout=log,
                stderr=log,
            )
            stack.callback(process.kill)
            started.append((process, log))
        until_s = time.monotonic() + limit_s
        for process, log in started:
            code = process.wait(max(until_s - time.monotonic(), 1))
            if code:
                log.seek(0)
                said = log.read()[-3000:]
                raise RuntimeError(f"{log.name}: exit code {code}\n{said}")
