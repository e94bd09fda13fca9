"""A complete launch on one machine: a driver in this process, an agent per host.

Input: the config of a launch, and the trainer's flags. Output: the exit code of the
run. The hosts are simulated: `host-0`, `host-1` and so on are agents on this machine.
The output of rank 0 is copied to standard output. If this process is killed, the agents
and their ranks continue, and the same command reconnects to them and copies what rank 0
writes from then on.
"""

import asyncio
import codecs
import contextlib
import functools
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

import mjax
from mjax.launch.background import Worker, say
from mjax.launch.client import read_token, write_private
from mjax.launch.config import RunConfig
from mjax.launch.driver import TRAINER, Driver
from mjax.launch.rank_files import generation_folder, log_path
from mjax.processes.lock import driving

_POLL_S = 0.1
_FOLLOW_S = 0.25
"""Seconds between reads of rank 0's output, the main work of an idle launch."""
_RESPAWN_S = 1.0
_PARTING_S = 5.0
LOOPBACK = "127.0.0.1"
TOKEN = Path("launch") / "token"
"""File of a launch's token in the work dir."""


async def run(
    config: RunConfig,
    flags: Sequence[str],
    work_dir: Path,
    trainer: Sequence[str] = TRAINER,
) -> int:
    """Launch a run on simulated hosts, and wait; return its exit code.

    Args:
      config: hosts and limits.
      flags: flags of `python -m mjax.train`.
      work_dir: work dir of the run.
      trainer: the command of a rank, without flags.
    Raises:
      ValueError: the work dir belongs to another run, or another driver or trainer of
        this host holds it.
      OSError: a port or a file is not available.
    """
    names = [f"host-{index}" for index in range(config.hosts + config.spares)]
    agents = Agents(names, work_dir, work_dir / TOKEN)
    return await drive(
        *(config, flags, agents), work_dir=work_dir, trainer=trainer, host=LOOPBACK
    )


async def drive(
    config: RunConfig,
    flags: Sequence[str],
    agents: "AgentsOfRun",
    *,
    work_dir: Path,
    trainer: Sequence[str],
    host: str,
) -> int:
    """Run a driver and its agents in a work dir; return the exit code of the run.

    Args:
      config: hosts and limits.
      flags: flags of `python -m mjax.train`.
      agents: agents of the launch; they read the token from `TOKEN` in the work dir.
      work_dir: work dir of the run.
      trainer: the command of a rank, without flags.
      host: address on which the driver listens.
    Raises:
      ValueError: the work dir belongs to another run, or another driver or trainer of
        this host holds it.
      OSError: a port or a file is not available.
    """
    with driving(work_dir):
        driver = Driver(
            config,
            flags,
            work_dir=work_dir,
            token=token_of(work_dir / TOKEN),
            bind=(host, 0),
            trainer=trainer,
        )
        return await serve(driver, agents, work_dir)


@runtime_checkable
class AgentsOfRun(Protocol):
    """Interface of the agents that a launch starts itself."""

    async def keep(self, driver: tuple[str, int], is_over: Callable[[], bool]) -> None:
        """Start the agents, and restart those that die, until the run is over."""
        ...

    async def end(self) -> None:
        """Wait for a limited time until all agents end; kill those that still run."""
        ...


async def serve(driver: Driver, agents: AgentsOfRun, work_dir: Path) -> int:
    """Run a driver and its agents until the run ends; return its exit code.

    Raises:
      OSError: the port of the driver is not available.
    """
    helpers: list[asyncio.Task[None]] = []
    driver.follows_rank_0 = True
    begin = driver.generation, output_so_far(driver.generation, work_dir)
    serving = asyncio.create_task(driver.run())
    try:
        while not driver.is_listening and not serving.done():
            await asyncio.sleep(_POLL_S / 10)
        if driver.is_listening:
            helpers = [
                asyncio.create_task(
                    agents.keep(driver.address, lambda: driver.is_over)
                ),
                asyncio.create_task(follow(lambda: driver.generation, work_dir, begin)),
            ]
        code = await serving
        await asyncio.sleep(2 * _FOLLOW_S)  # the last lines are still copied
        return code
    finally:
        for helper in helpers:
            helper.cancel()
        if driver.is_over:  # otherwise the next driver takes over agents and ranks
            await agents.end()


def token_of(path: Path) -> str:
    """Return the token in a file; create the file at first use.

    Raises:
      ValueError: other users may read the file.
    """
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32))
    return read_token(path)


class Agents:
    """The agents of the simulated hosts, restarted when they die."""

    def __init__(self, names: Sequence[str], work_dir: Path, token: Path) -> None:
        self._names, self._folder = names, work_dir / "launch"
        self._token = token.absolute()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._files = Worker()

    async def keep(self, driver: tuple[str, int], is_over: Callable[[], bool]) -> None:
        """Start the missing agents, now and whenever one dies in the run."""
        while not is_over():
            for name in self._names:
                if not self._runs(name):
                    await self._files.run(functools.partial(self._start, name, driver))
            await asyncio.sleep(_RESPAWN_S)

    async def end(self) -> None:
        """Wait for a limited time until all agents end; kill those that still run."""
        for _ in range(int(_PARTING_S / _POLL_S)):
            if not any(self._runs(name) for name in self._names):
                return
            await asyncio.sleep(_POLL_S)
        for name in self._names:
            if self._runs(name):
                os.kill(self._pid(name), signal.SIGKILL)

    def _start(self, name: str, driver: tuple[str, int]) -> None:
        words = ["agent", "--driver", f"{driver[0]}:{driver[1]}", "--host", name]
        words += ["--token-file", str(self._token), "--address", LOOPBACK]
        with _log(self._folder / f"agent-{name}.log") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "mjax.launch", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[name] = process
        with contextlib.suppress(OSError):  # the next driver then looks in /proc
            self._pid_path(name).write_text(str(process.pid))

    def _runs(self, name: str) -> bool:
        process = self._processes.get(name)
        return self._pid(name) != 0 if process is None else process.poll() is None

    def _pid(self, name: str) -> int:
        """Return the process of an agent of this or an earlier launch; 0 if none."""
        if name in self._processes:
            return self._processes[name].pid
        with contextlib.suppress(OSError, ValueError):
            pid = int(self._pid_path(name).read_text())
            if {b"mjax.launch", name.encode()} <= _words_of(pid):
                return pid
        # The file may be gone, but its agent is not.
        own = {b"mjax.launch", b"agent", name.encode(), str(self._token).encode()}
        pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return next((pid for pid in pids if own <= _words_of(pid)), 0)

    def _pid_path(self, name: str) -> Path:
        return self._folder / f"agent-{name}.pid"


def _log(path: Path) -> IO[bytes]:
    """Open the log of an agent; without it, the agent runs all the same."""
    try:
        return path.open("ab")
    except OSError as error:
        say(f"launch: warning: {path} cannot be written: {error.strerror}")
        return open(os.devnull, "ab")


def _words_of(pid: int) -> set[bytes]:
    """Return the words of the command of a process; none if it has ended."""
    try:
        return {*Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")}
    except OSError:
        return set()


def output_so_far(generation: int, work_dir: Path) -> int:
    """Return the number of bytes that rank 0 has written, and print the file's path."""
    path = log_path(generation_folder(work_dir, generation), 0)
    try:
        num_bytes = path.stat().st_size
    except OSError:
        return 0
    say(f"launch: earlier output of rank 0 is in {path}")
    return num_bytes


async def follow(
    newest: Callable[[], int], work_dir: Path, begin: tuple[int, int]
) -> None:
    """Copy the output of rank 0 to standard output, one generation after another.

    Args:
      newest: returns the number of the current generation.
      work_dir: work dir of the run.
      begin: first generation to copy, and number of bytes of its output to skip.
    """
    generation, place = begin
    files = Worker()
    while True:
        path = log_path(generation_folder(work_dir, generation), 0)
        before = place
        place = await files.run(functools.partial(_copy, path, before))
        if place == before and generation != newest():
            generation, place = newest(), 0
            continue
        await asyncio.sleep(_FOLLOW_S)


def _copy(path: Path, place: int) -> int:
    """Copy a log to standard output, from a place on; return the next place."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size < place:  # the log was rotated
                place = 0
            file.seek(place)
            data = file.read()
    except OSError:
        return place
    num_bytes = len(data)
    try:
        if isinstance(sys.stdout, mjax.Screen):  # which writes whole characters
            decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
            sys.stdout.write(decoder.decode(data))
            num_bytes -= len(decoder.getstate()[0])
        else:
            sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except OSError:  # the disk is full, or the reader of stdout is gone
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- for the rest of the run
    return place + num_bytes
