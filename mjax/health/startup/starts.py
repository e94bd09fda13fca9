"""Start the processes of a group on this host, and time each phase.

Input: a number of processes, a port, limits. Output: for each phase, the wall and CPU
seconds of every process, and the CPU seconds of the coordinator.

A phase begins when all processes have finished the previous one: each waits for a byte
on its standard input. The coordination service runs in a separate process, as under
`mjax.launch`, so its CPU time is separate too.
"""

import contextlib
import dataclasses
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from mjax.health.startup.model import PhaseTimes

CHILD = (sys.executable, "-m", "mjax.processes.timed_start")
"""Module of one process; it reports its phases."""
LAST = "end"
"""Name of the last phase of a start."""
CLIENTS = (sys.executable, "-m", "mjax.processes.timed_clients")
"""Module of a single process with all clients."""
COORDINATOR = (sys.executable, "-m", "mjax.processes.coordinator")
PROCESS_BYTES = 400_000_000
"""Memory that a process of the group may use. With jax 0.11.2 and one CPU device the
largest of 4 processes took 323 MB, shared pages included."""
_LINES = 5
"""Number of last lines shown of the output of a failed process. That many lines hold
the end of a Python traceback."""
_POLL_S = 0.02
"""Seconds between attempts to connect. It is short compared with a process start."""


class _Report(msgspec.Struct, frozen=True):
    """Report of one process at the end of a phase."""

    phase: str
    wall_s: float
    cpu_s: float


class FailedError(RuntimeError):
    """A start that did not finish."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Member:
    """One process, with its pipes for releases and reports, and its output file."""

    name: str
    process: subprocess.Popen[bytes]
    reports: int
    log: Path

    def release(self) -> None:
        """Release the process into the next phase; `_reports` detects a dead one."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")

    def last_lines(self) -> str:
        """Return the last lines of its output."""
        lines = self.log.read_text(errors="replace").strip().splitlines()[-_LINES:]
        return "\n".join(f"  {line}" for line in lines) or "  (it has written nothing)"


def time_start(
    num_processes: int,
    *,
    port: int,
    limit_s: int | float,
    is_light: bool = False,
) -> tuple[PhaseTimes, ...]:
    """Start a process group once, and stop it.

    Args:
      num_processes: size of the group, at least 2.
      port: port of the coordinator; 0: any free one.
      limit_s: time limit of the whole start.
      is_light: start a single process with one client for each process of the group; it
        reports the times of all clients together.
    Returns:
      the phases, in order.
    Raises:
      ValueError: the port is in use.
      FailedError: a process ended early or sent an invalid report, or the limit was
        reached; the message has the last lines of the process.
    """
    until_s = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = f"127.0.0.1:{_checked_port(port)}"
        coordinator = _coordinator(num_processes, address, folder)
        stack.callback(_end, coordinator.process)
        _wait_until_it_listens(coordinator, address, until_s)
        began_s = _coordinator_s(coordinator)
        members: list[_Member] = []
        stack.callback(_end_all, members)
        for name, words in _commands(num_processes, address, is_light=is_light):
            members.append(_member(name, words, folder))
        found = []
        while rows := _reports(members, until_s, limit_s):
            now_s = _coordinator_s(coordinator)
            found.append(_phase(rows, now_s - began_s))
            began_s = now_s
            for member in members:
                member.release()
    return _checked(found)


def _checked(found: Sequence[PhaseTimes]) -> tuple[PhaseTimes, ...]:
    """Return the phases of a start if they are complete.

    Raises:
      FailedError: the last phase is missing.
    """
    if not found or found[-1].name != LAST:
        done = ", ".join(phase.name for phase in found) or "none"
        raise FailedError(
            f"the processes ended before the phase {LAST!r}; phases done: {done}"
        )
    return tuple(found)


def _commands(
    num_processes: int, address: str, *, is_light: bool
) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the command of each process of a start."""
    if is_light:
        yield "the process of all clients", [*CLIENTS, str(num_processes), address]
        return
    for rank in range(num_processes):
        yield f"process {rank}", [*CHILD, str(rank), str(num_processes), address]


def _phase(rows: Sequence[_Report], coordinator_s: float) -> PhaseTimes:
    """Combine the reports of all processes into one phase.

    Raises:
      FailedError: the processes are not in the same phase.
    """
    names = [row.phase for row in rows]
    if len({*names}) != 1:
        raise FailedError(f"the processes are in different phases: {', '.join(names)}")
    return PhaseTimes(
        name=names[0],
        wall_s=tuple(row.wall_s for row in rows),
        cpu_s=tuple(row.cpu_s for row in rows),
        coordinator_s=coordinator_s,
    )


def _reports(
    members: Sequence[_Member], until_s: float, limit_s: int | float
) -> list[_Report]:
    """Return the next report of each process; empty if all have exited with code 0.

    Raises:
      FailedError: a process failed, ended before the others, or did not report in time.
    """
    waiting = dict(enumerate(members))
    texts = dict.fromkeys(waiting, b"")
    ended: list[int] = []
    with selectors.DefaultSelector() as selector:
        for rank, member in waiting.items():
            selector.register(member.reports, selectors.EVENT_READ, rank)
        while waiting:
            ready = selector.select(max(0.0, until_s - time.monotonic()))
            if not ready:
                raise _late(waiting, limit_s)
            for key, _ in ready:
                rank = key.data
                got = os.read(key.fd, 4096)
                texts[rank] += got
                if not got:
                    _check_end(members[rank], until_s, limit_s)
                    ended.append(rank)
                if not got or texts[rank].endswith(b"\n"):
                    selector.unregister(key.fd)
                    del waiting[rank]
    if ended and len(ended) < len(members):
        raise FailedError(
            f"{members[ended[0]].name} has ended, others have not; its last lines:\n"
            f"{members[ended[0]].last_lines()}"
        )
    return [] if ended else [_read(members[rank], texts[rank]) for rank in texts]


def _read(member: _Member, text: bytes) -> _Report:
    try:
        return msgspec.json.decode(text, type=_Report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FailedError(
            f"{member.name} has reported {text!r}, which is not a phase report "
            f"({error})"
        ) from error


def _check_end(member: _Member, until_s: float, limit_s: int | float) -> None:
    """Raise FailedError unless a process without more reports exits with code 0."""
    try:
        code = member.process.wait(max(_POLL_S, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise _late({0: member}, limit_s) from None
    if code != 0:
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {-code} ({signal.strsignal(-code)})"
        raise FailedError(
            f"{member.name} ended with {how}; its last lines:\n{member.last_lines()}"
        )


def _late(waiting: Mapping[int, _Member], limit_s: int | float) -> FailedError:
    names = [member.name for member in waiting.values()]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    first = next(iter(waiting.values()))
    return FailedError(
        f"{', '.join(names[:3])}{more} did not come to the end of a phase within "
        f"--limit-s {limit_s:g}; give more time, or see the last lines of "
        f"{first.name}:\n{first.last_lines()}"
    )


def _checked_port(port: int) -> int:
    """Return the given port if it is free, or any free port for 0.

    Without this check, jax's server would silently share a port that is in use.

    Raises:
      ValueError: it is in use.
    """
    try:
        with socket.create_server(("", port)) as server:
            return server.getsockname()[1]
    except OSError as error:
        raise ValueError(
            f"--port {port} cannot be listened on ({error.strerror}); end the process "
            "that uses it, give another port, or 0 for any that is free"
        ) from error


def _coordinator(num_processes: int, address: str, folder: Path) -> _Member:
    words = [*COORDINATOR, str(num_processes), address]
    log = folder / "coordinator.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(),
        )
    return _Member(name="the coordinator", process=process, reports=-1, log=log)


def _member(name: str, words: Sequence[str], folder: Path) -> _Member:
    log = folder / f"{name}.log"
    reports, theirs = os.pipe()
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*words, str(theirs), repr(time.monotonic())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=_environment(),
                bufsize=0,
                pass_fds=[theirs],
            )
    except OSError:
        os.close(reports)
        raise
    finally:
        os.close(theirs)
    return _Member(name=name, process=process, reports=reports, log=log)


def _environment() -> dict[str, str]:
    """Return a process's environment, without variables that change its times.

    Every process gets one CPU device and connects only to this host, so XLA flags and
    proxies are removed.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "XLA_FLAGS" and not name.lower().endswith("_proxy")
    }
    return kept | {"LC_ALL": "C", "JAX_PLATFORMS": "cpu"}


def _wait_until_it_listens(member: _Member, address: str, until_s: float) -> None:
    """Wait until the port accepts connections: clients retry only after a second."""
    host, _, port = address.rpartition(":")
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        if member.process.poll() is not None or time.monotonic() > until_s:
            raise FailedError(
                f"{member.name} does not listen on {address}; its last lines:\n"
                f"{member.last_lines()}"
            )
        time.sleep(_POLL_S)


def _coordinator_s(member: _Member) -> float:
    """Return the CPU seconds of the coordinator so far."""
    if member.process.poll() is not None:
        raise FailedError(
            f"{member.name} has ended early; its last lines:\n{member.last_lines()}"
        )
    return _cpu_s(member.process.pid)


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, to a nanosecond.

    /proc/PID/stat counts in steps of 10 ms, as long as a whole phase. The clock
    id is derived from the process id as in the C library's clock_getcpuclockid.
    Source: Linux, include/linux/posix-timers.h, make_process_cpuclock.
    """
    return time.clock_gettime((~pid << 3) | 2)


def _end_all(members: Sequence[_Member]) -> None:
    for member in members:
        member.process.kill()
    for member in members:
        assert member.process.stdin is not None
        member.process.stdin.close()
        member.process.wait()
        os.close(member.reports)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def raise_file_limit() -> None:
    """Raise the limit on open files for this process and its children."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def ended_by_signal() -> Iterator[None]:
    """Make SIGTERM stop the started processes, as Ctrl-C does."""

    def leave(number: int, frame: object) -> None:
        del frame
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
