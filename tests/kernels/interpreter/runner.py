"""Run cases in a process that can be killed, so a hung kernel fails only its case.

    with Runner() as runner:
        result = runner.run("package.module:function", argument=1)

The process serves many cases, since jax takes seconds to start. It is killed when a
case takes too long, and a new one is started for the next.
"""

import concurrent.futures
import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, Self

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 150.0
"""Time limit of a case, for cases that never end: many times what a case needs."""
_NUM_BYTES_SHOWN = 4000
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # Half of the time of a case is XLA's compilation of the interpreted kernel.
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    # Several workers share the cores.
    "OPENBLAS_NUM_THREADS": "1",
    # Each warpgroup waits for the others in a callback that occupies a thread of XLA.
    # XLA has one thread per core, so four warpgroups on two cores would hang.
    "NPROC": "8",
}


class CaseError(Exception):
    """A case that gave no result.

    Attributes:
      how: "kernel": a running kernel failed; "raised": any other exception; "hung": the
        worker took too long and was killed; "died": the worker ended by itself.
    """

    def __init__(self, how: Literal["kernel", "raised", "hung", "died"], message: str):
        super().__init__(message)
        self.how = how


class Runner:
    """Keeps one worker process."""

    def __init__(self):
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr, path = tempfile.mkstemp()
        os.unlink(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: str, timeout_s: float = TIMEOUT_S, **arguments: Any) -> Any:
        """Call a function in the worker.

        Args:
          function: "package.module:name".
          timeout_s: seconds after which the worker is killed.
          arguments: keyword arguments of the function, in types of JSON.

        Returns:
          The function's result, in types of JSON.

        Raises:
          CaseError: the function raised, did not end in time, or ended the process.
        """
        process = self._started()
        start = os.fstat(self._stderr).st_size
        case = {"function": function, "arguments": arguments}
        try:
            assert process.stdin
            process.stdin.write(json.dumps(case).encode() + b"\n")
            process.stdin.flush()
            line = _read_line(process, time.monotonic() + timeout_s)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            hung = isinstance(error, TimeoutError)
            self._kill()
            what = (
                f"was killed after {timeout_s} s without an answer"
                if hung
                else f"ended with code {process.returncode}"
            )
            raise CaseError(
                "hung" if hung else "died",
                f"the worker {what}\n{self._printed_since(start)}",
            ) from error
        except BaseException:  # The next case must not read this answer.
            self._kill()
            raise
        answer = json.loads(line)
        for how in ("kernel", "raised"):
            if how in answer:
                raise CaseError(how, f"{answer[how]}\n{self._printed_since(start)}")
        return answer["result"]

    def close(self) -> None:
        """End the worker."""
        self._kill()
        os.close(self._stderr)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.kernels.interpreter.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                cwd=ROOT,
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": path},
            )
        return self._process

    def _printed_since(self, start: int) -> str:
        """Return the end of the worker's output."""
        start = max(start, os.fstat(self._stderr).st_size - _NUM_BYTES_SHOWN)
        return os.pread(self._stderr, _NUM_BYTES_SHOWN, start).decode(errors="replace")

    def _kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe
                # The last bytes may have found no reader.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            self._process = None

    def interrupt(self) -> None:
        """End the case that runs in another thread, if one does."""
        process = self._process
        if process:
            process.kill()


class Pool:
    """Runs cases in a few workers at once, in the order of `submit`."""

    def __init__(self, workers: int = 2):
        self._idle: queue.SimpleQueue[Runner] = queue.SimpleQueue()
        self._runners = [Runner() for _ in range(workers)]
        for runner in self._runners:
            self._idle.put(runner)
        self._threads = concurrent.futures.ThreadPoolExecutor(workers)
        self._submitted: list[concurrent.futures.Future[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, function: str, **arguments: Any) -> concurrent.futures.Future[Any]:
        """Queue a case; the future has the result or exception of `Runner.run`."""
        future = self._threads.submit(self._run, function, arguments)
        self._submitted.append(future)
        return future

    def close(self) -> None:
        """Drop the cases that have not begun, kill the others, end the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in self._submitted):
            for runner in self._runners:
                runner.interrupt()
            concurrent.futures.wait(self._submitted, timeout=0.1)
        self._threads.shutdown()
        for runner in self._runners:
            runner.close()

    def _run(self, function: str, arguments: dict[str, Any]) -> Any:
        runner = self._idle.get()
        try:
            return runner.run(function, **arguments)
        finally:
            self._idle.put(runner)


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    assert process.stdout
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select(
            [process.stdout], [], [], max(0.0, deadline - time.monotonic())
        )
        if not ready:
            raise TimeoutError
        part = os.read(process.stdout.fileno(), 1 << 16)
        if not part:
            raise EOFError
        line += part
    return line
