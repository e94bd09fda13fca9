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
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mjax.launch.fork_server import (
    PR_SET_CHILD_SUBREAPER,
    Forked,
    Request,
    die_with,
    libc,
)
from mjax.launch.log_rules import LogReader
from mjax.launch.messages import LastWords, RankSpec, RankState
from mjax.processes import progress
from mjax.processes.progress import Phase, Word

_LAST_LINES, _LAST_BYTES = 10, 4096
"""Maximum number of lines and bytes to report from the end of a rank's log."""


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
    asked_ns: int = dataclasses.field(default_factory=time.monotonic_ns)
    """Time of the start request, in nanoseconds of the monotonic clock."""
    process: subprocess.Popen[bytes] | Adopted | NotYet = dataclasses.field(
        default_factory=NotYet
    )
    word: Word | None = None
    """The last readable progress word."""
    step_s: float | None = None
    end: RankState | None = None
    """Final state of the rank; None while it runs."""

    def __post_init__(self) -> None:
        self.log_reader = LogReader(self.log_path, self.spec.rank)

    @property
    def progress_path(self) -> Path:
        """Path of the rank's progress word."""
        return Path(self.spec.folder) / f"progress-{self.spec.rank}"

    @property
    def stacks_path(self) -> Path:
        """Path of the rank's stacks."""
        return Path(self.spec.folder) / f"stacks-{self.spec.rank}.txt"

    @property
    def log_path(self) -> Path:
        """Path of the rank's output."""
        return log_path(Path(self.spec.folder), self.spec.rank)

    def look(self) -> RankState:
        """Return the current state, or the final state once the rank has ended."""
        if self.end is not None:
            return self.end
        code = self.process.poll()
        state = self._look(code)
        if code is not None:
            self.end = msgspec.structs.replace(
                state,
                ended_ns=time.time_ns(),
                out_of_memory=oom_kills() > self.oom_kills,
                last_lines=self._last_lines(),
                last_words=self._last_words(),
            )
        return self.end or state

    def _look(self, code: int | None) -> RankState:
        self._read_word()
        word = self.word
        said_ns = self.asked_ns if word is None else word.monotonic_ns
        age_s = (time.monotonic_ns() - said_ns) / 1e9
        first_step_s = None
        if word is not None and word.first_step_ns:
            first_step_s = (word.first_step_ns - self.asked_ns) / 1e9
        return RankState(
            rank=self.spec.rank,
            generation=self.generation,
            pid=self.process.pid,
            code=code,
            state="?" if code is not None else process_state(self.process.pid),
            phase=Phase.IMPORT if word is None else word.phase,
            step=0 if word is None else word.step,
            microstep=0 if word is None else word.microstep,
            age_s=age_s,
            step_s=self.step_s,
            saved_step=-1 if word is None else word.saved_step,
            start_step=-1 if word is None else word.start_step,
            spent_s=self._spent_s(age_s),
            first_step_s=first_step_s,
            devices=self.log_reader.thunks.devices(
                progress.operations_path(self.progress_path)
            ),
        )

    def _spent_s(self, age_s: float) -> list[float]:
        """Return the seconds in each `Phase` since the rank's start was requested."""
        word = self.word
        if word is None:
            return [age_s if phase is Phase.IMPORT else 0.0 for phase in Phase]
        spent_s = [spent_ns / 1e9 for spent_ns in word.spent_ns]
        spent_s[Phase.IMPORT] += (word.began_ns - self.asked_ns) / 1e9
        spent_s[word.phase] += age_s
        return spent_s

    def _last_words(self) -> LastWords | None:
        path = progress.last_words_path(self.progress_path)
        if not path.exists():
            return None
        return msgspec.json.decode(path.read_bytes(), type=LastWords)

    def _last_lines(self) -> str:
        with self.log_path.open("rb") as file:
            file.seek(max(0, self.log_path.stat().st_size - _LAST_BYTES))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def _read_word(self) -> None:
        new, old = progress.read(self.progress_path), self.word
        if new is None or new.generation != self.generation:
            return
        num_steps = 0 if old is None else new.step - old.step
        if old is not None and old.first_step_ns and num_steps > 0:
            # Evaluations and saves between steps are not counted.
            spent_ns = new.spent_ns[Phase.STEP] - old.spent_ns[Phase.STEP]
            self.step_s = spent_ns / num_steps / 1e9
        self.word = new


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
        """Start the process of a rank, with its own output file."""
        spec, folder = rank.spec, Path(rank.spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            **spec.environment,
            progress.FILE_VARIABLE: str(rank.progress_path),
            progress.GENERATION_VARIABLE: str(rank.generation),
            progress.STACKS_VARIABLE: str(rank.stacks_path),
        }
        rank.process = await self.run(spec.argv, environment, rank.log_path)

    async def run(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path
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
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path
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
            log=str(log.absolute()),
        )
        for _ in range(2):  # if the server has ended or is outdated, replace it once
            if self._server is None:
                self._server = _Server(self._module)
            try:
                return Adopted(await self._server.fork(request))
            except OSError as error:
                print(f"the fork server ended: {error}", file=sys.stderr, flush=True)
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
    argv: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a process that does its own imports."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(die_with, os.getpid()),
        )


def generation_folder(work_dir: Path, generation: int) -> Path:
    """Return the folder of a generation's logs."""
    return work_dir / "launch" / f"generation-{generation:04d}"


def log_path(folder: Path, rank: int) -> Path:
    """Return the file for the output of a rank."""
    return folder / f"rank-{rank}.log"


def rotate(log: Path, limit_bytes: int) -> None:
    """If a log exceeds the limit, copy it to `<log>.1` and empty it while it is in use.

    Output written during the rotation is lost.

    Args:
      log: file to which a process appends.
      limit_bytes: size at which the log is copied.
    """
    try:
        if log.stat().st_size <= limit_bytes:
            return
        before = log.with_name(f"{log.name}.1")
        shutil.copyfile(log, before)
        os.truncate(log, 0)
    except OSError:
        return  # a missing log or a full disk must not end the agent


def process_state(pid: int) -> str:
    """Return the state letter of /proc/PID/stat; "?" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "?"


def oom_kills() -> int:
    """Return how many processes of this host the kernel's OOM killer has ended."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in text.splitlines() if "oom_kill " in line]
    return int(found[0]) if found else 0
