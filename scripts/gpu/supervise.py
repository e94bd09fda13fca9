"""Run cases in worker processes, so that no failure of a case ends the report.

Input: a part and names of its cases. Output: a row for every name, as soon as it is
known. A case that raises gives a row with its error. One that kills its process or
exceeds its time limit gives a row that says so, and a new process runs the rest.

A part may have several processes at once, because a case mostly compiles. A case that
times anything uses the device alone (`Setting.exclusive`).
"""

import collections
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
from collections.abc import Callable, Mapping
from typing import IO, Any

from scripts.evidence import REPOSITORY
from scripts.gpu import cuda_root
from scripts.gpu.setting import Mode, Part, Row
from scripts.gpu.worker import MARK, PARENT_VARIABLE

WORKER: tuple[str, ...] = ("scripts.gpu.worker",)
"""Command of a process: its module and first arguments."""
START_S = 180.0
"""Seconds until a process must be ready: imports and CUDA, from a cold disk."""
STOP_S = 10.0
"""Seconds to wait for the end of a killed process: a driver may hold it."""
GRACE_S = 20.0
"""Seconds that a running case may take after the budget is spent."""
MAX_DEATHS = 2
"""Consecutive process deaths allowed in cases of one kind (`kind_of` of the part)."""
MAX_FAILED_STARTS = 3
"""Consecutive processes of a part that may end before they are ready."""
_TAIL = 1500


@dataclasses.dataclass(kw_only=True)
class Worker:
    """A running process and its messages."""

    key: str
    """Value of `process_of` for its cases."""
    process: subprocess.Popen[str]
    messages: queue.Queue[Row | None]
    errors: IO[str]
    reader: threading.Thread

    def ask(self, name: str) -> None:
        """Send it a case. If the process has ended, its messages say so."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()

    def next_message(self, timeout_s: float) -> Row | None:
        """Return the next message of the process; None at its end.

        Raises:
          queue.Empty: there is no message within the timeout.
        """
        return self.messages.get(timeout=max(0.0, timeout_s))

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> str:
        """Kill the remaining processes; return how it ended and the end of stderr."""
        self.kill()
        try:
            how = f"code {self.process.wait(STOP_S)}"
        except subprocess.TimeoutExpired:
            how = "SIGKILL, and is still there"
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        # A child may have left the group and still hold the pipe: do not wait for it.
        self.reader.join(STOP_S)
        with self.errors:
            size = self.errors.seek(0, os.SEEK_END)
            self.errors.seek(max(0, size - 4 * _TAIL))
            return f"{how}; {' '.join(self.errors.read()[-_TAIL:].split())}"


def start_worker(
    path: str, mode: Mode, *, key: str = "", shared: bool = True, lock_path: str = ""
) -> Worker:
    """Start the program of `worker`.

    Args:
      path: module of a part, or "probe".
      mode: where the worker measures.
      key: value of `process_of` for this process.
      shared: whether others use the device; then memory is allocated on demand.
      lock_path: file whose lock is the device's, for `Setting.exclusive`.
    """
    # Read when the process has ended; deleted with this process.
    errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", *WORKER, path, mode, lock_path],
        cwd=REPOSITORY,
        env=environment(os.environ, mode, shared=shared),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        encoding="utf-8",
        errors="replace",
        # A process group, to be killed with its children; not a session, which would
        # outlive the session of the report.
        process_group=0,
    )
    messages: queue.Queue[Row | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if line.startswith(MARK):
                    # A process that was killed while writing leaves an incomplete line.
                    with contextlib.suppress(json.JSONDecodeError):
                        messages.put(json.loads(line.removeprefix(MARK)))
        messages.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return Worker(
        key=key, process=process, messages=messages, errors=errors, reader=reader
    )


def environment(own: Mapping[str, str], mode: Mode, *, shared: bool) -> dict[str, str]:
    """Return the environment of a worker.

    Args:
      own: environment variables of this process.
      mode: as for `start_worker`.
      shared: as for `start_worker`.
    """
    # Flags of a test session, which simulate devices.
    env = {k: v for k, v in own.items() if k != "XLA_FLAGS"}
    env[PARENT_VARIABLE] = str(os.getpid())
    env["JAX_PLATFORMS"] = "cuda,cpu" if mode == "gpu" else "cpu"
    if mode == "gpu":
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false" if shared else "true"
        # The default leaves a quarter unused. The rest is for CUDA and its libraries.
        env["XLA_CLIENT_MEM_FRACTION"] = "0.94"
        root = cuda_root.missing_to_jax(own)
        if root is not None:
            env["CUDA_ROOT"] = str(root)
    if mode == "rehearse":
        # A rehearsal mostly compiles, and the speed of its code does not matter.
        env["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    return env


def probe(mode: Mode) -> Row:
    """Query the device in a separate process, without initialising it in this one.

    Raises:
      RuntimeError: the process did not answer.
    """
    worker = start_worker("probe", mode)
    try:
        message = worker.next_message(START_S)
    except queue.Empty:
        message = None
    finally:
        end = worker.stop()
    if message is None:
        raise RuntimeError(f"its process ended with {end}")
    return message["probe"]


def run_cases(
    part: Part,
    cases: dict[str, Any],
    mode: Mode,
    *,
    deadline: float,
    on_row: Callable[[Row], None],
    processes: int | None = None,
) -> None:
    """Run all cases; `on_row` is called with a row for each, by one thread at a time.

    Args:
      part: part of the report that has the cases.
      cases: name -> case, in the order in which they run.
      mode: where the cases run.
      deadline: time.monotonic() after which no case is started.
      on_row: gets {"case", "status", ...}; status is ok, error, skipped or not run.
      processes: number of processes at once; None uses one, or on a GPU the number that
        the part gives.
    """
    if processes is None:
        processes = part.processes if mode == "gpu" else 1
    with tempfile.NamedTemporaryFile(prefix="gpu-lock-") as lock_file:
        run = _Run(
            part=part,
            cases=cases,
            mode=mode,
            deadline=deadline,
            on_row=on_row,
            shared=processes > 1,
            lock_path=lock_file.name,
        )
        run.n_threads = min(processes, len(cases))
        threads = [
            threading.Thread(target=run.work, daemon=True) for _ in range(run.n_threads)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            run.n_threads = 1
            run.work()  # the cases of processes that did not start beside others
        finally:
            run.halt()
            for thread in threads:
                if thread.is_alive():
                    thread.join(STOP_S)
    if run.failure is not None:
        raise run.failure


class _Run:
    """The remaining cases, and the threads that send them to processes."""

    def __init__(
        self,
        *,
        part: Part,
        cases: dict[str, Any],
        mode: Mode,
        deadline: float,
        on_row: Callable[[Row], None],
        shared: bool,
        lock_path: str,
    ):
        self.part, self.cases, self.deadline = part, cases, deadline
        self.mode: Mode = mode
        self.shared, self.lock_path = shared, lock_path
        self.failure: BaseException | None = None
        self.n_threads = 1
        """Threads in `work`. Set before the first one starts."""
        self._on_row = on_row
        self._left = collections.deque(cases)
        self._deaths: collections.Counter[str] = collections.Counter()
        self._failed_starts = 0
        self._halted = False
        self._workers: list[Worker] = []
        self._lock = threading.RLock()

    def halt(self) -> None:
        """Kill all processes, and give no more rows."""
        with self._lock:
            self._halted = True
            for worker in self._workers:
                worker.kill()

    def work(self) -> None:
        """Run cases one by one until none is left; an error is kept in `failure`."""
        worker = None
        try:
            while (name := self._take()) is not None:
                alone = self.n_threads == 1
                found = self._worker_for(name, worker)
                worker = found if isinstance(found, Worker) else None
                if worker is not None:
                    worker = self._run_one(worker, name)
                elif not self._go_on_without(name, str(found), alone=alone):
                    return
        except BaseException as error:  # of this program: raised again by its thread
            self.failure = error
            self.halt()
        finally:
            if worker is not None:
                self._stop(worker)
            with self._lock:
                self.n_threads -= 1

    def _take(self) -> str | None:
        """Return the next case to run; cases that are not run get a row with the
        reason.
        """
        with self._lock:
            while self._left and not self._halted:
                name = self._left.popleft()
                kind = self.part.module.kind_of(self.cases[name])
                if time.monotonic() >= self.deadline:
                    why = "the budget was spent"
                elif self._failed_starts >= MAX_FAILED_STARTS:
                    why = f"{MAX_FAILED_STARTS} processes in a row did not start"
                elif self._deaths[kind] >= MAX_DEATHS:
                    why = f"{MAX_DEATHS} processes in a row ended in cases of {kind!r}"
                else:
                    return name
                self._give({"case": name, "status": "not run", "why": why})
        return None

    def _give(self, row: Row) -> None:
        with self._lock:
            if not self._halted:
                self._on_row(row)

    def _worker_for(self, name: str, worker: Worker | None) -> Worker | str:
        """Return a process for a case, or the reason why there is none.

        The current process is reused if the case may share it.
        """
        key = self.part.module.process_of(self.cases[name])
        if worker is not None and worker.key == key:
            return worker
        if worker is not None:
            self._stop(worker)
        with self._lock:
            if self._halted:
                return "the report has ended"
            worker = start_worker(
                self.part.path,
                self.mode,
                key=key,
                # PyTorch needs the device's memory for itself, and shares a process
                # with JAX.
                shared=self.shared or key == "torch",
                lock_path=self.lock_path,
            )
            self._workers.append(worker)
        end = min(time.monotonic() + START_S, self.deadline + GRACE_S)
        try:
            message = worker.next_message(end - time.monotonic())
        except queue.Empty:
            message = {}
        if message:
            self._failed_starts = 0
            return worker
        how = "was not ready in time, " if message == {} else ""
        return f"its process did not start: {how}{self._stop(worker)}"

    def _go_on_without(self, name: str, why: str, *, alone: bool) -> bool:
        """Give the row of a case whose process did not start.

        Args:
          name: the case.
          why: how the process ended.
          alone: whether no other process could have had the device meanwhile.

        Returns:
          False if the case is left to other processes, or to one that starts after
          them: the device may have no memory for another process.
        """
        with self._lock:
            if not alone:
                print(f"{self.part.name}: one process fewer: {why}", flush=True)
                self._left.appendleft(name)
                return False
            self._failed_starts += 1
            late = time.monotonic() >= self.deadline
            status = "not run" if late else "error"
            self._give({"case": name, "status": status, "why": why})
            return True

    def _stop(self, worker: Worker) -> str:
        end = worker.stop()
        with self._lock:
            self._workers.remove(worker)
        return end

    def _run_one(self, worker: Worker, name: str) -> Worker | None:
        """Run a case; return the process if it can be reused."""
        kind = self.part.module.kind_of(self.cases[name])
        worker.ask(name)
        message = self._await_row(worker)
        if isinstance(message, dict):
            self._deaths[kind] = 0
            row = message["row"]
            self._give(row)
            if row["status"] != "error" or self._works(worker):
                return worker
            self._stop(worker)
            return None
        fault, status = message
        self._deaths[kind] += status == "error"
        why = f"{fault}; its process ended with {self._stop(worker)}"
        self._give({"case": name, "status": status, "why": why})
        return None

    def _await_row(self, worker: Worker) -> Row | tuple[str, str]:
        """Return the message with the row, or the reason why there is none, and its
        status.
        """
        since, limit_s = time.monotonic(), self.part.timeout_s
        while True:
            end = min(since + limit_s, self.deadline + GRACE_S)
            try:
                message = worker.next_message(end - time.monotonic())
            except queue.Empty:
                if since + limit_s > self.deadline + GRACE_S:
                    return "killed: the budget was spent", "not run"
                return f"killed: no result in {limit_s:.0f} s", "error"
            if message is None:
                return "no result", "error"
            if "row" in message:
                return message
            # The case has the device: from here on it runs without waiting.
            since, limit_s = time.monotonic(), self.part.run_s

    def _works(self, worker: Worker) -> bool:
        """Return whether a process whose case failed reports that its device works."""
        try:
            message = worker.next_message(self.part.run_s)
        except queue.Empty:
            return False
        return message is not None and message["works"]
