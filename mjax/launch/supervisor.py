"""The decisions of a driver: which ranks run where, what has failed, what is next.

Enters: what agents say, and the time. Leaves: messages to agents, events, and the exit
code of the run. No socket, file or clock is touched, so a test plays any fault with any
number of hosts.

A run is a series of generations. In each, every active host has `ranks_per_host` ranks.
When one of them fails the others cannot go on: all are killed and, if `policy.TABLE`
says so, started again as the next generation, which resumes from the newest checkpoint.
"""

import enum
import math
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mjax.launch import failures, hosts, policy
from mjax.launch.checks import Checks
from mjax.launch.config import RunConfig
from mjax.launch.elastic import Sizes
from mjax.launch.events import Event, teller
from mjax.launch.failures import Failure
from mjax.launch.hosts import Host, HostState
from mjax.launch.liveness import Liveness
from mjax.launch.messages import (
    Beat,
    Checked,
    Dump,
    FindPorts,
    Hello,
    Message,
    Ports,
    Prepare,
    Quit,
    RankSpec,
    RankState,
    Signal,
    Stacks,
    Start,
)
from mjax.launch.policy import Action, Cause
from mjax.launch.restarts import Restarts
from mjax.launch.times import Times

_SETTLE_S = 0.3
"""What ends within this time of the first end is looked at with it."""
_LOOKS_PER_S = 20_000
"""At the ranks of a run that goes well, together."""
_STARTED_S = 15.0
"""After which a rank must be known to its host."""


class State(enum.StrEnum):
    """What a driver is doing."""

    GATHERING = "waiting for hosts"
    PORTS = "looking for ports"
    RUNNING = "running"
    STACKS = "collecting stacks"
    STOPPING = "ending the ranks"
    CHECKING = "checking hosts"
    PAUSING = "pausing before a restart"
    ENDED = "ended"


Send = Callable[[str, Message], None]
"""(host, message): hands a message to a connection, never waits."""


class Supervisor:
    """Decides what happens to a run. Every call gives the time, in seconds."""

    def __init__(
        self,
        config: RunConfig,
        make_rank: Callable[[int, int, int, str], RankSpec],
        send: Send,
        record: Callable[[Event], None],
        now_s: float,
        module: str = "",
        find_ports: Callable[[int, int], FindPorts] = lambda generation, _: FindPorts(
            generation=generation
        ),
        sizes: Collection[int] = (),
    ) -> None:
        """Begin with no host.

        Args:
          config: of the run.
          make_rank: from generation, rank, number of hosts and the coordinator's
            host:port to what an agent starts.
          send: for messages to agents.
          record: for events.
          now_s: the time.
          module: that hosts import before they start ranks of it; empty: none.
          find_ports: from generation and number of hosts to what its first host is
            asked for.
          sizes: numbers of hosts, besides config.hosts, on which the run can go on.
        """
        self.config, self._module, self._find_ports = config, module, find_ports
        self.hosts: dict[str, Host] = {}
        self.generation = 0
        """Counts from 1; 0 before the first."""
        self.state = State.GATHERING
        self.exit_code: int | None = None
        self.placement: list[str] = []
        """Active hosts, in the order of their ranks."""
        self._placed: set[str] = set()
        self._restarts = Restarts(config.restart)
        self._make_rank, self._send = make_rank, send
        self._tell = teller(record)
        self._since_s = now_s
        self._until_s = math.inf
        self._failure: Failure | None = None
        self._first_end_s: float | None = None
        self._is_asked_to_stop = False
        self._stop_by_s = math.inf
        self._liveness = Liveness(config.limits)
        self._stacks: dict[int, str] = {}
        self._answered: set[str] = set()
        self._times = Times(self._tell)
        self._sizes = Sizes(config.hosts, sizes)
        self._is_growing = False
        self._checks = Checks(config.check_command, config.restart.check_s, send)
        self._check_again_s = math.inf
        self._next_scan_s = -math.inf

    # -------------------------------------------------------------- what agents say

    def joined(self, hello: Hello, now_s: float) -> None:
        """Take a host in, or back after its agent or this driver was started again."""
        host = self.hosts.get(hello.host)
        if host is None:
            host = Host(name=hello.host, address=hello.address, heard_s=now_s)
            self.hosts[hello.host] = host
        host.address, host.is_connected = hello.address, True
        if host.state is HostState.LOST:
            self._come_back(host)
        text = f"{host.name} joined as {host.state}"
        self._tell("host", text, host=host.name, data=hello.facts)
        if self.state is State.ENDED:
            self._send(host.name, Quit())
            return
        self._send(host.name, Prepare(module=self._module))
        is_over = self.state is State.STOPPING or host.name not in self._placed
        if hello.ranks and is_over:
            self._send(
                host.name, Signal(generation=self.generation, number=signal.SIGKILL)
            )
        is_new = self.state is State.RUNNING and bool(host.ranks) and not hello.ranks
        self.beat(hello.host, Beat(ranks=hello.ranks), now_s)
        if is_new and host.name in self._placed:
            text = f"the agent of {host.name} was started again, without its ranks"
            failure = Failure(cause=Cause.KILLED, text=text, hosts=(host.name,))
            self._fail(failure, now_s)

    def beat(self, name: str, beat: Beat, now_s: float) -> None:
        """Note what the ranks of a host do."""
        host = self.hosts[name]
        host.heard_s = now_s
        if host.state is HostState.LOST:  # it was silent, and its connection lives
            self._come_back(host)
        before = host.ranks
        host.ranks = {
            state.rank: state
            for state in beat.ranks
            if state.generation == self.generation
        }
        self._times.look(host.ranks)
        for rank, state in host.ranks.items():
            old = before.get(rank)
            if old is None or old.step != state.step:
                self._liveness.took(state)
            self._note_saved(state)
            if state.code is not None and (old is None or old.code is None):
                self._tell(
                    "rank_end",
                    failures.describe_end(state),
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
        if not ports.coordinator:
            text = f"the coordinator could not be started on {name}"
            self._fail(Failure(cause=Cause.FAILED, text=text, hosts=(name,)), now_s)
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
            specs = [
                self._make_rank(self.generation, r, len(self.placement), coordinator)
                for r in ranks
            ]
            self._send(active, Start(generation=self.generation, ranks=specs))

    def shown(self, name: str, shown: Stacks, now_s: float) -> None:
        """Take the stacks of a host."""
        if self.state is State.STACKS and shown.generation == self.generation:
            self._stacks |= shown.stacks
            self._answered.add(name)
            self.tick(now_s)

    def checked(self, name: str, answer: Checked, now_s: float) -> None:
        """Take what the check of a host has said."""
        self._checks.said(name, answer)
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
            "is_asked_to_stop": self._is_asked_to_stop,
            **self._restarts.to_json(),
            "hosts": {host.name: host.to_json() for host in self.hosts.values()},
        }

    def resume(self, snapshot: Mapping[str, Any], now_s: float) -> None:
        """Go on where another driver was; ranks that run go on running.

        Agents that do not come back in time count as lost.
        """
        self.generation = snapshot["generation"]
        self.placement = [*snapshot["placement"]]
        self._placed = {*self.placement}
        self._restarts.take_up(snapshot)
        self._is_asked_to_stop = snapshot["is_asked_to_stop"]
        for name, fields in snapshot["hosts"].items():
            self.hosts[name] = hosts.from_json(name, fields, now_s)
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
            self._end(Cause.PREEMPTED, now_s)

    # -------------------------------------------------------------------- the clock

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        match self.state:
            case State.GATHERING:
                self._gather(now_s)
            case State.PORTS:
                limit_s = self.config.limits.import_s
                if self._lost(now_s) or now_s - self._since_s > limit_s:
                    self._enter(State.GATHERING, now_s)
            case State.RUNNING:
                self._watch(now_s)
            case State.STACKS:
                missing = set(self.placement) - self._answered - self._lost(now_s)
                if not missing or now_s > self._until_s:
                    self._judge(now_s)
            case State.STOPPING:
                self._wait_for_ends(now_s)
            case State.CHECKING:
                lost = self._lost(now_s, active_only=False)
                if self._checks.is_over(now_s, lost):
                    self._take_results(now_s)
                    self._pause(now_s)
            case State.PAUSING:
                if now_s >= self._until_s:
                    self._enter(State.GATHERING, now_s)
            case State.ENDED:
                pass

    def _gather(self, now_s: float) -> None:
        """Place the ranks if there are hosts enough; hosts of before stay."""
        ready = hosts.ready(self.hosts, now_s, self.config.restart.lost_s)
        waited_s, limits = now_s - self._since_s, self.config.restart
        patience_s = limits.shrink_s if self.generation else limits.wait_s
        size = self._sizes.best(len(ready), waits=waited_s < patience_s)
        if size is None:
            self._check_again(now_s)
            if waited_s > limits.wait_s:
                least = self._sizes.least
                self._tell(
                    "gave_up",
                    f"gave up: {least - len(ready)} of {least} hosts did not come in "
                    f"{limits.wait_s:.0f} s; start agents there, or lower --hosts or "
                    "--min-hosts",
                    "error",
                )
                self._end(Cause.GAVE_UP, now_s)
            return
        if size < self.config.hosts:
            text = f"the run goes on with {size} of {self.config.hosts} hosts"
            self._tell("shrink", text, "warning", data={"hosts": size})
        for index, host in enumerate(ready):
            host.state = HostState.ACTIVE if index < size else HostState.SPARE
        for host in self.hosts.values():
            host.ranks = {}
        names = {host.name for host in ready[:size]}
        self.placement = hosts.place(names, self.placement)
        self._placed = {*self.placement}
        self.generation += 1
        self._enter(State.PORTS, now_s)
        self._times.begin(self.num_ranks)
        self._restarts.begin()
        self._failure, self._first_end_s = None, None
        self._is_growing, self._stop_by_s = False, math.inf
        self._send(self.placement[0], self._find_ports(self.generation, size))

    def _grow(self, now_s: float) -> None:
        """Let the ranks of a run that has shrunk save and end, if more hosts came."""
        if len(self.placement) >= self.config.hosts or self._is_growing:
            return
        ready = hosts.ready(self.hosts, now_s, self.config.restart.lost_s)
        size = self._sizes.best(len(ready), waits=False) or 0
        if size > len(self.placement) and not self._restarts.is_fruitless:
            self._is_growing = True
            self._tell("grow", f"the run can go on with {size} hosts: it saves")
            self._signal(signal.SIGTERM)
            self._stop_by_s = now_s + self.config.restart.stop_s

    def _watch(self, now_s: float) -> None:
        """Look for what has failed; the first of these."""
        if self._first_end_s is None and now_s < self._next_scan_s:
            return
        self._next_scan_s = now_s + self.num_ranks / _LOOKS_PER_S
        lost = self._lost(now_s)
        if lost:
            limit_s = self.config.restart.lost_s
            self._fail(failures.of_silence(lost, limit_s), now_s)
            return
        states = self._states()
        ended = {r: state for r, state in states.items() if state.code is not None}
        is_bad = any(policy.is_failure(state.code or 0) for state in ended.values())
        settled = self._first_end_s is not None and (
            now_s - self._first_end_s >= _SETTLE_S
        )
        if len(ended) == self.num_ranks or (is_bad and settled):
            self._fail(failures.of_ends(ended, self.host_of), now_s)
            return
        missing = tuple(r for r in range(self.num_ranks) if r not in states)
        if missing and now_s - self._since_s > _STARTED_S:
            text = f"rank {missing[0]} was not started by {self.host_of(missing[0])}"
            self._fail(Failure(cause=Cause.FAILED, text=text, ranks=missing), now_s)
            return
        hanging = self._hanging(now_s)
        if hanging:
            self._ask_for_stacks(hanging, now_s)
            return
        self._grow(now_s)

    def _hanging(self, now_s: float) -> list[int]:
        """Return the ranks that should have gone on, or ended, by now."""
        ends_late = now_s > self._stop_by_s
        if self._first_end_s is not None:
            ends_late |= now_s - self._first_end_s > self.config.limits.exit_s
        return [
            rank
            for rank, state in self._alive().items()
            if ends_late or self._hangs(state, now_s)
        ]

    def _hangs(self, state: RankState, now_s: float) -> bool:
        host = self.hosts[self.host_of(state.rank)]
        age_s = state.age_s + now_s - host.heard_s
        return age_s > self._liveness.limit_s(state)

    def _ask_for_stacks(self, hanging: Sequence[int], now_s: float) -> None:
        self._tell(
            "hang",
            f"no progress of rank {failures.join(hanging)}",
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
        if not self._hanging(now_s):
            self._tell("hang_over", "the ranks went on by themselves", "warning")
            self._enter(State.RUNNING, now_s)
            return
        failure, evidence = failures.of_hang(self._alive(), self._stacks, self.host_of)
        self._tell("stacks", failure.text, "error", data=evidence)
        self._fail(failure, now_s)

    def _fail(self, failure: Failure, now_s: float) -> None:
        """End the generation; what follows is decided when all ranks have ended."""
        self._failure = failure
        if failure.cause is not Cause.DONE:
            text = f"{failure.cause}: {failure.text}"
            self._tell("failure", text, "error", **failure.fields())
        self._enter(State.STOPPING, now_s)
        self._until_s = now_s + self.config.restart.kill_s
        self._signal(signal.SIGKILL)
        self._wait_for_ends(now_s)

    def _wait_for_ends(self, now_s: float) -> None:
        lost = self._lost(now_s)
        alive = [rank for rank in self._alive() if self.host_of(rank) not in lost]
        away = [
            name
            for name in self.placement
            if not self.hosts[name].is_connected and name not in lost
        ]
        if (alive or away) and now_s <= self._until_s:
            return
        assert self._failure is not None
        for name in sorted({self.host_of(rank) for rank in alive} | lost):
            why = "no heartbeat" if name in lost else "its ranks do not end"
            self._evict(self.hosts[name], why, HostState.LOST)
        self._decide(self._failure, now_s)

    def _decide(self, failure: Failure, now_s: float) -> None:
        """Apply the policy."""
        self._times.ended(
            self._states(), lambda rank: now_s - self.hosts[self.host_of(rank)].heard_s
        )
        rule = policy.TABLE[failure.cause]
        if self._is_asked_to_stop and failure.cause is not Cause.DONE:
            self._end(Cause.PREEMPTED, now_s)
            return
        if failure.cause is Cause.BAD_INPUT and self._is_smaller_in_vain(failure):
            self._pause(now_s)
            return
        if rule.action is Action.END:
            self._end(failure.cause, now_s)
            return
        if rule.action is Action.EVICT:
            for name in failure.hosts:
                if self.hosts[name].state is HostState.ACTIVE:
                    self._evict(self.hosts[name], failure.text)
        self._restarts.end(failure.cause)
        if self._restarts.is_useless:
            self._tell(
                "gave_up",
                f"gave up: {self.num_fruitless} generations in a row ended without a "
                f"new saved step; the last: {failure.cause}: {failure.text}",
                "error",
            )
            self._end(Cause.GAVE_UP, now_s)
            return
        if rule.action is Action.CHECK and self._checks.command:
            # Where no host is to blame all of them may be.
            names = [*(failure.hosts or self.placement)]
            suspects = {n for n in names if self.hosts[n].state is HostState.ACTIVE}
            self._tell("check", f"{rule.action}: {', '.join(sorted(suspects))}")
            self._enter(State.CHECKING, now_s)
            self._checks.begin(suspects, now_s)
            return
        self._pause(now_s)

    def _is_smaller_in_vain(self, failure: Failure) -> bool:
        """Try no more with so few hosts, if the trainer refuses it there."""
        size = len(self.placement)
        if size == self.config.hosts:
            return False
        self._sizes.discard(size)
        self._tell("shrink", f"{size} hosts do not fit: {failure.text}", "warning")
        return True

    def _take_results(self, now_s: float) -> None:
        """Put aside the hosts that have not passed their check."""
        for name, why in self._checks.results().items():
            if why:
                self._evict(self.hosts[name], why, HostState.SICK)
                self._check_again_s = now_s + self.config.restart.check_s
            else:
                self._tell("check", f"{name} has passed its check", host=name)

    def _check_again(self, now_s: float) -> None:
        """Bring back the hosts that pass their check by now."""
        if not self._checks.is_over(now_s):
            return
        sick = {n for n, host in self.hosts.items() if host.state is HostState.SICK}
        for name, why in self._checks.results().items():
            if name in sick and not why:
                self.hosts[name].state, self.hosts[name].why = HostState.SPARE, ""
                self._tell("check", f"{name} has passed its check", host=name)
        if now_s >= self._check_again_s:
            self._check_again_s = now_s + self.config.restart.check_s
            self._checks.begin(sick, now_s)

    def _pause(self, now_s: float) -> None:
        """Let time pass, then begin the next generation."""
        pause_s = self._restarts.pause_s
        self._tell(
            "restart",
            f"the next generation in {pause_s:g} s",
            data={"pause_s": pause_s},
        )
        self._enter(State.PAUSING, now_s)
        self._until_s = now_s + pause_s
        self.tick(now_s)

    def _end(self, cause: Cause, now_s: float) -> None:
        self.exit_code = code = policy.EXIT_CODES[cause]
        self._enter(State.ENDED, now_s)
        self._tell("end", f"the run ended with {code}", data={"code": code})
        for name in self.hosts:
            self._send(name, Quit())

    # ----------------------------------------------------------------------- pieces

    def host_of(self, rank: int) -> str:
        """Return the host of a rank of the present generation."""
        return self.placement[rank // self.config.ranks_per_host]

    @property
    def num_ranks(self) -> int:
        """Processes of the trainer in the present generation."""
        return len(self.placement) * self.config.ranks_per_host

    @property
    def saved_step(self) -> int:
        """The newest step that is known to be saved; -1 for none."""
        return self._restarts.saved_step

    @property
    def num_fruitless(self) -> int:
        """Generations in a row that ended without a new saved step."""
        return self._restarts.num_fruitless

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

    def _alive(self) -> dict[int, RankState]:
        """Return those of `_states` that have not ended."""
        return {r: state for r, state in self._states().items() if state.code is None}

    def _lost(self, now_s: float, *, active_only: bool = True) -> set[str]:
        """Return hosts that have not been heard for too long."""
        names = self.placement if active_only else self.hosts.keys()
        return hosts.silent(self.hosts, names, now_s, self.config.restart.lost_s)

    def _evict(
        self, host: Host, why: str, state: HostState = HostState.EVICTED
    ) -> None:
        host.state, host.why = state, why
        self._tell("evict", f"{host.name} is {state}: {why}", "warning", host=host.name)

    def _come_back(self, host: Host) -> None:
        """Make a lost host a spare; what still runs there is of a generation before."""
        host.state, host.why = HostState.SPARE, ""
        self._tell("host", f"{host.name} is back as a spare", host=host.name)
        order = Signal(generation=self.generation, number=signal.SIGKILL)
        self._send(host.name, order)

    def _note_saved(self, state: RankState) -> None:
        step = state.saved_step
        if step > self.saved_step:
            self._restarts.saved_step = step
            self._tell("save", f"step {step} is saved", data={"step": step})

    def _signal(self, number: int) -> None:
        for name in self.placement:
            self._send(name, Signal(generation=self.generation, number=number))

    def _enter(self, state: State, now_s: float) -> None:
        self._tell("state", state, "debug")
        self.state, self._since_s, self._until_s = state, now_s, math.inf
