"""The decisions of a driver: placement of ranks, diagnosis, and the next action.

Input: messages of agents, and the time. Output: messages to agents, events, and the
exit code of the run. No socket, file or clock is touched, so a test can simulate any
fault with any number of hosts.

A run is a series of generations. In each, every active host has `ranks_per_host` ranks.
If one rank fails, the others cannot continue. All are killed and, if `policy.TABLE`
says so, restarted as the next generation, which resumes from the newest checkpoint.

This module has more than 500 lines because it is one state machine. Hosts, hangs,
checks and restarts have their own modules; all transitions are here.
"""

import enum
import math
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from mjax.launch import failures, policy
from mjax.launch.checks import Checks
from mjax.launch.config import RunConfig
from mjax.launch.elastic import Sizes
from mjax.launch.events import Event, teller
from mjax.launch.failures import Failure
from mjax.launch.hangs import Hangs
from mjax.launch.hosts import Fleet, Host, HostState
from mjax.launch.messages import (
    Beat,
    Checked,
    FindPorts,
    Hello,
    Message,
    Ports,
    Prepare,
    Quit,
    RankSpec,
    Signal,
    Stacks,
    Start,
)
from mjax.launch.policy import Action, Cause
from mjax.launch.restarts import Restarts
from mjax.launch.rollback import RollBacks
from mjax.launch.times import Times

_END_FIELDS = ("code", "step", "ended_ns")
_EXPLAINS_S = 600.0
"""Maximum age, in seconds, of a log line that explains a failure."""
_LOOKS_PER_S = 20_000
"""Ranks per second that are checked for hangs in a healthy run."""


class State(enum.StrEnum):
    """The state of a driver."""

    GATHERING = "waiting for hosts"
    PORTS = "looking for ports"
    RUNNING = "running"
    STACKS = "collecting stacks"
    STOPPING = "ending the ranks"
    CHECKING = "checking hosts"
    PAUSING = "pausing before a restart"
    ENDED = "ended"


class Supervisor:
    """Decides the actions of a run. Every call passes the time, in seconds."""

    def __init__(
        self,
        config: RunConfig,
        make_rank: Callable[[int, int, int, str], RankSpec],
        send: Callable[[str, Message], None],
        record: Callable[[Event], None],
        now_s: float,
        module: str = "",
        find_ports: Callable[[int, int], FindPorts] = lambda generation, _: FindPorts(
            generation=generation
        ),
        sizes: Collection[int] = (),
        take_back: Callable[[], bool] = lambda: False,
        faults: Callable[[str], float] = lambda _: 0.0,
        real_s: Callable[[float], float] = lambda at_s: at_s,
    ) -> None:
        """Start without hosts.

        Args:
          config: config of the launch.
          make_rank: maps generation, rank, number of hosts and the coordinator's
            host:port to the specification of a rank process.
          send: function of (host, message) that sends a message without waiting.
          record: stores an event.
          now_s: current time.
          module: module that hosts import in advance for their ranks; "" for none.
          find_ports: maps generation and number of hosts to the port request for the
            first host.
          sizes: numbers of hosts besides config.hosts on which the run can continue.
          take_back: undoes an update of the trainer's flags if no rank has taken a step
            with it; returns whether it undid one.
          faults: maps a host to its score of past faults; hosts with the lowest score
            are used first.
          real_s: converts a time of the caller's clock to the monotonic clock.
        """
        self._take_back = take_back
        self.config, self._module, self._find_ports = config, module, find_ports
        self.generation = 0
        """Number of the current generation, from 1; 0 before the first."""
        self.state = State.GATHERING
        self.exit_code: int | None = None
        self._restarts = Restarts(config.restart)
        self._make_rank, self._send = make_rank, send
        self._tell = teller(record)
        self.rollbacks = RollBacks(config.restart, self._tell)
        self._since_s = now_s
        self._until_s = math.inf
        self._failure: Failure | None = None
        self._is_asked_to_stop = self._is_growing = False
        self._draining: dict[str, tuple[str, HostState]] = {}
        self._suspected: set[str] = set()
        self._first_end_s = self._stop_by_s = math.inf
        self._times = Times(self._tell, real_s)
        self._sizes = Sizes(config.hosts, sizes)
        self._fleet = Fleet(
            config.ranks_per_host, config.restart.lost_s, send, self._tell, faults
        )
        self.hosts = self._fleet.hosts
        self._hangs = Hangs(config, self._fleet, self._tell)
        self._checks = Checks(config, self._fleet, self._tell)
        self._next_scan_s = -math.inf

    # ------------------------------------------------------------- messages of agents

    def joined(self, hello: Hello, now_s: float) -> None:
        """Admit a host, or readmit it after a restart of its agent or this driver."""
        known = self.hosts.get(hello.host)
        agent_before = known.agent if known else ""
        host = self._fleet.join(hello, now_s)
        was_lost = host.state is HostState.LOST
        if was_lost:
            self._fleet.come_back(host, self.generation)
        self._tell("host", self._joined_text(host), host=host.name, data=hello.facts)
        if self.state is State.ENDED:
            self._send(host.name, Quit())
            return
        self._send(host.name, Prepare(module=self._module))
        is_over = self.state is State.STOPPING or not self._fleet.has_ranks(host.name)
        if hello.ranks and is_over and not was_lost:
            self._fleet.kill(host, self.generation)
        elif hello.ranks and math.isfinite(self._stop_by_s):
            # The previous driver may have been killed before sending this message.
            order = Signal(generation=self.generation, number=signal.SIGTERM)
            self._send(host.name, order)
        had_ranks, generation = bool(host.ranks), self.generation
        self.beat(hello.host, Beat(ranks=hello.ranks), now_s)
        is_other = agent_before != host.agent if agent_before else had_ranks
        if generation == self.generation:
            self._repeat_orders(host, is_other=is_other, now_s=now_s)

    def _repeat_orders(self, host: Host, *, is_other: bool, now_s: float) -> None:
        """Repeat what an agent that joins may not have heard, or give up.

        Args:
          host: host of the agent.
          is_other: whether it is another agent process than before.
          now_s: current time.
        """
        name = host.name
        if is_other:
            self._checks.repeat_for(name)
        if self.state is State.PORTS and name == self.placement[0]:
            self._send(name, self._find_ports(self.generation, len(self.placement)))
            return
        is_on = self.state in (State.RUNNING, State.STACKS)
        if not is_on or not self._fleet.has_ranks(name):
            return
        if host.ranks:
            if self.state is State.STACKS:
                self._hangs.ask_again(name, self.generation)
        elif is_other:
            text = f"the agent of {name} was started again, without its ranks"
            self._fail(Failure(cause=Cause.KILLED, text=text, hosts=(name,)), now_s)
        elif host.agent:
            text = f"the order to start the ranks of {name} was lost with a connection"
            self._fail(Failure(cause=Cause.KILLED, text=text), now_s)

    def _joined_text(self, host: Host) -> str:
        if self.waits_for_place(host):
            return f"{host.name} joined"
        is_spare = host.state is HostState.SPARE
        return f"{host.name} joined; it is {'a spare' if is_spare else host.state}"

    def waits_for_place(self, host: Host) -> bool:
        """Return whether the next placement decides if a host trains or is a spare."""
        return host.state is HostState.SPARE and self.state is State.GATHERING

    def progress_text(self) -> str:
        """Return a line with state, last step and newest save of the run."""
        steps = [s.step for host in self.hosts.values() for s in host.ranks.values()]
        saved = (
            f"step {self.saved_step} saved"
            if self.saved_step >= 0
            else ("nothing saved yet")
        )
        return (
            f"{self.state}, generation {self.generation}, step "
            f"{max(steps, default=0)}, {saved}"
        )

    def beat(self, name: str, beat: Beat, now_s: float) -> None:
        """Record the states of the ranks of a host."""
        host = self.hosts[name]
        host.heard_s = now_s
        if beat.leaving and not host.is_leaving:
            host.is_leaving = True
            self.drain(name, beat.leaving, now_s)
        elif host.state is HostState.LOST and not host.is_leaving:
            # The host was silent, but its connection is alive.
            self._fleet.come_back(host, self.generation)
        host.note_traffic(beat.rdma_bytes, now_s)
        for one in beat.matches:
            host.matches.append((now_s, one))
            text = f"{one.rule}: {one.line}"
            data = {"rule": one.rule}
            self._tell("log", text, "warning", host=name, rank=one.rank, data=data)
        before = host.ranks
        host.ranks = {
            state.rank: state
            for state in beat.ranks
            if state.generation == self.generation
        }
        self._times.look(host.ranks, now_s)
        for rank, state in host.ranks.items():
            old = before.get(rank)
            if old is None or old.step != state.step:
                self._hangs.took(state)
            if (step := state.saved_step) > self.saved_step:
                self._restarts.saved_step = step
                self._tell("save", f"step {step} is saved", data={"step": step})
            if state.code is not None and (old is None or old.code is None):
                text = failures.describe_end(state)
                end = {name: getattr(state, name) for name in _END_FIELDS}
                self._tell("rank_end", text, host=name, rank=rank, data=end)
                self._first_end_s = min(self._first_end_s, now_s)
                self.tick(now_s)

    def ports(self, name: str, ports: Ports, now_s: float) -> None:
        """Start the generation with the port that was found for the coordinator."""
        is_wanted = self.state is State.PORTS and ports.generation == self.generation
        if not is_wanted or name != self.placement[0]:
            return
        if not ports.coordinator:
            text = f"the coordinator could not be started on {name}"
            self._fail(Failure(cause=Cause.FAILED, text=text, hosts=(name,)), now_s)
            return
        coordinator = f"{self.hosts[name].address}:{ports.coordinator}"
        self._enter(State.RUNNING, now_s)
        text = f"generation {self.generation} starts on {', '.join(self.placement)}"
        data = {"hosts": self.placement, "coordinator": coordinator}
        self._tell("generation", text, data=data)
        for index, active in enumerate(self.placement):
            specs = [
                self._make_rank(self.generation, rank, len(self.placement), coordinator)
                for rank in self._fleet.ranks_of(index)
            ]
            self._send(active, Start(generation=self.generation, ranks=specs))

    def shown(self, name: str, shown: Stacks, now_s: float) -> None:
        """Store the stacks of a host."""
        if self.state is State.STACKS and shown.generation == self.generation:
            self._hangs.shown(name, shown)
            self.tick(now_s)

    def checked(self, name: str, answer: Checked, now_s: float) -> None:
        """Store the result of a host's check."""
        self._checks.said(name, answer)
        self.tick(now_s)

    def left(self, name: str, now_s: float) -> None:
        """Record that the connection to a host has ended; the host may come back."""
        self.hosts[name].is_connected = False
        if self.state is State.ENDED:
            return
        self._tell("host", f"{name} is not connected", "warning", host=name)
        self.tick(now_s)

    def gone(self, name: str, why: str, now_s: float) -> None:
        """Count a host as lost immediately, because it has ended."""
        host, has_place = self.hosts.get(name), (HostState.ACTIVE, HostState.SPARE)
        if self.state is State.ENDED or host is None or host.state not in has_place:
            return
        text = f"{name} is gone: {why}"
        self._tell("host", text, "warning", host=name)
        self._fleet.silence(host, now_s)
        has_ranks = self._fleet.has_ranks(name)
        if has_ranks and self.state in (State.RUNNING, State.STACKS):
            failure = Failure(cause=Cause.HOST_LOST, text=text, hosts=(name,))
            self._fail(failure, now_s)
        else:
            self.tick(now_s)

    # ---------------------------------------------------------- restarts of the driver

    def snapshot(self) -> dict[str, Any]:
        """Return the state that a new driver needs, as JSON."""
        return {
            "generation": self.generation,
            "state": self.state.value,
            "is_asked_to_stop": self._is_asked_to_stop,
            "draining": {name: why for name, (why, _) in self._draining.items()},
            "draining_to": {name: to.value for name, (_, to) in self._draining.items()},
            "is_saving": math.isfinite(self._stop_by_s),
            "failure": msgspec.to_builtins(self._failure),
            **self._restarts.to_json(),
            **self.rollbacks.to_json(),
            **self._fleet.to_json(),
        }

    def resume(
        self,
        snapshot: Mapping[str, Any],
        now_s: float,
        log_events: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Restore the state of the previous driver; running ranks continue.

        Agents that do not come back in time count as lost.

        Args:
          snapshot: the last `snapshot` of the previous driver.
          now_s: current time.
          log_events: events of kind `log` of its generation, with `age_s`.
        """
        self.generation = snapshot["generation"]
        self._restarts.take_up(snapshot)
        self.rollbacks.take_up(snapshot)
        self._fleet.take_up(snapshot, now_s)
        self._fleet.take_up_matches(log_events, now_s)
        self._is_asked_to_stop = snapshot["is_asked_to_stop"]
        states = snapshot.get("draining_to", {})
        self._draining = {
            name: (reason, HostState(states.get(name, HostState.EVICTED)))
            for name, reason in snapshot["draining"].items()
        }
        state = State(snapshot["state"])
        self._tell("driver", f"a driver was started again; the run was {state}")
        if state in (State.RUNNING, State.STACKS):  # a hang is found again
            self._enter(State.RUNNING, now_s)
            if snapshot["is_saving"]:
                self._stop_by_s = now_s + self.config.restart.stop_s
        elif state in (State.GATHERING, State.PAUSING, State.PORTS):  # without ranks
            self._enter(State.GATHERING, now_s)
        elif (failure := snapshot.get("failure")) is not None:
            self._failure = msgspec.convert(failure, Failure)
            self._stop_ranks(now_s)
        else:  # of a driver that kept no failure
            text = f"the driver was killed while {state}"
            self._fail(Failure(cause=Cause.KILLED, text=text), now_s)

    # -------------------------------------------------------------- commands of users

    def evict(self, name: str, reason: str, now_s: float) -> None:
        """Take a host out of the run.

        Raises:
          ValueError: the run has no such host.
        """
        host = self._known(name)
        is_active = host.state is HostState.ACTIVE
        self._let_go(host, reason)
        if is_active and self.state in (State.PORTS, State.RUNNING, State.STACKS):
            text = f"{name} was evicted: {reason}"
            self._fail(Failure(cause=Cause.EVICTED, text=text), now_s)

    def drain(
        self,
        name: str,
        reason: str,
        now_s: float,
        state: HostState = HostState.EVICTED,
    ) -> None:
        """Make the ranks save and end, then take a host out of the run.

        Args:
          name: name of the host.
          reason: text for the journal.
          now_s: current time.
          state: state of the host after it has left.
        Raises:
          ValueError: the run has no such host.
        """
        host = self._known(name)
        if self.state is not State.RUNNING or host.state is not HostState.ACTIVE:
            self.evict(name, reason, now_s)
            return
        self._draining[name] = (reason, state)
        self._tell("drain", f"{name} leaves at the next save: {reason}", host=name)
        self._let_save(now_s)

    def _let_go(
        self, host: Host, reason: str, state: HostState = HostState.EVICTED
    ) -> None:
        """Take a host out of the run; a host that leaves by itself may come back."""
        if host.is_leaving and host.state is not HostState.EVICTED:
            state = HostState.LOST
        self._fleet.evict(host, reason, state)
        if host.is_leaving:
            self._send(host.name, Quit())

    def update(self, now_s: float) -> None:
        """Make the ranks save and end; the next generation uses the update."""
        self._tell("update", "the next generation starts with new flags and code")
        if self.state is State.RUNNING:
            self._let_save(now_s)

    def _known(self, name: str) -> Host:
        if name not in self.hosts:
            raise ValueError(
                f"no host {name}; the hosts are {', '.join(sorted(self.hosts))}"
            )
        return self.hosts[name]

    def stop(self, now_s: float) -> None:
        """Make the ranks save and end; the run then ends with exit code 42."""
        self._is_asked_to_stop = True
        self._tell("stop", "asked to stop")
        if self.state is State.RUNNING:
            self._let_save(now_s)
        elif self.state not in (State.STOPPING, State.ENDED):
            self._end(Cause.PREEMPTED, now_s)

    # -------------------------------------------------------------------- the clock

    @property
    def is_calm(self) -> bool:
        """Whether all ranks run, so no action is due before the next heartbeat."""
        return self.state is State.RUNNING and math.isinf(self._first_end_s)

    def tick(self, now_s: float) -> None:
        """Perform the actions that are due."""
        match self.state:
            case State.GATHERING:
                self._gather(now_s)
            case State.PORTS:
                self._wait_for_ports(now_s)
            case State.RUNNING:
                self._watch(now_s)
            case State.STACKS:
                if not self._has_lost(now_s) and self._hangs.is_answered(now_s):
                    self._judge(now_s)
            case State.STOPPING:
                self._wait_for_ends(now_s)
            case State.CHECKING:
                lost = self._fleet.lost(now_s, active_only=False)
                if self._checks.is_over(now_s, lost):
                    self._checks.take_results(now_s)
                    self._pause(now_s)
            case State.PAUSING:
                if now_s >= self._until_s:
                    self._enter(State.GATHERING, now_s)

    def _gather(self, now_s: float) -> None:
        """Place ranks if there are enough hosts; hosts that stay keep their ranks."""
        ready = self._fleet.ready(now_s)
        waited_s, limits = now_s - self._since_s, self.config.restart
        patience_s = limits.shrink_s if self.generation else limits.wait_s
        size = self._sizes.best(len(ready), waits=waited_s < patience_s)
        if size is None:
            self._checks.repeat(now_s)
            if waited_s > limits.wait_s:
                least = self._sizes.least
                self._give_up(
                    f"{least - len(ready)} of {least} hosts did not connect in "
                    f"{limits.wait_s:.0f} s; start agents there, or lower --hosts or "
                    "--min-hosts",
                    now_s,
                )
            return
        if size < self.config.hosts:
            text = f"the run goes on with {size} of {self.config.hosts} hosts"
            self._tell("shrink", text, "warning", data={"hosts": size})
        self._fleet.place(ready, size)
        self.generation += 1
        self._enter(State.PORTS, now_s)
        self._times.begin(self._fleet.num_ranks)
        self._restarts.begin()
        self._failure, self._first_end_s = None, math.inf
        self._is_growing, self._stop_by_s = False, math.inf
        self._send(self.placement[0], self._find_ports(self.generation, size))

    def _wait_for_ports(self, now_s: float) -> None:
        limit_s, first = self.config.limits.import_s, self.placement[0]
        if self._fleet.lost(now_s):
            self._enter(State.GATHERING, now_s)
        elif now_s - self._since_s > limit_s:
            text = f"{first} has found no port in {limit_s:g} s"
            self._fail(Failure(cause=Cause.FAILED, text=text, hosts=(first,)), now_s)

    def _grow(self, now_s: float) -> None:
        """If a run on fewer hosts can use more, make its ranks save and end."""
        if len(self.placement) >= self.config.hosts or self._is_growing:
            return
        size = self._sizes.best(len(self._fleet.ready(now_s)), waits=False) or 0
        if size > len(self.placement) and not self._restarts.is_fruitless:
            self._is_growing = True
            self._tell("grow", f"the run can go on with {size} hosts: it saves")
            self._let_save(now_s)

    def _let_save(self, now_s: float) -> None:
        """Order all ranks to save and end, unless this was already ordered."""
        if math.isfinite(self._stop_by_s):
            return
        self._stop_by_s = now_s + self.config.restart.stop_s
        self._fleet.signal(self.generation, signal.SIGTERM)

    def _watch(self, now_s: float) -> None:
        """Look for failures, and act on the first one."""
        if now_s < self._next_scan_s and math.isinf(self._first_end_s):
            return
        self._next_scan_s = now_s + self._fleet.num_ranks / _LOOKS_PER_S
        if self._has_lost(now_s):
            return
        failure = failures.of_ranks(
            self._fleet.states(),
            [self.host_of(rank) for rank in range(self._fleet.num_ranks)],
            age_s=now_s - self._since_s,
            since_end_s=now_s - self._first_end_s,
            are_heard=self._fleet.are_heard_since(self._first_end_s),
        )
        if failure:
            self._fail(failure, now_s)
            return
        hanging = self._hanging(now_s)
        if hanging:
            self._enter(State.STACKS, now_s)
            self._hangs.ask(hanging, self.generation, now_s)
            return
        self._checks.repeat(now_s)
        for host, why in self._checks.watch(now_s):
            if host.name not in self._draining:
                self.drain(host.name, why, now_s, HostState.SICK)
        self._grow(now_s)

    def _has_lost(self, now_s: float) -> bool:
        """End the generation if a host with ranks is lost; return whether it did so."""
        lost = self._fleet.lost(now_s)
        if lost:
            limit_s = self.config.restart.lost_s
            self._fail(failures.of_silence(lost, limit_s), now_s)
        return bool(lost)

    def _hanging(self, now_s: float) -> dict[int, str]:
        """Return the ranks that should have progressed or ended by now, and why."""
        limits, restart = self.config.limits, self.config.restart
        exit_s, stop_s = limits.exit_s, restart.stop_s
        exit_by_s = self._first_end_s + exit_s
        others = f"{exit_s:g} s after the first rank (--limits.exit-s)"
        order = f"{stop_s:g} s after the order to stop (--restart.stop-s)"
        ends_by = min((self._stop_by_s, order), (exit_by_s, others))
        has_ended = math.isfinite(self._first_end_s)
        return self._hangs.find(now_s, ends_by, has_ended=has_ended)

    def _judge(self, now_s: float) -> None:
        """Find the ranks that block the run, unless it has progressed meanwhile."""
        hanging = self._hanging(now_s)
        if not hanging:
            self._tell(
                "hang_over", "the ranks went on or ended by themselves", "warning"
            )
            self._enter(State.RUNNING, now_s)
            return
        failure, evidence = self._hangs.judge(hanging)
        self._tell("stacks", failure.text, "error", data=evidence)
        self._fail(failure, now_s)

    def _fail(self, failure: Failure, now_s: float) -> None:
        """End the generation; choose the next action when all ranks have ended."""
        failure = failures.explained(failure, self._fleet.matches(now_s - _EXPLAINS_S))
        self._failure = failure
        if failure.cause is not Cause.DONE:
            text, severity = f"{failure.cause}: {failure.text}", "error"
            if failure.cause is Cause.PREEMPTED:
                # Nothing failed. If this driver did not tell the ranks to save, they
                # were stopped from outside, which the user may not expect.
                is_ordered = math.isfinite(self._stop_by_s)
                severity = "info" if is_ordered else "warning"
                text += "" if is_ordered else ", after a signal from outside"
            self._tell("failure", text, severity, **failure.fields())
        self._stop_ranks(now_s)

    def _stop_ranks(self, now_s: float) -> None:
        self._enter(State.STOPPING, now_s)
        self._until_s = now_s + self.config.restart.kill_s
        self._fleet.signal(self.generation, signal.SIGKILL)
        self._wait_for_ends(now_s)

    def _wait_for_ends(self, now_s: float) -> None:
        lost = self._fleet.lost(now_s)
        alive = [rank for rank in self._fleet.alive() if self.host_of(rank) not in lost]
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
            self._fleet.evict(self.hosts[name], why, HostState.LOST)
        self._decide(self._failure, now_s)

    def _decide(self, failure: Failure, now_s: float) -> None:
        """Apply the policy to a failure."""
        self._times.ended(
            self._fleet.states(),
            lambda rank: self._fleet.silent_s(rank, now_s),
            now_s,
        )
        rule = policy.TABLE[failure.cause]
        if self._is_asked_to_stop and failure.cause is not Cause.DONE:
            self._end(Cause.PREEMPTED, now_s)
            return
        for name, (reason, state) in self._draining.items():
            self._let_go(self.hosts[name], reason, state)
        self._draining = {}
        if failure.cause is Cause.BAD_INPUT and self._take_back():
            text = f"the update is taken back: {failure.text}"
            self._tell("update", text, "error")
            self._pause(now_s)
            return
        size = len(self.placement)
        if failure.cause is Cause.BAD_INPUT and self._sizes.discard(size):
            text = f"{size} hosts do not fit: {failure.text}"
            self._tell("shrink", text, "warning")
            self._pause(now_s)
            return
        if rule.action is Action.END:
            self._end(failure.cause, now_s)
            return
        if rule.action is Action.EVICT:
            state = HostState.EVICTED
            if self.config.return_command and failure.cause in policy.OF_HARDWARE:
                state = HostState.SICK
            for host in self._fleet.active(failure.hosts):
                self._fleet.evict(host, failure.text, state)
        self._restarts.end(failure.cause, self.generation)
        why = self._restarts.why_useless
        if not why and rule.action is Action.ROLL_BACK:
            why = self.rollbacks.go_back(failure.diverged)
            self._restarts.go_back(self.rollbacks.to)
        if why:
            self._give_up(f"{why}; the last: {failure.cause}: {failure.text}", now_s)
            return
        if rule.action is Action.CHECK and self._suspects(failure, now_s):
            return
        self._pause(now_s)

    def _suspects(self, failure: Failure, now_s: float) -> bool:
        """Replace or check the suspects; return whether a check must finish first.

        If the cause names no single host and there are spares for all suspects, the
        suspects are replaced immediately, and checked while the run continues. This
        also applies to hosts that were suspected before, if the run has saved nothing
        since.
        """
        # If no host is known to be the cause, any host may be.
        names = failure.hosts or failure.suspects or self.placement
        hosts = self._fleet.active(names)
        names = sorted(host.name for host in hosts)
        is_again = self._restarts.num_fruitless > 1 and self._suspected >= {*names}
        self._suspected = {*names}
        is_group = len(names) > 1 and bool(self._checks.command)
        if (is_again or is_group) and len(names) <= self._fleet.num_spares(now_s):
            for host in hosts:
                self._fleet.evict(host, failure.text, HostState.SICK)
            return False
        if not self._checks.command:
            return False
        self._tell("check", f"{Action.CHECK}: {', '.join(names)}")
        self._enter(State.CHECKING, now_s)
        self._checks.begin(names, now_s)
        return True

    def _pause(self, now_s: float) -> None:
        """Start the next generation after a pause."""
        pause_s = self._restarts.pause_s
        text = f"the next generation in {pause_s:g} s"
        self._tell("restart", text, data={"pause_s": pause_s})
        self._enter(State.PAUSING, now_s)
        self._until_s = now_s + pause_s
        self.tick(now_s)

    def _give_up(self, why: str, now_s: float) -> None:
        self._tell("gave_up", f"gave up: {why}", "error")
        self._end(Cause.GAVE_UP, now_s)

    def _end(self, cause: Cause, now_s: float) -> None:
        self.exit_code = code = policy.EXIT_CODES[cause]
        self._enter(State.ENDED, now_s)
        text = f"the run ended with {code}"
        if cause is Cause.PREEMPTED:
            text = f"stopped as requested, exit code {code}; the same command resumes"
        self._tell("end", text, data={"code": code})
        for name in self.hosts:
            self._send(name, Quit())

    @property
    def placement(self) -> list[str]:
        """Active hosts, in the order of their ranks."""
        return self._fleet.placement

    def host_of(self, rank: int) -> str:
        """Return the host of a rank of the current generation."""
        return self._fleet.host_of(rank)

    @property
    def saved_step(self) -> int:
        """The newest step known to be saved; -1 if there is none."""
        return self._restarts.saved_step

    def is_lost(self, name: str, now_s: float) -> bool:
        """Return whether a host is unknown or has been silent for too long."""
        return name not in self.hosts or self._fleet.is_lost(name, now_s)

    def _enter(self, state: State, now_s: float) -> None:
        self._tell("state", state, "debug")
        self.state, self._since_s, self._until_s = state, now_s, math.inf
