"""Run the tests of a round as commands.

Input: groups of hosts and a command template. Output: a record of each test. Commands
run without a shell, each in its own session, so that a test that exceeds its time limit
is killed with all its local descendants.
"""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import IO

from mjax.health.bisect.designs import waves
from mjax.health.bisect.outcomes import Record

_TAIL_BYTES = 4096
_SHOWN_CHARS = 200
_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL. Not measured."""


class _StoppedError(Exception):
    """A test was ended because the search ended."""


def command_for(template: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Return a command: {hosts} becomes "a,b,..." and {num} the number of hosts."""
    names, num = ",".join(hosts), str(len(hosts))
    return [word.replace("{hosts}", names).replace("{num}", num) for word in template]


def check_template(template: Sequence[str]) -> None:
    """Raise if a command has no placeholder for the hosts.

    Raises:
      ValueError: the message gives the correct form.
    """
    if not template:
        raise ValueError(
            "the test command is missing; write it after --, as in -- srun --nodelist "
            "{hosts} --nodes {num} ./test"
        )
    if not any("{hosts}" in word for word in template):
        raise ValueError(
            f"the command {' '.join(template)} has no {{hosts}}: every test would be "
            "the same"
        )


def run_round(
    groups: Sequence[Sequence[str]],
    template: Sequence[str],
    *,
    number: int,
    parallel: int,
    limit_s: float,
    done: Callable[[Record], None],
) -> list[Record]:
    """Run the tests of a round; tests that share no host run concurrently.

    Args:
      groups: hosts of each test.
      template: the command; see `command_for`.
      number: number of the round.
      parallel: maximum number of concurrent tests.
      limit_s: seconds after which a test has failed.
      done: called with each completed test, by one thread at a time.
    Returns:
      records in the order of the groups.
    Raises:
      ValueError: the command cannot be started.
    """
    records: dict[int, Record] = {}
    lock, stopped = threading.Lock(), threading.Event()

    def run(index: int) -> None:
        command = command_for(template, groups[index])
        record = _run(command, tuple(groups[index]), number, limit_s, stopped)
        with lock:
            records[index] = record
            done(record)

    for wave in waves(groups, parallel):
        with ThreadPoolExecutor(max_workers=len(wave)) as pool:
            futures = [pool.submit(run, index) for index in wave]
            try:
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
            except BaseException:
                stopped.set()  # the pool waits for its threads
                raise
    return [records[index] for index in range(len(groups))]


def _run(
    command: Sequence[str],
    hosts: tuple[str, ...],
    number: int,
    limit_s: float,
    stopped: threading.Event,
) -> Record:
    """Run one test to its end or its time limit, and return its record."""
    begun_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"LC_ALL": "C"},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"{command[0]} cannot be started: {error}") from error
        reason = ""
        try:
            code = _wait(process, begun_s + limit_s, stopped)
            if code is None and stopped.is_set():
                raise _StoppedError  # no information about its hosts
            if code is None:
                reason = f"no end in {limit_s:g} s"
            elif code:
                reason = f"exit code {code}"
        finally:
            if process.returncode is None:
                _end(process)
        last = _last_line(output)
    return Record(
        hosts=hosts,
        outcome="fail" if reason else "pass",
        seconds=time.monotonic() - begun_s,
        output=last or None,
        round=number,
        reason=f"{reason}: {last}" if reason and last else reason,
    )


def _wait(
    process: subprocess.Popen[bytes], end_s: float, stopped: threading.Event
) -> int | None:
    """Return the exit code of a process; None after `end_s` or if `stopped` is set."""
    while not stopped.is_set():
        try:
            return process.wait(min(0.1, max(end_s - time.monotonic(), 0.001)))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end_s:
                return None
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a test and its whole session; launchers forward the first signal."""
    os.killpg(process.pid, signal.SIGTERM)
    over_s = time.monotonic() + _GRACE_S
    exited = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while os.waitid(os.P_PID, process.pid, exited) is None:
        if time.monotonic() > over_s:
            break
        time.sleep(0.02)
    # The process is not reaped yet, so no other session can have its id.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(output: IO[bytes]) -> str:
    """Return the last non-empty line, in bounded memory."""
    output.seek(max(output.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
    lines = output.read(_TAIL_BYTES).decode(errors="replace").split("\n")
    kept = [line.strip() for line in lines if line.strip()]
    return kept[-1][:_SHOWN_CHARS] if kept else ""
