"""The agent of a host: starts rank processes, watches them, reports to the driver.

Input: a connection to the driver. Output: rank processes, their logs, and a heartbeat
each second. The agent decides nothing. If it loses the connection, the ranks continue
and the agent reconnects. If the agent dies, the kernel kills its ranks
(PR_SET_PDEATHSIG).

Source: the executor of MegaScale, arXiv:2402.15627, section 4.1.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from mjax.launch import checks, messages, nccl_ras
from mjax.launch.facts import host_facts, rdma_bytes
from mjax.launch.log_rules import KernelLog
from mjax.launch.messages import RankState
from mjax.launch.policy import EXIT_CODES, Cause
from mjax.launch.ranks import Adopted, Rank, Starter, oom_kills, rotate
from mjax.processes import progress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_RETRY_S = 0.5
_STACKS_S = 1.0
_QUIET_S = 0.1
"""A rank has finished writing its stacks if the file has not grown for this long. The
value was picked by judgement: a rank that runs at all writes the next piece sooner."""
_POLL_S = 0.02


class Agent:
    """The agent of a host; `run` returns when the driver tells it to quit."""

    def __init__(
        self,
        *,
        driver: tuple[str, int],
        token: str,
        host: str,
        address: str,
        orphan_s: float,
        log_bytes: int = 256 * 2**20,
    ) -> None:
        """Store the settings; `run` connects.

        Args:
          driver: (host, port) of the driver.
          token: token of the run.
          host: name of this host.
          address: address at which other hosts reach this one.
          orphan_s: seconds without a driver after which the agent stops its ranks and
            exits.
          log_bytes: size in bytes at which a rank's log is rotated.
        """
        self._log_bytes = log_bytes
        self._driver, self._token = driver, token
        self._host, self._address, self._orphan_s = host, address, orphan_s
        self._id = secrets.token_hex(8)
        self._ranks: dict[int, Rank] = {}
        self._starter = Starter()
        self._coordinator: subprocess.Popen[bytes] | Adopted | None = None
        self._coordinated = 0
        self._leaving = ""
        self._kernel_log = KernelLog()
        self._checking: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._wake = asyncio.Event()

    async def run(self) -> int:
        """Serve drivers until one reports that the run is over; return the exit code.

        On SIGINT or SIGTERM this host leaves the run: its ranks save first, and a spare
        host replaces it.
        """
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._leave, number)
        alone_s = time.monotonic()
        decoder = msgspec.json.Decoder(messages.ToAgent)
        while time.monotonic() - alone_s < self._orphan_s:
            try:
                reader, self._writer = await asyncio.open_connection(
                    *self._driver, limit=messages.MAX_LINE_BYTES
                )
            except OSError:
                if self._leaving and not self._has_ranks():
                    return EXIT_CODES[Cause.PREEMPTED]
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                self._say(self._hello())
                beating = asyncio.create_task(self._beat())
                try:
                    while True:
                        message = await messages.receive(reader, decoder)
                        alone_s = time.monotonic()
                        code = await self._obey(message)
                        if code is not None:
                            return code
                finally:
                    beating.cancel()
                    alone_s = time.monotonic()
            except (OSError, EOFError):
                await asyncio.sleep(_RETRY_S)
            finally:
                self._writer.close()
                self._writer = None
        self._kill(self._newest(), signal.SIGKILL)
        print(
            f"error: no driver at {self._driver[0]}:{self._driver[1]} for "
            f"{self._orphan_s:g} s; the ranks of this host were stopped",
            file=sys.stderr,
        )
        return 1

    async def _obey(self, message: messages.ToAgent) -> int | None:
        """Execute a message of the driver; return an exit code if it ends the agent."""
        match message:
            case messages.Refused():
                print(f"error: {message.reason}", file=sys.stderr)
                self._kill(self._newest(), signal.SIGKILL)
                return 2
            case messages.FindPorts():
                port = await self._coordinate(message)
                self._say(
                    messages.Ports(generation=message.generation, coordinator=port)
                )
            case messages.Prepare():
                self._starter.prepare(message.module)
            case messages.Start():
                await self._start(message)
            case messages.Signal():
                self._kill(message.generation, message.number)
                self._wake.set()
            case messages.Dump():
                stacks = await self._stacks(message.generation)
                spied, nccl = await asyncio.gather(
                    self._spied(stacks, message.generation), nccl_ras.status()
                )
                shown = messages.Stacks(
                    generation=message.generation,
                    stacks=stacks,
                    spied=spied,
                    nccl=nccl,
                )
                self._say(shown)
            case messages.Check():
                task = asyncio.create_task(self._check(message))
                self._checking.add(task)
                task.add_done_callback(self._checking.discard)
            case messages.Quit():
                self._kill(self._newest(), signal.SIGKILL)
                return EXIT_CODES[Cause.PREEMPTED if self._leaving else Cause.DONE]
        return None

    def _leave(self, number: int) -> None:
        """Report that this host leaves; at a second signal, end the agent."""
        for one in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(one)
        self._leaving = f"its agent got {signal.Signals(number).name}"
        if self._writer is None:  # without a driver, the agent must signal the ranks
            self._kill(self._newest(), signal.SIGTERM)
        self._wake.set()

    def _has_ranks(self) -> bool:
        return any(rank.process.poll() is None for rank in self._ranks.values())

    async def _coordinate(self, message: messages.FindPorts) -> int:
        """Return a free port, 0 on failure; run the coordinator on it if requested."""
        self._end_coordinator()
        self._coordinated, port = message.generation, free_port()
        if not message.coordinator:
            return port
        folder = Path(message.folder)
        folder.mkdir(parents=True, exist_ok=True)
        argv = [*message.coordinator, f"{self._address}:{port}"]
        self._coordinator = await self._starter.run(
            argv, os.environ, folder / "coordinator.log"
        )
        until_s = time.monotonic() + message.timeout_s
        while self._coordinator.poll() is None and time.monotonic() < until_s:
            try:
                _, writer = await asyncio.open_connection("localhost", port)
            except OSError:
                await asyncio.sleep(_POLL_S)
            else:
                writer.close()
                return port
        self._end_coordinator()
        return 0

    def _end_coordinator(self) -> None:
        if self._coordinator is not None:
            self._coordinator.send_signal(signal.SIGKILL)
            self._coordinator.poll()
            self._coordinator = None

    async def _start(self, message: messages.Start) -> None:
        self._kill(message.generation - 1, signal.SIGKILL)
        for rank in self._ranks.values():
            while rank.process.poll() is None:
                await asyncio.sleep(0.01)
        self._ranks = {
            spec.rank: Rank(
                spec=spec, generation=message.generation, oom_kills=oom_kills()
            )
            for spec in message.ranks
        }
        for rank in self._ranks.values():
            await self._starter.start(rank)
            asyncio.create_task(self._wait_for(rank))  # noqa: RUF006
        self._wake.set()

    async def _wait_for(self, rank: Rank) -> None:
        """Send a heartbeat immediately when a rank ends."""
        try:
            descriptor = os.pidfd_open(rank.process.pid)
        except ProcessLookupError:  # the rank has ended, and a heartbeat reported it
            return
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        rank.look()
        self._wake.set()

    async def _stacks(self, generation: int) -> dict[int, str]:
        """Request the stacks of all ranks and wait for them; return rank -> text."""
        paths, begins = {}, {}
        for index, rank in self._ranks.items():
            is_alive = rank.generation == generation and rank.process.poll() is None
            # The file exists once the rank has installed a handler for the signal.
            if is_alive and rank.stacks_path.exists():
                paths[index] = rank.stacks_path
                begins[index] = rank.stacks_path.stat().st_size
                rank.process.send_signal(progress.STACKS_SIGNAL)

        def written() -> dict[int, str]:
            return {index: _read(path, begins[index]) for index, path in paths.items()}

        # A rank writes its stacks in many pieces. The answer to `ask_for_lock` goes to
        # the same file, so ask only when the stacks are complete.
        begin_s, found = time.monotonic(), written()
        while time.monotonic() < begin_s + _STACKS_S / 2:
            before = found
            await asyncio.sleep(_QUIET_S)
            found = written()
            if found == before and all(found.values()):
                break
        for path in paths.values():
            progress.ask_for_lock(path)
        while time.monotonic() < begin_s + _STACKS_S:
            if all(progress.LOCK_ANSWER in text for text in written().values()):
                break
            await asyncio.sleep(_POLL_S)
        return {index: text for index, text in written().items() if text}

    async def _spied(
        self, answered: Collection[int], generation: int
    ) -> dict[int, str]:
        """Run py-spy, if installed, on ranks without stacks; return rank -> text."""
        program = shutil.which("py-spy", path=_programs())
        if program is None:
            return {}
        pids = {
            index: rank.process.pid
            for index, rank in self._ranks.items()
            if rank.generation == generation
            and rank.process.poll() is None
            and index not in answered
        }
        looks = (
            checks.run([program, "dump", "--nonblocking", "--pid", str(pid)], _STACKS_S)
            for pid in pids.values()
        )
        texts = [text for _, text in await asyncio.gather(*looks)]
        return dict(zip(pids, texts, strict=True))

    async def _check(self, order: messages.Check) -> None:
        """Run the check, and send its result unless there is no connection."""
        is_healthy, text = await checks.run(order.command, order.timeout_s, self._host)
        if self._writer is not None:
            answer = messages.Checked(
                number=order.number, is_healthy=is_healthy, text=text
            )
            self._say(answer)

    def _kill(self, generation: int, number: int) -> None:
        """Send a signal to the ranks of this and all earlier generations.

        SIGKILL also ends their coordinator.
        """
        if number == signal.SIGKILL and generation >= self._coordinated:
            self._end_coordinator()
        for rank in self._ranks.values():
            if rank.generation <= generation and rank.process.poll() is None:
                rank.process.send_signal(number)

    def _newest(self) -> int:
        return max((rank.generation for rank in self._ranks.values()), default=0)

    async def _beat(self) -> None:
        while True:
            self._wake.clear()
            beat = messages.Beat(
                ranks=self._states(),
                leaving=self._leaving,
                matches=self._matches(),
                rdma_bytes=rdma_bytes(),
            )
            self._say(beat)
            for rank in self._ranks.values():
                rotate(rank.log_path, self._log_bytes)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), messages.BEAT_S)

    def _matches(self) -> list[messages.Match]:
        """Return the matches of rules in log lines since the last heartbeat."""
        found = self._kernel_log.read()
        for rank in self._ranks.values():
            found += rank.log_reader.read(is_over=rank.end is not None)
        return found

    def _states(self) -> list[RankState]:
        return [rank.look() for rank in self._ranks.values()]

    def _hello(self) -> messages.Hello:
        return messages.Hello(
            version=messages.VERSION,
            token=self._token,
            host=self._host,
            address=self._address,
            pid=os.getpid(),
            id=self._id,
            facts=host_facts() | {"kernel_log": self._kernel_log.access},
            ranks=self._states(),
        )

    def _say(self, message: messages.Message) -> None:
        assert self._writer is not None
        self._writer.write(messages.encode(message))


def _read(path: Path, begin: int) -> str:
    """Return the text of a file from byte `begin` to the end."""
    with path.open(errors="replace") as file:
        file.seek(begin)
        return file.read()


def _programs() -> str:
    """Return PATH for programs, with the folder of this Python first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def free_port() -> int:
    """Return the number of a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
