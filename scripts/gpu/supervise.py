"""Run cases in worker processes: nothing that a case does ends the report.

Enters: a part and names of its cases. Leaves: a row for every name, as soon as it is
known. A case that raises is a row with its error; one that takes the process with it,
or takes too long, is a row that says so, and the rest goes on in a new process.
"""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from scripts.evidence import REPOSITORY
from scripts.gpu.setting import Mode, Part, Row
from scripts.gpu.worker import MARK, POISONED

START_S = 120.0
"""Longest from the start of a process to its first case."""
GRACE_S = 20.0
"""Longest that a case may go on when the budget is spent."""
MAX_DEATHS = 3
"""Processes that may end in a row without a single good case."""
_TAIL = 400


@dataclasses.dataclass(kw_only=True)
class Worker:
    """A running process and what it says."""

    process: subprocess.Popen[str]
    lines: queue.Queue[Row | None]
    errors: IO[str]
    reader: threading.Thread

    def next_message(self, timeout_s: float) -> Row | None:
        """Return what it says next; None at its end. Raises queue.Empty."""
        return self.lines.get(timeout=max(0.0, timeout_s))

    def stop(self) -> tuple[int, str]:
        """Kill what is left of it; return its exit code and the end of its stderr."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        with self.errors:
            self.errors.seek(0)
            return code, " ".join(self.errors.read()[-_TAIL:].split())


def start_worker(
    path: str, mode: Mode, deadline: float, names: Sequence[str]
) -> Worker:
    """Start the program of `worker` for these cases."""
    # Not those of a test session, which simulate devices.
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env["JAX_PLATFORMS"] = "cuda,cpu" if mode == "gpu" else "cpu"
    if mode == "gpu":
        # One process has the device at a time; the default leaves a quarter unused.
        env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if mode == "rehearse":
        # Most of a rehearsal is compilation, and how fast its code is says nothing.
        env["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    # Read when the process has ended, and gone with this one.
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.gpu.worker", path, mode, str(deadline)],
        cwd=REPOSITORY,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\n".join(names))
        process.stdin.close()
    lines: queue.Queue[Row | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                lines.put(json.loads(line.removeprefix(MARK)))
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return Worker(process=process, lines=lines, errors=errors, reader=reader)


def probe(mode: Mode) -> Row:
    """Ask a process which device there is, without touching it in this one.

    Raises:
      RuntimeError: it did not answer.
    """
    worker = start_worker("probe", mode, 0.0, [])
    try:
        message = worker.next_message(START_S)
    except queue.Empty:
        message = None
    code, last_words = worker.stop()
    if message is None:
        raise RuntimeError(f"its process ended with code {code}: {last_words}")
    return message["probe"]


def run_cases(
    part: Part,
    cases: dict[str, Any],
    mode: Mode,
    *,
    deadline: float,
    on_row: Callable[[Row], None],
) -> None:
    """Run all cases; `on_row` is called with a row for each.

    Args:
      part: whose cases they are.
      cases: by name, in order.
      mode: where.
      deadline: time.time() from which on no case is begun.
      on_row: gets {"case", "status", ...}; status is ok, error, skipped or not run.
    """
    left = list(cases)
    deaths = 0
    while left:
        if time.time() >= deadline:
            _mark(left, "not run", "the budget was spent", on_row)
            return
        if deaths == MAX_DEATHS:
            why = f"{MAX_DEATHS} processes in a row ended without a result"
            _mark(left, "not run", why, on_row)
            return
        key = part.module.process_of(cases[left[0]])
        group = []
        for name in left:
            if part.module.process_of(cases[name]) != key:
                break
            group.append(name)
        done, good = _run_group(part, group, mode, deadline=deadline, on_row=on_row)
        deaths = 0 if good or time.time() >= deadline else deaths + 1
        left = [name for name in left if name not in done]


def _run_group(
    part: Part,
    names: list[str],
    mode: Mode,
    *,
    deadline: float,
    on_row: Callable[[Row], None],
) -> tuple[set[str], bool]:
    """Run cases in one process; return those that have a row, and if it was of use."""
    worker = start_worker(part.path, mode, deadline, names)
    done: set[str] = set()
    good, current, fault, status = False, None, None, "error"
    try:
        while len(done) < len(names):
            limit_s = START_S if current is None else part.timeout_s
            left_s = deadline + GRACE_S - time.time()
            try:
                message = worker.next_message(min(limit_s, left_s))
            except queue.Empty:
                fault = f"killed: no result in {limit_s:.0f} s"
                if left_s < limit_s:
                    fault, status = "killed: the budget was spent", "not run"
                break
            if message is None:
                break
            if "begin" in message:
                current = message["begin"]
                continue
            row = message["row"]
            current = None
            done.add(row["case"])
            good = good or row["status"] in ("ok", "skipped")
            on_row(row)
    finally:
        code, last_words = worker.stop()
    # The process ends by itself after its last case, at the deadline, and when a case
    # spoilt the device: that case has its row.
    ended_well = fault is None and current is None and code in (0, POISONED)
    if len(done) < len(names) and not ended_well:
        name = current or next(name for name in names if name not in done)
        why = fault or f"its process ended with code {code}"
        on_row({"case": name, "status": status, "why": f"{why}; {last_words}"})
        done.add(name)
    return done, good


def _mark(
    names: Sequence[str], status: str, why: str, on_row: Callable[[Row], None]
) -> None:
    for name in names:
        on_row({"case": name, "status": status, "why": why})
