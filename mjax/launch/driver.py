"""The driver of a run: a `Supervisor` with connections, a clock and a journal.

Input: the config of a launch, and the trainer's flags. Output: the exit code of the
run. The driver imports neither the model nor jax. If it is killed at any moment, the
same command restarts it: it reads the state of the run from the journal, agents
reconnect, and ranks are not affected.
"""

import asyncio
import contextlib
import functools
import json
import math
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mjax.cli.flags import with_flags
from mjax.cli.listening import AT_ONCE, keep_more
from mjax.cli.listening.admission import Admission
from mjax.launch import elastic, failures, messages
from mjax.launch.background import Worker, post, say
from mjax.launch.client import write_private
from mjax.launch.config import RunConfig
from mjax.launch.connections import Buffer, Connection
from mjax.launch.events import Event, process_event, teller
from mjax.launch.history import HostHistory
from mjax.launch.journal import Journal
from mjax.launch.kubernetes import Api
from mjax.launch.liveness import Clock
from mjax.launch.messages import (
    Answer,
    Command,
    FindPorts,
    FromAgent,
    Hello,
    Message,
    Prepare,
    RankSpec,
    Refused,
    Start,
)
from mjax.launch.pods import Pods
from mjax.launch.rank_files import generation_folder
from mjax.launch.supervisor import Supervisor
from mjax.launch.trainer_flags import TrainerFlags
from mjax.processes import lock, progress

TRAINER = (sys.executable, "-m", "mjax.train")
"""The command of a rank, without flags."""
_COORDINATOR = (sys.executable, "-m", "mjax.processes.coordinator")
_TICK_S = 0.05
_CALM_S = 0.25
"""Seconds between ticks while all ranks run normally; otherwise _TICK_S."""
_SAVE_S = 2.0
"""Seconds that orders wait for a journal that cannot be written, except starts."""
_TOLD_GAP_S = 1.0
"""Seconds for which this process must have stood still to report it."""
_TURNS = 3
"""Turns of the loop in which every socket that has data is read."""
_LAST_WORDS_S, _PATIENCE_S = 1.0, 5.0
"""Seconds at the end for agents to leave, and for a terminal or a disk that blocks."""
_FIRST_BYTES = 2**20
"""Size limit of the first message, which has the last lines of the ranks' logs."""


class Driver:
    """The driver of one work dir."""

    def __init__(
        self,
        config: RunConfig,
        flags: Sequence[str],
        *,
        work_dir: Path,
        token: str,
        bind: tuple[str, int],
        trainer: Sequence[str] = TRAINER,
        api: Api | None = None,
    ) -> None:
        """Open the journal and continue from its last state.

        Args:
          config: hosts and limits.
          flags: flags of `python -m mjax.train`, except those about processes.
          work_dir: work dir of the run.
          token: secret that agents and commands must present.
          bind: address and port to listen on. Port 0 uses the previous driver's port if
            it is free, otherwise any free port.
          trainer: command of a rank, without flags.
          api: Kubernetes API; None if the agents do not run in pods.
        Raises:
          ValueError: the journal is of another run, or the history of hosts is
            unusable.
        """
        self._config, self._work_dir = config, work_dir
        self._flags = TrainerFlags(flags)
        self._token, self._bind, self._trainer = token, bind, trainer
        self._agents: dict[str, Connection] = {}
        self._first = msgspec.json.Decoder(messages.First)
        self._from_agent = msgspec.json.Decoder(messages.FromAgent)
        self._clock = Clock(2 * _CALM_S)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._terminal, self._historian = Worker(), Worker()
        self._history = self._open_history(config.history)
        self._journal = Journal(work_dir)
        is_module = [*trainer[:2]] == [sys.executable, "-m"]
        self._is_coordinated = is_module and config.restart.coordinator
        self._sizes = self._fitting_sizes()
        self._supervisor = Supervisor(
            config,
            self._make_rank,
            self._send,
            self._record,
            self._clock.now_s(),
            real_s=self._clock.real_s,
            module=trainer[2] if is_module and config.restart.warm else "",
            find_ports=self._find_ports,
            sizes=self._sizes,
            take_back=self._flags.take_back,
            faults=lambda name: self._history.score(name) if self._history else 0.0,
        )
        self._pods = None if api is None else self._make_pods(api)
        self._is_saved = False
        self._has_news = asyncio.Event()
        self._saved_place: tuple[str, int] | None = None
        self._ids: dict[str, tuple[int, str]] = {}
        self.address: tuple[str, int] = bind
        """Address on which the driver listens, once `is_listening`."""
        self.is_listening = False
        self.follows_rank_0 = False
        """Whether the terminal also shows the output of rank 0."""
        self._take_up()

    def _take_up(self) -> None:
        """Compare the launch with the journal, and continue from the journal."""
        shape = {
            "hosts": self._config.hosts,
            "ranks_per_host": self._config.ranks_per_host,
            "flags": self._flags.words,
        }
        before, snapshot = self._journal.fact("run"), self._journal.fact("snapshot")
        is_running = snapshot is not None and snapshot["state"] != "ended"
        if before is not None and before != shape and is_running:
            raise ValueError(
                f"{self._journal.path} belongs to an unfinished run with other hosts "
                f"or flags: {json.dumps(before)}; repeat those, or give another "
                "--work-dir"
            )
        self._journal.set_fact("run", shape)
        generation = 0 if snapshot is None else snapshot["generation"]
        self._journal.record(process_event("launch", "a driver has begun"), generation)
        if snapshot is None:
            return
        if is_running:
            self._flags.take_up(snapshot.get("flags", self._flags.to_json()))
            log = self._journal.log_events(generation)
            self._supervisor.resume(snapshot, self._clock.now_s(), log)
        else:  # the run has ended: keep only its generation number and skipped data
            self._supervisor.generation = snapshot["generation"]
            self._supervisor.rollbacks.skip = snapshot.get("skip")

    def _open_history(self, path: str) -> HostHistory | None:
        events = self._work_dir / "events.jsonl"
        tell = functools.partial(self._post, teller(self._record))
        try:
            return HostHistory(Path(path), events, tell) if path else None
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"--history: {error}") from error

    def _make_pods(self, api: Api) -> Pods:
        """Return the `Pods` object, with the state that the previous driver saved."""
        pods = Pods(
            api,
            run=str(self._work_dir),
            tell=teller(self._record),
            gone=lambda name, why: self._supervisor.gone(
                name, why, self._clock.now_s()
            ),
            save=lambda fields: self._journal.set_fact("pods", fields),
        )
        before = self._journal.fact("pods")
        if before is not None:
            pods.take_up(before)
        return pods

    async def run(self) -> int:
        """Serve until the run has ended; return its exit code.

        On SIGINT or SIGTERM the run saves and ends.

        Raises:
          OSError: the port is not available.
        """
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (most, most)
        )  # one file descriptor per agent
        self._loop, journal = asyncio.get_running_loop(), self._journal
        journal.on_saved = lambda: self._post(self._deliver)
        journal.on_problem = lambda problem: self._post(self._tell_problem, problem)
        self._admission = Admission(first_bytes=_FIRST_BYTES)
        host, port = self._bind
        known = journal.fact("address")
        if port == 0 and known is not None:
            port = known[1]
        try:
            server = await self._listen(host, port)
        except OSError:
            if self._bind[1] != 0 or port == 0:
                raise
            server = await self._listen(host, 0)
        self.address = (host, server.sockets[0].getsockname()[1])
        self._journal.set_fact("address", self.address)
        known_as = socket.gethostname() if host == "0.0.0.0" else host
        self._write_address(known_as, self.address[1])
        self.is_listening = True
        if self._pods is not None:
            self._pods.start()
        try:
            exit_code = await self._watch(stop)
            await asyncio.to_thread(journal.flush)
            journal.deliver(is_last=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    while self._agents:  # agents exit when they read `Quit`
                        await asyncio.sleep(0.01)
            closed = process_event("closed", "the driver ends")
            self._journal.record(closed, self.generation)
        finally:
            if self._pods is not None:
                self._pods.stop()
            server.close()
            for agent in self._agents.values():
                agent.close()
            is_saved = self._journal.close()
            if self._history is not None:
                self._historian.do(self._history.close)
                self._historian.finish(_PATIENCE_S)
            if not is_saved:
                self._say(f"error: {self._journal.path} lacks the last events")
            self._terminal.finish(_PATIENCE_S)
        return exit_code

    def _write_address(self, host: str, port: int) -> None:
        try:
            write_private(self._work_dir / lock.ADDRESS, json.dumps([host, port]))
        except OSError as error:
            text = f"{lock.ADDRESS} is not written: {error}; commands need "
            text += f"--driver {host}:{port}"
            self._record(Event(kind="journal", text=text, severity="warning"))

    async def _watch(self, stop: asyncio.Event) -> int:
        """Tick the supervisor until the run has ended; return the exit code."""
        is_stopped, lost_s = False, self._clock.lost_s
        while self._supervisor.exit_code is None:
            now_s = self._clock.now_s()
            if self._clock.lost_s > lost_s:
                for _ in range(_TURNS):  # read all sockets before judging anyone
                    await asyncio.sleep(0)
                self._tell_gap(self._clock.lost_s - lost_s)
                now_s, lost_s = self._clock.now_s(), self._clock.lost_s
            if stop.is_set() and not is_stopped:
                is_stopped = True
                self._supervisor.stop(now_s)
            self._supervisor.tick(now_s)
            self._admission.sweep()
            self._save()
            self._deliver()
            await asyncio.sleep(_TICK_S)
            if self._supervisor.is_calm:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_news.wait(), _CALM_S - _TICK_S)
            self._has_news.clear()
        self._save()
        return self._supervisor.exit_code

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self._supervisor.exit_code is not None

    @property
    def generation(self) -> int:
        """Number of the current generation."""
        return self._supervisor.generation

    # ------------------------------------------------------------------ connections

    async def _listen(self, host: str, port: int) -> asyncio.Server:
        buffer, loop = Buffer(), asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(buffer, self._admission, self._take, self._ended),
            *(host, port),
            backlog=AT_ONCE,
        )
        for made in server.sockets:
            keep_more(made.fileno())
        return server

    def _take(self, connection: Connection, line: bytes) -> None:
        """Handle a line; close a connection that uses another protocol."""
        try:
            if connection.host:
                message = messages.decode(self._from_agent, line)
                self._hear(connection.host, message)
            else:
                self._greet(connection, messages.decode(self._first, line))
        except msgspec.DecodeError:
            connection.close()

    def _greet(self, connection: Connection, first: Hello | Command) -> None:
        """Admit an agent, or answer a command."""
        problem = self._problem(first)
        if problem is None and isinstance(first, Hello):
            problem = self._name_problem(first)
        if problem is not None:
            connection.send(Refused(reason=problem))
            connection.close()
            return
        connection.authenticate()
        if isinstance(first, Command):
            answer = self._command(first)
            self._save()

            def send() -> None:
                connection.send(answer)
                connection.close()

            if first.name == "status":
                send()
            else:  # what was promised should survive this driver
                self._journal.when_saved(send, _SAVE_S)
        else:
            name = connection.host = first.host
            before, self._agents[name] = self._agents.get(name), connection
            if before is not None:  # a connection that the agent has given up
                before.close()
            self._ids[name] = _identity(first)
            if self._pods is not None:
                self._pods.joined(name, first.facts.get("pod_uid", ""))
            self._supervisor.joined(first, self._clock.now_s())

    def _hear(self, name: str, message: FromAgent) -> None:
        now_s = self._clock.now_s()
        match message:
            case messages.Beat():
                self._supervisor.beat(name, message, now_s)
            case messages.Ports():
                self._supervisor.ports(name, message, now_s)
            case messages.Stacks():
                self._supervisor.shown(name, message, now_s)
            case messages.Checked():
                self._supervisor.checked(name, message, now_s)

    def _ended(self, connection: Connection) -> None:
        if self._agents.get(connection.host) is connection:
            del self._agents[connection.host]
            self._supervisor.left(connection.host, self._clock.now_s())

    def _name_problem(self, hello: Hello) -> str | None:
        """Return why an agent cannot use its host name in the run; None if it can."""
        name = hello.host
        is_heard = not self._supervisor.is_lost(name, self._clock.now_s())
        if name in self._agents and self._ids[name] != _identity(hello) and is_heard:
            return (
                f"an agent with the name {name} is connected; give this one another "
                "--host"
            )
        return None

    def _problem(self, first: Hello | Command) -> str | None:
        """Return why a peer is refused after its first message; None if it is not."""
        if not messages.has_token(first.token, self._token):
            return (
                "wrong token; give the token file of this run (launch/token in its "
                "work dir, or --token-file of its driver)"
            )
        return messages.version_problem(first.version)

    def _command(self, command: Command) -> Message:
        """Execute a user's command."""
        now_s = self._clock.now_s()
        try:
            match command.name:
                case "status":
                    return Answer(text=self._status_text(), data=self.status())
                case "evict":
                    self._audit(command)
                    self._supervisor.evict(command.host, command.reason, now_s)
                    return Answer(text=f"{command.host} is evicted", data={})
                case "stop":
                    self._audit(command)
                    self._supervisor.stop(now_s)
                    return Answer(text="the run saves and ends", data={})
                case "drain":
                    self._audit(command)
                    self._supervisor.drain(command.host, command.reason, now_s)
                    return Answer(text=f"{command.host} leaves the run", data={})
                case "update":
                    self._flags.update(command.flags, self._supervisor.generation)
                    self._audit(command)
                    self._supervisor.update(now_s)
                    text = "the run saves and restarts with the new flags and code"
                    return Answer(text=text, data={})
                case _:
                    return Refused(reason=f"unknown command {command.name}")
        except ValueError as error:
            return Refused(reason=str(error))

    def _audit(self, command: Command) -> None:
        text = f"{command.name} {command.host}".strip() + f" by {command.actor}"
        self._record(
            Event(
                kind="audit",
                text=f"{text}: {command.reason or 'no reason given'}",
                data={
                    "command": command.name,
                    "actor": command.actor,
                    "flags": command.flags,
                },
            )
        )

    def status(self) -> dict[str, Any]:
        """Return the state of the run as JSON."""
        now_s = self._clock.now_s()
        return self._supervisor.snapshot() | {
            "trainer": self._trainer,
            "flags": self._flags.words,
            "heard_s": {
                host.name: round(now_s - host.heard_s, 3)
                for host in self._supervisor.hosts.values()
            },
            "ranks": sorted(
                (
                    msgspec.to_builtins(state)
                    for host in self._supervisor.hosts.values()
                    for state in host.ranks.values()
                ),
                key=lambda state: state["rank"],
            ),
        }

    def _status_text(self) -> str:
        one = self._supervisor
        lines = [f"{self._work_dir}: {one.progress_text()}"]
        now_s = self._clock.now_s()
        ages_s = [now_s - host.heard_s for host in one.hosts.values() if host.ranks]
        if ages_s:
            lines[0] += f"; the ranks reported up to {max(ages_s):.1f} s ago"
        for host in sorted(one.hosts.values(), key=lambda host: host.name):
            heard_s = now_s - host.heard_s
            ranks = ", ".join(map(str, host.ranks)) or "none"
            why = f" ({host.why})" if host.why else ""
            state = "waiting" if one.waits_for_place(host) else host.state
            lines.append(
                f"  {host.name}  {state}{why}  ranks {ranks}  last message "
                f"{heard_s:.1f} s ago"
            )
        return "\n".join(lines)

    # ------------------------------------------------------------------------ effects

    def _fitting_sizes(self) -> dict[int, dict[str, list[str]]]:
        """Return number of hosts -> trainer flags that change; see `elastic.sizes`."""
        config = self._config
        if config.min_hosts is None or config.min_hosts == config.hosts:
            return {config.hosts: {}}
        found = elastic.trainer_config(
            [*self._trainer, *self._flags.words], config.limits.import_s
        )
        return elastic.sizes(
            found,
            hosts=config.hosts,
            least=config.min_hosts,
            devices_per_host=elastic.devices_per_host(found, config.ranks_per_host),
        )

    def _make_rank(
        self, generation: int, rank: int, num_hosts: int, coordinator: str
    ) -> RankSpec:
        per_host = self._config.ranks_per_host
        num_ranks = num_hosts * per_host
        flags = with_flags(self._flags.words, self._sizes[num_hosts])
        if self._supervisor.rollbacks.skip is not None:
            flags = with_flags(flags, {"--data.skip": self._supervisor.rollbacks.skip})
        if num_ranks > 1:
            flags += ["--distributed.coordinator", coordinator]
            flags += ["--distributed.num-processes", str(num_ranks)]
            flags += ["--distributed.process-id", str(rank)]
            if self._is_coordinated:
                flags += ["--distributed.no-serves"]
        environment = {progress.LAUNCH_VARIABLE: self._journal.name}
        if per_host > 1 and "--simulate-devices" not in flags:
            environment["JAX_LOCAL_DEVICE_IDS"] = str(rank % per_host)
        return RankSpec(
            rank=rank,
            argv=[*self._trainer, *flags],
            environment=environment,
            folder=str(generation_folder(self._work_dir, generation).absolute()),
        )

    def _find_ports(self, generation: int, num_hosts: int) -> FindPorts:
        """Return the request for a port, and for a coordinator process if needed."""
        folder = generation_folder(self._work_dir, generation).absolute()
        num_ranks = num_hosts * self._config.ranks_per_host
        is_wanted = self._is_coordinated and num_ranks > 1
        return FindPorts(
            generation=generation,
            coordinator=[*_COORDINATOR, str(num_ranks)] if is_wanted else [],
            folder=str(folder),
            timeout_s=self._config.limits.import_s,
        )

    def _send(self, host: str, message: Message) -> None:
        """Send a message once the state behind it is saved.

        Otherwise a driver that is started again would not know what it has ordered. It
        must know of every generation that has begun. If the disk fails, other orders
        wait only a little, so that a run can be stopped.
        """
        if not isinstance(message, Prepare):  # `Prepare` needs no saved state
            self._save()
        is_start = isinstance(message, FindPorts | Start)

        def send() -> None:
            if host in self._agents:
                self._agents[host].send(message)

        self._journal.when_saved(send, math.inf if is_start else _SAVE_S)

    def _deliver(self) -> None:
        """Send what has waited for the journal; let the history read new events."""
        self._journal.deliver()
        # Orders wait as long as the disk fails, so that time does not count.
        self._clock.is_held = self._journal.holds
        if self._history is not None and not self._history.is_current:
            self._history.is_current = True
            self._historian.do(self._history.read)

    def _tell_gap(self, gap_s: float) -> None:
        if gap_s >= _TOLD_GAP_S:
            text = (
                f"this driver stood still for {gap_s:.1f} s (stopped, or the machine "
                "was overloaded); no time limit counts that time"
            )
            self._record(Event(kind="gap", text=text, severity="warning"))

    def _tell_problem(self, problem: str) -> None:
        """Report that the journal cannot be written, or can be written again."""
        text, severity = "the journal is written again", "info"
        if problem:
            text, severity = f"the journal cannot be written: {problem}", "warning"
            text += "; ranks go on, but none is started until it can"
        self._record(Event(kind="journal", text=text, severity=severity))

    def _record(self, event: Event) -> None:
        self._journal.record(event, self._supervisor.generation)
        self._is_saved = False
        self._has_news.set()
        if self._history is not None:
            self._history.note(event)
        if event.kind == "under_way":
            self._flags.keep(self._supervisor.generation)
        if event.kind == "evict" and event.host and self._pods is not None:
            self._pods.put_aside(event.host, event.data["state"], event.data["why"])
        if event.severity == "debug":
            return
        mark = "" if event.severity == "info" else f"{event.severity}: "
        text = event.text
        if self.follows_rank_0:
            states = [host.ranks for host in self._supervisor.hosts.values()]
            text = failures.without_lines(text, states)
        self._say(f"{mark}{text}")

    def _say(self, text: str) -> None:
        self._terminal.do(functools.partial(say, f"launch: {text}"))

    def _post(self, call: Callable[..., None], *words: Any, **fields: Any) -> None:
        """Call a function in the loop, from another thread."""
        if self._loop is not None:
            post(self._loop, functools.partial(call, *words, **fields))

    def _save(self) -> None:
        """Write the snapshot if it changed, before any message and at each tick.

        Every change comes with an event, a new state or a new generation.
        """
        place = (self._supervisor.state.value, self._supervisor.generation)
        if self._is_saved and place == self._saved_place:
            return
        self._is_saved, self._saved_place = True, place
        snapshot = self._supervisor.snapshot() | {"flags": self._flags.to_json()}
        self._journal.set_fact("snapshot", snapshot)


def _identity(hello: Hello) -> tuple[int, str]:
    """Return what tells an agent process from others with the same host name."""
    return hello.pid, hello.id
