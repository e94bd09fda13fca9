"""The decisions of a driver: which ranks run where, what has failed, what is next.

Enters: what agents say, and the time. Leaves: messages to agents, events, and the exit
code of the run. No socket, file or clock is touched, so a test plays any fault with any
number of hosts.

A run is a series of generations. In each, every active host has `ranks_per_host` ranks.
When one of them fails the others cannot go on: all are killed and, if `policy.TABLE`
says so, started again as the next generation, which resumes from the newest checkpoint.
"""

import collections
import dataclasses
import enum
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mjax.launch import policy, stacks
from mjax.launch.config import LimitsConfig, RunConfig
from mjax.launch.messages import (
    Beat,
    Dump,
    FindPorts,
    Hello,
    Message,
    Ports,
    Quit,
    RankSpec,
    RankState,
    Signal,
    Stacks,
    Start,
)
from mjax.launch.policy import Action, Cause
from mjax.processes.progress import Phase

_SETTLE_S = 0.3
"""What ends within this time of the first end is looked at with it."""
_PORTS_S = 10.0
_STARTED_S = 15.0
"""After which a rank must be known to its host."""
_NUM_STEP_TIMES = 256
GAVE_UP, PREEMPTED = 93, 42
"""Exit codes, as of `python -m mjax.train`."""


class State(enum.StrEnum):
    """What a driver is doing."""

    GATHERING = "waiting for hosts"
    PORTS = "looking for ports"
    RUNNING = "running"
    STACKS = "collecting stacks"
    STOPPING = "ending the ranks"
    PAUSING = "pausing before a restart"
    ENDED = "ended"


class HostState(enum.StrEnum):
    """What a host is for."""

    SPARE = "spare"
    ACTIVE = "active"
    LOST = "lost"
    """It may come back, as a spare."""
    EVICTED = "evicted"


@dataclasses.dataclass(kw_only=True)
class Host:
    """A host whose agent has been seen."""

    name: str
    address: str
    state: HostState = HostState.SPARE
    is_connected: bool = True
    heard_s: float
    """When its agent last said something."""
    ranks: dict[int, RankState] = dataclasses.field(default_factory=dict)
    """Of the present generation."""
    why: str = ""
    """Why it was evicted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended a generation."""

    cause: Cause
    text: str
    hosts: tuple[str, ...] = ()
    """Those that are to blame."""
    ranks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, for the journal and for people."""

    kind: str
    text: str
    severity: str = "info"
    host: str | None = None
    rank: int | None = None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Send = Callable[[str, Message], None]
"""(host, message): hands a message to a connection, never waits."""


class Supervisor:
    """Decides what happens to a run. Every call gives the time, in seconds."""

    def __init__(
        self,
        config: RunConfig,
        make_rank: Callable[[int, int, str], RankSpec],
        send: Send,
        record: Callable[[Event], None],
        now_s: float,
    ) -> None:
        """Begin with no host.

        Args:
          config: of the run.
          make_rank: from generation, rank and the coordinator's host:port to what an
            agent starts.
          send: for messages to agents.
          record: for events.
          now_s: the time.
        """
        self.config = config
        self.hosts: dict[str, Host] = {}
        self.generation = 0
        """Counts from 1; 0 before the first."""
        self.state = State.GATHERING
        self.exit_code: int | None = None
        self.saved_step = -1
        """The newest step that is known to be saved."""
        self.num_fruitless = 0
        self.placement: list[str] = []
        """Active hosts, in the order of their ranks."""
        self._make_rank, self._send, self._record = make_rank, send, record
        self._since_s = now_s
        self._until_s = math.inf
        self._failure: Failure | None = None
        self._first_end_s: float | None = None
        self._is_asked_to_stop = False
        self._stop_by_s = math.inf
        self._saved_before = -1
        self._step_times_s: collections.deque[float] = collections.deque(
            maxlen=_NUM_STEP_TIMES
        )
        self._stacks: dict[int, str] = {}
        self._answered: set[str] = set()

    # -------------------------------------------------------------- what agents say

    def joined(self, hello: Hello, now_s: float) -> None:
        """Take a host in, or back after its agent or this driver was started again."""
        host = self.hosts.get(hello.host)
        if host is None:
            host = Host(name=hello.host, address=hello.address, heard_s=now_s)
            self.hosts[hello.host] = host
        host.address, host.is_connected = hello.address, True
        if host.state is HostState.LOST:
            host.state, host.why = HostState.SPARE, ""
        self._tell("host", f"{host.name} joined as {host.state}", host=host.name)
        if self.state is State.ENDED:
            self._send(host.name, Quit())
            return
        is_over = self.state is State.STOPPING or host.name not in self.placement
        if hello.ranks and is_over:
            self._send(
                host.name, Signal(generation=self.generation, number=signal.SIGKILL)
            )
        is_new = self.state is State.RUNNING and bool(host.ranks) and not hello.ranks
        self.beat(hello.host, Beat(ranks=hello.ranks), now_s)
        if is_new and host.name in self.placement:
            text = f"the agent of {host.name} was started again, without its ranks"
            failure = Failure(cause=Cause.KILLED, text=text, hosts=(host.name,))
            self._fail(failure, now_s)

    def beat(self, name: str, beat: Beat, now_s: float) -> None:
        """Note what the ranks of a host do."""
        host = self.hosts[name]
        host.heard_s = now_s
        before = host.ranks
        host.ranks = {
            state.rank: state
            for state in beat.ranks
            if state.generation == self.generation
        }
        for rank, state in host.ranks.items():
            old = before.get(rank)
            if state.step_s is not None and (old is None or old.step != state.step):
                self._step_times_s.append(state.step_s)
            self._note_saved(state)
            if state.code is not None and (old is None or old.code is None):
                self._tell(
                    "rank_end",
                    f"rank {rank} ended with {describe_code(state.code)} in "
                    f"{Phase(state.phase).name.lower()} after step {state.step}",
                    host=name,
                    rank=rank,
                    data={"code": state.code, "step": state.step},
                )
                if self._first_end_s is None:
                    self._first_end_s = now_s
                self.tick(now_s)

    def ports(self, name: str, ports: Ports, now_s: float) -> None:
        """Start the generation whose coordinator can listen there."""
        if self.state is not State.PORTS or ports.generation != self.generation:
            return
        if name != self.placement[0]:
            return
        address = self.hosts[name].address
        coordinator = f"{address}:{ports.coordinator}"
        self._enter(State.RUNNING, now_s)
        self._tell(
            "generation",
            f"generation {self.generation} starts on {', '.join(self.placement)}",
            data={"hosts": self.placement, "coordinator": coordinator},
        )
        for index, active in enumerate(self.placement):
            first = index * self.config.ranks_per_host
            ranks = range(first, first + self.config.ranks_per_host)
            specs = [self._make_rank(self.generation, r, coordinator) for r in ranks]
            self._send(active, Start(generation=self.generation, ranks=specs))

    def shown(self, name: str, shown: Stacks, now_s: float) -> None:
        """Take the stacks of a host."""
        if self.state is State.STACKS and shown.generation == self.generation:
            self._stacks |= shown.stacks
            self._answered.add(name)
            self.tick(now_s)

    def left(self, name: str, now_s: float) -> None:
        """Note that the connection to a host has ended; it may come back."""
        self.hosts[name].is_connected = False
        if self.state is State.ENDED:
            return
        self._tell("host", f"{name} is not connected", "warning", host=name)
        self.tick(now_s)

    # --------------------------------------------------------- a driver that comes back

    def snapshot(self) -> dict[str, Any]:
        """Return what a new driver must know to go on, as JSON."""
        return {
            "generation": self.generation,
            "state": self.state.value,
            "placement": self.placement,
            "saved_step": self.saved_step,
            "saved_before": self._saved_before,
            "num_fruitless": self.num_fruitless,
            "is_asked_to_stop": self._is_asked_to_stop,
            "hosts": {
                host.name: {
                    "address": host.address,
                    "state": host.state.value,
                    "why": host.why,
                }
                for host in self.hosts.values()
            },
        }

    def resume(self, snapshot: Mapping[str, Any], now_s: float) -> None:
        """Go on where another driver was; ranks that run go on running.

        Agents that do not come back in time count as lost.
        """
        self.generation = snapshot["generation"]
        self.placement = [*snapshot["placement"]]
        self.saved_step = snapshot["saved_step"]
        self._saved_before = snapshot["saved_before"]
        self.num_fruitless = snapshot["num_fruitless"]
        self._is_asked_to_stop = snapshot["is_asked_to_stop"]
        for name, host in snapshot["hosts"].items():
            self.hosts[name] = Host(
                name=name,
                address=host["address"],
                state=HostState(host["state"]),
                why=host["why"],
                is_connected=False,
                heard_s=now_s,
            )
        state = State(snapshot["state"])
        self._tell("driver", f"a driver was started again; the run was {state}")
        if state is State.RUNNING:
            self._enter(State.RUNNING, now_s)
        elif state in (State.GATHERING, State.PAUSING):
            self._enter(State.GATHERING, now_s)
        else:
            text = f"the driver was killed while {state}"
            self._fail(Failure(cause=Cause.KILLED, text=text), now_s)

    # ------------------------------------------------------------- what people want

    def evict(self, name: str, reason: str, now_s: float) -> None:
        """Take a host out of the run.

        Raises:
          ValueError: no such host.
        """
        host = self.hosts.get(name)
        if host is None:
            raise ValueError(
                f"no host {name}; the hosts are {', '.join(sorted(self.hosts))}"
            )
        is_active = host.state is HostState.ACTIVE
        self._evict(host, reason)
        if is_active and self.state in (State.PORTS, State.RUNNING, State.STACKS):
            text = f"{name} was evicted: {reason}"
            self._fail(Failure(cause=Cause.EVICTED, text=text), now_s)

    def stop(self, now_s: float) -> None:
        """Let the ranks save and end; the run ends with 42."""
        self._is_asked_to_stop = True
        self._tell("stop", "asked to stop")
        if self.state is State.RUNNING:
            self._signal(signal.SIGTERM)
            self._stop_by_s = now_s + self.config.restart.stop_s
        elif self.state not in (State.STOPPING, State.ENDED):
            self._end(PREEMPTED, now_s)

    # -------------------------------------------------------------------- the clock

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        match self.state:
            case State.GATHERING:
                self._gather(now_s)
            case State.PORTS:
                if self._lost(now_s) or now_s - self._since_s > _PORTS_S:
                    self._enter(State.GATHERING, now_s)
            case State.RUNNING:
                self._watch(now_s)
            case State.STACKS:
                missing = set(self.placement) - self._answered - self._lost(now_s)
                if not missing or now_s > self._until_s:
                    self._judge(now_s)
            case State.STOPPING:
                self._wait_for_ends(now_s)
            case State.PAUSING:
                if now_s >= self._until_s:
                    self._enter(State.GATHERING, now_s)
            case State.ENDED:
                pass

    def _gather(self, now_s: float) -> None:
        """Place the ranks if there are hosts enough; hosts of before stay."""
        lost = self._lost(now_s, active_only=False)
        ready = [
            host
            for host in self.hosts.values()
            if host.state in (HostState.SPARE, HostState.ACTIVE)
            and host.is_connected
            and host.name not in lost
        ]
        ready.sort(key=lambda host: (host.state is not HostState.ACTIVE, host.name))
        missing = self.config.hosts - len(ready)
        if missing > 0:
            if now_s - self._since_s > self.config.restart.wait_s:
                self._tell(
                    "gave_up",
                    f"gave up: {missing} of {self.config.hosts} hosts did not come in "
                    f"{self.config.restart.wait_s:.0f} s; start agents there, or lower "
                    "--hosts",
                    "error",
                )
                self._end(GAVE_UP, now_s)
            return
        chosen = ready[: self.config.hosts]
        for host in ready:
            host.state = HostState.ACTIVE if host in chosen else HostState.SPARE
        for host in self.hosts.values():
            host.ranks = {}
        # Hosts that stay keep their place: neighbours stay neighbours.
        stay = {host.name for host in chosen} & set(self.placement)
        new = iter(sorted(host.name for host in chosen if host.name not in stay))
        kept = [name if name in stay else None for name in self.placement]
        kept += [None] * (self.config.hosts - len(kept))
        self.placement = [name or next(new) for name in kept[: self.config.hosts]]
        self.generation += 1
        self._saved_before = self.saved_step
        self._failure, self._first_end_s = None, None
        self._enter(State.PORTS, now_s)
        self._send(self.placement[0], FindPorts(generation=self.generation))

    def _watch(self, now_s: float) -> None:
        """Look for what has failed; the first of these."""
        lost = self._lost(now_s)
        if lost:
            names = ", ".join(sorted(lost))
            limit_s = self.config.restart.lost_s
            text = f"no heartbeat of {names} for {limit_s:g} s"
            failure = Failure(
                cause=Cause.HOST_LOST, text=text, hosts=tuple(sorted(lost))
            )
            self._fail(failure, now_s)
            return
        states = self._states()
        ended = {
            rank: state for rank, state in states.items() if state.code is not None
        }
        bad = {
            rank: state for rank, state in ended.items() if state.code not in (0, 42)
        }
        settled = self._first_end_s is not None and (
            now_s - self._first_end_s >= _SETTLE_S
        )
        if len(ended) == self.config.num_ranks or (bad and settled):
            self._fail(self._cause_of(ended), now_s)
            return
        for host, rank in self._missing():
            if now_s - self._since_s > _STARTED_S:
                text = f"rank {rank} was not started by {host}"
                self._fail(Failure(cause=Cause.FAILED, text=text, ranks=(rank,)), now_s)
                return
        hanging = self._hanging(now_s)
        if hanging:
            self._ask_for_stacks(hanging, now_s)

    def _hanging(self, now_s: float) -> list[int]:
        """Return the ranks that should have gone on, or ended, by now."""
        alive = {r: s for r, s in self._states().items() if s.code is None}
        ends_late = now_s > self._stop_by_s
        if self._first_end_s is not None:
            ends_late |= now_s - self._first_end_s > self.config.limits.exit_s
        return [
            rank
            for rank, state in alive.items()
            if ends_late or self._hangs(state, now_s)
        ]

    def _hangs(self, state: RankState, now_s: float) -> bool:
        host = self.hosts[self.host_of(state.rank)]
        age_s = state.age_s + now_s - host.heard_s
        return age_s > limit_s(self.config.limits, state, self._step_times_s)

    def _ask_for_stacks(self, hanging: Sequence[int], now_s: float) -> None:
        self._tell(
            "hang",
            f"no progress of rank {join(hanging)}",
            "error",
            data={"ranks": [*hanging]},
        )
        self._stacks, self._answered = {}, set()
        self._enter(State.STACKS, now_s)
        self._until_s = now_s + self.config.restart.stacks_s
        for name in self.placement:
            self._send(name, Dump(generation=self.generation))

    def _judge(self, now_s: float) -> None:
        """Name who holds up the run, if it has not gone on meanwhile."""
        states = {r: s for r, s in self._states().items() if s.code is None}
        if not self._hanging(now_s):
            self._tell("hang_over", "the ranks went on by themselves", "warning")
            self._enter(State.RUNNING, now_s)
            return
        places = {
            rank: stacks.Place(phase=s.phase, step=s.step, microstep=s.microstep)
            for rank, s in states.items()
        }
        found = {r: stacks.frames(text) for r, text in self._stacks.items()}
        stopped = [rank for rank, state in states.items() if state.state in "Tt"]
        verdict = stacks.judge(places, found, stopped)
        hosts = tuple(sorted({self.host_of(rank) for rank in verdict.ranks}))
        where = f"rank {join(verdict.ranks)} on {', '.join(hosts)}" if hosts else "all"
        step = min((state.step for state in states.values()), default=0)
        text = f"{where}: {verdict.reason}, step {step}"
        if verdict.ranks:
            first = verdict.ranks[0]
            phase = Phase(states[first].phase).name.lower()
            text = f"{where} in {phase}: {verdict.reason}, step {states[first].step}"
        self._tell(
            "stacks",
            text,
            "error",
            data={
                "groups": [
                    {"ranks": ranks, "frames": list(frames)}
                    for frames, ranks in stacks.groups(found)
                ],
                "stacks": {str(rank): text for rank, text in self._stacks.items()},
            },
        )
        failure = Failure(cause=Cause.HUNG, text=text, hosts=hosts, ranks=verdict.ranks)
        self._fail(failure, now_s)

    def _cause_of(self, ended: Mapping[int, RankState]) -> Failure:
        """Find the end that explains the others: by rank of cause, then by time."""

        def key(state: RankState) -> tuple[bool, int, int]:
            assert state.code is not None
            cause = policy.cause_of(state.code, out_of_memory=state.out_of_memory)
            order = policy.RANKING.index(cause)
            return policy.is_consequence(state.code), order, state.ended_ns or 0

        first = min(ended.values(), key=key)
        assert first.code is not None
        cause = policy.cause_of(first.code, out_of_memory=first.out_of_memory)
        host = self.host_of(first.rank)
        text = f"rank {first.rank} on {host} ended with {describe_code(first.code)}"
        if first.code not in (0, 42, -signal.SIGKILL) and first.last_lines:
            text += f"; the last lines of its log:\n{first.last_lines}"
        return Failure(cause=cause, text=text, hosts=(host,), ranks=(first.rank,))

    def _fail(self, failure: Failure, now_s: float) -> None:
        """End the generation; what follows is decided when all ranks have ended."""
        self._failure = failure
        if failure.cause is not Cause.DONE:
            self._tell(
                "failure",
                f"{failure.cause}: {failure.text}",
                "error",
                host=failure.hosts[0] if len(failure.hosts) == 1 else None,
                rank=failure.ranks[0] if len(failure.ranks) == 1 else None,
                data={
                    "cause": failure.cause.value,
                    "ranks": [*failure.ranks],
                    "hosts": [*failure.hosts],
                },
            )
        self._enter(State.STOPPING, now_s)
        self._until_s = now_s + self.config.restart.kill_s
        self._signal(signal.SIGKILL)
        self._wait_for_ends(now_s)

    def _wait_for_ends(self, now_s: float) -> None:
        lost = self._lost(now_s)
        alive = [
            rank
            for rank, state in self._states().items()
            if state.code is None and self.host_of(rank) not in lost
        ]
        away = [
            name
            for name in self.placement
            if not self.hosts[name].is_connected and name not in lost
        ]
        if (alive or away) and now_s <= self._until_s:
            return
        assert self._failure is not None
        hosts = {self.host_of(rank) for rank in alive} | lost
        for name in sorted(hosts):
            why = "no heartbeat" if name in lost else "its ranks do not end"
            self._evict(self.hosts[name], why, HostState.LOST)
        self._decide(self._failure, now_s)

    def _decide(self, failure: Failure, now_s: float) -> None:
        """Apply the policy."""
        rule = policy.TABLE[failure.cause]
        codes = {
            Cause.DONE: 0,
            Cause.GAVE_UP: GAVE_UP,
            Cause.BAD_INPUT: 2,
        }
        if self._is_asked_to_stop and failure.cause is not Cause.DONE:
            self._end(PREEMPTED, now_s)
            return
        if rule.action is Action.END:
            self._end(codes[failure.cause], now_s)
            return
        if rule.action is Action.EVICT:
            for name in failure.hosts:
                if self.hosts[name].state is HostState.ACTIVE:
                    self._evict(self.hosts[name], failure.text)
        is_fruitless = self.saved_step <= self._saved_before
        if failure.cause in (Cause.PREEMPTED, Cause.EVICTED):
            is_fruitless = False  # nothing failed
        self.num_fruitless = self.num_fruitless + 1 if is_fruitless else 0
        if self.num_fruitless >= self.config.restart.max_fruitless:
            self._tell(
                "gave_up",
                f"gave up: {self.num_fruitless} generations in a row ended without a "
                f"new saved step; the last: {failure.cause}: {failure.text}",
                "error",
            )
            self._end(GAVE_UP, now_s)
            return
        pause_s = 0.0
        if self.num_fruitless:
            restart = self.config.restart
            pause_s = restart.pause_s * 2 ** (self.num_fruitless - 1)
            pause_s = min(pause_s, restart.max_pause_s)
        self._tell(
            "restart", f"{rule.action}, in {pause_s:g} s", data={"pause_s": pause_s}
        )
        self._enter(State.PAUSING, now_s)
        self._until_s = now_s + pause_s
        self.tick(now_s)

    def _end(self, code: int, now_s: float) -> None:
        self.exit_code = code
        self._enter(State.ENDED, now_s)
        self._tell("end", f"the run ended with {code}", data={"code": code})
        for name in self.hosts:
            self._send(name, Quit())

    # ----------------------------------------------------------------------- pieces

    def host_of(self, rank: int) -> str:
        """Return the host of a rank of the present generation."""
        return self.placement[rank // self.config.ranks_per_host]

    def is_lost(self, name: str, now_s: float) -> bool:
        """Say whether a host is unknown, or has not been heard for too long."""
        return name not in self.hosts or name in self._lost(now_s, active_only=False)

    def _states(self) -> dict[int, RankState]:
        """Return what is known of the ranks of the present generation."""
        return {
            rank: state
            for name in self.placement
            for rank, state in self.hosts[name].ranks.items()
        }

    def _missing(self) -> Iterator[tuple[str, int]]:
        """Yield host and rank of those that their host does not know."""
        for rank in range(self.config.num_ranks):
            name = self.host_of(rank)
            if rank not in self.hosts[name].ranks:
                yield name, rank

    def _lost(self, now_s: float, *, active_only: bool = True) -> set[str]:
        """Return hosts that have not been heard for too long."""
        names = self.placement if active_only else list(self.hosts)
        limit = self.config.restart.lost_s
        return {n for n in names if now_s - self.hosts[n].heard_s > limit}

    def _evict(
        self, host: Host, why: str, state: HostState = HostState.EVICTED
    ) -> None:
        host.state, host.why = state, why
        self._tell("evict", f"{host.name} is {state}: {why}", "warning", host=host.name)

    def _note_saved(self, state: RankState) -> None:
        if state.saved_step > self.saved_step:
            self.saved_step = state.saved_step
            self._tell(
                "save",
                f"step {self.saved_step} is saved",
                data={"step": self.saved_step},
            )

    def _signal(self, number: int) -> None:
        for name in self.placement:
            self._send(name, Signal(generation=self.generation, number=number))

    def _enter(self, state: State, now_s: float) -> None:
        self.state, self._since_s, self._until_s = state, now_s, math.inf

    def _tell(
        self,
        kind: str,
        text: str,
        severity: str = "info",
        *,
        host: str | None = None,
        rank: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self._record(
            Event(
                kind=kind,
                text=text,
                severity=severity,
                host=host,
                rank=rank,
                data=data or {},
            )
        )


def limit_s(
    limits: LimitsConfig, state: RankState, step_times_s: Sequence[float]
) -> float:
    """Return the seconds without progress after which a rank hangs.

    Args:
      limits: by phase.
      state: of the rank.
      step_times_s: of the steps lately taken.
    """
    phase = Phase(state.phase)
    if phase is not Phase.STEP:
        return getattr(limits, f"{phase.name.lower()}_s")
    if state.step_s is None:
        return max(limits.first_step_s, limits.step_s)
    ordered = sorted(step_times_s)
    p99_s = ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0
    return max(limits.step_s, limits.factor * p99_s)


def describe_code(code: int) -> str:
    """Name an exit code."""
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def join(ranks: Sequence[int]) -> str:
    """Write ranks, at most eight of them."""
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
