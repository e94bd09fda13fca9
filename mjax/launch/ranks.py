"""Start and observe the rank processes of a host.

Input: start requests of a driver. Output: processes that die with the agent, and their
states. If possible, a fork server that has imported the trainer starts them within a
tenth of a second; otherwise each process does its own imports.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mjax.launch.background import say
from mjax.launch.fork_server import (
    PR_SET_CHILD_SUBREAPER,
    Forked,
    Request,
    die_with,
    libc,
)
from mjax.launch.messages import RankSpec, RankState
from mjax.launch.rank_files import RankFiles, Reading
from mjax.processes import progress
from mjax.processes.progress import Phase, Word


class Adopted:
    """A child of this process that a fork server started."""

    def __init__(self, pid: int) -> None:
        """Store the process id, which is not reused before `poll` sees the end."""
        self.pid, self._code = pid, None

    def poll(self) -> int | None:
        """Return the exit code (negative for a signal); None while it runs."""
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)


class NotYet:
    """Placeholder for a rank's process until `Starter.start` has started it."""

    pid = 0

    def poll(self) -> int | None:
        """Return None, because the process has not ended."""

    def send_signal(self, sig: int) -> None:
        """Do nothing, because the caller repeats the signal once the process exists."""


@dataclasses.dataclass(kw_only=True)
class Rank:
    """A rank process of this host."""

    spec: RankSpec
    generation: int
    oom_kills: int
    """The kernel's count of OOM kills when the rank started."""
    asked_s: float
    """Time of the start request, by the clock of the agent."""
    asked_ns: int = dataclasses.field(default_factory=time.monotonic_ns)
    """The same time, in nanoseconds of the monotonic clock."""
    process: subprocess.Popen[bytes] | Adopted | NotYet = dataclasses.field(
        default_factory=NotYet
    )
    word: Word | None = None
    """The last readable progress word."""
    step_s: float | None = None
    end: RankState | None = None
    """Final state of the rank; None while it runs."""

    def __post_init__(self) -> None:
        self._files: RankFiles | None = None
        self._last: Reading | None = None
        self._read_s, self._age_s = self.asked_s, 0.0

    @property
    def files(self) -> RankFiles:
        """The files of the rank, once `open` has returned."""
        assert self._files is not None
        return self._files

    def open(self, log_bytes: int) -> None:
        """Open the files of the rank; the disk may block.

        Args:
          log_bytes: size in bytes at which the log is rotated.
        """
        folder = Path(self.spec.folder)
        self._files = RankFiles(folder, self.spec.rank, log_bytes)

    def close(self) -> None:
        """Close the files of a rank that has ended."""
        if self._files is not None:
            self._files.close()

    def read(self, *, is_over: bool) -> Reading | None:
        """Read the files; the disk may block. None if it fails, or nothing is open.

        Args:
          is_over: whether the rank has ended.
        """
        try:
            return self._files and self._files.read(is_over=is_over)
        except OSError:
            return None

    def take(self, reading: Reading, now_s: float) -> None:
        """Record what was read at a time of the agent's clock."""
        new, old, self._last = reading.word, self.word, reading
        passed_s, self._read_s = now_s - self._read_s, now_s
        if new is None or new.generation != self.generation or new == old:
            self._age_s += passed_s
            return
        # The word was written since the last reading. If this process stood still in
        # between, that time does not count.
        self._age_s = min(passed_s, (time.monotonic_ns() - new.monotonic_ns) / 1e9)
        num_steps = 0 if old is None else new.step - old.step
        if old is not None and old.first_step_ns and num_steps > 0:
            # Evaluations and saves between steps are not counted.
            spent_ns = new.spent_ns[Phase.STEP] - old.spent_ns[Phase.STEP]
            self.step_s = spent_ns / num_steps / 1e9
        self.word = new

    def finish(self, code: int, why: str = "") -> None:
        """Record the end of the process, with what was read last.

        Args:
          code: exit code.
          why: text instead of the last lines of the log.
        """
        last = self._last
        self.end = msgspec.structs.replace(
            self.state(),
            code=code,
            state="?",
            ended_ns=time.time_ns(),
            out_of_memory=oom_kills() > self.oom_kills,
            last_lines=why if last is None else last.last_lines,
            last_words=None if last is None else last.last_words,
        )

    def state(self) -> RankState:
        """Return the state when `take` was called, or the final state."""
        if self.end is not None:
            return self.end
        word = self.word
        first_step_s = None
        if word is not None and word.first_step_ns:
            first_step_s = (word.first_step_ns - self.asked_ns) / 1e9
        return RankState(
            rank=self.spec.rank,
            generation=self.generation,
            pid=self.process.pid,
            state=process_state(self.process.pid),
            phase=Phase.IMPORT if word is None else word.phase,
            step=0 if word is None else word.step,
            microstep=0 if word is None else word.microstep,
            age_s=self._age_s,
            step_s=self.step_s,
            saved_step=-1 if word is None else word.saved_step,
            start_step=-1 if word is None else word.start_step,
            spent_s=self._spent_s(),
            first_step_s=first_step_s,
            devices=[] if self._last is None else self._last.devices,
        )

    def _spent_s(self) -> list[float]:
        """Return the seconds in each `Phase` since the rank's start was requested."""
        word, now_ns = self.word, time.monotonic_ns()
        if word is None:
            age_s = (now_ns - self.asked_ns) / 1e9
            return [age_s if phase is Phase.IMPORT else 0.0 for phase in Phase]
        spent_s = [spent_ns / 1e9 for spent_ns in word.spent_ns]
        spent_s[Phase.IMPORT] += (word.began_ns - self.asked_ns) / 1e9
        spent_s[word.phase] += (now_ns - word.monotonic_ns) / 1e9
        return spent_s


class Starter:
    """Starts ranks, with a fork server if there is a module to import."""

    def __init__(self) -> None:
        """Make this process adopt the orphans of a fork server."""
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._module = ""
        self._server: _Server | None = None

    def prepare(self, module: str) -> None:
        """Import a module now in a fork server, for later ranks; "" ends the server."""
        if module == self._module and self._server is not None:
            return
        self.end()
        self._module = module
        if module:
            self._server = _Server(module)

    async def start(self, rank: Rank) -> None:
        """Start the process of a rank whose files are open."""
        environment = {
            **os.environ,
            **rank.spec.environment,
            **rank.files.environment,
            progress.GENERATION_VARIABLE: str(rank.generation),
        }
        rank.process = await self.run(rank.spec.argv, environment, rank.files.log)

    async def run(
        self, argv: Sequence[str], environment: Mapping[str, str], log: str
    ) -> subprocess.Popen[bytes] | Adopted:
        """Start a process that ends when this process ends.

        Args:
          argv: command of the process.
          environment: complete environment of the process.
          log: file to which its output is appended.
        """
        return await self._fork(argv, environment, log) or _start(
            argv, environment, log
        )

    def end(self) -> None:
        """End the fork server; ranks continue."""
        if self._server is not None:
            self._server.end()
            self._server = None

    async def _fork(
        self, argv: Sequence[str], environment: Mapping[str, str], log: str
    ) -> Adopted | None:
        """Start a process with the fork server; None if there is none."""
        if not self._module or [*argv[:2]] != [sys.executable, "-m"]:
            return None
        module, *arguments = argv[2:]
        if module.partition(".")[0] != self._module.partition(".")[0]:
            return None
        request = Request(
            module=module,
            arguments=arguments,
            environment={**environment},
            log=os.path.abspath(log),
        )
        for _ in range(2):  # if the server has ended or is outdated, replace it once
            if self._server is None:
                self._server = _Server(self._module)
            try:
                return Adopted(await self._server.fork(request))
            except OSError as error:
                say(f"the fork server ended: {error}")
                self.end()
        return None


class _Server:
    """Client of a fork server that this process has started."""

    def __init__(self, module: str) -> None:
        """Start the server, which begins to import."""
        self._socket, theirs = socket.socketpair()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        words = ["-m", "mjax.launch.fork_server", module, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=functools.partial(die_with, os.getpid()),
            )

    async def fork(self, request: Request) -> int:
        """Fork a rank; return its process id.

        Raises:
          OSError: the server has ended without starting a process.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._socket)
            await self._answer()  # sent when the imports are done
        self._streams[1].write(msgspec.json.encode(request) + b"\n")
        return (await self._answer()).pid

    async def _answer(self) -> Forked:
        assert self._streams is not None
        line = await self._streams[0].readline()
        if not line:
            raise ConnectionError("it has closed the connection")
        answer = msgspec.json.decode(line, type=Forked)
        if answer.error:
            raise ChildProcessError(answer.error)
        return answer

    def end(self) -> None:
        """End the server."""
        if self._streams is not None:
            self._streams[1].close()
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


def _start(
    argv: Sequence[str], environment: Mapping[str, str], log: str
) -> subprocess.Popen[bytes]:
    """Start a process that does its own imports."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(die_with, os.getpid()),
        )


def process_state(pid: int) -> str:
    """Return the state letter of /proc/PID/stat; "?" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "?"


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, by /proc/PID/status."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def oom_kills() -> int:
    """Return how many processes of this host the kernel's OOM killer has ended."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in text.splitlines() if "oom_kill " in line]
    return int(found[0]) if found else 0
