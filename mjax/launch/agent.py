"""The agent of a host: starts rank processes, watches them, reports to the driver.

Input: a connection to the driver. Output: rank processes, their logs, and a heartbeat
each second. The agent decides nothing. If it loses the connection, the ranks continue
and the agent reconnects. If the agent dies, the kernel kills its ranks
(PR_SET_PDEATHSIG).

Source: the executor of MegaScale, arXiv:2402.15627, section 4.1.
"""

import asyncio
import contextlib
import functools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from mjax.launch import checks, messages, nccl_ras
from mjax.launch.background import Worker, say
from mjax.launch.facts import host_facts, rdma_bytes
from mjax.launch.liveness import Clock
from mjax.launch.log_rules import KernelLog
from mjax.launch.messages import RankState
from mjax.launch.policy import EXIT_CODES, Cause
from mjax.launch.rank_files import Shared
from mjax.launch.ranks import Adopted, Rank, Starter, handles, oom_kills
from mjax.processes import progress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_RETRY_S = 0.5
_STACKS_S = 1.0
_QUIET_S = 0.1
"""A rank has finished writing its stacks if the file has not grown for this long. A
rank that runs at all writes the next piece sooner."""
_POLL_S = 0.02
_LOOK_S = 0.5
"""Seconds that a heartbeat waits for the files of the ranks."""
_PATIENCE_S = 1.0
_NOT_STARTED = 126
"""Exit code of a rank that cannot be started, as of a shell."""


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
        self._clock = Clock(2 * messages.BEAT_S)
        self._heard_s = self._clock.now_s()
        self._files = Worker()
        self._looking: asyncio.Task[None] | None = None
        self._matches: list[messages.Match] = []
        self._driver, self._token = driver, token
        self._host, self._address, self._orphan_s = host, address, orphan_s
        self._id = secrets.token_hex(8)
        self._ranks: dict[int, Rank] = {}
        self._starter = Starter()
        self._coordinator: subprocess.Popen[bytes] | Adopted | None = None
        self._coordinator_log: Shared | None = None
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
        try:
            return await self._run()
        finally:
            self._files.finish(_PATIENCE_S)

    async def _run(self) -> int:
        self._heard_s = self._clock.now_s()
        while self._clock.now_s() - self._heard_s < self._orphan_s:
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
                return await self._serve(reader)
            except EOFError:
                await asyncio.sleep(_RETRY_S)
            finally:
                self._heard_s = self._clock.now_s()
                self._writer.close()
                self._writer = None
        self._kill(self._newest(), signal.SIGKILL)
        self._print(
            f"error: no driver at {self._driver[0]}:{self._driver[1]} for "
            f"{self._orphan_s:g} s; the ranks of this host were stopped"
        )
        return 1

    async def _serve(self, reader: asyncio.StreamReader) -> int:
        """Obey a driver; return the exit code when it ends this agent.

        Raises:
          EOFError: the connection has ended.
        """
        await self._look()
        self._say(self._hello())
        tasks = [
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._hear(reader)),
        ]
        try:
            # If the heartbeats end by an error of ours, so does the agent: a host must
            # not keep its place in silence.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task.done()).result()
        finally:
            for task in tasks:
                task.cancel()

    async def _hear(self, reader: asyncio.StreamReader) -> int:
        decoder = msgspec.json.Decoder(messages.ToAgent)
        while True:
            try:
                message = await messages.receive(reader, decoder)
            except OSError as error:
                raise EOFError(str(error)) from error
            self._heard_s = self._clock.now_s()
            try:
                code = await self._obey(message)
            except OSError as error:  # such as too many processes: the driver notices
                self._print(f"error: {type(message).__name__} failed: {error}")
            else:
                if code is not None:
                    return code

    async def _obey(self, message: messages.ToAgent) -> int | None:
        """Execute a message of the driver; return an exit code if it ends the agent."""
        match message:
            case messages.Refused():
                self._print(f"error: {message.reason}")
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
        path = Path(message.folder) / "coordinator.log"
        self._coordinator_log = log = await self._files.run(lambda: Shared(path))
        argv = [*message.coordinator, f"{self._address}:{port}"]
        self._coordinator = await self._starter.run(argv, os.environ, log.name)
        until_s = self._clock.now_s() + message.timeout_s
        while self._coordinator.poll() is None and self._clock.now_s() < until_s:
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
        if self._coordinator_log is not None:
            self._coordinator_log.close()
            self._coordinator_log = None

    async def _start(self, message: messages.Start) -> None:
        self._kill(message.generation - 1, signal.SIGKILL)
        for rank in self._ranks.values():
            while rank.end is None and rank.process.poll() is None:
                await asyncio.sleep(0.01)
        before, self._ranks = (
            self._ranks,
            {
                spec.rank: Rank(
                    spec=spec,
                    generation=message.generation,
                    oom_kills=oom_kills(),
                    asked_s=self._clock.now_s(),
                )
                for spec in message.ranks
            },
        )
        for rank in before.values():  # after a reading that may be under way
            self._files.do(rank.close)
        for rank in self._ranks.values():
            await self._files.run(functools.partial(rank.open, self._log_bytes))
            try:
                await self._starter.start(rank)
            except OSError as error:
                rank.finish(_NOT_STARTED, f"it cannot be started: {error}")
            else:
                asyncio.create_task(self._wait_for(rank))  # noqa: RUF006
        self._wake.set()

    async def _wait_for(self, rank: Rank) -> None:
        """Send a heartbeat immediately when a rank ends."""
        try:
            descriptor = os.pidfd_open(rank.process.pid)
        except OSError:  # the rank has ended; the next heartbeat reports it
            return
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._wake.set()

    async def _stacks(self, generation: int) -> dict[int, str]:
        """Request the stacks of all ranks and wait for them; return rank -> text."""
        begins: dict[int, int] = {}
        for index, rank in self._ranks.items():
            is_alive = rank.generation == generation and rank.process.poll() is None
            if is_alive and handles(rank.process.pid, progress.STACKS_SIGNAL):
                begins[index] = rank.files.stacks_size
                rank.process.send_signal(progress.STACKS_SIGNAL)
        ranks = {index: self._ranks[index] for index in begins}

        def written() -> dict[int, str]:
            return {i: rank.files.stacks(begins[i]) for i, rank in ranks.items()}

        # A rank writes its stacks in many pieces. The answer to `ask_for_lock` goes to
        # the same file, so ask only when the stacks are complete.
        found, until_s = written(), self._clock.now_s() + _STACKS_S / 2
        while self._clock.now_s() < until_s:
            before = found
            await asyncio.sleep(_QUIET_S)
            found = written()
            if found == before and all(found.values()):
                break
        for rank in ranks.values():
            rank.files.ask_for_lock()
        until_s = self._clock.now_s() + _STACKS_S / 2
        while self._clock.now_s() < until_s:
            await asyncio.sleep(_POLL_S)
            if all(progress.LOCK_ANSWER in text for text in written().values()):
                break
        found = {index: text for index, text in written().items() if text}
        for index, text in found.items():
            self._files.do(functools.partial(ranks[index].files.show, text))
        return found

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
        is_healthy, text = await checks.run(
            order.command, order.timeout_s, self._host, self._clock.now_s
        )
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

    async def _beat(self) -> int:
        while True:
            self._wake.clear()
            await self._look()
            matches, self._matches = self._matches, []
            beat = messages.Beat(
                ranks=self._states(),
                leaving=self._leaving,
                matches=self._kernel_log.read() + matches,
                rdma_bytes=rdma_bytes(),
            )
            self._say(beat)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), messages.BEAT_S)

    async def _look(self) -> None:
        """Read the files of the ranks, and record which ranks have ended.

        A disk that blocks delays no heartbeat: the last reading then stays.
        """
        loop = asyncio.get_running_loop()
        until_s, is_new = loop.time() + _LOOK_S, False
        ended = {
            rank.spec.rank: code
            for rank in self._ranks.values()
            if (code := rank.process.poll()) is not None
        }
        while not is_new:  # a reading that has begun before may lack the last lines
            if is_new := self._looking is None:
                ranks = [r for r in self._ranks.values() if r.end is None]
                self._looking = asyncio.create_task(self._read(ranks, {*ended}))
            assert self._looking is not None
            left_s = max(0.0, until_s - loop.time())
            if not (await asyncio.wait({self._looking}, timeout=left_s))[0]:
                break
            looking, self._looking = self._looking, None
            looking.result()
        for index, code in ended.items():
            if self._ranks[index].end is None:
                self._ranks[index].finish(code)

    async def _read(self, ranks: Sequence[Rank], ended: Collection[int]) -> None:
        for rank in ranks:
            is_over = rank.spec.rank in ended
            reading = await self._files.run(
                functools.partial(rank.read, is_over=is_over)
            )
            if reading is not None:
                rank.take(reading, self._clock.now_s())
                self._matches += reading.matches

    def _states(self) -> list[RankState]:
        return [rank.state() for rank in self._ranks.values()]

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

    def _print(self, text: str) -> None:
        self._files.do(functools.partial(say, text))


def _programs() -> str:
    """Return PATH for programs, with the folder of this Python first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def free_port() -> int:
    """Return the number of a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
